"""Process groups under the operators of PyTorch's dispatcher, `torch.ops.c10d`.

A call on a group runs its method directly, because an operator takes 60 us more. If something
observes or replaces operators, the call goes through the operator, as on Gloo::

    all_reduce(t) -> group.allreduce -> method                     nothing observes
    all_reduce(t) -> group.allreduce -> c10d::allreduce_ -> profiler, dispatch mode, subclass of
                                        tensors, fake or meta tensor -> kernel -> method

PyTorch's kernels for CPU tensors call a backend written in C++. The kernels here have the dispatch
key of a device that no tensor has, which `_dispatch` includes. Groups of other backends keep the
kernels of PyTorch. Kernels for CPU could only pass such calls on while they hold the interpreter
lock, and Gloo's thread needs it to free tensors: a deadlock, once in some thousand calls.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d
from torch.utils._pytree import tree_leaves

from collectives import extend
from strategies.torch.work import DONE

__all__ = ["calling_frame", "install", "observable"]

G = TypeVar("G", bound=type[distributed.ProcessGroup])

# Operators of `torch.ops.c10d`, and the methods of a group that implement them.
_METHODS = {
    "allreduce_": "allreduce",
    "allreduce_coalesced_": "allreduce_coalesced",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "allgather",
    "_allgather_base_": "all_gather_single",
    "allgather_into_tensor_coalesced_": "all_gather_single_coalesced",
    "allgather_coalesced_": "allgather_coalesced",
    "gather_": "gather",
    "scatter_": "scatter",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_single_coalesced",
    "alltoall_": "alltoall",
    "alltoall_base_": "all_to_all_single",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv_anysource",
    "barrier": "barrier",
}

# Reductions by their number in operators; PREMUL_SUM has a factor, which no operator passes.
_KINDS = {
    int(kind): kind
    for name, kind in distributed.ReduceOp.RedOpType.__members__.items()
    if name != "PREMUL_SUM"
}

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_profiling: Callable[[], bool] = torch.autograd._profiler_enabled

# The key of the kernels: below dispatch modes, and above keys of dense tensors.
_KEY = torch._C._dispatch_key_parse("FPGA")

# The libraries of the kernels, which end with them; and the methods of groups by operator.
_kernels: list[torch.library.Library] = []
_direct: dict[str, Callable[..., distributed.Work]] = {}

# Code of the functions that take the place of methods, for `calling_frame`.
_entry_codes: set[CodeType] = set()

# Classes of groups that are observable.
_observable: list[type] = []

# Works that kernels have made in the current call of this thread: (C++ half, Python half).
_calls = threading.local()


class _Options(NamedTuple):
    """Options of an operation, as PyTorch's option structures have them."""

    reduceOp: Any
    rootRank: int
    asyncOp: bool
    timeout: timedelta


class _WorkOwner(distributed.ProcessGroup):
    """Hands a `Work` of Python to C++ so that C++ keeps it alive.

    Only results of a group's methods are kept: C++ objects made otherwise from a `Work` outlive
    its Python half, and then their `wait` never ends.
    """

    def __init__(self, work: distributed.Work) -> None:
        super().__init__(0, 1)
        self._work = work

    def barrier(self, opts: Any) -> distributed.Work:
        return self._work


def observable(kind: G) -> G:
    """Decorate a class of groups: its calls are operators while something observes them."""
    for operator, name in _METHODS.items():
        method = _direct[operator] = getattr(kind, name)
        setattr(kind, name, _observed(operator, method))
    _observable.append(kind)
    return kind


def _observed(
    operator: str, method: Callable[..., distributed.Work]
) -> Callable[..., distributed.Work]:
    def call(self: Any, *arguments: Any, **options: Any) -> distributed.Work:
        if _modes() or _profiling() or _is_special(arguments):
            return _dispatch(operator, self, method, arguments, options)
        return method(self, *arguments, **options)

    # Errors name the entry point by its frame.
    call.__code__ = call.__code__.replace(co_name=method.__name__)
    _entry_codes.add(call.__code__)
    return functools.wraps(method)(call)


