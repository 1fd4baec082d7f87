"""Timeline of one process, in the trace format of Perfetto and Chrome.

::

    [
    {"ph":"M","pid":3,"name":"process_name","args":{"name":"rank 3"}},
    {"ph":"X","pid":3,"tid":0,"cat":"call","name":"allreduce","ts":81.5,"dur":8.9,"args":{...}},
    {"ph":"B","pid":3,"tid":0,"cat":"call","name":"barrier","ts":97.1,"args":{...}},
    {}]

One event per line. Times are microseconds of the monotonic clock. The category (cat) of a span is a
call, a part of a call, or a span of the user. The end of the file may be missing, for example after
`kill -9`; readers of this format accept that. A span that takes long is written as begin (B) and
end (E), so that such a file shows the last activity of the process.

The thread of the spans formats their lines after every 64 spans; another thread writes them every
quarter of a second. So ranks with equal calls format lines at the same call. If the other thread
formatted them, it would take the interpreter from each rank at a different time, and all ranks
would wait each time. It formats lines only for threads with few spans.

Cost: 8 us per call in a sequence of calls, mostly for formatting. Between computations the caches
are cold, so formatting in batches is three times as fast as formatting in each call. 100 to 500
bytes per call in the file. At most 8 MiB of memory: if the file system is too slow, lines are
dropped and counted. A full disk ends the file.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from collectives.core.background_threads import BackgroundThread
from collectives.core.process_hooks import ExitStage, at_exit, in_child

__all__ = [
    "FIRST_LINE", "LAST_LINE", "Span", "Timeline", "Track", "start", "stop", "timeline_span",
]  # fmt: skip

log = logging.getLogger(__name__)

FIRST_LINE, LAST_LINE = "[\n", "{}]\n"

# Seconds between two writes; also the age of spans that are then formatted. A killed process loses
# its last half second.
_EVERY = 0.25

# Number of spans that are formatted at once.
_BATCH = 64

# Most bytes in the buffer, and the number of bytes that triggers a write.
_MOST_BYTES, _MANY_BYTES = 8 << 20, 1 << 18

# Age in nanoseconds of an open span that is written as a begin event.
_LONG = 250_000_000


# JSON strings of names, which repeat; cached because formatting is the cost of a timeline.
_quoted = functools.lru_cache(1024)(json.dumps)


class Span:
    """An activity of a thread, open or ended.

    Attributes:
        subject: the object that the span describes; its text is shown if the span takes long.
        kind: category of the span.
        name: name of the span.
        began, ended: ns of the monotonic clock; `ended` is 0 while the span is open.
        is_told: whether its begin event is in the file.
        describe: returns further facts as JSON, and lines about its parts.
        parts, algorithm, facts: data for `describe`.
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
        # Parts of a call as tuples, because objects would take longer to create.
        self.parts: list[tuple[int, int, int, int]] = []
        self.algorithm = ""
        self.facts: tuple[Any, ...] = ()


Describe = Callable[["Track", Span], tuple[str, str]]


def _say_nothing(track: Track, what: Span) -> tuple[str, str]:
    return "{}", ""


