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
    """A strategy, as far as its replicas know it; see `strategies.Strategy`."""

    ranks: ProcessGroup
    devices: tuple[str, ...]
    is_placed: bool
    updates_everywhere: bool

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas contribute to one step."""

    @property
    def first_replica_id(self) -> int:
        """Number of this process's first replica among all of them."""

    def apply_gradients(
        self, optimizer: Any, grads_and_vars: Iterable[tuple[Any, Any]], *, examples: Any = None
    ) -> None:
        """Average the gradients of all replicas, and update the variables once."""

    def update(self, variables: Sequence[Any], change: Callable[[], None]) -> None:
        """Change variables where they are."""

    def placed(self, value: Any, *, shared: bool) -> list[Any]:
        """Return an array for each replica of this process, where it belongs."""


class SyncPoint(NamedTuple):
    """Why a replica waits for the others, and what happens when all have come.

    Attributes:
        name: equal on all replicas of all ranks.
        payload: what this replica brings.
        merge: called once on every rank, with the payloads of its replicas; returns a result for
            each of them.
    """

    name: str
    payload: Any
    merge: Callable[[list[Any]], list[Any]]


class ReplicaContext:
    """What a replica can ask for while it runs; `strategies.get_replica_context()` returns it.

    The three methods are *collective* over the replicas of all ranks: each calls the same ones in
    the same order.

    Args:
        strategy: whose replica this is.
        local_id: its number among the replicas of this process.
        meet: waits for the other replicas and returns what came of it.
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
        """Number of this replica among all of them."""
        return self.strategy.first_replica_id + self.local_id

    is_traced = False
    """Whether this stands for all replicas of the process, in a function that is compiled."""

    def read(self, variable: Any, array: Any) -> Any:
        """Return what this replica sees of a variable, given its array in this process."""
        if on_several_devices(array):
            return devices.put(array, self.device)
        return array

    def write(self, variable: Any, operation: str, change: Any, new: Any) -> bool:
        """Change a variable in a way of this replica's own; tells whether there is one."""
        return False

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas there are on all ranks."""
        return self.strategy.num_replicas_in_sync

    @property
    def device(self) -> str:
        """The device that this replica computes on."""
        return self.strategy.devices[self.local_id]

    def all_reduce(
        self, op: ReduceOp, value: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduce a value of every replica, and give every replica the result.

        Args:
            op: "sum" or "mean", in any case.
            value: an array or number, or nested tuples, lists and dicts of them; all arrays travel
                together.
            options: of this call, over those of the strategy.

        Returns:
            The same structure with arrays of the kind and dtype given (integers have a float64
            mean), on the replica's device. Where a process has several replicas they share NumPy
            results, which are read-only therefore.

        Raises:
            ValueError: unknown op.
        """
        chosen = reductions.parse_op(op, "all_reduce")

        def merge(values: list[Any]) -> list[Any]:
            ranks = self.strategy.ranks.with_options(options)
            return reductions.shared(reductions.reduce(ranks, chosen, values, rounded=True), values)

        return self.synchronize(SyncPoint(f"all_reduce {chosen}", value, merge))

    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """Join an array of every replica along an axis, and give every replica the result.

        Args:
            value: an array with that axis, whose length may differ between replicas; or nested
                tuples, lists and dicts of such arrays.
            axis: where to join, negative ones count from the end.

        Returns:
            The same structure; the arrays in the order of `replica_id_in_sync_group`.

        Raises:
            InvalidArgumentError: the replicas' arrays do not fit, or have no such axis.
        """

        def merge(values: list[Any]) -> list[Any]:
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
            args: of this replica; where they differ between those of the process, the function
                gets a `PerReplica`.
            kwargs: the same by name.

        Returns:
            What the function returned, of a `PerReplica` this replica's value.
        """

        def merge(payloads: list[Any]) -> list[Any]:
            merged_args, merged_kwargs = per_replica.regroup(payloads, "merge_call")
            result = merge_fn(self.strategy, *merged_args, **merged_kwargs)
            return [per_replica.select(result, i) for i in range(len(payloads))]

        payload = (tuple(args), dict(kwargs or {}))
        name = getattr(merge_fn, "__qualname__", type(merge_fn).__qualname__)
        module = getattr(merge_fn, "__module__", "")
        return self.synchronize(SyncPoint(f"merge_call {module}.{name}", payload, merge))

    def synchronize(self, meeting: SyncPoint) -> Any:
        """Wait for the other replicas; for the parts of this package that make replicas meet."""
        if self._meet is None:  # the default replica, outside of any `run`
            with entered(self.strategy, None):
                return meeting.merge([meeting.payload])[0]
        top = current()
        if top is None or top.replica is not self:
            name = meeting.name.split()[0]
            raise RuntimeError(
                f"{name}: called outside of the replica, expected a call from inside of "
                f"strategy.run, in the thread that it runs in"
            )
        return self._meet(meeting)


class Context(NamedTuple):
    """What holds in a thread: a strategy, and one of its replicas or None between them."""

    strategy: ReplicaStrategy
    replica: ReplicaContext | None


class _Stack(threading.local):
    def __init__(self) -> None:
        self.contexts: list[Context] = []


_stack = _Stack()


def current() -> Context | None:
    """Return the innermost context of this thread, None outside of all of them."""
    return _stack.contexts[-1] if _stack.contexts else None


@contextmanager
def entered(strategy: ReplicaStrategy, replica: ReplicaContext | None) -> Iterator[None]:
    """Let this context hold in this thread."""
    _stack.contexts.append(Context(strategy, replica))
    try:
        yield
    finally:
        _stack.contexts.pop()


def require_one_replica(operation: str) -> None:
    """Refuse what computes a model's update for itself in one of several replicas of a process.

    Raises:
        ValueError: this is such a replica, or a program stands for all of them.
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
    """Refuse a call inside a replica, or inside the scope of another strategy.

    Raises:
        RuntimeError: this is such a call.
    """
    top = current()
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
