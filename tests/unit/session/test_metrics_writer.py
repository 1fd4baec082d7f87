"""Metrics, the loss curve, and progress on terminals and elsewhere."""

import builtins
import io
import json
import math
import os
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest
from calls import together

from requirements import needs
from strategies import errors
from strategies.session import metrics_writer
from strategies.session.metrics_writer import MetricsWriter, Progress, loss_curve, read_metrics


def strict(text):
    """Read JSON as the standard has it, without NaN and Infinity."""

    def refuse(word):
        raise ValueError(word)

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


# MetricsWriter


def test_every_line_is_there_when_write_returns(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        assert path.read_text() == ""
        writer.write(step=0, loss=2.5, accuracy=np.float32(0.5), warm=True, phase="train")
        assert strict(path.read_text()) == [
            {"step": 0, "loss": 2.5, "accuracy": 0.5, "warm": True, "phase": "train"}
        ]
        writer.write(step=np.int64(1), loss=np.array(0.25), count=np.array([3]))
        writer.write(step=2)
    assert strict(path.read_text())[1:] == [{"step": 1, "loss": 0.25, "count": 3}, {"step": 2}]


def test_numbers_that_json_does_not_have(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(step=0, a=math.nan, b=np.float32(np.inf), c=-math.inf)
    (fields,) = strict(path.read_text())
    assert fields == {"step": 0, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert math.isnan(float(fields["a"]))
    assert float(fields["c"]) == -math.inf


@pytest.mark.parametrize("value", [None, [1], np.ones(2), np.array([]), 1j, object()])
def test_what_is_no_scalar_is_refused_and_writes_nothing(tmp_path, value):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        with pytest.raises(TypeError, match=r"not a scalar.*name: loss"):
            writer.write(step=0, loss=value)
        with pytest.raises(TypeError):
            writer.write(step=0.5)
        writer.write(step=1, loss=1)
    assert strict(path.read_text()) == [{"step": 1, "loss": 1}]


def test_a_new_run_begins_a_new_file(tmp_path):
    path = tmp_path / "m.jsonl"
    for loss in (1, 2):
        with MetricsWriter(path) as writer:
            writer.write(step=0, loss=loss)
    assert strict(path.read_text()) == [{"step": 0, "loss": 2}]


@pytest.mark.parametrize(("resume_step", "kept"), [(-1, 0), (0, 1), (4, 5), (9, 10), (99, 10)])
def test_a_resumed_run_drops_what_it_will_write_again(tmp_path, resume_step, kept):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(10):
            writer.write(step=step, loss=1.0)
    with MetricsWriter(path, resume_step=resume_step) as writer:
        writer.write(step=100, loss=2.0)
    assert [fields["step"] for fields in strict(path.read_text())] == [*range(kept), 100]
    assert os.listdir(tmp_path) == ["m.jsonl"]


@pytest.mark.parametrize("cut", [1, 5, 17])
def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path, cut):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(step=0, loss=1.0)
        writer.write(step=1, loss=1.0)
    path.write_bytes(path.read_bytes()[:-cut])
    assert [fields["step"] for fields in read_metrics(path)] == [0]
    with MetricsWriter(path, resume_step=5) as writer:
        writer.write(step=6)
    assert [fields["step"] for fields in strict(path.read_text())] == [0, 6]


def test_resuming_without_a_file_begins_one(tmp_path):
    with MetricsWriter(tmp_path / "m.jsonl", resume_step=3) as writer:
        writer.write(step=4)
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 4}]


@pytest.mark.parametrize("line", ["", "{", "[]", '{"loss": 1}', '{"step": "1"}', "[" * 100_000])
def test_a_damaged_line_is_named_and_the_file_left_alone(tmp_path, line):
    path = tmp_path / "m.jsonl"
    text = f'{{"step": 0}}\n{line}\n{{"step": 2}}\n'
    path.write_text(text)
    for read in (read_metrics, lambda path: MetricsWriter(path, resume_step=9)):
        with pytest.raises(errors.DataLossError, match=r"m\.jsonl, line 2"):
            read(path)
    assert path.read_text() == text


def test_closing_twice_and_writing_after_close(tmp_path):
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.close()
    writer.close()
    with pytest.raises(errors.FailedPreconditionError, match="after close"):
        writer.write(step=1)


def test_a_full_disk_leaves_whole_lines_and_the_writer_usable(tmp_path):
    path = tmp_path / "m.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsWriter(path) as writer:
        writer.write(step=0, text="x" * 50)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            with pytest.raises(errors.ResourceExhaustedError, match=r"m\.jsonl"):
                writer.write(step=1, text="y" * 100)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        writer.write(step=2)
    assert [fields["step"] for fields in strict(path.read_text())] == [0, 2]


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.FailedPreconditionError, match="file"):
        MetricsWriter(tmp_path / "file" / "m.jsonl")
    with pytest.raises(errors.NotFoundError, match="missing"):
        read_metrics(tmp_path / "missing")


