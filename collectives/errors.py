"""Exceptions: what can go wrong between ranks, told apart by what the caller can do about it.

Wrong use of one call (a negative root, an array of strings) is a plain `ValueError` or `TypeError`,
raised before any message. Everything here concerns several ranks.
"""

from __future__ import annotations

__all__ = [
    "CollectiveError",
    "CollectiveTimeout",
    "LaunchError",
    "MismatchError",
    "PeerFailure",
]


class CollectiveError(RuntimeError):
    """An operation among several ranks could not be completed."""


class MismatchError(CollectiveError):
    """The ranks did not mean the same call; the communicator stays usable."""


class CollectiveTimeout(CollectiveError, TimeoutError):
    """Some rank did not answer within the limit; the communicator is not usable any more."""


class PeerFailure(CollectiveError):
    """A rank is dead or has ended its program; the communicator is not usable any more."""


class LaunchError(CollectiveError):
    """The processes were started in a way that cannot become one world."""
