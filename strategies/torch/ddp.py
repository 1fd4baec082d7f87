"""DDP support: a communication hook, and recovery after an error."""

# Without `from __future__ import annotations`: DDP looks at those of a hook.
from typing import Any, NamedTuple

import torch
from torch import distributed

import collectives as cc
from strategies.torch.backend import UnisonoGroup

__all__ = ["DdpOptions", "ddp_hook", "recover"]


class DdpOptions(NamedTuple):
    """What `ddp_hook` goes by; its state.

    Attributes:
        group: of the ranks that average; that of all ranks if None.
        compression: of gradients that travel as messages, such as `cc.FP16.on("network")`.
    """

    group: Any = None
    compression: cc.Compression = cc.NONE


def ddp_hook(
    state: DdpOptions | None, bucket: distributed.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of DDP over all ranks, in place.

    For `model.register_comm_hook(None, strategies.torch.ddp_hook)`. It saves the division of each
    gradient, and the way through C++: errors keep their type.

    Args:
        state: None for all ranks and no compression.
        bucket: as DDP gives it.

    Returns:
        A future that has the bucket's tensor.

    Raises:
        TypeError: the ranks' process group is not one of this backend.
    """
    options = state or DdpOptions()
    group = options.group or distributed.group.WORLD
    if not isinstance(group, UnisonoGroup):
        raise TypeError(f"ddp_hook: expected a group of the backend unisono, got {group!r}")
    tensor = bucket.buffer()
    work = group.average(tensor, options.compression)
    done: Any = work.get_future().then(lambda future: future.value()[0])
    return done


def recover(model: Any, group: Any = None) -> None:
    """Let a DDP model go on after an error in its backward pass, perhaps with another group.

    *Collective*: all ranks of the group, which then hold the same parameters again as far as they
    did before the error.

    Args:
        model: `torch.nn.parallel.DistributedDataParallel`.
        group: with which it goes on; its own if None.
    """
    model.reducer._reset_state()
    if group is not None:
        model._update_process_group(group)
    model.zero_grad()
