"""Tells PyTorch of the backend "unisono" when PyTorch is imported, by the entry point in setup.cfg.

Every process that imports PyTorch runs `register`, also those that never use the backend: nothing
is imported here, and nothing started, before `init_process_group`. What is done then is in
`strategies.torch`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["register"]

log = logging.getLogger(__name__)

# By one of these a process knows that an MPI launcher has started it.
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def register() -> None:
    """Make "unisono" a backend of torch.distributed; harmless when repeated.

    And let `init_process_group` find rank, size and addresses by itself, for any backend, where a
    launcher of MPI has started the program and the environment does not say them.

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
    except Exception as error:
        log.warning("unisono is not a backend of this torch.distributed: %r", error)


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
        if told or not any(name in os.environ for name in _LAUNCHED):
            found: Iterator[Any] = self._by_variables(url, *args, **kwargs)
            return found
        from strategies.torch.rendezvous import rendezvous

        return rendezvous(url, *args, **kwargs)


def _create(options: Any, choices: Any) -> Any:
    """Make a process group, for torch.distributed."""
    from strategies.torch.backend import create

    return create(options)