def test_lines_of_several_threads_do_not_mix(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:

        def work(thread):
            for step in range(100):
                writer.write(step=step, thread=thread, text="x" * 200)

        together(work, range(4))
    assert len(strict(path.read_text())) == 400


# loss_curve


def test_loss_curve_draws_without_pyplot(tmp_path):
    needs("matplotlib")
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        for step in range(20):
            writer.write(step=step, loss=math.nan if step == 3 else 1 / (step + 1), seconds=step)
        writer.write(step=20, held_out_loss=0.5)
    code = (
        "import sys, warnings, matplotlib.figure; warnings.simplefilter('error')\n"
        "from strategies.session.metrics_writer import loss_curve\n"
        "loss_curve(sys.argv[1], sys.argv[2])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    picture = tmp_path / "plots" / "loss.png"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m.jsonl"), str(picture)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert os.listdir(picture.parent) == ["loss.png"]


def test_loss_curve_without_a_loss(tmp_path):
    needs("matplotlib")
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write(step=0, accuracy=1)
    with pytest.raises(errors.InvalidArgumentError, match=r"no loss.*\['accuracy', 'step'\]"):
        loss_curve(tmp_path / "m.jsonl", tmp_path / "loss.png")
    with pytest.raises(errors.NotFoundError, match="missing"):
        loss_curve(tmp_path / "missing", tmp_path / "loss.png")


def test_loss_curve_says_how_to_install_matplotlib(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="`pip install matplotlib`"):
        loss_curve(tmp_path / "m.jsonl", tmp_path / "loss.png")


# Progress


class Clock:
    """Stands for `time.monotonic`: goes on when told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(metrics_writer.time, "monotonic", lambda: self.now)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_writes_a_line_every_interval_and_one_at_the_end(monkeypatch):
    clock, file = Clock(monkeypatch), io.StringIO()
    with Progress(10, description="training", file=file) as progress:
        for step in range(10):
            clock.now += 0.5
            progress.update(loss=1 / (step + 1), phase="warm")
    assert file.getvalue() == (
        "training: 4/10 (40%), 2.0 s, 2/s, loss 0.25, phase warm\n"
        "training: 8/10 (80%), 4.0 s, 2/s, loss 0.125, phase warm\n"
        "training: 10/10 (100%), 5.0 s, 2/s, loss 0.1, phase warm\n"
    )


def test_progress_of_nothing_and_beyond_the_total(monkeypatch):
    Clock(monkeypatch)
    file = io.StringIO()
    with Progress(0, file=file):
        pass
    with Progress(2, description="more", file=file) as progress:
        progress.update(3)
    assert file.getvalue() == "0/0, 0.0 s\nmore: 3/2 (150%), 0.0 s\n"
    with pytest.raises(ValueError, match="-1"):
        Progress(-1)


def test_progress_from_a_later_step_counts_only_new_ones_in_its_speed(monkeypatch):
    clock, file = Clock(monkeypatch), io.StringIO()
    with Progress(60, description="epochs", file=file, interval=20, initial=40) as progress:
        clock.now += 10
        progress.update(20)
    assert file.getvalue() == "epochs: 60/60 (100%), 10.0 s, 2/s\n"


def test_progress_shows_nothing_unless_enabled(capfd):
    for file in (None, io.StringIO(), Terminal()):
        with Progress(5, description="x", enabled=False, interval=0, file=file) as progress:
            progress.update(5, loss=1.0)
        assert file is None or file.getvalue() == ""
    assert capfd.readouterr() == ("", "")


def test_progress_is_a_bar_on_a_terminal_and_starts_no_thread():
    file = Terminal()
    before = threading.active_count()
    with Progress(4, description="training", file=file) as progress:
        for _ in range(4):
            progress.update(loss=np.float32(0.25))
        assert threading.active_count() == before
    text = file.getvalue()
    assert "\r" in text
    assert "training: 100%" in text
    assert "4/4" in text
    assert "loss 0.25" in text
    assert text.endswith("\n")


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_progress_closes_twice_and_shows_nothing_after(kind):
    file = kind()
    progress = Progress(2, file=file, interval=0)
    progress.update()
    progress.close()
    shown = file.getvalue()
    progress.close()
    progress.update()
    assert file.getvalue() == shown


def test_progress_goes_to_standard_error_by_default(capfd):
    with Progress(1, description="to stderr") as progress:
        progress.update()
    out, err = capfd.readouterr()
    assert out == ""
    assert "to stderr: 1/1 (100%)" in err
