"""Ranks as threads of one process: the second rung of the tests.

`eager` sends are complete at once, as small MPI messages are; `synchronous` ones only when the
receiver has taken them, as large MPI messages are. A schedule that sends before it receives passes
with the first and hangs with the second.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest

import fakecupy
from collectives.arrays.device import DeviceBuffer
from collectives.arrays.host_arrays import raw_bytes
from collectives.calls.group import Group
from collectives.communicator import Communicator
from collectives.core.errors import MismatchError
from collectives.core.settings import Settings
from collectives.transport.mailbox import Mailbox
from collectives.transport.transport import Transport
from limits import Limit

MODES = ("eager", "synchronous")


# Seconds that a rank waits for another one in a test; far above what any of them needs.
TIMEOUT = 20.0


def world_settings(shared, stores="auto"):
    """Settings for tests: short waits, with or without shared memory, and how ranks store there."""
    return Settings(timeout=TIMEOUT, shared_memory="/dev/shm" if shared else None, stores=stores)


def memory_of(array):
    """View an array's bytes; those of a device as an MPI does that takes device memory: at once."""
    if not isinstance(array, DeviceBuffer):
        return raw_bytes(array)
    interface = array.__cuda_array_interface__
    return fakecupy.memory_at(interface["data"][0], interface["shape"], np.dtype(np.uint8))


class ThreadGroup:
    """What the threads of one group share."""

    def __init__(self, size, mode):
        self.size = size
        self.mode = mode
        self.lock = threading.Condition()
        # By rank: threads that all wake whenever two of them exchange a message do little else.
        self.moved = [threading.Condition(self.lock) for _ in range(size)]
        self.events = [0] * size  # messages for a rank, and taken from it, so far
        self.boxes = defaultdict(deque)  # (source, dest) -> messages in order
        self.splits = defaultdict(dict)  # number of the split -> rank -> (color, key)
        self.parts = {}  # (number of the split, color) -> ThreadGroup
        self.members = defaultdict(list)  # ranks and tag -> groups, and who of them has come

    def event(self, rank):
        self.events[rank] += 1
        self.moved[rank].notify_all()


class _Send:
    def __init__(self, group, data, peer, dest):
        eager = group.mode == "eager"
        self.data = memory_of(data).copy() if eager else memory_of(data)
        self.taken = eager
        self.peer = peer
        self.peers = (dest,)

    def done(self):
        return self.taken

    def describe(self):
        return f"{self.peer} to receive {self.data.size} bytes"


class _Receive:
    def __init__(self, group, box, into, peer):
        self.group = group
        self.box = box
        self.into = memory_of(into)
        self.peer = peer
        self.peers = (box[-2],)
        self.finished = False
        self.error = None
        self.queue = group.boxes[("receives", *box)]
        self.queue.append(self)

    def done(self):
        with self.group.lock:
            box = self.group.boxes[self.box]
            while box and self.queue and not self.finished:  # as MPI does: also for those before
                self.queue.popleft().take(box.popleft())
        if self.error is not None:
            raise self.error
        return self.finished

    def take(self, send):
        self.finished = True
        if send.data.size == self.into.size:
            self.into[...] = send.data
        else:
            self.error = MismatchError(
                f"receive: {self.peer} sent an array of another length, expected "
                f"{self.into.size} bytes, got {send.data.size}"
            )
        send.taken = True  # its memory may change from now on
        self.group.event(self.box[-2])

    def describe(self):
        return f"{self.peer} to send {self.into.size} bytes"


