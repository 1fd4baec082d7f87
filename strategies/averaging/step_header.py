"""Step header: the facts that ranks exchange before gradients move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import collectives as cc
from collectives import extend
from strategies.averaging.accumulation import LocalGradient
from strategies.averaging.options import AveragingOptions
from strategies.averaging.settings import BITS
from strategies.core.sparse import Rows

__all__ = ["StepExchange", "StepHeader"]

# Positions in the array that all ranks sum. Two numbers per leaf follow: the number of ranks with a
# gradient; and the number of ranks with a sparse one, plus `_MADE` times the number of ranks that
# made one dense.
# Step numbers are equal on all ranks if P times the sum of squares equals the square of the sum.
# They count from the last multiple of `_TURN`, so that the square is exact in float64.
# Settings are equal if each bit of their checksum is set on all ranks or on none; ranks that have
# joined do not count, as their schedules have stopped.
(_REFUSED, _CHANGED, _RETRY, _APART, _EXAMPLES, _WEIGHTED, _STEPS, _SQUARES, _JOINED,
    _SETTINGS) = range(10)  # fmt: skip
_HEAD = _SETTINGS + BITS

_TURN = 1 << 12

_MADE = 1 << 20  # above any number of ranks; its sums are exact in float64


class StepHeader:
    """The sums of all ranks' facts; the same on all ranks.

    Attributes:
        refused: whether any rank has an error.
        changed: whether any rank has other leaves than in the last step.
        retry: whether any rank needs another reduction than the one before the step.
        apart: whether any rank received its passes one by one.
        examples: number of examples of all ranks.
        joined: number of ranks that have joined.
        dense: leaves with a gradient on any rank, none of which is sparse.
        sparse: leaves with a sparse gradient on any rank.
        made_dense: leaves whose sparse gradient was made dense on any rank.
        settings_differ: whether the checksums of the settings differ.
    """

    def __init__(self, sums: npt.NDArray[np.float64], size: int) -> None:
        self._sums = sums
        bits = sums[_SETTINGS:_HEAD]
        self.joined = int(sums[_JOINED])
        # If a bit is equal on all P ranks, its sum is 0 or P, and `sum * (P - sum)` is 0.
        self.settings_differ = bool(bits @ (size - self.joined - bits))
        leaves = (len(sums) - _HEAD) // 2
        self._present = sums[_HEAD : _HEAD + leaves]
        # Two counts in one number: ranks with rows, and `_MADE` times ranks that made them dense.
        made, self._rows = np.divmod(sums[_HEAD + leaves :], _MADE)
        self.refused, self.changed, self.retry, self.apart = (
            bool(sums[i]) for i in (_REFUSED, _CHANGED, _RETRY, _APART)
        )
        self.examples = float(sums[_EXAMPLES])
        # Rows on one rank and a dense gradient on another: sparse here, rejected by `check`.
        self.dense = set(np.flatnonzero((self._present > 0) & (self._rows == 0)).tolist())
        self.sparse: list[int] = np.flatnonzero(self._rows > 0).tolist()
        self.made_dense: list[int] = np.flatnonzero(made > 0).tolist()

    def check(
        self, comm: cc.Communicator, rule: AveragingOptions, steps: int, names: Sequence[str]
    ) -> None:
        """Raise if the sums show an error; on all ranks.

        Args:
            comm: the ranks.
            rule: options of the averaging.
            steps: step number of this rank.
            names: names of the leaves.

        Raises:
            MismatchError, ValueError: as `Averaging.average`.
        """
        sums, size = self._sums, comm.size
        # P * sum(x^2) = (sum x)^2 holds only if all x are equal (Cauchy-Schwarz). It needs sums
        # alone, so the check costs no message of its own.
        if sums[_SQUARES] * size != sums[_STEPS] ** 2:
            raise cc.MismatchError(
                "apply_gradients: ranks are not in the same step, expected the same number of "
                f"steps everywhere, got {sums[_STEPS] / size + steps // _TURN * _TURN:g} on "
                f"average and {steps} on {extend.describe_ranks(comm, comm.rank)}"
            )
        # On none or on all: weighted and unweighted means must not be added.
        if sums[_WEIGHTED] not in (0, size - self.joined):
            raise ValueError(
                "apply_gradients: some ranks have passed examples, expected all or none, got "
                f"{sums[_WEIGHTED]:g} of {size}"
            )
        if sums[_WEIGHTED] and rule.op is not cc.MEAN:
            raise ValueError("apply_gradients: examples weight a mean, expected MEAN, got SUM")
        if sums[_WEIGHTED] and self.examples <= 0:
            raise ValueError("apply_gradients: no rank has an example, expected at least one")
        # A rank without a gradient adds to neither count, so it fits both kinds.
        for i in self.sparse:
            if self._rows[i] < self._present[i]:
                raise ValueError(
                    "apply_gradients: a gradient is sparse on some ranks and dense on others, "
                    "expected one kind; sparse_as_dense=True makes them dense "
                    f"(variable: {names[i]})"
                )


class StepExchange:
    """Sums facts about a step over the ranks; the constructor is *collective*.

    Args:
        comm: the ranks.
        leaves: number of leaves.
    """

    def __init__(self, comm: cc.Communicator, leaves: int = 0) -> None:
        self._size = comm.size
        # In memory that the ranks of a node share, so that the plan reads it without a copy.
        self._sums = comm.shared_empty(_HEAD + 2 * leaves, np.float64)
        self._reduce: Any = comm.plan_allreduce(self._sums, op=cc.SUM)

    def __call__(
        self,
        contribution: LocalGradient,
        *,
        steps: int,
        retry: bool,
        changed: bool,
        settings: npt.NDArray[np.float64],
    ) -> StepHeader:
        """Exchange the facts of all ranks; *collective*.

        Args:
            contribution: this rank's contribution.
            steps: step number of this rank.
            retry: whether this rank needs another reduction than the one before the step.
            changed: whether this rank has other leaves than the exchange was made for.
            settings: `SettingsChecksum.checksum` of this rank; zeros if the rule skips them.
        """
        sums = self._sums
        # The reduction has left the sums of all ranks here, so every fact is written again.
        sums[:] = 0
        sums[_REFUSED] = contribution.error is not None
        sums[_RETRY] = retry
        sums[_APART] = not contribution.at_once
        sums[_EXAMPLES] = contribution.examples or 0
        sums[_WEIGHTED] = contribution.examples is not None
        turn = steps % _TURN
        sums[_STEPS], sums[_SQUARES] = turn, turn**2
        sums[_JOINED] = contribution.joined
        sums[_SETTINGS:_HEAD] = 0 if contribution.joined else settings
        # A rank with other leaves has another number of them, so it sends no facts per leaf.
        if contribution.error is None and changed:
            sums[_CHANGED] = True
        elif contribution.error is None:
            middle = (_HEAD + len(sums)) // 2
            sums[_HEAD:middle] = [g is not None for g in contribution.gradients]
            sums[middle:] = [isinstance(g, Rows) for g in contribution.gradients]
            sums[[middle + i for i in contribution.made_dense]] = _MADE
        self._reduce()
        # A copy, because the next exchange overwrites the buffer.
        return StepHeader(sums.copy(), self._size)
