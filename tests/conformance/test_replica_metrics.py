"""Metrics of replicas are those of one process that has seen all rows."""

import math

import numpy as np
import pytest

import strategies
from requirements import installed
from strategies.replicas import MeanMetric, SumMetric

DEVICES = ["/cpu:0", "/cpu:1"]
BATCHES = [np.arange(1.0, n + 1, dtype=np.float32) for n in (8, 5, 1)]
ALL = np.concatenate(BATCHES)


def make(kind, comm):
    if kind == "one program":
        installed("jax")
        return strategies.TPUStrategy(devices=DEVICES, comm=comm)
    return strategies.MultiWorkerMirroredStrategy(comm, devices=DEVICES)


def taken(kind):
    """A function that makes an array of the library of a kind."""
    if kind == "torch":
        return installed("torch").tensor
    return np.array if kind == "numpy" else installed("jax.numpy").array


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax", "one program"])
def test_means_and_sums_are_over_all_rows_of_all_replicas(comm, kind):
    strategy, array = make(kind, comm), taken(kind)
    loss, accuracy = (MeanMetric(strategy, name) for name in ("loss", "accuracy"))
    rows = SumMetric(strategy, "rows")

    def step(x):
        loss.update(x)
        count = x.shape[0]
        accuracy.update((x > 2).sum() / max(count, 1) if count else math.nan, examples=count)
        rows.update(count)

    for _ in range(2):
        for x in strategy.distribute_dataset(map(array, BATCHES)):
            strategy.run(step, args=(x,))
        assert loss.result() == pytest.approx(ALL.mean(), rel=1e-6)
        assert accuracy.result() == pytest.approx((ALL > 2).mean(), rel=1e-6)
        assert rows.result() == len(ALL)
        for metric in (loss, accuracy, rows):
            metric.reset()
    assert math.isnan(loss.result())
    assert rows.result() == 0


def test_wrong_numbers_of_rows_and_names_that_are_taken():
    strategy = strategies.MirroredStrategy(DEVICES)
    metric = MeanMetric(strategy, "loss")
    with pytest.raises(ValueError, match="loss: update: bad examples, expected a number >= 0"):
        strategy.run(metric.update, args=(1.0,), kwargs={"examples": -1})
    with pytest.raises(ValueError, match="loss/total"):
        MeanMetric(strategy, "loss")


def test_half_precision_is_added_up_in_single():
    strategy = strategies.MirroredStrategy(DEVICES)
    metric = MeanMetric(strategy, "loss")
    strategy.run(metric.update, args=(np.full(1 << 16, 2.0, np.float16),))
    assert metric.result() == 2.0


def test_replicas_that_are_not_in_step_have_no_metrics(comm):
    with strategies.SpareReplicaStrategy(comm=comm) as strategy:
        for kind in (MeanMetric, SumMetric):
            with pytest.raises(ValueError, match="of a SpareReplicaStrategy are not in step"):
                kind(strategy, "loss")
