"""Groups made of others."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from collectives.errors import LaunchError
from collectives.operations.broadcast import barrier
from collectives.operations.call import enter
from collectives.operations.group import Group
from collectives.operations.rows import allgather

__all__ = ["background", "check_threads", "duplicate", "group", "split"]

G = TypeVar("G", bound=Group)


def split(group: G, color: int | None, key: int = 0) -> G | None:
    """Make communicators of the ranks that name the same color.

    Args:
        color: an integer from 0 to 2^63 - 1, or None to belong to no group.
        key: the order in the new group, an integer of 64 bits; ties by rank.

    Returns:
        The new group's communicator, None where color is None.

    Raises:
        TypeError: color or key is not an integer; MismatchError on the other ranks.
        ValueError: color or key is out of range; MismatchError on the other ranks.
    """
    with enter(group, "split") as call:
        wish = (-1 if color is None else operator.index(color), operator.index(key))
        if color is not None and color < 0:
            raise ValueError(f"split: color is negative, expected None or >= 0, got {color}")
        if not all(-(1 << 63) <= n < 1 << 63 for n in wish):
            raise ValueError(
                f"split: expected integers of 64 bits, got color {color} and key {key}"
            )
        call.describe()
        call.agree()
    chosen = allgather(group, np.array([wish], np.int64)).tolist()
    members = [r for r in range(group.size) if chosen[r][0] == wish[0]]
    members.sort(key=lambda r: (chosen[r][1], r))
    # MPI takes numbers of 32 bits: the group goes by its first rank, and its ranks by their place.
    transport = group.transport
    part = transport.split(None if color is None else members[0], members.index(group.rank))
    group.splits_made += 1
    if part is None:
        return None
    world = transport.world
    if world is not None or members != list(range(group.size)):
        part.world = [r if world is None else world[r] for r in members]
    leaders = [group.leaders[r] for r in members]
    name = f"{group.recorder.name}.{group.splits_made}"
    return type(group)(part, leaders, group.settings, name)


def group(whole: G, ranks: Sequence[int]) -> G | None:
    """Make a communicator of some ranks, numbered in the order given.

    *Collective*: all ranks of this communicator, also those that are not listed.

    Args:
        ranks: each at most once.

    Returns:
        The new group's communicator, None on ranks that are not listed.

    Raises:
        ValueError: a rank does not exist, or is listed twice.
    """
    with enter(whole, "group") as call:
        listed = [operator.index(r) for r in ranks]
        if len(set(listed)) != len(listed) or not set(listed) <= set(range(whole.size)):
            raise ValueError(
                f"group: expected ranks 0 .. {whole.size - 1}, each at most once, got {listed}"
            )
        call.describe(ranks=tuple(listed))
        call.agree()
    member = whole.rank in listed
    return split(whole, 0 if member else None, listed.index(whole.rank) if member else 0)


def background(group: G) -> G:
    """Make the private group of the asynchronous operations; *collective*.

    Raises:
        LaunchError: it would send messages from a thread, and MPI does not allow that.
    """
    private = duplicate(group)
    barrier(private)  # the ranks meet, which takes messages, before another thread takes over
    try:
        check_threads(private, "asynchronous operation")
    except LaunchError:
        private.close()
        raise
    return private


def check_threads(group: Group, operation: str) -> None:
    """Refuse to go on where operations of another thread would send messages that MPI forbids.

    Raises:
        LaunchError: they would.
    """
    if group.sends_messages:
        group.transport.check_threads(operation)


def duplicate(group: G) -> G:
    """Make a group of the same ranks; *collective*."""
    duplicate = split(group, 0, group.rank)
    assert duplicate is not None
    return duplicate