def calling_frame() -> FrameType:
    """Return the frame that called a group's method: called by the method."""
    frame = first = extend.caller().f_back
    while frame is not None and frame.f_code not in _entry_codes:
        frame = frame.f_back
    found = first if frame is None else frame.f_back  # C++ calls operators without the method
    assert found is not None
    return found


def _is_special(arguments: tuple[Any, ...]) -> bool:
    """Return whether tensors are on other devices, or subclasses such as fake tensors."""
    for value in arguments:
        while type(value) is list and value:
            value = value[0]
        if type(value) in _PLAIN:
            if not value.is_cpu:
                return True
        elif isinstance(value, torch.Tensor):
            return True
    return False


def _dispatch(
    operator: str,
    group: distributed.ProcessGroup,
    method: Callable[..., distributed.Work],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> distributed.Work:
    """Run a call on a group as an operator, and return its `Work`."""
    given = inspect.signature(method).bind(group, *arguments, **options)
    given.apply_defaults()
    operands = list(given.arguments.values())[1:]
    opts = operands.pop() if "opts" in given.arguments else None
    if not _kernels or not _is_passed(group, operands, opts):
        return method(group, *arguments, **options)
    values = iter(operands)
    passed = [
        _OPTIONS[name](group, opts) if name in _OPTIONS else next(values)
        for name in _arguments(operator)
    ]
    # Nested, because a callback of an operation may call another one.
    before, _calls.works = getattr(_calls, "works", None), []
    try:
        # Errors name the line of the program, not of its dispatch mode.
        origin = extend.current_origin()
        with extend.calls_from(origin), torch._C._IncludeDispatchKeyGuard(_KEY):
            result = getattr(torch.ops.c10d, operator).default(*passed)
    finally:
        made, _calls.works = _calls.works, before
    found = distributed.Work.unbox(result[-1] if isinstance(result, tuple) else result)
    # No kernel of this module ran: fake tensors, or another device.
    if not any(owned is found for owned, _ in made):
        return found
    # C++'s half has no method but `wait` and `get_future`. A subclass may hold several tensors,
    # which have been sent one by one; the last one is complete after the others.
    return made[-1][1]


def _is_passed(group: distributed.ProcessGroup, operands: Sequence[Any], opts: Any) -> bool:
    """Return whether an operator can pass these arguments to a backend of the group."""
    if hasattr(opts, "reduceOp") and opts.reduceOp.op not in _reductions():
        return False  # a factor, which is not an argument of operators
    # Sparse tensors have keys above the kernels', and other devices have backends of PyTorch.
    devices = {device.type for device in group._device_types} | {"meta"}
    tensors = [x for x in tree_leaves(operands) if type(x) in _PLAIN]
    return all(x.device.type in devices and not x.is_sparse for x in tensors)


def _arguments(operator: str) -> list[str]:
    """Return the names of an operator's arguments."""
    schema = getattr(torch.ops.c10d, operator).default._schema
    return [argument.name for argument in schema.arguments]


@functools.cache
def _reductions() -> dict[Any, Any]:
    """Return the arguments of operators that mean reductions, by reduction.

    Only C++ makes them, so a kernel takes them from calls of a group of PyTorch. A dispatch mode
    would import `torch._dynamo`, which takes seconds.
    """
    found: dict[int, Any] = {}

    def take(tensors: Any, group: Any, op: Any, *others: Any) -> Any:
        found[op.op()] = op
        return tensors, DONE.boxed()

    library = torch.library.Library("c10d", "IMPL")  # the kernel ends with it
    library.impl("allreduce_", take, "FPGA")
    group = distributed.ProcessGroup(0, 1)
    for kind in _KINDS.values():
        opts = distributed.AllreduceOptions()
        opts.reduceOp = distributed.ReduceOp(kind)
        with torch._C._IncludeDispatchKeyGuard(_KEY):
            group.allreduce([torch.empty(0)], opts)
    return {kind: found[number] for number, kind in _KINDS.items()}


# Arguments of operators that are not operands of methods, by group and options.
_OPTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "process_group": lambda group, opts: group.boxed(),
    "reduce_op": lambda group, opts: _reductions()[opts.reduceOp.op],
    "root_rank": lambda group, opts: opts.rootRank,
    "root_tensor": lambda group, opts: 0,
    "sparse_indices": lambda group, opts: None,
    "device_ids": lambda group, opts: [],
    # Finds the kernel of `barrier` by its device.
    "tensor": lambda group, opts: torch.empty(1, dtype=torch.uint8),
    "async_op": lambda group, opts: opts.asyncOp,
    "timeout": lambda group, opts: round(opts.timeout.total_seconds() * 1000),
}


