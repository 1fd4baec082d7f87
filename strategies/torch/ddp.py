"""DDP support: a communication hook, and recovery after an error."""

# Without `from __future__ import annotations`, because DDP reads the annotations of a hook.
from typing import Any, NamedTuple

import torch
from torch import distributed

import collectives as cc
from strategies.torch.backend import UnisonoGroup

__all__ = ["DdpOptions", "ddp_hook", "recover"]


class DdpOptions(NamedTuple):
    """Options of `ddp_hook`, passed as its state.

    Attributes:
        group: process group that averages; None for the default group.
        compression: compression of gradients in messages, such as `cc.FP16.on("network")`;
            without feedback, because buckets have no names.
    """

    group: Any = None
    compression: cc.Compression = cc.NONE


def ddp_hook(
    state: DdpOptions | None, bucket: distributed.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of DDP over all ranks, in place.

    Use it with `model.register_comm_hook(None, strategies.torch.ddp_hook)`. It saves the division
    of each gradient, and keeps the types of errors, which C++ would change.

    Args:
        state: options; None for all ranks without compression.
        bucket: bucket of DDP.

    Returns:
        A future of the bucket's tensor.

    Raises:
        TypeError: the process group does not use this backend.
        ValueError: the compression has feedback.
    """
    # `register_comm_hook(None, ...)` passes None as the state.
    options = state or DdpOptions()
    group = options.group or distributed.group.WORLD
    if not isinstance(group, UnisonoGroup):
        raise TypeError(f"ddp_hook: expected a group of the backend unisono, got {group!r}")
    if options.compression.residuals is not None:
        raise ValueError(
            "ddp_hook: DDP's buckets change after the first step and have no residuals, expected "
            "a compression without feedback, or `strategies.DistributedOptimizer` instead of DDP, "
            f"got {options.compression}"
        )
    tensor = bucket.buffer()
    work = group.average(tensor, options.compression)
    # DDP expects a future of one tensor; a `Work` has a list.
    done: Any = work.get_future().then(lambda future: future.value()[0])
    return done


def recover(model: Any, group: Any = None) -> None:
    """Reset a DDP model after an error in its backward pass, optionally with another group.

    *Collective*: all ranks of the group. Parameters that were equal before the error are equal
    after it.

    Args:
        model: `torch.nn.parallel.DistributedDataParallel`.
        group: the new process group; None keeps the current one.
    """
    # Private methods, since DDP has no public way to leave an interrupted backward pass.
    model.reducer._reset_state()
    if group is not None:
        model._update_process_group(group)
    # Some gradients are averages, others not; none of them may be used.
    model.zero_grad()
