"""File lock: one process of a machine compiles, the others wait for the result.

Ranks that start on an empty cache need the same compiled code at the same moment. Whoever comes
first takes a name; the others look every few milliseconds whether it is free again. The name is
that of a socket which nobody connects to (Linux's abstract names): the system gives it to one
process at a time and takes it back when that process ends, however it ends, and nothing is left in
any folder. So it does not matter where the cache lies. On a network file system one process of
each machine makes the code; they write the same, each aside and renamed, and whoever waits reads it
through the machine that has renamed it, where it is visible at once. Locks of such file systems are
slow, need a daemon, or do not exist: none are used.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import time
import weakref
from collections.abc import Iterator

__all__ = ["wait_or_lead", "claim_slot"]

# How long others wait, and how often they look. A function takes 0.3 to 2 s to compile, numba 0.5 s
# to load, on a busy machine several times that: later than this the maker is stopped or worse.
_MOST_SECONDS = 60.0
_LOOK_SECONDS = 0.01


@contextlib.contextmanager
def wait_or_lead(what: str, most_seconds: float = _MOST_SECONDS) -> Iterator[bool]:
    """Yield at once if nobody on this machine is about to make something, else when it is over.

    Args:
        what: a description, the same for all who need the same; of one user.
        most_seconds: how long to wait for another process; 0 only asks whether there is one.

    Yields:
        Whether this process is the first: others wait until it leaves the context. Those that have
        waited find what the first has made, unless it could not, or was too slow; then they no
        longer wait for each other.
    """
    name = _name(what)
    until = time.monotonic() + most_seconds
    waited = False
    with _socket() as own:
        while not _try_claim(own, name):
            waited = True
            if time.monotonic() > until:
                break
            time.sleep(_LOOK_SECONDS)
        if waited:
            own.close()
        yield not waited


def claim_slot(what: str, places: int) -> socket.socket | None:
    """Take one of so many places on this machine, until the socket is closed; None if all are.

    In a forked child it is closed.
    """
    own = _socket()
    for number in range(places):
        if _try_claim(own, _name(f"{what} {number}")):
            return own
    own.close()
    return None


# Those of this process. A child that lived on would keep names that this process has let go of.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _socket() -> socket.socket:
    own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    _sockets.add(own)
    return own


def _leave_to_parent() -> None:
    """Let go of all names in a forked child."""
    for own in list(_sockets):
        own.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def _name(what: str) -> str:
    """Return the name of a socket, for one user."""
    name = hashlib.sha256(f"{os.getuid()} {what}".encode()).hexdigest()
    return f"\0unisono-{name[:32]}"


def _try_claim(own: socket.socket, name: str) -> bool:
    """Take a name; False if another process has it."""
    try:
        own.bind(name)
    except OSError as error:
        # Whatever else goes wrong, nobody has to wait.
        return error.errno != errno.EADDRINUSE
    return True
