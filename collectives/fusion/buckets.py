"""`Buckets`: arrays reduced bucket by bucket while the caller computes.

A model has many small gradients, which become ready one after the other, starting with the last
layer. The arrays are laid out once, side by side: in memory shared by the ranks of a node, or on a
CUDA device that holds all arrays. Adjacent arrays form a bucket, and a bucket is reduced as soon as
all its arrays are ready:

    caller     ready(4)  ready(3)  ready(2)        ready(1)  ready(0)        wait()
    thread                  |--- bucket 0: 4 3 ---|             |--- bucket 1: 2 1 0 ---|

The first step assumes that arrays become ready from the last to the first. From the second step on,
the buckets follow the order of readiness on rank 0 in the first step; the memory layout stays. All
ranks reduce the same buckets in the same order without negotiation. With error feedback the buckets
of the first step stay, because each bucket has a residual.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from collectives.calls.call import begin_call
from collectives.calls.group import Group
from collectives.calls.requests import Request
from collectives.core.errors import CollectiveError, CollectiveTimeout, some
from collectives.fusion.host_buffer import Bucket, BucketBuffer
from collectives.operations import split
from collectives.operations.broadcast import broadcast
from collectives.operations.nonblocking import RequestThread

__all__ = ["Buckets"]


class _Step:
    """One pass over all arrays.

    Attributes:
        order: the ready arrays, in the order of readiness.
        missing: for each bucket, the number of arrays that are not ready.
        requests: the reductions that were started.
        failed: whether a reduction has failed; then all ranks skip the later ones.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.order: dict[int, None] = {}
        self.missing = [len(bucket.members) for bucket in buckets]
        self.requests: list[Request[None]] = []
        self.failed = False


