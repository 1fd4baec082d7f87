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
from strategies.checkpoint.per_rank import PerRank
from strategies.checkpoint.restoring import restore_into
from strategies.core import array_ops, pytree
from strategies.core.agreement import compare, raise_everywhere
from strategies.elastic import event_log
from strategies.elastic.commit_buffers import NOTHING, Commit, DoubleBuffer

__all__ = ["State"]

# An input's position covers all ranks; it is redistributed when there are fewer.
_INPUT = kinds.KINDS["input"]
# For slices, and distributed tensors of FSDP.
_LOST = (
    "what only one rank has a part of would be lost with that rank, expected whole arrays here, "
    "and Saver for this"
)
# For pipelines, whose threads have read ahead.
_PIPELINE = (
    "an open pipeline cannot return to an earlier batch, expected its position, as "
    "commit(input=batches.state(comm)), and a new pipeline in `train`, over a ShardedInput of the "
    "surviving ranks, with batches.resume(state['input'], comm)"
)


class State:
    """Objects to resume from: modules, optimizers, arrays, generators, inputs, plain values.

    `commit` copies them in the memory of every rank. `restore` restores the copies, also after the
    death of other ranks. Generators differ per rank. All other objects are equal on all ranks and
    whole on each: a part, such as a `Slice` or an FSDP tensor, would die with its rank. Pass values
    that cannot change in place (numbers, text, arrays of JAX) to each `commit`, and read them as
    `state[name]`.

    Objects are the same as for `Saver`, with two exceptions. An input must be a separate object,
    not part of a container. Replace a pipeline by its position (`Batches.state`), because an open
    pipeline cannot return; the surviving ranks make a new one.

    `commit`, `restore` and `resume` are *collective*.

    Args:
        comm: the ranks; None for all ranks of the job.
        things: the objects, by name.

    Attributes:
        comm: the ranks that train; another communicator after a death.
        number: number of the last commit; -1 before the first.
        for_others: whether all ranks keep the generators of all ranks, so that a spare rank can
            take over those of a dead one. `run_elastic` sets it if there are spare ranks.
        copies: this rank's copies of commits.
        in_files: directory -> step of the last checkpoint that a session has written there, as far
            as this rank knows.

    Raises:
        ValueError: there is nothing to keep, or an object is called "verify", is a pipeline, or is
            only a part.

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
        self.comm = extend.comm_or_world(comm, "State")
        self._things = things
        self.for_others = False
        self.copies = DoubleBuffer()
        self.in_files: dict[str, int] = {}

    @property
    def number(self) -> int:
        """Number of the last commit; -1 before the first."""
        return self.copies.kept.number

    def __getitem__(self, name: str) -> Any:
        """Return an object, as last passed to `commit` or restored."""
        return self._things[name]

    def __contains__(self, name: str) -> bool:
        """Return whether there is an object of this name."""
        return name in self._things

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of all objects."""
        return iter(self._things)

    def arrays(self) -> Iterator[Any]:
        """Yield the arrays of all objects except inputs, without copies."""
        yield from serialization.serialize(self._others(), None)[0].values()

    def commit(self, *, verify: bool = False, **new: Any) -> None:
        """Copy all objects; after a failure the job resumes from here.

        Memory is allocated for two copies, because ranks may die when only some have made theirs.

        Args:
            verify: whether to compare the arrays of the ranks first, which takes as long as a
                second copy.
            new: name -> new object, for names whose object was replaced.

        Raises:
            InvalidArgumentError: a name is unknown, or an object cannot be copied; on all ranks.
            MismatchError: ranks differ in an array that must be equal; on all ranks, which keep the
                last commit.
        """
        if verify:
            compare(self.comm, "commit", lambda: (None, self._sums()))
        copies, number = self.copies, self.number + 1
        # A rank that raised here alone would leave the other ranks waiting below.
        error, copied = None, NOTHING
        try:
            copied = self._copy_state(number, new)
        except Exception as caught:
            error = caught
        if self.comm.allreduce(int(error is not None), op=cc.MAX):
            raise_everywhere(error, self.comm, "commit")
        # Only now, when all ranks have copied: a failed commit changes nothing.
        self._things |= new
        # Collective, so only after all ranks have copied without an error.
        inputs = {name: thing.state(self.comm) for name, thing in self._inputs()}
        if self.for_others:
            copied = self._with_those_of_others(copied)
        # Stored before the barrier: if a rank dies there, ranks that have not passed it can still
        # return to this commit, which ranks that have passed report as complete.
        copies.next = copied._replace(inputs=inputs)
        # After the barrier every rank knows that all ranks have copied. Only then may the previous
        # commit be overwritten.
        self.comm.barrier()
        copies.swap()
        event_log.write("commit", commit=number)

    def restore(self) -> None:
        """Restore all objects from the last commit.

        Raises:
            FailedPreconditionError: there was no commit.
        """
        if self.number < 0:
            raise errors.FailedPreconditionError("restore: expected a commit before, got none")
        self._put_back(self.copies.kept)

    def resume(self, comm: cc.Communicator, places: Mapping[int, int] | None = None) -> None:
        """Restore all objects from the last commit that is complete on any rank.

        Inputs are redistributed: rows used before that commit are not returned again, all others
        are. With the same number of ranks, each keeps its rows.

        Args:
            comm: the surviving ranks.
            places: rank of `comm` without a commit -> the place that it takes over; these ranks
                receive the commit.

        Raises:
            FailedPreconditionError: there was no commit; on all ranks.
        """
        self.comm = comm  # set first: if this rank fails below, it must revoke this communicator
        # A rank with a complete commit knows that all ranks had copied it.
        newest = int(comm.allreduce(self.number, op=cc.MAX))
        if newest < 0:
            raise extend.collective_error(
                comm, errors.FailedPreconditionError("resume: expected a commit before, got none")
            )
        # Ranks that passed the barrier have swapped already; any other rank swaps here.
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
        # Load on all ranks or on none, or they would share the rows differently.
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
        """Copy the objects of this rank, into the memory of the copy before the last one."""
        unknown = new.keys() - self._things.keys()
        if unknown:
            raise errors.InvalidArgumentError(
                f"commit: unknown {', '.join(sorted(unknown))}, expected names passed to State, "
                f"{', '.join(self._things)}"
            )
        if name := next(_pipelines(new), None):
            raise errors.InvalidArgumentError(f"commit: {_PIPELINE}, got a pipeline (name: {name})")
        found, nodes = serialization.serialize(self._others(self._things | dict(new)), None)
        for name, array in found.items():
            if isinstance(array, Slice):
                raise errors.InvalidArgumentError(f"commit: {_LOST}, got a part (name: {name})")
        # The arrays of the commit before the last one; those of the last one must stay valid until
        # the barrier.
        before = self.copies.next.tensors
        # Invalid while its memory is overwritten.
        self.copies.next = NOTHING
        tensors = {name: _copy(array, before.get(name)) for name, array in found.items()}
        # The inputs follow in `commit`, since their state is collective.
        return Commit(number, nodes, tensors, {}, self.comm.rank, self.comm.size)

    def _with_those_of_others(self, copy: Commit) -> Commit:
        """Add the generators of all ranks to a copy; *collective*."""
        own = {name: thing for name, thing in self._others().items() if _is_of_rank(thing)}
        # With a communicator: the generators of all ranks, named by rank where they differ.
        found, nodes = serialization.serialize(own, self.comm)
        known, theirs = copy.tensors, tuple(f"{name}/" for name in own)
        # This rank's own generators are replaced by those of all ranks, under other names.
        tensors = {n: array for n, array in known.items() if not f"{n}/".startswith(theirs)}
        tensors |= {
            # Values that are equal on all ranks keep their copy; only new names need memory.
            name: known[name] if name in known else _copy(array, None)
            for name, array in found.items()
        }
        return copy._replace(nodes=copy.nodes | nodes, tensors=tensors)

    def _put_back(self, copy: Commit) -> None:
        others = self._others()
        # Copies, because objects may keep the arrays that they load.
        tensors = {name: array.copy() for name, array in copy.tensors.items()}
        # Two steps: `restore_into` checks everything first, then each `put` writes. A mismatch
        # changes nothing.
        new, puts = restore_into(
            copy.nodes, tensors, others, None, PartialReads({}), place=copy.place
        )
        for put in puts:
            put()
        self._things |= new
        for name, thing in self._inputs():
            # An input of the user may have `load_state(state)` alone, and then keeps its own rows.
            if "comm" in inspect.signature(thing.load_state).parameters:  # it can redistribute
                thing.load_state(copy.inputs[name], comm=self.comm)
            else:
                thing.load_state(copy.inputs[name])

    def _sums(self) -> list[str]:
        """Return a checksum of each array that must be equal on all ranks."""
        # Generators may differ between ranks.
        equal = {
            name: thing
            for name, thing in self._others().items()
            if not isinstance(thing, PerRank)
            and not getattr(kinds.protocol_of(thing), "of_rank", False)
        }
        found, _ = serialization.serialize(equal, None)
        return [f"{name}: checksum {_checksum(array):08x}" for name, array in found.items()]


