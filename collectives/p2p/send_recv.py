"""`send`, `recv`, `sendrecv`, `probe` and their object and nonblocking variants.

Each rank makes these calls alone, so wrong arguments raise an error on that rank only.
`collectives.p2p.endpoint` describes messages and matching.
"""

from __future__ import annotations

from typing import Any, TypedDict, overload

from collectives.arrays import host_arrays, streams
from collectives.arrays.host_arrays import Array
from collectives.calls import pickling
from collectives.calls.group import Group
from collectives.calls.overloads import A, Unpack
from collectives.calls.requests import Request
from collectives.p2p.endpoint import P2PEndpoint
from collectives.tracing.call_sites import caller
from collectives.transport.header import OBJECT, Envelope

__all__ = [
    "ReceiveOptions",
    "irecv",
    "isend",
    "probe",
    "recv",
    "recv_object",
    "send",
    "send_object",
    "sendrecv",
]


class ReceiveOptions(TypedDict, total=False):
    """Options of `recv` and `irecv`, for type checkers."""

    tag: int | None
    timeout: float | None


def send(group: Group, x: Any, dest: int, *, tag: int = 0, timeout: float | None = None) -> None:
    """Send an array to another rank, which calls `recv` or `irecv`.

    Returns at once, and you may change `x`: a copy holds unreceived data. If more than 256 MiB are
    on the way to `dest`, the call waits until `dest` receives. Arrays to one rank keep their order.
    Any thread may send, also while other threads send and receive.

    Args:
        x: shape (...), as for `allreduce`.
        dest: another rank.
        tag: integer from 0 to 2^63 - 1 for the matching on the other rank.
        timeout: seconds until `dest` must have received the array; None uses UNISONO_TIMEOUT. The
            next `send` or `recv` of this rank raises the error.

    Raises:
        ValueError: `dest` is not another rank, or the tag is out of range.
        TypeError: the elements cannot be read or moved (`collectives.arrays.dtypes`).
        CollectiveTimeout: an array sent earlier was not received before its deadline.
        PeerFailure: a rank is dead.

    Cost: one message up to 4 KiB, else two; one copy of S bytes.

    Example:
        >>> import collectives as cc
        >>> comm = cc.init()
        >>> if comm.rank > 0:
        ...     comm.send([1.0, 2.0], 0)
        >>> parts = [comm.recv(source) for source in range(1, comm.size) if comm.rank == 0]
    """
    direct = group.state_of(P2PEndpoint)
    with direct.enter("send", timeout, tag, caller(), dest=dest) as deadline:
        direct.send(host_arrays.host_view(x, operation="send").host, dest, tag, deadline)


def isend(
    group: Group, x: Any, dest: int, *, tag: int = 0, timeout: float | None = None
) -> Request[None]:
    """Start sending an array to another rank, without a copy.

    Returns at once. Do not change `x` until the request is done: when the other rank has received
    the array, or earlier for a short array. Arguments and errors as `send`; some errors are raised
    by `wait`. `timeout` starts now.

    Data moves during any point-to-point call of this rank. If MPI allows several threads, as it
    does by default, data also moves between calls.

    Example:
        >>> import collectives as cc
        >>> comm = cc.init()
        >>> others = [rank for rank in range(comm.size) if rank != comm.rank]
        >>> requests = [comm.isend([comm.rank], rank, tag=7) for rank in others]
        >>> requests += [comm.irecv(rank, tag=7) for rank in others]
        >>> sum(request.wait()[0] for request in requests[len(others):]) == sum(others)
        True
        >>> results = [request.wait() for request in requests]
    """
    direct = group.state_of(P2PEndpoint)
    with direct.enter("isend", timeout, tag, caller(), dest=dest) as deadline:
        return Request(
            direct.isend(host_arrays.host_view(x, operation="isend").host, dest, tag, deadline)
        )


@overload
def recv(
    group: Group, source: int | None = None, *, out: None = None, **options: Unpack[ReceiveOptions]
) -> Array: ...
@overload
def recv(
    group: Group, source: int | None = None, *, out: A, **options: Unpack[ReceiveOptions]
) -> A: ...
def recv(
    group: Group,
    source: int | None = None,
    *,
    tag: int | None = 0,
    out: Any = None,
    timeout: float | None = None,
) -> Any:
    """Receive the next array that another rank sends to this rank with this tag.

    Args:
        source: another rank; None receives the first array from any rank. To learn its source, use
            the `envelope` of an `irecv` request, or call `probe` first.
        tag: tag of the array; None for any tag.
        out: NumPy array or torch tensor for the result, with the shape and dtype that was sent;
            None returns a new array.
        timeout: seconds; None uses UNISONO_TIMEOUT.

    Returns:
        `out`, or a new NumPy array of the shape and dtype that was sent.

    Raises:
        ValueError: `source` is not another rank; or `out` has another shape, and the array is lost.
        TypeError: `out` has another dtype, or an object was sent; the data is lost.
        CollectiveTimeout: no array has arrived at the deadline.
        PeerFailure: a rank is dead.

    Cost: the elements arrive in `out` without a copy, except short arrays and arrays received in
        another order than sent.
    """
    direct = group.state_of(P2PEndpoint)
    with direct.enter("recv", timeout, tag, caller(), source=source) as deadline:
        return direct.recv(source, tag, deadline, out)


