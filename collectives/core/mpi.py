"""`mpi4py.MPI`, imported at the first use of a name: its import loads MPI, and may start it.

Modules import it beside the real module, which type checkers see::

    if TYPE_CHECKING:
        from mpi4py import MPI
    else:
        from collectives.core import mpi as MPI
"""

from __future__ import annotations

from typing import Any

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    """Return a name of `mpi4py.MPI`."""
    from mpi4py import MPI

    return getattr(MPI, name)
