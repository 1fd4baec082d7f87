"""Visible GPUs of a rank, and the limit of their memory.

Ranks of one node share its GPUs. `use_gpus` gives each rank its own, for every library that reads
CUDA_VISIBLE_DEVICES. `limit_gpu_memory` bounds CuPy's memory if ranks share a GPU.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

import collectives as cc
from collectives import extend
from strategies.core.process_group import ProcessGroup
from strategies.core.validation import number
from strategies.errors import ResourceExhaustedError

__all__ = ["limit_gpu_memory", "share_of", "use_gpus"]

_log = logging.getLogger(__name__)


def share_of(devices: list[str], local_rank: int, local_size: int) -> list[str]:
    """Return the devices of one rank of a node.

    Every rank gets the same number. With fewer devices than ranks, ranks share: rank `r` uses
    device `r` modulo the number of devices.

    Example:
        >>> [share_of(["0", "1", "2", "3"], rank, 2) for rank in range(2)]
        [['0', '1'], ['2', '3']]
        >>> [share_of(["0", "1"], rank, 3) for rank in range(3)]
        [['0'], ['1'], ['0']]
    """
    each = len(devices) // local_size
    if each:
        return devices[local_rank * each : (local_rank + 1) * each]
    return [devices[local_rank % len(devices)]] if devices else []


def use_gpus(comm: cc.Communicator) -> list[str]:
    """Restrict this rank to its share of its node's GPUs; *collective*.

    Call it before anything starts CUDA, which reads CUDA_VISIBLE_DEVICES only once. It is not
    needed if the launcher gives each rank its own GPUs.

    Args:
        comm: all ranks of the job.

    Returns:
        the rank's devices, as CUDA_VISIBLE_DEVICES now lists them; empty on a node without GPUs,
        where nothing changes.

    Raises:
        RuntimeError: CUDA was started before and still sees other devices; on all ranks.
    """
    return ProcessGroup(comm).run_then_agree(
        "use_gpus", lambda: _use(comm.local_rank, comm.local_size)
    )


def _use(local_rank: int, local_size: int) -> list[str]:
    seen = extend.visible_gpus()
    if not seen:
        return []
    mine = share_of(seen, local_rank, local_size)
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    # CUDA reads the variable once, so another number shows that it was started before.
    count = _device_count()
    if count is not None and count != len(mine):
        if before is None:
            # Restored, so that child processes see the same devices as this process.
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
        raise RuntimeError(
            f"use_gpus: CUDA was started before and sees other devices, expected {len(mine)} "
            f"({','.join(mine)}), got {count}; call use_gpus first"
        )
    return mine


def limit_gpu_memory(
    *,
    memory_fraction: float | None = None,
    memory_limit: int | None = None,
    growth: bool = False,
) -> None:
    """Limit the memory that CuPy uses on each visible GPU.

    CuPy's pool keeps freed memory for later arrays. With a limit, arrays that do not fit raise
    `ResourceExhaustedError`, with the sizes.

    Args:
        memory_fraction: share of each GPU's memory; two processes with 0.4 fit on one GPU.
        memory_limit: bytes.
        growth: allocate on demand, up to the fraction if there is one. Otherwise the limit is
            allocated at once, so that a lack of memory shows now and not in an hour.

    Raises:
        ValueError: both limits, an invalid number, or growth with a limit in bytes.
        RuntimeError: CuPy has allocated memory before, is not installed, or finds no GPU.
        ResourceExhaustedError: a GPU has less free memory.

    Example::

        limit_gpu_memory(memory_fraction=0.4)
    """
    # Checked first, so that wrong arguments raise on machines without CuPy as well.
    memory_fraction = _check(memory_fraction, memory_limit, growth)
    cupy = _cupy()
    pool = cupy.get_default_memory_pool()
    devices = range(cupy.cuda.runtime.getDeviceCount())
    for device in devices:
        with cupy.cuda.Device(device):
            if pool.total_bytes():
                raise RuntimeError(
                    f"limit_gpu_memory: CuPy has taken memory before, expected 0 bytes, got "
                    f"{pool.total_bytes()} (GPU {device}); call it before the first array is made"
                )
    # For all devices; the pool's limits below are per device.
    cupy.cuda.set_allocator(partial(_allocate, cupy, pool))
    for device in devices:
        with cupy.cuda.Device(device):
            total = cupy.cuda.runtime.memGetInfo()[1]
            limit = memory_limit or (int(total * memory_fraction) if memory_fraction else 0)
            if limit:
                pool.set_limit(size=limit)
                if not growth:
                    cupy.cuda.alloc(limit - limit % _UNIT)  # stays in the pool when it is freed


def _check(memory_fraction: float | None, memory_limit: int | None, growth: bool) -> float | None:
    """Check the arguments; return the fraction as a float."""
    if memory_fraction is not None:
        if memory_limit is not None:
            raise ValueError("limit_gpu_memory: expected memory_fraction or memory_limit, got both")
        memory_fraction = number("limit_gpu_memory", "memory_fraction", memory_fraction)
        if not 0 < memory_fraction <= 1:
            raise ValueError(
                f"limit_gpu_memory: bad memory_fraction, expected 0 < fraction <= 1, got "
                f"{memory_fraction}"
            )
    if memory_limit is not None and (growth or not memory_limit > 0):
        raise ValueError(
            f"limit_gpu_memory: expected memory_limit > 0, and no growth beside it, got "
            f"{memory_limit} with growth={growth}"
        )
    return memory_fraction


_UNIT = 512  # bytes; CuPy's pool rounds up to multiples of it


def _allocate(cupy: Any, pool: Any, size: int) -> Any:
    """Allocate memory of the pool, with an error that gives the sizes."""
    try:
        return pool.malloc(size)
    except cupy.cuda.memory.OutOfMemoryError as error:
        free, total = cupy.cuda.runtime.memGetInfo()
        raise ResourceExhaustedError(
            f"GPU memory: an array does not fit, expected at most "
            f"{pool.get_limit() or total} bytes in all, got {size} bytes more than "
            f"{pool.used_bytes()} in use (pool: {pool.total_bytes()}, GPU: {free} free of {total})"
        ) from error


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(
            "limit_gpu_memory: GPU memory is taken through CuPy, which is not installed: "
            "`pip install cupy-cuda12x`, or `cupy-cuda13x` for CUDA 13"
        ) from error
    if not cupy.cuda.is_available():
        raise RuntimeError("limit_gpu_memory: CuPy finds no CUDA device")
    return cupy


def _device_count() -> int | None:
    """Return the number of devices that CUDA sees; None if unknown without CuPy."""
    try:
        import cupy
    except ImportError:
        _log.debug("use_gpus: without CuPy it is not known which devices CUDA sees")
        return None
    return int(cupy.cuda.runtime.getDeviceCount()) if cupy.cuda.is_available() else 0
