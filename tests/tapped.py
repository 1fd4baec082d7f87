"""Communicators whose channels a test watches and disturbs: silence, deaths and what gets lost."""

import threading
import time
from contextlib import contextmanager

from collectives import extend

__all__ = ["Channel", "Tapped", "flush", "receive", "silence"]

LIMIT = 20.0


class Tapped:
    """A communicator like the one given, but for the channel that a service opens on it."""

    def __init__(self, comm):
        self.comm = comm

    def __getattr__(self, name):
        return getattr(self.comm, name)


_open_channel = extend.open_channel


def open_channel(comm):
    """Open a channel, and if the communicator is tapped, watch it."""
    if not isinstance(comm, Tapped):
        return _open_channel(comm)
    comm.channel = Channel(_open_channel(comm.comm))
    return comm.channel


extend.open_channel = open_channel


class Channel:
    """What a service talks through.

    Attributes:
        handled: the types of the messages with which the service is done.
        lost: of messages of this type nothing leaves but a note in `withheld`.
        killed: ranks that count as dead, besides those that are.
        received: how many bytes have come.
        free: cleared while the service is to handle nothing; see `silence`.
    """

    def __init__(self, channel):
        self.channel = channel
        self.handled, self.withheld = [], []
        self.lost = None
        self.received = 0
        self.killed = frozenset()
        self.free = threading.Event()
        self.free.set()
        self._taken = []

    def __getattr__(self, name):
        return getattr(self.channel, name)

    @property
    def dead(self):
        return self.channel.dead | self.killed

    def send(self, dest, frames):
        if frames[0][1] == self.lost:
            self.withheld.append(frames)
        else:
            self.channel.send(dest, frames)

    def poll(self):
        self.handled += self._taken  # who asks for the next message is done with the last one
        self._taken = []
        assert self.free.wait(LIMIT)
        arrived = self.channel.poll()
        if arrived is not None:
            self._taken = [int(arrived.frames[0][1])]
            self.received += sum(memoryview(frame).nbytes for frame in arrived.frames)
        return arrived


@contextmanager
def silence(channel):
    """Keep a service from handling messages for a while."""
    channel.free.clear()
    try:
        yield
    finally:
        channel.free.set()


def receive(chan):
    """Wait for the next message of a channel."""
    give_up = time.monotonic() + LIMIT
    while (message := chan.poll()) is None:
        assert time.monotonic() < give_up
        chan.wait(0.1)
    return message


def flush(chan):
    """Wait until all that was sent is on its way."""
    give_up = time.monotonic() + LIMIT
    while not chan.idle:
        assert time.monotonic() < give_up
        chan.poll()
        chan.wait(0.01)
