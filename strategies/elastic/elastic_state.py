"""Elastic state: committed in memory on every rank, restored after a failure."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import collectives as cc
from collectives import extend
from strategies import errors
from strategies.checkpoint import serialization
from strategies.checkpoint import state_protocols as kinds
from strategies.checkpoint.boxes import Slice
from strategies.checkpoint.distributed_tensors import PartialReads
from strategies.checkpoint.restoring import restore_into
from strategies.core import array_ops
from strategies.core.agreement import compare, raise_everywhere
from strategies.elastic import event_log
from strategies.elastic.commit_buffers import NOTHING, Commit, DoubleBuffer

__all__ = ["State"]

# Of an input: its position is that of all ranks, and is dealt out again when there are fewer.
_INPUT = kinds.KINDS["input"]
# Of slices, and of distributed tensors as FSDP makes them.
_LOST = (
    "what only one rank has a part of would be lost with that rank, expected whole arrays here, "
    "and Saver for this"
)
# Of pipelines, whose threads have read on: they do not go back.
_PIPELINE = (
    "an open pipeline does not go back, expected what it says of itself, as "
    "commit(input=batches.state(comm)), and a new one in `train`, over a ShardedInput of the ranks "
    "that live, which goes on by batches.resume(state['input'], comm)"
)


class State:
    """Things to go on from: modules, optimizers, arrays, generators, inputs, plain values.

    They are what `Saver` takes, with two rules more: an input stands for itself, not in a
    container; and instead of a pipeline stands what it says of itself (`Batches.state`), since a
    pipeline that is open does not go back, and is made anew by the ranks that go on.
    `commit` copies them in the memory of every rank, and `restore` gives them back, after the death
    of other ranks, too. Of generators each rank keeps its own; all else is equal on all ranks,
    and whole on each: of a `Slice` or a distributed tensor (FSDP) a part would die with its rank.
    What cannot be changed in place (numbers, text, arrays of JAX) is handed over at each `commit`,
    and read as `state[name]`.

    `commit`, `restore` and `resume` are *collective*.

    Args:
        comm: the ranks; all of the job if None.
        things: by name.

    Attributes:
        comm: the ranks that go on; another communicator after a death.
        number: of the last commit; -1 before the first.
        for_others: whether all ranks keep the generators of all, for those that may take the place
            of a dead one: `run_elastic` says so where there are spare ranks.
        copies: what each rank has of the commits.
        in_files: the step of which a session has written a checkpoint last, by the directory, as
            far as this rank knows.

    Raises:
        ValueError: nothing to keep, a thing is called "verify", is a pipeline, or this rank has
            only a part of it.

    Example:
        >>> import numpy as np
        >>> weights, rng = np.zeros(2), np.random.default_rng(1)
        >>> state = State(weights=weights, rng=rng, step=0)
        >>> state.commit(step=1)
        >>> numbers, weights[:] = rng.random(3), 7
        >>> state.restore()
        >>> state["step"], weights.tolist(), bool((rng.random(3) == numbers).all())
        (1, [0.0, 0.0], True)
    """

    def __init__(self, comm: cc.Communicator | None = None, /, **things: Any) -> None:
        if not things or "verify" in things:
            raise ValueError(
                "State: expected things by name, as model=model, and none called verify, which is "
                f"an argument of commit, got {', '.join(things) or 'nothing'}"
            )
        if parts := PartialReads(things).names:
            raise ValueError(f"State: {_LOST}, got a part (name: {parts[0]})")
        if name := next(_pipelines(things), None):
            raise ValueError(f"State: {_PIPELINE}, got a pipeline (name: {name})")
        self.comm = cc.init() if comm is None else comm
        self._things = things
        self.for_others = False
        self.copies = DoubleBuffer()
        self.in_files: dict[str, int] = {}

    @property
    def number(self) -> int:
        """Number of the last commit; -1 before the first."""
        return self.copies.kept.number

    def __getitem__(self, name: str) -> Any:
        """Return a thing: the one that was given last, or restored since."""
        return self._things[name]

    def __contains__(self, name: str) -> bool:
        """Tell whether there is a thing of this name."""
        return name in self._things

    def __iter__(self) -> Iterator[str]:
        """Give the names of all things."""
        return iter(self._things)

    def arrays(self) -> Iterator[Any]:
        """Give the arrays of all things as they are, but of inputs."""
        yield from serialization.serialize(self._others(), None)[0].values()

    def commit(self, *, verify: bool = False, **new: Any) -> None:
        """Copy all things as they are now: from here the job goes on after a failure.

        Memory is taken for two copies, since ranks may die while others have made theirs.

        Args:
            verify: whether to compare the arrays over the ranks before, which takes as long as a
                second copy.
            new: by their names, those things that are no longer the same objects.

        Raises:
            InvalidArgumentError: a thing has no such name, or cannot be copied; on all ranks.
            MismatchError: ranks differ in an array that is equal on all; on all ranks, which have
                the last commit still.
        """
        if verify:
            compare(self.comm, "commit", lambda: (None, self._sums()))
        copies, number = self.copies, self.number + 1
        error, copied = None, NOTHING
        try:
            copied = self._copy_state(number, new)
        except Exception as caught:
            error = caught
        if self.comm.allreduce(int(error is not None), op=cc.MAX):
            raise_everywhere(error, self.comm, "commit")
        self._things |= new
        inputs = {name: thing.state(self.comm) for name, thing in self._inputs()}
        if self.for_others:
            copied = self._with_those_of_others(copied)
        copies.next = copied._replace(inputs=inputs)
        self.comm.barrier()
        copies.swap()
        event_log.write("commit", commit=number)

    def restore(self) -> None:
        """Give all things back as they were at the last commit.

        Raises:
            FailedPreconditionError: there is none.
        """
        if self.number < 0:
            raise errors.FailedPreconditionError("restore: expected a commit before, got none")
        self._put_back(self.copies.kept)

    def resume(self, comm: cc.Communicator, places: Mapping[int, int] | None = None) -> None:
        """Give all things back as they were at the last commit that any rank is sure of.

        Inputs are dealt out anew: rows that were used before that commit do not come again, all
        others do. Where there are as many ranks as then, each goes on with the rows that it had.

        Args:
            comm: those that live, of the ranks so far.
            places: ranks of `comm` that have no commit yet, and in the place of which rank, by its
                number at that commit; they are given what the others have.

        Raises:
            FailedPreconditionError: there was no commit; on all ranks.
        """
        self.comm = comm  # at once: a rank that fails from here on has to let these out of it
        # Who is sure of a commit knows that all ranks had made their copies.
        newest = int(comm.allreduce(self.number, op=cc.MAX))
        if newest < 0:
            raise extend.collective_error(
                comm, errors.FailedPreconditionError("resume: expected a commit before, got none")
            )
        self.copies.rollback(newest)
        if places:
            self.copies.send_to(comm, places)
        self._put_back(self.copies.kept)

    def share_inputs(self) -> None:
        """Redistribute the inputs to `comm` after ranks died before the first commit.

        *Collective*. If another rank dies meanwhile, the inputs stay unchanged on all ranks.

        Raises:
            PeerFailure: a rank has died.
        """
        states = [
            (thing, thing.state_of_survivors(self.comm))
            for _, thing in self._inputs()
            if hasattr(thing, "state_of_survivors")
        ]
        if not self.comm.agree(True):
            raise cc.PeerFailure("run_elastic: a rank died while inputs were redistributed")
        for thing, state in states:
            thing.load_state(state, comm=self.comm)

    def _inputs(self) -> list[tuple[str, Any]]:
        found = self._things.items()
        return [(name, thing) for name, thing in found if kinds.protocol_of(thing) is _INPUT]

    def _others(self, things: Mapping[str, Any] | None = None) -> dict[str, Any]:
        inputs = dict(self._inputs())
        every = (things or self._things).items()
        return {name: thing for name, thing in every if name not in inputs}

    def _copy_state(self, number: int, new: Mapping[str, Any]) -> Commit:
        """Copy what this rank has, into the memory of the copy before the last one."""
        unknown = new.keys() - self._things.keys()
        if unknown:
            raise errors.InvalidArgumentError(
                f"commit: unknown {', '.join(sorted(unknown))}, expected names that State was "
                f"given, {', '.join(self._things)}"
            )
        if name := next(_pipelines(new), None):
            raise errors.InvalidArgumentError(f"commit: {_PIPELINE}, got a pipeline (name: {name})")
        found, nodes = serialization.serialize(self._others(self._things | dict(new)), None)
        for name, array in found.items():
            if isinstance(array, Slice):
                raise errors.InvalidArgumentError(f"commit: {_LOST}, got a part (name: {name})")
        before = self.copies.next.tensors
        self.copies.next = NOTHING
        tensors = {name: _copy(array, before.get(name)) for name, array in found.items()}
        return Commit(number, nodes, tensors, {}, self.comm.rank, self.comm.size)

    def _with_those_of_others(self, copy: Commit) -> Commit:
        """Add to a copy what each of the other ranks has of its own; *collective*."""
        own = {name: thing for name, thing in self._others().items() if _is_of_rank(thing)}
        found, nodes = serialization.serialize(own, self.comm)
        known, theirs = copy.tensors, tuple(f"{name}/" for name in own)
        tensors = {n: array for n, array in known.items() if not f"{n}/".startswith(theirs)}
        tensors |= {
            name: known[name] if name in known else _copy(array, None)
            for name, array in found.items()
        }
        return copy._replace(nodes=copy.nodes | nodes, tensors=tensors)

    def _put_back(self, copy: Commit) -> None:
        others = self._others()
        # Things may keep what they are given.
        tensors = {name: array.copy() for name, array in copy.tensors.items()}
        new, puts = restore_into(
            copy.nodes, tensors, others, None, PartialReads({}), place=copy.place
        )
        for put in puts:
            put()
        self._things |= new
        for name, thing in self._inputs():
            if "comm" in inspect.signature(thing.load_state).parameters:  # it may be dealt anew
                thing.load_state(copy.inputs[name], comm=self.comm)
            else:
                thing.load_state(copy.inputs[name])

    def _sums(self) -> list[str]:
        """Say what each array holds that is equal on all ranks."""
        equal = {
            name: thing
            for name, thing in self._others().items()
            if not getattr(kinds.protocol_of(thing), "of_rank", False)
        }
        found, _ = serialization.serialize(equal, None)
        return [f"{name}: checksum {_checksum(array):08x}" for name, array in found.items()]


def _pipelines(things: Any, name: str = "") -> Iterator[str]:
    """Give the names of the pipelines among things, and in their containers."""
    if kinds.protocol_of(things) is kinds.KINDS["pipeline"]:
        yield name
    elif isinstance(things, Mapping):
        for key, thing in things.items():
            yield from _pipelines(thing, f"{name}/{key}" if name else str(key))
    elif (parts := kinds.parts_of(things)) is not None:
        label = kinds.labels(things)
        for index, part in enumerate(parts):
            yield from _pipelines(part, f"{name}/{label(index)}")


def _is_of_rank(thing: Any) -> bool:
    """Whether each rank has its own of this, or of something in it."""
    kind = kinds.protocol_of(thing)
    if kind is not None:
        return kind.of_rank
    if kinds.key_kind(thing) is not None:
        return True
    inside = thing.values() if isinstance(thing, Mapping) else kinds.parts_of(thing)
    return any(map(_is_of_rank, inside or ()))


def _copy(array: Any, into: Any) -> Any:
    """Copy an array of any library to the host, where there is memory of its form into that."""
    source = array_ops.host(array)
    source = np.asarray(kinds.to_host(array)) if source is None else source
    if into is None or into.shape != source.shape or into.dtype != source.dtype:
        into = np.empty(source.shape, source.dtype)
    np.copyto(into, source)
    return into


def _checksum(array: Any) -> int:
    total = 0
    for part in array_ops.byte_views(array):
        total = zlib.crc32(part.data, total)
    return total
