"""Position-independent object files of compiled functions, loaded without numba.

What every rank needs at its first calls, the rounds of its node and loops over elements, is few
functions of plain addresses and numbers. numba compiles each of them once on a machine; what comes
out stands alone, so that later processes only have it linked by LLVM: two ranks that start, sum and
end take 0.75 s of processor time, mpirun included, and 1.65 s where each of them imports numba.

A function is named by a module and words: `module.make(symbol, *words)` returns an object file in
which the function is `symbol`. That module imports numba, and is imported only to compile.

`collectives.kernels.code_cache` keeps the files. The code depends on the source of all files in the
module's folder and in this one. One rank of each machine compiles while the other ranks wait for it
(`collectives.kernels.compile_lock`). On a shared file system several machines write the same bytes.
"""

from __future__ import annotations

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

from collectives.core import compile_time
from collectives.kernels import code_cache, compile_lock

__all__ = ["KNOWN_SYMBOLS", "compile_ahead", "ensure", "function", "is_kept", "load"]

# How Python calls what `numba_compiler.python_code` makes.
_OF_PYTHON = (
    "PyLong_AsLongLong",
    "PyLong_FromLongLong",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
)

# What code may refer to: a process without numba has it.
KNOWN_SYMBOLS = frozenset((*_OF_PYTHON, "clock_gettime", "sched_yield"))

_lock = threading.Lock()
_addresses: dict[tuple[str, ...], int] = {}
_made: dict[tuple[str, ...], bytes] = {}  # by this process, and not yet loaded
_place: list[socket.socket] = []  # of this process among those that make code
os.register_at_fork(after_in_child=_place.clear)  # the parent's


def load(module: str, *words: str) -> int:
    """Return the address of a function, which stays there as long as the process lives.

    Args:
        module: the module whose `make` compiles it, where no file has it.
        words: which of its functions.
    """
    name = (module, *words)
    with _lock:
        if name not in _addresses:
            with compile_time.measure():
                _addresses[name] = _load(name)
        return _addresses[name]


def ensure(names: Sequence[tuple[str, ...]]) -> None:
    """Make, of functions that this process will load, those that no file has and nobody makes yet.

    Ranks that need the same functions at the same moment so make one each, where they would wait
    for the first one in turn. As many do as the machine has cores, and it is always the same ones:
    each has to load numba first.

    Args:
        names: the arguments of `load`, of each function.
    """
    with _lock:
        missing = [name for name in names if name not in _addresses and name not in _made]
        codes = {name: code for name in missing if (code := _Code(name)).read() is None}
        # Of a single one: who loads it makes it.
        if len(codes) < 2 or not _makes_code(next(iter(codes.values())).where):
            return
        with compile_time.measure():
            for name, code in codes.items():
                with compile_lock.wait_or_lead(code.described, 0.0) as is_first:
                    if is_first and code.read() is None:
                        _made[name] = code.make()


def _makes_code(where: str) -> bool:
    """Tell whether this process has one of the places of those that make code; it keeps it.

    Args:
        where: others that make code there are counted.
    """
    if (
        not _place
        and (free := compile_lock.claim_slot(f"makes code {where}", os.cpu_count() or 1))
        is not None
    ):
        _place.append(free)
    return bool(_place)


def is_kept(module: str, *words: str) -> bool:
    """Tell whether a file has a function; arguments as `load`."""
    return _Code((module, *words)).read() is not None


# The ranks have priority, but a rank that needs the code waits for it: not the lowest priority.
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
    """Start a process that compiles the functions that no file has; once in a process.

    Surviving ranks may need a kind of call that they have not made yet: arrays that four ranks
    reduce in one round are reduced piece by piece by two. With an empty cache that compilation
    takes 2 s of a core (10 s when four ranks shared two cores with other programs), during which
    no rank trains. The caller does not wait for the process; if it fails, the code is compiled
    where it is needed.

    Args:
        module: as `load`.
        kinds: the only word of each function.

    Returns:
        The process; None if all functions have files, or no process can be started.
    """
    names = [(module, kind) for kind in kinds if not is_kept(module, kind)]
    if not names:
        return None
    # The process finds the package where this one has found it.
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
    """Return a function of so many arguments as a function of Python.

    It has been made by `numba_compiler.python_code`, or as Python's own are in C. A call takes
    0.09 us, of numba's dispatcher 0.3, of ctypes 0.45. Other arguments as `load`.
    """
    name = words[-1].encode()
    how = _ONE_ARGUMENT if arguments == 1 else _ARRAY_OF_ARGUMENTS
    definition = _Definition(name, load(module, *words), how, None)
    _definitions.append(definition)
    made: Callable[..., int] = _new_builtin(ctypes.byref(definition), None, None)
    return made


class _Definition(ctypes.Structure):
    """What Python knows of a function in C (PyMethodDef)."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("code", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_ONE_ARGUMENT, _ARRAY_OF_ARGUMENTS = 0x0008, 0x0080  # METH_O, METH_FASTCALL
_definitions: list[_Definition] = []  # read at each call
_new_builtin = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.POINTER(_Definition), ctypes.c_void_p, ctypes.c_void_p
)(("PyCFunction_NewEx", ctypes.pythonapi))


def _load(name: tuple[str, ...]) -> int:
    code = _Code(name)
    content = _made.pop(name, None) or code.read()
    if content is None:
        with compile_lock.wait_or_lead(code.described):
            # Another process may have made it meanwhile.
            content = code.read() or code.make()
    import llvmlite.binding as llvm

    linker = _linker()
    linker.add_object_file(llvm.ObjectFileRef.from_data(content))
    linker.finalize_object()
    found: int = linker.get_function_address(code.symbol)
    return found


@functools.cache
def _linker() -> Any:
    import llvmlite.binding as llvm

    for symbol in _OF_PYTHON:
        in_c = ctypes.cast(getattr(ctypes.pythonapi, symbol), ctypes.c_void_p)
        llvm.add_symbol(symbol, in_c.value)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


class _Code:
    """The object file of a function.

    Args:
        name: its module and words.

    Attributes:
        symbol: its name in an object file.
    """

    def __init__(self, name: tuple[str, ...]) -> None:
        self._module, self._words = name[0], name[1:]
        self.symbol = f"unisono_{hashlib.sha256(repr(name).encode()).hexdigest()[:16]}"
        label = ".".join((name[0].rpartition(".")[2], *name[1:]))
        self._entry = code_cache.CacheEntry(label, "o", repr(name).encode() + _source(name[0]))

    def read(self) -> bytes | None:
        """Return the object file; None if no folder has it."""
        return self._entry.read()

    def make(self) -> bytes:
        """Compile the object file, and keep it where that is possible."""
        with code_cache.announce_compiling():
            code: bytes = importlib.import_module(self._module).make(self.symbol, *self._words)
        self._entry.write(code)
        return code

    @property
    def described(self) -> str:
        """What this is made from and where it is kept, for others who need the same."""
        return self._entry.description

    @property
    def where(self) -> str:
        """What it has in common with the other functions of its package in this job."""
        return str([str(folder) for folder in (_folder(self._module), *code_cache.folders())])


@functools.cache
def _source(module: str) -> bytes:
    """Return a digest of the text that code of a module is made from."""
    return code_cache.digest_of_files(_folder(module).glob("*.py"))


@functools.cache
def _folder(module: str) -> Path:
    found = importlib.util.find_spec(module)
    assert found is not None
    return Path(str(found.origin)).parent
