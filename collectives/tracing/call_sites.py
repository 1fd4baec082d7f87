"""Call sites: the user's line that made a call, outside of this package.

Errors, the flight recorder and the status board show it. A thread of either package that runs the
calls of another thread shows that thread's line.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from _thread import get_ident
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "CallOrigin", "Site", "attributed", "call_site", "caller", "calls_from", "current_origin",
    "depth_of", "known_as", "other_thread_in", "user_frame",
]  # fmt: skip

T = TypeVar("T", bound=Callable[..., Any])

# Modules of the packages; the first frame outside of them and of `_BETWEEN` is the user's call.
_OURS = ("collectives.", "strategies.")

# Libraries whose hooks and callbacks call the packages on behalf of the user.
_BETWEEN = (
    "torch.", "jax.", "optax.", "unisono_torch",
    "accelerate.", "lightning.", "lightning_fabric.", "pytorch_lightning.", "transformers.",
    "keras.",
)  # fmt: skip


class Site(NamedTuple):
    """A place in a program; the line number is computed on demand."""

    code: CodeType
    instruction: int

    @property
    def file(self) -> str:
        """The path of the source file."""
        return self.code.co_filename

    @property
    def line(self) -> int:
        """Line number, 0 if unknown."""
        for begin, end, line in self.code.co_lines():
            if begin <= self.instruction < end:
                return line or 0
        return 0

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


class CallOrigin(NamedTuple):
    """Origin of the innermost call into the packages.

    Attributes:
        site: line of the program.
        entry: called object, if it is a part of `strategies`: "CheckpointManager.save".
    """

    site: Site
    entry: str = ""


# Returns the frame of the caller of the calling function. Operations pass that frame on, because
# the search for the user's line takes 50 ns from there, and 0.5 us from four frames further down.
# Do not store a frame, because it keeps the arrays of the user's function alive.
caller: Callable[[], FrameType] = functools.partial(sys._getframe, 1)

# Thread id -> origin of the calls that the thread makes on behalf of another thread.
attributed: dict[int, CallOrigin] = {}


def current_origin() -> CallOrigin:
    """Return the origin of this thread's current call."""
    # A thread that works for another one: its frames show only the packages.
    if (known := attributed.get(get_ident())) is not None:
        return known
    frame = inner = caller()
    # `torch`, JAX and Optax call the packages from hooks, and are not the user's line either.
    while frame.f_back is not None and _module(frame).startswith(_OURS + _BETWEEN):
        # The innermost-called frame of the packages in this chain: the entry point.
        if _module(frame).startswith(_OURS):
            inner = frame
        frame = frame.f_back
    return CallOrigin(Site(frame.f_code, frame.f_lasti), _entry(inner))


class calls_from:
    """Context manager that attributes the calls of a thread to another call site.

    A thread that executes requests of other threads uses it, so that errors and flight records name
    the line that made the request. It can be entered repeatedly, by one thread at a time.
    """

    __slots__ = ("_before", "_origin")

    def __init__(self, origin: CallOrigin) -> None:
        self._origin = origin
        self._before: CallOrigin | None = None

    def __enter__(self) -> None:
        # Nested: a thread may run a request inside of another one.
        self._before = attributed.get(get_ident())
        attributed[get_ident()] = self._origin

    def __exit__(self, *error: object) -> None:
        if self._before is None:
            del attributed[get_ident()]
        else:
            attributed[get_ident()] = self._before


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def known_as(name: str) -> Callable[[T], T]:
    """Return a decorator that sets the public name of a class or function of `strategies`.

    `CallOrigin.entry`, and thus errors, use the name; for a class followed by the method.
    """

    def note(called: T) -> T:
        # A frame shows the code object of a function; a class is its own key.
        _names[getattr(called, "__code__", called)] = name
        return called

    return note


# Class, or code object of a function -> public name.
_names: dict[object, str] = {}


def _entry(frame: FrameType) -> str:
    """Return the public name in `strategies` of the entry frame; "" for other packages."""
    if not _module(frame).startswith("strategies."):
        return ""
    if (name := _names.get(frame.f_code)) is not None:
        return name
    # Methods: the frame holds the object in its first argument, by convention `self`.
    function, owner = frame.f_code.co_name, frame.f_locals.get("self")
    if owner is None:
        return function
    name = _names.get(type(owner), type(owner).__name__)
    # A private method is an implementation detail of the object.
    return name if function.startswith("_") else f"{name}.{function}"


def other_thread_in(call: object, owner: int = 0) -> str | None:
    """Return the name of another thread that is in a call; None without one.

    Searches the variables of all frames, so that starting a call costs nothing. A program may keep
    a plan in a variable of its own, so only frames of this package count.

    Args:
        call: as a variable of a frame.
        owner: the thread in the call, if compiled code runs it; 0 if not.
    """
    own, names = get_ident(), {thread.ident: thread.name for thread in threading.enumerate()}
    if owner:
        return names.get(owner, f"thread {owner}")
    for ident, top in sys._current_frames().items():
        frame: FrameType | None = None if ident == own else top
        while frame is not None:
            ours = _module(frame).startswith("collectives.")
            # By identity, because calls and plans define no equality. A list, because the thread
            # may change the dict meanwhile.
            if ours and any(local is call for local in list(frame.f_locals.values())):
                return names.get(ident, f"thread {ident}")
            frame = frame.f_back
    return None


def call_site(frame: FrameType) -> tuple[CodeType, int]:
    """Return code and instruction of this thread's call, searched from a frame outwards."""
    if (known := attributed.get(get_ident())) is not None:
        return known.site
    frame = user_frame(frame)
    return frame.f_code, frame.f_lasti


def depth_of(site: tuple[CodeType, int], frame: FrameType) -> int | None:
    """Return how many frames further out than `frame` a call site is; None if it is not there."""
    depth, outer = 0, user_frame(frame)
    while frame is not outer:
        assert frame.f_back is not None
        frame, depth = frame.f_back, depth + 1
    return depth if (frame.f_code, frame.f_lasti) == site else None


def user_frame(frame: FrameType) -> FrameType:
    """Return the first frame of the program, searched from `frame` outwards."""
    while _module(frame).startswith(_OURS + _BETWEEN) and frame.f_back is not None:
        frame = frame.f_back
    return frame
