"""The cost model held to account: what it says of all-reduces between machines, and what they take.

    python benchmarks/model.py [--json FILE] [--layouts 2x1,2x2] [--mbit 1000] [--seconds 90]

Needs root, iproute2 and Open MPI. The machines are network namespaces on this one
(`tests/netns/namespaces.py`), their links shaped to 1 Gbit/s in either direction, or to `--mbit`:
on a slow line messages take long beside the programs of all machines, which share this one's cores.
Layouts are machines x ranks on each; the file of `--json` is written after each of them, and keeps
those of earlier runs that are not made again, at the same rate; with `--layouts ""` these are only
simulated again. A job of each layout measures the links as `python -m collectives tune` does, goes
by them, and then times whole calls at all `SIZES`, by "auto" and by every algorithm, in turns, so
that other work on this machine meets all of them. The kernel lets a line that was idle pass a burst
at once, of 16 KiB at 1 Gbit/s. Before each turn lines are idle for long enough to save that, and
calls of small arrays are timed several at a time; that, and what lines save within a call, is
simulated (`SimulatedCluster.burst`).

Before each layout it is measured how ranks wait that share a core (`shared_host.py`, half a
minute), and in its job, before and after every pass over the sizes, what a byte of a shaped line
costs the cores, alone and with all ranks in each other's way, and what Python takes for each
algorithm besides its messages (`simulation.overhead`): the simulation uses the medians.

All sizes are gone through `PASSES` times, and what a call takes is the median of its passes; how
far these are apart is how well a time repeats, and no prediction can be nearer (`plan_cache`: the
greatest over the least). What others use of the cores is measured in each pass. A pass in which
that was more than `BUSY` is made once more, and the least disturbed ones count.

A row is one layout and one size; "auto" is right there if what it does takes at most 10 % more than
the fastest call. That is timed twice, as "auto" and by its name, and the better time counts, so
that one disturbance is no wrong choice; what travels with the comparison has no name. A time is the
slowest rank's, arrays are reduced in place. All of it is simulated, too: whole calls, on the cores
that the ranks share, over links that two ranks have measured while the others slept. How far off
that was is printed for each layout and size, and for long arrays by algorithm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.algorithms import ring, selection, tree
from collectives.arrays.reduction import MAX, SUM
from collectives.calls import signature_check
from collectives.tools import plot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from collectives.algorithms.cost_model import RankLayout
    from collectives.communicator import Communicator, group_of
    from collectives.core.links import LinkCost, Machine

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "netns")]

SIZES = [512, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]

# Bytes from which errors are listed by algorithm, because the line dominates, not the programs.
LONG = 256 << 10

# What is promised: the share of rows in which "auto" takes at most `NEAR` times the fastest's time.
NEAR, REACH = 1.1, 0.95

# Of the simulation: median and greatest error that are wanted.
MEDIAN_ERROR, WORST_ERROR = 0.10, 0.25

# Of the time of a size, how much more a longer one gets: a call takes up to a second.
SHARES = [1, 1, 1, 1, 1, 2, 4, 6]

# Seconds of a job beyond those that it may measure.
JOB_SECONDS = 240.0

# The burst of a line (`namespaces`), up to 100 Mbit/s and beyond; of how many calls, or bytes, a
# time is the mean; and how often each is timed at least.
SLOW_BURST_BYTES, BURST_BYTES = 4 << 10, 16 << 10
MOST_CALLS, CALLS_BYTES = 8, 32 << 10
LEAST_ROUNDS = 3

# What ranks wait before a turn: several times as long as a line takes to save its burst.
PAUSE_SECONDS = 1e-3

# For how long two ranks that exchange arrays are watched, and bytes of such an array.
COPYING_SECONDS, COPIED_BYTES = 1.0, 4 << 20

# How often each size is measured, and how often more where the cores were not the job's own: others
# used more than a share of them.
PASSES, MORE_PASSES, BUSY = 5, 2, 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--layouts", default="2x1,2x2,4x1,4x2,8x1,8x2", help="machines x ranks")
    parser.add_argument("--mbit", type=int, default=1000, help="rate of the links, Mbit/s")
    parser.add_argument("--seconds", type=float, default=90.0, help="for each layout, roughly")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank_main(options.seconds)

    import shared_host

    from namespaces import NamespaceCluster, why_not

    wanted = [tuple(map(int, each.split("x"))) for each in options.layouts.split(",") if each]
    layouts = earlier(options.json, [(options.mbit, *each) for each in wanted])
    if not wanted and not layouts:
        sys.exit("benchmarks/model.py: expected --layouts, or a --json of an earlier run")
    reason = why_not() if wanted else None
    if reason is not None:
        sys.exit(f"benchmarks/model.py: {reason}")
    for layout in layouts:
        if layout.keys() >= SIMULATED:
            simulate(layout)
    write(options.json, layouts)
    for machines, ranks in wanted:
        host = shared_host.measured()
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
        burst = BURST_BYTES if options.mbit > 100 else SLOW_BURST_BYTES
        measured = named | {"burst": burst} | json.loads(job.stdout)
        measured["waits"] = shared_host.waits(host, yields=not measured["polls"])
        layouts.append(measured)
        write(options.json, layouts)  # also if what follows fails
        simulate(measured)
        print(table(measured), flush=True)
        write(options.json, layouts)
    print(accuracy(layouts))
    print(choices(layouts))
    return 0


NAMES = ("mbit", "machines", "ranks_per_machine")

# What has to be known of a layout that is simulated.
SIMULATED = {*NAMES, "burst", "pairs", "waits", "copying", "python"}


def earlier(file: Path | None, again: Sequence[tuple[int, ...]]) -> list[dict[str, Any]]:
    """Return the layouts of an earlier run, which are written again: none may be lost.

    Those that say too little to be simulated are there until they are measured `again`, by `NAMES`.
    """
    if file is None or not file.exists():
        return []
    layouts: list[dict[str, Any]] = json.loads(file.read_text())["layouts"]
    kept = [each for each in layouts if tuple(each[name] for name in NAMES) not in again]
    if lacks := {name for each in kept for name in SIMULATED - each.keys()}:
        sys.exit(
            f"benchmarks/model.py: expected layouts that this version can simulate, but {file} is "
            f"of an earlier one, which did not measure {', '.join(sorted(lacks))}; name another"
        )
    return layouts


def write(file: Path | None, layouts: list[dict[str, Any]]) -> None:
    """Write all figures, if a file is named."""
    layouts.sort(key=lambda each: [each[name] for name in NAMES])
    facts = {"machine": platform.platform(), "cores": os.cpu_count(), "layouts": layouts}
    if file is not None:
        file.write_text(json.dumps(facts, indent=1) + "\n")


def spent() -> tuple[float, float]:
    """Return the seconds that all programs of this machine have had cores for, and this one has."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, *interrupts, steal = map(int, file.readline().split()[1:9])
    ticks = user + nice + system + sum(interrupts) + steal
    return ticks / os.sysconf("SC_CLK_TCK"), time.process_time()


