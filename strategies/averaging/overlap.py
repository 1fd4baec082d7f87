"""Overlap: gradients are reduced while the backward pass computes others.

::

    backward     gradient of layer 3   of layer 2   of layer 1
    this rank    ready(3)              ready(2)     ready(1)     step: finish, first exchange
    thread               |-- bucket: 3 2 -- ... --|      |-- bucket: 1 --|

What is reduced early is a guess: that this step will be like the last one, and that the first one
has a gradient for each parameter, and tells no examples. All ranks finish it, so
that they reduce the same buckets; then the exchange of the step tells whether the guess held on
each of them. If not, the gradients are reduced again, as if nothing had happened.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Any

import collectives as cc
from strategies.averaging import bucket_copy
from strategies.averaging.accumulation import LocalGradient

__all__ = ["Overlap"]


class Overlap:
    """The reductions of one step.

    Args:
        buckets: where gradients are reduced, of `Communicator.plan_buckets`.
        positions: for each place in the buckets, which leaf it is for.
        scale: what gradients are multiplied by.
        like: the contribution to the last step, or to such a one, for which this was the scale.

    Attributes:
        error: why the reductions have failed on this rank.
    """

    def __init__(
        self, buckets: Any, positions: Sequence[int], scale: float, like: LocalGradient
    ) -> None:
        self.error: Exception | None = None
        self._misplaced: Exception | None = None
        self._buckets = buckets
        self._views = buckets.views
        self._places = {position: place for place, position in enumerate(positions)}
        self._scale = scale
        self._like = _facts(like)
        self._lock = threading.Lock()
        self._begun: set[int] = set()
        self._twice = False

    def is_prepared(self, position: int) -> bool:
        """Whether there is a place for the gradient of a leaf."""
        return position in self._places

    def in_bucket(self, position: int, gradient: Any) -> bool:
        """Whether a tensor is the memory of its own place, where the result will be."""
        if position not in self._places:
            return False
        view = self._views[self._places[position]]
        same: bool = hasattr(view, "data_ptr") and view.data_ptr() == gradient.data_ptr()
        return same

    def ready(self, position: int, gradient: Any | None) -> None:
        """Copy a gradient to its place, where it may be reduced at once; raises nothing.

        None stands for one that is reduced elsewhere, as a sparse one is. From any thread: PyTorch
        computes the gradients of each device in one of its own.
        """
        with self._lock:
            if position in self._begun:
                self._twice = True
                return
            self._begun.add(position)
            self._write(position, gradient)

    def finish(self) -> list[Any]:
        """Return the results, one for each place; *collective*.

        Where they have failed there are none, and `error` says why.

        Raises:
            CollectiveTimeout, PeerFailure: a rank does not come.
        """
        for position in self._places.keys() - self._begun:
            self._write(position, None)
        if self._misplaced is not None:
            self._buckets.fail(self._misplaced)
        if self.error is None:
            try:
                return list(self._buckets.wait())
            except (cc.MismatchError, TypeError, ValueError) as error:
                if self._buckets.pending:  # of a signal handler: nobody else knows of it
                    raise
                self.error = error
        return []

    def matches(self, contribution: LocalGradient, unchanged: Collection[int]) -> bool:
        """Whether this rank's gradients are those that were reduced, with the right scale.

        Args:
            contribution: of this rank to the step.
            unchanged: leaves whose gradients are as they were when they became ready.
        """
        given = {i for i, g in enumerate(contribution.gradients) if g is not None}
        expected = given & self._places.keys()
        return (
            not self._twice
            and _facts(contribution) == self._like
            and self._begun == expected
            and expected <= set(unchanged)
        )

    def _write(self, position: int, gradient: Any) -> None:
        if self.error is None:
            place = self._places[position]
            try:
                bucket_copy.copy_into(self._views[place], gradient, self._scale)
            except Exception as error:  # of which the other ranks learn with the step
                self.error = self._misplaced = error
                return
            try:
                self._buckets.ready(place)
            except Exception as error:  # which has ended the step
                self.error = error


def _facts(contribution: LocalGradient) -> tuple[Any, ...]:
    """Return what the scale of a contribution depends on."""
    return contribution.weight, contribution.examples, contribution.passes
