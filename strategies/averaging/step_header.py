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

# Positions in the array that all ranks add up. Two numbers follow for each leaf: of ranks with a
# gradient; and of ranks with a sparse one, plus `_MADE` times that of ranks that made one dense.
# The number of steps is equal on all ranks if P times the sum of its squares is the square of its
# sum. It counts since the last multiple of `_TURN`, so that the square is exact in float64.
# The settings are equal if each bit of their checksum is set on all ranks or on none.
_REFUSED, _CHANGED, _RETRY, _APART, _EXAMPLES, _WEIGHTED, _STEPS, _SQUARES, _SETTINGS = range(9)
_HEAD = _SETTINGS + BITS

_TURN = 1 << 12

_MADE = 1 << 20  # above any number of ranks; its sums are exact in float64


class StepHeader:
    """What the ranks have told each other; the same on all of them.

    Attributes:
        refused: a rank has an error.
        changed: a rank has other leaves than in the last step.
        retry: on some rank, what was reduced before the step is not what the step needs.
        apart: on some rank, passes did not come together.
        examples: of all ranks.
        dense: leaves with a gradient on any rank, none of them sparse.
        sparse: leaves with a sparse gradient on any rank.
        made_dense: leaves whose sparse gradient was made dense on any rank.
        settings_differ: whether the checksums of the settings differ.
    """

    def __init__(self, sums: npt.NDArray[np.float64], size: int) -> None:
        self._sums = sums
        bits = sums[_SETTINGS:_HEAD]
        self.settings_differ = bool(bits @ (size - bits))
        leaves = (len(sums) - _HEAD) // 2
        self._present = sums[_HEAD : _HEAD + leaves]
        made, self._rows = np.divmod(sums[_HEAD + leaves :], _MADE)
        self.refused, self.changed, self.retry, self.apart = (
            bool(sums[i]) for i in (_REFUSED, _CHANGED, _RETRY, _APART)
        )
        self.examples = float(sums[_EXAMPLES])
        self.dense = set(np.flatnonzero((self._present > 0) & (self._rows == 0)).tolist())
        self.sparse: list[int] = np.flatnonzero(self._rows > 0).tolist()
        self.made_dense: list[int] = np.flatnonzero(made > 0).tolist()

    def check(
        self, comm: cc.Communicator, rule: AveragingOptions, steps: int, names: Sequence[str]
    ) -> None:
        """Find what is wrong in the sums; the same on all ranks.

        Args:
            comm: the ranks.
            rule: by which gradients are combined.
            steps: of this rank.
            names: of the leaves.

        Raises:
            MismatchError, ValueError: as `Averaging.average`.
        """
        sums, size = self._sums, comm.size
        if sums[_SQUARES] * size != sums[_STEPS] ** 2:
            raise cc.MismatchError(
                "apply_gradients: ranks are not in the same step, expected the same number of "
                f"steps everywhere, got {sums[_STEPS] / size + steps // _TURN * _TURN:g} on "
                f"average and {steps} on {extend.describe_ranks(comm, comm.rank)}"
            )
        if sums[_WEIGHTED] not in (0, size):
            raise ValueError(
                "apply_gradients: some ranks have given examples, expected all or none, got "
                f"{sums[_WEIGHTED]:g} of {size}"
            )
        if sums[_WEIGHTED] and rule.op is not cc.MEAN:
            raise ValueError("apply_gradients: examples weight a mean, expected MEAN, got SUM")
        if sums[_WEIGHTED] and self.examples <= 0:
            raise ValueError("apply_gradients: no rank has an example, expected at least one")
        for i in self.sparse:
            if self._rows[i] < self._present[i]:
                raise ValueError(
                    "apply_gradients: a gradient is sparse on some ranks and dense on others, "
                    "expected one kind; sparse_as_dense=True makes them dense "
                    f"(variable: {names[i]})"
                )


class StepExchange:
    """The sums of the ranks of one group about some leaves; made by all of them together.

    Args:
        comm: the ranks.
        leaves: how many.
    """

    def __init__(self, comm: cc.Communicator, leaves: int = 0) -> None:
        self._size = comm.size
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
        """Tell all ranks of this one, and learn of them; *collective*.

        Args:
            contribution: of this rank.
            steps: how many it has made, with this one.
            retry: what this rank has reduced before the step is not what the step needs.
            changed: it has other leaves than the exchange is for.
            settings: `SettingsChecksum.checksum` of this rank; zeros if the rule skips them.
        """
        sums = self._sums
        sums[:] = 0
        sums[_REFUSED] = contribution.error is not None
        sums[_RETRY] = retry
        sums[_APART] = not contribution.at_once
        sums[_EXAMPLES] = contribution.examples or 0
        sums[_WEIGHTED] = contribution.examples is not None
        turn = steps % _TURN
        sums[_STEPS], sums[_SQUARES] = turn, turn**2
        sums[_SETTINGS:_HEAD] = settings
        if contribution.error is None and changed:
            sums[_CHANGED] = True
        elif contribution.error is None:
            middle = (_HEAD + len(sums)) // 2
            sums[_HEAD:middle] = [g is not None for g in contribution.gradients]
            sums[middle:] = [isinstance(g, Rows) for g in contribution.gradients]
            sums[[middle + i for i in contribution.made_dense]] = _MADE
        self._reduce()
        return StepHeader(sums.copy(), self._size)
