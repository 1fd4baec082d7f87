"""Backward hooks: count passes and reduce gradients during the backward pass.

Every parameter has a hook that autograd calls when its gradient is complete::

    loss.backward()      count = 1     hook of layer 3 -> counted, and passed to `Overlap`, if any
                                       hook of layer 2 -> ...
    optimizer.step()     claimed: have these gradients changed since?

Without overlap the hook only moves the gradient to its place in a bucket.

PyTorch's version counter detects most changes of a tensor, but not changes through `.grad.data` or
`.grad.numpy()`. So a passed gradient also has a checksum.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from collectives.extend import known_as
from strategies.averaging.averaging import Averaging
from strategies.averaging.consistency import checksum
from strategies.averaging.overlap import Overlap

__all__ = ["GradientHooks"]


class GradientHooks:
    """Counts the backward passes of some parameters.

    Args:
        averaging: its `overlap` receives each gradient once it is complete.
    """

    # Hooks hold a weak reference: PyTorch stores them where the garbage collector cannot see them,
    # so a strong one would keep a dropped optimizer forever.
    def __init__(self, averaging: Averaging) -> None:
        self._averaging = averaging
        self._hooks: list[Any] = []
        # Not at exit, when parts of PyTorch may be gone.
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self._counts: dict[int, int] = {}  # position of a parameter -> its passes
        self._given: dict[int, _ReducedGradient] = {}  # position -> gradient passed to `overlap`

    @property
    def passes(self) -> int:
        """Number of passes since the last `claimed`."""
        # The maximum: parameters that a pass does not use have lower counts.
        return max(self._counts.values(), default=0)

    def watch(self, parameters: Sequence[torch.Tensor], *, again: bool = False) -> None:
        """Count the passes of these parameters, unless the same number is watched already.

        Args:
            parameters: parameters; frozen ones are not watched.
            again: whether the parameters differ from those watched before.
        """
        trained = [(i, p) for i, p in enumerate(parameters) if p.requires_grad]
        # Unfreezing a parameter changes the number, so its hook is added before the next pass.
        if again or len(trained) != len(self._hooks):
            self.close()
            weak = weakref.ref(self)
            self._hooks += [
                parameter.register_post_accumulate_grad_hook(functools.partial(_ready, weak, i))
                for i, parameter in trained
            ]

    def claimed(self, parameters: Sequence[torch.Tensor] = ()) -> list[int]:
        """Restart the count; return the positions of reduced gradients that have not changed."""
        # Without parameters only the count restarts, as after `zero_grad`.
        given = dict(self._given) if parameters else {}
        self._counts.clear()
        self._given.clear()
        return [
            i
            for i, what in given.items()
            # A parameter group may have been removed since.
            if i < len(parameters) and what.is_still(parameters[i].grad)
        ]

    def restore(self, parameters: Sequence[torch.Tensor]) -> None:
        """Move gradients of earlier passes out of the buckets, where results will be written."""
        overlap = self._averaging.overlap
        if overlap is not None:
            for i, parameter in enumerate(parameters):
                _move_out(overlap, i, parameter)

    def close(self) -> None:
        """Stop counting."""
        _remove(self._hooks)

    def ready(self, position: int, parameter: torch.Tensor) -> None:
        """Count a completed gradient; reduce it (`overlap`) or move it to its place."""
        # The count of this parameter: autograd calls the hooks in any order.
        count = self._counts[position] = self._counts.get(position, 0) + 1
        overlap = self._averaging.overlap
        # Later passes add to the same `.grad`, so it is not complete yet.
        if count < self._averaging.rule.backward_passes_per_step:
            return
        if overlap is not None and overlap.is_prepared(position):
            # The gradient stays readable in `.grad`, while the bucket gets the sum of all ranks.
            gradient = _move_out(overlap, position, parameter)
            assert gradient is not None
            self._given[position] = _ReducedGradient.of(gradient)
            if gradient.is_sparse:  # reduced by rows, unless it is made dense
                dense = self._averaging.rule.sparse_as_dense
                overlap.ready(position, gradient.to_dense() if dense else None)
            else:
                overlap.ready(position, gradient)
        elif overlap is None and self._averaging.rule.backward_passes_per_step == 1:
            # With several passes the gradient would be in the bucket while it is still added to.
            _write_to_bucket(self._averaging.places.get(position), parameter)


@known_as("DistributedOptimizer")
def _ready(weak: weakref.ref[GradientHooks], position: int, parameter: torch.Tensor) -> None:
    backward = weak()
    # The optimizer may be gone: hooks of its parameters remain until `_remove` has run.
    if backward is not None:
        backward.ready(position, parameter)


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


class _ReducedGradient(NamedTuple):
    """A gradient and its state when it was reduced."""

    gradient: torch.Tensor
    version: int
    checksums: list[str]

    @classmethod
    def of(cls, gradient: torch.Tensor) -> _ReducedGradient:
        return cls(gradient, gradient._version, _checksums(gradient))

    def is_still(self, gradient: torch.Tensor | None) -> bool:
        # First the tests without a read of the gradient.
        if gradient is None or gradient is not self.gradient or gradient._version != self.version:
            return False
        return _checksums(gradient) == self.checksums


def _write_to_bucket(place: torch.Tensor | None, parameter: torch.Tensor) -> None:
    """Copy the gradient to its place while it is in the caches, and let `.grad` be that place.

    The gradient's memory is reused for the next gradient. A step that frees all gradients together
    clears new pages for all of them, which takes longer than the exchange
    (docs/benchmarks/pytorch.md).
    """
    gradient = parameter.grad
    if place is None or gradient is None or gradient.layout is not torch.strided:
        return
    fits = gradient.dtype is place.dtype and gradient.device == place.device
    # A gradient that requires gradients belongs to a graph, whose memory must not move.
    if fits and not gradient.requires_grad and gradient.data_ptr() != place.data_ptr():
        parameter.grad = place.copy_(gradient)


def _checksums(gradient: torch.Tensor) -> list[str]:
    gradient = gradient.detach()
    if gradient.is_sparse:
        # Without `coalesce`, which would create new tensors.
        return [checksum(gradient._indices()), checksum(gradient._values())]
    return [checksum(gradient)]


def _move_out(overlap: Overlap, position: int, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient, moved out of the bucket so that the result does not overwrite it."""
    gradient = parameter.grad
    dense = None if gradient is None or gradient.is_sparse else gradient
    if dense is not None and overlap.in_bucket(position, dense):
        # A copy only if the memory is the bucket's own.
        parameter.grad = gradient = dense.clone()
    return gradient
