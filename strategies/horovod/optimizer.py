"""`hvd.DistributedOptimizer`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from strategies import distributed_optimizer
from strategies.core.validation import integer
from strategies.horovod.compression import Compression, Compressor
from strategies.horovod.operations import Adasum, Average
from strategies.horovod.process_sets import ProcessSet, global_process_set

__all__ = ["DistributedOptimizer"]


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

    It is `strategies.DistributedOptimizer`, whose methods and errors it has. Gradients of PyTorch
    are reduced while the backward pass computes others where ranks are on several nodes; on one
    node that takes longer than a reduction in the step. A step that comes before
    `backward_passes_per_step` passes updates with those that there were.

    *Collective*: all ranks of the process set, with the same arguments; of another rank steps are
    its own.

    Args:
        optimizer: of PyTorch, of Optax, or one of `strategies.optimizers`.
        named_parameters: of PyTorch, such as `model.named_parameters()`.
        compression: how gradients travel.
        backward_passes_per_step: how many passes are added up before a step.
        op: Average or Sum.
        gradient_predivide_factor: f: gradients are divided by f before they are added up, and
            multiplied by f/size after it.
        num_groups: as `groups`.
        groups: checked, and of no other use: the ranks agree on buckets without names, so that
            nothing is won by making fewer of them.
        sparse_as_dense: reduce sparse gradients as dense ones, and make them sparse again for the
            update.
        process_set: among whom.

    Raises:
        TypeError, ValueError, MismatchError: as `strategies.DistributedOptimizer`; on all ranks.
    """
    say = "DistributedOptimizer"
    comm = process_set.own_ranks(say)
    if op == Adasum:
        raise ValueError(
            f"{say}: Adasum is not supported, expected Average or Sum; for large batches wrap "
            "strategies.optimizers.LARS"
        )
    own = type(compression)
    if not isinstance(compression, Compressor):
        raise TypeError(
            f"{say}: expected Compression.none, fp16 or bf16 as compression, got {own.__name__}"
        )
    if (own.compress, own.decompress) != (Compressor.compress, Compressor.decompress):
        raise TypeError(
            f"{say}: gradients travel in buckets, for which {own.__name__}.compress would not be "
            "called, expected Compression.none, fp16 or bf16; allreduce takes such a compressor"
        )
    integer(say, "num_groups", num_groups, least=0)
    if isinstance(groups, int) or groups is None:
        integer(say, "groups", groups or 0, least=0)
    else:
        _check_groups([list(group) for group in groups])
    return distributed_optimizer.DistributedOptimizer(
        optimizer,
        named_parameters=named_parameters,
        comm=comm,
        op=op,
        compression=compression.codec,
        backward_passes_per_step=backward_passes_per_step,
        allow_partial_steps=True,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
    )


def _check_groups(groups: Sequence[Sequence[Any]]) -> None:
    members = [id(parameter) for group in groups for parameter in group]
    if len(set(members)) != len(members):
        raise ValueError(
            f"DistributedOptimizer: a parameter is in two groups, expected {len(set(members))} "
            f"different ones, got {len(members)}"
        )
