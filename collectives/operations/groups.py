"""Communicators made of others, as methods of `Communicator`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from collectives.errors import LaunchError

if TYPE_CHECKING:
    from collectives.communicator import Communicator

__all__ = ["background", "check_threads", "duplicate", "group", "split"]


def split(self: Communicator, color: int | None, key: int = 0) -> Communicator | None:
    """Make communicators of the ranks that name the same color.

    Args:
        color: an integer from 0 to 2^63 - 1, or None to belong to no group.
        key: the order in the new group, an integer of 64 bits; ties by rank.

    Returns:
        The new group's communicator, None where color is None.

    Raises:
        TypeError: color or key is no integer; MismatchError on the other ranks.
        ValueError: color or key is out of range; MismatchError on the other ranks.
    """
    with self._calls.enter("split", None) as call:
        wish = (-1 if color is None else operator.index(color), operator.index(key))
        if color is not None and color < 0:
            raise ValueError(f"split: color is negative, expected None or >= 0, got {color}")
        if not all(-(1 << 63) <= n < 1 << 63 for n in wish):
            raise ValueError(
                f"split: expected integers of 64 bits, got color {color} and key {key}"
            )
        call.describe()
        call.agree()
    chosen = self.allgather(np.array([wish], np.int64)).tolist()
    members = [r for r in range(self.size) if chosen[r][0] == wish[0]]
    members.sort(key=lambda r: (chosen[r][1], r))
    # MPI takes numbers of 32 bits: the group goes by its first rank, and its ranks by their place.
    part = self._transport.split(None if color is None else members[0], members.index(self.rank))
    self._splits_made += 1
    if part is None:
        return None
    world = self._transport.world
    if world is not None or members != list(range(self.size)):
        part.world = [r if world is None else world[r] for r in members]
    leaders = [self._leaders[r] for r in members]
    return type(self)(
        part, leaders, self._calls.settings, f"{self._calls.name}.{self._splits_made}"
    )


def group(self: Communicator, ranks: Sequence[int]) -> Communicator | None:
    """Make a communicator of some ranks, numbered in the order given.

    *Collective*: all ranks of this communicator, also those that are not listed.

    Args:
        ranks: each at most once.

    Returns:
        The new group's communicator, None on ranks that are not listed.

    Raises:
        ValueError: a rank does not exist, or is listed twice.
    """
    with self._calls.enter("group", None) as call:
        listed = [operator.index(r) for r in ranks]
        if len(set(listed)) != len(listed) or not set(listed) <= set(range(self.size)):
            raise ValueError(
                f"group: expected ranks 0 .. {self.size - 1}, each at most once, got {listed}"
            )
        call.describe(ranks=tuple(listed))
        call.agree()
    member = self.rank in listed
    return self.split(0 if member else None, listed.index(self.rank) if member else 0)


def background(self: Communicator) -> Communicator:
    """Make the private communicator of the asynchronous operations; *collective*.

    Raises:
        LaunchError: it would send messages from a thread, and MPI does not allow that.
    """
    private = duplicate(self)
    private.barrier()  # the ranks meet, which takes messages, before another thread takes over
    try:
        check_threads(private, "asynchronous operation")
    except LaunchError:
        private.close()
        raise
    return private


def check_threads(self: Communicator, operation: str) -> None:
    """Refuse to go on where operations of another thread would send messages that MPI forbids.

    Raises:
        LaunchError: they would.
    """
    if self._calls.by_messages:
        self._transport.check_threads(operation)


def duplicate(self: Communicator) -> Communicator:
    """Make a communicator of the same ranks; *collective*."""
    duplicate = self.split(0, self.rank)
    assert duplicate is not None
    return duplicate
