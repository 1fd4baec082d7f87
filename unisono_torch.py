"""Registers the backend "unisono" when PyTorch is imported, by the entry point in setup.cfg.

Every process that imports PyTorch runs `register`, also those that never use the backend: nothing
is imported here, and nothing started, before `init_process_group`. What is done then is in
`strategies.torch`.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

__all__ = ["trust_mpi", "register"]

log = logging.getLogger(__name__)

# By one of these a process knows that an MPI launcher has started it.
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")

# The backend whose groups this library creates instead, on CPUs: "gloo".
_REPLACE = "UNISONO_TORCH_REPLACE"

# The backend of the current `init_process_group`, which PyTorch does not pass to a rendezvous.
_backend: ContextVar[str] = ContextVar("backend", default="")

_variables_are_mpis = False


def register() -> None:
    """Make "unisono" a backend of torch.distributed; harmless when repeated.

    For this backend `init_process_group` then takes rank and size from MPI: a program without a
    launcher is a world of one. For any other backend it does so if an MPI launcher has started the
    program and the environment does not set rank and address.

    With `UNISONO_TORCH_REPLACE=gloo` programs that ask for Gloo get process groups of this library.

    It raises nothing: PyTorch could not be imported then.
    """
    try:
        from torch import distributed
        from torch.distributed import rendezvous

        if not distributed.is_available():
            return
        distributed.Backend.register_backend("unisono", _create, extended_api=True, devices=["cpu"])
        handlers = sys.modules[rendezvous.__module__]._rendezvous_handlers
        if not isinstance(handlers["env"], _Rendezvous):
            handlers["env"] = _Rendezvous(handlers["env"])
            distributed.init_process_group = _record_backend(distributed.init_process_group)
        if os.environ.get(_REPLACE, "").strip():
            _replace(distributed.distributed_c10d)
    except Exception as error:
        log.warning("unisono is not a backend of this torch.distributed: %r", error)


def trust_mpi() -> None:
    """Take ranks from MPI for any backend, because the environment variables are MPI's."""
    global _variables_are_mpis
    _variables_are_mpis = True


def _record_backend(initialise: Callable[..., None]) -> Callable[..., None]:
    """Return `init_process_group` that sets `_backend` during the call."""

    @functools.wraps(initialise)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        token = _backend.set(str(backend).lower())
        try:
            initialise(backend, *args, **kwargs)
        finally:
            _backend.reset(token)

    return init_process_group


def _replace(c10d: Any) -> None:
    """Let `strategies.torch.replacement` create all process groups; harmless when repeated."""
    new_group = c10d._new_process_group_helper
    if hasattr(new_group, "__wrapped__"):
        return

    @functools.wraps(new_group)
    def new_process_group(*args: Any, **kwargs: Any) -> Any:
        from strategies.torch.replacement import new_process_group

        return new_process_group(new_group, os.environ[_REPLACE].strip(), *args, **kwargs)

    c10d._new_process_group_helper = new_process_group


class _Rendezvous:
    """Finds rank, size and store for `init_method="env://"`.

    Args:
        by_variables: PyTorch's own way.
    """

    def __init__(self, by_variables: Any) -> None:
        self._by_variables = by_variables

    def __call__(self, url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Return what yields (store, rank, number of ranks); arguments as PyTorch's."""
        told = "MASTER_ADDR" in os.environ and ("RANK" in os.environ or "rank=" in url)
        launched = any(name in os.environ for name in _LAUNCHED)
        by_mpi = launched and (not told or _variables_are_mpis)
        if "unisono" not in _backend.get() and not by_mpi:
            found: Iterator[Any] = self._by_variables(url, *args, **kwargs)
            return found
        from strategies.torch.rendezvous import rendezvous

        return rendezvous(url, *args, **kwargs)


def _create(options: Any, choices: Any) -> Any:
    """Make a process group, for torch.distributed."""
    from strategies.torch.backend import create

    return create(options)