class Track:
    """Spans of one thread, nested in each other.

    Args:
        timeline: timeline of the track.
        number: number of the track in its process.
    """

    def __init__(self, timeline: Timeline, number: int) -> None:
        self._timeline = timeline
        self.open: list[Span] = []
        self._ended: list[Span] = []
        self._ids = f'"pid":{timeline.rank},"tid":{number}'

    def begin(
        self, subject: object, kind: str, name: str, began: int, describe: Describe = _say_nothing
    ) -> Span:
        """Start a span; arguments as of `Span`."""
        opened = Span(subject, kind, name, began, describe)
        # Not under the lock: only this thread changes the list, and `list` copies it in one step.
        self.open.append(opened)
        return opened

    def add_span(self, subject: object) -> Span | None:
        """Return the innermost open span of a subject; None without one."""
        # From the innermost, because a nested call is on top.
        for opened in reversed(self.open):
            if opened.subject is subject:
                return opened
        return None

    def end(self, what: Span, ended: int) -> None:
        """End a span, whether or not it was started here, at `ended` ns of the monotonic clock."""
        what.ended = ended
        # Also guards `is_told`, which the flushing thread sets for open spans.
        with self._timeline.lock:
            if what in self.open:
                self.open.remove(what)
            self._ended.append(what)
            # Formatted by the thread of the spans, see the module.
            if len(self._ended) >= _BATCH:
                self._timeline.add(self.lines())

    def lines(self, before: int | None = None) -> str:
        """Format the ended spans, optionally only spans before a time; requires the lock."""
        # Ended spans are in the order of their ends.
        if not self._ended or (before is not None and self._ended[0].ended > before):
            return ""
        ended, self._ended = self._ended, []
        return "".join([self._line(one) for one in ended])

    def _line(self, what: Span) -> str:
        args, inside = what.describe(self, what)
        # The begin event is in the file, so only the end is missing.
        if what.is_told:
            return f'{{"ph":"E",{self._ids},"ts":{what.ended / 1000:.3f},"args":{args}}},\n{inside}'
        return self.line(what.kind, _quoted(what.name), what.began, what.ended, args) + inside

    def line(self, kind: str, name: str, began: int, ended: int, args: str) -> str:
        """Return the text of a span; name and arguments as JSON, times in ns."""
        return (
            f'{{"ph":"X",{self._ids},"cat":"{kind}","name":{name},"ts":{began / 1000:.3f},'
            f'"dur":{(ended - began) / 1000:.3f},"args":{args}}},\n'
        )

    def emit_long_spans(self, now: int) -> str:
        """Return begin events for spans that have been open for long; requires the lock."""
        text = ""
        # A copy, because the thread of the spans may append.
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
    """Trace file of this process.

    Args:
        path: path of the file, which is overwritten.
        rank: number of this process in the world.

    Attributes:
        lock: guards open spans and buffered text.
        is_closed: whether nothing more is written.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self.lock = threading.Lock()
        # Unbuffered: each write reaches the file, so a killed process leaves complete lines.
        self._file = path.open("wb", buffering=0)
        # Readers accept a file without the closing bracket.
        self._text = [FIRST_LINE]
        self._nbytes = 0
        self._left_out = 0
        self.is_closed = False
        self._tracks: list[Track] = []
        # Each thread finds its track without a lock.
        self._own = threading.local()
        # Apart from `lock`, so that traced threads never wait for the disk.
        self._writing = threading.Lock()
        self.instant("process_name", {"name": f"rank {rank}"})
        self.instant("process_sort_index", {"sort_index": rank})
        self._thread = _FlushThread(self)
        self._thread.start()

    def instant(self, name: str, args: Mapping[str, object]) -> None:
        """Write a metadata event: facts about the process."""
        event = {"ph": "M", "pid": self.rank, "name": name, "args": args}
        with self.lock:
            self.add(json.dumps(event, separators=(",", ":")) + ",\n")

    def track(self) -> Track:
        """Return the track of this thread."""
        try:
            # No lock in the common case.
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
        """Buffer lines for the next write; requires the lock."""
        if self.is_closed:
            return
        # Counted instead of kept, because memory must stay bounded with a slow disk.
        if self._nbytes > _MOST_BYTES:
            self._left_out += text.count("\n")
            return
        self._text.append(text)
        self._nbytes += len(text)
        if self._nbytes > _MANY_BYTES:
            self._thread.flush_soon()

    def flush(self, before: int | None = None) -> None:
        """Write all buffered lines and long open spans; an error is logged, and ends the file.

        Args:
            before: time in ns; only spans that ended before it are formatted. None formats all.
        """
        # One flush at a time, because lines keep their order in the file.
        with self._writing:
            with self.lock:
                if self.is_closed:
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
                # Taken under the lock, written without it.
                self._text, self._nbytes, self._left_out = [], 0, 0
            # Without `lock`, so that a slow disk does not stop the traced threads.
            self._write("".join(text))

    def _write(self, text: str) -> None:
        data = memoryview(text.encode())
        try:
            # An unbuffered file may write fewer bytes than requested.
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            # A full disk must not end the training.
            log.warning("[rank %d] the timeline ends here: %s: %s", self.rank, self.path, error)
            self.is_closed = True

    def close(self) -> None:
        """Write the rest and end the file; closing twice is harmless."""
        # First the rest, which is still accepted.
        self.flush()
        with self._writing:
            # The last line closes the list of events.
            if not self.is_closed:
                self._write(LAST_LINE)
            self.is_closed = True
        # Without waiting: the thread ends at its next turn, and finds the file closed.
        self._thread.stop(0)
        self._file.close()


class _FlushThread(BackgroundThread):
    """Flushes a timeline every `_EVERY` seconds, or sooner if much is buffered."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__("timeline")
        self._timeline = timeline
        self._flush_now = threading.Event()

    def flush_soon(self) -> None:
        """Flush without waiting for the end of the interval."""
        self._flush_now.set()

    # Stopping ends the wait.
    _wake = flush_soon

    def stop_at_exit(self, timeout: float) -> None:
        """Continue: `timeline.stop` completes the file after all threads have stopped."""

    def _run(self) -> None:
        while not self._stopping and not self._timeline.is_closed:
            self._flush_now.wait(_EVERY)
            self._flush_now.clear()
            # Only spans that ended an interval ago: threads with many spans format their own.
            self._timeline.flush(time.monotonic_ns() - round(1e9 * _EVERY))


running: Timeline | None = None
"""Timeline of this process, or None."""


def start(path: Path, rank: int) -> Timeline:
    """Start the timeline of this process; arguments and errors as of `Timeline`."""
    global running
    # Callers check `running` first, with an error for the user.
    assert running is None
    running = Timeline(path, rank)
    return running


def stop() -> None:
    """Stop the timeline of this process; harmless without one."""
    global running
    # `running` first, so that no call begins a span in a file that closes.
    ended, running = running, None
    if ended is not None:
        ended.close()


@contextlib.contextmanager
def timeline_span(name: str) -> Iterator[None]:
    """Show a block, or calls of a decorated function, as a span of this thread in the timeline.

    Costs 1.5 us, half of that without a timeline (`start_timeline`).

    Args:
        name: name of the span.

    Raises:
        TypeError: the name is not a string.

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
    # The track of this thread: the block may run in any thread.
    track = timeline.track()
    opened = track.begin(name, "span", name, time.monotonic_ns())
    try:
        yield
    finally:
        track.end(opened, time.monotonic_ns())


def _leave_to_parent() -> None:
    """Stop writing in a forked child, which shares the parent's file and lacks the thread."""
    global running
    if running is not None:
        # The file descriptor is shared with the parent, so the child must not write.
        running.is_closed = True
        running.lock = threading.Lock()  # another thread may have held it
        running = None


at_exit(ExitStage.TIMELINE, stop)
in_child(_leave_to_parent)
