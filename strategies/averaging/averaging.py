"""Gradient averaging over all ranks, shared by arrays, PyTorch and JAX.

One step is two exchanges. The first is small and precedes the gradients: it finds whether a rank
refuses, whether parameters have changed, whether the settings of the optimizers are equal, how many
examples there are, and which ranks have a gradient for which parameter, dense or sparse. The second
reduces the gradients: dense ones in buckets, which are planned once, sparse ones row by row. With
`overlap` the second runs during the backward pass; `prepare` also lets the first step overlap.
Without it, gradients may be written to their `places` before the step.
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
from strategies.averaging.step_header import StepExchange, StepHeader
from strategies.core import array_ops
from strategies.core.agreement import raise_everywhere
from strategies.core.sparse import Rows
from strategies.optimizers.clipping import clip_by_global_norm

__all__ = ["Averaging"]

# Bytes of a bucket that is to be reduced during the backward pass: smaller ones begin earlier.
# `benchmarks/overlap.py`, 34 MB between 2 machines at 1 Gbit/s, ms per step: 2 MiB 435, 4 MiB 430,
# 8 MiB 437, 16 MiB 488.
_OVERLAPPED_BYTES = 4 << 20

# Steps in a row whose gradients were reduced early in vain, after which "auto" reduces in the step:
# a program that changes its gradients before each step would send all of them twice.
_MISSES = 3

_EQUAL_METRIC = (
    "give the schedule a metric that is equal on all ranks, such as comm.allreduce(loss)"
    f"; {consistency.ON_PURPOSE}"
)


class Averaging:
    """Combines the gradients of the ranks of one group, step by step.

    Args:
        comm: the ranks.
        rule: how.
        settings: returns the optimizer's settings by name; compared in every step.
        state: returns the facts of the optimizer's state; compared together with the leaves. None
            if the leaves are not the parameters: the caller then compares in the steps in which
            `due` is set.
        one_by_one: gradients come before the step, one after the other.

    Attributes:
        due: whether ranks compare parameters in this step, if the rule says so; on all or on none.
        overlaps: whether gradients are reduced before the step; on all or on none.
        overlap: what takes them for the next step, if they are; on all or on none.
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
        self._settings = SettingsChecksum(settings if rule.compare == "all" else dict[str, Any])
        self._state = state if state is not None and rule.compare == "all" else list[Fingerprint]
        self._compared: set[ParameterKey] = set()
        self._given: Sequence[ParameterSpec] = ()
        self._leaves: list[ParameterSpec] = []
        self._keys: list[ParameterKey] = []
        self._exchange = StepExchange(comm)
        self._bucketed = GradientBuckets(comm, self._op, rule.compression)
        self._steps = 0
        self._guessed = False  # which leaves have gradients
        self._misses = 0  # steps in a row whose early reductions were in vain
        self.made_dense: Sequence[int] = ()
        self.overlap: Overlap | None = None

    @property
    def places(self) -> dict[int, Any]:
        """The tensors of buckets in host memory, by their leaves; see `GradientBuckets`."""
        return self._bucketed.places

    def prepare(self, leaves: Sequence[ParameterSpec], trained: Collection[int]) -> None:
        """Let the gradients of the first step be reduced before it.

        *Collective*: all ranks, with the same leaves. It is taken that all that are trained on any
        rank will have dense gradients, and that no rank tells examples; else the first step reduces
        again, as any other.

        Args:
            leaves: the parameters, which are not compared yet but for what they are.
            trained: those that may have gradients on this rank.

        Raises:
            MismatchError: ranks differ in their parameters; on all.
        """
        consistency.compare(
            self.comm, OPERATION, lambda: [leaf.fingerprint(False) for leaf in leaves]
        )
        self._leaves, self._exchange = list(leaves), StepExchange(self.comm, len(leaves))
        marks = np.zeros(len(leaves), np.uint8)
        marks[list(trained)] = 1
        wanted = set(np.flatnonzero(self.comm.allreduce(marks, op=cc.MAX)).tolist())
        if wanted:
            self._guessed = True
            self._allocate(wanted)
            first = LocalGradient([], passes=self.rule.backward_passes_per_step)
            self.overlap = self._reduce_overlapped(self._scale(0.0, first), first)

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
            contribution: of this rank.
            unchanged: leaves whose gradients are as they were when `overlap` got them.

        Returns:
            For each leaf an array of its kind, in memory that is overwritten by the next step,
            `Rows`, or None if no rank has a gradient. The same bits on all ranks.

        Raises:
            MismatchError: ranks differ in their parameters, in other things that the rule
                compares, or in the number of steps; on all.
            ValueError: examples are missing, or a gradient is sparse on some ranks only; on all.
            Exception: the error of a contribution; on all ranks.
        """
        try:
            return self._average(leaves, contribution, unchanged)
        except Exception:
            self._bucketed.restore_feedback()
            raise

    def _average(
        self,
        leaves: Sequence[ParameterSpec],
        contribution: LocalGradient,
        unchanged: Collection[int],
    ) -> list[Any]:
        self._steps += 1
        bits = np.zeros(BITS)
        try:
            bits = self._settings.checksum()
        except Exception as error:  # of a schedule
            contribution = contribution._replace(error=contribution.error or error)
        overlap, self.overlap = self.overlap, None
        reduced = [] if overlap is None else overlap.finish()
        if overlap is not None and overlap.error is not None:
            contribution = contribution._replace(error=contribution.error or overlap.error)
        retry = overlap is None or not overlap.matches(contribution, unchanged)
        status = self._exchange_header(leaves, contribution, retry, bits)
        new = False
        if status.changed and not status.refused:
            new = self._check_parameters(leaves)
            retry = retry or self._bucketed.buckets is None
            status = self._exchange_header(leaves, contribution, retry, bits)
        if status.refused:
            raise_everywhere(contribution.error, self.comm, "apply_gradients")
        status.check(self.comm, self.rule, self._steps, [leaf.name for leaf in self._leaves])
        if status.settings_differ:
            consistency.compare(self.comm, OPERATION, self._settings.facts, remedy=_EQUAL_METRIC)
        self._misses = self._misses + 1 if overlap is not None and status.retry else 0
        if self._misses == _MISSES and self.rule.overlap == "auto":
            self.overlaps = False
        self._compare(leaves, new)
        scale = self._scale(status.examples, contribution)
        results = self._combine(contribution.gradients, status, scale, reduced)
        self.made_dense = status.made_dense
        if self._guessed:
            self._reconcile(status.dense)
        # Where passes were added up before, their sum is known in the step only, on any rank.
        if self.overlaps and self._bucketed.buckets is not None and not status.apart:
            self.overlap = self._reduce_overlapped(scale, contribution)
        return results

    def _reduce_overlapped(self, scale: float, contribution: LocalGradient) -> Overlap:
        """Let the gradients of the next step be reduced before it."""
        return Overlap(self._bucketed.buckets, self._bucketed.members, scale, contribution)

    def _combine(
        self, gradients: Sequence[Any], status: StepHeader, scale: float, reduced: Sequence[Any]
    ) -> list[Any]:
        """Make the second exchange, unless all ranks have `reduced` what this step needs."""
        wanted, bucketed = status.dense, self._bucketed
        if wanted and (status.retry or not wanted <= set(bucketed.members)):
            bucketed.restore_feedback()
            self._allocate(wanted)
            reduced = bucketed.reduce(
                [gradients[i] if i in wanted else None for i in bucketed.members], scale
            )
        results: list[Any] = [None] * len(gradients)
        for i, result in zip(bucketed.members, reduced, strict=False):
            if i in wanted:
                results[i] = self._finish(result)
        for i in status.sparse:
            results[i] = self._average_rows(self._leaves[i], gradients[i], scale)
        return results

    def _reconcile(self, wanted: set[int]) -> None:
        """Have buckets for no other leaves than those of the first step."""
        self._guessed = False
        if wanted < set(self._bucketed.members):
            self._bucketed.close()
            self._allocate(wanted)

    def _allocate(self, wanted: set[int]) -> None:
        """Have buckets with a place for each of these leaves."""
        nbytes = self.rule.bucket_bytes or (_OVERLAPPED_BYTES if self.overlaps else None)
        self._bucketed.make(self._leaves, wanted, nbytes)

    def clip(self, gradients: Sequence[Any]) -> None:
        """Shorten averaged gradients to the norm that the rule allows.

        *Collective* where the rule clips. Gradients that are not finite are left as they are, for
        whoever looks for them.

        Args:
            gradients: arrays, the same on all ranks, or None; of sparse ones the values.
        """
        limit = self.rule.clip_global_norm
        if limit is None:
            return
        # Each rank measures its share, and all join the same shares: the same bits everywhere.
        rank, size = self.comm.rank, self.comm.size
        flat = [array_ops.in_memory_order(g) for g in gradients if g is not None]
        shares = [g[len(g) * rank // size : len(g) * (rank + 1) // size] for g in flat]
        _, norm = clip_by_global_norm(shares, limit, self.comm)
        if limit < norm < math.inf:
            for gradient in gradients:
                if gradient is not None:
                    gradient *= limit / norm

    def close(self) -> None:
        """Release the buckets; *collective*."""
        overlap, self.overlap = self.overlap, None
        if overlap is not None:
            overlap.finish()
        self._bucketed.close()

    def _exchange_header(
        self,
        leaves: Sequence[ParameterSpec],
        contribution: LocalGradient,
        retry: bool,
        settings: npt.NDArray[np.float64],
    ) -> StepHeader:
        """Make the first exchange."""
        changed = leaves is not self._given and self._keys != [leaf.key for leaf in leaves]
        return self._exchange(
            contribution, steps=self._steps, retry=retry, changed=changed, settings=settings
        )

    def _check_parameters(self, leaves: Sequence[ParameterSpec]) -> bool:
        """Compare the parameters of all ranks, and make room for them; tells if any are new."""
        keys = [leaf.key for leaf in leaves]
        new = set(keys) - self._compared
        compared = new if self._compares else set()

        def facts() -> list[Fingerprint]:
            own = [] if self._compared else self._facts()
            return own + [leaf.fingerprint(leaf.key in compared) for leaf in leaves]

        consistency.compare(self.comm, OPERATION, facts)
        if keys != [leaf.key for leaf in self._leaves]:
            self.close()
        self._exchange = StepExchange(self.comm, len(leaves))
        self._given, self._leaves, self._keys = leaves, list(leaves), keys
        self._compared |= new
        return bool(new)

    def _facts(self) -> list[Fingerprint]:
        return self._settings.facts() + self._state()

    def _compare(self, leaves: Sequence[ParameterSpec], new: bool) -> None:
        """Compare the parameters again, if it is time; where some are `new` they just were."""
        every = self.rule.compare_every
        again = every is not None and self._steps % every == 0
        # Also the second step, for the caller: a rate that warms up often begins at zero, and of
        # such a step nothing shows but the parameters.
        self.due = self.rule.compare != "nothing" and (new or again or self._steps <= 2)
        if again and not new and self._compares:
            consistency.compare(
                self.comm,
                OPERATION,
                lambda: self._facts() + [leaf.fingerprint(compared=True) for leaf in leaves],
                earlier="in an earlier step",
            )

    def _scale(self, examples: float, contribution: LocalGradient) -> float:
        """Return what this rank's gradients are multiplied by before they are combined."""
        if contribution.examples is not None:
            scale = contribution.weight * self.comm.size / examples
        else:
            scale = 1 / contribution.passes if self.rule.average_aggregated_gradients else 1.0
        return scale / self.rule.gradient_predivide_factor

    @property
    def _op(self) -> Any:
        """How the scaled gradients are combined."""
        return self.rule.op if self.rule.gradient_predivide_factor == 1 else cc.SUM

    def _finish(self, result: Any) -> Any:
        """Make the mean of a sum, where the division was split."""
        if self.rule.gradient_predivide_factor != 1:
            result *= self.rule.gradient_predivide_factor / self.comm.size
        return result

    def _average_rows(self, leaf: ParameterSpec, gradient: Rows | None, scale: float) -> Rows:
        if gradient is None:
            indices, values = np.empty(0, np.int64), leaf.like[:0]
        else:
            # In the dtype of all ranks: rows of one index that were added up may be wider.
            values = array_ops.astype(gradient.values * scale, array_ops.dtype_name(leaf.like))
            indices = gradient.indices
        found, rows = self.comm.sparse_allreduce(
            indices, values, num_rows=leaf.shape[0], op=self._op
        )
        return Rows(found, self._finish(rows))


def _overlaps(comm: cc.Communicator, rule: AveragingOptions) -> bool:
    """Tell whether gradients are to be reduced before the step; on all ranks or on none.

    On one node the exchange takes less time than a second thread takes from the backward pass:
    `benchmarks/torch_step.py`, 102 MB, 2 ranks on 2 cores: 124 ms a step without, 155 with overlap.
    """
    if rule.overlap != "auto":
        return rule.overlap
    if comm.num_nodes == 1:
        return False
    return bool(comm.allreduce(extend.supports_threads(comm), op=cc.MIN))
