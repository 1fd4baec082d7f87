"""Open MPI settings: recommended values, and what its launcher sets."""

from __future__ import annotations

import os
from collections.abc import Mapping

from collectives.launch.launcher import env_count

__all__ = ["is_fault_tolerant", "recommended_settings", "late_settings_warning"]


def recommended_settings(environ: Mapping[str, str], cores: int) -> dict[str, str]:
    """Return recommended settings for Open MPI that you have not set.

    Other MPI libraries ignore them, and need none: Intel MPI 2021.19 takes 7.0 to 8.8 s for the
    conformance tests of operations and errors (3 ranks on 2 cores) for all tried values of
    `I_MPI_FABRICS`, `I_MPI_PIN` and `I_MPI_THREAD_YIELD`, except 21 s with the last one at 1.
    Measured with Open MPI 5.0.11:

    - `osc ^ucx` silences an error message about an unused component.
    - `btl ^ofi` leaves out an unused component for one-sided communication, which sleeps for a
      second if it finds no network: MPI starts in 0.1 s instead of 1.1 s.
    - `btl_tcp_links 2`: two sockets per peer use both directions of a link at once; MPI's
      all-reduce of 16 MiB between 2 machines at 1 Gbit/s takes 141 ms with these settings and
      207 ms without (`docs/benchmarks`).
    - `btl_tcp_eager_limit` 264 KiB: a slice of 256 KiB is sent without a rendezvous. The ring
      reaches 91 to 96 % of a 1 Gbit/s line instead of 87 to 91 %, and 87 to 94 % instead of 68 to
      86 % with 4 machines.
    - `mpi_yield_when_idle 1`, if ranks fill the cores of the node: a waiting rank leaves its core
      to the kernel's network work (1 MiB between nodes: 11 ms instead of 24 ms).

    Args:
        environ: environment so far.
        cores: number of cores of this node.
    """
    wanted = {
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_btl": "^ofi",
        "OMPI_MCA_btl_tcp_links": "2",
        "OMPI_MCA_btl_tcp_eager_limit": "270336",
    }
    # A waiting rank spins by default, and takes the core from the kernel's network work.
    if env_count(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")) >= cores:
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    # Values that the user has set stay.
    return {name: value for name, value in wanted.items() if name not in environ}


def late_settings_warning(environ: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    """Return a warning if MPI may have started without settings that it needs between nodes.

    Args:
        environ: environment in which MPI has started.
        wanted: result of `recommended_settings` for it.

    Returns:
        the warning on rank 0; None on other ranks, and if no setting is missing.
    """
    ranks, of_node = (
        env_count(environ.get(name, ""))
        for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    )
    # Only the TCP settings matter: the others save time at the start.
    of_lines = [f"{name}={value}" for name, value in wanted.items() if "_tcp_" in name]
    # Without TCP between nodes the settings have no effect.
    if ranks == of_node or not of_lines or environ.get("OMPI_COMM_WORLD_RANK") != "0":
        return None
    return (
        "init: MPI was started before, as `from mpi4py import MPI` does, so Open MPI goes without "
        "settings that halve some times between nodes over TCP. Call init first, or set "
        f"{' '.join(of_lines)}"
    )


def is_fault_tolerant() -> bool:
    """Return whether the job survives the death of a rank: `mpirun --with-ft ulfm`."""
    variable = "OMPI_MCA_mpi_ft_enable"
    return os.environ.get(variable, "").lower() in ("1", "true")
