"""`run_ranks`: calls a function on ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from collectives.calls.group import Group
from collectives.communicator import Communicator, this_thread
from collectives.core.settings import Settings
from collectives.testing.thread_transport import ThreadGroup, ThreadTransport

__all__ = ["World", "run_ranks"]

T = TypeVar("T")


def run_ranks(
    function: Callable[..., T],
    ranks: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = 20.0,
) -> list[T]:
    """Call a function on ranks that are threads, and return the results in rank order.

    On each thread `collectives.init()` returns the communicator of that rank, and functions such as
    `collectives.allreduce` and the optimizers and strategies of `strategies` use it. So a training
    function runs unchanged, without `mpirun`. All ranks share the modules and their variables.

    Args:
        function: called as `function(*args, **kwargs)` on each rank.
        ranks: number of ranks.
        args: positional arguments; the same objects on all ranks.
        kwargs: keyword arguments; the same objects on all ranks.
        timeout: seconds that an operation waits for other ranks, without the time for compiling.

    Raises:
        Exception: the first error of a rank. It ends the waits of the other ranks, whose errors are
            dropped.
        ValueError: fewer than one rank.

    Example:
        >>> import collectives as cc
        >>> run_ranks(lambda: cc.init().allreduce(cc.rank(), op=cc.SUM).item(), 3)
        [3, 3, 3]
    """
    if ranks < 1:
        raise ValueError(f"run_ranks: bad number of ranks, expected an integer >= 1, got {ranks}")
    group = ThreadGroup(ranks, "synchronous")
    settings = Settings(timeout=timeout, shared_memory=None)
    results: list[T | None] = [None] * ranks

    def run(rank: int) -> None:
        try:
            comm = Communicator(Group(ThreadTransport(group, rank), [0] * ranks, settings))
            this_thread.world = comm
            results[rank] = function(*args, **(kwargs or {}))
            comm.close()
        except BaseException as error:
            group.job.fail(rank, error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C
        group.job.fail(0, error)
        raise
    if group.job.failure is not None:
        raise group.job.failure.error
    return cast("list[T]", results)


class World(NamedTuple):
    """Some ranks as threads: the value of pytest's fixture `unisono_world`.

    Attributes:
        size: number of ranks.
    """

    size: int

    def run(
        self,
        function: Callable[..., T],
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = 20.0,
    ) -> list[T]:
        """Call a function on each rank, as `run_ranks`."""
        return run_ranks(function, self.size, args=args, kwargs=kwargs, timeout=timeout)
