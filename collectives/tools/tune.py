"""`python -m collectives tune`: measures the links, validates the cost model, saves both.

After the measurement every algorithm is timed at a few sizes and held against what the model says
with the new numbers, since they are as good as the picks that follow from them.
"""

from __future__ import annotations

import platform
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from collectives import communicator
from collectives.algorithms import selection
from collectives.algorithms.cost_model import RankLayout
from collectives.communicator import Communicator
from collectives.core import links, settings, tuning_file
from collectives.launch import abort_hook, processes
from collectives.tools import byte_sizes, info, measure

__all__ = ["TunedRow", "check", "run", "summary"]

# Seconds that the whole may take, roughly, and what part of them the links get.
SECONDS = 20.0
_LINKS_SHARE = 0.4

# Seconds that one wait may take, unless the user's own limit is shorter.
_MOST_WAIT = 60.0

# Median over first quartile from which on a machine counts as busy; a quiet one has 1.02 to 1.1.
_NOISE = 1.25

_SIZES = (1 << 10, 1 << 15, 1 << 18, 1 << 22)


class TunedRow(NamedTuple):
    """One algorithm at one size; times in seconds."""

    operation: str
    nbytes: int
    algorithm: str
    predicted: float | None  # None for MPI's own
    measured: float
    picked: bool  # by "auto", where ranks send messages


def run(out: Path | None = None, seconds: float = SECONDS) -> int:
    """Measure, check, print on rank 0 and keep the result; *collective* over the world.

    Args:
        out: the file to write; the one of this cluster if None.
        seconds: how long it may take, roughly.

    Returns:
        The exit status, the same on all ranks.
    """
    chosen = settings.from_environment()
    world = processes.start_mpi(chosen)
    abort_hook.abort_on_exception(world)
    # What an old file says does not matter here, and may be what is wrong.
    wait = min(chosen.timeout, _MOST_WAIT)
    comm = communicator.from_mpi(world, replace(chosen, tuned="off", timeout=wait))
    target = comm.broadcast_object(out or tuning_file.path(chosen))
    problem = comm.broadcast_object(_problem(comm, target))
    if problem is None:
        problem = _tune(comm, target, seconds)
    if problem is not None and comm.rank == 0:
        print(f"python -m collectives tune: {problem}", file=sys.stderr)
    comm.barrier()
    return 0 if problem is None else 1


def _problem(comm: Communicator, target: Path | None) -> str | None:
    """Say what is in the way, before time is spent; a file of something else is not replaced."""
    if comm.size == 1:
        return "there is one rank, so nothing to measure, expected mpirun -np 2 or more"
    if comm.rank == 0 and target is not None and target.exists():
        try:
            tuning_file.read(target)
        except (OSError, ValueError) as error:
            return str(error)
    return None


def _tune(comm: Communicator, target: Path | None, seconds: float) -> str | None:
    """Do it; returns what went wrong at the end, the same on all ranks."""
    clock = measure.MeasuringClock(comm)
    _say(comm, f"{comm.size} ranks, {comm.num_nodes} nodes; measuring for about {seconds:g} s")
    measured = measure.measure(clock, _LINKS_SHARE * seconds)
    changes = {name: link._asdict() for name, link in measured.items()}
    known = links.with_overrides(links.defaults(), changes, "measured")
    _say(comm, links.table(known))
    rows = []
    _say(comm, _HEADING)
    for group in check(clock, known.machine, (1 - _LINKS_SHARE) * seconds):
        rows += group
        _say(comm, "\n".join(_line(row, group) for row in group))
    _say(comm, summary(rows))
    noise = statistics.median(clock.noise)
    if noise > _NOISE:
        _say(
            comm,
            f"note: half of the times are {noise:.2f} x what the fastest quarter takes: other "
            "work disturbs, or there are more ranks than cores; the numbers hold for that",
        )
    problem = None
    if comm.rank == 0 and target is not None:
        try:
            kept = tuning_file.read(target) if target.exists() else {}
            facts = {
                "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "where": platform.node(),
                "ranks": comm.size,
                "nodes": comm.num_nodes,
                **info.versions(),
            }
            tuning_file.write(target, {**kept, **measured}, facts)
            print(f"kept in {target}", flush=True)
        except (OSError, ValueError) as error:
            problem = f"cannot keep it: {error}"
    return comm.broadcast_object(problem)


def check(
    clock: measure.MeasuringClock,
    machine: links.Machine,
    seconds: float,
    operations: Iterable[str] = selection.ALGORITHMS,
    sizes: Sequence[int] = _SIZES,
) -> Iterator[list[TunedRow]]:
    """Time the algorithms of operations that have several; *collective*.

    Args:
        clock: of the ranks.
        machine: the links that the model goes by.
        seconds: to spend on all of it.
        operations: keys of `selection.ALGORITHMS`.
        sizes: bytes of the whole array, of an operation that has one.

    Yields:
        The rows of one operation and size, the fastest first; the same on all ranks.
    """
    comm = clock.comm
    layout = RankLayout(comm.size, comm.num_nodes, machine)
    groups = []
    for operation in operations:
        if len(selection.estimate(operation, 0, layout).keys() - {"node"}) > 1:
            own = sizes if operation != "barrier" else (0,)
            groups += [(operation, nbytes) for nbytes in own]
    for operation, nbytes in groups:
        predicted = selection.estimate(operation, nbytes, layout)
        picked = selection.pick(operation, nbytes, layout)
        cases = measure.algorithms(clock, operation, nbytes)
        times = clock.times(cases, seconds / len(groups))
        yield [
            TunedRow(operation, nbytes, name, predicted.get(name), times[name], name == picked)
            for name in sorted(times, key=lambda name: times[name])
        ]


def summary(rows: Sequence[TunedRow]) -> str:
    """Say how good the picks and the predictions were."""
    fastest: dict[tuple[str, int], float] = {}
    ours = [row for row in rows if row.predicted is not None]
    for row in ours:
        key = row.operation, row.nbytes
        fastest[key] = min(row.measured, fastest.get(key, row.measured))
    behind = [row.measured / fastest[row.operation, row.nbytes] for row in ours if row.picked]
    near = [sum(ratio <= 1 + share for ratio in behind) for share in (0.1, 0.2)]
    ratios = [row.measured / row.predicted for row in ours if row.predicted]
    close = sum(0.5 <= ratio <= 2 for ratio in ratios)
    return (
        f"picked is within 10 % of the fastest of ours in {near[0]} of {len(behind)} cases, within "
        f"20 % in {near[1]}, at worst {max(behind):.2f} x\n"
        f"measured is within a factor of 2 of predicted in {close} of {len(ratios)}"
    )


_HEADING = (
    f"{'operation':<16}{'bytes':>6}  {'algorithm':<14}{'predicted ms':>13}{'measured ms':>13}"
    f"{'ratio':>7}"
)


def _line(row: TunedRow, group: Sequence[TunedRow]) -> str:
    size = byte_sizes.size_text(row.nbytes)
    start = f"{row.operation:<16}{size:>6}  {row.algorithm:<14}"
    if row.predicted is None:
        return f"{start}{'-':>13}{1e3 * row.measured:13.4f}"
    times = f"{1e3 * row.predicted:13.4f}{1e3 * row.measured:13.4f}"
    fastest = row is next(other for other in group if other.predicted is not None)
    marks = ["fastest of ours"] * fastest + ["picked"] * row.picked
    return f"{start}{times}{row.measured / row.predicted:7.2f}  {', '.join(marks)}".rstrip()


def _say(comm: Communicator, text: str) -> None:
    if comm.rank == 0:
        print(text, flush=True)
