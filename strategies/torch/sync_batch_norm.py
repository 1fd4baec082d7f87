"""`SyncBatchNorm`: batch normalization over the rows of all ranks.

Each rank counts its numbers per channel, and takes their mean and the sum of their squared
distances from it. These are joined, and every rank combines them in the order of the ranks::

    n = sum n_r,    mean = sum n_r mean_r / n,    n var = sum (q_r + n_r (mean_r - mean)^2)

so that nothing cancels where the mean is large. The way back adds up, per channel, the gradients
and their products with the normalised numbers. Both are one small operation of all ranks.

Source: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances", 1979.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

import collectives as cc
from collectives import extend

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    """Normalise every channel over the rows of all ranks, as `torch.nn.BatchNorm2d` over one's own.

    As if one process had all rows, in any number on each rank, 0 allowed. Arguments, parameters and
    buffers are those of `torch.nn.BatchNorm2d`, so that either loads the other's `state_dict`.

    *Collective* while training, forward and backward: all ranks, with the same number of channels.

    Args:
        num_features: the channels: the second dimension of the input, of which there may be two or
            more.
        eps: added to the variance.
        momentum: of the running mean and variance; None for the mean of all steps.
        affine: whether there are `weight` and `bias`. Their gradients are those of this rank's
            rows, which `DistributedOptimizer` averages.
        track_running_stats: whether there are a running mean and variance, for `eval`.
        comm: the ranks; the whole job if None.

    Raises:
        ValueError: the input has fewer than two dimensions; or there is one number per channel
            among all ranks, on all of them.
        MismatchError: ranks differ in their channels; on all ranks.

    Cost: one message of 8 (2 C + 1) bytes to every rank for C channels in the forward pass, and an
    all-reduce of 16 C bytes in the backward pass.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        comm: cc.Communicator | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self._comm = comm

    @classmethod
    def convert(cls, module: torch.nn.Module, *, comm: cc.Communicator | None = None) -> Any:
        """Put one in the place of every batch normalisation of a module, with its parameters.

        Returns:
            The module; another one if it is a batch normalisation itself.
        """
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            made = cls(
                module.num_features, module.eps, module.momentum, module.affine,
                module.track_running_stats, comm=comm,
            )  # fmt: skip
            made.weight, made.bias = module.weight, module.bias
            for name, buffer in module.named_buffers():
                setattr(made, name, buffer)
            return made.train(module.training)
        for name, child in module.named_children():
            module.add_module(name, cls.convert(child, comm=comm))
        return module

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(
                f"SyncBatchNorm: expected an input of shape (n, channels, ...), got "
                f"{tuple(input.shape)}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise; while training over all ranks."""
        self._check_input_dim(input)
        running = self.running_mean is not None
        if not self.training and running:
            result: torch.Tensor = torch.nn.functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0,
                self.eps,
            )  # fmt: skip
            return result
        comm = self._ranks()
        count, mean, squares = _join(input.detach(), comm)
        if count == 1:
            raise extend.collective_error(
                comm, ValueError("SyncBatchNorm: expected more than 1 number per channel, got 1")
            )
        if self.training and running and count:
            self._follow(mean, squares / (count - 1))
        variance = squares / max(count, 1)
        wide = _wide(input.dtype)
        scale = torch.rsqrt(variance + self.eps).to(wide)
        normal = _Normalised.apply(input, mean.to(wide), scale, count, comm)
        if self.affine:
            shape = _channels(input)
            normal = normal * self.weight.to(wide).view(shape) + self.bias.to(wide).view(shape)
        made: torch.Tensor = normal.to(input.dtype)
        return made

    def _ranks(self) -> cc.Communicator:
        return cc.init() if self._comm is None else self._comm

    def _follow(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Move the running mean and variance."""
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = 1 / float(self.num_batches_tracked)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean), momentum)
            self.running_var.lerp_(variance.to(self.running_var), momentum)


class _Normalised(torch.autograd.Function):
    """(x - mean) * scale, where these depend on the rows of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        mean: torch.Tensor,
        scale: torch.Tensor,
        count: int,
        comm: cc.Communicator,
    ) -> torch.Tensor:
        shape = _channels(x)
        normal = (x.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, scale)
        ctx.count, ctx.comm, ctx.dtype = count, comm, x.dtype
        return normal

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        normal, scale = ctx.saved_tensors
        axes, shape = _others(gradient), _channels(gradient)
        own = torch.stack([gradient.sum(axes), (gradient * normal).sum(axes)]).double()
        means = ctx.comm.allreduce(own, op=cc.SUM) / max(ctx.count, 1)
        first, second = means.to(gradient.dtype).view(2, *shape)
        back = (gradient - first - normal * second) * scale.view(shape)
        return back.to(ctx.dtype), None, None, None, None


def _join(x: torch.Tensor, comm: cc.Communicator) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return how many numbers a channel has on all ranks, their mean and squared distances."""
    axes = _others(x)
    count = x.numel() // max(x.shape[1], 1)
    wide = x.to(_wide(x.dtype))
    own = torch.zeros(1, 2 * x.shape[1] + 1, dtype=torch.float64, device=x.device)
    if count:
        mean = wide.mean(axes)
        own[0, 0] = count
        own[0, 1 : 1 + len(mean)] = mean
        own[0, 1 + len(mean) :] = (wide - mean.view(_channels(x))).square().sum(axes)
    rows = comm.allgather(own)
    counts = rows[:, :1]
    total = counts.sum()
    means, squares = rows[:, 1:].chunk(2, dim=1)
    mean = (counts * means).sum(0) / total.clamp(min=1)
    return int(total), mean, (squares + counts * (means - mean).square()).sum(0)


def _others(x: torch.Tensor) -> list[int]:
    """All dimensions but that of the channels."""
    return [axis for axis in range(x.ndim) if axis != 1]


def _channels(x: torch.Tensor) -> list[int]:
    """The shape in which a number per channel stands beside `x`."""
    return [1, -1, *[1] * (x.ndim - 2)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In what is computed: float32 for numbers of 16 bits."""
    return dtype if dtype == torch.float64 else torch.float32
