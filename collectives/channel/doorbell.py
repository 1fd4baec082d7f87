"""Doorbell: wakes a sleeping thread in another process of the same node.

MPI can wait only by asking again and again. A rank that waits for messages at unknown times sleeps
on a pipe of its own instead, and who sends it something writes one byte into that pipe. The others
reach the pipe through `/proc/<pid>/fd`: no name in the file system, no socket, nothing that is left
behind by a process that is killed. The kernel lets only processes of the same user do so. Where
it does not work (another node, another container, no Linux) the sleeper has to look by itself.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence

__all__ = ["Doorbell"]


class Doorbell:
    """A pipe on which one thread of this process sleeps, and those of others to ring at.

    Attributes:
        address: where others find this pipe: process, file descriptor, and the device and inode by
            which they make sure that it is this one.
    """

    def __init__(self) -> None:
        self._inside, self._outside = os.pipe()
        os.set_blocking(self._inside, False)
        os.set_blocking(self._outside, False)
        self._waiting = select.poll()
        self._waiting.register(self._inside, select.POLLIN)
        self._others: dict[int, int] = {}  # rank -> file descriptor
        status = os.fstat(self._inside)
        self.address = (os.getpid(), self._inside, status.st_dev, status.st_ino)

    def connect(self, peer: int, address: Sequence[int]) -> bool:
        """Learn where a rank sleeps; return whether it can be woken from here."""
        process, number, device, inode = address
        try:
            # Reading the target first: opening what is not a pipe may have side effects.
            path = f"/proc/{process}/fd/{number}"
            if os.readlink(path) != f"pipe:[{inode}]":
                return False
            found = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        status = os.fstat(found)
        if (status.st_dev, status.st_ino) != (device, inode):
            os.close(found)
            return False
        self._others[peer] = found
        return True

    def ring(self, peer: int | None = None) -> None:
        """Wake a rank, or this one if None; not if that is not possible, or it is gone."""
        target = self._outside if peer is None else self._others.get(peer, -1)
        if target >= 0:
            # A full pipe wakes just as well, and a broken one belongs to a process that has ended.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(target, b"\0")

    def wait(self, seconds: float) -> bool:
        """Sleep until somebody rings; return False if nobody did in this time."""
        if not self._waiting.poll(seconds * 1000):
            return False
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._inside, 4096)) == 4096:
                pass
        return True

    def close(self) -> None:
        """Close all pipes; nobody may use this object any more."""
        for number in (self._inside, self._outside, *self._others.values()):
            os.close(number)
        self._others.clear()
        self._outside = -1
