"""Library modes of a thread (such as no_grad), carried to replica threads.

NumPy 2 and this package keep theirs in context variables, of which a thread gets a copy. NumPy 1,
PyTorch and JAX keep theirs for each thread.
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

# Devices for which PyTorch has an autocast each.
_AUTOCAST = ("cpu", "cuda", "xpu", "mps")


def capture_modes() -> Callable[..., Any]:
    """Return what calls a function in another thread as it would be called in this one.

    With a copy of the context variables, and in the modes of NumPy (`np.errstate`), of PyTorch
    (with or without gradients, autocast, default device) and of JAX (all that `jax.config` has for
    a thread, such as 64 bits, `disable_jit` and the precision of products).
    """
    variables = contextvars.copy_context()
    modes: list[Mode] = [functools.partial(np.errstate, **np.geterr())]
    if (torch := sys.modules.get("torch")) is not None:
        modes += _of_torch(torch)
    jax = sys.modules.get("jax")
    given = _values(jax) if jax is not None else {}

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            # Entered only where they differ: each would be part of what JAX compiles for.
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
    # Of a kind alone: each replica has a device of its own, which it has selected.
    if (kind := torch.get_default_device().type) != "cpu":
        yield functools.partial(torch.device, kind)


def _values(jax: Any) -> dict[str, Any]:
    """Return the modes that JAX has in this thread."""
    return {name: getattr(jax.config, name) for name in _of_jax(jax)}


@functools.cache
def _of_jax(jax: ModuleType) -> dict[str, Callable[[Any], AbstractContextManager[Any]]]:
    """Return name in `jax.config` -> what sets it for a thread."""
    found = {}
    for name in jax.config.values:
        public = name.removeprefix("jax_")
        room = jax if hasattr(jax, public) else jax.experimental  # `enable_x64` before 0.8
        setter = getattr(room, public, None)
        # The guard stands for three others, which are there, too.
        if callable(setter) and name != "jax_transfer_guard":
            found[name] = setter
    return found
