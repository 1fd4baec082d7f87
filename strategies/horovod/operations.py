"""Named operations on arrays of any library: as Horovod's, for every door the same.

Each has a form that returns a `Handle` at once; `synchronize` waits for it. Ranks may make calls in
any order: those of one `name` belong together, and calls without a name in the order in which they
are made. Arrays must not change until a call is done.

An error in the arguments is raised at once on the rank that has made it, and as a `MismatchError`
by the same call of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import collectives as cc
from strategies import arrays
from strategies.horovod.compression import Compression, Compressor
from strategies.horovod.execution import Pending
from strategies.horovod.process_sets import Bound, ProcessSet, global_process_set
from strategies.horovod.words import Description, Key

__all__ = [
    "Adasum",
    "Average",
    "Call",
    "Handle",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "joining",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "scaled",
    "start",
    "synchronize",
]

Average, Sum, Min, Max, Product = cc.MEAN, cc.SUM, cc.MIN, cc.MAX, cc.PRODUCT

Adasum = "Adasum"
"""Not supported: using it is an error that says what to use."""


class Handle:
    """A call under way; made by the operations that end in `_async`.

    Args:
        bound: among whom.
        pending: the call.
        finish: makes what is returned of its results.
    """

    def __init__(
        self, bound: Bound, pending: Pending, finish: Callable[[Sequence[Any]], Any]
    ) -> None:
        self._bound, self._pending, self._finish = bound, pending, finish
        self._result: Any = None
        self.settled = False  # whether somebody has seen that it is done

    def done(self) -> bool:
        """Tell whether `wait` would return, or raise, at once."""
        self.settled = self.settled or self._pending.done
        return self._pending.done

    def wait(self) -> Any:
        """Wait until it is done; returns the result, or raises what has gone wrong."""
        pending = self._pending
        if not pending.done:
            assert self._bound.engine is not None
            self._bound.engine.wait(pending)
        self.settled = True
        if pending.error is not None:
            raise pending.error
        if self._finish is not _nothing:
            self._result, self._finish = self._finish(pending.results), _nothing
            pending.results = ()
        return self._result


def _nothing(results: Sequence[Any]) -> None:
    """Stand for what was called already."""


class Call(NamedTuple):
    """What a call means, once its arguments are checked."""

    description: Description
    arrays: Sequence[Any]
    finish: Callable[[Sequence[Any]], Any]
    targets: Sequence[Any] | None = None
    splits: Sequence[int] | None = None


def start(
    operation: str,
    process_set: ProcessSet,
    name: str | None,
    prepare: Callable[[Bound], Call],
    *,
    alone: bool = True,
) -> Handle:
    """Check a call, and let it begin; or tell the others that this rank has refused it.

    Args:
        operation: for errors.
        process_set: among whom.
        name: by which ranks find each other's calls.
        prepare: checks the arguments, and says what they mean.
        alone: whether nobody waits for it at once.

    Raises:
        TypeError, ValueError: of `prepare`; or the name is in use.
    """
    bound = process_set.bound(operation)
    engine = bound.engine
    assert engine is not None
    key = Key(None, next(engine.unnamed)) if name is None else Key(str(name))
    try:
        if key.name is not None:
            earlier = engine.handles.get(key.name)
            if earlier is not None and not earlier.settled:
                raise ValueError(
                    f"{operation}: the name is in use, expected synchronize of the earlier call "
                    f"first, got {key.name!r} twice"
                )
        call = prepare(bound)
    except (TypeError, ValueError) as error:
        refused = Description(operation, refused=f"{type(error).__name__}: {error}")
        engine.submit(Pending(key, refused), alone=True)
        raise
    pending = Pending(key, call.description, call.arrays, call.targets, call.splits)
    handle = Handle(bound, pending, call.finish)
    if key.name is not None:
        engine.handles[key.name] = handle
    engine.submit(pending, alone=alone)
    return handle


def poll(handle: Handle) -> bool:
    """Tell whether `synchronize` would return at once."""
    return _handle(handle).done()


def synchronize(handle: Handle) -> Any:
    """Wait until a call is done; returns its result. A second time it returns the same.

    Raises:
        TypeError: this is not a handle.
        MismatchError: the ranks do not mean the same call, or another rank has refused it.
        CollectiveTimeout: some ranks have not made the call; the error names them.
        PeerFailure: a rank has died.
    """
    return _handle(handle).wait()


def _handle(handle: Any) -> Handle:
    if not isinstance(handle, Handle):
        raise TypeError(f"synchronize: expected a handle, got {type(handle).__name__}")
    return handle


# All-reduce.


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce the arrays of all ranks; returns a new array.

    Args:
        tensor: shape (...); the same shape and dtype on all ranks.
        average: as `op=Average`, or `op=Sum` if False.
        name: by which ranks find each other's calls.
        compression: how it travels.
        op: Average, the default; of integers it is rounded towards zero. Sum, Min, Max, Product.
        prescale_factor: what arrays are multiplied by before.
        postscale_factor: what the result is multiplied by.
        process_set: among whom.
    """
    how = _reduction(
        [tensor], average, op, prescale_factor, postscale_factor, compression, one=True
    )
    return start("allreduce", process_set, name, how, alone=False).wait()


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce`."""
    how = _reduction([tensor], average, op, prescale_factor, postscale_factor, one=True)
    return start("allreduce", process_set, name, how)


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce the arrays of all ranks in place."""
    how = _reduction([tensor], average, op, prescale_factor, postscale_factor, in_place=True)
    start("allreduce", process_set, name, how, alone=False).wait()
    return tensor


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce_`."""
    how = _reduction(
        [tensor], average, op, prescale_factor, postscale_factor, in_place=True, one=True
    )
    return start("allreduce", process_set, name, how)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce several arrays by one call; returns new ones."""
    how = _reduction(tensors, average, op, prescale_factor, postscale_factor, compression)
    return list(start("allreduce", process_set, name, how, alone=False).wait())


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allreduce`."""
    how = _reduction(tensors, average, op, prescale_factor, postscale_factor)
    return start("allreduce", process_set, name, how)


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce several arrays in place by one call."""
    how = _reduction(tensors, average, op, prescale_factor, postscale_factor, in_place=True)
    start("allreduce", process_set, name, how, alone=False).wait()
    return list(tensors)


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allreduce_`."""
    how = _reduction(tensors, average, op, prescale_factor, postscale_factor, in_place=True)
    return start("allreduce", process_set, name, how)


# Reduce-scatter.


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce the arrays of all ranks, and keep a share of the rows.

    The first ranks get one row more where the rows cannot be shared evenly.
    """
    how = _scattering([tensor], op, prescale_factor, postscale_factor, compression, one=True)
    return start("reducescatter", process_set, name, how, alone=False).wait()


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `reducescatter`."""
    how = _scattering([tensor], op, prescale_factor, postscale_factor, one=True)
    return start("reducescatter", process_set, name, how)


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Make several reduce-scatters by one call."""
    how = _scattering(tensors, op, prescale_factor, postscale_factor, compression)
    return list(start("reducescatter", process_set, name, how, alone=False).wait())


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `grouped_reducescatter`."""
    how = _scattering(tensors, op, prescale_factor, postscale_factor)
    return start("reducescatter", process_set, name, how)


# Rows.


def allgather(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Join the arrays of all ranks along their first axis, which may differ in length."""
    how = joining([tensor], one=True)
    return start("allgather", process_set, name, how, alone=False).wait()


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `allgather`."""
    return start("allgather", process_set, name, joining([tensor], one=True))


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Join several arrays by one call."""
    joined = start("allgather", process_set, name, joining(tensors), alone=False).wait()
    return list(joined)


