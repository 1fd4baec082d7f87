"""Machine-wide lock: one process compiles, the other processes wait for the result.

Ranks that start with an empty cache need the same compiled code at the same moment. The first rank
binds a name; the other ranks poll until the name is free. The name is that of an abstract Unix
socket without connections. Linux gives it to one process at a time and frees it when that process
ends, however it ends, and leaves no file behind.

So the location of the cache does not matter. On a network file system one process of each machine
compiles. All write the same bytes to temporary files and rename them; a waiting process reads the
file through the machine that renamed it, where it is visible at once. File locks are not used,
because on network file systems they are slow, need a daemon, or do not exist.
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

from collectives.core.process_hooks import in_child

__all__ = ["wait_or_lead", "claim_slot"]

# Limit and interval of a wait. A function takes 0.3 to 2 s to compile, and numba 0.5 s to load,
# several times as long on a busy machine. After the limit the compiling process is stopped or hung.
_MOST_SECONDS = 60.0
_LOOK_SECONDS = 0.01


@contextlib.contextmanager
def wait_or_lead(what: str, most_seconds: float = _MOST_SECONDS) -> Iterator[bool]:
    """Yield at once if no process of this machine holds a name, else after the holder is done.

    Args:
        what: description of the work, equal in all processes that need the same; per user.
        most_seconds: limit of the wait; 0 only tests whether another process is working.

    Yields:
        whether this process is the first: others wait until it leaves the context. Processes that
            have waited find the result, unless the first one failed or was too slow. Then they no
            longer wait for each other.
    """
    name = _name(what)
    until = time.monotonic() + most_seconds
    waited = False
    # Closing the socket frees the name, also if the process is killed.
    with _socket() as own:
        # Polled, because an abstract socket has no notification.
        while not _try_claim(own, name):
            waited = True
            if time.monotonic() > until:
                break
            time.sleep(_LOOK_SECONDS)
        # A process that has waited does not lead: its name would make others wait for nothing.
        if waited:
            own.close()
        yield not waited


def claim_slot(what: str, places: int) -> socket.socket | None:
    """Return a socket that holds one of `places` slots until it is closed; None if all are taken.

    A forked child closes its copy.
    """
    own = _socket()
    # Numbers of the slots, so that any free one fits.
    for number in range(places):
        if _try_claim(own, _name(f"{what} {number}")):
            return own
    own.close()
    return None


# Sockets of this process. A surviving child would hold names that this process has released.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _socket() -> socket.socket:
    # A datagram socket needs no `listen`; only its name matters.
    own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    _sockets.add(own)
    return own


def _leave_to_parent() -> None:
    """Release all names in a forked child."""
    for own in list(_sockets):
        own.close()


in_child(_leave_to_parent)


def _name(what: str) -> str:
    """Return the socket name of a description, per user."""
    # Per user, because a name has no owner: others could else block each other.
    name = hashlib.sha256(f"{os.getuid()} {what}".encode()).hexdigest()
    # The leading zero byte makes the name abstract: Linux only, without a file.
    return f"\0unisono-{name[:32]}"


def _try_claim(own: socket.socket, name: str) -> bool:
    """Bind a name; return False if another process holds it."""
    try:
        own.bind(name)
    except OSError as error:
        # After any other error this process must not wait.
        return error.errno != errno.EADDRINUSE
    return True
