"""Digest of a compiled function: its code, constants and callees.

numba's own key pickles what a function closes over, with an identity that each process draws at
random, and knows functions of other modules only by name. This digest is the same in all processes
and differs wherever the compiled code may differ.

Importing this module loads numba, so import it inside the function that needs it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import numpy as np
from numba import types
from numba.extending import is_jitted

from collectives.kernels.intrinsics import pointer

__all__ = ["digest_of_function"]

# The class of what `numba.extending.intrinsic` returns, for which numba has no public name.
_INTRINSIC = type(pointer)

# Types whose repr shows everything that compiled code can depend on.
_SHOWN_BY_REPR = (bool, int, float, complex, str, bytes, np.generic, np.dtype, types.Type)


def digest_of_function(function: Callable[..., Any], pickled: Callable[[Any], bytes]) -> str:
    """Return a digest of everything that the compiled code of a function is made from.

    Modules and the functions of numba count by their names only.

    Args:
        function: the function to compile.
        pickled: returns the bytes of a constant whose repr does not show all of it.
    """
    contents = list(_contents(function, {}, pickled))
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def _contents(
    value: Any, seen: dict[FunctionType, int], pickled: Callable[[Any], bytes]
) -> Iterator[Any]:
    """Describe a function and all that it calls, or another value that becomes a constant.

    Args:
        value: the function or constant.
        seen: functions that are described already, with their numbers.
        pickled: as for `digest_of_function`.
    """
    if is_jitted(value):
        yield sorted(value.targetoptions.items()), sorted(value.locals.items())
        value = value.py_func
    elif isinstance(value, _INTRINSIC):
        # Without that attribute its pickle serves, which differs in each process: code is then
        # compiled in each.
        value = getattr(value, "__wrapped__", value)
    if isinstance(value, FunctionType):
        if (value.__module__ or "").startswith("numba."):
            yield value.__module__, value.__qualname__
        elif value in seen:
            yield seen[value]
        else:
            seen[value] = len(seen)
            yield _instructions(value.__code__)
            yield from _contents(value.__defaults__, seen, pickled)
            variables = {**value.__globals__, **inspect.getclosurevars(value).nonlocals}
            for name in sorted(_names(value.__code__) & variables.keys()):
                yield name
                yield from _contents(variables[name], seen, pickled)
    elif isinstance(value, tuple | list):
        yield type(value).__name__, getattr(value, "_fields", len(value))
        for element in value:
            yield from _contents(element, seen, pickled)
    elif isinstance(value, _SHOWN_BY_REPR):
        yield repr(value)
    else:
        yield pickled(value)


def _names(code: CodeType) -> set[str]:
    """Return the names that a function and its inner functions may read from outside."""
    inner = [_names(c) for c in code.co_consts if isinstance(c, CodeType)]
    return {*code.co_names, *code.co_freevars}.union(*inner)


def _instructions(code: CodeType) -> tuple[Any, ...]:
    inner = [_instructions(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    # Names of arguments, because calls may pass them by name.
    return code.co_code, code.co_names, code.co_varnames[: code.co_argcount], inner
