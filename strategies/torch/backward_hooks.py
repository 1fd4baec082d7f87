"""Backward hooks: count passes and reduce gradients during the backward pass.

Every parameter has a hook that autograd calls when its gradient is complete::

    loss.backward()      count = 1     hook of layer 3 -> counted, and given to `Overlap`, if any
                                       hook of layer 2 -> ...
    optimizer.step()     taken: are these gradients still what was given?

Without overlap the hook only moves the gradient to its place in a bucket.

PyTorch counts most changes of a tensor, but none through `.grad.data` or `.grad.numpy()`. So what
is given has a checksum, too.
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
        averaging: whose `overlap` takes gradients as soon as they are there.
    """

    # Hooks hold a weak reference, because PyTorch keeps them where the garbage collector does not
    # look: a strong one would keep a dropped optimizer for ever.
    def __init__(self, averaging: Averaging) -> None:
        self._averaging = averaging
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self._counts: dict[int, int] = {}  # position of a parameter -> its passes
        self._given: dict[int, _ReducedGradient] = {}  # the same -> what was reduced

    @property
    def passes(self) -> int:
        """How many there were since they were last `claimed`."""
        return max(self._counts.values(), default=0)

    def watch(self, parameters: Sequence[torch.Tensor], *, again: bool = False) -> None:
        """Count the passes of these parameters, unless as many are watched already.

        Args:
            parameters: of which those that are frozen are not watched.
            again: they are others than before.
        """
        trained = [(i, p) for i, p in enumerate(parameters) if p.requires_grad]
        if again or len(trained) != len(self._hooks):
            self.close()
            weak = weakref.ref(self)
            self._hooks += [
                parameter.register_post_accumulate_grad_hook(functools.partial(_ready, weak, i))
                for i, parameter in trained
            ]

    def claimed(self, parameters: Sequence[torch.Tensor] = ()) -> list[int]:
        """Begin to count anew; returns which gradients are as they were when they were reduced."""
        given = dict(self._given) if parameters else {}
        self._counts.clear()
        self._given.clear()
        return [
            i
            for i, what in given.items()
            if i < len(parameters) and what.is_still(parameters[i].grad)
        ]

    def restore(self, parameters: Sequence[torch.Tensor]) -> None:
        """Move gradients that no pass has touched out of the place where results will be."""
        overlap = self._averaging.overlap
        if overlap is not None:
            for i, parameter in enumerate(parameters):
                _move_out(overlap, i, parameter)

    def close(self) -> None:
        """Stop counting."""
        _remove(self._hooks)

    def ready(self, position: int, parameter: torch.Tensor) -> None:
        """Count a completed gradient; reduce it (`overlap`) or move it to its place."""
        count = self._counts[position] = self._counts.get(position, 0) + 1
        overlap = self._averaging.overlap
        if count < self._averaging.rule.backward_passes_per_step:
            return
        if overlap is not None and overlap.is_prepared(position):
            gradient = _move_out(overlap, position, parameter)
            assert gradient is not None
            self._given[position] = _ReducedGradient.of(gradient)
            if gradient.is_sparse:  # which goes by rows, unless it is to be made dense
                dense = self._averaging.rule.sparse_as_dense
                overlap.ready(position, gradient.to_dense() if dense else None)
            else:
                overlap.ready(position, gradient)
        elif overlap is None and self._averaging.rule.backward_passes_per_step == 1:
            _write_to_bucket(self._averaging.places.get(position), parameter)


@known_as("DistributedOptimizer")
def _ready(weak: weakref.ref[GradientHooks], position: int, parameter: torch.Tensor) -> None:
    backward = weak()
    if backward is not None:
        backward.ready(position, parameter)


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


class _ReducedGradient(NamedTuple):
    """A gradient as it was when it was reduced."""

    gradient: torch.Tensor
    version: int
    checksums: list[str]

    @classmethod
    def of(cls, gradient: torch.Tensor) -> _ReducedGradient:
        return cls(gradient, gradient._version, _checksums(gradient))

    def is_still(self, gradient: torch.Tensor | None) -> bool:
        if gradient is None or gradient is not self.gradient or gradient._version != self.version:
            return False
        return _checksums(gradient) == self.checksums


def _write_to_bucket(place: torch.Tensor | None, parameter: torch.Tensor) -> None:
    """Write the gradient to its place, while it is in the caches, and let it be seen there.

    The memory that it came in serves the next one: a step that frees its gradients together clears
    new pages for all of them, which takes longer than the exchange (docs/benchmarks/pytorch.md).
    """
    gradient = parameter.grad
    if place is None or gradient is None or gradient.layout is not torch.strided:
        return
    fits = gradient.dtype is place.dtype and gradient.device == place.device
    if fits and not gradient.requires_grad and gradient.data_ptr() != place.data_ptr():
        parameter.grad = place.copy_(gradient)


def _checksums(gradient: torch.Tensor) -> list[str]:
    gradient = gradient.detach()
    if gradient.is_sparse:
        return [checksum(gradient._indices()), checksum(gradient._values())]
    return [checksum(gradient)]


def _move_out(overlap: Overlap, position: int, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient, which must not be lost, out of the place where the result will be."""
    gradient = parameter.grad
    dense = None if gradient is None or gradient.is_sparse else gradient
    if dense is not None and overlap.in_bucket(position, dense):
        parameter.grad = gradient = dense.clone()
    return gradient
