"""A session of one process: from the beginning to the end, whatever comes between."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from calls import status_of

import strategies
from launcher import ROOT, environment
from strategies import errors
from strategies.checkpoint import Saver, checkpoint
from strategies.elastic import Preemption, event_log
from strategies.session import Summaries, TrainingSession, hooks


class Training:
    """Weights that go up by one at each step, and what was asked of it."""

    def __init__(self, folder):
        self.weights = np.zeros(2)
        self.checkpoints = strategies.CheckpointManager(folder, keep=50)
        self.saver = Saver(self.checkpoints, weights=self.weights, extra="begin")

    def step(self, loss=1.0):
        self.weights[:] += 1
        return {"loss": loss}

    def steps_saved(self):
        return [int(path.name.removeprefix("step-")) for path in checkpoint.list_steps(self.folder)]

    @property
    def folder(self):
        return self.checkpoints.latest().parent


def train(session, function, *args):
    while not session.should_stop():
        session.run(function, *args)


@pytest.fixture
def training(tmp_path):
    made = Training(tmp_path)
    with made.checkpoints:
        yield made


@pytest.mark.parametrize(
    ("rhythm", "last", "saved"),
    [
        ({"save_steps": 3}, 7, [0, 3, 6, 7]),
        ({"save_steps": 3}, 6, [0, 3, 6]),  # the last step is not saved twice
        ({"save_seconds": 1e-6}, 3, [0, 1, 2, 3]),
        ({"save_seconds": None}, 5, [0, 5]),
    ],
)
def test_checkpoints_at_the_beginning_by_the_rhythm_and_at_the_end(training, rhythm, last, saved):
    with TrainingSession(training.saver, hooks=[hooks.StopAtStep(last)], **rhythm) as session:
        train(session, training.step)
    assert training.steps_saved() == saved
    weights = checkpoint.restore(training.checkpoints.latest()).tensors["weights"]
    assert weights.tolist() == [last, last]


def test_it_goes_on_from_the_newest_checkpoint(training, tmp_path):
    with TrainingSession(training.saver, hooks=[hooks.StopAtStep(2)]) as session:
        train(session, training.step)
    again = Training(tmp_path)
    counted = hooks.StopAtStep(num_steps=3)
    training.checkpoints.close()
    with again.checkpoints, TrainingSession(again.saver, hooks=[counted]) as session:
        assert (session.step, session.last_step) == (2, 5)
        train(session, again.step)
    assert again.weights.tolist() == [5, 5]
    assert again.steps_saved() == [0, 2, 5]


def test_nothing_is_left_to_do(training):
    for _ in range(2):
        with TrainingSession(training.saver, hooks=[hooks.StopAtStep(2)]) as session:
            train(session, training.step)
    assert training.weights.tolist() == [2, 2]
    assert training.steps_saved() == [0, 2]


def test_it_begins_anew_where_asked_to(training):
    with TrainingSession(training.saver, hooks=[hooks.StopAtStep(2)]) as session:
        train(session, training.step)
    with TrainingSession(training.saver, restore=False, hooks=[hooks.StopAtStep(2)]) as session:
        assert session.step == 0
        train(session, training.step)
    assert training.weights.tolist() == [4, 4]


def test_things_that_are_new_objects_are_saved(training):
    with TrainingSession(training.saver, hooks=[hooks.StopAtStep(1)]) as session:
        assert session["extra"] == "begin"
        session.run(lambda: session.update(extra="end"))
        assert session["extra"] == "end"
    training.saver.restore(training.folder / "step-000000")
    assert training.saver["extra"] == "begin"
    training.saver.restore()
    assert training.saver["extra"] == "end"


@pytest.mark.parametrize("kind", [errors.AbortedError, errors.UnavailableError])
def test_after_a_recoverable_error_it_goes_back_to_the_last_checkpoint(
    training, kind, tmp_path, monkeypatch
):
    told = []
    monkeypatch.setattr(event_log, "write", lambda event, **facts: told.append((event, facts)))
    failing = iter([False, False, True, False, True, True, False, False])
    seen = []

    def step():
        values = training.step()
        seen.append(session.step)
        if next(failing):
            raise kind("gone for a moment")
        return values

    metrics = tmp_path / "metrics.jsonl"
    around = [hooks.StopAtStep(4), Summaries(metrics=metrics)]
    with TrainingSession(training.saver, save_steps=2, hooks=around) as session:
        train(session, step)
    # Step 2 fails once at its beginning, step 3 twice, each time back to what was saved.
    assert seen == [0, 1, 2, 2, 3, 2, 2, 3]
    assert training.weights.tolist() == [4, 4]
    lines = strategies.session.read_metrics(metrics)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    words = [(event, facts["step"]) for event, facts in told]
    back = [[("retried", step), ("restored", 2)] for step in (2, 3, 2)]
    assert words == [("saved", 0), ("saved", 2), *back[0], *back[1], *back[2], ("saved", 4)]
    assert f"{kind.__name__}: gone for a moment" in told[2][1]["error"]


def test_recoveries_end(training):
    calls = []

    def step():
        calls.append(training.weights.tolist())
        training.step()
        raise errors.UnavailableError("gone for good")

    def program():
        with TrainingSession(training.saver, retries=2) as session:
            session.run(step)

    with pytest.raises(errors.UnavailableError, match="for good"):
        program()
    assert calls == [[0, 0]] * 3


def test_other_errors_are_never_retried_and_nothing_is_saved_after_them(training):
    ended = hooks.RunAtEnd(lambda: "the end")
    calls = []

    def step():
        calls.append(1)
        training.step()
        if len(calls) == 2:
            raise ValueError("mine")

    def program():
        with TrainingSession(training.saver, hooks=[ended]) as session:
            train(session, step)

    with pytest.raises(ValueError, match="mine"):
        program()
    assert len(calls) == 2
    assert training.steps_saved() == [0]
    assert ended.value is None


def test_recovery_may_bring_another_saver(training, tmp_path):
    other = Training(tmp_path / "other")
    other.saver.save(9)
    errors_seen = []

    def recover(error):
        errors_seen.append(str(error))
        return other.saver

    def step():
        if not errors_seen:
            raise KeyError("a rank")

    with TrainingSession(
        training.saver, hooks=[hooks.StopAtStep(10)], recoverable=(KeyError,), recover=recover
    ) as session:
        train(session, step)
    assert errors_seen == ["'a rank'"]
    assert other.steps_saved() == [9, 10]


@pytest.mark.parametrize("end", [errors.OutOfRangeError("no more"), StopIteration()])
def test_the_end_of_the_input_is_an_end(training, end):
    batches = iter([1, 2])

    def step():
        try:
            batch = next(batches)
        except StopIteration:
            raise end from None
        training.weights[:] += batch

    with TrainingSession(training.saver) as session:
        train(session, step)
    assert session.step == 2
    assert training.steps_saved() == [0, 2]
    assert training.weights.tolist() == [3, 3]


def test_run_after_the_end_says_so(training):
    with TrainingSession(training.saver, hooks=[hooks.StopAtStep(0)]) as session:
        assert session.should_stop()
        with pytest.raises(RuntimeError, match=r"run: the session has stopped, .* \(step 0\)"):
            session.run(training.step)
    with pytest.raises(RuntimeError, match="is not open"):
        TrainingSession().run(training.step)


def test_something_else_may_count_the_steps():
    counter = iter([5, 5, 7])
    with TrainingSession(global_step=lambda: next(counter), hooks=[hooks.StopAtStep(7)]) as session:
        runs = 0
        while not session.should_stop():
            session.run(lambda: None)
            runs += 1
    assert (runs, session.step) == (3, 7)


def test_the_best_checkpoint_stays(tmp_path):
    with strategies.CheckpointManager(tmp_path, keep=1, best="max") as checkpoints:
        saver = Saver(checkpoints, weights=np.zeros(1))
        values = iter([0.5, 0.9, 0.7, 0.8])
        with TrainingSession(
            saver, save_steps=1, metric="accuracy", hooks=[hooks.StopAtStep(4)]
        ) as session:
            train(session, lambda: {"accuracy": next(values)})
        assert checkpoints.best().name == "step-000002"


# Being asked to stop


def test_asked_to_stop_it_saves_and_leaves(training):
    preemption = Preemption(signals=())

    def step(session):
        training.step()
        if session.step == 2:
            preemption.request()

    def program():
        with preemption:
            with TrainingSession(training.saver, preemption=preemption) as session:
                train(session, step, session)
            assert session.preempted

    assert status_of(program) == strategies.elastic.STOPPED_EARLY == 85
    assert training.steps_saved() == [0, 3]


def test_with_a_grace_period_it_saves_at_once_goes_on_and_saves_again(training, monkeypatch):
    preemption = Preemption(signals=(), grace_seconds=20)
    session = TrainingSession(training.saver, preemption=preemption)
    now = [0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def step():
        now[0] += 1  # a step takes a second, and saving nothing
        training.step()
        if session.step == 2:
            preemption.request()

    def program():
        with preemption, session:
            train(session, step)

    assert status_of(program) == 85
    assert now[0] <= preemption.asked_at + 20, "left in time"
    begin, first, last = training.steps_saved()
    assert (begin, first, last) == (0, 3, session.step)
    assert last > 3, "went on"
    assert checkpoint.restore(training.folder).tensors["weights"].tolist() == [last, last]


def test_asked_at_the_last_step_it_has_come_to_its_end(training):
    preemption = Preemption(signals=())
    with (
        preemption,
        TrainingSession(
            training.saver, preemption=preemption, hooks=[hooks.StopAtStep(1)]
        ) as session,
    ):
        session.run(preemption.request)
    assert not session.preempted


SIGNALLED = """
import atexit, os, signal, sys
import numpy as np
import strategies
from strategies.checkpoint import Saver
from strategies.session import TrainingSession, hooks

