"""Digest of a compiled function: its code, constants and callees.

numba's own key pickles a function's closure, with an identity that each process draws at random,
and identifies functions of other modules only by name. This digest is the same in all processes,
and differs whenever the compiled code may differ.

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

# Class of the results of `numba.extending.intrinsic`; numba has no public name for it.
_INTRINSIC = type(pointer)

# Types whose repr shows everything that compiled code can depend on.
_SHOWN_BY_REPR = (bool, int, float, complex, str, bytes, np.generic, np.dtype, types.Type)


def digest_of_function(function: Callable[..., Any], pickled: Callable[[Any], bytes]) -> str:
    """Return a digest of everything that determines the compiled code of a function.

    Modules, and functions of numba, count by name only.

    Args:
        function: the function to compile.
        pickled: returns the bytes of a constant that its repr does not determine.
    """
    contents = list(_contents(function, {}, pickled))
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def _contents(
    value: Any, seen: dict[FunctionType, int], pickled: Callable[[Any], bytes]
) -> Iterator[Any]:
    """Yield the contents of a function and its callees, or of another value that is a constant.

    Args:
        value: the function or constant.
        seen: functions that were yielded before, with their numbers.
        pickled: as for `digest_of_function`.
    """
    if is_jitted(value):
        yield sorted(value.targetoptions.items()), sorted(value.locals.items())
        # The Python function, whose code is compiled.
        value = value.py_func
    elif isinstance(value, _INTRINSIC):
        # Without that attribute its pickle is used, which differs in each process: then every
        # process compiles the code.
        value = getattr(value, "__wrapped__", value)
    # numba itself is named by its version (`code_cache`).
    if isinstance(value, FunctionType):
        if (value.__module__ or "").startswith("numba."):
            yield value.__module__, value.__qualname__
        elif value in seen:
            # A function that calls itself, directly or not.
            yield seen[value]
        else:
            seen[value] = len(seen)
            yield _instructions(value.__code__)
            # Default values are constants of the code.
            yield from _contents(value.__defaults__, seen, pickled)
            # All names that the code may read: numba inlines their values.
            variables = {**value.__globals__, **inspect.getclosurevars(value).nonlocals}
            for name in sorted(_names(value.__code__) & variables.keys()):
                yield name
                yield from _contents(variables[name], seen, pickled)
    elif isinstance(value, tuple | list):
        # Named tuples differ in their fields.
        yield type(value).__name__, getattr(value, "_fields", len(value))
        for element in value:
            yield from _contents(element, seen, pickled)
    elif isinstance(value, _SHOWN_BY_REPR):
        yield repr(value)
    else:
        # A pickle may differ between processes, which then compile again.
        yield pickled(value)


def _names(code: CodeType) -> set[str]:
    """Return the global and closure names that a function and its inner functions may read."""
    inner = [_names(c) for c in code.co_consts if isinstance(c, CodeType)]
    return {*code.co_names, *code.co_freevars}.union(*inner)


def _instructions(code: CodeType) -> tuple[Any, ...]:
    # `repr` of constants: 1 and 1.0 compile to other code.
    inner = [_instructions(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    # With the names of arguments, because calls may pass them by keyword.
    return code.co_code, code.co_names, code.co_varnames[: code.co_argcount], inner
