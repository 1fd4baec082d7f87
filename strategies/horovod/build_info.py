"""Horovod's build queries, such as `mpi_built` and `nccl_built`."""

from __future__ import annotations

import collectives as cc
from collectives import extend

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_threads_supported() -> bool:
    """Tell whether several threads may send messages."""
    return extend.supports_threads(cc.init())


def mpi_built() -> bool:
    """Tell that MPI can be used."""
    return True


mpi_enabled = mpi_built


def gloo_built() -> bool:
    """Tell that Gloo is not used."""
    return False


def nccl_built() -> int:
    """Tell that NCCL is not used as it comes.

    Programs ask whether gradients on GPUs are reduced by it. These names reduce through MPI;
    `collectives` reduces by NCCL where `algorithm="nccl"` or UNISONO_NCCL asks for it.
    """
    return 0


gloo_enabled = ddl_built = ccl_built = cuda_built = rocm_built = gloo_built
