"""Position-independent object files of compiled functions, loaded without numba.

The first calls of every rank need the node's kernels and element-wise loops: few functions of plain
addresses and numbers. numba compiles each of them once on a machine. The object files need no
library, so later processes only link them by LLVM: two ranks that start, sum and exit take 0.75 s
of processor time, mpirun included, and 1.65 s if each of them imports numba.

A function is named by a module and words: `module.make(symbol, *words)` returns an object file that
defines the function as `symbol`. That module imports numba, and is imported only to compile.

`collectives.kernels.code_cache` keeps the files. The code depends on the source of all files in the
module's folder and in this one. One rank of each machine compiles while the other ranks wait for it
(`collectives.kernels.compile_lock`). On a shared file system several machines write the same bytes.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from collectives.arrays.dtypes import NUMBERS
from collectives.core import compile_time
from collectives.core.errors import counted
from collectives.core.process_hooks import in_child
from collectives.kernels import code_cache, compile_lock, prebuilt

__all__ = [
    "KNOWN_SYMBOLS", "Code", "bound_address", "bound_function", "compile_ahead", "ensure",
    "function", "is_kept", "load", "origins", "procedure",
]  # fmt: skip

# Functions by which code of `numba_compiler.python_code` uses Python.
_OF_PYTHON = (
    "PyLong_AsLongLong",
    "PyLong_FromLongLong",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
    "PyErr_Clear",
    "PyFrame_GetBack",
    "PyFrame_GetCode",
    "PyThread_get_thread_ident",
    "Py_DecRef",
    "Py_IncRef",
)

# Functions of the C library's libm: square roots that no instruction handles, and functions that
# operations of the user may call.
_OF_LIBM = tuple(
    name + suffix
    for name in (
        *("sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "hypot", "fmod"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh"),
        *("floor", "ceil", "trunc", "rint", "round", "fma", "ldexp", "frexp", "copysign"),
    )
    for suffix in ("", "f")
)

# Symbols that code may refer to, because a process without numba has them.
KNOWN_SYMBOLS = frozenset((*_OF_PYTHON, *_OF_LIBM, "clock_gettime", "sched_yield"))

_lock = threading.Lock()
_addresses: dict[tuple[str, ...], int] = {}
_origins: dict[tuple[str, ...], str] = {}
_made: dict[tuple[str, ...], bytes] = {}  # compiled by this process, and not yet loaded
_place: list[socket.socket] = []  # slot of this process among those that may compile
in_child(_place.clear)  # the slot stays with the parent


def load(module: str, *words: str) -> int:
    """Return the address of a function, which is valid for the life of the process.

    Args:
        module: module whose `make` compiles the function if no file has it.
        words: name of the function in the module.
    """
    name = (module, *words)
    # One lock for all: loading is rare, and LLVM's linker is not thread-safe.
    with _lock:
        if name not in _addresses:
            # Deadlines do not count this time, because no rank is late.
            with compile_time.measure():
                _addresses[name] = _load(name)
        return _addresses[name]


def origins() -> dict[str, int]:
    """Return how many functions this process has loaded, by the origin of their code."""
    with _lock:
        return dict(collections.Counter(_origins.values()))


def ensure(names: Sequence[tuple[str, ...]]) -> None:
    """Compile those functions that are not cached and that no other process compiles now.

    So ranks that need the same functions at the same moment compile one each, instead of waiting
    for the first rank in turn. As many processes compile as the machine has cores, always the same
    ones, because each has to load numba first.

    Args:
        names: arguments of `load` for each function.
    """
    # Other threads wait here, and then find the functions.
    with _lock:
        missing = [name for name in names if name not in _addresses and name not in _made]
        codes = {name: code for name in missing if (code := Code(name)).read() is None}
        # A single function is compiled by the process that loads it first.
        if len(codes) < 2 or not _makes_code(next(iter(codes.values())).where):
            return
        with compile_time.measure():
            for name, code in codes.items():
                # 0 seconds: a function that another process compiles is left to it.
                with compile_lock.wait_or_lead(code.described, 0.0) as is_first:
                    # Read again, because another process may have finished meanwhile.
                    if is_first and code.read() is None:
                        _made[name] = code.make(_described(list(codes)))


# As words of functions name them.
_DTYPES = frozenset(dtype.name for dtype in NUMBERS)


def _described(names: Sequence[tuple[str, ...]]) -> str:
    """Describe functions, such as "3 loops for bfloat16"."""
    dtypes = sorted({word for name in names for word in name[1:]} & _DTYPES)
    return " for ".join(filter(None, (counted(len(names), "loop"), ", ".join(dtypes))))


def _makes_code(where: str) -> bool:
    """Return whether this process holds one of the slots for compiling; the slot is kept.

    Args:
        where: processes with the same value share the slots.
    """
    if (
        not _place
        and (free := compile_lock.claim_slot(f"makes code {where}", os.cpu_count() or 1))
        is not None
    ):
        _place.append(free)
    return bool(_place)


def is_kept(module: str, *words: str) -> bool:
    """Return whether a file has a function; arguments as `load`."""
    return Code((module, *words)).read() is not None


# The ranks have priority, but not by the lowest niceness, because a rank may wait for the code.
_AHEAD_NICE = 5

_AHEAD_PROGRAM = """
import os, sys
os.nice({nice})
from collectives.kernels import machine_code
for name in {names}:
    machine_code.load(*name)
