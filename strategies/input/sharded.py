"""`ShardedInput`: every record exactly once per epoch, over any number of ranks.

The seed decides the order of an epoch's records, which is the same on all ranks. The records are
dealt out like cards::

    order          a  b  c  d  e  f  g  h        2 ranks: rank 0 has  a c e g,  rank 1  b d f h
    used so far    a  b  c                       rank 0 has used two, rank 1 one
    remaining               d  e  f  g  h        3 ranks continue:  d g  |  e h  |  f

A *position* records a *stage*: the number of ranks, and how many cards each has used. The remaining
cards can be dealt to other ranks, so an epoch has one stage per interruption. The same number of
ranks continues with its own cards, as if there had been no interruption.

Under the policy "data" the cards are records, and every rank reads all files. Under "file" they are
whole files; the position also counts the records used of each file that was interrupted.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import numpy as np

import collectives as cc
from strategies.core import agreement
from strategies.core.validation import choice, integer
from strategies.errors import InvalidArgumentError

__all__ = ["Policy", "ShardedInput", "merge_positions", "state_fact"]

Policy = Literal["auto", "file", "data", "off"]
Stage = Sequence[Any]  # (number of ranks, cards used per rank or None for all)

R = TypeVar("R")


class ShardedInput(Generic[R]):
    """This rank's records, epoch after epoch.

    The constructor is *collective* over the ranks of `comm`, which compare their arguments. Each
    record is returned once only if the arguments are equal. Iterating sends no messages.

    Args:
        files: names, or other arguments of `read`; the same on all ranks.
        read: returns the records of a file, the same ones each time.
        rank: this rank.
        size: number of ranks that share the records.
        policy: "file": whole files to each rank; the numbers of files differ by at most one, and
            each file is read once. "data": single records to each rank; their numbers differ by at
            most one, and every rank reads all files. "auto": "file" if no rank would be without a
            file, otherwise "data". "off": all records to every rank.
        shuffle: whether to reshuffle the files in each epoch.
        seed: seed of the shuffling, the same on all ranks.
        num_epochs: number of epochs; None repeats forever.
        state: position to resume from, returned by `state`, with any number of ranks.
        comm: the ranks that compare their arguments. None compares nothing, for an input that only
            some ranks make. "auto" is the whole job if it has `size` ranks and the main thread
            makes the input. For any other `size`, in other threads and in child processes (workers
            of a `DataLoader`), "auto" is None. After a shrink the job is the surviving ranks. If a
            rank dies during the comparison, "auto" leaves the report to the next collective call.

    Raises:
        ValueError: no files, an invalid rank or policy, `num_epochs` below 1, or a state of other
            files or another seed; on all ranks of `comm`.
        MismatchError: the number, names or order of the files, `policy`, `shuffle`, `seed`,
            `num_epochs` or `state` differ among the ranks of `comm`; on all of them.

    Example:
        >>> files = {"a": [1, 2], "b": [3]}
        >>> list(ShardedInput(["a", "b"], files.get, rank=0, size=2, policy="data", shuffle=False))
        [1, 3]
    """

    def __init__(
        self,
        files: Sequence[Any],
        read: Callable[[Any], Iterable[R]],
        *,
        rank: int,
        size: int,
        policy: Policy = "auto",
        shuffle: bool = True,
        seed: int = 0,
        num_epochs: int | None = 1,
        state: Mapping[str, Any] | None = None,
        comm: cc.Communicator | Literal["auto"] | None = "auto",
    ) -> None:
        self._files = files
        self._read = read
        self._rank = rank
        self._size = size
        # Epochs that were begun with another number of ranks keep their policy in `_earlier`.
        enough: Policy = "file" if len(files) >= size else "data"
        self._usual: Policy = enough if policy == "auto" else policy
        self._shuffle = shuffle
        self._seed = seed
        self._num_epochs = num_epochs
        # Facts that must be equal for a state to be valid.
        self._about = {"files": len(files), "seed": seed, "shuffle": shuffle}
        self._earlier: dict[int, Any] = {}  # epoch -> policy, stages and files that were begun
        self._epoch = 0
        self._used = 0  # cards of this stage of this epoch
        self._begun: list[int] | None = None  # number of the file being read, records done
        # Also the state of this rank after its death, see `state_of_survivors`.
        self._initial_state = state

        def check() -> None:
            if not len(files) or not 0 <= rank < size:
                raise ValueError(
                    f"ShardedInput: expected at least one file and 0 <= rank < size, "
                    f"got {len(files)} files, rank {rank} of {size}"
                )
            choice("ShardedInput", "policy", policy, Policy)
            if num_epochs is not None:
                integer("ShardedInput", "num_epochs", num_epochs)
            if state is not None:
                self._go_on(state)

        def prepare() -> tuple[None, list[str]]:
            check()
            return None, [*self.facts(), state_fact(state)]

        # "auto" compares only where all ranks make the input at the same time.
        group = _job_of(size) if comm == "auto" else comm
        if group is None:
            check()
        else:
            try:
                agreement.compare(group, "ShardedInput", prepare)
            except cc.CollectiveError as failure:
                if comm != "auto" or isinstance(failure, (cc.MismatchError, cc.CollectiveTimeout)):
                    raise
                # The next collective call reports a dead rank, where `run_elastic` may recover.
                check()
        self._records = self._all_epochs()

    def __iter__(self) -> Iterator[R]:
        return self

    def __next__(self) -> R:
        return next(self._records)

    def facts(self) -> list[str]:
        """Return the arguments that must be equal on all ranks, as text."""
        # Names by checksum: the lists may be long.
        return [
            f"{len(self._files)} files",
            *_names_fact(self._files),
            f"policy {self._usual}",
            f"shuffle {self._shuffle}",
            f"seed {self._seed}",
            f"num_epochs {self._num_epochs}",
        ]

    def position(self) -> dict[str, Any]:
        """Return the position of this rank, for `state`; the result shares no mutable state."""
        return {
            "about": self._about,
            "rank": self._rank,
            "size": self._size,
            "epoch": self._epoch,
            "used": self._used,
            # A copy, since the list changes with the next record.
            "begun": self._begun and list(self._begun),
            "policy": self._usual,
            "earlier": dict(self._earlier),  # a copy, because iterating drops finished epochs
        }

    def state(
        self, comm: cc.Communicator | None, position: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the position of all ranks; *collective*.

        Args:
            comm: the ranks that share the input, in the same order; None for one rank.
            position: this rank's position if it reads records ahead; None uses `position()`.

        Returns:
            A dict that JSON and msgpack can represent; the same on all ranks.

        Raises:
            MismatchError: the number of files, `shuffle` or `seed` differs; on all ranks.
        """
        own = self.position() if position is None else position
        # Ranks exchange positions and not records.
        return merge_positions([own] if comm is None else comm.allgather_object(own))

    def state_of_survivors(self, comm: cc.Communicator) -> dict[str, Any]:
        """Return the state of all ranks after some have died; *collective*.

        A dead rank counts with the state it started with or loaded last. The records that it has
        used since then are returned again.

        Args:
            comm: the surviving ranks.

        Returns:
            As `state`; the same on all ranks.
        """
        # Dead ranks are absent; their last known state takes their place.
        positions = {p["rank"]: p for p in comm.allgather_object(self.position())}
        for rank in range(self._size):
            if rank not in positions:
                of_dead_rank = ShardedInput(
                    self._files, self._read, rank=rank, size=self._size, policy=self._usual,
                    shuffle=self._shuffle, seed=self._seed, state=self._initial_state, comm=None,
                )  # fmt: skip
                positions[rank] = of_dead_rank.position()
        return merge_positions([positions[rank] for rank in range(self._size)])

    def load_state(self, state: Mapping[str, Any], *, comm: cc.Communicator | None = None) -> None:
        """Continue at a state, as if this input had been made with it.

        Args:
            state: result of `state`, with any number of ranks.
            comm: the ranks that share the remaining records; None keeps the current ones.

        Raises:
            ValueError: the state belongs to other files or another seed.
        """
        if comm is not None:
            self._rank, self._size = comm.rank, comm.size
        self._initial_state = state
        self._go_on(state)
        # A new generator: the old one has dealt its cards for the old ranks.
        self._records = self._all_epochs()

    def _all_epochs(self) -> Iterator[R]:
        while self._num_epochs is None or self._epoch < self._num_epochs:
            yield from self._one_epoch(self._epoch)
            # Finished, so its stages are no longer needed.
            self._earlier.pop(self._epoch, None)
            self._epoch += 1
            self._used = 0

    def _one_epoch(self, epoch: int) -> Iterator[R]:
        earlier = self._earlier.get(epoch, {"policy": self._usual, "stages": [], "begun": {}})
        order = list(range(len(self._files)))
        if self._shuffle:
            # Seed and epoch as two words: epochs of one seed have independent orders.
            order = np.random.default_rng([self._seed, epoch]).permutation(order).tolist()
        if earlier["policy"] == "file":
            # Whole cards that this rank has used in this stage are skipped.
            numbers = itertools.islice(self._dealt(order, earlier), self._used, None)
            yield from self._whole_files(numbers, earlier["begun"])
            return
        # Lazily, so that only files up to the current record are opened.
        records = (record for number in order for record in self._read(self._files[number]))
        for record in itertools.islice(self._dealt(records, earlier), self._used, None):
            self._used += 1
            yield record

    def _whole_files(self, numbers: Iterable[int], begun: Mapping[str, int]) -> Iterator[R]:
        for number in numbers:
            # Keys are text, because states pass through JSON.
            done = begun.get(str(number), 0)
            for index, record in enumerate(self._read(self._files[number])):
                # Records before the interruption were used, on whichever rank.
                if index >= done:
                    # Set before the yield: a consumer that stops here has received the record.
                    self._begun = [number, index + 1]
                    yield record
            self._begun = None
            self._used += 1

    def _dealt(self, cards: Iterable[Any], earlier: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the remaining cards of this rank."""
        # "off" deals all cards to everyone: one owner with every card.
        rank, size = (0, 1) if earlier["policy"] == "off" else (self._rank, self._size)
        stages = list(earlier["stages"])
        seen = [0] * (len(stages) + 1)
        for card in cards:
            # Stages in order: a card that an earlier stage has used is not dealt again.
            for index, (ranks, used) in enumerate(stages):
                turn, owner = divmod(seen[index], ranks)
                seen[index] += 1
                # None: a rank had finished the epoch, so all of its cards are used.
                if used[owner] is None or turn < used[owner]:
                    break
            else:
                mine = seen[-1] % size == rank
                seen[-1] += 1
                if mine:
                    yield card

    def _go_on(self, state: Mapping[str, Any]) -> None:
        if state["about"] != self._about:
            raise ValueError(
                f"ShardedInput: the state belongs to other input, expected {self._about}, "
                f"got {state['about']}"
            )
        self._earlier = {int(epoch): found for epoch, found in state["epochs"].items()}
        # This stage's count starts at 0; earlier ones are in `stages`.
        self._epoch, self._used, self._begun = state["epoch"], 0, None
        for epoch, found in sorted(self._earlier.items()):
            *stages, (ranks, used) = found["stages"]
            # With other ranks the stage stays, and its rest is dealt to them.
            if found["policy"] == "off" or ranks != self._size:
                return
            # The same ranks continue their own cards, so the last stage is reopened.
            self._earlier[epoch] = {**found, "stages": stages}
            if epoch == self._epoch and used[self._rank] is None:  # this rank had finished it
                del self._earlier[epoch]
                self._epoch += 1
            elif epoch == self._epoch:
                self._used = used[self._rank]


def merge_positions(positions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the results of `ShardedInput.position` of all ranks, in rank order.

    Ranks may be in different epochs; slower ranks have used nothing of later epochs.

    Raises:
        InvalidArgumentError: there is not one position per rank.
        MismatchError: the positions belong to inputs with other files, `shuffle` or `seed`.
    """
    ranks = [position["rank"] for position in positions]
    if ranks != list(range(len(positions))) or {p["size"] for p in positions} != {len(positions)}:
        raise InvalidArgumentError(
            f"merge_positions: expected one position per rank, got ranks {ranks} of "
            f"{sorted({position['size'] for position in positions})}"
        )
    for rank, position in enumerate(positions):
        # A state of mixed inputs would skip or repeat records.
        if position["about"] != positions[0]["about"]:
            raise cc.MismatchError(
                f"merge_positions: ranks differ, {positions[0]['about']} on rank 0, "
                f"{position['about']} on rank {rank} of {len(positions)}"
            )
    # The slowest rank decides where the state begins.
    first = min(position["epoch"] for position in positions)
    # Through the last epoch that any rank is in, or was in before an interruption.
    last = max(max([p["epoch"], *p["earlier"]]) for p in positions)
    epochs = {}
    for epoch in range(first, last + 1):
        # A rank beyond this epoch has dropped its stages, so use a slower rank's.
        behind = next(p for p in positions if p["epoch"] <= epoch)
        untouched = {"policy": behind["policy"], "stages": [], "begun": {}}
        earlier = behind["earlier"].get(epoch, untouched)
        used = [_split(position, epoch) for position in positions]
        if earlier["policy"] == "off":
            # All ranks use the same cards; they continue with the slowest rank.
            used = [min((u for u in used if u is not None), default=None)]
        # Files begun on any rank, by number: the rank that gets one continues in it.
        begun = dict(earlier["begun"])
        reading = [p["begun"] for p in positions if p["epoch"] == epoch and p["begun"] is not None]
        begun |= {str(number): done for number, done in reading}
        epochs[str(epoch)] = {
            "policy": earlier["policy"],
            "stages": [*earlier["stages"], [len(used), used]],
            "begun": begun,
        }
    return {"about": dict(positions[0]["about"]), "epoch": first, "epochs": epochs}


def _split(position: Mapping[str, Any], epoch: int) -> int | None:
    if position["epoch"] > epoch:
        # A rank in a later epoch has used all of its cards here.
        return None
    used: int = position["used"]
    return used if position["epoch"] == epoch else 0


def state_fact(state: Mapping[str, Any] | None) -> str:
    """Describe a state in one line, with a checksum that distinguishes states."""
    if state is None:
        return "no state"
    # `default=str` for values that JSON lacks; only equality matters.
    text = json.dumps(state, sort_keys=True, default=str)
    return f"state of epoch {state['epoch']} with checksum {zlib.crc32(text.encode()):08x}"


def _names_fact(files: Sequence[Any]) -> list[str]:
    """Describe files by first name, last name and checksum; return [] if they have no names."""
    if not isinstance(files, (list, tuple)) or not all(
        isinstance(file, (str, bytes, os.PathLike, int)) for file in files
    ):
        return []
    # `surrogatepass` for names of files that are not valid UTF-8.
    checksum = zlib.crc32("\n".join(map(str, files)).encode(errors="surrogatepass"))
    return [f"files {files[0]} to {files[-1]} with checksum {checksum:08x}"]


def _job_of(size: int) -> cc.Communicator | None:
    """Return the job's communicator if all its `size` ranks make this input; otherwise None."""
    is_child = multiprocessing.parent_process() is not None  # such as a worker of a DataLoader
    is_main = threading.current_thread() is threading.main_thread()
    # In a worker of a loader, a collective call would wait for ranks that do not make one.
    if is_child or not is_main or not cc.is_initialized() or cc.size() != size or size == 1:
        return None
    return cc.init()
