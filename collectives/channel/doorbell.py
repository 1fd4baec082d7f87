"""Doorbell: wakes a sleeping thread in another process of the same node.

MPI can wait only by polling. A rank that waits for messages at unknown times sleeps on its own pipe
instead, and a sender writes one byte into that pipe. Other processes open the pipe through
`/proc/<pid>/fd`: it needs no name in the file system and no socket, and a killed process leaves
nothing behind. The kernel allows this only to processes of the same user. If it fails (other node,
other container, no Linux), the sleeper must poll.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence

__all__ = ["Doorbell"]


class Doorbell:
    """A pipe on which one thread of this process sleeps, and the pipes of other ranks.

    Attributes:
        address: address of this pipe for other processes: process, file descriptor, and the device
            and inode that identify it.
    """

    def __init__(self) -> None:
        self._inside, self._outside = os.pipe()
        # Neither a ring nor an empty pipe may block a thread.
        os.set_blocking(self._inside, False)
        os.set_blocking(self._outside, False)
        # `poll` instead of `select`, which fails for descriptors above 1023.
        self._waiting = select.poll()
        self._waiting.register(self._inside, select.POLLIN)
        self._others: dict[int, int] = {}  # rank -> file descriptor
        # Device and inode identify the pipe, because numbers of processes are reused.
        status = os.fstat(self._inside)
        self.address = (os.getpid(), self._inside, status.st_dev, status.st_ino)

    def connect(self, peer: int, address: Sequence[int]) -> bool:
        """Open the pipe of a rank; return whether this process can wake that rank."""
        process, number, device, inode = address
        try:
            # Check the target first: opening anything but a pipe may have side effects.
            path = f"/proc/{process}/fd/{number}"
            if os.readlink(path) != f"pipe:[{inode}]":
                return False
            found = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        status = os.fstat(found)
        # The process may have closed the descriptor and opened another file since `readlink`.
        if (status.st_dev, status.st_ino) != (device, inode):
            os.close(found)
            return False
        self._others[peer] = found
        return True

    def ring(self, peer: int | None = None) -> None:
        """Wake a rank, or this rank if None; ignored if the rank is gone or not connected."""
        target = self._outside if peer is None else self._others.get(peer, -1)
        if target >= 0:
            # A full pipe wakes as well, and a broken pipe belongs to a process that has ended.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(target, b"\0")

    def wait(self, seconds: float) -> bool:
        """Sleep until a process rings; return False after `seconds` without a ring."""
        if not self._waiting.poll(seconds * 1000):
            return False
        with contextlib.suppress(BlockingIOError):
            # All bytes at once: several rings before a wait count as one.
            while len(os.read(self._inside, 4096)) == 4096:
                pass
        return True

    def close(self) -> None:
        """Close all pipes; the object is then unusable."""
        for number in (self._inside, self._outside, *self._others.values()):
            os.close(number)
        self._others.clear()
        # A later `ring` of another thread must not write to a reused descriptor.
        self._outside = -1
