"""`hvd.elastic`: run, states and sampler.

They stand on `strategies.elastic.run_elastic` and `State`, and work where these do: in a job that
outlives its ranks, Open MPI >= 5 under `mpirun --with-ft ulfm`. No rank comes in from outside, so
that nothing asks hosts; ranks above `max_np` are spare, and train in the place of dead ones. In
any other job a rank that dies ends it, and `run` is only a call.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
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


def _world() -> cc.Communicator:
    comm = global_process_set.bound("elastic").comm
    assert comm is not None
    return comm


class State:
    """What a job goes on from when ranks have died; `ObjectState` and `TorchState` are made.

    Things are attributes. `commit` copies them, `restore` gives them back, also what has been
    changed in place. `sync` also copies them, and so does the constructor, which is *collective*
    after `init`.

    Args:
        things: by name; what `strategies.elastic.State` takes.
    """

    def __init__(self, **things: Any) -> None:
        self._names = list(things)
        self._callbacks: list[Callable[[], Any]] = []
        self._kept: ElasticState | None = None
        for name, thing in things.items():
            setattr(self, name, thing)
        if things and context.is_initialized():
            State.save(self)

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Let functions be called after ranks have died, before training goes on."""
        self._callbacks.extend(callbacks)

    def commit(self) -> None:
        """Copy all things as they are now; *collective*."""
        self.save()

    def save(self) -> None:
        """Copy all things as they are now; *collective*."""
        self._state().commit(**self._things())

    def restore(self) -> None:
        """Give all things back as they were at the last commit; *collective*."""
        self._state().restore()
        self._take()

    def check_host_updates(self) -> None:
        """Do nothing: spare ranks come in when others have died."""

    def sync(self) -> None:
        """Broadcast rank 0's things to all ranks, and copy them; *collective*."""
        for name, thing in self._things().items():
            if hasattr(thing, "load_state"):  # whose state is that of all ranks
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
        """Do nothing; subclasses may do something after ranks have died, before the callbacks."""

    def on_reset(self) -> None:
        """Go on among other ranks, with the optimizers; for `run`."""
        self._take()
        comm = self._state().comm
        with contextlib.suppress(cc.CollectiveError):  # that ranks have died
            context.shutdown()
        context.init(comm)
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
            self._kept = ElasticState(_world(), **self._things())
        return self._kept

    def _take(self) -> None:
        """Take what is not the same object any more."""
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
    """A module, its optimizer, and whatever else, as attributes; see `State`.

    Args:
        model: a module of PyTorch.
        optimizer: of PyTorch, wrapped or not. A wrapped one averages among those that live.
        things: such as an `ElasticSampler`, `batch=0` and `epoch=0`.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **things: Any) -> None:
        own = {"model": model, "optimizer": optimizer}
        super().__init__(**{k: v for k, v in own.items() if v is not None}, **things)


def run(func: Callable[..., T] | None = None, *, min_np: int = 1, max_np: int | None = None) -> Any:
    """Make a function of a state go on when ranks have died, with those that live.

    All ranks begin with rank 0's state. After a death `func(state)` is called again, with the state
    of the last commit. Errors of `func` itself end the job on all ranks.

    Args:
        func: takes a state first; a decorator is returned if None.
        min_np: how few ranks may go on.
        max_np: how many train, `hvd.size()` meanwhile; all if None. The others are spare.
    """
    if func is None:
        return functools.partial(run, min_np=min_np, max_np=max_np)

    @functools.wraps(func)
    def elastic(state: State, *args: Any, **kwargs: Any) -> T:
        state.sync()
        kept = state._state()
        has_spares = max_np is not None and kept.comm.size > max_np
        if has_spares:
            context.shutdown()  # of all ranks; `on_reset` begins that of those that train

        def train(kept: ElasticState) -> T:
            result = func(state, *args, **kwargs)
            if has_spares:
                state.commit()  # what they are given at the end
            return result

        return run_elastic(train, kept, min_ranks=min_np, max_ranks=max_np, on_reset=state.on_reset)

    return elastic


class ElasticSampler:
    """Numbers of rows for a `DataLoader`, of which those that are done do not come again.

    All ranks get equally many in a pass, for which some rows come twice at its end. After ranks
    have died, what is left is dealt to the others. Give it to the state by name; `commit` then
    compares the arguments of all ranks.

    Args:
        dataset: or how many rows there are; the same on all ranks.
        shuffle: whether rows come in another order in each epoch.
        seed: of the order, the same on all ranks.

    Attributes:
        epoch: the present one.
        processed_indices: rows that this rank knows to be done in it.
        processed_num: number of rows that all ranks have done in it; assumes that all ranks record
            batches of this rank's size.
    """

    def __init__(self, dataset: Sized | int, shuffle: bool = True, seed: int = 0) -> None:
        rows = dataset if isinstance(dataset, int) else len(dataset)
        self._rows = integer("ElasticSampler", "number of rows", rows)
        self._shuffle, self._seed = shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.processed_num = 0
        self._place: cc.Communicator | None = None
        self._dealt: list[int] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which no row is done."""
        self.epoch = epoch
        self.processed_indices = set()
        self.processed_num = 0
        self.reset()

    def reset(self) -> None:
        """Deal what is not done anew; until then length and rows stay, whatever is recorded."""
        self._dealt = None

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that this rank has done a batch of the present pass, counted from 0."""
        begin = batch_idx * batch_size
        self.processed_indices.update(self._own_rows()[begin : begin + batch_size])
        self.processed_num += batch_size * (self._place or _world()).size

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and what this rank knows to be done in it; on this rank alone."""
        rows = sorted(self.processed_indices)
        return {"epoch": self.epoch, "processed_indices": rows, "processed_num": self.processed_num}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` says, with the same rows done on all ranks."""
        self.epoch = state["epoch"]
        self.processed_indices = set(state["processed_indices"])
        self.processed_num = state.get("processed_num", len(self.processed_indices))
        self.reset()

    def state(self, comm: cc.Communicator) -> dict[str, Any]:
        """Return what all ranks have done; *collective*.

        Raises:
            MismatchError: the number of rows, `shuffle` or `seed` differs; on all ranks.
        """
        facts = [f"{self._rows} rows", f"shuffle {self._shuffle}", f"seed {self._seed}"]
        gathered = comm.allgather_object((facts, sorted(self.processed_indices)))
        difference = first_difference(comm, "ElasticSampler", [facts for facts, _ in gathered])
        if difference is not None:
            raise extend.collective_error(comm, cc.MismatchError(difference))
        rows = sorted(set(itertools.chain.from_iterable(done for _, done in gathered)))
        return {"rows": self._rows, "epoch": self.epoch, "processed_indices": rows}

    def load_state(self, state: Mapping[str, Any], *, comm: cc.Communicator | None = None) -> None:
        """Go on where a state says, perhaps among fewer ranks."""
        if state["rows"] != self._rows:
            raise InvalidArgumentError(
                f"ElasticSampler: the state is of another dataset, expected {self._rows} rows, got "
                f"{state['rows']}"
            )
        self.epoch = state["epoch"]
        self.processed_indices = set(state["processed_indices"])
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
            self._dealt = self._deal()
        return self._dealt

    def _deal(self) -> list[int]:
        comm = self._place or _world()
        order = np.arange(self._rows)
        if self._shuffle:
            order = np.random.default_rng([self._seed, self.epoch]).permutation(self._rows)
        left = [row for row in order.tolist() if row not in self.processed_indices]
        count = -(-len(left) // comm.size) * comm.size
        return list(itertools.islice(itertools.cycle(left), count))[comm.rank :: comm.size]
