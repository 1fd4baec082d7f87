"""`send`, `recv`, `sendrecv`, `probe` and their object and nonblocking variants.

Who makes such a call is a rank alone, so wrong arguments are errors on that rank alone. How arrays
travel, and are matched with who receives them: `collectives.p2p.endpoint`.
"""

from __future__ import annotations

from typing import Any, overload

from collectives.arrays import host_arrays, streams
from collectives.arrays.host_arrays import Array
from collectives.calls import pickling
from collectives.calls.group import Group
from collectives.calls.overloads import A
from collectives.calls.requests import Request
from collectives.p2p.endpoint import P2PEndpoint
from collectives.tracing.call_sites import caller
from collectives.transport.header import OBJECT, Envelope

__all__ = [
    "irecv",
    "isend",
    "probe",
    "recv",
    "recv_object",
    "send",
    "send_object",
    "sendrecv",
]


def send(group: Group, x: Any, dest: int, *, tag: int = 0, timeout: float | None = None) -> None:
    """Send an array to another rank, which calls `recv` or `irecv`.

    Returns at once, and `x` may change: what the other rank has not received is kept in a copy.
    Only when 256 MiB are on their way to `dest` this waits until it receives. Arrays arrive in the
    order in which they were sent. Any thread may send, also while others send and receive.

    Args:
        x: shape (...), as for `allreduce`.
        dest: another rank.
        tag: a number from 0 to 2^63 - 1, by which the other rank tells arrays apart.
        timeout: seconds within which `dest` has to receive it. The next `send` or `recv` of this
            rank finds out.

    Raises:
        ValueError: no such rank, or this one; no such tag.
        TypeError: the elements cannot be read, or cannot be moved (`collectives.arrays.dtypes`).
        CollectiveTimeout: an array that was sent before has not been received in its time.
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

    Returns at once. `x` must not change until the request is done, which is when the other rank
    has taken it, for a short array earlier. Arguments and errors as `send`, some of them from
    `wait`; `timeout` begins now.

    The array moves while any rank's thread is in a call here, and also in between where MPI allows
    several threads, as it does by default.

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
    group: Group,
    source: int | None = None,
    *,
    tag: int | None = 0,
    out: None = None,
    timeout: float | None = None,
) -> Array: ...
@overload
def recv(
    group: Group,
    source: int | None = None,
    *,
    tag: int | None = 0,
    out: A,
    timeout: float | None = None,
) -> A: ...
def recv(
    group: Group,
    source: int | None = None,
    *,
    tag: int | None = 0,
    out: Any = None,
    timeout: float | None = None,
) -> Any:
    """Receive the next array that another rank sends to this one with this tag.

    Args:
        source: another rank; None for any: the first array that has come. Who wants to know from
            where calls `irecv`, whose request has an `envelope`, or `probe` before.
        tag: as it was sent; None for any.
        out: where to put it: a NumPy array or torch tensor of the shape and dtype that was sent.
        timeout: seconds.

    Returns:
        `out`, or a new NumPy array of the shape and dtype that was sent.

    Raises:
        ValueError: no such rank, or this one; or `out` has another shape: the array is lost.
        TypeError: `out` has another dtype, or an object was sent: it is lost.
        CollectiveTimeout: nothing came in time.
        PeerFailure: a rank is dead.

    Cost: the bytes go to `out` without a copy, unless they came in the head, or in another order
        than this rank asks for them.
    """
    direct = group.state_of(P2PEndpoint)
    with direct.enter("recv", timeout, tag, caller(), source=source) as deadline:
        return direct.recv(source, tag, deadline, out)


@overload
def irecv(
    group: Group,
    source: int | None = None,
    *,
    tag: int | None = 0,
    out: None = None,
    timeout: float | None = None,
) -> Request[Array]: ...
@overload
def irecv(
    group: Group,
    source: int | None = None,
    *,
    tag: int | None = 0,
    out: A,
    timeout: float | None = None,
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

    Returns at once. Any number of receives may be open: an array goes to the oldest that wants it.
    Arguments and errors as `recv`, some of them from `wait`; `timeout` begins now, `math.inf` is
    none. `out` must not be looked at until the request is done.

    Returns:
        A request for what `recv` returns; its `envelope` tells source, tag, shape and dtype.

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
    """Send an array to one rank while receiving another one, from the same rank or another.

    As `send`, which copies, and `recv`, both with this tag; so `out` may be `x`. Arguments, result
    and errors as those. The other ranks need not call `sendrecv`.

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
    """Wait until there is an array to receive, and leave it where it is.

    Args:
        source: another rank, None for any.
        tag: as it was sent; None for any.
        timeout: seconds.

    Returns:
        Source, tag, shape and dtype of the array that `recv` with these arguments would return
        next, unless another thread receives it first.

    Raises:
        ValueError: no such rank, or this one; no such tag.
        CollectiveTimeout: nothing came in time; other than elsewhere the communicator stays usable.
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
    """Receive the next Python object that another rank sends to this one, by pickle.

    Arguments and errors as `recv`; that an array was sent is a TypeError, and the array is lost.
    See `broadcast_object` about pickle.

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
