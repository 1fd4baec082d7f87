"""Timeline of one process, in the trace format of Perfetto and Chrome.

::

    [
    {"ph":"M","pid":3,"name":"process_name","args":{"name":"rank 3"}},
    {"ph":"X","pid":3,"tid":0,"cat":"call","name":"allreduce","ts":81.5,"dur":8.9,"args":{...}},
    {"ph":"B","pid":3,"tid":0,"cat":"call","name":"barrier","ts":97.1,"args":{...}},
    {}]

One event per line; times are those of the monotonic clock, in us; what a stretch is (cat): a call,
a part of one, or a span of the user's. The end may be missing, as after `kill -9`: readers of this
format do not need it. What has gone on for a while is begun in the file (B) before it ends (E), so
that such a file shows what the process was doing.

Lines are made after every 64 stretches by the thread that they are about, and written by another
one every quarter of a second. So ranks that make the same calls make their lines at the same call:
if the other thread made them, it would take the interpreter from each rank at another time, and the
others would wait for all of them. It only makes those of threads that make few.

Cost: 8 us for a call in a row of calls, of which making its line is the greater part; where a
program computes in between, each call finds the caches cold, and to make lines in a row is three
times as fast as to make each at its call. 100 to 500 bytes of the file. At most 8 MiB of memory:
where a file system is so slow that more would wait, lines are left out, and counted. A full disk
ends the file.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "FIRST_LINE", "LAST_LINE", "Span", "Timeline", "Track", "start", "stop", "timeline_span",
]  # fmt: skip

log = logging.getLogger(__name__)

FIRST_LINE, LAST_LINE = "[\n", "{}]\n"

# Seconds between two writes, and after which lines are made for them. What a process that is killed
# did in its last half of a second is lost.
_EVERY = 0.25

# How many stretches become lines at once.
_BATCH = 64

# Bytes that may wait to be written, and from which on they are written at once.
_MOST_BYTES, _MANY_BYTES = 8 << 20, 1 << 18

# Nanoseconds after which something that has not ended is begun in the file.
_LONG = 250_000_000


# The same few names come again and again.
_quoted = functools.lru_cache(1024)(json.dumps)


class Span:
    """Something that a thread has begun, and ended or not.

    Attributes:
        subject: what it is; in words, where it takes long.
        kind: of the stretch; the next one its name.
        began, ended: in ns of the monotonic clock; the second one is 0 before it has.
        is_told: whether its begin is in the file.
        describe: returns what else is known, as JSON, and lines about its parts.
        parts, algorithm, facts: what `describe` takes note of until it is called.
    """

    __slots__ = (
        "algorithm", "began", "describe", "ended", "facts", "is_told", "kind", "name", "parts",
        "subject",
    )  # fmt: skip

    def __init__(
        self, subject: object, kind: str, name: str, began: int, describe: Describe
    ) -> None:
        self.subject = subject
        self.kind = kind
        self.name = name
        self.began = began
        self.describe = describe
        self.ended = 0
        self.is_told = False
        self.parts: list[tuple[int, int, int, int]] = []
        self.algorithm = ""
        self.facts: tuple[Any, ...] = ()


Describe = Callable[["Track", Span], tuple[str, str]]


def _say_nothing(track: Track, what: Span) -> tuple[str, str]:
    return "{}", ""


class Track:
    """What one thread does: stretches of time, one inside of the other.

    Args:
        timeline: that it is a part of.
        number: of the track in its process.
    """

    def __init__(self, timeline: Timeline, number: int) -> None:
        self._timeline = timeline
        self.open: list[Span] = []
        self._ended: list[Span] = []
        ids = f'"pid":{timeline.rank},"tid":{number}'
        self._ids = ids

    def begin(
        self, subject: object, kind: str, name: str, began: int, describe: Describe = _say_nothing
    ) -> Span:
        """Begin something; arguments as of `Span`."""
        opened = Span(subject, kind, name, began, describe)
        self.open.append(opened)
        return opened

    def add_span(self, subject: object) -> Span | None:
        """Return what was begun last for a subject; None if nothing was."""
        for opened in reversed(self.open):
            if opened.subject is subject:
                return opened
        return None

    def end(self, what: Span, ended: int) -> None:
        """End something, begun here or never, at so many ns of the monotonic clock."""
        what.ended = ended
        with self._timeline.lock:
            if what in self.open:
                self.open.remove(what)
            self._ended.append(what)
            if len(self._ended) >= _BATCH:
                self._timeline.add(self.lines())

    def lines(self, before: int | None = None) -> str:
        """Return lines about what has ended, perhaps before a time only; with the lock held."""
        if not self._ended or (before is not None and self._ended[0].ended > before):
            return ""
        ended, self._ended = self._ended, []
        return "".join([self._line(one) for one in ended])

    def _line(self, what: Span) -> str:
        args, inside = what.describe(self, what)
        if what.is_told:
            return f'{{"ph":"E",{self._ids},"ts":{what.ended / 1000:.3f},"args":{args}}},\n{inside}'
        return self.line(what.kind, _quoted(what.name), what.began, what.ended, args) + inside

    def line(self, kind: str, name: str, began: int, ended: int, args: str) -> str:
        """Return the text of a stretch; name and arguments as JSON, times in ns."""
        return (
            f'{{"ph":"X",{self._ids},"cat":"{kind}","name":{name},"ts":{began / 1000:.3f},'
            f'"dur":{(ended - began) / 1000:.3f},"args":{args}}},\n'
        )

    def emit_long_spans(self, now: int) -> str:
        """Return the text by which begins what has gone on for a while; with the lock held."""
        text = ""
        for opened in list(self.open):
            if not opened.is_told and now - opened.began > _LONG:
                opened.is_told = True
                name, began = _quoted(opened.name), opened.began / 1000
                args = json.dumps({"is": str(opened.subject)})
                text += (
                    f'{{"ph":"B",{self._ids},"cat":"{opened.kind}","name":{name},'
                    f'"ts":{began:.3f},"args":{args}}},\n'
                )
        return text


class Timeline:
    """A file, and what threads of this process write into it.

    Args:
        path: of the file, which is written over.
        rank: of this process in the world.

    Attributes:
        lock: of what is begun and of what waits to be written.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self.lock = threading.Lock()
        self._file = path.open("wb", buffering=0)
        self._text = [FIRST_LINE]
        self._nbytes = 0
        self._left_out = 0
        self._is_closed = False
        self._tracks: list[Track] = []
        self._own = threading.local()
        self._writing = threading.Lock()
        self._wake = threading.Event()
        self.instant("process_name", {"name": f"rank {rank}"})
        self.instant("process_sort_index", {"sort_index": rank})
        self._thread = threading.Thread(target=self._work, name="unisono-timeline", daemon=True)
        self._thread.start()

    def instant(self, name: str, args: Mapping[str, object]) -> None:
        """Write what is no stretch: facts about the process."""
        event = {"ph": "M", "pid": self.rank, "name": name, "args": args}
        with self.lock:
            self.add(json.dumps(event, separators=(",", ":")) + ",\n")

    def track(self) -> Track:
        """Return the track of this thread."""
        try:
            return self._own.track  # type: ignore[no-any-return]
        except AttributeError:
            pass
        with self.lock:
            number = len(self._tracks)
            made = self._own.track = Track(self, number)
            self._tracks.append(made)
            thread = json.dumps(threading.current_thread().name)
            ids = f'"pid":{self.rank},"tid":{number}'
            self.add(f'{{"ph":"M",{ids},"name":"thread_name","args":{{"name":{thread}}}}},\n')
        return made

    def add(self, text: str) -> None:
        """Let lines be written soon; with the lock held."""
        if self._is_closed:
            return
        if self._nbytes > _MOST_BYTES:
            self._left_out += text.count("\n")
            return
        self._text.append(text)
        self._nbytes += len(text)
        if self._nbytes > _MANY_BYTES:
            self._wake.set()

    def flush(self, before: int | None = None) -> None:
        """Write what waits, also what goes on; what goes wrong is logged, and ends the file.

        Args:
            before: lines are made of what has ended before a time in ns, of all if None.
        """
        with self._writing:
            with self.lock:
                if self._is_closed:
                    return
                now = time.monotonic_ns()
                for track in self._tracks:
                    self.add(track.lines(before))
                text = [*self._text, *(track.emit_long_spans(now) for track in self._tracks)]
                if self._left_out:
                    args = f'{{"lines":{self._left_out}}}'
                    text.append(
                        f'{{"ph":"M","pid":{self.rank},"name":"left_out","args":{args}}},\n'
                    )
                self._text, self._nbytes, self._left_out = [], 0, 0
            self._write("".join(text))

    def _write(self, text: str) -> None:
        data = memoryview(text.encode())
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            log.warning("[rank %d] the timeline ends here: %s: %s", self.rank, self.path, error)
            self.abandon()

    def _work(self) -> None:
        while not self._is_closed:
            self._wake.wait(_EVERY)
            self._wake.clear()
            self.flush(time.monotonic_ns() - round(1e9 * _EVERY))

    def abandon(self) -> None:
        """Write no more, nothing of what waits either."""
        self._is_closed = True

    def close(self) -> None:
        """Write the rest and end the file; closing twice is harmless."""
        self.flush()
        with self._writing:
            if not self._is_closed:
                self._write(LAST_LINE)
            self._is_closed = True
        self._wake.set()
        self._file.close()


