"""Hooks of a session: their order, and what each does."""

import io
import logging
import math
import signal

import numpy as np
import pytest

import strategies
from strategies import errors
from strategies.checkpoint import Saver
from strategies.session import Summaries, TrainingSession, hooks, metrics_hook
from strategies.session.hook_base import Timer


class Witness(hooks.Hook):
    def __init__(self, name, order, seen):
        self.name, self.order, self.seen = name, order, seen

    def begin(self, session):
        self.seen.append(f"{self.name} begin {session.step}")

    def after_create(self, session):
        self.seen.append(f"{self.name} after_create {session.step}")

    def before_run(self, session):
        self.seen.append(f"{self.name} before_run {session.step}")

    def after_run(self, session, values):
        self.seen.append(f"{self.name} after_run {session.step} {dict(values)}")

    def after_save(self, session, path):
        self.seen.append(f"{self.name} after_save {path.name}")

    def end(self, session):
        self.seen.append(f"{self.name} end {session.step}")

    def close(self):
        self.seen.append(f"{self.name} close")


def run(*around, steps=3, function=lambda: None, **options):
    with TrainingSession(hooks=[hooks.StopAtStep(steps), *around], **options) as session:
        while not session.should_stop():
            session.run(function)
    return session


def test_callbacks_come_in_order(tmp_path):
    seen = []
    late, early = Witness("late", 51, seen), Witness("early", 50, seen)
    saver = Saver(strategies.CheckpointManager(tmp_path), weights=np.zeros(1))
    with saver.checkpoints:
        run(late, early, steps=1, function=lambda: {"loss": 1}, saver=saver, save_seconds=None)
    calls = ["begin 0", "after_create 0", "after_save step-000000", "before_run 0"]
    calls += ["after_run 1 {'loss': 1}", "after_save step-000001", "end 1", "close"]
    assert seen == [f"{name} {call}" for call in calls for name in ("early", "late")]


class FailsAtClose(hooks.Hook):
    order = 49

    def __init__(self, fails_at_begin):
        self.fails_at_begin = fails_at_begin

    def begin(self, session):
        if self.fails_at_begin:
            raise KeyError("begin")

    def close(self):
        raise ZeroDivisionError("close")


@pytest.mark.parametrize("fails_at_begin", [False, True])
def test_all_hooks_and_the_signals_are_closed_if_one_fails(fails_at_begin):
    seen, before = [], signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError, match="close"):
        run(FailsAtClose(fails_at_begin), Witness("later", 50, seen))
    assert seen[-1] == "later close"
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_bar_is_closed_if_the_file_cannot_be(monkeypatch, tmp_path, capsys):
    def fails(writer):
        raise ZeroDivisionError("close")

    with monkeypatch.context() as patches:
        patches.setattr(metrics_hook.MetricsWriter, "close", fails)
        with pytest.raises(ZeroDivisionError):
            run(Summaries(metrics=tmp_path / "metrics.jsonl", progress="steps"))
    assert "steps: 3/3 (100%)" in capsys.readouterr().err


def test_the_documented_order():
    order = [
        hooks.StopAtStep, hooks.StepCounter, hooks.LogValues, hooks.NanGuard, hooks.Hook, Summaries,
        hooks.SaveCheckpoints, hooks.Profiler, hooks.RunAtEnd,
    ]  # fmt: skip
    assert sorted(order, key=lambda kind: kind.order) == order
    assert len({kind.order for kind in order}) == len(order)
    for kind in order:
        row = next(line for line in hooks.__doc__.splitlines() if f"`{kind.__name__}`" in line
                   or (kind is hooks.Hook and "your own |" in line))  # fmt: skip
        assert f" {kind.order} " in row


def test_a_timer_is_due_at_first_and_never_twice_at_one_step():
    timer = Timer("test", steps=3)
    due = []
    for step in [1, 1, 2, 3, 4, 4, 5, 9]:
        if timer.due(step):
            timer.done(step)
            due.append(step)
    assert due == [1, 4, 9]
    timer = Timer("test", seconds=1e-9)
    assert timer.due(1)
    timer.done(1)
    assert not timer.due(1)
    assert timer.due(2)


@pytest.mark.parametrize("given", [{}, {"steps": 1, "seconds": 1}, {"steps": 0}, {"seconds": -1}])
def test_a_timer_wants_steps_or_seconds(given):
    with pytest.raises(ValueError, match="test: "):
        Timer("test", **given)


@pytest.mark.parametrize("given", [{}, {"last_step": 1, "num_steps": 1}, {"last_step": -1}])
def test_stop_at_step_wants_one_of_two(given):
    with pytest.raises(ValueError, match="StopAtStep: "):
        hooks.StopAtStep(**given)


def test_steps_per_second_are_counted(caplog):
    counter = hooks.StepCounter(2)
    with caplog.at_level(logging.INFO, "strategies.session"):
        run(counter, steps=5)
    assert counter.steps_per_second > 10
    assert [r.message.split(":")[0] for r in caplog.records] == ["step 2", "step 4"]