class Buckets:
    """Arrays that are reduced together in every step; created by `Communicator.plan_buckets`.

    A step is one call of `allreduce`, or a call of `ready` for every array, in any order, followed
    by `wait`. All ranks run the same steps. Results replace the arrays in `views` and stay until
    you overwrite them.

    Args:
        group: the ranks; owned by the buckets.
        places: memory of the arrays.
        names: names of the arrays.
    """

    def __init__(self, group: Group, places: BucketBuffer, names: Sequence[str]) -> None:
        self._group = group
        # The group is a duplicate for these buckets, so the thread needs no further one.
        self._progress = RequestThread(lambda: group)
        # Without a reference to the buckets, so that a dropped object ends the thread.
        weakref.finalize(self, self._progress.close_nowait).atexit = False
        self._places = places
        self._options = places.options
        self._names = names
        self._apply_order(places.buckets(range(len(names) - 1, -1, -1)))
        self._step: _Step | None = None
        self._residuals = places.options.compression.residuals
        self._learned = self._residuals is not None  # a new order would mix up the residuals
        self._kept: list[tuple[str, dict[str, Any]]] = []  # residuals before the last step
        self._closed = False

    @property
    def views(self) -> list[Any]:
        """Views of the arrays' memory, in the caller's order: writing to them saves a copy.

        The views have the planned shapes and dtypes and stay the same in every step. If all arrays
        are on one CUDA device on all ranks, the views are on that device and of the planned kinds.
        Otherwise they are tensors for PyTorch tensors on the CPU, else NumPy arrays.
        """
        return list(self._places.shown)

    def allreduce(self, values: Sequence[Any] | None = None, *, scale: float = 1.0) -> list[Any]:
        """Reduce all arrays.

        *Collective*: all ranks.

        Args:
            values: one array for each view, None in its place for zeros. Without `values`, reduce
                the contents of `views`.
            scale: factor applied while the values are copied; may differ between ranks. Requires
                `values`, and no integer arrays.

        Returns:
            The results in the caller's order: `views`, or new arrays if the planned kind is
            immutable or on a device that does not hold the views.

        Raises:
            TypeError, ValueError: an array does not fit; the other ranks raise `MismatchError`.
            CollectiveTimeout, PeerFailure: as `Communicator.allreduce`.
        """
        self._check_open("allreduce")
        try:
            if self._step is not None:
                raise ValueError("allreduce: a step has begun with `ready`, expected `wait` first")
            if scale != 1 and values is None:
                raise ValueError(f"allreduce: expected values to scale, got None (scale: {scale})")
            whole = [kind.dtype for kind in self._places.kinds if kind.dtype.kind in "iub"]
            if scale != 1 and whole:
                raise TypeError(
                    f"allreduce: integers cannot be scaled, expected floats, got {whole[0]} "
                    f"(scale: {scale})"
                )
            arrays = None if values is None else self._check_arrays(values)
        except Exception as error:
            # The other ranks wait in the reduction, so this rank refuses it before it raises.
            self._fail(error)
            raise
        # `restore_feedback` concerns steps of `ready` and `wait` only.
        self._kept = []
        for number, bucket in enumerate(self._buckets):
            try:
                if arrays is not None:
                    self._places.pack(bucket, arrays, scale)
            except Exception as error:  # for example, a device without free memory
                self._fail(error, number)
                raise
            bucket.reduce()
        return self._places.results()

    def ready(self, index: int, value: Any = None) -> None:
        """Mark one array as ready, which may start the reduction of its bucket.

        One thread at a time.

        Args:
            index: index of the array.
            value: the array, which is copied; None uses the contents of `views[index]`, which must
                not change until `wait`.

        Raises:
            TypeError, ValueError: the index is out of range, the array is already ready, or the
                value does not fit. The step ends; the other ranks raise `MismatchError` in `wait`.
            LaunchError: ranks exchange messages, and this MPI library does not support threads.
        """
        step = self._step or self._current_step("ready")
        try:
            if not 0 <= index < len(self._names):
                raise ValueError(
                    f"ready: no such array, expected 0 .. {len(self._names) - 1}, got {index}"
                )
            if index in step.order:
                raise ValueError(f"ready: the array is ready already (array: {self._names[index]})")
            self._places.write(index, self._check_array("ready", index, value))
        except Exception as error:
            self._fail(error)
            raise
        # Only now, because an array that failed its checks or the copy is not ready.
        step.order[index] = None
        bucket = self._bucket_of[index]
        step.missing[bucket] -= 1
        if not step.missing[bucket]:
            self._issue(step)

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Wait until all arrays are reduced, and end the step.

        Args:
            timeout: seconds of this wait; None waits until the limits of the reductions.

        Returns:
            As `allreduce`.

        Raises:
            ValueError: some arrays are not ready. The step ends; the other ranks raise
                `MismatchError`.
            MismatchError: another rank refused; the step ends.
            CollectiveTimeout: the reductions continue after `timeout`, and you may wait again; or a
                rank is missing.
            BaseException: any exception of a signal handler; you may wait again.
        """
        # A model without arrays has no call of `ready`, so its step begins here.
        step = self._step or self._current_step("wait")
        if len(step.order) < len(self._names):
            late = [name for i, name in enumerate(self._names) if i not in step.order]
            error = ValueError(
                f"wait: {len(late)} of {len(self._names)} arrays are not ready: {some(late)}"
            )
            self._fail(error)
            raise error
        # First the reductions: the order is broadcast in the same group, after all of them.
        self._finish(step, timeout)
        if not self._learned:
            self._record_order(list(step.order))
        return self._places.results()

    @property
    def pending(self) -> bool:
        """Whether a step has started but not ended, so that you must call `wait`."""
        return self._step is not None

    def fail(self, error: Exception) -> None:
        """End the step with an error of this rank, for example if writing to a view failed.

        This rank refuses the next reduction. The other ranks raise `MismatchError` in `wait` or
        `allreduce`, and all ranks skip the rest of the step. The call waits for the other ranks. It
        is valid before any array is ready.

        Args:
            error: error for the other ranks; not raised on this rank.

        Raises:
            CollectiveTimeout, PeerFailure: another rank is missing.
        """
        self._check_open("fail")
        self._fail(error)

    def restore_feedback(self) -> None:
        """Restore the residuals from before the last step of `ready` and `wait`.

        Call it on all ranks if you discard the results of that step, for example to reduce the same
        arrays again. The rounding errors of a discarded step must not be fed back. Harmless when
        repeated and without feedback.
        """
        for name, kept in self._kept:
            assert self._residuals is not None
            self._residuals.restore(name, kept)
        self._kept = []

    def feedback(self) -> list[dict[str, Any]]:
        """Return copies of the residuals for a checkpoint of this rank.

        Returns:
            for each bucket its residuals by part, as arrays; [] without feedback.
        """
        if self._residuals is None:
            return []
        return [self._residuals.saved(bucket.name) for bucket in self._buckets]

    def load_feedback(self, kept: Sequence[dict[str, Any]]) -> None:
        """Replace the residuals by a result of `feedback`, from buckets of the same arrays.

        Raises:
            ValueError: the number of buckets differs.
        """
        if self._residuals is None or len(kept) != len(self._buckets):
            expected = 0 if self._residuals is None else len(self._buckets)
            raise ValueError(
                f"load_feedback: expected residuals of {expected} buckets, got {len(kept)}"
            )
        for bucket, parts in zip(self._buckets, kept, strict=True):
            # Copies, because residuals are changed in place.
            self._residuals.restore(bucket.name, {name: x.copy() for name, x in parts.items()})

    def close(self) -> None:
        """Release memory, ranks and residuals; *collective*. Closing twice is harmless.

        Views and results stay readable.
        """
        # First, so that calls of other threads are refused while the reductions end.
        self._closed = True
        self._step = None
        if not self._progress.close():
            return  # an unfinished bucket still uses memory, ranks and residuals
        if self._residuals is not None:
            for bucket in self._buckets:
                self._residuals.forget(bucket.name)
        self._group.close()

    def __enter__(self) -> Buckets:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise CollectiveError(f"{operation}: the buckets were closed")

    def _check_arrays(self, values: Sequence[Any]) -> list[Any]:
        """Check all arrays, and convert them to the memory of their views."""
        if len(values) != len(self._names):
            raise ValueError(f"allreduce: expected {len(self._names)} arrays, got {len(values)}")
        return [self._check_array("allreduce", i, value) for i, value in enumerate(values)]

    def _check_array(self, operation: str, index: int, value: Any) -> Any:
        if value is None:
            return None
        return self._places.checked(operation, index, value, self._names[index])

    def _current_step(self, operation: str) -> _Step:
        self._check_open(operation)
        split.check_threads(self._group, operation)
        self._step, self._kept = _Step(self._buckets), []
        return self._step

    def _issue(self, step: _Step) -> None:
        """Start the reductions of complete buckets in order."""
        # Even if a later bucket is complete first, because all ranks must use the same order.
        while len(step.requests) < len(self._buckets) and not step.missing[len(step.requests)]:
            self._submit(step, partial(self._reduce, self._buckets[len(step.requests)]))

    def _reduce(self, bucket: Bucket) -> None:
        if self._residuals is not None:
            self._kept.append((bucket.name, self._residuals.saved(bucket.name)))
        bucket.reduce()

    def _submit(self, step: _Step, reduce: Callable[[], None]) -> None:
        """Queue the reduction of a bucket, skipped after a failure of an earlier one."""

        def run(_: Any) -> None:
            if step.failed:
                return
            try:
                reduce()
            except BaseException:
                step.failed = True
                raise

        step.requests.append(self._progress.submit("buckets", run))

    def _fail(self, error: Exception, first: int = 0) -> None:
        """End the step as `fail` does; `first` is the next bucket if no step has started."""
        step, self._step = self._step, None
        if step is not None:
            first = len(step.requests)
        # While learning, the other ranks also broadcast the order, which this rank must refuse.
        learning = step is not None and not self._learned
        # Buckets without elements do not synchronize, so no rank would receive a refusal there.
        if learning or any(bucket.has_elements for bucket in self._buckets[first:]):
            refused = _refusal(error)
            if step is not None:
                # In the thread, behind the reductions that were started: calls keep their order.
                self._submit(step, lambda: self._refuse(refused))
            else:
                try:
                    self._refuse(refused)
                except (TypeError, ValueError) as raised:
                    if raised is not refused:  # a signal handler raised it
                        raise
        if step is not None:
            for request in step.requests:
                # Without raising: `error` is the reason, and later errors follow from it.
                request.complete()

    def _refuse(self, error: Exception) -> None:
        """Refuse the next call of the group with `error`, and raise it."""
        # Leaving the block with an error before the comparison refuses the call.
        with begin_call(self._group, "buckets", self._options.timeout):
            raise error

    def _finish(self, step: _Step, timeout: float | None) -> None:
        """Wait for the reductions of a step; the step then ends, with or without errors."""
        give_up = None if timeout is None else time.monotonic() + timeout
        # All requests share the time of this wait.
        for request in step.requests:
            left = None if give_up is None else max(0.0, give_up - time.monotonic())
            if not request.complete(left):
                # The step stays open, so that the caller may wait again.
                raise CollectiveTimeout(
                    f"wait: {self._options.name} are not reduced within {timeout:g} s; the "
                    "reduction continues"
                )
        # Even if a reduction failed: the next `ready` starts a new step.
        self._step = None
        for request in step.requests:
            request.wait()  # all are complete: raises the first error

    def _record_order(self, order: Sequence[int]) -> None:
        """Rearrange the buckets by the order in which rank 0's arrays became ready."""
        # The order may differ between ranks, so rank 0 decides.
        own = np.array(order, np.int64)
        first: list[int] = broadcast(self._group, own, timeout=self._options.timeout).tolist()
        self._apply_order(self._places.buckets(first))
        self._learned = True

    def _apply_order(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._bucket_of = {i: k for k, bucket in enumerate(buckets) for i in bucket.members}


def _refusal(error: Exception) -> Exception:
    """Return an equivalent TypeError or ValueError, with which this rank may refuse a call."""
    # Of a class that `_fail` distinguishes from errors of the reduction itself.
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(str(error) if type(error) is kind else f"{type(error).__name__}: {error}")