def _pipelines(things: Any, name: str = "") -> Iterator[str]:
    """Yield the names of the pipelines among objects and in their containers."""
    if kinds.protocol_of(things) is kinds.KINDS["pipeline"]:
        yield name
    elif isinstance(things, Mapping):
        for key, thing in things.items():
            yield from _pipelines(thing, f"{name}/{key}" if name else str(key))
    elif (parts := pytree.children_of(things)) is not None:
        label = pytree.child_labels(things)
        for index, part in enumerate(parts):
            yield from _pipelines(part, f"{name}/{label(index)}")


def _is_of_rank(thing: Any) -> bool:
    """Return whether an object, or a part of it, differs between ranks."""
    kind = kinds.protocol_of(thing)
    if kind is not None:
        return kind.of_rank
    if kinds.key_kind(thing) is not None or isinstance(thing, PerRank):
        return True
    inside = thing.values() if isinstance(thing, Mapping) else pytree.children_of(thing)
    return any(map(_is_of_rank, inside or ()))


def _copy(array: Any, into: Any) -> Any:
    """Copy an array of any library to the host, into `into` if shape and dtype match."""
    source = array_ops.host(array)
    source = np.asarray(kinds.to_host(array)) if source is None else source
    # Reused, because page faults of new memory take longer than the copy.
    if into is None or into.shape != source.shape or into.dtype != source.dtype:
        into = np.empty(source.shape, source.dtype)
    np.copyto(into, source)
    return into


def _checksum(array: Any) -> int:
    total = 0
    for part in array_ops.byte_views(array):
        total = zlib.crc32(part.data, total)
    return total
