"""Metrics writer: JSON lines, a loss plot and a progress line."""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from strategies import errors
from strategies.core import atomic_io
from strategies.core.validation import integer

__all__ = ["MetricsWriter", "Progress", "loss_curve", "phrase", "read_metrics"]


class MetricsWriter:
    """A file with one JSON object per line, each written at once: `{"step": 3, "loss": 0.5}`.

    A new run replaces the file. A resumed run keeps the lines up to the step that it resumes from
    and drops later ones, which it writes again. So each step occurs once, as in an uninterrupted
    run. An incomplete last line, left by a crash, is also dropped.

    Numbers that JSON cannot represent are written as the strings "NaN", "Infinity", "-Infinity",
    which `float` accepts.

    Args:
        path: the file; its directory is created.
        resume_step: step of the checkpoint that the run continues from; None for a new run.

    Raises:
        DataLossError: the run resumes, and a line other than the last is damaged.
        OpError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        with atomic_io.translate_errors("metrics", self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is not None and self._path.exists():
                _keep_until(self._path, resume_step)
            mode = "wb" if resume_step is None else "ab"
            # Unbuffered: readers see a line at once, and a crash loses none.
            self._file = self._path.open(mode, buffering=0)

    def write(self, /, *, step: int, **scalars: Any) -> None:
        """Write one line, so that other processes see it when the call returns.

        Args:
            step: training step, an integer.
            scalars: name -> number, bool or str; NumPy scalars and arrays of one element count as
                numbers.

        Raises:
            TypeError: a value is not a scalar.
            FailedPreconditionError: the writer is closed.
            ResourceExhaustedError: the disk is full.
        """
        # Converted before the lock is taken: reading a device array may take long.
        fields = {name: _scalar(name, value) for name, value in scalars.items()}
        # `_scalar` has turned NaN and infinities into text, because readers of other languages
        # reject them.
        text = json.dumps({"step": operator.index(step), **fields}, allow_nan=False)
        with self._lock, atomic_io.translate_errors("metrics", self._path):
            if self._file.closed:
                raise errors.FailedPreconditionError(
                    f"metrics: write after close (file: {self._path})"
                )
            begin = self._file.seek(0, os.SEEK_END)
            try:
                rest = memoryview(f"{text}\n".encode())
                while rest:
                    # An unbuffered file may write less than it is given.
                    rest = rest[self._file.write(rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.truncate(begin)  # half a line would damage the next one
                raise

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        with self._lock, atomic_io.translate_errors("metrics", self._path):
            self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; an incomplete last line is skipped.

    Raises:
        NotFoundError: the file does not exist.
        DataLossError: a line other than the last is damaged; the message gives its number.
    """
    with atomic_io.translate_errors("metrics", Path(path)):
        return [fields for _, fields in _lines(Path(path))]


def loss_curve(path_jsonl: str | os.PathLike[str], path_png: str | os.PathLike[str]) -> None:
    """Draw every metric with "loss" in its name over the step, as a PNG picture.

    Args:
        path_jsonl: file of a `MetricsWriter`.
        path_png: file of the picture; an existing one is replaced.

    Raises:
        ImportError: matplotlib is not installed.
        NotFoundError: the metrics file does not exist.
        DataLossError: the metrics file is damaged.
        InvalidArgumentError: the metrics file contains no loss.
    """
    try:
        # Without pyplot, which would select a GUI backend and keep the figure alive.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "loss_curve: matplotlib is missing; install it by `pip install matplotlib`"
        ) from error
    lines = read_metrics(path_jsonl)
    names = list(dict.fromkeys(name for fields in lines for name in fields if "loss" in name))
    if not names:
        found = sorted({name for fields in lines for name in fields})
        raise errors.InvalidArgumentError(
            f"loss_curve: no loss, expected a name with 'loss', got {found} (file: {path_jsonl})"
        )
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss")
    for name in names:
        points = [(fields["step"], float(fields[name])) for fields in lines if name in fields]
        steps, values = zip(*points, strict=True)
        # A line through one point would be invisible.
        marker = "o" if len(points) == 1 else None
        axes.plot(steps, values, label=name, marker=marker)
    axes.grid(alpha=0.3)
    axes.legend()
    # Replaced in one step, so that a viewer never reads half a picture.
    part = Path(path_png).with_name(f".tmp-{Path(path_png).name}")
    with atomic_io.translate_errors("loss_curve", Path(path_png)):
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            figure.savefig(part, format="png", dpi=120)
            os.replace(part, path_png)
        finally:
            part.unlink(missing_ok=True)


