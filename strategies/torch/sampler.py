"""`ShardedSampler`: every row once per epoch, on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch

import collectives as cc
from strategies.core import agreement
from strategies.core.validation import integer
from strategies.input.sharded import ShardedInput, merge_positions, state_fact

__all__ = ["ShardedSampler"]


class ShardedSampler(torch.utils.data.Sampler):
    """Row numbers for `DataLoader(dataset, sampler=...)`, dealt to the ranks by `ShardedInput`.

    Every row occurs once per epoch, on one rank. No row is repeated to even out the ranks; their
    numbers of rows differ by at most one. `strategies.input.in_step` keeps such ranks in step, and
    `step(examples=len(batch))` averages over all rows.

    The constructor is *collective*: the ranks compare their arguments. Iterating, `len` and
    `set_epoch` send no messages, so ranks may iterate different numbers of times.

    Args:
        data: dataset, or its number of rows; the same on all ranks.
        comm: the ranks; None for the whole job.
        shuffle: whether to reshuffle the rows in each epoch.
        seed: seed of the order; the same on all ranks.
        state: position to resume from, returned by `state`, with any number of ranks.

    Attributes:
        epoch: epoch of the next pass. A complete pass adds 1.

    Raises:
        ValueError: no rows, or the state is from another dataset or order; on all ranks.
        MismatchError: the number of rows, `shuffle`, `seed` or `state` differs; on all ranks.

    Example:
        >>> sampler = ShardedSampler(5, shuffle=False)
        >>> [list(sampler) for _ in range(2)]
        [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        comm: cc.Communicator | None = None,
        shuffle: bool = True,
        seed: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._comm = cc.init() if comm is None else comm
        self._shuffle, self._seed = shuffle, seed
        self._state = state
        self.epoch = 0 if state is None else int(state["epoch"])
        self._given = 0

        def begin() -> tuple[dict[str, Any], list[str]]:
            rows = data if isinstance(data, int) else len(data)
            self._rows = integer("ShardedSampler", "number of rows", rows)
            facts = [f"{rows} rows", f"shuffle {shuffle}", f"seed {seed}", state_fact(state)]
            return self._begin().position(), facts

        # Where the pass began. A complete pass has dropped the stages that `state` needs.
        self._start = agreement.compare(self._comm, "ShardedSampler", begin)

    def __iter__(self) -> Iterator[int]:
        # A new pass, even if the last one was left in the middle.
        numbers = self._begin()
        self._start, self._given = numbers.position(), 0
        for row in numbers:
            # Counted before the yield: a consumer that stops here has received the row.
            self._given += 1
            yield row
        # Only after a complete pass, so that a restart repeats an interrupted epoch.
        self.epoch += 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start a new pass in a copy, such as that of a worker of a `DataLoader`."""
        self.__dict__ |= state
        self._start, self._given = self._begin().position(), 0

    def __len__(self) -> int:
        """Return the number of this rank's rows in the next pass."""
        # Counted in a pass over numbers, which is also exact for a resumed epoch.
        return sum(1 for _ in self._begin())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = integer("ShardedSampler", "epoch", epoch, least=0)

    def state(self, used: int | None = None) -> dict[str, Any]:
        """Return the position of all ranks in this pass; *collective*.

        Args:
            used: number of rows of the pass that this rank has used, if a `DataLoader` reads ahead;
                None counts all rows that were returned.

        Returns:
            A dict that JSON and msgpack can represent; the same on all ranks.
        """
        count = self._given if used is None else used
        # Each row is a file, so no file is ever begun and not finished.
        own = {**self._start, "used": self._start["used"] + count}
        return merge_positions(self._comm.allgather_object(own))

    def _begin(self) -> ShardedInput[int]:
        """Start an epoch, possibly in its middle: every row is a file with one record."""
        about = {"files": self._rows, "seed": self._seed, "shuffle": self._shuffle}
        state: Mapping[str, Any] = {"about": about, "epoch": self.epoch, "epochs": {}}
        if self._state is not None:
            # Only this epoch's part of the state: other epochs start from the beginning.
            known = self._state["epochs"].get(str(self.epoch))
            epochs = {} if known is None else {str(self.epoch): known}
            state = {**self._state, "epoch": self.epoch, "epochs": epochs}
        return ShardedInput(
            range(self._rows),
            lambda row: (row,),
            rank=self._comm.rank,
            size=self._comm.size,
            policy="file",
            shuffle=self._shuffle,
            seed=self._seed,
            # One pass only; the next one starts with the then current epoch.
            num_epochs=self.epoch + 1,
            state=state,
            comm=None,
        )