@overload
def irecv(
    group: Group, source: int | None = None, *, out: None = None, **options: Unpack[ReceiveOptions]
) -> Request[Array]: ...
@overload
def irecv(
    group: Group, source: int | None = None, *, out: A, **options: Unpack[ReceiveOptions]
) -> Request[A]: ...
def irecv(
    group: Group,
    source: int | None = None,
    *,
    tag: int | None = 0,
    out: Any = None,
    timeout: float | None = None,
) -> Request[Any]:
    """Start receiving an array from another rank.

    Returns at once. Any number of receives may be open: an array matches the oldest one that fits.
    Arguments and errors as `recv`; some errors are raised by `wait`. `timeout` starts now;
    `math.inf` disables it. Do not read `out` until the request is done.

    Returns:
        A request for the result of `recv`; its `envelope` has source, tag, shape and dtype.

    Example:
        >>> import collectives as cc
        >>> comm = cc.init()
        >>> for _ in range(comm.size - 1) if comm.rank == 0 else ():
        ...     request = comm.irecv()
        ...     x = request.wait()
        ...     assert x == request.envelope.source
        >>> if comm.rank > 0:
        ...     comm.send(comm.rank, 0)
    """
    direct = group.state_of(P2PEndpoint)
    with direct.enter("irecv", timeout, tag, caller(), source=source) as deadline:
        ordered = streams.capture_streams((out,))
        return Request(direct.irecv(source, tag, deadline, out, ordered))


@overload
def sendrecv(
    group: Group,
    x: Any,
    dest: int,
    source: int | None = None,
    *,
    tag: int = 0,
    out: None = None,
    timeout: float | None = None,
) -> Array: ...
@overload
def sendrecv(
    group: Group,
    x: Any,
    dest: int,
    source: int | None = None,
    *,
    tag: int = 0,
    out: A,
    timeout: float | None = None,
) -> A: ...
def sendrecv(
    group: Group,
    x: Any,
    dest: int,
    source: int | None = None,
    *,
    tag: int = 0,
    out: Any = None,
    timeout: float | None = None,
) -> Any:
    """Send an array to one rank while receiving an array from the same or another rank.

    Like `send`, which copies, followed by `recv`, both with this tag; so `out` may be `x`.
    Arguments, result and errors as for `send` and `recv`. The other ranks need not call `sendrecv`.

    Example:
        >>> import collectives as cc
        >>> comm = cc.init()
        >>> right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        >>> if comm.size > 1:
        ...     assert comm.sendrecv(comm.rank, right, left) == left
    """
    direct = group.state_of(P2PEndpoint)
    with direct.enter("sendrecv", timeout, tag, caller(), dest=dest, source=source) as deadline:
        direct.send(host_arrays.host_view(x, operation="sendrecv").host, dest, tag, deadline)
        return direct.recv(source, tag, deadline, out)


def probe(
    group: Group,
    source: int | None = None,
    *,
    tag: int | None = 0,
    timeout: float | None = None,
) -> Envelope:
    """Wait until an array can be received, without receiving it.

    Args:
        source: another rank; None for any rank.
        tag: tag of the array; None for any tag.
        timeout: seconds; None uses UNISONO_TIMEOUT.

    Returns:
        Source, tag, shape and dtype of the array that `recv` with these arguments would return
        next, unless another thread receives it first.

    Raises:
        ValueError: `source` is not another rank, or the tag is out of range.
        CollectiveTimeout: no array has arrived at the deadline. Unlike after other timeouts, the
            communicator stays usable.
        PeerFailure: a rank is dead.

    Example:
        >>> import collectives as cc
        >>> comm = cc.init()
        >>> if comm.rank == 1:
        ...     comm.send([1.0, 2.0], 0, tag=5)
        >>> if comm.rank == 0 and comm.size > 1:
        ...     source, tag, shape, dtype = comm.probe(tag=None)
        ...     x = comm.recv(source, tag=tag)
    """
    direct = group.state_of(P2PEndpoint)
    with direct.enter("probe", timeout, tag, caller(), source=source) as deadline:
        return direct.probe(source, tag, deadline)


def send_object(
    group: Group, obj: Any, dest: int, *, tag: int = 0, timeout: float | None = None
) -> None:
    """Send a Python object to another rank, which calls `recv_object`, by pickle.

    Arguments, errors and order as `send`; see `broadcast_object` about pickle.
    """
    direct = group.state_of(P2PEndpoint)
    with direct.enter("send_object", timeout, tag, caller(), dest=dest) as deadline:
        direct.send(pickling.dumps(obj), dest, tag, deadline, OBJECT)


def recv_object(
    group: Group,
    source: int | None = None,
    *,
    tag: int | None = 0,
    timeout: float | None = None,
) -> Any:
    """Receive the next Python object that another rank sends to this rank, by pickle.

    Arguments and errors as `recv`. If an array was sent, the call raises `TypeError` and the array
    is lost. See `broadcast_object` about pickle.

    Returns:
        A copy of the object.

    Example:
        >>> import collectives as cc
        >>> comm = cc.init()
        >>> if comm.rank == 1:
        ...     comm.send_object({"seed": 7}, 0)
        >>> options = comm.recv_object(1) if comm.rank == 0 and comm.size > 1 else {"seed": 7}
        >>> options["seed"]
        7
    """
    direct = group.state_of(P2PEndpoint)
    with direct.enter("recv_object", timeout, tag, caller(), source=source) as deadline:
        data = direct.recv(source, tag, deadline, kind=OBJECT)
    return pickling.loads(data)