"""


@functools.cache
def compile_ahead(module: str, *kinds: str) -> subprocess.Popen[bytes] | None:
    """Start a process that compiles the functions without a file; once per process.

    After a failure the surviving ranks may need kernels that they have not used yet: four ranks
    reduce in one round what two ranks reduce piece by piece. With an empty cache, compiling takes
    2 s of a core (10 s when four ranks shared two cores with other programs), during which no rank
    trains. The caller does not wait for the process. If it fails, the code is compiled on demand.

    Args:
        module: as `load`.
        kinds: the only word of each function.

    Returns:
        the process; None if all functions have files, or no process can be started.
    """
    names = [(module, kind) for kind in kinds if not is_kept(module, kind)]
    if not names:
        return None
    # The process must import the same package.
    # The child does not see changes of `sys.path`.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _AHEAD_PROGRAM.format(nice=_AHEAD_NICE, names=names)],
            env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError:
        return None


@functools.cache
def function(module: str, *words: str, arguments: int = 1) -> Callable[..., int]:
    """Return a Python callable of a function with 1 or 3 numbers as arguments.

    `numba_compiler.python_code` has compiled it. A call takes 0.09 us; numba's dispatcher takes
    0.3, ctypes 0.45. Further arguments as `load`.
    """
    how = _ONE_ARGUMENT if arguments == 1 else _ARRAY_OF_ARGUMENTS
    made: Callable[..., int] = _new_builtin(
        ctypes.byref(_definition(how, module, *words)), None, None
    )
    return made


def bound_function(owner: object, module: str, *words: str) -> Callable[..., Any]:
    """Return a Python callable of a METH_FASTCALL function of any number of objects.

    Args:
        owner: first argument of the function; kept alive.
        module: as for `load`.
        words: as for `load`.
    """
    definition = _definition(_ARRAY_OF_ARGUMENTS, module, *words)
    made: Callable[..., Any] = _new_builtin(ctypes.byref(definition), owner, None)
    return made


def bound_address(first: int, module: str, *words: str) -> int:
    """Return the address of a C function of one word that calls a function of two words.

    For C interfaces that pass no pointer of the caller.

    Args:
        first: first argument of the function.
        module: as for `load`.
        words: as for `load`.
    """
    target = load(module, *words)
    from llvmlite import binding, ir

    word = ir.IntType(64)
    made = ir.Module()
    symbol = f"unisono_bound_{target:x}_{first:x}"
    bound = ir.Function(made, ir.FunctionType(word, [word]), symbol)
    builder = ir.IRBuilder(bound.append_basic_block())
    kind = ir.FunctionType(word, [word, word]).as_pointer()
    code = builder.inttoptr(ir.Constant(word, target), kind)
    builder.ret(builder.call(code, [ir.Constant(word, first), bound.args[0]]))
    with _lock:
        linker = _linker()
        linker.add_module(binding.parse_assembly(str(made)))
        linker.finalize_object()
        found: int = linker.get_function_address(symbol)
    return found


@functools.cache
def procedure(module: str, *words: str, arguments: int) -> Callable[..., None]:
    """Return a Python callable of a function without a result; a call releases the GIL.

    All arguments are 64-bit integers: addresses and counts. Further arguments as `load`.
    """
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)(load(module, *words))


class _Definition(ctypes.Structure):
    """Description of a C function for Python (PyMethodDef)."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("code", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_ONE_ARGUMENT, _ARRAY_OF_ARGUMENTS = 0x0008, 0x0080  # METH_O, METH_FASTCALL