running: Timeline | None = None
"""That of this process, where there is one."""


def start(path: Path, rank: int) -> Timeline:
    """Begin the timeline of this process; arguments and errors as of `Timeline`."""
    global running
    assert running is None
    running = Timeline(path, rank)
    return running


def stop() -> None:
    """End it; harmless where there is none."""
    global running
    ended, running = running, None
    if ended is not None:
        ended.close()


@contextlib.contextmanager
def timeline_span(name: str) -> Iterator[None]:
    """Show in the timeline what this thread does in a block, or in a function that it decorates.

    Costs 1.5 us, half of that where there is no timeline (`start_timeline`).

    Args:
        name: of the stretch.

    Raises:
        TypeError: the name is not text.

    Example:
        >>> import collectives as cc
        >>> with cc.timeline_span("forward"):
        ...     loss = sum(range(1000))
    """
    if not isinstance(name, str):
        raise TypeError(f"timeline_span: expected a name, got {name!r}")
    timeline = running
    if timeline is None:
        yield
        return
    track = timeline.track()
    opened = track.begin(name, "span", name, time.monotonic_ns())
    try:
        yield
    finally:
        track.end(opened, time.monotonic_ns())


def _leave_to_parent() -> None:
    """Write nothing in a forked child, whose file is the parent's, and which has no thread."""
    global running
    if running is not None:
        running.abandon()
        running.lock = threading.Lock()  # another thread may have held it
        running = None


os.register_at_fork(after_in_child=_leave_to_parent)
