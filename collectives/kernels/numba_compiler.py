"""`compiled`: functions compiled by numba to cached object files.

`object_code` and `python_code` compile functions of addresses and numbers, which
`collectives.kernels.machine_code` caches and loads without numba. `compiled` is for functions that
take arrays and need numba to be called. It caches them in files that many processes read and write
at the same time (`collectives.kernels.numba_cache`).

Importing this module loads numba (about 0.3 s), so import it inside the function that needs it. It
is public for `strategies`, and for loops of your own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from collectives.kernels.code_cache import NO_NUMBA

try:
    import numba
except ModuleNotFoundError as error:
    raise ImportError(NO_NUMBA) from error
import llvmlite.binding as llvm
from numba import types

from collectives.kernels import intrinsics
from collectives.kernels.intrinsics import load, pointer
from collectives.kernels.machine_code import KNOWN_SYMBOLS

__all__ = [
    "CrossTarget",
    "canonical_nans",
    "compiled",
    "cross_target",
    "from_number",
    "object_code",
    "pointer",
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
    """Compile as `numba.njit` does, and cache the code on disk if possible.

    Args:
        function: the function to compile.
        signature: argument types; None compiles at the first call with new types.
        includes: source files of other functions that become part of the code. A change in one of
            them recompiles the function, as does a change in its own file.
        options: options of `numba.njit`, except `cache`.

    Returns:
        the compiled function.

    Example:
        >>> def double(x):
        ...     return 2 * x
        >>> compiled(double, nogil=True)(21)
        42
    """
    dispatcher: Any = numba.njit(**options)(function)
    # None: the function works, but is compiled in each process.
    cache = _cache_of(dispatcher, includes, options)
    if cache is not None:
        # numba asks this cache instead of its own.
        dispatcher._cache = cache
        dispatcher.compile = cache.in_turn(dispatcher.compile)
    if signature is not None:
        dispatcher.compile(signature)
        # No other types: such a call is an error instead of a compilation.
        dispatcher.disable_compile()
    result: Callable[..., Any] = dispatcher
    return result


class CrossTarget(NamedTuple):
    """A processor of another family, for which `object_code` compiles.

    Attributes:
        triple: LLVM's name of family, vendor and system.
        cpu: LLVM's name of the processor.
        features: its features, as LLVM takes them.
        translate: replaces instructions of this machine's family in LLVM's text.
    """

    triple: str
    cpu: str
    features: str
    translate: Callable[[str], str]


cross_target: CrossTarget | None = None
"""Set by `collectives.tools.prebuild`; None compiles for the processor of numba."""


def object_code(function: Callable[..., Any], signature: Any, symbol: str) -> bytes:
    """Compile a function of addresses and numbers to an object file without dependencies.

    Args:
        function: the function to compile. It must not raise; a division by zero is undefined.
        signature: C types of arguments and result.
        symbol: name of the function in the object file.

    Raises:
        RuntimeError: the code refers to symbols that a process without numba lacks.
    """
    # numba's default error model checks each division, and such loops are not vectorised.
    made: Any = numba.cfunc(signature, error_model="numpy")(function)
    # Parsed from text, so that symbols can be renamed.
    module = llvm.parse_assembly(made.inspect_llvm())
    for defined in (*module.functions, *module.global_variables):
        if defined.name == made.native_name:
            defined.name = symbol
        elif not defined.is_declaration:
            defined.linkage = "internal"  # lets LLVM remove it if nothing refers to it
    machine = _machine(*intrinsics.target_processor())
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options())
    passes = llvm.create_new_module_pass_manager()
    passes.add_ipsccp_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, builder)
    # References that remain after the passes.
    values = (*module.functions, *module.global_variables)
    outside = {value.name for value in values if value.is_declaration} - KNOWN_SYMBOLS
    unknown = sorted(name for name in outside if not name.startswith("llvm."))
    if unknown:
        raise RuntimeError(
            f"{function.__name__}: compiled code has unresolved symbols, expected only "
            f"{', '.join(sorted(KNOWN_SYMBOLS))}, got {', '.join(unknown)}"
        )
    if cross_target is not None:
        # After the passes, which have removed numba's own functions.
        module = llvm.parse_assembly(cross_target.translate(str(module)))
        machine = _machine(cross_target.triple, cross_target.cpu, cross_target.features)
        module.triple, module.data_layout = cross_target.triple, str(machine.target_data)
    code: bytes = machine.emit_object(module)
    return code


def _machine(triple: str, cpu: str, features: str) -> Any:
    target = llvm.Target.from_triple(triple)
    # The level at which loops are vectorised.
    return target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)


def python_code(function: Callable[..., int], symbol: str, arguments: int = 1) -> bytes:
    """Compile a function of `arguments` numbers, 1 or 3, for `machine_code.function`.

    It releases the GIL. The other arguments are those of `object_code`.
    """
    # A function of its own, which must not touch Python objects.
    inner: Callable[..., Any] = numba.njit(function)
    if arguments == 3:

        def called_with_three(module: Any, given: Any, count: Any) -> Any:
            first = to_number(_object(_argument(given)))
            # One argument leaves the other two at 0.
            second, third = 0, 0
            if count == 3:
                second = to_number(_object(_argument(given + 8)))
                third = to_number(_object(_argument(given + 16)))
            # Without the GIL, because a kernel may wait for other ranks.
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
    """Return the cache of a function; None if its source is unknown, or numba is unsuitable."""
    if VariantCache is None:
        return None
    try:
        return VariantCache(dispatcher, includes, options)
    except (AttributeError, OSError, RuntimeError, TypeError) as error:
        # Each of these means only that the code is not cached.
        name = dispatcher.py_func.__qualname__
        log.info("compiled code of %s is not kept: %s", name, error)
        return None
