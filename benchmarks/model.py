"""The cost model held to account: what it says of all-reduces between machines, and what they take.

    python benchmarks/model.py [--json FILE] [--layouts 2x1,2x2] [--mbit 1000] [--seconds 60]

Needs root, iproute2 and Open MPI. The machines are network namespaces on this one
(`tests/netns/namespaces.py`), their links shaped to 1 Gbit/s in either direction, or to `--mbit`:
on a slow line messages take long beside the programs of all machines, which share this one's cores.
Layouts are machines x ranks on each; the file of `--json` keeps those of earlier runs that are not
made again. A job of each layout measures the links as `python -m collectives tune` does, goes by
them, and then times whole calls at all `SIZES`, by "auto" and by every algorithm, in turns, so that
other work on this machine meets all of them. A row is one layout and one size; "auto" is right
there if what it does takes at most 10 % more than the fastest call. That is timed twice, as "auto"
and by its name, and the better time counts, so that one disturbance is no wrong choice; what
travels with the comparison has no name. A time is the slowest rank's, arrays are reduced in place.
In the end all of it is simulated over the links that were measured; the simulation gives each rank
a core. How far off it was is printed by size, and for long arrays by algorithm.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "netns")]

SIZES = [512, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]

# Bytes from which on errors are told apart by algorithm: the line counts there, not the programs.
LONG = 256 << 10

# What is promised: the share of rows in which "auto" takes at most `NEAR` times the fastest's time.
NEAR, REACH = 1.1, 0.95

# Seconds of a job beyond those that it may measure.
JOB_SECONDS = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--layouts", default="2x1,2x2,4x1,4x2,8x1,8x2", help="machines x ranks")
    parser.add_argument("--mbit", type=int, default=1000, help="rate of the links, Mbit/s")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each layout, roughly")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank_main(options.seconds)

    from namespaces import NamespaceCluster, why_not

    reason = why_not()
    if reason is not None:
        print(f"benchmarks/model.py: {reason}", file=sys.stderr)
        return 1
    kept = options.json is not None and options.json.exists()
    layouts = json.loads(options.json.read_text())["layouts"] if kept else []
    for machines, ranks in (map(int, each.split("x")) for each in options.layouts.split(",")):
        with NamespaceCluster(machines) as cluster:
            job = cluster.run(
                ranks, __file__, "--rank", "--seconds", str(options.seconds),
                timeout=options.seconds + JOB_SECONDS, shape=f"{options.mbit}mbit",
            )  # fmt: skip
        if job.status != 0:
            print(job.stdout + job.stderr, file=sys.stderr)
            return 1
        named = {"machines": machines, "ranks_per_machine": ranks, "mbit": options.mbit}
        layouts = [old for old in layouts if not named.items() <= old.items()]
        layouts.append(named | json.loads(job.stdout))
        print(table(layouts[-1]), flush=True)
    print(accuracy(layouts))
    behind = [size["behind"] for layout in layouts for size in layout["sizes"]]
    near = sum(ratio <= NEAR for ratio in behind) / len(behind)
    said = "reached" if near >= REACH else "MISSED"
    print(
        f"auto within {NEAR:g} x of the fastest in {100 * near:.0f} % of {len(behind)} rows, at "
        f"worst {max(behind):.2f} x; goal {100 * REACH:g} %: {said}"
    )
    if options.json:
        facts = {"machine": platform.platform(), "cores": os.cpu_count(), "layouts": layouts}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def table(layout: dict[str, Any]) -> str:
    rows = [f"{layout['machines']} machines x {layout['ranks_per_machine']} ranks", layout["links"]]
    for size in layout["sizes"]:
        times = ", ".join(
            f"{name} {1e3 * took:.3f} ({1e3 * said:.3f})" for name, said, took in size["times"]
        )
        rows.append(f"{size['bytes']:>9}  {size['auto']:<13}{size['behind']:5.2f}  ms: {times}")
    return "\n".join(rows)


def accuracy(layouts: list[dict[str, Any]]) -> str:
    """Simulate what was measured, over the links that were; say how far off the simulation is."""
    from collectives.links import Link, Machine
    from collectives.operations import compare
    from collectives.simulation import calls
    from collectives.simulation.cluster import Cluster

    errors: dict[str, list[float]] = {"all": []}
    for layout in layouts:
        machine = Machine(*(Link(*link) for link in layout["machine"]))
        ranks = layout["machines"] * layout["ranks_per_machine"]
        cluster = Cluster(ranks, layout["machines"], machine)
        before = compare.seconds(0, cluster.layout)
        for size in layout["sizes"]:
            took = {name: time for name, _, time in size["times"] if name != "auto"}
            where = f"{layout['machines']} x {layout['ranks_per_machine']}, {size['bytes']} bytes"
            size["simulated"] = {}
            for name, time in took.items():
                simulated = calls.seconds("allreduce", name, size["bytes"], cluster)
                size["simulated"][name] = before + simulated
                error = abs((before + simulated) / time - 1)
                errors["all"].append(error)
                errors.setdefault(where, []).append(error)
                if size["bytes"] >= LONG:
                    errors.setdefault(f"{name}, {LONG >> 10} KiB and more", []).append(error)
    return "\n".join(
        f"simulated, {what}: median error {100 * statistics.median(several):.0f} %, worst "
        f"{100 * max(several):.0f} %, of {len(several)} calls"
        for what, several in errors.items()
    )


def rank_main(seconds: float) -> int:
    """Measure one layout as one of its ranks; rank 0 prints what was found."""
    import numpy as np
    from mpi4py import MPI

    import collectives as cc
    from collectives import communicator, settings, tuned
    from collectives.algorithms import selection
    from collectives.links import table as table_of
    from collectives.operations import compare
    from collectives.tools import measure

    world = cc.init()
    clock = measure.Clock(world)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "links.json"
        found = measure.measure(clock, seconds / 3)
        if world.rank == 0:
            tuned.write(file, found, {})
        chosen = replace(settings.from_environment(), tuned=str(file))  # rank 0's counts
        comm = communicator.from_mpi(MPI.COMM_WORLD, chosen)
        comm.barrier()
    sizes = []
    for nbytes in SIZES:
        buffer = np.zeros(nbytes // 4, np.float32)

        def call(algorithm, buffer=buffer):
            how = {"op": cc.MAX, "out": buffer, "algorithm": algorithm}
            return measure.Case(lambda deadline: comm.allreduce(buffer, **how))

        compared = compare.seconds(0, comm.layout)
        times = selection.estimate("allreduce", nbytes, comm.layout)
        said = {name: compared + took for name, took in times.items()}
        carried = nbytes <= compare.most(comm.layout)
        picked = selection.pick("allreduce", nbytes, comm.layout)
        said["auto"] = compare.seconds(nbytes, comm.layout) if carried else said[picked]
        cases = {name: call(name) for name in said}
        took = clock.times(cases, 2 * seconds / 3 / len(SIZES))
        same = took["auto"] if carried else min(took["auto"], took[picked])
        sizes.append(
            {
                "bytes": nbytes,
                "auto": "letters" if carried else picked,
                "behind": same / min(took.values()),
                "times": [(name, said[name], took[name]) for name in sorted(took, key=took.get)],
            }
        )
    if comm.rank == 0:
        links = table_of(comm.settings.links).replace(str(file), "measured")
        machine = [list(link) for link in comm.settings.links.machine]
        print(json.dumps({"links": links, "machine": machine, "sizes": sizes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
