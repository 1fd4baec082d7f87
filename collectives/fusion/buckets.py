"""`Buckets`: arrays reduced bucket by bucket while the caller computes.

Gradients of a model are many and small, and become ready one after the other, those of the last
layer first. They lie side by side, laid out once, in memory that the ranks of a node share, or on a
CUDA device where all of them are; several neighbours form a bucket, and a bucket is reduced as soon
as all of its arrays are ready:

    caller     ready(4)  ready(3)  ready(2)        ready(1)  ready(0)        wait()
    thread                  |--- bucket 0: 4 3 ---|             |--- bucket 1: 2 1 0 ---|

The first step takes the arrays from the last to the first. From the second on, the buckets follow
the order in which the arrays became ready on rank 0 in the first one; the places of the arrays in
memory stay. All ranks reduce the same buckets in the same order, without negotiating. With feedback
the buckets stay as in the first step, since each has its residual.
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
        order: the arrays that are ready, as they became so.
        missing: for each bucket, how many arrays are not ready.
        requests: the reductions that were started.
        failed: one of these has failed, and the later ones are left out, on all ranks.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.order: dict[int, None] = {}
        self.missing = [len(bucket.members) for bucket in buckets]
        self.requests: list[Request[None]] = []
        self.failed = False


class Buckets:
    """Arrays that are reduced together, step by step; made by `Communicator.plan_buckets`.

    A step is either a call of `allreduce`, or a call of `ready` for every array, in any order, and
    then one of `wait`. All ranks take the same steps. Results lie where the arrays lay, in `views`,
    until something else is written there.

    Args:
        group: the ranks; belongs to the buckets alone.
        places: where the arrays lie.
        names: of the arrays.
    """

    def __init__(self, group: Group, places: BucketBuffer, names: Sequence[str]) -> None:
        self._group = group
        self._progress = RequestThread(lambda: group)
        weakref.finalize(self, self._progress.close_nowait).atexit = False
        self._places = places
        self._options = places.options
        self._names = names
        self._apply_order(places.buckets(range(len(names) - 1, -1, -1)))
        self._step: _Step | None = None
        self._residuals = places.options.compression.residuals
        self._learned = self._residuals is not None  # they would be of other arrays
        self._kept: list[tuple[str, dict[str, Any]]] = []  # residuals before the last step
        self._closed = False

    @property
    def views(self) -> list[Any]:
        """The places of the arrays, in the caller's order: who writes there saves a copy.

        Of the shapes and dtypes that were asked for; the same ones at every step. Where all arrays
        are on one CUDA device, on all ranks, they are there, and of the kinds that were asked for.
        Else they are tensors where tensors of PyTorch on the CPU were asked for, or NumPy arrays.
        """
        return list(self._places.shown)

    def allreduce(self, values: Sequence[Any] | None = None, *, scale: float = 1.0) -> list[Any]:
        """Reduce all arrays.

        *Collective*: all ranks.

        Args:
            values: an array for each place, None for zeros; or None: what stands in `views`.
            scale: what the values are multiplied by on the way to their places; any number, also
                another one on every rank. Needs `values`, and no integers among the arrays.

        Returns:
            The results in the caller's order: `views`, or new arrays where the kind that was asked
            for is immutable, or on a device while `views` are not.

        Raises:
            TypeError, ValueError: an array does not fit; MismatchError on the other ranks.
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
            self._fail(error)
            raise
        self._kept = []
        for number, bucket in enumerate(self._buckets):
            try:
                if arrays is not None:
                    self._places.pack(bucket, arrays, scale)
            except Exception as error:  # as when a device has no memory left
                self._fail(error, number)
                raise
            bucket.reduce()
        return self._places.results()

    def ready(self, index: int, value: Any = None) -> None:
        """Say that one array is ready, which may start the reduction of its bucket.

        One thread at a time.

        Args:
            index: of the array.
            value: the array, which is copied; None: what stands in `views[index]`, which must not
                change until `wait`.

        Raises:
            TypeError, ValueError: there is no such array, it is ready already, or the value does
                not fit. The step is over; MismatchError in the `wait` of the other ranks.
            LaunchError: ranks exchange messages, and this MPI cannot be used by several threads.
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
        step.order[index] = None
        bucket = self._bucket_of[index]
        step.missing[bucket] -= 1
        if not step.missing[bucket]:
            self._issue(step)

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Wait until all arrays are reduced, which ends the step.

        Args:
            timeout: seconds for this wait; no limit but that of each reduction if None.

        Returns:
            As `allreduce`.

        Raises:
            ValueError: some arrays are not ready. The step is over; MismatchError on the others.
            MismatchError: another rank refused; the step is over.
            CollectiveTimeout: the reductions go on after `timeout`, and may be waited for again;
                or a rank did not come.
            BaseException: whatever a signal handler raises meanwhile; as after `timeout`.
        """
        step = self._step or self._current_step("wait")
        if len(step.order) < len(self._names):
            late = [name for i, name in enumerate(self._names) if i not in step.order]
            error = ValueError(
                f"wait: {len(late)} of {len(self._names)} arrays are not ready: {some(late)}"
            )
            self._fail(error)
            raise error
        self._finish(step, timeout)
        if not self._learned:
            self._record_order(list(step.order))
        return self._places.results()

    @property
    def pending(self) -> bool:
        """Whether a step has begun that is not over, and has to be waited for."""
        return self._step is not None

    def fail(self, error: Exception) -> None:
        """End the step by an error of this rank, as when an array cannot be written to its view.

        All ranks reduce the same buckets in the same order: where the next one would be reduced,
        this rank refuses the call, which is a MismatchError in the `wait` or `allreduce` of the
        others, and all leave out the rest of the step. Waits for them; also before any array is
        ready.

        Args:
            error: what the others are told; it is not raised here.

        Raises:
            CollectiveTimeout, PeerFailure: another rank does not come.
        """
        self._check_open("fail")
        self._fail(error)

    def restore_feedback(self) -> None:
        """Let residuals be as they were before the last step of `ready` and `wait`.

        Call it on all ranks when the results of that step are not used, as when the same arrays are
        reduced again: what it has rounded away belongs to nothing then. Harmless when repeated, and
        without feedback.
        """
        for name, kept in self._kept:
            assert self._residuals is not None
            self._residuals.restore(name, kept)
        self._kept = []

    def close(self) -> None:
        """Let go of memory, ranks and residuals; *collective*. Closing twice is harmless.

        Views and results may still be read.
        """
        self._closed = True
        self._step = None
        if not self._progress.close():
            return  # a bucket that is still under way uses all of it
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
        """See arrays of any kind in the memory where their places are."""
        if len(values) != len(self._names):
            raise ValueError(f"allreduce: expected {len(self._names)} arrays, got {len(values)}")
        return [self._check_array("allreduce", i, value) for i, value in enumerate(values)]

    def _check_array(self, operation: str, index: int, value: Any) -> Any:
        if value is None:
            return None
        return self._places.checked(operation, index, value, self._names[index])

    def _current_step(self, operation: str) -> _Step:
        """Begin a step."""
        self._check_open(operation)
        split.check_threads(self._group, operation)
        self._step, self._kept = _Step(self._buckets), []
        return self._step

    def _issue(self, step: _Step) -> None:
        """Start the reductions of complete buckets whose turn it is."""
        while len(step.requests) < len(self._buckets) and not step.missing[len(step.requests)]:
            self._submit(step, partial(self._reduce, self._buckets[len(step.requests)]))

    def _reduce(self, bucket: Bucket) -> None:
        if self._residuals is not None:
            self._kept.append((bucket.name, self._residuals.saved(bucket.name)))
        bucket.reduce()

    def _submit(self, step: _Step, reduce: Callable[[], None]) -> None:
        """Let the thread reduce a bucket, unless one before it failed."""

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
        """As `fail`, where `first` is the bucket whose turn it is; in a step that is known."""
        step, self._step = self._step, None
        if step is not None:
            first = len(step.requests)
        learning = step is not None and not self._learned  # in which the others will meet
        if learning or any(bucket.has_elements for bucket in self._buckets[first:]):
            refused = _refusal(error)
            if step is not None:
                self._submit(step, lambda: self._refuse(refused))
            else:
                try:
                    self._refuse(refused)
                except (TypeError, ValueError) as raised:
                    if raised is not refused:  # but of a signal handler
                        raise
        if step is not None:
            for request in step.requests:
                request.complete()

    def _refuse(self, error: Exception) -> None:
        """Make the next call one that this rank refuses, and raise the error."""
        with begin_call(self._group, "buckets", self._options.timeout):
            raise error

    def _finish(self, step: _Step, timeout: float | None) -> None:
        """Wait for the reductions of a step, which is over then, however they end."""
        give_up = None if timeout is None else time.monotonic() + timeout
        for request in step.requests:
            left = None if give_up is None else max(0.0, give_up - time.monotonic())
            if not request.complete(left):
                raise CollectiveTimeout(
                    f"wait: {self._options.name} are not reduced within {timeout:g} s; this goes on"
                )
        self._step = None
        for request in step.requests:
            request.wait()  # all are complete: raises the first error

    def _record_order(self, order: Sequence[int]) -> None:
        """Let the buckets follow the order in which rank 0's arrays became ready."""
        own = np.array(order, np.int64)
        first: list[int] = broadcast(self._group, own, timeout=self._options.timeout).tolist()
        self._apply_order(self._places.buckets(first))
        self._learned = True

    def _apply_order(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._bucket_of = {i: k for k, bucket in enumerate(buckets) for i in bucket.members}


def _refusal(error: Exception) -> Exception:
    """Return an error by which this rank may refuse a call, to be told to the others."""
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(str(error) if type(error) is kind else f"{type(error).__name__}: {error}")
