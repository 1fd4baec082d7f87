"""`SyncBatchNorm`: batch normalization over the rows of all ranks.

Each rank computes the number n_r, mean and sum of squared distances q_r of its numbers per channel.
The ranks exchange them, and every rank combines them in rank order::

    n = sum n_r,    mean = sum n_r mean_r / n,    n var = sum (q_r + n_r (mean_r - mean)^2)

This avoids cancellation if the mean is large. The backward pass sums, per channel, the gradients
and their products with the normalized numbers. Each pass needs one small operation of all ranks.

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
    """Normalize every channel over the rows of all ranks, as `torch.nn.BatchNorm2d` over one rank.

    As if one process had all rows; each rank may have any number of them, including 0. Arguments,
    parameters and buffers are those of `torch.nn.BatchNorm2d`, so that either loads the other's
    `state_dict`.

    *Collective* while training, forward and backward: all ranks, with the same number of channels.

    Args:
        num_features: number of channels, the second dimension of an input of two or more.
        eps: number added to the variance.
        momentum: momentum of the running mean and variance; None for the mean of all steps.
        affine: whether there are `weight` and `bias`. Their gradients are those of this rank's
            rows, which `DistributedOptimizer` averages.
        track_running_stats: whether to keep a running mean and variance, for `eval`.
        comm: the ranks; None for the whole job.

    Raises:
        ValueError: the input has fewer than two dimensions; or all ranks together have one number
            per channel, on all ranks.
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
        """Replace every batch normalization of a module by one of this class, with its parameters.

        Returns:
            The module; a new one if it is a batch normalization itself.
        """
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            made = cls(
                module.num_features, module.eps, module.momentum, module.affine,
                # Without device and dtype: weights and buffers of the module replace the new ones.
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
        """Normalize; while training over all ranks."""
        self._check_input_dim(input)
        # Without running statistics `eval` uses those of the batch, as in PyTorch.
        running = self.running_mean is not None
        if not self.training and running:
            result: torch.Tensor = torch.nn.functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0,
                self.eps,
            )  # fmt: skip
            return result
        comm = self._ranks()
        # Detached: the backward pass is `_Normalised`, not that of the statistics.
        count, mean, squares = _join(input.detach(), comm)
        # The same on all ranks, so all raise.
        if count == 1:
            raise extend.collective_error(
                comm, ValueError("SyncBatchNorm: expected more than 1 number per channel, got 1")
            )
        # Unbiased for the running variance, biased for the normalization, as in PyTorch.
        if self.training and running and count:
            self._follow(mean, squares / (count - 1))
        # 0 rows on all ranks: any number does, as there is nothing to normalize.
        variance = squares / max(count, 1)
        wide = _wide(input.dtype)
        scale = torch.rsqrt(variance + self.eps).to(wide)
        normal = _Normalised.apply(input, mean.to(wide), scale, count, comm)
        # Outside of the function, so that autograd computes the gradients of weight and bias.
        if self.affine:
            shape = _channels(input)
            normal = normal * self.weight.to(wide).view(shape) + self.bias.to(wide).view(shape)
        made: torch.Tensor = normal.to(input.dtype)
        return made

    def _ranks(self) -> cc.Communicator:
        return cc.init() if self._comm is None else self._comm

    def _follow(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Update the running mean and variance."""
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            # A mean of all steps: the weight of the newest is 1/n.
            momentum = 1 / float(self.num_batches_tracked)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean), momentum)
            self.running_var.lerp_(variance.to(self.running_var), momentum)


class _Normalised(torch.autograd.Function):
    """(x - mean) * scale, with the mean and scale of all ranks' rows."""

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
        # The normalized numbers instead of the input: the backward pass needs only these.
        ctx.save_for_backward(normal, scale)
        ctx.count, ctx.comm, ctx.dtype = count, comm, x.dtype
        return normal

    @staticmethod
    # The backward pass has no graph of its own: double backward raises.
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        normal, scale = ctx.saved_tensors
        axes, shape = _others(gradient), _channels(gradient)
        # Summed in float64, so that the result depends little on how rows are spread.
        own = torch.stack([gradient.sum(axes), (gradient * normal).sum(axes)]).double()
        means = ctx.comm.allreduce(own, op=cc.SUM) / max(ctx.count, 1)
        first, second = means.to(gradient.dtype).view(2, *shape)
        # The gradient of mean and variance, of all ranks' rows.
        back = (gradient - first - normal * second) * scale.view(shape)
        return back.to(ctx.dtype), None, None, None, None


def _join(x: torch.Tensor, comm: cc.Communicator) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return the count, mean and squared distances of a channel's numbers on all ranks."""
    axes = _others(x)
    # 0 channels have 0 numbers each.
    count = x.numel() // max(x.shape[1], 1)
    wide = x.to(_wide(x.dtype))
    own = torch.zeros(1, 2 * x.shape[1] + 1, dtype=torch.float64, device=x.device)
    # A rank without rows contributes a count of 0; its mean would be NaN.
    if count:
        mean = wide.mean(axes)
        own[0, 0] = count
        own[0, 1 : 1 + len(mean)] = mean
        own[0, 1 + len(mean) :] = (wide - mean.view(_channels(x))).square().sum(axes)
    # Gathered instead of summed, so that ranks combine in the same order.
    rows = comm.allgather(own)
    counts = rows[:, :1]
    total = counts.sum()
    means, squares = rows[:, 1:].chunk(2, dim=1)
    mean = (counts * means).sum(0) / total.clamp(min=1)
    return int(total), mean, (squares + counts * (means - mean).square()).sum(0)


def _others(x: torch.Tensor) -> list[int]:
    """Return all dimensions except that of the channels."""
    return [axis for axis in range(x.ndim) if axis != 1]


def _channels(x: torch.Tensor) -> list[int]:
    """Return the shape that broadcasts a number per channel against `x`."""
    return [1, -1, *[1] * (x.ndim - 2)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of arithmetic: float32 for 16-bit floats."""
    return dtype if dtype == torch.float64 else torch.float32
