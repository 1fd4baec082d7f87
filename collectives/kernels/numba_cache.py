"""Disk cache of numba functions that take arrays: files as numba writes them, without its index.

numba numbers the files of a function's variants (other dtypes, other functions in its closure) and
keeps the numbers in an index. Ranks that compile different variants at the same time use the same
number. The index then names one variant and the file holds the other, and every later process runs
the wrong code without an error. This has happened: bfloat16 numbers were rounded to float16.

This cache has no index. `collectives.kernels.code_cache` names a file by everything that determines
a variant, writes it under a temporary name, renames it, and checks that it is complete. If several
processes of a machine need a variant at the same time, one compiles it and the others load its file
(`compile_lock`).

Other code finds a function by its *symbol*: the qualified name, the types of the arguments, and a
number. numba counts 1, 2 ... in each process. So for a function with variants, files of two
processes define one symbol with different code, and a process that loads both runs the first for
either. This has also happened: sums in bfloat16 ran the code of float16. So importing this module
makes numba draw random numbers (`_number`), in the whole process, because a loop contains functions
of other modules. Functions that numba compiled before have small numbers, and code that contains
one is not cached.

numba has no public names for any of this. If a version lacks one, this module cannot be imported,
or `VariantCache` raises AttributeError; `collectives.kernels.numba_compiler` then caches nothing.
If a version takes its numbers from elsewhere they are small, and the code is not cached.
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

from numba.core.bytecode import FunctionIdentity
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps, loads

from collectives.core import compile_time
from collectives.kernels import code_cache, compile_lock, function_digest

__all__ = ["VariantCache"]

log = logging.getLogger(__name__)

# Part of each file's digest. 2: numbers in symbols are drawn at random. 3: a file holds only code.
_EDITION = 3

# Bits of the numbers in symbols. All numbers that numba counts are smaller; among a million random
# ones, two are equal with a probability of 1e-17.
_NUMBER_BITS = 96
_SMALLEST_NUMBER = 1 << _NUMBER_BITS
_NUMBER = re.compile(r"B\d+v(\d+)B")  # in a symbol, between a length and the next tag


def _number() -> int:
    """Return a random number from the system, which differs between a process and its fork."""
    # Above all numbers that numba counts itself.
    return _SMALLEST_NUMBER | secrets.randbits(_NUMBER_BITS)


# Not a generator, because two threads may not advance one at once.
FunctionIdentity._unique_ids = iter(_number, None)  # type: ignore[assignment]


def _require(owner: object, *names: str) -> None:
    """Raise AttributeError unless an object of numba has these attributes."""
    # Now, because a missing attribute must be found before code is stored wrongly.
    for name in names:
        getattr(owner, name)


class _SourceLocator:
    """Locates the source of a function for numba; `code_cache` chooses the folder of the code."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self._py_file = file
        self._line = function.__code__.co_firstlineno
        # Source files count by content, so that a copy of the package finds the same code.
        if Path(file).exists():
            self._stamp = code_cache.digest_of_files([file])
        else:  # a function in a notebook
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
    """The format in which numba stores a compiled variant."""

    _locator_classes = [_SourceLocator]


class VariantCache(FunctionCache):
    """The compiled variants of one function.

    Args:
        dispatcher: the function, as `numba.njit` returns it.
        includes: source files of other functions that become part of the code.
        options: options of `numba.njit`.

    Raises:
        AttributeError: this numba lacks a private attribute that this class replaces or calls.
        OSError: the source of the function is unknown.
    """

    _impl_class = _VariantFormat

    def __init__(
        self, dispatcher: Any, includes: Iterable[str], options: Mapping[str, Any]
    ) -> None:
        _require(FunctionCache, "_index_key", "_load_overload", "load_overload", "save_overload")
        _require(CompileResultCacheImpl, "_locator_classes", "filename_base", "locator")
        _require(dispatcher, "_cache", "compile", "locals", "targetoptions")
        _require(rtsys, "initialize")
        # numba's constructor finds the locator above.
        super().__init__(dispatcher.py_func)  # type: ignore[no-untyped-call]
        _require(self, "_cache_file", "_impl", "_name", "_py_func")
        # A change in an included function must recompile this one.
        sources = self._impl.locator.get_source_stamp() + code_cache.digest_of_files(includes)
        self._files = _VariantFiles(self._impl.filename_base, sources, sorted(options.items()))
        self._cache_file: Any = self._files
        self._under_way: list[ExitStack] = []  # running compilations, each nested in the one before

    def in_turn(self, compile_variant: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Let one process of this machine compile a variant while others wait for its file.

        Args:
            compile_variant: the dispatcher's method, which asks this cache first.
        """

        @functools.wraps(compile_variant)
        def compile_in_turn(signature: Any) -> Any:
            # numba also takes its lock. Taking it first makes threads of a process wait there.
            with global_compiler_lock, ExitStack() as turn_of_this:
                self._under_way.append(turn_of_this)
                try:
                    return compile_variant(signature)
                finally:
                    self._under_way.pop()

        return compile_in_turn

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Load a variant without the imports that numba needs to compile.

        numba would first import its whole compiler, and scipy.linalg: 0.35 s of the 0.85 s that a
        rank computes until the end of its first all-reduce. `rtsys` is initialized, because code
        refers to allocating functions even if it does not call them.
        """
        # Code of a file may call numba's runtime, which `compile` would initialize.
        rtsys.initialize(context)
        found = self._load_overload(signature, context)  # type: ignore[no-untyped-call]
        # Outside of a compilation nothing is to be compiled.
        if found is None and self._under_way:
            entry = self._files.entry(self._index_key(signature, context.codegen()))
            # Entered into the stack of the compilation, so that both end with it.
            self._under_way[-1].enter_context(compile_time.measure())
            self._under_way[-1].enter_context(compile_lock.wait_or_lead(entry.description))
            # Another process may have compiled it meanwhile.
            found = self._load_overload(signature, context)  # type: ignore[no-untyped-call]
            if found is None:
                # Only this process compiles, so only it logs that.
                self._under_way[-1].enter_context(
                    code_cache.announce_compiling(self._py_func.__qualname__)
                )
        return found

    def save_overload(self, signature: Any, data: Any) -> None:
        """Cache a variant, unless another file may define its symbols."""
        numbers = map(int, _NUMBER.findall(data.library.get_llvm_str()))
        # Symbols with small numbers may occur in files of other processes.
        if min(numbers, default=0) < _SMALLEST_NUMBER:
            log.info("compiled code is not kept: %s contains older code of numba", self._name)
            return
        super().save_overload(signature, data)  # type: ignore[no-untyped-call]

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        """Return a key of a variant by its source, instead of numba's key."""
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
        # Everything that determines the code, besides the toolchain (`code_cache`).
        described = (_EDITION, self._label, self._sources, self._options, key)
        made_from = repr(described).encode()
        if made_from not in self._seen:
            self._seen[made_from] = code_cache.CacheEntry(self._label, "nbc", made_from)
        return self._seen[made_from]

    def save(self, key: Any, data: Any) -> None:
        self.entry(key).write(dumps(data))  # type: ignore[no-untyped-call]

    def load(self, key: Any) -> Any:
        code = self.entry(key).read()
        return None if code is None else loads(code)

    def flush(self) -> None:
        """Remove the files of the variants that this process has loaded or compiled."""
        for entry in self._seen.values():
            entry.remove()
