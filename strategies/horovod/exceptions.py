"""Exceptions with Horovod's names."""

import collectives as cc

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]

HorovodInternalError = cc.CollectiveError
"""Base of errors about other ranks, such as `MismatchError` for shapes and `PeerFailure`."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts have joined or left; never raised, because no rank is added to a running job."""