def table(layout: dict[str, Any]) -> str:
    rows = [f"{layout['machines']} machines x {layout['ranks_per_machine']} ranks", layout["links"]]
    for size in layout["sizes"]:
        times = ", ".join(
            f"{name} {1e3 * took:.3f} ({1e3 * said:.3f}, {1e3 * size['simulated'][name]:.3f})"
            for name, said, took in size["times"]
        )
        apart = max(size["repeats"].values())
        rows.append(
            f"{size['bytes']:>9}  {size['auto']:<13}{size['behind']:5.2f}  others use "
            f"{100 * size['others']:.0f} %, passes up to {apart:.2f}x apart, ms: {times}"
        )
    return "\n".join(rows)


def simulate(layout: dict[str, Any]) -> None:
    """Simulate what was measured, over the links that were."""
    from collectives.core.links import LinkCost, Machine
    from collectives.simulation import calls
    from collectives.simulation.cluster import SimulatedCluster
    from collectives.simulation.cpu_scheduler import WaitingRank, WaitKinds

    machine = Machine(*(LinkCost(*link) for link in layout["pairs"]))
    machines = layout["machines"]
    cluster = SimulatedCluster(
        machines * layout["ranks_per_machine"],
        machines,
        machine,
        burst=layout["burst"],
        cores=layout["cores"],
        nodes_per_host=machines,
        waits=WaitKinds(*(WaitingRank(*each) for each in layout["waits"])),
        copying=layout["copying"],
        together=layout.get("together"),  # not known of layouts that were measured before
    )
    by_nodes = signature_check.per_node(cluster.layout)
    python = layout["python"]
    for size in layout["sizes"]:
        how = {"by_nodes": by_nodes, "calls": several(size["bytes"])}
        names = {name for name, _, _ in size["times"]} - {"auto"}
        found = {
            name: calls.simulate_check(name, size["bytes"], cluster, python=python[name], **how)
            for name in names
        }
        carried = size["auto"] == "eager"
        found["auto"] = (
            calls.simulate_check(None, size["bytes"], cluster, **how)
            if carried
            else found[size["auto"]]
        )
        size["simulated"] = found


