"""Gradient buckets with a place for every dense gradient of any rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import collectives as cc
from strategies.averaging import bucket_copy
from strategies.averaging.parameter_spec import ParameterSpec

__all__ = ["GradientBuckets"]


class GradientBuckets:
    """Places for gradients, made as they are first needed; *collective*, as all that it does.

    Args:
        comm: the ranks.
        op: how gradients are combined, which are scaled before.
        compression: how they travel.

    Attributes:
        buckets: what reduces them; None before there is a place.
        members: the leaves that have a place, by their numbers, in the order of the places.
        places: the tensors of buckets in host memory, by their leaves: a gradient that is written
            there after a step needs not be copied in the next one.
    """

    def __init__(self, comm: cc.Communicator, op: Any, compression: cc.Compression | None) -> None:
        self._comm, self._op, self._compression = comm, op, compression
        self.buckets: cc.Buckets | None = None
        self.members: list[int] = []
        self.places: dict[int, Any] = {}

    def make(
        self, leaves: Sequence[ParameterSpec], wanted: set[int], bucket_bytes: int | None
    ) -> None:
        """Have a place for each of the leaves that are wanted, and for those that have one.

        Args:
            leaves: all of them.
            wanted: their numbers.
            bucket_bytes: as for `plan_buckets`.
        """
        if wanted <= set(self.members):
            return
        members = sorted(wanted | set(self.members))
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
        tensors = zip(members, self.buckets.views, strict=True)
        self.places = {i: view for i, view in tensors if getattr(view, "is_cpu", False)}

    def reduce(self, gradients: Sequence[Any], scale: float) -> list[Any]:
        """Reduce one gradient for each place; None counts as zeros."""
        assert self.buckets is not None
        views = self.buckets.views
        try:
            # They are written bucket by bucket, each while it is in the caches.
            hosts = bucket_copy.host_views(gradients, views, scale)
            if hosts is None:
                for view, gradient in zip(views, gradients, strict=True):
                    bucket_copy.copy_into(view, gradient, scale)
        except Exception as error:  # for which the other ranks must not wait
            self.buckets.fail(error)
            raise
        return self.buckets.allreduce(hosts, scale=1.0 if hosts is None else scale)

    def restore_feedback(self) -> None:
        """Forget what roundings of gradients have left over whose average is not used."""
        if self.buckets is not None:
            self.buckets.restore_feedback()

    def close(self) -> None:
        """Let go of the places; harmless when repeated."""
        if self.buckets is not None:
            self.buckets.close()
            self.buckets, self.members, self.places = None, [], {}
