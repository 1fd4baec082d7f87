"""New groups: `split`, `group` and duplicates."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Sequence

import numpy as np

from collectives.calls.call import begin_call
from collectives.calls.group import Group
from collectives.calls.group_registry import KEYS_PER_EXCHANGE
from collectives.core.errors import LaunchError, MismatchError
from collectives.operations.broadcast import barrier
from collectives.operations.gather_scatter import allgather
from collectives.transport.transport import Deadline

__all__ = ["background_group", "check_threads", "create_group", "dup", "split"]

# MPI guarantees tags up to 32,767: channel n uses tag 16,384 + n, transports use lower tags.
LARGEST_TAG = (1 << 14) - 1


def split(group: Group, color: int | None, key: int = 0) -> Group | None:
    """Split a group by color; see `Communicator.split`."""
    with begin_call(group, "split") as call:
        # -1 is free for None, because colors are >= 0.
        wish = (-1 if color is None else operator.index(color), operator.index(key))
        if color is not None and color < 0:
            raise ValueError(f"split: color is negative, expected None or >= 0, got {color}")
        if not all(-(1 << 63) <= n < 1 << 63 for n in wish):
            raise ValueError(
                f"split: expected integers of 64 bits, got color {color} and key {key}"
            )
        # Only the operation: colors and keys may differ.
        call.describe()
        call.agree()
    # Dropped groups are announced here, because `split` has an exchange in any case.
    dropped = group.registry.keys_to_announce(group.world_ranks)
    chosen = allgather(group, np.array([(*wish, *dropped)], np.int64)).tolist()
    group.registry.count(key for row in chosen for key in row[2:])
    # Ranks without a color form a list of their own, which gives them a position below.
    members = [r for r in range(group.size) if chosen[r][0] == wish[0]]
    # Equal keys are ordered by rank, as in MPI_Comm_split.
    members.sort(key=lambda r: (chosen[r][1], r))
    # MPI takes 32-bit colors and keys, so use the first member as color and the position as key.
    transport = group.transport
    part = transport.split(None if color is None else members[0], members.index(group.rank))
    # On all ranks, also those without a color, so that names stay equal.
    group.child_count += 1
    if part is None:
        return None
    world = transport.world
    # None means the numbers of the world itself.
    if world is not None or members != list(range(group.size)):
        part.world = [r if world is None else world[r] for r in members]
    leaders = [group.leaders[r] for r in members]
    name = f"{group.recorder.name}.{group.child_count}"
    made = Group(part, leaders, group.settings, name)
    made.register(group.registry, name)
    return made


def create_group(whole: Group, ranks: Sequence[int], *, tag: int | None = None) -> Group | None:
    """Create a group of the listed ranks; see `Communicator.group`."""
    if tag is not None:
        return _create_tagged_group(whole, ranks, operator.index(tag))
    with begin_call(whole, "group") as call:
        # A wrong list is a refusal, before any exchange.
        listed = _checked_ranks(whole, ranks)
        call.describe(ranks=tuple(listed))
        call.agree()
    # An unlisted rank takes part without a color, because MPI splits all ranks.
    member = whole.rank in listed
    return split(whole, 0 if member else None, listed.index(whole.rank) if member else 0)


def _checked_ranks(whole: Group, ranks: Sequence[int]) -> list[int]:
    listed = [operator.index(r) for r in ranks]
    if len(set(listed)) != len(listed) or not set(listed) <= set(range(whole.size)):
        raise ValueError(
            f"group: expected ranks 0 .. {whole.size - 1}, each at most once, got {listed}"
        )
    return listed


def _create_tagged_group(whole: Group, ranks: Sequence[int], tag: int) -> Group:
    """Create a group without a call on the other ranks."""
    whole.check_usable("group")
    listed = _checked_ranks(whole, ranks)
    if whole.rank not in listed:
        raise ValueError(
            f"group: with a tag only the ranks that are listed call this, got {listed} "
            f"({whole.transport.where})"
        )
    if not 0 <= tag <= LARGEST_TAG:
        raise ValueError(f"group: no such tag, expected 0 .. {LARGEST_TAG}, got {tag}")
    deadline = whole.deadline("group")
    number = _meet(whole, listed, tag, deadline)
    part = whole.transport.members(listed, tag)
    world = whole.transport.world
    if world is not None or listed != list(range(whole.size)):
        part.world = [r if world is None else world[r] for r in listed]
    # Node numbers of the parent: they need no new exchange.
    leaders = [whole.leaders[r] for r in listed]
    name = f"{whole.recorder.name}.{'-'.join(map(str, listed[:4]))}.{tag}"
    made = Group(part, leaders, whole.settings, name)
    # With a number, because the same ranks and tag may form a group repeatedly.
    made.register(whole.registry, f"{name}, number {number}")
    return made


def _meet(whole: Group, listed: list[int], tag: int, deadline: Deadline) -> int:
    """Wait for all members with a deadline, which MPI would not have, and compare their lists.

    Each member sends the first member a row: a hash of its list, and the keys of its dropped
    groups. The first member answers whether the lists are equal, and with the number of this group.
    Then it sends the rows of all members.

    Returns:
        The number of this group among the tagged groups with the same first member.
    """
    # On a channel, because other groups of the parent may exchange messages now.
    lane = whole.transport.channel(tag)
    first, *others = listed
    # Of the list in its order, which is the order of the new ranks.
    own = zlib.crc32(repr(listed).encode())
    rows = np.zeros((len(listed), 1 + KEYS_PER_EXCHANGE), np.int64)
    place = listed.index(whole.rank)
    rows[place] = own, *whole.registry.keys_to_announce([whole.world_ranks[r] for r in listed])
    answer = np.zeros(2, np.int64)  # whether the lists are equal, and the number
    if whole.rank != first:
        lane.send(rows[place], first, deadline)
        lane.receive(answer, first, deadline)
        if answer[0]:
            lane.receive(rows, first, deadline)
    else:
        # Rows of other ranks arrive in the order of the list.
        pairs = zip(rows[1:], others, strict=True)
        lane.wait([lane.start_receive(row, r) for row, r in pairs], deadline)
        # Counted by the first member, whose count is unique for its groups.
        whole.tagged_groups_made += 1
        answer[:] = np.all(rows[:, 0] == own), whole.tagged_groups_made
        lane.wait([lane.start_send(answer, r) for r in others], deadline)
        if answer[0]:
            # The keys of all members, so that all count the same announcements.
            lane.wait([lane.start_send(rows, r) for r in others], deadline)
    if not answer[0]:
        raise MismatchError(
            f"group: ranks with tag {tag} list other ranks than this one, which lists {listed} "
            f"({whole.transport.where})"
        )
    whole.registry.count(rows[:, 1:].reshape(-1).tolist())
    return int(answer[1])


def background_group(group: Group) -> Group:
    """Create the private group of the asynchronous operations; *collective*.

    Raises:
        LaunchError: the group would send messages from a thread, which MPI forbids here.
    """
    private = dup(group)
    barrier(private)  # create the engine now: that takes messages, before another thread takes over
    try:
        check_threads(private, "asynchronous operation")
    except LaunchError:
        private.close()
        raise
    return private


def check_threads(group: Group, operation: str) -> None:
    """Check that another thread may run operations of the group.

    Raises:
        LaunchError: the operations would send messages, which MPI forbids in another thread.
    """
    if group.uses_messages:
        group.transport.check_threads(operation)


def dup(group: Group) -> Group:
    """Return a new group of the same ranks; *collective*."""
    duplicate = split(group, 0, group.rank)
    assert duplicate is not None
    return duplicate