def accuracy(layouts: list[dict[str, Any]]) -> str:
    """Say how far off the simulation is."""
    errors: dict[str, list[float]] = {"all": []}
    within = 0
    for layout in layouts:
        ranks = f"{layout['machines']} x {layout['ranks_per_machine']}, {layout['mbit']} Mbit/s"
        for size in layout["sizes"]:
            for name, _, took in size["times"]:
                ratio, apart = size["simulated"][name] / took, size["repeats"][name]
                error = abs(ratio - 1)
                within += 1 / apart <= ratio <= apart
                whats = ["all", ranks, f"{ranks}, {size['bytes']} bytes"]
                if size["bytes"] >= LONG:
                    whats.append(f"{name}, {LONG >> 10} KiB and more")
                for what in whats:
                    errors.setdefault(what, []).append(error)
    everything = errors["all"]
    median, worst = statistics.median(everything), max(everything)
    said = "reached" if median <= MEDIAN_ERROR and worst <= WORST_ERROR else "MISSED"
    rows = [
        f"simulated, {what}: median error {100 * statistics.median(several):.0f} %, worst "
        f"{100 * max(several):.0f} %, of {len(several)} calls"
        for what, several in errors.items()
    ]
    near = sum(error <= WORST_ERROR for error in everything) / len(everything)
    goal = f"goal {100 * MEDIAN_ERROR:g} % and {100 * WORST_ERROR:g} % at worst: {said}"
    more = (
        f"{100 * near:.0f} % of {len(everything)} calls are within {100 * WORST_ERROR:g} %; "
        f"{within} are no farther off than their passes are apart"
    )
    return "\n".join([*rows, goal, more])


def choices(layouts: list[dict[str, Any]]) -> str:
    """Say in how many rows "auto" was right."""
    behind = [size["behind"] for layout in layouts for size in layout["sizes"]]
    near = sum(ratio <= NEAR for ratio in behind) / len(behind)
    said = "reached" if near >= REACH else "MISSED"
    return (
        f"auto within {NEAR:g} x of the fastest in {100 * near:.0f} % of {len(behind)} rows, at "
        f"worst {max(behind):.2f} x; goal {100 * REACH:g} %: {said}"
    )