class Progress:
    """Shows progress: a bar on a terminal, a line every `interval` seconds elsewhere.

    Args:
        total: number of the last step; None if unknown.
        description: description of the work, in a word or two.
        enabled: whether to show anything; use False on all ranks but one.
        interval: seconds between lines if the output is not a terminal.
        file: output file; None for standard error.
        initial: number of steps done before.

    Example:
        >>> with Progress(3, description="training", file=sys.stdout) as progress:
        ...     for step in range(3):
        ...         progress.update(loss=1 / (step + 1))  # doctest: +ELLIPSIS
        training: 3/3 (100%), ... s, .../s, loss 0.3333
    """

    def __init__(
        self,
        total: int | None,
        *,
        description: str = "",
        enabled: bool = True,
        interval: float = 2.0,
        file: TextIO | None = None,
        initial: int = 0,
    ) -> None:
        integer("Progress", "initial", initial, least=0)
        if total is not None:
            integer("Progress", "total", total, least=0)
        self._total = total
        self._description = description
        self._file = sys.stderr if file is None else file
        self._interval = interval
        self._begin = self._shown_at = time.monotonic()
        self._initial = self._done = initial
        self._values: dict[str, Any] = {}
        self._open = enabled
        self._bar = (
            _bar(total, description, self._file, initial)
            if enabled and self._on_terminal()
            else None
        )

    def update(self, /, n: int = 1, **values: Any) -> None:
        """Count `n` more steps as done and show `values`; does nothing after `close`."""
        if not self._open:
            return
        self._done += n
        self._values |= values
        if self._bar is not None:
            self._bar.set_postfix_str(phrase(self._values), refresh=False)
            self._bar.update(n)
        # Lines in a log file should not be one per step.
        elif time.monotonic() - self._shown_at >= self._interval:
            self._show()

    def close(self) -> None:
        """Show the final state; harmless when repeated."""
        if not self._open:
            return
        self._open = False
        if self._bar is not None:
            self._bar.close()
        else:
            self._show()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _on_terminal(self) -> bool:
        isatty = getattr(self._file, "isatty", None)
        return bool(isatty and isatty())

    def _show(self) -> None:
        now = self._shown_at = time.monotonic()
        seconds = now - self._begin
        share = f" ({self._done / self._total:.0%})" if self._total else ""
        speed = f", {(self._done - self._initial) / seconds:.4g}/s" if seconds > 0 else ""
        values = f", {phrase(self._values)}" if self._values else ""
        name = f"{self._description}: " if self._description else ""
        of = "" if self._total is None else f"/{self._total}"
        line = f"{name}{self._done}{of}{share}, {seconds:.1f} s{speed}{values}\n"
        self._file.write(line)
        self._file.flush()


def _bar(total: int | None, description: str, file: TextIO, initial: int) -> Any:
    # Here, because only a terminal needs it.
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # starts no thread

    return Bar(
        total=total, initial=initial, desc=description, file=file, miniters=1, dynamic_ncols=True
    )


def phrase(values: Mapping[str, Any]) -> str:
    """Return values as text: "loss 0.3333, accuracy 0.9"."""
    return ", ".join(
        f"{name} {value}" if isinstance(value, (str, int)) else f"{name} {float(value):.4g}"
        for name, value in values.items()
    )


def _scalar(name: str, value: Any) -> bool | int | float | str:
    """Return a value in a type that JSON supports."""
    if isinstance(value, (np.generic, np.ndarray)) and value.size == 1:
        value = value.item()
    if isinstance(value, (bool, int, str)):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"metrics: not a scalar, expected a number, bool or str, "
            f"got {type(value).__name__} (name: {name})"
        ) from error
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each line with its parsed object; skip an incomplete last line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                # Another process may be writing it, or a crash has cut it.
                return
            try:
                fields = json.loads(line)
                operator.index(fields["step"])
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise errors.DataLossError(
                    f"metrics: damaged line, expected a JSON object with a step, "
                    f"got {line[:80]!r} (file: {path}, line {number})"
                ) from error
            yield line, fields


def _keep_until(path: Path, step: int) -> None:
    """Drop the lines of later steps, atomically."""
    kept = b"".join(line for line, fields in _lines(path) if fields["step"] <= step)
    part = path.with_name(f".tmp-{path.name}")
    # A crash may have left it behind, and `write_file` requires that it does not exist.
    part.unlink(missing_ok=True)
    atomic_io.write_file(part, kept)
    atomic_io.rename(part, path)
