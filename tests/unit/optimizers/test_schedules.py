"""Schedules against Optax's and their formulas, where they begin and end, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from requirements import installed
from strategies import SGD
from strategies.optimizers import schedules

STEPS = [0, 1, 2, 9, 10, 11, 49, 50, 51, 99, 100, 101, 149, 150, 151, 299, 300, 301, 5000]

# name -> (ours, function of optax that returns its own)
OPTAX = {
    "constant": (schedules.constant(0.1), lambda optax: optax.constant_schedule(0.1)),
    "piecewise": (
        schedules.piecewise({0: 0.1, 50: 0.05, 100: 0.005}),
        lambda optax: optax.piecewise_constant_schedule(0.1, {50: 0.5, 100: 0.1}),
    ),
    "exponential": (
        schedules.exponential(0.1, factor=0.5, steps=50),
        lambda optax: optax.exponential_decay(0.1, 50, 0.5),
    ),
    "staircase": (
        schedules.exponential(0.1, factor=0.5, steps=50, staircase=True),
        lambda optax: optax.exponential_decay(0.1, 50, 0.5, staircase=True),
    ),
    "linear": (
        schedules.linear(0.1, 0.01, steps=100),
        lambda optax: optax.linear_schedule(0.1, 0.01, 100),
    ),
    "rising": (
        schedules.linear(0.01, 0.1, steps=100),
        lambda optax: optax.linear_schedule(0.01, 0.1, 100),
    ),
    "polynomial": (
        schedules.polynomial(0.1, 0.01, steps=100, power=2.5),
        lambda optax: optax.polynomial_schedule(0.1, 0.01, 2.5, 100),
    ),
    "cosine": (
        schedules.cosine(0.1, 100, end=0.001),
        lambda optax: optax.cosine_decay_schedule(0.1, 100, alpha=0.01),
    ),
    "restarts": (
        schedules.cosine_restarts(0.1, 50, growth=2, decay=0.5, end=0.001),
        lambda optax: optax.sgdr_schedule([
            {"init_value": peak, "peak_value": peak, "decay_steps": steps, "warmup_steps": 0,
             "end_value": 0.001}
            for peak, steps in ((0.1, 50), (0.05, 100), (0.025, 200))
        ]),
    ),
    "warm-up and cosine": (
        schedules.warmup(schedules.cosine(0.1, 90, end=0.001), 10, start=0.1),
        lambda optax: optax.warmup_cosine_decay_schedule(0.01, 0.1, 10, 100, 0.001),
    ),
    "warm-up and exponential": (
        schedules.warmup(schedules.exponential(0.1, factor=0.5, steps=50), 10),
        lambda optax: optax.warmup_exponential_decay_schedule(0.0, 0.1, 10, 50, 0.5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTAX)
def test_as_optax(name):
    jax, optax = installed("jax"), installed("optax")
    ours, make = OPTAX[name]
    with jax.enable_x64(True):
        theirs = make(optax)
        expected = [float(theirs(jax.numpy.asarray(step))) for step in STEPS]
    got = [ours(step) for step in STEPS]
    if name == "restarts":  # Optax ends after the last of its list, ours begins anew
        got, expected = got[:-1], expected[:-1]
        last = STEPS.index(300)
        assert got[last] == pytest.approx(expected[last])
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", OPTAX)
def test_rates_are_numbers_of_python_whatever_counts_the_steps(name):
    ours, _ = OPTAX[name]
    for step in (0, 10, 75):
        assert type(ours(step)) is float
        assert ours(np.int64(step)) == ours(step) >= 0


def test_restarts_of_equal_length():
    rate = schedules.cosine_restarts(0.1, 10)
    one = schedules.cosine(0.1, 10)
    assert [rate(step) for step in range(25)] == [one(step % 10) for step in range(25)]
    falling = schedules.cosine_restarts(0.1, 10, decay=0.5)
    assert [falling(step) for step in (0, 10, 20)] == pytest.approx([0.1, 0.05, 0.025])


def test_restarts_with_growth_follow_the_waves():
    rate = schedules.cosine_restarts(1.0, 3, growth=1.5)
    lengths, step = [], 0
    for begin in (0, 3, 3 + 4, 3 + 4 + 6, 3 + 4 + 6 + 10):  # 3, 4.5, 6.75, 10.1: rounded down
        assert rate(begin) == 1.0
        assert begin == 0 or rate(begin - 1) < 0.3
        lengths.append(begin - step)
        step = begin
    assert rate(10**9) > 0  # also after very many steps


def test_warmup_and_inverse_square_root_are_those_of_the_transformer():
    width, steps = 512, 4000
    peak = width**-0.5 * steps**-0.5
    rate = schedules.warmup(schedules.inverse_sqrt(peak, steps), steps)
    for step in (1, 100, 3999, 4000, 4001, 100_000):
        expected = width**-0.5 * min(step**-0.5, step * steps**-1.5)
        assert rate(step) == pytest.approx(expected, rel=1e-12)


def test_warmup_from_the_rate_of_one_rank_to_that_of_all():
    size, per_epoch, base = 8, 20, 0.1
    rate = schedules.warmup(size * base, 5 * per_epoch, start=1 / size)
    for step in range(5 * per_epoch):
        epoch = step / per_epoch
        assert rate(step) == pytest.approx(base * (epoch * (size - 1) / 5 + 1), rel=1e-12)
    assert rate(5 * per_epoch) == size * base


@pytest.mark.parametrize("start", [0.0, 0.25, 1.0])
def test_warmup_of_no_steps_is_the_schedule_itself(start):
    rate = schedules.warmup(schedules.cosine(0.1, 7), 0, start=start)
    assert [rate(step) for step in range(9)] == [schedules.cosine(0.1, 7)(s) for s in range(9)]


def test_ends_are_exact():
    assert schedules.linear(0.3, 0.1, steps=3)(3) == 0.1
    assert schedules.cosine(0.3, 3, end=0.1)(3) == 0.1
    assert schedules.polynomial(0.3, 0.1, steps=3, power=0.5)(10**12) == 0.1
    assert schedules.exponential(0.3, factor=0, steps=1)(0) == 0.3
    assert schedules.exponential(0.3, factor=0, steps=1)(1) == 0


def test_an_optimizer_takes_a_schedule():
    weights = np.zeros(1)
    optimizer = SGD(schedules.piecewise({0: 1.0, 2: 0.5}))
    for _ in range(4):
        optimizer.apply_gradients([(np.ones(1), weights)])
    assert weights.tolist() == [-3.0]


NUMBERS = [-0.1, math.nan, math.inf, "0.1", None]
COUNTS = [0, -1, 1.5, "3", None]


@pytest.mark.parametrize(
    ("make", "value", "fact"),
    [
        *[(lambda v: schedules.constant(v), v, "constant: bad rate") for v in NUMBERS],
        *[(lambda v: schedules.piecewise({0: v}), v, "piecewise: bad rate") for v in NUMBERS],
        *[(lambda v: schedules.piecewise({0: 1, v: 1}), v, "piecewise: bad step")
          for v in COUNTS[1:]],
        *[(lambda v: schedules.piecewise(v), v, "piecewise: no rate for the first step")
          for v in ({}, {1: 0.1})],
        *[(lambda v: schedules.exponential(v, factor=1, steps=1), v, "bad initial")
          for v in NUMBERS],
        *[(lambda v: schedules.exponential(1, factor=v, steps=1), v, "bad factor")
          for v in NUMBERS],
        *[(lambda v: schedules.exponential(1, factor=1, steps=v), v, "bad steps") for v in COUNTS],
        *[(lambda v: schedules.polynomial(1, v, steps=1), v, "bad end") for v in NUMBERS],
        *[(lambda v: schedules.polynomial(1, steps=v), v, "bad steps") for v in COUNTS],
        *[(lambda v: schedules.polynomial(1, steps=1, power=v), v, "bad power")
          for v in (*NUMBERS, 0)],
        *[(lambda v: schedules.linear(v, steps=1), v, "bad initial") for v in NUMBERS],
        *[(lambda v: schedules.cosine(v, 1), v, "cosine: bad initial") for v in NUMBERS],
        *[(lambda v: schedules.cosine(1, v), v, "cosine: bad steps") for v in COUNTS],
        *[(lambda v: schedules.cosine_restarts(1, v), v, "bad steps") for v in COUNTS],
        *[(lambda v: schedules.cosine_restarts(1, 1, growth=v), v, "bad growth")
          for v in (*NUMBERS, 0.9)],
        *[(lambda v: schedules.cosine_restarts(1, 1, decay=v), v, "bad decay") for v in NUMBERS],
        *[(lambda v: schedules.inverse_sqrt(1, v), v, "inverse_sqrt: bad steps") for v in COUNTS],
        *[(lambda v: schedules.warmup(1, v), v, "warmup: bad steps") for v in COUNTS[1:]],
        *[(lambda v: schedules.warmup(1, 1, start=v), v, "warmup: bad start")
          for v in (*NUMBERS, 1.1)],
        *[(lambda v: schedules.warmup(v, 1), v, "bad rate") for v in NUMBERS],
    ],
)  # fmt: skip
def test_wrong_arguments(make, value, fact):
    with pytest.raises(ValueError, match=fact) as caught:
        make(value)
    assert "expected" in str(caught.value)
    assert str(value) in str(caught.value) or isinstance(value, dict)