def draw(layouts: list[dict[str, Any]], picture: Path) -> None:
    """Draw how far off every call is simulated, over the time that it took."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for layout in layouts:
        calls = [
            (1e3 * took, size["simulated"][name] / took)
            for size in layout["sizes"]
            for name, _, took in size["times"]
        ]
        label = f"{layout['machines']} x {layout['ranks_per_machine']}"
        axes.semilogx(*zip(*calls, strict=True), "o", ms=3, label=label)
    for ratio, style in ((1 - WORST_ERROR, ":"), (1, "-"), (1 + WORST_ERROR, ":")):
        axes.axhline(ratio, color="gray", linestyle=style)
    axes.set(xlabel="measured, ms", ylabel="simulated over measured", ylim=0)
    axes.set_title("all-reduces between machines x ranks, by auto and all algorithms")
    axes.grid(alpha=0.3)
    axes.legend()
    plot.save(figure, picture)


def several(nbytes: int) -> int:
    """Return how many calls a time is the mean of."""
    return max(1, min(MOST_CALLS, CALLS_BYTES // nbytes))


def timed(
    comm: Communicator, cases: dict[str, Callable[[], object]], nbytes: int, seconds: float
) -> dict[str, float]:
    """Return what calls take, of the slowest rank: the first quartile, since others only add."""
    transport, deadline = group_of(comm).transport, group_of(comm).deadline("model")
    together = several(nbytes)
    found: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():
        case()  # connects the ranks and touches the memory
    began, rounds = time.perf_counter(), 0
    while rounds < LEAST_ROUNDS or comm.broadcast(np.array(time.perf_counter() - began)) < seconds:
        rounds += 1
        for name, case in cases.items():
            time.sleep(PAUSE_SECONDS)
            tree.barrier(transport, deadline)  # all begin at once
            start = time.perf_counter()
            for _ in range(together):
                case()
            spent = np.array((time.perf_counter() - start) / together)
            found[name].append(float(comm.allreduce(spent, op=MAX)))
    return {name: sorted(each)[len(each) // 4] for name, each in found.items()}


def by_pairs(comm: Communicator, seconds: float) -> Machine:
    """Measure links between two ranks while the others sleep, so that each has a core."""
    from collectives.core import links
    from collectives.tools import measure

    found: dict[str, LinkCost] = {}
    for two in (between_machines(comm), inside_a_machine(comm)):
        with as_part(comm, two) as pair:
            if pair is not None:
                found |= measure.measure(measure.MeasuringClock(pair), seconds)
    found = comm.broadcast_object(found)
    changes = {name: link._asdict() for name, link in found.items()}
    return links.with_overrides(links.defaults(), changes, "measured").machine


def between_machines(comm: Communicator) -> tuple[int, ...]:
    """Return rank 0 and the first one of another machine."""
    return 0, comm.allgather([comm.node_rank]).tolist().index(1)


def inside_a_machine(comm: Communicator) -> tuple[int, ...]:
    """Return rank 0 and the next one of its machine; none if it does not exist."""
    return (0, 1) if comm.allgather([comm.node_rank])[1] == 0 else ()


@contextlib.contextmanager
def as_part(comm: Communicator, ranks: Sequence[int]) -> Iterator[Communicator | None]:
    """Give some ranks a communicator of their own, for whose time the others sleep."""
    chosen = comm.split(0 if comm.rank in ranks else None)
    with chosen or contextlib.nullcontext():
        yield chosen
    comm.barrier()


def copying(comm: Communicator) -> float:
    """Return the seconds of a core that a byte between machines costs each of its two programs.

    By what all cores do while every machine sends an array and receives one, beyond what they do
    while all sleep: where many lines are in use at once, a byte costs up to twice of what it does
    on one. A rank looks for its messages seldom, so that waiting costs little.
    """
    size, machines = comm.size, comm.num_nodes
    taken = copied = 0.0
    with as_part(comm, range(0, size, size // machines)) as leaders:
        if leaders is not None:
            (idle, _), began = spent(), time.perf_counter()
            time.sleep(COPYING_SECONDS)
            idle = (spent()[0] - idle) / (time.perf_counter() - began)
            began = time.perf_counter()
            exchange(leaders)
            most = leaders.allreduce(np.array(time.perf_counter() - began), op=MAX)
            (before, _), began = spent(), time.perf_counter()
            for _ in range(exchanges := 1 + int(COPYING_SECONDS / most)):
                exchange(leaders)
            leaders.barrier()
            taken = spent()[0] - before - idle * (time.perf_counter() - began)
            copied = float(exchanges * machines * COPIED_BYTES)
    return float(comm.broadcast(np.array(max(0.0, taken) / max(1.0, 2 * copied))))


def exchange(leaders: Communicator) -> None:
    """Send an array to the next and receive one from the last, with a look in every millisecond."""
    transport, deadline = group_of(leaders).transport, group_of(leaders).deadline("model")
    after, before = ((leaders.rank + step) % leaders.size for step in (1, -1))
    sent, received = np.zeros(COPIED_BYTES, np.uint8), np.empty(COPIED_BYTES, np.uint8)
    pending = [transport.start_receive(received, before), transport.start_send(sent, after)]
    while pending := [message for message in pending if not message.done()]:
        deadline.check(transport, pending, transport.blocking_rank)
        time.sleep(1e-3)


def together(comm: Communicator) -> float:
    """Return the seconds that a byte takes of all cores for each program, where all ranks send.

    Measured by exchanges in which ranks wait as in calls, and so disturb each other. If the lines
    take longer than the cores, it is the time of the lines, which disturbs no rank.
    """
    away = comm.size // comm.num_nodes
    after, before = ((comm.rank + step) % comm.size for step in (away, -away))
    sent, received = (ring.slices(np.zeros(COPIED_BYTES, np.uint8)) for _ in range(2))

    def seconds(times: int) -> float:
        tree.barrier(group_of(comm).transport, group_of(comm).deadline("model"))
        began = time.perf_counter()
        for _ in range(times):
            ring.exchange(
                group_of(comm).transport,
                sent,
                after,
                received,
                before,
                group_of(comm).deadline("model"),
            )
        return float(comm.allreduce(np.array(time.perf_counter() - began), op=MAX))

    times = 1 + int(COPYING_SECONDS / seconds(1))
    return seconds(times) / (2 * times * comm.size * COPIED_BYTES)


def by_python(comm: Communicator) -> dict[str, list[float]]:
    """Return what each algorithm takes of each rank's processor, besides its messages."""
    from collectives.simulation import overhead
    from collectives.simulation.cluster import SimulatedCluster

    leaders = SimulatedCluster(comm.size, comm.num_nodes).leaders()
    names = selection.estimate("allreduce", 4, group_of(comm).layout)
    found = {}
    if comm.rank == 0:
        found = {name: overhead.seconds(name, group_of(comm).layout, leaders) for name in names}
    comm.barrier()
    return found


