"""The strategy that holds where no other does, and which one holds in this thread."""

from __future__ import annotations

from strategies.replicas import context
from strategies.replicas.context import ReplicaContext
from strategies.strategy import Strategy

__all__ = [
    "DefaultStrategy",
    "get_replica_context",
    "get_strategy",
    "in_cross_replica_context",
]


class DefaultStrategy(Strategy):
    """One replica in this process, and nothing to communicate."""

    def __init__(self) -> None:
        super().__init__()


_default = DefaultStrategy()
_default_replica = ReplicaContext(_default, 0)


def get_strategy() -> Strategy:
    """Return the strategy whose scope or replica this thread is in, or the default one."""
    top = context.current()
    return _default if top is None else top.strategy


def get_replica_context() -> ReplicaContext | None:
    """Return what the replica that runs in this thread can ask for; None between replicas.

    Outside of any scope this is the only replica of the default strategy.
    """
    top = context.current()
    return _default_replica if top is None else top.replica


def in_cross_replica_context() -> bool:
    """Tell whether this thread is in a strategy's scope and outside of its replicas."""
    return get_replica_context() is None