class ThreadTransport(Transport):
    def __init__(self, group, rank):
        self.group = group
        self.rank = rank
        self.size = group.size
        self.number_of_splits = 0

    def _start_send(self, data, dest):
        send = _Send(self.group, data, self.name([dest]), dest)
        with self.group.lock:
            self.group.boxes[(self.rank, dest)].append(send)
            self.group.event(dest)
        return send

    def _start_receive(self, into, source):
        with self.group.lock:
            return _Receive(self.group, (source, self.rank), into, self.name([source]))

    def wait(self, messages, deadline):
        # Threads that poll take the interpreter from each other: sleep until something happens.
        pending, began = list(messages), time.monotonic_ns()
        events, moved = self.group.events, self.group.moved[self.rank]
        while True:
            seen = events[self.rank]
            pending = [m for m in pending if not m.done()]
            if not pending:
                if deadline.waits is not None:
                    deadline.waits.waited(began, messages)
                return
            deadline.check(self, pending)
            with moved:
                moved.wait_for(lambda seen=seen: events[self.rank] != seen, timeout=0.05)

    def split(self, color, key):
        number = self.number_of_splits
        self.number_of_splits += 1
        with self.group.lock:
            wishes = self.group.splits[number]
            wishes[self.rank] = (color, key)
            self.group.lock.notify_all()
            assert self.group.lock.wait_for(lambda: len(wishes) == self.size, timeout=20)
            if color is None:
                return None
            members = sorted(
                (r for r in wishes if wishes[r][0] == color), key=lambda r: (wishes[r][1], r)
            )
            part = self.group.parts.setdefault(
                (number, color), ThreadGroup(len(members), self.group.mode)
            )
        return ThreadTransport(part, members.index(self.rank))

    def members(self, ranks, tag):
        with self.group.lock:
            made = self.group.members[tuple(ranks), tag]
            if not made or self.rank in made[-1][1]:  # a later one with the same tag
                made.append((ThreadGroup(len(ranks), self.group.mode), set()))
            group, came = made[0]
            came.add(self.rank)
            if len(came) == len(ranks):
                made.pop(0)
        return ThreadTransport(group, ranks.index(self.rank))

    def channel(self, number=None):
        with self.group.lock:
            name = ("lane", number)
            group = self.group.parts.setdefault(name, ThreadGroup(self.size, self.group.mode))
        return ThreadTransport(group, self.rank)

    def send_nowait(self, head, dest):
        send = _Send(self.group, head, self.name([dest]), dest)
        with self.group.lock:
            self.group.boxes[("head", self.rank, dest)].append(send)
            self.group.event(dest)
        return send

    def poll_mailbox(self):
        with self.group.lock:
            for source in range(self.size):
                if box := self.group.boxes[("head", source, self.rank)]:
                    send = box.popleft()
                    send.taken = True
                    self.group.event(source)
                    return source, send.data.copy()
        return None

    def open_mailbox(self):
        return ThreadMailbox(self.split(0, self.rank))

    def close(self):
        pass


class ThreadMailbox(Mailbox):
    """Heads and long frames between ranks that are threads."""

    def __init__(self, transport):
        self.group = transport.group
        self.rank = transport.rank
        self.size = transport.size

    def send_nowait(self, head, dest):
        return self._start(head, "head", dest)

    def send(self, frame, dest):
        return self._start(frame, "frame", dest)

    def _start(self, data, kind, dest):
        send = _Send(self.group, data, f"rank {dest}", dest)
        with self.group.lock:
            self.group.boxes[(kind, self.rank, dest)].append(send)
        return send

    def poll(self):
        with self.group.lock:
            for source in range(self.size):
                if box := self.group.boxes[("head", source, self.rank)]:
                    send = box.popleft()
                    send.taken = True
                    return source, send.data.copy()
        return None

    def receive(self, into, source):
        return _Receive(self.group, ("frame", source, self.rank), into, f"rank {source}")

    def dead(self):
        return frozenset()

    def close(self, *, all_together):
        pass


def _waiting(threads, errors):
    """Describe ranks that are still waiting after their deadline, and errors of the others."""
    frames = sys._current_frames()
    lines = ["a rank is still waiting after its deadline"]
    for rank, (thread, error) in enumerate(zip(threads, errors, strict=True)):
        if error is not None:
            lines += [f"rank {rank}:", *traceback.format_exception(error)]
        elif thread.ident in frames:
            lines += [f"rank {rank} waits:", *traceback.format_stack(frames[thread.ident])]
    return "\n".join(lines)


def run_ranks(size, function, mode="eager", *, timeout=20.0, leaders=None, settings=None):
    """Call `function(comm)` on `size` threads and return the results in rank order.

    The first error by rank is raised, after all threads have ended.
    """
    group = ThreadGroup(size, mode)
    results = [None] * size
    errors = [None] * size

    def body(rank):
        try:
            transport = ThreadTransport(group, rank)
            configuration = settings or Settings(timeout=timeout)
            comm = Communicator(Group(transport, leaders or [0] * size, configuration))
            results[rank] = function(comm)
            comm.close()
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    limit = Limit(timeout + 40)
    for thread in threads:
        while thread.is_alive() and (left := limit.left()):
            thread.join(left)
        assert not thread.is_alive(), _waiting(threads, errors)
    for error in errors:
        if error is not None:
            raise error
    return results


def on_ranks(size, **options):
    """Mark a test that takes `comm`: it runs on this many threads, with options of `run_ranks`."""
    ranks = SimpleNamespace(run=lambda function: run_ranks(size, function, **options))
    return pytest.mark.parametrize("comm", [ranks], ids=[f"{size} ranks"])
