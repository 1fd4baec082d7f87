"""`hvd.elastic`: run, states and sampler.

They build on `strategies.elastic.run_elastic` and `State`, and have their requirements: a job that
outlives its ranks, Open MPI >= 5 under `mpirun --with-ft ulfm`. No rank joins from outside, so no
host discovery is needed. Ranks above `max_np` are spare and replace dead ones. In other jobs a dead
rank ends the job, and `run` just calls the function.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypeVar

import numpy as np

import collectives as cc
from collectives import extend
from strategies.core.agreement import first_difference
from strategies.core.pytree import is_module
from strategies.core.validation import integer
from strategies.elastic import State as ElasticState
from strategies.elastic import run_elastic
from strategies.errors import InvalidArgumentError
from strategies.horovod import context, objects
from strategies.horovod.process_sets import global_process_set

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

T = TypeVar("T")

_log = logging.getLogger(__name__)


def _world() -> cc.Communicator:
    comm = global_process_set.bound("elastic").comm
    assert comm is not None
    return comm


class State:
    """State to resume from after deaths; base of `ObjectState` and `TorchState`.

    Objects are attributes. `commit` copies them. `restore` restores them, including changes in
    place. `sync` also copies them. So does the constructor, which is *collective* after `init`.

    Args:
        things: name -> object, as for `strategies.elastic.State`.
    """

    def __init__(self, **things: Any) -> None:
        self._names = list(things)
        self._callbacks: list[Callable[[], Any]] = []
        self._kept: ElasticState | None = None
        for name, thing in things.items():
            setattr(self, name, thing)
        # By the class: an overridden `save` may need attributes that are not set yet.
        if things and context.is_initialized():
            State.save(self)

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Register functions to call after deaths, before training resumes."""
        self._callbacks.extend(callbacks)

    def commit(self) -> None:
        """Copy all objects; *collective*."""
        self.save()

    def save(self) -> None:
        """Copy all objects; *collective*."""
        self._state().commit(**self._things())

    def restore(self) -> None:
        """Restore all objects from the last commit; *collective*."""
        self._state().restore()
        self._take()

    def check_host_updates(self) -> None:
        """Do nothing, because spare ranks join only after deaths."""

    def sync(self) -> None:
        """Broadcast rank 0's objects to all ranks, and copy them; *collective*."""
        for name, thing in self._things().items():
            if hasattr(thing, "load_state"):  # an input, whose state covers all ranks
                continue
            if hasattr(thing, "parameters"):
                objects.broadcast_parameters(thing if is_module(thing) else thing.state_dict())
            elif hasattr(thing, "state_dict"):
                objects.broadcast_optimizer_state(thing)
            else:
                setattr(self, name, objects.broadcast_object(thing, name=f"state.{name}"))
        if self._names:
            self.save()

    def reset(self) -> None:
        """Do nothing; subclasses may override it to act after deaths, before the callbacks."""

    def on_reset(self) -> None:
        """Switch to the surviving ranks, with the optimizers; called by `run`."""
        self._take()
        comm = self._state().comm
        with contextlib.suppress(cc.CollectiveError):  # raised because ranks have died
            context.shutdown()
        context.init(comm)
        # Optimizers average over the new ranks.
        for thing in self._things().values():
            if hasattr(thing, "rebind"):
                thing.rebind(comm)
        self.reset()
        for callback in self._callbacks:
            callback()

    def _things(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _state(self) -> ElasticState:
        if self._kept is None:
            # Made late: the class may be created before `init`.
            self._kept = ElasticState(_world(), **self._things())
        return self._kept

    def _take(self) -> None:
        """Set the attributes of objects that were replaced."""
        for name in self._names:
            setattr(self, name, self._state()[name])


class ObjectState(State):
    """Numbers, text, arrays and containers of these, as attributes; see `State`.

    Example:
        >>> import strategies.horovod.numpy as hvd
        >>> hvd.init()
        >>> state = hvd.elastic.ObjectState(epoch=0, seen=[])
        >>> state.commit()
        >>> state.seen.append(3)
        >>> state.restore()
        >>> state.seen
        []
        >>> hvd.shutdown()
    """


class TorchState(State):
    """A module, its optimizer and other objects, as attributes; see `State`.

    Args:
        model: a PyTorch module.
        optimizer: a PyTorch optimizer, wrapped or not. A wrapped one averages over the surviving
            ranks.
        things: further objects, such as an `ElasticSampler`, `batch=0` and `epoch=0`.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **things: Any) -> None:
        own = {"model": model, "optimizer": optimizer}
        super().__init__(**{k: v for k, v in own.items() if v is not None}, **things)


def run(func: Callable[..., T] | None = None, *, min_np: int = 1, max_np: int | None = None) -> Any:
    """Make a function of a state resume on the surviving ranks after deaths.

    All ranks start with rank 0's state. After a death `func(state)` is called again, with the state
    of the last commit. Errors of `func` itself end the job on all ranks.

    Args:
        func: function whose first argument is a state; None returns a decorator.
        min_np: minimum number of training ranks.
        max_np: maximum number of training ranks, which is then `hvd.size()`; None for all. Further
            ranks are spare.
    """
    if func is None:
        return functools.partial(run, min_np=min_np, max_np=max_np)

    @functools.wraps(func)
    def elastic(state: State, *args: Any, **kwargs: Any) -> T:
        state.sync()
        if not cc.is_fault_tolerant() and _world().rank == 0:
            _log.warning(
                "hvd.elastic.run: a dead rank ends this job; to continue with the others, start it "
                "by `mpirun --with-ft ulfm` of Open MPI >= 5"
            )
        # The state after `sync`, whose copies are on all ranks.
        kept = state._state()
        has_spares = max_np is not None and kept.comm.size > max_np
        if has_spares:
            context.shutdown()  # ends the world of all ranks; `on_reset` makes the training ranks'

        def train(kept: ElasticState) -> T:
            result = func(state, *args, **kwargs)
            if has_spares:
                state.commit()  # for the spare ranks at the end
            return result

        return run_elastic(train, kept, min_ranks=min_np, max_ranks=max_np, on_reset=state.on_reset)

    return elastic


class ElasticSampler:
    """Row numbers for a `DataLoader`, without rows that are done.

    All ranks get the same number of rows in a pass, so some rows occur twice at its end. After
    deaths the remaining rows are dealt to the surviving ranks. Pass the sampler to the state by
    name; `commit` then compares the arguments of all ranks.

    Args:
        dataset: dataset, or its number of rows; the same on all ranks.
        shuffle: whether to reshuffle the rows in each epoch.
        seed: seed of the order, the same on all ranks.

    Attributes:
        epoch: the current epoch.
        processed_indices: rows of this epoch that this rank knows to be done.
        processed_num: number of rows of this epoch that all ranks have done; assumes that all ranks
            record batches of this rank's size.
    """

    def __init__(self, dataset: Sized | int, shuffle: bool = True, seed: int = 0) -> None:
        rows = dataset if isinstance(dataset, int) else len(dataset)
        self._rows = integer("ElasticSampler", "number of rows", rows)
        self._shuffle, self._seed = shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.processed_num = 0
        # No communicator yet, because the sampler may be made before `init`.
        self._place: cc.Communicator | None = None
        self._dealt: list[int] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, with no row done."""
        self.epoch = epoch
        self.processed_indices = set()
        self.processed_num = 0
        self.reset()

    def reset(self) -> None:
        """Deal the remaining rows again; until then recording changes neither length nor rows."""
        self._dealt = None

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that this rank has done a batch of the current pass, counted from 0."""
        self.record_indices(self.get_indices(batch_idx, batch_size))
        self.processed_num += batch_size * (self._place or _world()).size

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that this rank has done these rows."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the rows of a batch of this rank's current pass, counted from 0."""
        # By this pass's order, which stays the same until `reset`.
        return self._own_rows()[batch_idx * batch_size :][:batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the rows that this rank knows to be done; not collective."""
        rows = sorted(self.processed_indices)
        return {"epoch": self.epoch, "processed_indices": rows, "processed_num": self.processed_num}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`, with the same rows done on all ranks."""
        self.epoch = state["epoch"]
        self.processed_indices = set(state["processed_indices"])
        self.processed_num = state.get("processed_num", len(self.processed_indices))
        self.reset()

    def state(self, comm: cc.Communicator) -> dict[str, Any]:
        """Return the rows that all ranks have done; *collective*.

        Raises:
            MismatchError: the number of rows, `shuffle` or `seed` differs; on all ranks.
        """
        facts = [f"{self._rows} rows", f"shuffle {self._shuffle}", f"seed {self._seed}"]
        # Arguments and rows in one exchange.
        gathered = comm.allgather_object((facts, sorted(self.processed_indices)))
        difference = first_difference(comm, "ElasticSampler", [facts for facts, _ in gathered])
        if difference is not None:
            raise extend.collective_error(comm, cc.MismatchError(difference))
        rows = sorted(set(itertools.chain.from_iterable(done for _, done in gathered)))
        return {"rows": self._rows, "epoch": self.epoch, "processed_indices": rows}

    def load_state(self, state: Mapping[str, Any], *, comm: cc.Communicator | None = None) -> None:
        """Restore a state, also with another number of ranks."""
        if state["rows"] != self._rows:
            raise InvalidArgumentError(
                f"ElasticSampler: the state is from another dataset, expected {self._rows} rows, "
                f"got {state['rows']}"
            )
        self.epoch = state["epoch"]
        self.processed_indices = set(state["processed_indices"])
        # The rows of all ranks are known here, so the number is exact.
        self.processed_num = len(self.processed_indices)
        self._place = comm or self._place
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self._own_rows())

    def __len__(self) -> int:
        return len(self._own_rows())

    def _own_rows(self) -> list[int]:
        """Return the rows of this rank."""
        if self._dealt is None:
            # Dealt lazily, because an epoch may be set between.
            self._dealt = self._deal()
        return self._dealt

    def _deal(self) -> list[int]:
        comm = self._place or _world()
        order = np.arange(self._rows)
        if self._shuffle:
            # The same on all ranks: the generator depends on seed and epoch alone.
            order = np.random.default_rng([self._seed, self.epoch]).permutation(self._rows)
        left = [row for row in order.tolist() if row not in self.processed_indices]
        # Rounded up to a multiple of the ranks; the first rows fill the gap.
        count = -(-len(left) // comm.size) * comm.size
        return list(itertools.islice(itertools.cycle(left), count))[comm.rank :: comm.size]
