r"""Start and stop of all ranks' timelines, with a clock comparison.

Ranks of one node have one monotonic clock. Between nodes one rank of each asks rank 0 for the time,
and takes the answer of the fastest of 16 round trips for that of its middle:

    rank 0             ----- t0 -----         offset  t0 - (t1 + t2) / 2
                      /              \        error   (t2 - t1) / 2, at most
    another node   t1                 t2

Two comparisons, at the begin and at the end, tell how fast one clock goes by the other
(`collectives.tools.timeline` does the rest).
"""

from __future__ import annotations

import atexit
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

# Numbers that a rank tells all others: those of its comparison, and of the job.
_NUMBERS = 4


class Comparison(NamedTuple):
    """A comparison of this rank's clock with rank 0's.

    Attributes:
        at: when, in ns of this rank's clock.
        offset: ns to add for those of rank 0's.
        error: ns, at most, by which that may be wrong.
        job: a number, the same on all ranks and in no other job.
    """

    at: int
    offset: int
    error: int
    job: int


def compare_clocks(ranks: Transport, leaders: list[int], deadline: Deadline) -> Comparison:
    """Compare this rank's clock with that of rank 0; *collective*.

    Args:
        ranks: all of them.
        leaders: for every rank an integer that is the same exactly for the ranks of one node.

    Cost: 16 round trips for each node but the first, one after the other.
    """
    rows = np.zeros((ranks.size, _NUMBERS), np.int64)
    speakers = [leaders.index(leader) for leader in dict.fromkeys(leaders)]
    if ranks.rank == 0:
        rows[0] = time.monotonic_ns(), 0, 0, secrets.randbits(62)
        for speaker in speakers[1:]:
            _answer(ranks, speaker, deadline)
    elif ranks.rank in speakers:
        rows[ranks.rank, :3] = _ask(ranks, deadline)
    each = _NUMBERS * rows.itemsize
    bounds = range(0, (ranks.size + 1) * each, each)
    halving_doubling.allgather(ranks, rows.reshape(-1).view(np.uint8), bounds, deadline)
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
    trip, at, offset = min(trips)
    return at, offset, trip // 2


def start(group: Group, directory: str) -> None:
    """Begin the timelines of all ranks of the world; *collective*.

    Args:
        group: the world.
        directory: where the files go, `rank-0.json` and so on; made where it is missing.

    Raises:
        ValueError: there is a timeline already.
        OSError: a file cannot be written; MismatchError on the other ranks.
    """
    with begin_call(group, "start_timeline") as call, contextlib.ExitStack() as unless_agreed:
        if timeline.running is not None:
            raise ValueError(
                f"start_timeline: there is one already, stop it first ({timeline.running.path})"
            )
        place = Path(os.fspath(directory)).absolute()
        place.mkdir(parents=True, exist_ok=True)
        world = list(group.world_ranks)
        rank = world[group.rank]
        own = timeline.start(place / f"rank-{rank}.json", rank)
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
    attach_listeners_to_all()


def stop(group: Group) -> None:
    """End the timelines of all ranks; *collective*, harmless where there is none.

    Where an earlier call of the group has failed only this rank's ends, and clocks are not
    compared.
    """
    own = timeline.running
    if own is None:
        return
    try:
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


# Programs that end without `stop` or `shutdown`.
atexit.register(timeline.stop)
