r"""Start and stop of all ranks' timelines, with a clock comparison.

Ranks of one node share a monotonic clock. One rank of every other node asks rank 0 for its time.
Of 16 round trips it uses the fastest, and assigns the answer to the middle of that round trip:

    rank 0             ----- t0 -----         offset  t0 - (t1 + t2) / 2
                      /              \        error   (t2 - t1) / 2, at most
    another node   t1                 t2

Two comparisons, at start and stop, give the drift between the clocks
(`collectives.tools.timeline` corrects it).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from collectives.algorithms import halving_doubling
from collectives.calls.call import begin_call
from collectives.calls.group import Group, attach_listeners_to_all
from collectives.core.version import __version__
from collectives.tracing import timeline
from collectives.transport.transport import Deadline, Transport

__all__ = ["Comparison", "compare_clocks", "start", "stop"]

_ROUND_TRIPS = 16

# Numbers per rank in the exchange: time, offset, error, job.
_NUMBERS = 4


class Comparison(NamedTuple):
    """A comparison of this rank's clock with rank 0's clock.

    Attributes:
        at: time of the comparison, in ns of this rank's clock.
        offset: ns to add for the time of rank 0's clock.
        error: largest error of the offset, in ns.
        job: a random number, the same on all ranks of the job.
    """

    at: int
    offset: int
    error: int
    job: int


def compare_clocks(ranks: Transport, leaders: list[int], deadline: Deadline) -> Comparison:
    """Compare this rank's clock with rank 0's clock; *collective*.

    Args:
        ranks: transport between all ranks.
        leaders: one integer per rank, equal exactly for the ranks of one node.
        deadline: limit of all waits.

    Cost: 16 round trips per node except the first, one node after the other.
    """
    rows = np.zeros((ranks.size, _NUMBERS), np.int64)
    # One rank per node, the lowest.
    speakers = [leaders.index(leader) for leader in dict.fromkeys(leaders)]
    if ranks.rank == 0:
        # 62 bits: positive in an int64.
        rows[0] = time.monotonic_ns(), 0, 0, secrets.randbits(62)
        # One node after the other, because concurrent answers would disturb the times.
        for speaker in speakers[1:]:
            _answer(ranks, speaker, deadline)
    elif ranks.rank in speakers:
        rows[ranks.rank, :3] = _ask(ranks, deadline)
    each = _NUMBERS * rows.itemsize
    bounds = range(0, (ranks.size + 1) * each, each)
    halving_doubling.allgather(ranks, rows.reshape(-1).view(np.uint8), bounds, deadline)
    # Ranks of a node share a clock, so they use the comparison of their speaker.
    at, offset, error, _ = rows[leaders.index(leaders[ranks.rank])].tolist()
    return Comparison(at, offset, error, int(rows[0, 3]))


def _answer(ranks: Transport, speaker: int, deadline: Deadline) -> None:
    told = np.zeros(1, np.int64)
    for _ in range(_ROUND_TRIPS):
        ranks.receive(told, speaker, deadline)
        told[0] = time.monotonic_ns()
        ranks.send(told, speaker, deadline)


def _ask(ranks: Transport, deadline: Deadline) -> tuple[int, int, int]:
    told = np.zeros(1, np.int64)
    trips = []
    for _ in range(_ROUND_TRIPS):
        began = time.monotonic_ns()
        ranks.send(told, 0, deadline)
        ranks.receive(told, 0, deadline)
        ended = time.monotonic_ns()
        middle = (began + ended) // 2
        trips.append((ended - began, middle, int(told[0]) - middle))
    # The fastest round trip has the smallest error.
    trip, at, offset = min(trips)
    return at, offset, trip // 2


def start(group: Group, directory: str) -> None:
    """Start the timelines of all ranks of the world; *collective*.

    Args:
        group: the world.
        directory: directory for the files `rank-0.json` and so on; created if missing.

    Raises:
        ValueError: a timeline is already running.
        OSError: a file cannot be written; the other ranks raise `MismatchError`.
    """
    with begin_call(group, "start_timeline") as call, contextlib.ExitStack() as unless_agreed:
        if timeline.running is not None:
            raise ValueError(
                f"start_timeline: there is one already, stop it first ({timeline.running.path})"
            )
        place = Path(os.fspath(directory)).absolute()
        place.mkdir(parents=True, exist_ok=True)
        # By world ranks, because files of several groups must not collide.
        world = list(group.world_ranks)
        rank = world[group.rank]
        own = timeline.start(place / f"rank-{rank}.json", rank)
        # An error before the agreement must not leave this rank alone with a timeline.
        unless_agreed.callback(timeline.stop)
        call.describe()
        call.agree()
        clock = compare_clocks(group.transport, group.leaders, call.deadline)
        unless_agreed.pop_all()
    own.instant("process_labels", {"labels": f"{socket.gethostname()}, node {group.node_rank}"})
    facts = {
        "rank": rank, "ranks": world, "node": group.node_rank, "job": clock.job,
        "host": socket.gethostname(), "process": os.getpid(), "version": __version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip
    own.instant("unisono", facts)
    _note_clock(own, clock)
    # Last, so that no rank records the calls above.
    attach_listeners_to_all()


def stop(group: Group) -> None:
    """Stop the timelines of all ranks; *collective*, harmless without a timeline.

    If the group is unusable, only this rank's timeline stops, and the clocks are not compared.
    """
    own = timeline.running
    if own is None:
        return
    try:
        # In an unusable group a comparison would fail, and each rank may end its own file.
        if group.unusable is None:
            with begin_call(group, "stop_timeline") as call:
                call.describe()
                call.agree()
                clock = compare_clocks(group.transport, group.leaders, call.deadline)
            _note_clock(own, clock)
    finally:
        timeline.stop()
        attach_listeners_to_all()


def _note_clock(own: timeline.Timeline, clock: Comparison) -> None:
    own.instant("unisono_clock", {"at": clock.at, "offset": clock.offset, "error": clock.error})