def rank_main(seconds: float) -> int:
    """Measure one layout as one of its ranks; rank 0 prints what was found."""
    import collectives as cc
    from collectives import communicator
    from collectives.core import settings, tuning_file
    from collectives.core.links import table as table_of
    from collectives.tools import measure

    world = cc.init()
    from mpi4py import MPI  # not before: importing it starts MPI, without the settings of `launch`

    clock = measure.MeasuringClock(world)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "links.json"
        found = measure.measure(clock, seconds / 5)
        told = [costs(world, seconds / 60)]
        if world.rank == 0:
            tuning_file.write(file, found, {})
        chosen = replace(settings.from_environment(), tuned=str(file))  # rank 0's counts
        comm = communicator.from_mpi(MPI.COMM_WORLD, chosen)
        comm.barrier()
    passes: list[dict[int, tuple[float, dict[str, float]]]] = []
    for number in range(PASSES + MORE_PASSES):
        missing = [nbytes for nbytes in SIZES if not enough(nbytes, passes)]
        if number >= PASSES and not missing:
            break
        chosen = SIZES if number < PASSES else missing
        passes.append({nbytes: one_pass(comm, nbytes, seconds) for nbytes in chosen})
        told.append(costs(world, seconds / 60))
    sizes = [row(comm, nbytes, passes) for nbytes in SIZES]
    if comm.rank == 0:
        links = table_of(comm.settings.links).replace(str(file), "measured")
        machine = [list(link) for link in comm.settings.links.machine]
        polls = os.environ.get("OMPI_MCA_mpi_yield_when_idle") != "1"  # noqa: SIM112
        facts = {"polls": polls, "cores": len(os.sched_getaffinity(0)), **median(told)}
        print(json.dumps({"links": links, "machine": machine, **facts, "sizes": sizes}))
    return 0


