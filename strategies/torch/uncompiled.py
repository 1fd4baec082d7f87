"""Methods that torch.compile carries out as they are written, with all that they call.

The C++ of PyTorch calls a process group in the middle of compiled programs, and its compiler would
take each frame of Python for a part of them: those of this library, too. `torch.compiler.disable`
would say so, but imports the compiler: 1 s in programs that compile nothing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import _C

__all__ = ["uncompiled"]

# By which name errors call what programs use; as in `strategies.averaging.optimizer`.
_KNOWN_AS = {"UnisonoGroup": "torch.distributed"}

R = TypeVar("R")
Class = TypeVar("Class", bound=type)


def uncompiled(kind: Class) -> Class:
    """Let the methods of a class run without a compiler; a frame lies between caller and method."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method):
            setattr(kind, name, _uncompiled(method))
    return kind


def _uncompiled(method: Callable[..., R]) -> Callable[..., R]:
    def run(self: Any, *args: Any, **kwargs: Any) -> R:
        compiler = _set_compiler(None)
        try:
            return method(self, *args, **kwargs)
        finally:
            _set_compiler(compiler)

    # Errors name the method that a program has called by its frame.
    run.__code__ = run.__code__.replace(co_name=method.__name__)
    _skip(run)
    return functools.wraps(method)(run)


def _nothing(_: Any) -> None:
    """Before PyTorch 2.6, or where the names below are gone."""


_set_compiler: Callable[[Any], Any] = _nothing
_skip: Callable[[Any], None] = _nothing
with contextlib.suppress(AttributeError):
    _frames: Any = _C._dynamo.eval_frame
    _SKIPPED = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
    _set_compiler = _frames.set_eval_frame

    def _skip_frames_of(function: Any) -> None:
        _frames.set_code_exec_strategy(function.__code__, _SKIPPED)

    _skip = _skip_frames_of
