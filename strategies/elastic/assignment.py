"""Assignment of ranks to training and reserve after a failure, as pure integers.

::

    rank         0    1    2    3    4    5        four train, two are spare
    place        0    1    2    3    -    -
    rank 1 dies
    place        0    x    2    3    1    -        rank 4 trains in the place of rank 1
    ranks 0 and 4 die
    place        x    x    2    3    x    0        no spare is left: three go on

A *place* is the number of a rank among those that train. Whoever takes one goes on with its
generators and its rows, so that nothing changes for the other places. Ranks train in the order of
their places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["RoleAssignment", "RankReport", "assign_roles"]


class RankReport(NamedTuple):
    """What a rank says of itself when those that live have met.

    Attributes:
        number: of the last commit that it is sure of; -1 if it has none, as spare ranks.
        places: its place among how many, by the numbers of the commits that it has a copy of.
        is_through: whether training has ended, and this rank knows that.
        status: with which it is about to leave the program; None if it is not.
        has_stopped: whether it has stopped because the batch system has asked for it.
        has_begun: whether all had the first commit, so that some may have trained.
    """

    number: int
    places: Mapping[int, tuple[int, int]]
    is_through: bool = False
    status: int | None = None
    has_stopped: bool = False
    has_begun: bool = False


class RoleAssignment(NamedTuple):
    """Who trains.

    Attributes:
        ranks: those that train, in the order of their places.
        admitted: of those among them that have no commit: in which place they are.
    """

    ranks: list[int]
    admitted: dict[int, int]


def assign_roles(reports: Sequence[RankReport], most: int) -> RoleAssignment | None:
    """Say who trains, from the newest commit that a rank is sure of.

    Args:
        reports: of all that live.
        most: how many may train.

    Returns:
        None if no rank has a commit.

    Example:
        >>> has, spare = {7: (0, 2)}, RankReport(-1, {})
        >>> assign_roles([RankReport(7, {7: (1, 2)}), spare, spare], most=2)
        RoleAssignment(ranks=[1, 0], admitted={1: 0})
    """
    newest = max(report.number for report in reports)
    if newest < 0:
        return None
    # Who has a copy of that commit need not be sure of it.
    taken = {
        rank: report.places[newest][0]
        for rank, report in enumerate(reports)
        if newest in report.places
    }
    kept = sorted(taken, key=taken.__getitem__)[:most]
    size = max(size for report in reports for _, size in report.places.values())
    free = [place for place in range(size + most) if place not in taken.values()]
    spares = [rank for rank in range(len(reports)) if rank not in taken]
    admitted = dict(zip(spares[: most - len(kept)], free, strict=False))
    place = taken | admitted
    return RoleAssignment(sorted([*kept, *admitted], key=place.__getitem__), admitted)