def install() -> None:
    """Make the operators run the methods of observable groups; harmless when repeated.

    Without functions of PyTorch for this, operators stay as they are, and nothing observes the
    groups.
    """
    reads_reductions = hasattr(torch.classes.c10d.ReduceOp(), "op")
    if _kernels or not reads_reductions or not hasattr(distributed, "all_gather_single"):
        return
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "FPGA")
    _reductions()  # before the kernels, and before a profile that would show its calls
    library = torch.library.Library("c10d", "IMPL")
    for operator in _METHODS:
        library.impl(operator, _kernel(operator), "FPGA", with_keyset=True)
    functions = torch.library.Library("_c10d_functional", "IMPL")
    functions.impl("all_gather_into_tensor_out", _all_gather_out, "CPU")
    functions.impl("reduce_scatter_tensor_out", _reduce_scatter_out, "CPU")
    _kernels.extend((others, library, functions))


# C++ implements these two by operators, which would not find the kernels.
def _all_gather_out(
    tensor: torch.Tensor, size: int, name: str, *, out: torch.Tensor
) -> torch.Tensor:
    group: Any = c10d._resolve_process_group(name)
    opts = c10d.AllgatherOptions()
    opts.asyncOp = True
    c10d._register_work(out, group.all_gather_single(out, tensor, opts))
    return out


def _reduce_scatter_out(
    tensor: torch.Tensor, op: str, size: int, name: str, *, out: torch.Tensor
) -> torch.Tensor:
    group: Any = c10d._resolve_process_group(name)
    opts = c10d.ReduceScatterOptions()
    opts.reduceOp = distributed.ReduceOp(getattr(distributed.ReduceOp, op.upper()))
    opts.asyncOp = True
    c10d._register_work(out, group.reduce_scatter_single(out, tensor, opts))
    return out


def _kernel(operator: str) -> Callable[..., Any]:
    """Return an operator's kernel."""
    names = _arguments(operator)
    place = names.index("process_group")
    returns_tensors = len(getattr(torch.ops.c10d, operator).default._schema.returns) > 1

    def kernel(keys: Any, *arguments: Any) -> Any:
        group: Any = distributed.ProcessGroup.unbox(arguments[place])
        # PyTorch's kernels, for fake tensors, and for groups that a dispatch mode calls.
        if not isinstance(group, tuple(_observable)) or _is_meta(arguments):
            packet = getattr(torch.ops.c10d, operator).default
            return packet.redispatch(keys.remove(_KEY), *arguments)
        # PyTorch leaves out trailing arguments that have their default.
        values = dict(zip(names, arguments, strict=False))
        operands = [value for name, value in values.items() if name not in _OPTIONS]
        if "async_op" in names:
            op = values.get("reduce_op")
            operands.append(
                _Options(
                    None if op is None else distributed.ReduceOp(_KINDS[op.op()]),
                    values.get("root_rank", 0),
                    values.get("async_op", True),
                    timedelta(milliseconds=values.get("timeout", -1)),
                )
            )
        boxed = _box(_direct[operator](group, *operands))
        return (arguments[0], boxed) if returns_tensors else boxed

    return kernel


def _is_meta(arguments: Sequence[Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and not x.is_cpu for x in tree_leaves(arguments))


def _box(work: distributed.Work) -> Any:
    """Return a `Work` for C++."""
    # Lives as long as this process.
    if work is DONE:
        return work.boxed()
    owned = distributed.ProcessGroup.barrier(_WorkOwner(work), distributed.BarrierOptions())
    works = getattr(_calls, "works", None)
    if works is not None:
        works.append((owned, work))
    return owned.boxed()