def grouped_allgather_async(
    tensors: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allgather`."""
    return start("allgather", process_set, name, joining(tensors))


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give every rank some rows, and join what all ranks give to this one.

    Args:
        tensor: shape (n, ...).
        splits: how many rows for every rank; they add up to n. None: the same for all.
        name: as for `allreduce`.
        process_set: as for `allreduce`.

    Returns:
        The rows; with `splits` a pair of these, and of how many each rank has given.
    """
    how = _exchange(tensor, splits)
    return start("alltoall", process_set, name, how, alone=False).wait()


def alltoall_async(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `alltoall`."""
    return start("alltoall", process_set, name, _exchange(tensor, splits))


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the array of one rank, whose number is that of the world, in a new one."""
    how = _sending(tensor, root_rank)
    return start("broadcast", process_set, name, how, alone=False).wait()


def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `broadcast`."""
    return start("broadcast", process_set, name, _sending(tensor, root_rank))


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Overwrite an array by that of one rank."""
    how = _sending(tensor, root_rank, in_place=True)
    start("broadcast", process_set, name, how, alone=False).wait()
    return tensor


def broadcast_async_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `broadcast_`."""
    return start("broadcast", process_set, name, _sending(tensor, root_rank, in_place=True))


# All at once.


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks are here."""
    what = Call(Description("barrier"), (), lambda results: None)
    start("barrier", process_set, None, lambda bound: what, alone=False).wait()


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Say that this rank has no more data, and wait until all ranks do.

    Meanwhile it takes part in what the others do: an all-reduce is then one over the ranks that
    still have data, whatever its op; an Average divides by their number. It gives no rows to an
    allgather. An alltoall or a reducescatter, and a broadcast from it, is an error on all ranks.

    Args:
        device: not looked at.
        process_set: among whom.

    Returns:
        The rank that has called this last; the same on all ranks.
    """
    bound = process_set.bound("join")
    assert bound.engine is not None
    return bound.ranks[bound.engine.join()]


# What calls mean.


_DTYPES = frozenset(
    f"{kind}{bits}"
    for kind, sizes in {
        "int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64),
        "complex": (64, 128), "bfloat": (16,), "bool": ("",),
    }.items()
    for bits in sizes
)  # fmt: skip


def _array(x: Any) -> Any:
    """Return what `arrays` knows: numbers and lists become NumPy arrays, tensors lose autograd."""
    if not arrays.is_array(x):
        x = np.asarray(x)
    if arrays.dtype_name(x) not in _DTYPES:
        raise TypeError(f"expected an array of numbers, got one of {arrays.dtype_name(x)}")
    if getattr(x, "is_sparse", False):
        raise TypeError("expected a dense tensor, got a sparse one; see sparse_allreduce_async")
    return x.detach() if hasattr(x, "detach") else x


def _kind(x: Any) -> tuple[str, tuple[int, ...]]:
    return arrays.dtype_name(x), tuple(x.shape)


def _row(x: Any) -> tuple[str, tuple[int, ...]]:
    return arrays.dtype_name(x), tuple(x.shape[1:])


def _reduction(
    tensors: Sequence[Any],
    average: bool | None,
    op: Any,
    before: float,
    after: float,
    compression: Compressor = Compression.none,
    *,
    in_place: bool = False,
    one: bool = False,
) -> Callable[[Bound], Call]:
    """Describe an all-reduce; `one` array is returned as such, several in a list."""

    def prepare(bound: Bound) -> Call:
        if average is not None and op is not None:
            raise ValueError("allreduce: expected average or op, got both")
        usual = Sum if average is False else Average
        op_or_usual = usual if op is None else op
        sent = _Sent(tensors, (before, after), compression, in_place=in_place, one=one)
        return _reducing("allreduce", op_or_usual, sent)

    return prepare


def _scattering(
    tensors: Sequence[Any],
    op: Any,
    before: float,
    after: float,
    compression: Compressor = Compression.none,
    *,
    one: bool = False,
) -> Callable[[Bound], Call]:
    def prepare(bound: Bound) -> Call:
        sent = _Sent(tensors, (before, after), compression, one=one)
        call = _reducing("reducescatter", op, sent)
        if any(not shape for _, shape in call.description.arrays):
            raise ValueError("reducescatter: a scalar has no rows, expected shape (n, ...)")
        return call

    return prepare


@dataclass(frozen=True)
class _Sent:
    """What is reduced, and how it travels; see `allreduce`."""

    tensors: Sequence[Any]
    factors: tuple[float, float]
    compression: Compressor
    in_place: bool = False
    one: bool = False


def _reducing(operation: str, op: Any, sent: _Sent) -> Call:
    if op == Adasum:
        raise ValueError(
            f"{operation}: Adasum is not supported, expected Average, Sum, Min, Max or Product; "
            "see docs/migrate-from-horovod.md"
        )
    if sent.in_place and any(
        not arrays.is_array(x) or hasattr(x, "at") for x in sent.tensors
    ):  # numbers, or arrays of JAX
        raise TypeError(f"{operation}: expected arrays that can be changed in place")
    given = [_array(x) for x in sent.tensors]
    for x in given:
        _check(operation, op, arrays.dtype_name(x))
    pairs = [sent.compression.compress(x) for x in given]
    before, after = (float(factor) for factor in sent.factors)
    small = [scaled(x, before) for x, _ in pairs]
    what = Description(operation, tuple([_kind(x) for x in small]), op.value, -1, (before, after))

    def finish(results: Sequence[Any]) -> Any:
        made = [
            sent.compression.decompress(scaled(x, after), context)
            for x, (_, context) in zip(results, pairs, strict=True)
        ]
        if sent.in_place:
            for target, result in zip(given, made, strict=True):
                if target is not result:
                    target[...] = result
            made = list(sent.tensors)
        return made[0] if sent.one else made

    return Call(what, small, finish, given if sent.in_place else None)


def _check(operation: str, op: Any, dtype: str) -> None:
    """Refuse a pair of op and dtype that has no meaning."""
    if op not in (Average, Sum, Min, Max, Product):
        raise ValueError(
            f"{operation}: expected Average, Sum, Min, Max or Product as op, got {op!r}"
        )
    if dtype == "bool" and op not in (Min, Max):
        raise TypeError(f"{operation}: bool has no {op.value}; Min is 'all', Max is 'any'")
    if dtype.startswith("complex") and op in (Min, Max):
        raise TypeError(f"{operation}: complex numbers have no order, got {op.value}")


def scaled(x: Any, factor: float) -> Any:
    """Multiply an array: integers rounded towards zero, 16-bit floats once at the end."""
    dtype = arrays.dtype_name(x)
    if factor == 1:
        return x
    if "int" in dtype or dtype == "bool":
        host = arrays.host(x)
        whole = np.asarray(x.cpu() if host is None else host).astype(np.float64) * factor
        return arrays.beside(x, np.trunc(whole).astype(dtype))
    return arrays.astype(arrays.wide(x) * factor, dtype)


def joining(tensors: Sequence[Any], *, one: bool = False) -> Callable[[Bound], Call]:
    """Describe an all-gather; `one` array is returned as such, several in a list."""

    def prepare(bound: Bound) -> Call:
        given = [_array(x) for x in tensors]
        rows = [x if len(x.shape) else x.reshape(1) for x in given]
        what = Description("allgather", tuple([_row(x) for x in rows]))
        return Call(what, rows, lambda results: results[0] if one else list(results))

    return prepare


def _sending(tensor: Any, root: int, *, in_place: bool = False) -> Callable[[Bound], Call]:
    def prepare(bound: Bound) -> Call:
        if root not in bound.ranks:
            raise ValueError(
                f"broadcast: no such root_rank, expected one of {bound.ranks}, got {root}"
            )
        if in_place and (not arrays.is_array(tensor) or hasattr(tensor, "at")):
            raise TypeError(
                f"broadcast: expected an array to change in place, got {type(tensor).__name__}"
            )
        given = _array(tensor)
        what = Description("broadcast", (_kind(given),), root=bound.ranks.index(root))
        return Call(what, [given], lambda results: results[0], [given] if in_place else None)

    return prepare


def _exchange(tensor: Any, splits: Any) -> Callable[[Bound], Call]:
    def prepare(bound: Bound) -> Call:
        given, size = _array(tensor), len(bound.ranks)
        if not len(given.shape):
            raise ValueError("alltoall: a scalar has no rows, expected shape (n, ...)")
        rows = given.shape[0]
        if splits is None:
            if rows % size:
                raise ValueError(
                    f"alltoall: {rows} rows cannot be shared evenly among {size} ranks, expected "
                    "splits"
                )
            shares = [rows // size] * size
        else:
            shares = [int(n) for n in np.asarray(splits).reshape(-1)]
            if len(shares) != size or min(shares) < 0 or sum(shares) != rows:
                raise ValueError(
                    f"alltoall: splits do not fit, expected {size} numbers >= 0 that add up to "
                    f"{rows} rows, got {shares}"
                )

        def finish(results: Sequence[Any]) -> Any:
            received = arrays.beside(given, np.asarray(results[1], np.int32))
            return results[0] if splits is None else (results[0], received)

        return Call(Description("alltoall", (_row(given),)), [given], finish, splits=shares)

    return prepare
