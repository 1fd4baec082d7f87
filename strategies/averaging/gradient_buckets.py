"""Gradient buckets with a place for every dense gradient of any rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import collectives as cc
from strategies.averaging import bucket_copy
from strategies.averaging.parameter_spec import ParameterSpec

__all__ = ["GradientBuckets"]


class GradientBuckets:
    """Places for gradients, made when they are first needed; methods are *collective*.

    Args:
        comm: the ranks.
        op: reduction of the gradients, which are scaled before.
        compression: compression of the messages.

    Attributes:
        buckets: buckets that reduce the gradients; None before the first place exists.
        members: numbers of the leaves that have a place, in the order of the places.
        places: leaf -> its tensor in a bucket in host memory. A gradient written there after a step
            is not copied in the next one.
    """

    def __init__(self, comm: cc.Communicator, op: Any, compression: cc.Compression | None) -> None:
        self._comm, self._op, self._compression = comm, op, compression
        self.buckets: cc.Buckets | None = None
        self.members: list[int] = []
        self.places: dict[int, Any] = {}
        self._loaded: Sequence[dict[str, Any]] = ()  # residuals for buckets that are not made yet

    def make(
        self, leaves: Sequence[ParameterSpec], wanted: set[int], bucket_bytes: int | None
    ) -> None:
        """Make a place for each wanted leaf; leaves that have a place keep one.

        Args:
            leaves: all leaves.
            wanted: numbers of the wanted leaves.
            bucket_bytes: as for `plan_buckets`.
        """
        if wanted <= set(self.members):
            return
        # Places are kept: gradients that are sometimes None would otherwise cause new buckets.
        members = sorted(wanted | set(self.members))
        # Before `plan_buckets`: memory for both at once would be twice the gradients.
        self.close()
        chosen = [leaves[i] for i in members]
        self.buckets = self._comm.plan_buckets(
            [leaf.like for leaf in chosen],
            op=self._op,
            compression=self._compression,
            bucket_bytes=bucket_bytes,
            names=[leaf.name for leaf in chosen],
        )
        self.members = members
        if self._loaded:
            self.buckets.load_feedback(self._loaded)
            self._loaded = ()
        tensors = zip(members, self.buckets.views, strict=True)
        # Only PyTorch's tensors have `is_cpu`: places of NumPy are not offered to backward hooks.
        self.places = {i: view for i, view in tensors if getattr(view, "is_cpu", False)}

    def reduce(self, gradients: Sequence[Any], scale: float) -> list[Any]:
        """Reduce one gradient for each place; None counts as zeros."""
        assert self.buckets is not None
        views = self.buckets.views
        try:
            # `allreduce` writes them bucket by bucket, each while it is in the caches.
            hosts = bucket_copy.host_views(gradients, views, scale)
            if hosts is None:
                for view, gradient in zip(views, gradients, strict=True):
                    bucket_copy.copy_into(view, gradient, scale)
        except Exception as error:  # `fail` releases the other ranks, which would wait
            self.buckets.fail(error)
            raise
        # With `hosts` None, `copy_into` has applied the scale already.
        return self.buckets.allreduce(hosts, scale=1.0 if hosts is None else scale)

    def start(self, gradients: Sequence[Any], scale: float) -> None:
        """Start to reduce one gradient for each place, None as zeros, until `wait`."""
        assert self.buckets is not None
        views = self.buckets.views
        try:
            for place, (view, gradient) in enumerate(zip(views, gradients, strict=True)):
                bucket_copy.copy_into(view, gradient, scale)
                self.buckets.ready(place)
        except Exception as error:  # `fail` releases the other ranks, which would wait
            if self.buckets.pending:  # not raised by `ready`, which has failed the step
                self.buckets.fail(error)
            raise

    def wait(self) -> list[Any]:
        """Return the results of `start`, one for each place; [] if nothing was started."""
        pending = self.buckets is not None and self.buckets.pending
        return self.buckets.wait() if self.buckets is not None and pending else []

    def restore_feedback(self) -> None:
        """Restore the rounding errors of gradients whose average is not used."""
        if self.buckets is not None:
            self.buckets.restore_feedback()

    def feedback(self) -> Sequence[dict[str, Any]]:
        """Return copies of the rounding errors of each bucket; on this rank alone."""
        return self._loaded if self.buckets is None else self.buckets.feedback()

    def load_feedback(self, kept: Sequence[dict[str, Any]]) -> None:
        """Replace the rounding errors by a result of `feedback`; on this rank alone."""
        if self.buckets is None:
            self._loaded = kept  # for `make`
        else:
            self.buckets.load_feedback(kept)

    def close(self) -> None:
        """Release the places; harmless when repeated."""
        if self.buckets is not None:
            self.buckets.close()
            self.buckets, self.members, self.places = None, [], {}
