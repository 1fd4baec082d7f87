"""Library modes of a thread (such as no_grad), carried to replica threads.

NumPy 2 and this package store modes in context variables, which can be copied to a thread. NumPy 1,
PyTorch and JAX store them per thread.
"""

from __future__ import annotations

import contextvars
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["capture_modes"]

Mode = Callable[[], AbstractContextManager[Any]]

# Device types for which PyTorch has a separate autocast state.
_AUTOCAST = ("cpu", "cuda", "xpu", "mps")


def capture_modes() -> Callable[..., Any]:
    """Return a function that calls another one in a different thread with this thread's modes.

    It copies the context variables and the modes of NumPy (`np.errstate`), PyTorch (gradients,
    autocast, default device) and JAX. JAX's are all thread-local values of `jax.config`, such as
    64 bits, `disable_jit` and the precision of products.
    """
    variables = contextvars.copy_context()
    # In a context variable since NumPy 2, and in thread-local state before.
    modes: list[Mode] = [functools.partial(np.errstate, **np.geterr())]
    if (torch := sys.modules.get("torch")) is not None:
        modes += _of_torch(torch)
    # `sys.modules`: libraries that are not imported have no modes.
    jax = sys.modules.get("jax")
    given = _values(jax) if jax is not None else {}

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            # Set only values that differ, because JAX includes each in its compilation key.
            for name, value in _values(jax).items() if given else ():
                if value is not given[name] and value != given[name]:
                    stack.enter_context(_of_jax(jax)[name](given[name]))
            return variables.run(function, *arguments)

    return call


def _of_torch(torch: Any) -> Iterator[Mode]:
    yield functools.partial(torch.set_grad_enabled, torch.is_grad_enabled())
    if torch.is_inference_mode_enabled():
        yield torch.inference_mode
    for kind in _AUTOCAST:
        if torch.is_autocast_enabled(kind):
            dtype, cached = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
            yield functools.partial(torch.autocast, kind, dtype=dtype, cache_enabled=cached)
    # Only the device type: each replica has selected its own device.
    if (kind := torch.get_default_device().type) != "cpu":
        yield functools.partial(torch.device, kind)


def _values(jax: Any) -> dict[str, Any]:
    """Return JAX's modes in this thread."""
    return {name: getattr(jax.config, name) for name in _of_jax(jax)}


@functools.cache
def _of_jax(jax: ModuleType) -> dict[str, Callable[[Any], AbstractContextManager[Any]]]:
    """Return name in `jax.config` -> function that sets it for a thread."""
    found = {}
    # The names in `values` differ between versions of JAX, so they are not listed here.
    for name in jax.config.values:
        public = name.removeprefix("jax_")
        room = jax if hasattr(jax, public) else jax.experimental  # `enable_x64` before 0.8
        setter = getattr(room, public, None)
        # Skipped, because it combines three other guards that are also set.
        if callable(setter) and name != "jax_transfer_guard":
            found[name] = setter
    return found
