"""`python -m collectives tune`: measures the links, validates the cost model, saves both.

After the measurement every algorithm is timed at a few sizes and compared with the model's
prediction from the new numbers, because the numbers are only as good as the picks based on them.
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
from collectives.core.errors import counted
from collectives.launch import abort_hook, processes
from collectives.tools import byte_sizes, info, measure

__all__ = ["TunedRow", "check", "run", "summary"]

# Approximate seconds of the whole run, and the share for measuring links.
SECONDS = 20.0
_LINKS_SHARE = 0.4

# Most seconds of one wait; a shorter limit of the user takes precedence.
_MOST_WAIT = 60.0

# Median over first quartile from which a machine counts as busy; a quiet one has 1.02 to 1.1.
_NOISE = 1.25

_SIZES = (1 << 10, 1 << 15, 1 << 18, 1 << 22)


class TunedRow(NamedTuple):
    """One algorithm at one size; times in seconds."""

    operation: str
    nbytes: int
    algorithm: str
    predicted: float | None  # None for MPI's own
    measured: float
    picked: bool  # by "auto", if ranks send messages


def run(out: Path | None = None, seconds: float = SECONDS) -> int:
    """Measure, validate, print on rank 0 and save the result; *collective* over the world.

    Args:
        out: file to write; None for that of this cluster.
        seconds: approximate duration.

    Returns:
        exit status, the same on all ranks.
    """
    chosen = settings.from_environment()
    world = processes.start_mpi(chosen)
    # Without `init`, so the hook is installed here.
    abort_hook.abort_on_exception(world)
    # An existing file is ignored, because its numbers may be the problem.
    wait = min(chosen.timeout, _MOST_WAIT)
    comm = communicator.from_mpi(world, replace(chosen, tuned="off", timeout=wait))
    # The path of rank 0, which alone writes.
    target = comm.broadcast_object(out or tuning_file.path(chosen))
    problem = comm.broadcast_object(_problem(comm, target))
    if problem is None:
        problem = _tune(comm, target, seconds)
    if problem is not None and comm.rank == 0:
        print(f"python -m collectives tune: {problem}", file=sys.stderr)
    # No rank ends before rank 0 has printed.
    comm.barrier()
    return 0 if problem is None else 1


def _problem(comm: Communicator, target: Path | None) -> str | None:
    """Return a reason not to start, or None; a file of another kind is not replaced."""
    if comm.size == 1:
        return "there is one rank, so nothing to measure, expected mpirun -np 2 or more"
    if comm.rank == 0 and target is not None and target.exists():
        try:
            tuning_file.read(target)
        except (OSError, ValueError) as error:
            return str(error)
    return None


def _tune(comm: Communicator, target: Path | None, seconds: float) -> str | None:
    """Measure and save; return the error at the end, equal on all ranks, or None."""
    clock = measure.MeasuringClock(comm)
    _say(
        comm,
        f"{comm.size} ranks, {counted(comm.num_nodes, 'node')}; measuring for about {seconds:g} s",
    )
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
    # The median of all cases, because a single one may be noisy.
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
            # Links that were not measured here keep their numbers.
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
    # The exit status must be equal on all ranks.
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
        clock: clock of the ranks.
        machine: links for the model.
        seconds: time budget.
        operations: keys of `selection.ALGORITHMS`.
        sizes: bytes of the whole array, for operations with one.

    Yields:
        rows of one operation and size, fastest first, equal on all ranks.
    """
    comm = clock.comm
    layout = RankLayout(comm.size, comm.num_nodes, machine)
    groups = []
    for operation in operations:
        # An operation with one algorithm needs no comparison.
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
    """Summarize the quality of picks and predictions."""
    fastest: dict[tuple[str, int], float] = {}
    # The times of MPI's own algorithms are not predicted.
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