@pytest.mark.parametrize(
    ("given", "steps"), [({"every_steps": 2}, [1, 3, 5]), ({"at_end": True}, [5])]
)
def test_values_are_logged(caplog, given, steps):
    with caplog.at_level(logging.INFO, "strategies.session"):
        run(hooks.LogValues(**given), steps=5, function=lambda: {"loss": 0.12346, "epoch": 3})
    assert [r.message for r in caplog.records] == [
        f"step {step}: loss 0.1235, epoch 3" for step in steps
    ]


def test_logging_wants_one_of_three():
    with pytest.raises(ValueError, match="LogValues: "):
        hooks.LogValues(at_end=True, every_steps=1)
    with pytest.raises(ValueError, match="LogValues: "):
        hooks.LogValues()


@pytest.mark.parametrize("bad", [math.nan, math.inf, np.float32("nan")])
def test_what_is_not_a_number_is_found_before_it_is_written(tmp_path, bad):
    losses = iter([1.0, bad])
    metrics = tmp_path / "metrics.jsonl"
    saver = Saver(strategies.CheckpointManager(tmp_path / "run"), weights=np.zeros(1))
    around = [Summaries(metrics=metrics), hooks.NanGuard()]
    values = {"saver": saver, "save_steps": 1, "function": lambda: {"loss": next(losses)}}
    with saver.checkpoints:
        with pytest.raises(hooks.NanLossError, match=r"finite loss, got (nan|inf) \(step 2\)"):
            run(*around, **values)
        assert saver.checkpoints.latest().name == "step-000001"
    assert [line["step"] for line in strategies.session.read_metrics(metrics)] == [1]


def test_what_is_not_a_number_may_be_an_end(caplog):
    session = run(hooks.NanGuard(fail=False), function=lambda: {"loss": math.nan})
    assert session.step == 1
    assert "expected a finite loss, got nan (step 1); stopping" in caplog.text


def test_the_guard_says_what_it_misses():
    with pytest.raises(errors.InvalidArgumentError, match=r"to return 'loss', got \['cost'\]"):
        run(hooks.NanGuard(), function=lambda: {"cost": 1})


def test_a_last_value():
    final = hooks.RunAtEnd(lambda: 0.97)
    assert final.value is None
    run(final)
    assert final.value == 0.97


@pytest.mark.parametrize("name", ["step", "n", "self"])
def test_values_may_have_the_name_of_an_argument(tmp_path, name):
    path = tmp_path / "metrics.jsonl"
    run(Summaries(metrics=path, progress="steps"), function=lambda: {name: 7, "loss": 0.5})
    # A step of its own wins over a value of this name.
    expected = [{name: 7, "loss": 0.5, "step": step} for step in (1, 2, 3)]
    assert strategies.session.read_metrics(path) == expected


class Events:
    def __init__(self):
        self.seen = []

    def add_scalar(self, name, value, step):
        self.seen.append((name, value, step))


def test_whatever_takes_scalars_gets_them():
    events = Events()
    values = {"loss": np.float32(0.5), "phase": "warm-up"}
    run(Summaries(tensorboard=events, every_steps=2), function=lambda: values)
    assert events.seen == [("loss", 0.5, 1), ("loss", 0.5, 3)]


def test_event_files_of_tensorboard(tmp_path):
    from tensorboardX.proto import event_pb2

    def records(data):
        while data:
            length = int.from_bytes(data[:8], "little")
            yield event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]

    run(Summaries(tensorboard=tmp_path), function=lambda: {"loss": 0.5})
    (file,) = tmp_path.iterdir()
    found = [
        (value.tag, value.simple_value, event.step)
        for event in records(file.read_bytes())
        for value in event.summary.value
    ]
    assert found == [("loss", 0.5, step) for step in (1, 2, 3)]


def test_without_tensorboardx_it_says_how_to_get_it(tmp_path, monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *rest):
        if name == "tensorboardX":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install tensorboardX"):
        run(Summaries(tensorboard=tmp_path))


def test_progress_shows_the_first_value(monkeypatch, capsys):
    shown = io.StringIO()
    defaults = {**metrics_hook.Progress.__init__.__kwdefaults__, "file": shown}
    monkeypatch.setattr(metrics_hook.Progress.__init__, "__kwdefaults__", defaults)
    run(Summaries(progress="epochs"), function=lambda: {"loss": 0.25, "speed": 7})
    (line,) = shown.getvalue().splitlines()
    assert line.startswith("epochs: 3/3 (100%)")
    assert line.endswith("loss 0.25")


def test_progress_counts_the_steps_before_a_restore(tmp_path, capsys):
    for steps in (2, 5, 2):
        with strategies.CheckpointManager(tmp_path) as checkpoints:
            saver = Saver(checkpoints, weights=np.zeros(1))
            run(Summaries(progress="steps"), steps=steps, saver=saver, save_steps=1, restore=True)
    shown = [line.partition(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["steps: 2/2 (100%)", "steps: 5/5 (100%)", "steps: 5/5 (100%)"]


def test_the_end_may_be_unknown(capsys):
    with TrainingSession(hooks=[Summaries(progress="steps")]) as session:
        session.run(lambda: None)
    assert "steps: 1, " in capsys.readouterr().err
