"""Devices of one process, and their assignment to replicas.

| name | NumPy arrays | CuPy arrays | PyTorch tensors | JAX arrays |
| --- | --- | --- | --- | --- |
| `/cpu:i` | stay | are copied to the host | on "cpu" | on CPU device i; all i may be one |
| `/gpu:i` | become arrays of the GPU's library | on GPU i | on "cuda:i" | on GPU i |
| `/tpu:i`, others of JAX | become JAX arrays | become JAX arrays | `ValueError` | on device i |

You choose the number of CPU devices. The GPU's library is the first of CuPy, PyTorch and JAX that
finds a GPU. Importing this package starts nothing: a library is asked for its devices if you name
one of them, or if the program has imported the library before.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from strategies.cluster.device_spec import DeviceSpec
from strategies.core.array_ops import on_several_devices, shards

__all__ = ["CPU", "devices", "finish", "of_jax", "parse_devices", "put", "put_jax", "selected"]

log = logging.getLogger(__name__)

CPU = ("/cpu:0",)
"""The device of a strategy that is given none; on this one nothing is moved or selected."""


def devices() -> tuple[str, ...]:
    """Return the names of this process's devices, CPUs first.

    Devices are those of CuPy, and of libraries that the program has imported. Only JAX reports
    several CPU devices; strategies accept any number of them for all libraries.

    Example:
        >>> devices()[0]
        '/cpu:0'
    """
    counts = {"CPU": 1, "GPU": _gpus(("cupy",))}
    if (jax := sys.modules.get("jax")) is not None:
        for device in jax.local_devices():
            counts.setdefault(device.platform.upper(), 0)
        counts = {kind: max(n, len(_of_jax(kind))) for kind, n in counts.items()}
    return tuple(_name(kind, i) for kind, n in counts.items() for i in range(n))


def parse_devices(
    devices: Sequence[str], operation: str, *, soft_placement: bool = False
) -> tuple[str, ...]:
    """Return device names, checked and normalized.

    Args:
        devices: names such as "/gpu:0", "cpu:1" or "/device:TPU:0".
        operation: name for errors.
        soft_placement: use a CPU device for a missing one, and log it.

    Raises:
        ValueError: the list is empty, a device does not exist, or occurs twice.
        TypeError: `devices` is a string.

    Example:
        >>> parse_devices(["cpu:0", "/device:CPU:1"], "example")
        ('/cpu:0', '/cpu:1')
    """
    if isinstance(devices, str):
        raise TypeError(f"{operation}: devices is not a list of names, got {devices!r}")
    specs = [_spec(device, operation) for device in devices]
    names = [_name(*spec) for spec in specs]
    # CPU devices that no replica uses, for soft placement.
    free = (name for i in itertools.count() if (name := _name("CPU", i)) not in names)
    for number, (kind, index) in enumerate(specs):
        if (count := _count(kind, index)) > index:
            continue
        if not soft_placement:
            known = ["/cpu:0", "/cpu:1", "...", *(_name(kind, i) for i in range(count))]
            raise ValueError(
                f"{operation}: no such device, expected {', '.join(known)}, got "
                f"{devices[number]!r}{_advice(kind, count)}"
            )
        wanted, names[number] = names[number], next(free)
        log.info("%s: (replica %d): %s, without %s", operation, number, names[number], wanted)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{operation}: expected different devices, at least one, got {names}")
    return tuple(names)


@contextmanager
def selected(name: str) -> Iterator[None]:
    """Make a device the current one of this thread in the block, for every imported library.

    That is CuPy's and PyTorch's current CUDA device, and JAX's default device.
    """
    kind, index = _spec(name, "selected")
    torch, cupy, jax = (sys.modules.get(library) for library in ("torch", "cupy", "jax"))
    with ExitStack() as stack:
        if kind == "GPU":
            # A library may be installed without a driver; then there is nothing to select.
            if cupy is not None and cupy.cuda.is_available():
                stack.enter_context(cupy.cuda.Device(index))
            if torch is not None and torch.cuda.is_available():
                stack.enter_context(torch.cuda.device(index))
        if jax is not None and (found := _of_jax(kind)):
            # Modulo, because replicas on several CPU names may share JAX's one CPU device.
            stack.enter_context(jax.default_device(found[index % len(found)]))
        yield


def finish(names: Sequence[str]) -> None:
    """Synchronize this thread's streams of some devices.

    Streams are per thread, so another thread would not wait for them. JAX needs no synchronization.
    """
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    for name in names:
        if _spec(name, "finish")[0] != "GPU":
            continue
        with selected(name):
            if cupy is not None and cupy.cuda.is_available():
                cupy.cuda.get_current_stream().synchronize()
            # Not `is_available`: synchronizing would start CUDA in a program that has not used it.
            if torch is not None and torch.cuda.is_initialized():
                torch.cuda.current_stream().synchronize()


def put(array: Any, name: str) -> Any:
    """Return an array on a device, itself if it is already there; other objects unchanged.

    Raises:
        ValueError: the array's library has no such device.
    """
    kind, index = _spec(name, "put")
    torch, jax, cupy = (sys.modules.get(library) for library in ("torch", "jax", "cupy"))
    if torch is not None and isinstance(array, torch.Tensor):
        # `to` returns the tensor itself if it is there already.
        return array.to(_of_torch(kind, index))
    if jax is not None and isinstance(array, jax.Array):
        return _put_jax(jax, array, kind, index)
    if cupy is not None and isinstance(array, cupy.ndarray):
        if kind == "GPU":
            with cupy.cuda.Device(index):
                return cupy.asarray(array)
        # For a CPU or JAX: handled as a NumPy array below.
        array = array.get()
    if kind == "CPU" or not isinstance(array, (np.ndarray, np.generic)):
        return array
    if array.dtype.kind not in "biufcV":  # text and objects have no device
        return array
    # Other types of devices, such as TPUs, are reached through JAX.
    library = _gpu_library() if kind == "GPU" else "jax"
    if library == "cupy":
        assert cupy is not None
        with cupy.cuda.Device(index):
            return cupy.asarray(array)
    if library == "torch":
        assert torch is not None
        # `np.array` turns scalars into arrays, and copies read-only ones, about which PyTorch
        # warns.
        return torch.asarray(np.array(array), device=_of_torch(kind, index))
    # A copy, because JAX may keep reading the caller's memory, and its arrays never change.
    return _put_jax(importlib.import_module("jax"), np.array(array), kind, index)


def put_jax(array: Any, name: str) -> Any:
    """Return an array as a JAX array on a device, even a CPU; other objects unchanged."""
    if isinstance(array, (np.ndarray, np.generic)):
        if array.dtype.kind not in "biufcV":
            return array
        array = np.array(array)  # a copy, because JAX may keep reading the memory
    elif not isinstance(array, importlib.import_module("jax").Array):
        return array
    return _put_jax(importlib.import_module("jax"), array, *_spec(name, "put"))


def of_jax(name: str) -> Any:
    """Return a device as JAX's object.

    Raises:
        ValueError: JAX has no such device.
    """
    kind, index = _spec(name, "of_jax")
    found = _of_jax(kind, ask=True)
    if index >= len(found):
        raise ValueError(
            f"devices: JAX has no such device, expected one of {len(found)} of this kind, got "
            f"{name!r}"
        )
    return found[index]


def _name(kind: str, index: int) -> str:
    return f"/{kind.lower()}:{index}"


def _spec(name: Any, operation: str) -> tuple[str, int]:
    """Return type and number of a device of this process."""
    # Only text, because the cache cannot look up objects such as lists.
    found = _parsed(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(
            f"{operation}: no such device, expected a name such as /cpu:0, /gpu:1 or /tpu:0, got "
            f"{name!r}"
        )
    return found


@functools.cache
def _parsed(name: str) -> tuple[str, int] | None:
    try:
        spec = DeviceSpec.from_string(name)
    except ValueError:
        return None
    # Names of other tasks do not name devices of this process.
    if spec.job or spec.task or spec.replica:
        return None
    if spec.device_type is None or spec.device_index is None:
        return None
    return spec.device_type.upper(), spec.device_index


def _count(kind: str, index: int) -> int:
    """Return the number of devices of a type; for CPUs as many as `index` needs."""
    if kind == "CPU":
        # CPU devices are names for threads, so any number exists.
        return index + 1
    if kind == "GPU":
        return _gpus(("cupy", "torch", "jax"))
    return len(_of_jax(kind, ask=True))


def _advice(kind: str, count: int) -> str:
    if count:
        return ""
    if kind == "GPU":
        return "; neither CuPy nor PyTorch nor JAX finds a GPU, if they are installed"
    return "; JAX is not installed, or finds no device of this kind"


def _gpus(asked: Sequence[str]) -> int:
    """Return the number of GPUs of the first library that finds any.

    Args:
        asked: libraries to import for that; others count only if imported already.
    """
    library = _gpu_library(asked)
    return 0 if library is None else _GPUS[library](sys.modules[library])


_GPUS: dict[str, Callable[[Any], int]] = {
    "cupy": lambda cupy: cupy.cuda.runtime.getDeviceCount() if cupy.cuda.is_available() else 0,
    "torch": lambda torch: torch.cuda.device_count(),
    "jax": lambda jax: len(_of_jax("GPU")),
}


def _gpu_library(asked: Sequence[str] = ()) -> str | None:
    """Return the library of arrays that NumPy arrays become on a GPU."""
    for library, count in _GPUS.items():
        if library in asked:
            try:
                importlib.import_module(library)
            except ImportError:
                continue
        # Not imported here: a program that does not use a library should not wait for its import.
        module = sys.modules.get(library)
        if module is None:
            continue
        # Counting takes a call into the driver, and this runs for every array that is moved.
        if module in _with_gpus or count(module):
            _with_gpus.add(module)
            return library
    return None


_with_gpus: set[Any] = set()
"""Libraries that have found a GPU, which are not asked again whether they do."""


def _of_jax(kind: str, *, ask: bool = False) -> list[Any]:
    """Return JAX's devices of a type; empty without JAX.

    Args:
        kind: the type.
        ask: whether to import JAX.
    """
    if ask:
        try:
            importlib.import_module("jax")
        except ImportError:
            return []
    jax = sys.modules.get("jax")
    try:
        return [] if jax is None else list(jax.local_devices(backend=kind.lower()))
    except RuntimeError:  # JAX has no devices of this type
        return []


def _put_jax(jax: Any, array: Any, kind: str, index: int) -> Any:
    found = _of_jax(kind)
    if not found:
        raise ValueError(f"put: JAX has no such device, expected {_name(kind, index)}")
    device = found[index % len(found)]
    # A replicated array has a copy on this device, which needs no transfer.
    if on_several_devices(array):
        mine = [shard.data for shard in shards(array) if shard.device == device]
        if mine and array.is_fully_replicated:
            return mine[0]
    # An uncommitted array would follow other arrays to their devices.
    there = getattr(array, "committed", False) and array.devices() == {device}
    return array if there else jax.device_put(array, device)


def _of_torch(kind: str, index: int) -> str:
    if kind == "CPU":
        return "cpu"
    if kind == "GPU":
        return f"cuda:{index}"
    raise ValueError(
        f"put: PyTorch has no such device, expected one of CPU or GPU, got {_name(kind, index)}"
    )
