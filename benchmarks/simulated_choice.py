"""What "auto" picks on simulated machines, held against everything that it could have picked.

    python benchmarks/simulated_choice.py [--rows 120] [--from 0] [--json FILE] [--picture FILE]

A row is an operation, a number of machines and of ranks on each, bytes, and a link, drawn with a
seed out of 16 to 1,024 machines (no power of two among them as often as one), 1 to 8 ranks, 8 B to
256 MiB, 1 to 200 Gbit/s and 2 to 50 us. Every algorithm whose closed form says that it takes up to
twice the fastest one's time is simulated. Where "auto" lets the array travel with the comparison of
the call ("together"), that is what it picks, and all others have the comparison before them. The
pick is right if it takes at most 10 % more than the fastest. A row is contested where something
else was simulated beside the pick; the others show only that the closed forms leave no choice. A
simulation is given up after `--within` real seconds; a row counts only where the
pick has come to its end, and an algorithm that was given up counts as slower where its clock had
passed the pick's time. Rows that the file of `--json` has from an earlier run are not made again,
but for those that were given up.

`--aims` simulates instead what is promised of 1,024 machines with 100 Gbit/s and 5 us, and what the
largest simulation itself takes. `--picture` draws instead the share of the line that each algorithm
reaches there for 100 MB on 16 to 1,024 machines.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

from collectives.algorithms import selection
from collectives.calls import signature_check
from collectives.core.links import DEFAULT, LinkCost
from collectives.simulation import calls
from collectives.simulation.clock import Stopped
from collectives.simulation.cluster import SimulatedCluster
from collectives.tools import explain, plot
from collectives.tools.explain import Question

OPERATIONS = ["allreduce", "allreduce", "broadcast", "reduce", "reduce_scatter", "allgather"]
MACHINES = [16, 17, 24, 64, 100, 129, 256, 500, 1000, 1024]
RANKS = [1, 2, 4, 8]
SIZES = [8, 512, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 32 << 20, 256 << 20]
GIGABITS = [1, 10, 25, 100, 200]
LATENCIES = [2e-6, 5e-6, 2e-5, 5e-5]
GAMMA = 3.3e-11

# Of the aims: bytes, and seconds of a message.
LARGE, LATENCY = 100_000_000, 5e-6

NEAR, REACH = 1.1, 0.95
WORTH_A_TRY = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=120)
    parser.add_argument("--from", dest="first", type=int, default=0, help="number of the first row")
    parser.add_argument("--within", type=float, default=8.0, help="seconds for one simulation")
    parser.add_argument("--json", type=Path, help="adds its figures to this file")
    parser.add_argument("--picture", type=Path, help="shares of the line, with matplotlib")
    parser.add_argument("--aims", action="store_true")
    options = parser.parse_args()
    figures = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    if options.aims:
        figures["aims"] = aims()
    elif options.picture is not None:
        figures["shares of the line"] = shares()
        draw(figures["shares of the line"], options.picture)
    else:
        figures.setdefault("rows", {})
        for number in range(options.first, options.first + options.rows):
            if figures["rows"].get(str(number), {}).get("behind") is not None:
                continue
            figures["rows"][str(number)] = row(number, options.within)
            print(number, json.dumps(figures["rows"][str(number)]), flush=True)
            if options.json:  # also if it is stopped before the last row
                options.json.write_text(json.dumps(figures, indent=1) + "\n")
        print(verdict(list(figures["rows"].values())))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def cluster_of(machines: int, ranks: int, gigabits: float, latency: float) -> SimulatedCluster:
    network = LinkCost(latency, 8e-9 / gigabits, GAMMA)
    return SimulatedCluster(machines * ranks, machines, DEFAULT._replace(network=network))


def row(number: int, within: float) -> dict[str, Any]:
    """Simulate one row; its pick is right if "behind" is at most 1.1."""
    drawn = random.Random(number)
    question = {
        "operation": drawn.choice(OPERATIONS),
        "machines": drawn.choice(MACHINES),
        "ranks": drawn.choice(RANKS),
        "bytes": drawn.choice(SIZES),
        "gigabits": drawn.choice(GIGABITS),
        "latency": drawn.choice(LATENCIES),
    }
    operation, machines, ranks, nbytes, gigabits, latency = question.values()
    cluster = cluster_of(machines, ranks, gigabits, latency)
    pick, least = explain.pick(Question(operation, nbytes), cluster.layout)
    compared = signature_check.seconds(0, cluster.layout)
    estimates = {
        name: compared + seconds
        for name, seconds in selection.estimate(operation, nbytes, cluster.layout).items()
    }
    names = [pick, *(n for n in estimates if n != pick and estimates[n] <= WORTH_A_TRY * least)]
    by_nodes = signature_check.per_node(cluster.layout)
    seconds: dict[str, float] = {}
    before = 0.0
    for name in names:
        if name != "together" and not before:
            before = calls.simulate_sequence(0, cluster, by_nodes=by_nodes)
        try:
            if name == "together":
                seconds[name] = calls.simulate_sequence(
                    nbytes, cluster, by_nodes=by_nodes, within=within
                )
            else:
                took = calls.seconds(operation, name, nbytes, cluster, within=within)
                seconds[name] = before + took
        except Stopped as stopped:
            if pick not in seconds:
                return {**question, "pick": pick, "behind": None}
            if before + stopped.reached < seconds[pick]:
                return {**question, "pick": pick, "behind": None}  # it may be faster
    return {
        **question,
        "pick": pick,
        "behind": seconds[pick] / min(seconds.values()),
        "ms": {name: 1e3 * took for name, took in seconds.items()},
    }


def verdict(rows: list[dict[str, Any]]) -> str:
    ended = [row for row in rows if row["behind"] is not None]
    contested = [row["behind"] for row in ended if len(row["ms"]) > 1]
    if not contested:
        return "no row in which there was a choice has come to its end"
    near = sum(ratio <= NEAR for ratio in contested)
    share = near / len(contested)
    said = "reached" if share >= REACH else "MISSED"
    alone = len(ended) - len(contested)
    return (
        f"within {NEAR:g} x of the fastest in {near} of {len(contested)} contested rows "
        f"({100 * share:.0f} %), at worst {max(contested):.2f} x; goal {100 * REACH:g} %: {said}; "
        f"{alone} rows where closed forms leave no choice ({100 * (near + alone) / len(ended):.0f} "
        f"% of all {len(ended)}); {len(rows) - len(ended)} rows too long"
    )


def aims() -> dict[str, Any]:
    """Simulate what is promised of 1,024 machines."""
    found: dict[str, Any] = {}
    tiny = 8
    machines = cluster_of(1024, 1, 100, LATENCY)
    line = 2 * 1023 / 1024 * LARGE * machines.machine.network.beta
    for name in ("halving", "double_tree"):
        took = calls.seconds("allreduce", name, LARGE, machines)
        found[f"100 MB, {name}, of the line"] = line / took
    took = calls.seconds("allreduce", selection.pick("allreduce", tiny, machines.layout), tiny,
                         machines)  # fmt: skip
    found["8 B, of 2 log2 P latencies"] = took / (2 * 10 * LATENCY)
    found["load before what follows"] = os.getloadavg()[0]
    for what, cluster, name, nbytes in (
        ("1,024 x 8, hierarchical, 64 MiB", cluster_of(1024, 8, 100, LATENCY), "hierarchical", 64),
        ("1,024 x 1, ring, 256 MiB", machines, "ring", 256),
    ):
        began, processor = time.perf_counter(), time.process_time()
        calls.seconds("allreduce", name, nbytes << 20, cluster)
        found[f"{what}: real seconds"] = time.perf_counter() - began
        found[f"{what}: processor seconds"] = time.process_time() - processor
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
        found[f"{what}: GiB at most until then"] = most
    for name, value in found.items():
        print(f"{name}: {value:.3g}", flush=True)
    return found


def shares() -> dict[str, dict[str, float]]:
    """Return for each algorithm the share of the line that it reaches, over the machines."""
    found: dict[str, dict[str, float]] = {}
    for machines in (16, 64, 256, 500, 1024):
        cluster = cluster_of(machines, 1, 100, LATENCY)
        line = 2 * (machines - 1) / machines * LARGE * cluster.machine.network.beta
        for name in ("ring", "halving", "double_tree", "tree"):
            try:
                took = calls.seconds("allreduce", name, LARGE, cluster, within=45.0)
            except Stopped:
                continue
            found.setdefault(name, {})[str(machines)] = line / took
            print(f"{name}, {machines} machines: {line / took:.3f}", flush=True)
    return found


def draw(found: dict[str, dict[str, float]], picture: Path) -> None:
    """Draw what `shares` has found."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, cells in found.items():
        reached = [100 * share for share in cells.values()]
        axes.semilogx([int(each) for each in cells], reached, "o-", label=name, base=2)
    axes.set_xlabel("machines")
    axes.set_ylabel("% of the line")
    axes.set_ylim(0, 102)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title("all-reduce of 100 MB, 100 Gbit/s, 5 us, simulated")
    plot.save(figure, picture)


if __name__ == "__main__":
    sys.exit(main())
