"""Overlap: gradients are reduced while the backward pass computes others.

::

    backward     gradient of layer 3   of layer 2   of layer 1
    this rank    ready(3)              ready(2)     ready(1)     step: finish, first exchange
    thread               |-- bucket: 3 2 -- ... --|      |-- bucket: 1 --|

An early reduction is a guess: that this step will be like the last one. For the first step the
guess is that each parameter has a gradient and no rank passes examples. All ranks finish the
reductions, because they must reduce the same buckets. Then the step's exchange shows whether the
guess was right on each rank. If not, the gradients are reduced again.
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
        buckets: buckets of `Communicator.plan_buckets`.
        positions: leaf of each place in the buckets.
        scale: factor of the gradients.
        like: contribution to the last step, or the assumed one, that gave this scale.

    Attributes:
        error: why the reductions failed on this rank; None if they did not.
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
        # PyTorch calls `ready` from one thread per device.
        self._lock = threading.Lock()
        self._begun: set[int] = set()
        self._twice = False

    def is_prepared(self, position: int) -> bool:
        """Return whether a leaf has a place."""
        return position in self._places

    def in_bucket(self, position: int, gradient: Any) -> bool:
        """Return whether a tensor is the memory of its own place, which receives the result."""
        if position not in self._places:
            return False
        view = self._views[self._places[position]]
        # By address: the views of one memory are different objects.
        same: bool = hasattr(view, "data_ptr") and view.data_ptr() == gradient.data_ptr()
        return same

    def ready(self, position: int, gradient: Any | None) -> None:
        """Copy a gradient to its place, which may start its reduction; raises nothing.

        None means that the gradient is reduced elsewhere, such as a sparse one. Any thread may
        call it: PyTorch computes the gradients of each device in a separate thread.
        """
        with self._lock:
            if position in self._begun:
                # The reduction may be running already, so the step must reduce again.
                self._twice = True
                return
            self._begun.add(position)
            self._write(position, gradient)

    def finish(self) -> list[Any]:
        """Return the result of each place; *collective*.

        After a failure it returns [] and sets `error`.

        Raises:
            CollectiveTimeout, PeerFailure: a rank does not respond.
        """
        # Every place must be ready; a missing gradient counts as zero.
        for position in self._places.keys() - self._begun:
            self._write(position, None)
        # `fail` waits for the other ranks, so it is called here and not in the backward pass.
        if self._misplaced is not None:
            self._buckets.fail(self._misplaced)
        if self.error is None:
            try:
                return list(self._buckets.wait())
            except (cc.MismatchError, TypeError, ValueError) as error:
                if self._buckets.pending:  # raised by a signal handler, on this rank only
                    raise
                self.error = error
        return []

    def matches(self, contribution: LocalGradient, unchanged: Collection[int]) -> bool:
        """Return whether this rank's gradients are the reduced ones, with the right scale.

        Args:
            contribution: this rank's contribution to the step.
            unchanged: leaves whose gradients have not changed since they became ready.
        """
        # Gradients without a place, such as sparse ones, are reduced in the step.
        given = {i for i, g in enumerate(contribution.gradients) if g is not None}
        expected = given & self._places.keys()
        return (
            not self._twice
            and _facts(contribution) == self._like
            and self._begun == expected
            # `unchanged` excludes gradients that were clipped or replaced after the backward pass.
            and expected <= set(unchanged)
        )

    def _write(self, position: int, gradient: Any) -> None:
        # After an error nothing more is sent: `finish` reports it.
        if self.error is None:
            place = self._places[position]
            try:
                bucket_copy.copy_into(self._views[place], gradient, self._scale)
            except Exception as error:  # the step reports it to the other ranks
                self.error = self._misplaced = error
                return
            try:
                self._buckets.ready(place)
            except Exception as error:  # `ready` has failed the step
                self.error = error


def _facts(contribution: LocalGradient) -> tuple[Any, ...]:
    """Return the parts of a contribution that determine its scale."""
    return contribution.weight, contribution.examples, contribution.passes
