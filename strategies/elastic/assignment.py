"""Assignment of ranks to training and reserve after a failure, as a pure function of integers.

::

    rank         0    1    2    3    4    5        four train, two are spare
    place        0    1    2    3    -    -
    rank 1 dies
    place        0    x    2    3    1    -        rank 4 trains in the place of rank 1
    ranks 0 and 4 die
    place        x    x    2    3    x    0        no spare rank remains: three continue

A *place* is the number of a rank among the training ranks. A rank that takes over a place also
takes over its generators and its rows, so nothing changes for the other places. Ranks train in the
order of their places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["RoleAssignment", "RankReport", "assign_roles"]


class RankReport(NamedTuple):
    """The report of a surviving rank after a failure.

    Attributes:
        number: its last complete commit; -1 if it has none, like spare ranks.
        places: number of each commit that it has a copy of -> (its place, number of places).
        is_through: whether it knows that training has ended.
        status: exit status that it is about to exit with; None if it is not exiting.
        has_stopped: whether it has stopped because the batch system asked it to.
        has_begun: whether all ranks had the first commit, so that some may have trained.
    """

    number: int
    places: Mapping[int, tuple[int, int]]
    is_through: bool = False
    status: int | None = None
    has_stopped: bool = False
    has_begun: bool = False


class RoleAssignment(NamedTuple):
    """The ranks that train.

    Attributes:
        ranks: training ranks in the order of their places.
        admitted: training rank without a commit -> its place.
    """

    ranks: list[int]
    admitted: dict[int, int]


def assign_roles(reports: Sequence[RankReport], most: int) -> RoleAssignment | None:
    """Return the ranks that train, from the newest commit that is complete on any rank.

    Args:
        reports: reports of all surviving ranks.
        most: maximum number of training ranks.

    Returns:
        The assignment; None if no rank has a commit.

    Example:
        >>> has, spare = {7: (0, 2)}, RankReport(-1, {})
        >>> assign_roles([RankReport(7, {7: (1, 2)}), spare, spare], most=2)
        RoleAssignment(ranks=[1, 0], admitted={1: 0})
    """
    newest = max(report.number for report in reports)
    if newest < 0:
        # Only spare ranks survive, or no rank has completed a commit.
        return None
    # A rank may have a copy of the newest commit without knowing that it is complete.
    taken = {
        rank: report.places[newest][0]
        for rank, report in enumerate(reports)
        if newest in report.places
    }
    # If more ranks have the commit than may train, those with the lowest places train.
    kept = sorted(taken, key=taken.__getitem__)[:most]
    # Dead ranks may have had any place below this, also from before an earlier shrink.
    size = max(size for report in reports for _, size in report.places.values())
    # Lowest first: places of dead ranks are filled before new ones.
    free = [place for place in range(size + most) if place not in taken.values()]
    spares = [rank for rank in range(len(reports)) if rank not in taken]
    admitted = dict(zip(spares[: most - len(kept)], free, strict=False))
    place = taken | admitted
    return RoleAssignment(sorted([*kept, *admitted], key=place.__getitem__), admitted)
