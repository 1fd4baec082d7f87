"""Replica and cross-replica contexts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from strategies.cluster import local_devices as devices
from strategies.core.array_ops import on_several_devices
from strategies.core.communication_options import CommunicationOptions
from strategies.core.process_group import ProcessGroup
from strategies.replicas import per_replica, reductions
from strategies.replicas.reductions import ReduceOp

__all__ = [
    "Context",
    "SyncPoint",
    "ReplicaContext",
    "ReplicaStrategy",
    "current",
    "entered",
    "require_cross_replica",
    "require_one_replica",
]


class ReplicaStrategy(Protocol):
    """The part of a strategy that its replicas use; see `strategies.Strategy`."""

    ranks: ProcessGroup
    devices: tuple[str, ...]
    is_placed: bool
    updates_everywhere: bool

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that contribute to one step."""

    @property
    def first_replica_id(self) -> int:
        """Global number of this process's first replica."""

    def apply_gradients(
        self, optimizer: Any, grads_and_vars: Iterable[tuple[Any, Any]], *, examples: Any = None
    ) -> None:
        """Average the gradients of all replicas, and update the variables once."""

    def update(self, variables: Sequence[Any], change: Callable[[], None]) -> None:
        """Change variables where the strategy stores them."""

    def placed(self, value: Any, *, shared: bool) -> list[Any]:
        """Return an array for each replica of this process, on its device."""


class SyncPoint(NamedTuple):
    """A synchronization of the replicas, and the function to run once all have arrived.

    Attributes:
        name: equal on all replicas of all ranks.
        payload: this replica's data.
        merge: called once on every rank with the payloads of its replicas; returns a result for
            each of them.
    """

    name: str
    payload: Any
    merge: Callable[[list[Any]], list[Any]]


class ReplicaContext:
    """The services for a running replica; `strategies.get_replica_context()` returns it.

    The three methods are *collective* over the replicas of all ranks: each replica calls the same
    ones in the same order.

    Args:
        strategy: strategy of the replica.
        local_id: number of the replica in this process.
        meet: waits for the other replicas and returns this replica's result.
    """

    def __init__(
        self,
        strategy: ReplicaStrategy,
        local_id: int,
        meet: Callable[[SyncPoint], Any] | None = None,
    ) -> None:
        self.strategy = strategy
        self.local_id = local_id
        self._meet = meet

    def __repr__(self) -> str:
        return (
            f"ReplicaContext(replica_id_in_sync_group={self.replica_id_in_sync_group}, "
            f"num_replicas_in_sync={self.num_replicas_in_sync}, device={self.device!r})"
        )

    @property
    def replica_id_in_sync_group(self) -> int:
        """Global number of this replica."""
        return self.strategy.first_replica_id + self.local_id

    # A class attribute, so that `tpu.replica.TracedReplica` can override it without state.
    is_traced = False
    """Whether this context represents all replicas of the process, in a compiled function."""

    def read(self, variable: Any, array: Any) -> Any:
        """Return a variable as this replica sees it, given its array in this process."""
        # A mirrored JAX array has a copy on this device, so this is a view and not a transfer.
        if on_several_devices(array):
            return devices.put(array, self.device)
        return array

    def write(self, variable: Any, operation: str, change: Any, new: Any) -> bool:
        """Change a variable by a method of this replica; return False without such a method."""
        return False

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas on all ranks."""
        return self.strategy.num_replicas_in_sync

    @property
    def device(self) -> str:
        """Device of this replica."""
        return self.strategy.devices[self.local_id]

    def all_reduce(
        self, op: ReduceOp, value: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduce a value of every replica; every replica gets the result.

        Args:
            op: "sum" or "mean", in upper or lower case.
            value: an array or number, or nested tuples, lists and dicts of them; all arrays are
                sent together.
            options: options of this call; they override those of the strategy.

        Returns:
            The same structure with arrays of the same kind and dtype (integers have a float64
            mean), on the replica's device. Several replicas of a process share NumPy results, which
            are therefore read-only.

        Raises:
            ValueError: `op` is unknown.
        """
        # Checked in the replica's thread, so that the error has the line of the user's call.
        chosen = reductions.parse_op(op, "all_reduce")

        def merge(values: list[Any]) -> list[Any]:
            ranks = self.strategy.ranks.with_options(options)
            # One structure for all replicas: `shared` gives each one the result on its own device.
            return reductions.shared(reductions.reduce(ranks, chosen, values, rounded=True), values)

        return self.synchronize(SyncPoint(f"all_reduce {chosen}", value, merge))

    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenate an array of every replica along an axis; every replica gets the result.

        Args:
            value: an array with that axis, whose length may differ between replicas; or nested
                tuples, lists and dicts of such arrays.
            axis: axis to concatenate along; negative axes count from the end.

        Returns:
            The same structure; the arrays in the order of `replica_id_in_sync_group`.

        Raises:
            InvalidArgumentError: the replicas' arrays do not match, or lack the axis.
        """

        def merge(values: list[Any]) -> list[Any]:
            # Without options: rows are never rounded, and their number differs between ranks.
            ranks = self.strategy.ranks
            return reductions.shared(reductions.gather(ranks, values, axis), values)

        return self.synchronize(SyncPoint(f"all_gather {axis}", value, merge))

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Wait for all replicas, and call a function once per process in the cross-replica context.

        Args:
            merge_fn: called as `merge_fn(strategy, *args, **kwargs)`; the same function in all
                replicas.
            args: arguments of this replica. The function gets a `PerReplica` if they differ between
                the replicas of the process.
            kwargs: keyword arguments of this replica, like `args`.

        Returns:
            The result of the function; of a `PerReplica` this replica's value.
        """

        def merge(payloads: list[Any]) -> list[Any]:
            # Called in the first replica's thread, for all replicas of the process.
            merged_args, merged_kwargs = per_replica.regroup(payloads, "merge_call")
            result = merge_fn(self.strategy, *merged_args, **merged_kwargs)
            return [per_replica.select(result, i) for i in range(len(payloads))]

        payload = (tuple(args), dict(kwargs or {}))
        # The name of the function is part of the sync point, so that replicas with different
        # functions raise instead of merging. A callable object has only its class's name.
        name = getattr(merge_fn, "__qualname__", type(merge_fn).__qualname__)
        module = getattr(merge_fn, "__module__", "")
        return self.synchronize(SyncPoint(f"merge_call {module}.{name}", payload, merge))

    def synchronize(self, meeting: SyncPoint) -> Any:
        """Wait for the other replicas and merge; used by other modules of this package."""
        if self._meet is None:  # the default replica, outside of `run`
            # Between replicas, as in `run`: `merge_fn` may use the strategy's collective methods.
            with entered(self.strategy, None):
                return meeting.merge([meeting.payload])[0]
        top = current()
        # `_meet` waits for the first replica's thread; another thread would wait forever.
        if top is None or top.replica is not self:
            name = meeting.name.split()[0]
            raise RuntimeError(
                f"{name}: called outside of the replica, expected a call from inside of "
                f"strategy.run, in the thread that it runs in"
            )
        return self._meet(meeting)