_new_builtin = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.POINTER(_Definition), ctypes.py_object, ctypes.c_void_p
)(("PyCFunction_NewEx", ctypes.pythonapi))


# Kept alive, because each call reads its own.
_definitions: dict[tuple[str, ...], _Definition] = {}


def _definition(how: int, module: str, *words: str) -> _Definition:
    # Python shows the name in errors.
    made = _Definition(words[-1].encode(), load(module, *words), how, None)
    return _definitions.setdefault((module, *words), made)  # atomic, as two threads may ask


def _load(name: tuple[str, ...]) -> int:
    code = Code(name)
    # This process may have compiled it in `ensure`.
    content = _made.pop(name, None) or code.read()
    if content is None:
        with compile_lock.wait_or_lead(code.described):
            # Another process may have compiled it meanwhile.
            content = code.read() or code.make(_described([name]))
    _origins[name] = code.origin
    import llvmlite.binding as llvm

    linker = _linker()
    linker.add_object_file(llvm.ObjectFileRef.from_data(content))
    # Finalizing makes the memory executable.
    linker.finalize_object()
    found: int = linker.get_function_address(code.symbol)
    return found


@functools.cache
def _linker() -> Any:
    import llvmlite.binding as llvm

    # Named to LLVM, which otherwise finds only symbols that the interpreter exports.
    libm = ctypes.CDLL("libm.so.6")
    for library, symbols in ((ctypes.pythonapi, _OF_PYTHON), (libm, _OF_LIBM)):
        for symbol in symbols:
            in_c = ctypes.cast(getattr(library, symbol), ctypes.c_void_p)
            llvm.add_symbol(symbol, in_c.value)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # `jit=True`: code model and relocations for memory anywhere.
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


class Code:
    """The object file of a function.

    Args:
        name: module and words of the function.

    Attributes:
        symbol: name of the function in the object file.
        prebuilt: name of the object file in an archive of `collectives.kernels.prebuilt`.
        origin: where `read` has found the code: "package (LEVEL)" or "cache"; else "compiler".
    """

    def __init__(self, name: tuple[str, ...]) -> None:
        self._module, self._words = name[0], name[1:]
        # A hash, because words of names may not be valid symbols.
        self.symbol = f"unisono_{hashlib.sha256(repr(name).encode()).hexdigest()[:16]}"
        label = ".".join((name[0].rpartition(".")[2], *name[1:]))
        # The source of the module's folder, because kernels inline functions of their neighbours.
        made_from = repr(name).encode() + _source(name[0])
        self.prebuilt = prebuilt.member_name(label, made_from + _source(__name__))
        self._kept_as = label, "o", made_from
        self.origin = "compiler"

    @functools.cached_property
    def _entry(self) -> code_cache.CacheEntry:
        # Only without prebuilt code, because its name contains the version of numba.
        return code_cache.CacheEntry(*self._kept_as)

    def read(self) -> bytes | None:
        """Return the object file; None if neither the package nor a folder has it."""
        found = prebuilt.read(self.prebuilt)
        if found is not None:
            self.origin = f"package ({found.level})"
            return found.code
        kept = self._entry.read()
        if kept is not None:
            self.origin = "cache"
        return kept

    def make(self, announced_as: str) -> bytes:
        """Compile the object file, and cache it if possible; announced after 2 s."""
        with code_cache.announce_compiling(announced_as):
            code = self.compile()
        self._entry.write(code)
        return code

    def compile(self) -> bytes:
        """Compile the object file for the processor that numba compiles for.

        Raises:
            ImportError: numba is not installed.
        """
        # Imported here, because the module loads numba.
        code: bytes = importlib.import_module(self._module).make(self.symbol, *self._words)
        return code

    @property
    def described(self) -> str:
        """Identity of the code and its cache, equal in all processes that need the same code."""
        return self._entry.description

    @property
    def where(self) -> str:
        """Folder of the source and of the cache, equal for all functions of a package in a job."""
        return str([str(folder) for folder in (_folder(self._module), *code_cache.folders())])


@functools.cache
def _source(module: str) -> bytes:
    """Return a digest of the sources that a module's code depends on."""
    return code_cache.digest_of_files(_folder(module).glob("*.py"))


@functools.cache
def _folder(module: str) -> Path:
    # Without importing the module, which would load numba.
    found = importlib.util.find_spec(module)
    assert found is not None
    return Path(str(found.origin)).parent
