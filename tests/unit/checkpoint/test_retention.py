"""Which checkpoints stay."""

import math

import numpy as np
import pytest
from checkpoint_samples import steps

from strategies import errors
from strategies.checkpoint import Saver, checkpoint
from strategies.checkpoint.checkpoint_manager import CheckpointManager


class Clock:
    """Time in hours."""

    def __init__(self, monkeypatch):
        self.hours = 0.0
        monkeypatch.setattr(checkpoint.time, "time", lambda: self.hours * 3600)


def saved(manager, clock, hours):
    for step, hour in enumerate(hours):
        clock.hours = hour
        manager.save({}, step=step)


def test_one_every_two_hours_stays(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    with CheckpointManager(tmp_path, keep=2, keep_every_n_hours=2) as manager:
        saved(manager, clock, np.arange(20) / 2)  # half an hour apart
    assert steps(tmp_path) == [0, 4, 8, 12, 16, 18, 19]
    # Another job goes on in the same way.
    with CheckpointManager(tmp_path, keep=1, keep_every_n_hours=2) as manager:
        clock.hours = 10
        manager.save({}, step=20)
    assert steps(tmp_path) == [0, 4, 8, 12, 16, 20]


def test_a_clock_that_goes_back_takes_nothing_away(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    with CheckpointManager(tmp_path, keep=1, keep_every_n_hours=1) as manager:
        saved(manager, clock, [5, 6, 7, 1, 2, 3, 7.5, 8, 8.1])
    assert steps(tmp_path) == [0, 1, 2, 7, 8]


@pytest.mark.parametrize(("best", "expected"), [("min", 2), ("max", 4)])
def test_the_best_stays_and_is_found(tmp_path, best, expected):
    metrics = [5.0, None, 1.0, math.nan, 9.0, 9.0, -math.inf, np.float32(2), 1.0, 3]
    with CheckpointManager(tmp_path, keep=1, best=best) as manager:
        assert manager.best() is None
        for step, metric in enumerate(metrics):
            manager.save({}, step=step, metric=metric)
        assert manager.best() == tmp_path / f"step-{expected:06d}"
        assert manager.latest() == tmp_path / "step-000009"
    assert steps(tmp_path) == [expected, 9]


@pytest.mark.parametrize("background", [False, True])
def test_the_best_can_be_restored(tmp_path, background):
    weights = np.zeros(2)
    with CheckpointManager(tmp_path, keep=1, best="max", background=background) as checkpoints:
        saver = Saver(checkpoints, weights=weights)
        for step, accuracy in enumerate([0.5, 0.9, 0.7]):
            weights[:] = step
            saver.save(step, metric=accuracy)
        assert saver.restore() == 2
        assert saver.restore(checkpoints.best()) == 1
    assert weights.tolist() == [1, 1]


def test_wrong_rules_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"best.*'lowest'"):
        CheckpointManager(tmp_path, best="lowest")
    for hours in (0, -1, math.nan):
        with pytest.raises(ValueError, match="keep_every_n_hours"):
            CheckpointManager(tmp_path, keep_every_n_hours=hours)
    manager = CheckpointManager(tmp_path)
    with pytest.raises(errors.InvalidArgumentError, match="bad metric.*'good'"):
        manager.save({}, step=1, metric="good")
    with pytest.raises(ValueError, match="without best"):
        manager.best()


def test_all_stay_that_a_run_went_back_from(tmp_path):
    with CheckpointManager(tmp_path, keep=1) as manager:
        for step in (0, 5, 6, 2, 3):
            manager.save({}, step=step)
    assert steps(tmp_path) == [3, 6]
