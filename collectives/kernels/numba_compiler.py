"""`compiled`: functions compiled by numba to cached object files.

`object_code` and `python_code` are for functions of addresses and numbers, which
`collectives.kernels.machine_code` keeps and loads without numba. The rest is about functions that
take arrays, and need numba to be called: `compiled` keeps them in files that many processes read
and write at the same time (`collectives.kernels.numba_cache`).

Importing this module loads numba (about 0.3 s), so import it inside the function that needs it. It
is public for `strategies`, and for loops of users.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import llvmlite.binding as llvm
import numba
from numba import types

from collectives.kernels import intrinsics
from collectives.kernels.intrinsics import load, pointer
from collectives.kernels.machine_code import KNOWN_SYMBOLS

__all__ = [
    "canonical_nans",
    "compiled",
    "from_number",
    "object_code",
    "python_code",
    "to_number",
]

log = logging.getLogger(__name__)

try:
    from collectives.kernels.numba_cache import VariantCache
except (AttributeError, ImportError) as error:  # numba has changed
    log.info("no compiled code is kept as numba keeps it: %s", error)
    VariantCache = None  # type: ignore[assignment,misc]


def compiled(
    function: Callable[..., Any],
    signature: Any = None,
    *,
    includes: Iterable[str] = (),
    **options: Any,
) -> Callable[..., Any]:
    """Compile as `numba.njit` does, and keep the code on disk where that is possible.

    Args:
        function: what to compile.
        signature: its types; None compiles at the first call with other types.
        includes: source files of other functions that become part of the code: when one of them
            changes, it is compiled anew, as when the function's own does.
        options: those of `numba.njit`, but for `cache`.

    Returns:
        The compiled function.

    Example:
        >>> def double(x):
        ...     return 2 * x
        >>> compiled(double, nogil=True)(21)
        42
    """
    dispatcher: Any = numba.njit(**options)(function)
    cache = _cache_of(dispatcher, includes, options)
    if cache is not None:
        dispatcher._cache = cache
        dispatcher.compile = cache.in_turn(dispatcher.compile)
    if signature is not None:
        dispatcher.compile(signature)
        dispatcher.disable_compile()
    result: Callable[..., Any] = dispatcher
    return result


def object_code(function: Callable[..., Any], signature: Any, symbol: str) -> bytes:
    """Compile a function of addresses and numbers to an object file that stands alone.

    Args:
        function: what to compile; it raises nothing, and a division by zero has any result.
        signature: its types in C.
        symbol: its name in the object file.

    Raises:
        RuntimeError: the code refers to what a process without numba has not.
    """
    # With Python's error model each division is checked, and no loop with one is vectorised.
    made: Any = numba.cfunc(signature, error_model="numpy")(function)
    module = llvm.parse_assembly(made.inspect_llvm())
    for defined in (*module.functions, *module.global_variables):
        if defined.name == made.native_name:
            defined.name = symbol
        elif not defined.is_declaration:
            defined.linkage = "internal"  # goes where nothing refers to it
    triple, cpu, features = intrinsics.target_processor()
    target = llvm.Target.from_triple(triple)
    machine = target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options())
    passes = llvm.create_new_module_pass_manager()
    passes.add_ipsccp_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, builder)
    values = (*module.functions, *module.global_variables)
    outside = {value.name for value in values if value.is_declaration} - KNOWN_SYMBOLS
    unknown = sorted(name for name in outside if not name.startswith("llvm."))
    if unknown:
        raise RuntimeError(
            f"{function.__name__}: the code does not stand alone, expected nothing but "
            f"{', '.join(sorted(KNOWN_SYMBOLS))}, got {', '.join(unknown)}"
        )
    code: bytes = machine.emit_object(module)
    return code


def python_code(function: Callable[..., int], symbol: str, arguments: int = 1) -> bytes:
    """Compile a function of so many numbers, 1 or 3, as `machine_code.function` needs it.

    Other threads of Python run meanwhile. The other arguments as `object_code`.
    """
    inner: Callable[..., Any] = numba.njit(function)
    if arguments == 3:

        def called_with_three(module: Any, given: Any, count: Any) -> Any:
            first = to_number(_object(_argument(given)))
            second, third = 0, 0
            if count == 3:
                second = to_number(_object(_argument(given + 8)))
                third = to_number(_object(_argument(given + 16)))
            thread = _let_others_run()
            result = inner(first, second, third)
            _go_on(thread)
            return from_number(result)

        words = types.int64(types.int64, types.int64, types.int64)
        return object_code(called_with_three, words, symbol)

    def called_by_python(module: Any, argument: Any) -> Any:
        number = to_number(argument)
        thread = _let_others_run()
        result = inner(number)
        _go_on(thread)
        return from_number(result)

    return object_code(called_by_python, _PYTHON_SIGNATURE, symbol)


_PYTHON_SIGNATURE = types.int64(types.voidptr, types.voidptr)
canonical_nans: Any = intrinsics.canonical_nans
_object: Any = pointer
_argument: Any = load
to_number: Any = types.ExternalFunction("PyLong_AsLongLong", types.int64(types.voidptr))
from_number: Any = types.ExternalFunction("PyLong_FromLongLong", types.int64(types.int64))
_let_others_run: Any = types.ExternalFunction("PyEval_SaveThread", types.voidptr())
_go_on: Any = types.ExternalFunction("PyEval_RestoreThread", types.void(types.voidptr))


def _cache_of(
    dispatcher: Any, includes: Iterable[str], options: Mapping[str, Any]
) -> VariantCache | None:
    """Return the cache of a function; None where its source is unknown, or numba has changed."""
    if VariantCache is None:
        return None
    try:
        return VariantCache(dispatcher, includes, options)
    except (AttributeError, OSError, RuntimeError, TypeError) as error:
        name = dispatcher.py_func.__qualname__
        log.info("compiled code of %s is not kept: %s", name, error)
        return None
