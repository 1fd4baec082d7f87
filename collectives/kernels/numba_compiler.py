"""`compiled`: functions compiled by numba to cached object files.

`object_code` and `python_code` are for functions of addresses and numbers, which
`collectives.kernels.machine_code` keeps and loads without numba. The rest is about functions that
take arrays, and need numba to be called: `compiled` keeps them in files that many processes read
and write at the same time.

numba numbers the files of a function's variants (other dtypes, other functions in its closure) and
keeps the numbers in an index. Ranks that compile different variants at the same time take the same
number; the index then names one variant and the file holds the other, and every later process runs
the wrong code without an error. This has happened: bfloat16 numbers were rounded to float16.

Here there is no index. `collectives.kernels.code_cache` names a file by everything that a variant
is made from, writes it under another name, renames it, and checks that it is complete. If several
processes of a machine need a variant at the same time, one compiles it and the others load its file
(`compile_lock`).

The code of a function has a *symbol* by which other code finds it: the function's qualified name,
the types of its arguments, and a number. numba counts 1, 2 ... in each process, so that files of
two processes define one symbol with other code wherever a function exists in variants; a process
that loads both runs the first for either. This has happened, too: sums in bfloat16 ran the code of
float16. Importing this module therefore makes numba draw its numbers at random (`_number`), in the
whole process, since a loop contains functions that others have made. What numba has compiled before
that has a small number still, and code with such a function inside is not kept.

Importing this module loads numba (about 0.3 s), so import it inside the function that needs it. It
is public for `strategies`, and for loops of users.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
from numba import types
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps, loads

from collectives.core import compile_time
from collectives.kernels import code_cache, compile_lock, function_digest, intrinsics
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

# Part of each file's digest. 2: numbers in symbols are drawn at random. 3: a file holds only code.
_EDITION = 3

# Of the numbers in symbols. All that numba counts are smaller; among a million that are drawn, two
# are equal with a probability of 1e-17.
_NUMBER_BITS = 96
_SMALLEST_NUMBER = 1 << _NUMBER_BITS
_NUMBER = re.compile(r"B\d+v(\d+)B")  # in a symbol, between a length and the next tag


def _number() -> int:
    """Draw a number from the system, which gives others to a process and to its fork."""
    return _SMALLEST_NUMBER | secrets.randbits(_NUMBER_BITS)


# No generator, which two threads may not advance at once.
FunctionIdentity._unique_ids = iter(_number, None)  # type: ignore[assignment]


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
    cache = _cache_of(function, includes, options)
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
    made = CFunc(function, (signature.args, signature.return_type), {}, {"error_model": "numpy"})
    made.compile()
    module = llvm.parse_assembly(made.inspect_llvm())
    for defined in (*module.functions, *module.global_variables):
        if defined.name == made.native_name:
            defined.name = symbol
        elif not defined.is_declaration:
            defined.linkage = "internal"  # goes where nothing refers to it
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
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
    function: Callable[..., Any], includes: Iterable[str], options: Mapping[str, Any]
) -> _Cache | None:
    """Return the cache of a function; None where its source is unknown, or numba has changed."""
    try:
        return _Cache(function, includes, options)
    except (AttributeError, OSError, RuntimeError, TypeError) as error:
        log.info("compiled code of %s is not kept: %s", function.__qualname__, error)
        return None


class _SourceLocator:
    """Locates the source of a function for numba; `code_cache` chooses the folder of the code."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self._py_file = file
        self._line = function.__code__.co_firstlineno
        if Path(file).exists():
            self._stamp = code_cache.digest_of_files([file])
        else:  # a function of a notebook
            self._stamp = hashlib.sha256(inspect.getsource(function).encode()).digest()

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _SourceLocator:
        return cls(py_func, py_file)

    def get_cache_path(self) -> str:
        return str(code_cache.folders()[0])

    def ensure_cache_path(self) -> None:
        """Leave the folder to `code_cache`."""

    def get_source_stamp(self) -> bytes:
        return self._stamp

    def get_disambiguator(self) -> str:
        return str(self._line)


class _VariantFormat(CompileResultCacheImpl):
    """The form in which numba stores a compiled variant."""

    _locator_classes = [_SourceLocator]