class Context(NamedTuple):
    """The context of a thread: a strategy, and one of its replicas or None between replicas."""

    strategy: ReplicaStrategy
    replica: ReplicaContext | None


# Per thread, as each replica runs in its own.
class _Stack(threading.local):
    def __init__(self) -> None:
        self.contexts: list[Context] = []


_stack = _Stack()


def current() -> Context | None:
    """Return the innermost context of this thread; None outside of all contexts."""
    return _stack.contexts[-1] if _stack.contexts else None


@contextmanager
def entered(strategy: ReplicaStrategy, replica: ReplicaContext | None) -> Iterator[None]:
    """Set the context of this thread."""
    _stack.contexts.append(Context(strategy, replica))
    try:
        yield
    finally:
        _stack.contexts.pop()


def require_one_replica(operation: str) -> None:
    """Reject optimizers that update a model by themselves, in one of several replicas of a process.

    Raises:
        ValueError: the process has several replicas, or a compiled function represents all of them.
    """
    top = current()
    if top is None or top.replica is None:
        return
    if top.replica.is_traced:
        raise ValueError(
            f"{operation}: a program for all devices of a process would call the host from each of "
            f"them, expected strategy.apply_gradients in strategy.run"
        )
    if len(top.strategy.devices) > 1:
        raise ValueError(
            f"{operation}: a model of this library belongs to one replica, expected one device per "
            f"process, got {len(top.strategy.devices)}"
        )


def require_cross_replica(strategy: ReplicaStrategy, method: str) -> None:
    """Reject a call inside a replica, or inside the scope of another strategy.

    Raises:
        RuntimeError: the call is inside one of them.
    """
    top = current()
    # The default strategy is current without a scope.
    if top is None:
        return
    if top.replica is not None:
        raise RuntimeError(
            f"{method}: called inside a replica, expected the cross-replica context, outside of "
            f"strategy.run"
        )
    if top.strategy is not strategy:
        raise RuntimeError(
            f"{method}: another strategy's scope is open, expected one strategy per program, got "
            f"{type(strategy).__name__} inside {type(top.strategy).__name__}"
        )
