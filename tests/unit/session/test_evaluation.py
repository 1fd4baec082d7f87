"""Every new checkpoint is scored once."""

import numpy as np
import pytest

import strategies
from strategies import errors
from strategies.checkpoint import Saver, checkpoint
from strategies.session import Evaluator, TrainingSession, hooks
from strategies.session.evaluation import EvaluateCheckpoints


class Scored:
    def __init__(self, tmp_path, evaluate=None):
        self.folder, self.seen = tmp_path / "run", []
        self.evaluator = Evaluator(
            self.folder, evaluate or self.evaluate, scores=tmp_path / "scores.jsonl"
        )

    def evaluate(self, path):
        self.seen.append(path.name)
        return {"sum": checkpoint.restore(path).tensors["w"].sum()}

    def save(self, step, keep=5):
        checkpoint.save(self.folder, {"w": np.full(2, step)}, step=step, keep=keep)

    @property
    def lines(self):
        lines = strategies.session.read_metrics(self.evaluator.scores)
        return [(line["step"], line["sum"]) for line in lines]


def test_each_is_scored_once_in_the_order_of_writing(tmp_path):
    scored = Scored(tmp_path)
    assert scored.evaluator.score_new() == 0, "nothing there yet"
    scored.save(5)
    scored.save(10)
    assert scored.evaluator.score_new() == 2
    assert scored.evaluator.score_new() == 0
    scored.save(7)  # training has gone back
    assert scored.evaluator.score_new() == 1
    assert scored.lines == [(5, 10), (10, 20), (7, 14)]


def test_an_evaluator_that_is_started_again_goes_on_with_what_is_new(tmp_path):
    scored = Scored(tmp_path)
    scored.save(1)
    scored.evaluator.score_new()
    scored.save(2)
    again = Scored(tmp_path)
    assert again.evaluator.score_new() == 1
    assert again.seen == ["step-000002"]


def test_scores_do_not_replace_the_step_and_the_sequence_number(tmp_path):
    scored = Scored(tmp_path, lambda path: {"sum": 1, "step": 8, "sequence": 9})
    scored.save(5)
    assert scored.evaluator.score_new() == 1
    assert scored.evaluator.score_new() == 0
    assert scored.lines == [(5, 1)]


def test_one_that_is_deleted_before_its_turn_is_passed_over(tmp_path):
    def evaluate(path):
        if path.name == "step-000001":
            scored.save(2, keep=1)
        return {"sum": checkpoint.restore(path).tensors["w"].sum()}

    scored = Scored(tmp_path, evaluate)
    scored.save(1)
    assert scored.evaluator.score_new() == 1
    assert scored.lines == [(2, 4)]


def test_a_damaged_one_is_an_error(tmp_path):
    scored = Scored(tmp_path)
    scored.save(1)
    shard = scored.folder / "step-000001" / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(errors.DataLossError, match="checksum"):
        scored.evaluator.score_new()


def test_it_runs_until_training_is_over_and_scores_what_came_last(tmp_path):
    scored = Scored(tmp_path)

    def finished():
        step = len(scored.seen) + 1
        scored.save(step)
        return step == 3

    scored.evaluator.run(finished)
    assert [step for step, _ in scored.lines] == [1, 2, 3]


def test_asked_to_leave_it_leaves(tmp_path):
    scored = Scored(tmp_path)
    scored.save(1)
    scored.evaluator.run(lambda: False, stop=lambda: True)
    assert not scored.seen


@pytest.mark.parametrize("background", [False, True])
def test_a_session_scores_its_own_checkpoints(tmp_path, background):
    scored, weights = Scored(tmp_path), np.zeros(2)
    with strategies.CheckpointManager(scored.folder, background=background) as checkpoints:
        saver = Saver(checkpoints, w=weights)
        around = [hooks.StopAtStep(5), EvaluateCheckpoints(scored.evaluator)]
        with TrainingSession(saver, save_steps=2, hooks=around) as session:
            while not session.should_stop():
                session.run(weights.__iadd__, 1)
    assert scored.lines == [(0, 0), (2, 4), (4, 8), (5, 10)]