class _Cache(FunctionCache):
    """The compiled variants of one function."""

    _impl_class = _VariantFormat

    def __init__(
        self, function: Callable[..., Any], includes: Iterable[str], options: Mapping[str, Any]
    ) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        sources = self._impl.locator.get_source_stamp() + code_cache.digest_of_files(includes)
        self._files = _VariantFiles(self._impl.filename_base, sources, sorted(options.items()))
        self._cache_file: Any = self._files
        self._under_way: list[ExitStack] = []  # compilations, each in the one before

    def in_turn(self, compile_variant: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Let one process of this machine compile a variant while others wait for its file.

        Args:
            compile_variant: the dispatcher's method, which asks this cache first.
        """

        @functools.wraps(compile_variant)
        def compile_in_turn(signature: Any) -> Any:
            # numba takes its lock, too; before the turn, so that threads wait for each other there.
            with global_compiler_lock, ExitStack() as turn_of_this:
                self._under_way.append(turn_of_this)
                try:
                    return compile_variant(signature)
                finally:
                    self._under_way.pop()

        return compile_in_turn

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Load a variant without what numba needs to compile one.

        numba would import all that it knows to compile (scipy.linalg, too) before it reads a file:
        0.35 s of 0.85 s that a rank computes from its start to the end of its first all-reduce.
        Code refers to functions that allocate, whether it calls them or not.
        """
        rtsys.initialize(context)
        found = self._load_overload(signature, context)  # type: ignore[no-untyped-call]
        if found is None and self._under_way:
            entry = self._files.entry(self._index_key(signature, context.codegen()))
            self._under_way[-1].enter_context(compile_time.measure())
            self._under_way[-1].enter_context(compile_lock.wait_or_lead(entry.description))
            # Another process may have made it meanwhile.
            found = self._load_overload(signature, context)  # type: ignore[no-untyped-call]
            if found is None:
                self._under_way[-1].enter_context(code_cache.announce_compiling())
        return found

    def save_overload(self, signature: Any, data: Any) -> None:
        """Keep a variant, unless another file may define its symbols."""
        numbers = map(int, _NUMBER.findall(data.library.get_llvm_str()))
        if min(numbers, default=0) < _SMALLEST_NUMBER:
            log.info("compiled code is not kept: %s contains older code of numba", self._name)
            return
        super().save_overload(signature, data)  # type: ignore[no-untyped-call]

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        """Describe a variant by its source, in place of numba's key."""
        digest = function_digest.digest_of_function(self._py_func, _pickle)
        return signature, codegen.magic_tuple(), digest


def _pickle(value: Any) -> bytes:
    try:
        pickled: bytes = dumps(value)  # type: ignore[no-untyped-call]
    except Exception:  # numba cannot compile it either, so it is not a constant of the code
        return type(value).__qualname__.encode()
    return pickled


class _VariantFiles:
    """The files of one function, each with one variant.

    Args:
        label: start of the files' names.
        sources: digest of the source files.
        options: options of `numba.njit`.
    """

    def __init__(self, label: str, sources: bytes, options: list[tuple[str, Any]]) -> None:
        self._label = label
        self._sources = sources
        self._options = options
        self._seen: dict[bytes, code_cache.CacheEntry] = {}

    def entry(self, key: Any) -> code_cache.CacheEntry:
        """Return the cache entry of a variant."""
        described = (_EDITION, self._label, self._sources, self._options, key)
        made_from = repr(described).encode()
        if made_from not in self._seen:
            self._seen[made_from] = code_cache.CacheEntry(self._label, "nbc", made_from)
        return self._seen[made_from]

    def save(self, key: Any, data: Any) -> None:
        """Write the file of a variant."""
        self.entry(key).write(dumps(data))  # type: ignore[no-untyped-call]

    def load(self, key: Any) -> Any:
        """Return the data of a variant; None if no file has it."""
        code = self.entry(key).read()
        return None if code is None else loads(code)

    def flush(self) -> None:
        """Remove the files of the variants that this process has loaded or compiled."""
        for entry in self._seen.values():
            entry.remove()
