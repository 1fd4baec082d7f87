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
    """Numbers of rows for `DataLoader(dataset, sampler=...)`, dealt to the ranks by `ShardedInput`.

    Every row comes once per epoch, on one rank: none is repeated so that ranks have equally many;
    their numbers differ by one at most. `strategies.input.in_step` then keeps ranks in step, and
    `step(examples=len(batch))` makes the mean one over all rows.

    The constructor is *collective*: the ranks compare their arguments. Iterating, `len` and
    `set_epoch` exchange nothing, so ranks may iterate different numbers of times.

    Args:
        data: the dataset, or how many rows there are; the same on all ranks.
        comm: the ranks; the whole job if None.
        shuffle: whether rows come in another order in each epoch.
        seed: of the order; the same on all ranks.
        state: where to go on, from `state`; possibly of another number of ranks.

    Attributes:
        epoch: which one the next pass is. A pass that comes to its end adds 1.

    Raises:
        ValueError: there are no rows, or the state is that of another dataset or order; on all
            ranks.
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

        def begin() -> tuple[ShardedInput[int], list[str]]:
            rows = data if isinstance(data, int) else len(data)
            self._rows = integer("ShardedSampler", "number of rows", rows)
            facts = [f"{rows} rows", f"shuffle {shuffle}", f"seed {seed}", state_fact(state)]
            return self._begin(), facts

        self._pass = agreement.compare(self._comm, "ShardedSampler", begin)

    def __iter__(self) -> Iterator[int]:
        self._pass, self._given = self._begin(), 0
        for row in self._pass:
            self._given += 1
            yield row
        self.epoch += 1

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a copy or a pickle, which starts a new pass."""
        return {**self.__dict__, "_pass": None, "_given": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._pass = self._begin()

    def __len__(self) -> int:
        """Return how many rows this rank has in the next pass."""
        return sum(1 for _ in self._begin())

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass is."""
        self.epoch = integer("ShardedSampler", "epoch", epoch, least=0)

    def state(self, used: int | None = None) -> dict[str, Any]:
        """Return where all ranks are in this pass; *collective*.

        Args:
            used: how many rows of the pass this rank has used, where a `DataLoader` has read ahead
                of that; None: all that were given out.

        Returns:
            What JSON and msgpack can carry; the same on all ranks.
        """
        count = self._given if used is None else used
        position = {**self._pass.position(), "epoch": self._epoch_of_pass}
        own = {**position, "used": count, "begun": None}
        return merge_positions(self._comm.allgather_object(own))

    def _begin(self) -> ShardedInput[int]:
        """Begin an epoch, perhaps in its middle: every row is a file with one record."""
        self._epoch_of_pass = self.epoch
        about = {"files": self._rows, "seed": self._seed, "shuffle": self._shuffle}
        state: Mapping[str, Any] = {"about": about, "epoch": self.epoch, "epochs": {}}
        if self._state is not None:
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
            num_epochs=self.epoch + 1,
            state=state,
            comm=None,
        )
