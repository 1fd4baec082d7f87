"""Gradient averaging over all ranks, shared by arrays, PyTorch and JAX.

One step is two exchanges. The first is small and precedes the gradients. It finds errors, changed
parameters and different settings, counts examples, and finds which ranks have a gradient for which
parameter, dense or sparse. The second reduces the gradients: dense ones in buckets, which are
planned once, sparse ones row by row. With `overlap` the second runs during the backward pass;
`prepare` also overlaps the first step. Without it, gradients may be written to their `places`
before the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import collectives as cc
from collectives import extend
from strategies.averaging import consistency
from strategies.averaging.accumulation import LocalGradient
from strategies.averaging.consistency import Fingerprint
from strategies.averaging.gradient_buckets import GradientBuckets
from strategies.averaging.options import OPERATION, AveragingOptions
from strategies.averaging.overlap import Overlap
from strategies.averaging.parameter_spec import ParameterKey, ParameterSpec
from strategies.averaging.settings import BITS, SettingsChecksum
from strategies.averaging.sharded_buckets import ShardedBuckets
from strategies.averaging.step_header import StepExchange, StepHeader
from strategies.core import array_ops
from strategies.core.agreement import raise_everywhere
from strategies.core.sparse import Rows
from strategies.optimizers.clipping import clip_by_global_norm

__all__ = ["Averaging"]

# Bytes of a bucket reduced during the backward pass; smaller buckets start earlier.
# `benchmarks/overlap.py`, 34 MB between 2 machines at 1 Gbit/s, ms per step: 2 MiB 435, 4 MiB 430,
# 8 MiB 437, 16 MiB 488.
_OVERLAPPED_BYTES = 4 << 20

# Consecutive steps with discarded early reductions after which "auto" reduces in the step. A
# program that changes its gradients before each step would otherwise send all of them twice.
_MISSES = 3

_EQUAL_METRIC = (
    "give all ranks the same options, and a schedule a metric that is equal on all ranks, such as "
    f"comm.allreduce(loss); {consistency.ON_PURPOSE}"
)


class Averaging:
    """Combines the gradients of the ranks of one group, step by step.

    Args:
        comm: the ranks.
        rule: options of the averaging.
        settings: returns the optimizer's settings by name; compared in every step.
        state: returns the facts of the optimizer's state, compared together with the leaves. None
            if the leaves are not the parameters: the caller then compares in the steps in which
            `due` is set.
        one_by_one: whether gradients arrive before the step, one by one.

    Attributes:
        due: whether ranks compare parameters in this step if the rule requires it; the same on all.
        overlaps: whether gradients are reduced before the step; the same on all ranks.
        overlap: reductions of the next step, if they overlap; on all ranks or on none.
        made_dense: leaves whose sparse gradient was made dense on any rank in the last step.
    """

    def __init__(
        self,
        comm: cc.Communicator,
        rule: AveragingOptions,
        settings: Callable[[], Mapping[str, Any]],
        state: Callable[[], list[Fingerprint]] | None = None,
        *,
        one_by_one: bool = False,
    ) -> None:
        self.comm = comm
        self.rule = rule
        self.due = False
        self.overlaps = one_by_one and _overlaps(comm, rule)
        self._compares = state is not None and rule.compare != "nothing"
        # The checksum of an empty dict is constant and costs nothing.
        self._settings = SettingsChecksum(settings if rule.compare == "all" else dict[str, Any])
        self._state = state if state is not None and rule.compare == "all" else list[Fingerprint]
        self._compared: set[ParameterKey] = set()
        self._given: Sequence[ParameterSpec] = ()
        self._leaves: list[ParameterSpec] = []
        self._keys: list[ParameterKey] = []
        # For no leaves: the first step marks `changed` and makes an exchange of its size.
        self._exchange = StepExchange(comm)
        self._bucketed: GradientBuckets | ShardedBuckets = (
            ShardedBuckets(comm, self._op)
            if rule.shard_state
            else GradientBuckets(comm, self._op, rule.compression)
        )
        self._steps = 0
        self._guessed = False  # whether the buckets are for a guess of the leaves with gradients
        self._joined = 0  # number of ranks that had joined in the last step
        self._misses = 0  # consecutive steps whose early reductions were discarded
        self.made_dense: Sequence[int] = ()
        self.overlap: Overlap | None = None
        # With a delay: the gradients to start with, names of the leaves in flight, and the means to
        # apply next by name.
        self._next: tuple[Sequence[Any], set[int], float] | None = None
        self._flying: dict[int, str] = {}
        self._last: Mapping[str, Any] | None = None

    @property
    def places(self) -> dict[int, Any]:
        """Leaf -> its tensor in a bucket, for buckets in host memory; see `GradientBuckets`.

        {} with a delay, because the last gradients are in flight while the next are computed.
        """
        return {} if self.rule.delay else self._bucketed.places

    def prepare(self, leaves: Sequence[ParameterSpec], trained: Collection[int]) -> None:
        """Allow the gradients of the first step to be reduced before it.

        *Collective*: all ranks, with the same leaves. The assumption is that all leaves trained on
        any rank will have dense gradients, and that no rank passes examples. Otherwise the first
        step reduces again, like any other.

        Args:
            leaves: the parameters; only their specifications are compared here.
            trained: leaves that may have gradients on this rank.

        Raises:
            MismatchError: ranks differ in their parameters; on all ranks.
        """
        consistency.compare(
            self.comm, OPERATION, lambda: [leaf.fingerprint(False) for leaf in leaves]
        )
        self._leaves, self._exchange = list(leaves), StepExchange(self.comm, len(leaves))
        marks = np.zeros(len(leaves), np.uint8)
        marks[list(trained)] = 1
        # A leaf trained on any rank needs a place on all ranks, which reduce the same buckets.
        wanted = set(np.flatnonzero(self.comm.allreduce(marks, op=cc.MAX)).tolist())
        if wanted:
            self._guessed = True
            self._allocate(wanted)
            # The guess: a complete step without examples.
            first = LocalGradient([], passes=self.rule.backward_passes_per_step)
            self.overlap = self._reduce_overlapped(self._scale(None, first), first)

    def average(
        self,
        leaves: Sequence[ParameterSpec],
        contribution: LocalGradient,
        unchanged: Collection[int] = (),
    ) -> list[Any]:
        """Combine the gradients of all ranks.

        *Collective*: all ranks, with the same leaves.

        Args:
            leaves: the parameters.
            contribution: this rank's contribution.
            unchanged: leaves whose gradients have not changed since `overlap` received them.

        Returns:
            For each leaf an array of its kind, in memory that the next step overwrites, `Rows`, or
            None if no rank has a gradient. The same bits on all ranks. With `shard_state` this
            rank's part of each, as a NumPy array. With a delay the results of the last step; [] in
            the first step; `start` must follow.

        Raises:
            MismatchError: ranks differ in their parameters, in other facts that the rule compares,
                or in the number of steps; on all ranks.
            ValueError: examples are missing, or a gradient is sparse on some ranks only; on all.
            Exception: the error of a contribution; on all ranks.
        """
        try:
            return self._average(leaves, contribution, unchanged)
        except Exception:
            # The average is not used, so its rounding errors must not enter the next step. With a
            # delay that of the last step is used.
            if not self.rule.delay:
                self._bucketed.restore_feedback()
            raise

    def start(self) -> None:
        """Start to reduce the gradients of the last `average`, with a delay.

        *Collective*. Call it after the update, because it overwrites the last means.
        """
        if self._next is None:
            return
        (gradients, wanted, scale), self._next = self._next, None
        assert isinstance(self._bucketed, GradientBuckets)
        self._allocate(wanted)
        members = self._bucketed.members
        self._last, self._flying = {}, {i: self._leaves[i].name for i in wanted}
        self._bucketed.start([gradients[i] if i in wanted else None for i in members], scale)

    def last_means(self) -> Mapping[str, Any] | None:
        """Wait for the means of the last step, with a delay; *collective* after the first step.

        Returns:
            Name of a leaf -> mean, in memory that `start` overwrites; None before the first step.
        """
        if isinstance(self._bucketed, GradientBuckets):
            results = dict(zip(self._bucketed.members, self._bucketed.wait(), strict=False))
            flying, self._flying = self._flying, {}
            if flying:
                self._last = {name: self._finish(results[i]) for i, name in flying.items()}
        return self._last

    def hand_over(self, other: Averaging) -> None:
        """Pass means that were loaded or waited for on to the averaging over other ranks.

        Those in flight are lost with the ranks that died.
        """
        if not self._flying:
            other.load_last_means(self._last)

    def load_last_means(self, means: Mapping[str, Any] | None) -> None:
        """Replace the means to apply next; those in flight are discarded."""
        self._last, self._next, self._flying = means, None, {}

    def join(self, leaves: Sequence[ParameterSpec] | None = None) -> None:
        """Take part in the steps of the other ranks without data, until all ranks call this.

        *Collective*. This rank's parameters do not change.

        Args:
            leaves: the parameters; None for those of the last step.

        Raises:
            ValueError: `leaves` is None in the first step of the other ranks; on all ranks.
            MismatchError: as `average`.
        """
        known = self._given if leaves is None else leaves
        self._joined = 0
        while self._joined < self.comm.size:
            self.average(known, LocalGradient([None] * len(known), joined=True))

    def _average(
        self,
        leaves: Sequence[ParameterSpec],
        contribution: LocalGradient,
        unchanged: Collection[int],
    ) -> list[Any]:
        # First, so that the step numbers of all ranks stay equal after an error.
        self._steps += 1
        bits = np.zeros(BITS)
        try:
            bits = self._settings.checksum()
        except Exception as error:  # raised by a schedule
            # A bad schedule must not skip the exchange, because other ranks wait in it.
            contribution = contribution._replace(error=contribution.error or error)
        # Taken from `self`, so that an exception below does not finish it a second time.
        overlap, self.overlap = self.overlap, None
        # Finish on every rank, even if this rank cannot use the results: it is collective.
        reduced = [] if overlap is None else overlap.finish()
        if overlap is not None and overlap.error is not None:
            contribution = contribution._replace(error=contribution.error or overlap.error)
        # Where a rank has joined, the scale of gradients reduced early was that of more ranks.
        retry = (
            overlap is None or contribution.joined or not overlap.matches(contribution, unchanged)
        )
        status = self._exchange_header(leaves, contribution, retry, bits)
        new = False
        if status.changed and not status.refused:
            # A rank with changed leaves could not send facts per leaf: compare the parameters,
            # resize the exchange to them, and repeat it.
            new = self._check_parameters(leaves, contribution.joined)
            # `_check_parameters` may have closed the buckets, and with them the early results.
            retry = retry or self._bucketed.buckets is None
            status = self._exchange_header(leaves, contribution, retry, bits)
        # Errors first: a rank with an error has sent no facts per leaf.
        if status.refused:
            raise_everywhere(contribution.error, self.comm, "apply_gradients")
        self._joined = status.joined
        if status.joined == self.comm.size:
            return []
        status.check(self.comm, self.rule, self._steps, [leaf.name for leaf in self._leaves])
        # The checksum only shows that settings differ; this exchange finds which and where.
        if status.settings_differ:
            consistency.compare(self.comm, OPERATION, self._settings.facts, remedy=_EQUAL_METRIC)
        # `status.retry` counts all ranks, so a miss of one rank is a miss of all.
        self._misses = self._misses + 1 if overlap is not None and status.retry else 0
        # `status` is the same on all ranks, so all of them stop overlapping in the same step.
        if self._misses == _MISSES and self.rule.overlap == "auto":
            self.overlaps = False
        self._compare(leaves, new)
        scale = self._scale(status, contribution)
        if self.rule.delay:
            self._refuse_sparse(status, "delay")
            # The means of the last step, while `start` reduces the gradients of this one.
            last = self.last_means()
            self._next = contribution.gradients, status.dense, scale
            return [] if last is None else [last.get(leaf.name) for leaf in self._leaves]
        results = self._combine(contribution.gradients, status, scale, reduced)
        self.made_dense = status.made_dense
        if self._guessed and status.dense < set(self._bucketed.members):
            # The first step shows which leaves need a place.
            self._bucketed.close()
            self._allocate(status.dense)
        self._guessed = False
        # If any rank sums its passes itself, the sum exists only in the step: no overlap.
        if self.overlaps and self._bucketed.buckets is not None and not status.apart:
            self.overlap = self._reduce_overlapped(scale, contribution)
        return results

    def _reduce_overlapped(self, scale: float, contribution: LocalGradient) -> Overlap:
        return Overlap(self._bucketed.buckets, self._bucketed.members, scale, contribution)

    def _combine(
        self, gradients: Sequence[Any], status: StepHeader, scale: float, reduced: Sequence[Any]
    ) -> list[Any]:
        """Return the combined gradients; reduce unless `reduced` is valid on all ranks."""
        wanted, bucketed = status.dense, self._bucketed
        # Both conditions are equal on all ranks: sums of the exchange, and members made together.
        if wanted and (status.retry or not wanted <= set(bucketed.members)):
            # The results of early reductions are discarded, and so are their rounding errors.
            bucketed.restore_feedback()
            self._allocate(wanted)
            reduced = bucketed.reduce(
                [gradients[i] if i in wanted else None for i in bucketed.members], scale
            )
        results: list[Any] = [None] * len(gradients)
        # Not strict: without a dense gradient `reduced` may be empty. A place without a gradient on
        # any rank holds zeros, which are ignored.
        for i, result in zip(bucketed.members, reduced, strict=False):
            if i in wanted:
                results[i] = self._finish(result)
        if self.rule.shard_state:
            self._refuse_sparse(status, "shard_state")
        for i in status.sparse:
            results[i] = self._average_rows(self._leaves[i], gradients[i], scale)
        return results

    def _refuse_sparse(self, status: StepHeader, option: str) -> None:
        if status.sparse:
            raise ValueError(
                f"{OPERATION}: {option} is for dense gradients, got a sparse one "
                f"(variable: {self._leaves[status.sparse[0]].name})"
            )

    def _allocate(self, wanted: set[int]) -> None:
        nbytes = self.rule.bucket_bytes or (_OVERLAPPED_BYTES if self.overlaps else None)
        self._bucketed.make(self._leaves, wanted, nbytes)

    def clip(self, gradients: Sequence[Any]) -> None:
        """Scale averaged gradients down to the norm that the rule allows.

        *Collective* if the rule clips. Gradients that are not finite are left unchanged, so that
        the caller can detect them.

        Args:
            gradients: arrays, the same on all ranks, or None; for sparse gradients the values. With
                `shard_state` this rank's parts.
        """
        limit = self.rule.clip_global_norm
        if limit is None:
            return
        # Each rank computes the norm of its share. All combine the same shares, so the bits agree.
        rank, size = self.comm.rank, self.comm.size
        given = [g for g in gradients if g is not None]
        if self.rule.shard_state:
            # Numbers without axes are on all ranks.
            shares = [g for g in given if len(g.shape) or rank == 0]
        else:
            flat = [array_ops.in_memory_order(g) for g in given]
            # The shares cover the array without gaps, even if P exceeds the number of elements.
            shares = [g[len(g) * rank // size : len(g) * (rank + 1) // size] for g in flat]
        _, norm = clip_by_global_norm(shares, limit, self.comm)
        if limit < norm < math.inf:
            for gradient in gradients:
                if gradient is not None:
                    gradient *= limit / norm

    def gather(self, parameters: Sequence[Any], parts: Sequence[Any]) -> None:
        """Give all ranks the parts that each has updated, with `shard_state`; *collective*.

        Args:
            parameters: array of each leaf, changed in place.
            parts: this rank's part of each leaf.
        """
        assert isinstance(self._bucketed, ShardedBuckets)
        self._bucketed.gather(parameters, parts)

    def feedback(self) -> Sequence[dict[str, Any]]:
        """Return this rank's rounding errors for a checkpoint; [] without feedback."""
        return self._bucketed.feedback() if isinstance(self._bucketed, GradientBuckets) else []

    def load_feedback(self, kept: Sequence[dict[str, Any]]) -> None:
        """Replace the rounding errors by a result of `feedback`."""
        assert isinstance(self._bucketed, GradientBuckets)
        self._bucketed.load_feedback(kept)

    def close(self) -> None:
        """Release the buckets; *collective*."""
        # Its reductions have started, and other ranks wait in them.
        overlap, self.overlap = self.overlap, None
        if overlap is not None:
            overlap.finish()
        if self.rule.delay:
            self.last_means()
        self._bucketed.close()

    def _exchange_header(
        self,
        leaves: Sequence[ParameterSpec],
        contribution: LocalGradient,
        retry: bool,
        settings: npt.NDArray[np.float64],
    ) -> StepHeader:
        # Identity first: callers may reuse their list, and comparing all keys costs more.
        changed = leaves is not self._given and self._keys != [leaf.key for leaf in leaves]
        return self._exchange(
            contribution, steps=self._steps, retry=retry, changed=changed, settings=settings
        )

    def _check_parameters(self, leaves: Sequence[ParameterSpec], joined: bool) -> bool:
        """Compare the parameters of all ranks and allocate for them; return if any are new."""
        keys = [leaf.key for leaf in leaves]
        # Values are read once per parameter: after that, `compare_every` decides.
        new = set(keys) - self._compared
        compared = new if self._compares else set()

        def facts() -> list[Fingerprint]:
            if joined and not leaves:
                raise ValueError(
                    "join: this rank has made no step, so its variables are unknown, expected a "
                    "step with examples=0"
                )
            # Settings and state only the first time: later steps compare the settings by checksum.
            own = [] if self._compared else self._facts()
            return own + [leaf.fingerprint(leaf.key in compared) for leaf in leaves]

        consistency.compare(self.comm, OPERATION, facts)
        # Buckets are laid out for the old leaves.
        if keys != [leaf.key for leaf in self._leaves]:
            if self._leaves and self.rule.shard_state:
                raise ValueError(
                    f"{OPERATION}: with shard_state the parts of parameters stay on their ranks, "
                    f"expected the parameters of the first step, got {len(leaves)} others"
                )
            self.close()
        # A shared array and a plan per size; all ranks drop the old ones together.
        self._exchange = StepExchange(self.comm, len(leaves))
        self._given, self._leaves, self._keys = leaves, list(leaves), keys
        self._compared |= new
        return bool(new)

    def _facts(self) -> list[Fingerprint]:
        return self._settings.facts() + self._state()

    def _compare(self, leaves: Sequence[ParameterSpec], new: bool) -> None:
        """Compare the parameters again if it is due, unless `new` ones were compared just now."""
        every = self.rule.compare_every
        # The parameters of ranks that have joined are those of earlier steps.
        again = every is not None and self._steps % every == 0 and not self._joined
        # Also in the second step: a warm-up often starts at rate 0, so only the parameters after
        # its step show a difference.
        self.due = self.rule.compare != "nothing" and (new or again or self._steps <= 2)
        if again and not new and self._compares:
            consistency.compare(
                self.comm,
                OPERATION,
                lambda: self._facts() + [leaf.fingerprint(compared=True) for leaf in leaves],
                earlier="in an earlier step",
            )

    def _scale(self, status: StepHeader | None, contribution: LocalGradient) -> float:
        """Return the factor of this rank's gradients; None assumes a step without examples."""
        size = self.comm.size
        # MEAN divides by the number of ranks, but the mean is over all examples, or over the ranks
        # that have data.
        if status is not None and contribution.examples is not None:
            scale = contribution.weight * size / status.examples
        else:
            scale = 1 / contribution.passes if self.rule.average_aggregated_gradients else 1.0
            if status is not None and status.joined and self.rule.op is cc.MEAN:
                scale *= size / (size - status.joined)
        # Divided in two parts, so that 16-bit sums do not overflow: here and in `_finish`.
        return scale / self.rule.gradient_predivide_factor

    @property
    def _op(self) -> Any:
        return self.rule.op if self.rule.gradient_predivide_factor == 1 else cc.SUM

    def _finish(self, result: Any) -> Any:
        """Apply the second part of a split division."""
        if self.rule.gradient_predivide_factor != 1:
            result *= self.rule.gradient_predivide_factor / self.comm.size
        return result

    def _average_rows(self, leaf: ParameterSpec, gradient: Rows | None, scale: float) -> Rows:
        if gradient is None:
            # A rank without rows takes part with none, because the exchange is collective.
            indices, values = np.empty(0, np.int64), leaf.like[:0]
        else:
            # In the common dtype of all ranks, because summed rows may be wider.
            values = array_ops.astype(gradient.values * scale, array_ops.dtype_name(leaf.like))
            indices = gradient.indices
        found, rows = self.comm.sparse_allreduce(
            indices, values, num_rows=leaf.shape[0], op=self._op
        )
        return Rows(found, self._finish(rows))


def _overlaps(comm: cc.Communicator, rule: AveragingOptions) -> bool:
    """Return whether gradients are reduced before the step; the same on all ranks.

    On one node the exchange takes less time than a second thread takes from the backward pass:
    `benchmarks/torch_step.py`, 102 MB, 2 ranks on 2 cores: 124 ms a step without, 155 with overlap.
    """
    if rule.shard_state or rule.delay:
        return False
    if rule.overlap != "auto":
        return rule.overlap
    if comm.num_nodes == 1:
        return False
    # On all ranks or on none, because all ranks must reduce the same buckets.
    return bool(comm.allreduce(extend.supports_threads(comm), op=cc.MIN))
