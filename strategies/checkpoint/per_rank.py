"""Objects whose state differs between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["PerRank"]


@dataclass(frozen=True)
class PerRank:
    """An object of which each rank saves and restores its own state.

    `Saver` and `elastic.State` expect equal objects on all ranks otherwise. A rank that the save
    lacked keeps the state of its program. All ranks' states pass through every rank's memory, and
    are stored once if they are equal.

    Args:
        thing: anything that `Saver` accepts, such as a model between two synchronizations of local
            steps; not an input.

    Example:
        >>> import tempfile, numpy as np, strategies
        >>> weights = np.zeros(2)
        >>> checkpoints = strategies.CheckpointManager(tempfile.mkdtemp())
        >>> saver = strategies.checkpoint.Saver(checkpoints, weights=PerRank(weights))
        >>> path = saver.save(1)
        >>> weights[:] = 7
        >>> saver.restore(), weights.tolist()
        (1, [0.0, 0.0])
    """

    thing: Any
