"""`hvd.DistributedOptimizer`, and `hvd.join`, which takes part in its steps."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import collectives as cc
from strategies import distributed_optimizer
from strategies.core import agreement
from strategies.core.array_ops import is_array
from strategies.core.validation import integer
from strategies.horovod.compression import Compression, Compressor
from strategies.horovod.operations import Adasum, Average
from strategies.horovod.process_sets import ProcessSet, global_process_set
from strategies.remote_optimizers import dispatch

__all__ = ["DistributedOptimizer", "join"]

# Those whose steps `join` takes part in. Optax's are tuples of functions, and are not.
_LIVE: weakref.WeakSet[Any] = weakref.WeakSet()
_LOCK = threading.Lock()  # ranks may be threads


def DistributedOptimizer(
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wrap an optimizer so that its steps apply the gradients of all ranks.

    It is `strategies.DistributedOptimizer`, with its methods and errors. If ranks are on several
    nodes, gradients of PyTorch are reduced during the backward pass. On one node that takes longer
    than a reduction in the step. A step after fewer than `backward_passes_per_step` passes updates
    with the gradients of these passes.

    *Collective*: all ranks of the process set, with the same arguments. On other ranks the steps
    are local.

    Args:
        optimizer: an optimizer of PyTorch, Optax or `strategies.optimizers`.
        named_parameters: parameters of PyTorch, such as `model.named_parameters()`.
        compression: compression of the gradients.
        backward_passes_per_step: number of passes that are added up before a step.
        op: Average, Sum, or for PyTorch Adasum. Adasum combines the changes that the steps of all
            ranks make to the parameters, see `strategies.horovod.adasum_optimizer`.
        gradient_predivide_factor: f: gradients are divided by f before the sum, and multiplied by
            f/size after it.
        num_groups: as `groups`.
        groups: checked, then ignored: ranks agree on buckets without names, so fewer buckets would
            save nothing.
        sparse_as_dense: reduce sparse gradients as dense ones, and make them sparse again for the
            update.
        process_set: the ranks.

    Raises:
        TypeError, ValueError, MismatchError: as `strategies.DistributedOptimizer`; on all ranks.
    """
    say = "DistributedOptimizer"
    # A rank outside of the set gets a communicator of its own and trains alone.
    comm = process_set.own_ranks(say)
    own = type(compression)
    if not isinstance(compression, Compressor):
        raise TypeError(
            f"{say}: expected Compression.none, fp16 or bf16 as compression, got {own.__name__}"
        )
    # A subclass may override the methods, which buckets would not call.
    if (own.compress, own.decompress) != (Compressor.compress, Compressor.decompress):
        raise TypeError(
            f"{say}: gradients are sent in buckets, without calls of {own.__name__}.compress, "
            "expected Compression.none, fp16 or bf16; allreduce accepts such a compressor"
        )
    integer(say, "num_groups", num_groups, least=0)
    if isinstance(groups, int) or groups is None:
        integer(say, "groups", groups or 0, least=0)
    else:
        _check_groups(groups)
    if op is Adasum:
        factor, op = gradient_predivide_factor, Average
        if comm.size > 1:
            integer(say, "backward_passes_per_step", backward_passes_per_step, least=1)
            return _adasum(optimizer, named_parameters, compression, factor, process_set)
    made = distributed_optimizer.DistributedOptimizer(
        optimizer,
        named_parameters=named_parameters,
        comm=comm,
        op=op,
        compression=compression.codec,
        backward_passes_per_step=backward_passes_per_step,
        # As in Horovod: a last step with fewer passes still updates.
        allow_partial_steps=True,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
    )
    if hasattr(made, "join"):
        with _LOCK:
            _LIVE.add(made)
    return made


def _adasum(
    optimizer: Any,
    named_parameters: Any,
    compression: Compressor,
    factor: float,
    process_set: ProcessSet,
) -> Any:
    """Return a PyTorch optimizer that combines changes by Adasum."""
    say = "DistributedOptimizer"

    def prepare() -> tuple[Any, list[str]]:
        dispatch.check_unwrapped(optimizer)
        torch: Any = sys.modules.get("torch")
        if torch is None or not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"{say}: op=Adasum is for optimizers of PyTorch, got {type(optimizer).__name__}; "
                "with other libraries combine the updates by allreduce(op=Adasum)"
            )
        if factor != 1:
            raise ValueError(
                f"{say}: gradient_predivide_factor is for Average, expected 1 with Adasum, got "
                f"{factor}"
            )
        from strategies.torch import parameters

        names = parameters.names_of(optimizer, named_parameters)
        return names, ["Adasum", *parameters.described(optimizer, names)]

    # An error of one rank raises on all.
    names = agreement.compare(process_set.own_ranks(say), say, prepare)
    from strategies.horovod.adasum_optimizer import AdasumOptimizer

    return AdasumOptimizer(optimizer, names, compression, process_set)


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Report that this rank has no more data, and wait until all ranks have joined.

    Meanwhile this rank takes part in operations of the other ranks. All-reduces are then over the
    ranks that still have data; an Average divides by their number. Allgathers get no rows from this
    rank. Alltoalls, reducescatters, and broadcasts from this rank raise an error on all ranks.

    Steps of a `DistributedOptimizer` are then means over the ranks that still make steps. The
    parameters of this rank do not change; afterwards, broadcast those of the last rank.

    Args:
        device: ignored.
        process_set: the ranks.

    Returns:
        The last rank that called this; the same on all ranks.

    Raises:
        ValueError: this rank has several optimizers of the process set.
    """
    bound = process_set.bound("join")
    assert bound.controller is not None
    assert bound.comm is not None
    # Before the other ranks learn that this one has joined, which cannot be undone.
    optimizer = _optimizer_of(bound.comm)
    join_steps = optimizer.join if optimizer is not None else lambda: None
    return bound.ranks[bound.controller.join(join_steps)]


def _optimizer_of(comm: cc.Communicator) -> Any:
    """Return the wrapped optimizer of these ranks, or None.

    Raises:
        ValueError: this rank has several such optimizers; the next step may be of any.
    """
    # Wrappers are parts of reference cycles; without this, ranks could find different numbers.
    gc.collect()
    with _LOCK:
        found = [optimizer for optimizer in _LIVE if optimizer.comm is comm]
    if len(found) > 1:
        raise ValueError(
            f"join: expected one DistributedOptimizer of these ranks, got {len(found)}; delete "
            "those that make no more steps, or call step(examples=0) instead of join"
        )
    return found[0] if found else None


def _check_groups(groups: Any) -> None:
    lists = isinstance(groups, (list, tuple)) and all(isinstance(g, (list, tuple)) for g in groups)
    if not lists or not all(is_array(parameter) for group in groups for parameter in group):
        raise ValueError(
            "DistributedOptimizer: bad groups, expected an integer >= 0 or lists of parameters, "
            f"got {type(groups).__name__}"
        )
    # By identity: comparing tensors compares their elements.
    members = [id(parameter) for group in groups for parameter in group]
    if len(set(members)) != len(members):
        raise ValueError(
            f"DistributedOptimizer: a parameter is in two groups, expected {len(set(members))} "
            f"different ones, got {len(members)}"
        )
