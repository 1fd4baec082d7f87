"""Devices of one process, and their assignment to replicas.

| name | NumPy's arrays | CuPy's | PyTorch's | JAX's |
| --- | --- | --- | --- | --- |
| `/cpu:i` | stay | come to the host | on "cpu" | on CPU device i; there may be one for all i |
| `/gpu:i` | become those of the GPU's library | on GPU i | on "cuda:i" | on GPU i |
| `/tpu:i`, others of JAX | become JAX's | become JAX's | `ValueError` | on device i of this kind |

There are as many CPU devices as one asks for. The GPU's library is the first of CuPy, PyTorch and
JAX that finds one. To import this package starts nothing: a library is asked for its devices if one
of them is named here, or if the program has imported it before.
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
    """Return the names of the devices that this process has, CPUs first.

    Asked are the libraries that the program has imported, and CuPy for GPUs. There are more CPU
    devices than one for JAX only; strategies take any number of them for other libraries, too.

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
    """Return the names of devices, checked, in one form.

    Args:
        devices: names such as "/gpu:0", "cpu:1" or "/device:TPU:0".
        operation: beginning of a message.
        soft_placement: take a CPU device where there is none of the name; the log says so.

    Raises:
        ValueError: no device, none of this name, or one twice.
        TypeError: a text where there should be a list.

    Example:
        >>> parse_devices(["cpu:0", "/device:CPU:1"], "example")
        ('/cpu:0', '/cpu:1')
    """
    if isinstance(devices, str):
        raise TypeError(f"{operation}: devices is not a list of names, got {devices!r}")
    specs = [_spec(device, operation) for device in devices]
    names = [_name(*spec) for spec in specs]
    free = (name for i in itertools.count() if (name := _name("CPU", i)) not in names)
    for number, (kind, index) in enumerate(specs):
        if (count := _count(kind, index)) > index:
            continue
        if not soft_placement:
            raise ValueError(
                f"{operation}: no such device, expected {_list(kind, count)}, got "
                f"{devices[number]!r}{_advice(kind, count)}"
            )
        wanted, names[number] = names[number], next(free)
        log.info("%s: (replica %d): %s, without %s", operation, number, names[number], wanted)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{operation}: expected different devices, at least one, got {names}")
    return tuple(names)


@contextmanager
def selected(name: str) -> Iterator[None]:
    """Let this thread compute on a device in this block, with every library that is imported.

    CuPy and CUDA under PyTorch have it as their current device, JAX as its default one.
    """
    kind, index = _spec(name, "selected")
    torch, cupy, jax = (sys.modules.get(library) for library in ("torch", "cupy", "jax"))
    with ExitStack() as stack:
        if kind == "GPU":
            if cupy is not None and cupy.cuda.is_available():
                stack.enter_context(cupy.cuda.Device(index))
            if torch is not None and torch.cuda.is_available():
                stack.enter_context(torch.cuda.device(index))
        if jax is not None and (found := _of_jax(kind)):
            stack.enter_context(jax.default_device(found[index % len(found)]))
        yield


def finish(names: Sequence[str]) -> None:
    """Wait for what this thread has put on its streams of some devices.

    Streams are current for a thread: another one would not wait for them. JAX needs no such thing.
    """
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    for name in names:
        if _spec(name, "finish")[0] != "GPU":
            continue
        with selected(name):
            if cupy is not None and cupy.cuda.is_available():
                cupy.cuda.get_current_stream().synchronize()
            if torch is not None and torch.cuda.is_initialized():
                torch.cuda.current_stream().synchronize()


def put(array: Any, name: str) -> Any:
    """Return an array on a device, itself if it is there; other objects as they are.

    Raises:
        ValueError: its library has no such device.
    """
    kind, index = _spec(name, "put")
    torch, jax, cupy = (sys.modules.get(library) for library in ("torch", "jax", "cupy"))
    if torch is not None and isinstance(array, torch.Tensor):
        return array.to(_of_torch(kind, index))
    if jax is not None and isinstance(array, jax.Array):
        return _put_jax(jax, array, kind, index)
    if cupy is not None and isinstance(array, cupy.ndarray):
        if kind == "GPU":
            with cupy.cuda.Device(index):
                return cupy.asarray(array)
        array = array.get()
    if kind == "CPU" or not isinstance(array, (np.ndarray, np.generic)):
        return array
    if array.dtype.kind not in "biufcV":  # text, objects: of no device
        return array
    library = _gpu_library() if kind == "GPU" else "jax"
    if library == "cupy":
        assert cupy is not None
        with cupy.cuda.Device(index):
            return cupy.asarray(array)
    if library == "torch":
        assert torch is not None
        return torch.asarray(np.array(array), device=_of_torch(kind, index))
    # A copy, since JAX may go on reading the caller's memory, and never change what it has.
    return _put_jax(importlib.import_module("jax"), np.array(array), kind, index)


