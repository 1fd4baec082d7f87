"""`horovod.run`: calls a function on new ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from strategies import launcher

__all__ = ["run"]

T = TypeVar("T")

# Options of Horovod that do not change the result here.
_IGNORED = ("disable_cache", "start_timeout", "use_gloo", "use_mpi", "verbose")


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    **options: Any,
) -> list[T]:
    """Call a function on new ranks of this machine, as `strategies.launch`.

    Args:
        func: called as `func(*args, **kwargs)` on each rank.
        args: positional arguments.
        kwargs: keyword arguments.
        num_proc: number of ranks.
        np: earlier name of `num_proc`.
        **options: other options of Horovod; those of hosts, elastic jobs and files are rejected.

    Returns:
        results in rank order.

    Raises:
        ValueError: an option that is not supported; and all errors of `launch`.
    """
    ranks = num_proc if np is None else np
    rejected = [name for name, value in options.items() if value and name not in _IGNORED]
    if rejected:
        raise ValueError(
            f"run: expected ranks of this machine, got {', '.join(sorted(rejected))}; write a "
            f"program and start it with mpirun -np {ranks} python program.py"
        )
    return launcher.launch(func, ranks, args=args, kwargs=kwargs)
