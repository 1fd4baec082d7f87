"""Exceptions with Horovod's names."""

from __future__ import annotations

import collectives as cc

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]

HorovodInternalError = cc.CollectiveError
"""What ranks learn of each other; a wrong shape is a `MismatchError`, a lost rank `PeerFailure`."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts have joined or left; never raised, since no rank is added while a job runs."""