def put_jax(array: Any, name: str) -> Any:
    """Return an array as one of JAX on a device, also on a CPU; other objects as they are."""
    if isinstance(array, (np.ndarray, np.generic)):
        if array.dtype.kind not in "biufcV":
            return array
        array = np.array(array)  # which JAX may go on reading
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


@functools.cache
def _spec(name: Any, operation: str) -> tuple[str, int]:
    """Return the type and number of a device of this process.

    Raises:
        ValueError: it is not such a name.
    """
    try:
        spec = DeviceSpec.from_string(name)
        whole = not (spec.job or spec.task or spec.replica)
        if spec.device_type is not None and spec.device_index is not None and whole:
            return spec.device_type.upper(), spec.device_index
    except (TypeError, ValueError):
        pass
    raise ValueError(
        f"{operation}: no such device, expected a name such as /cpu:0, /gpu:1 or /tpu:0, got "
        f"{name!r}"
    )


def _count(kind: str, index: int) -> int:
    """Return how many devices of a kind there are; of CPUs enough."""
    if kind == "CPU":
        return index + 1
    if kind == "GPU":
        return _gpus(("cupy", "torch", "jax"))
    return len(_of_jax(kind, ask=True))


def _list(kind: str, count: int) -> str:
    found = [_name("CPU", 0), "/cpu:1", "...", *(_name(kind, i) for i in range(count))]
    return ", ".join(found)


def _advice(kind: str, count: int) -> str:
    if count:
        return ""
    if kind == "GPU":
        return "; neither CuPy nor PyTorch nor JAX finds a GPU, if they are installed"
    return "; JAX is not installed, or finds no device of this kind"


def _gpus(asked: Sequence[str]) -> int:
    """Return how many GPUs the first library finds that finds any.

    Args:
        asked: libraries that are imported for that; others are asked if they have been.
    """
    library = _gpu_library(asked)
    if library is None:
        return 0
    return len(_of_jax("GPU")) if library == "jax" else _GPUS[library](sys.modules[library])


_GPUS: dict[str, Callable[[Any], int]] = {
    "cupy": lambda cupy: cupy.cuda.runtime.getDeviceCount() if cupy.cuda.is_available() else 0,
    "torch": lambda torch: torch.cuda.device_count(),
    "jax": lambda jax: len(_of_jax("GPU")),
}


def _gpu_library(asked: Sequence[str] = ()) -> str | None:
    """Return the library that NumPy's arrays on a GPU belong to."""
    for library, count in _GPUS.items():
        if library in asked:
            try:
                importlib.import_module(library)
            except ImportError:
                continue
        module = sys.modules.get(library)
        if module is None:
            continue
        if module in _with_gpus or count(module):
            _with_gpus.add(module)
            return library
    return None


_with_gpus: set[Any] = set()
"""Libraries that have found a GPU, which are not asked again whether they do."""


def _of_jax(kind: str, *, ask: bool = False) -> list[Any]:
    """Return the devices of JAX of a kind, none if JAX is not there.

    Args:
        kind: of devices.
        ask: whether JAX is imported for that.
    """
    if ask:
        try:
            importlib.import_module("jax")
        except ImportError:
            return []
    jax = sys.modules.get("jax")
    try:
        return [] if jax is None else list(jax.local_devices(backend=kind.lower()))
    except RuntimeError:  # which it raises for a kind that it does not have
        return []


def _put_jax(jax: Any, array: Any, kind: str, index: int) -> Any:
    found = _of_jax(kind)
    if not found:
        raise ValueError(f"put: JAX has no such device, expected {_name(kind, index)}")
    device = found[index % len(found)]
    if on_several_devices(array):
        mine = [shard.data for shard in shards(array) if shard.device == device]
        if mine and array.is_fully_replicated:
            return mine[0]
    # An array that is not bound to its device would follow any other one.
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