def costs(comm: Communicator, seconds: float) -> dict[str, Any]:
    """Return the present cost of messages, as the simulation takes it."""
    return {
        "pairs": by_pairs(comm, seconds),
        "copying": copying(comm),
        "together": together(comm),
        "python": by_python(comm),
    }


def median(several: Sequence[Any]) -> Any:
    """Return the medians of numbers in equal structures."""
    first = several[0]
    if isinstance(first, dict):
        return {key: median([each[key] for each in several]) for key in first}
    if isinstance(first, list | tuple):
        return [median(each) for each in zip(*several, strict=True)]
    return statistics.median(several)


def enough(nbytes: int, passes: list[dict[int, tuple[float, dict[str, float]]]]) -> bool:
    """Return whether a size has enough passes in which other programs used few cores."""
    return sum(each[nbytes][0] <= BUSY for each in passes if nbytes in each) >= PASSES


def one_pass(comm: Communicator, nbytes: int, seconds: float) -> tuple[float, dict[str, float]]:
    """Return what others used of the cores, and what whole calls took meanwhile."""
    buffer = np.zeros(nbytes // 4, np.float32)

    def call(algorithm: str) -> Callable[[], object]:
        how: dict[str, Any] = {"op": MAX, "out": buffer, "algorithm": algorithm}
        return lambda: comm.allreduce(buffer, **how)

    cases = {name: call(name) for name in said(nbytes, group_of(comm).layout)}
    share = SHARES[SIZES.index(nbytes)] / sum(SHARES) / PASSES
    (all_before, own_before), began = spent(), time.perf_counter()
    took = timed(comm, cases, nbytes, 2 * seconds / 3 * share)
    (all_after, own_after), whole = spent(), time.perf_counter() - began
    own = float(comm.allreduce(np.array(own_after - own_before), op=SUM))
    others = (all_after - all_before - own) / whole / (os.cpu_count() or 1)
    return float(comm.broadcast(np.array(others))), took


def said(nbytes: int, layout: RankLayout) -> dict[str, float]:
    """Return what the cost model says of whole calls, also of "auto"."""
    compared = signature_check.seconds(0, layout) + layout.call
    times = selection.estimate("allreduce", nbytes, layout)
    found = {name: compared + took for name, took in times.items()}
    picked = auto(nbytes, layout)
    found["auto"] = signature_check.seconds(nbytes, layout) if picked == "eager" else found[picked]
    return found


def auto(nbytes: int, layout: RankLayout) -> str:
    """Return what "auto" does: an algorithm, or eager messages that carry the array."""
    carried = nbytes <= signature_check.max_piggyback_bytes(layout)
    return "eager" if carried else selection.pick("allreduce", nbytes, layout)


def row(
    comm: Communicator, nbytes: int, passes: list[dict[int, tuple[float, dict[str, float]]]]
) -> dict[str, Any]:
    """Return what was found for one size, of its least disturbed passes."""
    mine = sorted((each[nbytes] for each in passes if nbytes in each), key=lambda one: one[0])
    mine = mine[:PASSES]
    times = {name: [took[name] for _, took in mine] for name in mine[0][1]}
    took = {name: statistics.median(each) for name, each in times.items()}
    picked, estimates = auto(nbytes, group_of(comm).layout), said(nbytes, group_of(comm).layout)
    same = min(took["auto"], took.get(picked, took["auto"]))
    return {
        "bytes": nbytes,
        "auto": picked,
        "behind": same / min(took.values()),
        "others": max(used for used, _ in mine),
        "times": [(name, estimates[name], took[name]) for name in sorted(took, key=took.get)],
        "repeats": {name: max(each) / min(each) for name, each in times.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
