"""Replacement of Gloo: process groups of this library for programs that ask for Gloo.

PyTorch creates every group in one function, which `unisono_torch` replaces by this one. It asks
PyTorch for a group of the backend "unisono", and registers the name that the program passed::

    init_process_group("gloo")                -> a group of this library, called "gloo"
    init_process_group("cpu:gloo,cuda:nccl")  -> the same, with NCCL for CUDA tensors
    new_group(backend="nccl")                 -> unchanged
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import device
from torch.distributed import distributed_c10d as c10d

__all__ = ["new_process_group"]

_told = False


def new_process_group(
    create: Callable[..., Any],
    replaced: str,
    size: int,
    rank: int,
    ranks: list[int],
    backend: str,
    store: Any,
    group_name: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Create a group for torch.distributed by PyTorch's function `create`, and its arguments.

    Raises:
        ValueError: `replaced`, the value of UNISONO_TORCH_REPLACE, is not "gloo".
    """
    if replaced != "gloo":
        raise ValueError(f"UNISONO_TORCH_REPLACE: expected gloo, got {replaced!r}")
    config = c10d.BackendConfig(c10d.Backend(backend))
    devices = config.get_device_backend_map()
    # Without a name, PyTorch chooses by accelerator, and a group of NCCL stays one.
    if devices.get("cpu") != "gloo":
        return create(size, rank, ranks, backend, store, group_name, *args, **kwargs)
    _tell(rank)
    others = {name: other for name, other in devices.items() if other != "gloo"}
    made = {}
    # First, because an unknown backend must raise before this library's collective calls.
    for name, other in others.items():
        part = f"{name}:{other}", store, f"{group_name}/{name}"
        made[name], _ = create(size, rank, ranks, *part, *args, **kwargs)
    group, prefixed = create(size, rank, ranks, "unisono", store, group_name, *args, **kwargs)
    if group is c10d.GroupMember.NON_GROUP_MEMBER:
        return group, prefixed
    c10d._world.pg_map[group] = (c10d.Backend(backend), prefixed)
    c10d._world.pg_backend_config[group] = str(config)
    for name, other in others.items():
        kind = c10d.Backend.backend_type_map[other]
        group.add_backend(device(name), kind, made[name]._get_backend(device(name)))
        _forget(made[name])
    return group, prefixed


def _forget(group: c10d.ProcessGroup) -> None:
    """Remove a group from PyTorch's tables, because its backend belongs to another group."""
    world = c10d._world
    c10d._unregister_process_group(group.group_name)
    for table in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag):
        del table[group]
    for groups in world.tags_to_pg.values():
        if group in groups:
            groups.remove(group)


def _tell(rank: int) -> None:
    """Print on rank 0, once, that the groups are this library's."""
    global _told
    if rank == 0 and not _told:
        print("unisono: replaces Gloo in torch.distributed on CPUs", file=sys.stderr, flush=True)
    _told = True
