"""Named requests: validated arguments and their description.

Each function returns a function for `handles.start`, which calls it once the call has its number.
So the error of one rank reaches all ranks, and no rank waits for the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import collectives as cc
from strategies.core import array_ops
from strategies.horovod.adasum import Adasum
from strategies.horovod.compression import Compression, Compressor
from strategies.horovod.controller.request_signature import RequestSignature
from strategies.horovod.process_sets import Bound

__all__ = [
    "Adasum",
    "Average",
    "RequestSpec",
    "Max",
    "Min",
    "Product",
    "Sum",
    "alltoall_request",
    "allgather_request",
    "allreduce_request",
    "scaled",
    "reducescatter_request",
    "broadcast_request",
]

Average, Sum, Min, Max, Product = cc.MEAN, cc.SUM, cc.MIN, cc.MAX, cc.PRODUCT


class RequestSpec(NamedTuple):
    """A call with validated arguments."""

    description: RequestSignature
    arrays: Sequence[Any]
    finish: Callable[[Sequence[Any]], Any]
    targets: Sequence[Any] | None = None
    splits: Sequence[int] | None = None


_DTYPES = frozenset(
    f"{kind}{bits}"
    for kind, sizes in {
        "int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64),
        "complex": (64, 128), "bfloat": (16,), "bool": ("",),
    }.items()
    for bits in sizes
)  # fmt: skip


def _array(x: Any) -> Any:
    """Return a supported array: numbers and lists become NumPy arrays, tensors are detached."""
    if not array_ops.is_array(x):
        x = np.asarray(x)
    if array_ops.dtype_name(x) not in _DTYPES:
        raise TypeError(f"expected an array of numbers, got one of {array_ops.dtype_name(x)}")
    if getattr(x, "is_sparse", False):
        raise TypeError("expected a dense tensor, got a sparse one; see sparse_allreduce_async")
    # Detached: results of an asynchronous call have no graph.
    return x.detach() if hasattr(x, "detach") else x


def _kind(x: Any) -> tuple[str, tuple[int, ...]]:
    return array_ops.dtype_name(x), tuple(x.shape)


def _row(x: Any) -> tuple[str, tuple[int, ...]]:
    # The first axis may differ between ranks.
    return array_ops.dtype_name(x), tuple(x.shape[1:])


def allreduce_request(
    tensors: Sequence[Any],
    average: bool | None,
    op: Any,
    before: float,
    after: float,
    compression: Compressor = Compression.none,
    *,
    in_place: bool = False,
    one: bool = False,
) -> Callable[[Bound], RequestSpec]:
    """Describe an all-reduce. `one` array is returned without a list."""

    def prepare(bound: Bound) -> RequestSpec:
        if average is not None and op is not None:
            raise ValueError("allreduce: expected average or op, got both")
        usual = Sum if average is False else Average
        op_or_usual = usual if op is None else op
        sent = _Payload(tensors, (before, after), compression, in_place=in_place, one=one)
        return _reducing("allreduce", op_or_usual, sent)

    return prepare


def reducescatter_request(
    tensors: Sequence[Any],
    op: Any,
    before: float,
    after: float,
    compression: Compressor = Compression.none,
    *,
    one: bool = False,
) -> Callable[[Bound], RequestSpec]:
    """Describe a reduce-scatter; as `allreduce_request`."""

    def prepare(bound: Bound) -> RequestSpec:
        sent = _Payload(tensors, (before, after), compression, one=one)
        call = _reducing("reducescatter", op, sent)
        if any(not shape for _, shape in call.description.arrays):
            raise ValueError("reducescatter: a scalar has no rows, expected shape (n, ...)")
        return call

    return prepare


@dataclass(frozen=True)
class _Payload:
    """The arrays to reduce and their options; see `allreduce`."""

    tensors: Sequence[Any]
    factors: tuple[float, float]
    compression: Compressor
    in_place: bool = False
    one: bool = False


def _reducing(operation: str, op: Any, sent: _Payload) -> RequestSpec:
    # JAX arrays have `at` instead of assignment.
    if sent.in_place and any(
        not array_ops.is_array(x) or hasattr(x, "at") for x in sent.tensors
    ):  # numbers, or arrays of JAX
        raise TypeError(f"{operation}: expected arrays that can be changed in place")
    given = [_array(x) for x in sent.tensors]
    for x in given:
        _check(operation, op, array_ops.dtype_name(x))
    # Compressed before the factor, as Horovod does.
    pairs = [sent.compression.compress(x) for x in given]
    before, after = (float(factor) for factor in sent.factors)
    small = [scaled(x, before) for x, _ in pairs]
    # After compression, so that ranks with other compressions differ in their dtype.
    what = RequestSignature(
        operation, tuple([_kind(x) for x in small]), op.value, -1, (before, after)
    )

    def finish(results: Sequence[Any]) -> Any:
        made = [
            sent.compression.decompress(scaled(x, after), context)
            for x, (_, context) in zip(results, pairs, strict=True)
        ]
        if sent.in_place:
            for target, result in zip(given, made, strict=True):
                # `PendingRequest.succeed` has written results in place; only scaled copies remain.
                if target is not result:
                    target[...] = result
            made = list(sent.tensors)
        return made[0] if sent.one else made

    return RequestSpec(what, small, finish, given if sent.in_place else None)


def _check(operation: str, op: Any, dtype: str) -> None:
    """Reject pairs of op and dtype that are undefined."""
    if op is Adasum and operation == "allreduce":
        if dtype not in array_ops.COMPUTE:
            raise TypeError(f"{operation}: Adasum is for floating-point numbers, got {dtype}")
        return
    if op not in (Average, Sum, Min, Max, Product):
        also = ", Product or Adasum" if operation == "allreduce" else " or Product"
        raise ValueError(f"{operation}: expected Average, Sum, Min, Max{also} as op, got {op!r}")
    if dtype == "bool" and op not in (Min, Max):
        raise TypeError(f"{operation}: bool has no {op.value}; Min is 'all', Max is 'any'")
    if dtype.startswith("complex") and op in (Min, Max):
        raise TypeError(f"{operation}: complex numbers have no order, got {op.value}")


def scaled(x: Any, factor: float) -> Any:
    """Multiply an array; integers round toward zero, 16-bit floats once after the product."""
    dtype = array_ops.dtype_name(x)
    if factor == 1:
        return x
    if "int" in dtype or dtype == "bool":
        host = array_ops.host(x)
        # Through float64: integers above 2^53 lose digits.
        whole = np.asarray(x.cpu() if host is None else host).astype(np.float64) * factor
        return array_ops.on_same_device(x, np.trunc(whole).astype(dtype))
    # 16-bit floats are multiplied in float32 and rounded once.
    return array_ops.astype(array_ops.arithmetic_dtype(x) * factor, dtype)


def allgather_request(
    tensors: Sequence[Any], *, one: bool = False
) -> Callable[[Bound], RequestSpec]:
    """Describe an all-gather. `one` array is returned without a list."""

    def prepare(bound: Bound) -> RequestSpec:
        given = [_array(x) for x in tensors]
        # A scalar counts as one row.
        rows = [x if len(x.shape) else x.reshape(1) for x in given]
        what = RequestSignature("allgather", tuple([_row(x) for x in rows]))
        return RequestSpec(what, rows, lambda results: results[0] if one else list(results))

    return prepare


def broadcast_request(
    tensor: Any, root: int, *, in_place: bool = False
) -> Callable[[Bound], RequestSpec]:
    """Describe a broadcast."""

    def prepare(bound: Bound) -> RequestSpec:
        if root not in bound.ranks:
            raise ValueError(
                f"broadcast: no such root_rank, expected one of {bound.ranks}, got {root}"
            )
        if in_place and (not array_ops.is_array(tensor) or hasattr(tensor, "at")):
            raise TypeError(
                f"broadcast: expected an array to change in place, got {type(tensor).__name__}"
            )
        given = _array(tensor)
        # The root's number in the set; programs pass its number in the world.
        what = RequestSignature("broadcast", (_kind(given),), root=bound.ranks.index(root))
        return RequestSpec(what, [given], lambda results: results[0], [given] if in_place else None)

    return prepare


def alltoall_request(tensor: Any, splits: Any) -> Callable[[Bound], RequestSpec]:
    """Describe an all-to-all."""

    def prepare(bound: Bound) -> RequestSpec:
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
            # `splits` may be a tensor or a list; an empty list has no dtype of its own.
            numbers = np.asarray(splits).reshape(-1)
            if numbers.size and numbers.dtype.kind not in "iu":
                raise TypeError(f"alltoall: expected integers as splits, got {numbers.dtype}")
            shares = [int(n) for n in numbers]
            if len(shares) != size or min(shares) < 0 or sum(shares) != rows:
                raise ValueError(
                    f"alltoall: splits do not fit, expected {size} numbers >= 0 that add up to "
                    f"{rows} rows, got {shares}"
                )

        def finish(results: Sequence[Any]) -> Any:
            # int32, as Horovod returns it.
            received = array_ops.on_same_device(given, np.asarray(results[1], np.int32))
            return results[0] if splits is None else (results[0], received)

        return RequestSpec(
            RequestSignature("alltoall", (_row(given),)), [given], finish, splits=shares
        )

    return prepare