def told_again():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)

if "--told-again" in sys.argv:
    atexit.register(told_again)
weights = np.zeros(2)
with strategies.CheckpointManager(sys.argv[1]) as checkpoints:
    saver = Saver(checkpoints, weights=weights)
    with TrainingSession(saver, hooks=[hooks.StopAtStep(6)]) as session:
        while not session.should_stop():
            def step():
                weights[:] += np.sin(weights + session.step)
                if session.step == 2 and "--resume" not in sys.argv:
                    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
            session.run(step)
print(weights.tobytes().hex(), signal.getsignal(signal.SIGTERM).name)
"""


def signalled(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-c", SIGNALLED, str(folder), *arguments],
        cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_leaves_a_checkpoint_and_status_85(tmp_path, name):
    first = signalled(tmp_path / "a", name)
    assert (first.returncode, first.stdout) == (85, ""), first
    second = signalled(tmp_path / "a", name, "--resume")
    whole = signalled(tmp_path / "b", name, "--resume")
    assert whole.returncode == 0, whole
    assert second.stdout == whole.stdout
    assert whole.stdout.endswith("SIG_DFL\n"), "the handlers are given back"


def test_a_signal_that_comes_late_does_not_end_who_is_leaving(tmp_path):
    """Slurm tells each node by itself, and mpirun of the first one its ranks: on busy ones late."""
    late = signalled(tmp_path, "SIGUSR1", "--told-again")
    assert (late.returncode, late.stderr) == (85, ""), late


def test_a_session_gives_handlers_back(training):
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with TrainingSession() as session:
            assert callable(signal.getsignal(signal.SIGUSR1))
            session.request_stop()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_ranks_that_are_not_in_step_cannot_share_a_manager(training):
    class Ranks:
        comm = object()

    class Shared:
        checkpoints = Ranks()

    with pytest.raises(TypeError, match="expected a Saver or None, got 3"):
        TrainingSession(3)
    with pytest.raises(ValueError, match="not in step cannot save together"):
        TrainingSession(Shared(), in_step=False)
