"""Accumulators here and on another task: the same rules, and the same numbers."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from calls import LIMIT, in_thread, until

import elsewhere
from strategies.accumulators.accumulators import (
    ConditionalAccumulator,
    SparseConditionalAccumulator,
    shared_accumulator,
)
from strategies.accumulators.gradient_sum import GradientSpec, GradientSum
from strategies.accumulators.remote import open_accumulation
from strategies.accumulators.state_machine import Take
from strategies.core.sparse import Rows
from strategies.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
)


@pytest.fixture(scope="module")
def services():
    with elsewhere.two_tasks() as services:
        yield services


@pytest.fixture(params=["here", "on another task"])
def make(request, services):
    """Makes accumulators of a kind."""
    if request.param == "here":
        return lambda kind, *args, **options: kind(*args, **options)
    services[1].reset(["test"])
    names = iter(range(100))

    def there(kind, *args, **options):
        name = f"accumulator {next(names)}"
        return shared_accumulator(
            kind, *args, **options, service=services[1], shared_name=name, container="test"
        )

    return there


def waiting_taker(accumulator, *args, **options):
    """Let a thread take, and return when its take waits on the accumulator, wherever that is."""
    submit, submitted = accumulator.state_machine.submit, threading.Event()

    def noted(attempt):
        submit(attempt)
        submitted.set()

    accumulator.state_machine.submit = noted
    future = in_thread(accumulator.take_grad, *args, **options)
    assert submitted.wait(LIMIT)
    accumulator.state_machine.submit = submit
    accumulator.num_accumulated()  # asked behind the take, and so answered when it waits
    return future


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_apply_10_and_20_take_the_mean_again_and_again(make, dtype):
    accumulator = make(ConditionalAccumulator, dtype, ())
    for step in range(3):
        assert accumulator.num_accumulated() == 0
        assert accumulator.apply_grad(10.0, step)
        assert accumulator.apply_grad(20.0, local_step=step)
        assert accumulator.num_accumulated() == 2
        got = accumulator.take_grad(1)  # divided by what is in, not by what was asked for
        assert (got.item(), got.dtype.name, got.shape) == (15.0, dtype, ())
        assert (accumulator.num_accumulated(), accumulator.global_step()) == (0, step + 1)


@pytest.mark.parametrize("word", ["SUM", "sum"])
def test_a_sum_is_not_divided(make, word):
    accumulator = make(ConditionalAccumulator, np.float32, [2], reduction_type=word)
    for step in range(2):
        accumulator.apply_grad([10, 1], step)
        accumulator.apply_grad([20, 2], step)
        assert accumulator.take_grad(2).tolist() == [30, 3]


def test_gradients_of_16_bits_are_summed_in_32(make):
    accumulator = make(ConditionalAccumulator, np.float16, (1,))
    for value in [60000, 60000, 1, 1]:  # the sum is no float16; two of 1 vanish beside 60000
        accumulator.apply_grad(np.array([value], np.float16))
    assert accumulator.take_grad(4).tolist() == [float(np.float16(120002 / 4))]
    accumulator = make(ConditionalAccumulator, ml_dtypes.bfloat16, (1,), reduction_type="SUM")
    for _ in range(300):
        accumulator.apply_grad(np.ones(1, ml_dtypes.bfloat16))
    assert accumulator.take_grad(300).astype(float).tolist() == [300]  # 256 + 1 is 256 in bfloat16


def test_infinities_survive(make):
    accumulator = make(ConditionalAccumulator, np.float32, (2,))
    accumulator.apply_grad([np.inf, np.inf])
    accumulator.apply_grad([1, -np.inf])
    np.testing.assert_array_equal(accumulator.take_grad(2), [np.inf, np.nan])


def test_a_take_for_which_there_is_no_memory_ends_by_an_error(make, monkeypatch):
    def full(*args, **options):
        raise MemoryError("full")

    accumulator = make(ConditionalAccumulator, np.float32, (2,))
    accumulator.apply_grad([1, 2])
    with monkeypatch.context() as patched:
        patched.setattr(GradientSum, "result", full)
        with pytest.raises(InternalError, match="MemoryError: full"):
            accumulator.take_grad(1)
    accumulator.apply_grad([3, 4], local_step=1)
    np.testing.assert_array_equal(accumulator.take_grad(1), [3, 4])


def test_stale_gradients_are_dropped_and_later_ones_are_not(make):
    accumulator = make(ConditionalAccumulator, np.float64, ())
    accumulator.apply_grad(1.0)
    accumulator.take_grad(1)
    assert not accumulator.apply_grad(100.0, 0)
    assert accumulator.num_accumulated() == 0
    assert accumulator.apply_grad(1.0, 1)
    assert accumulator.apply_grad(3.0, 7)
    assert accumulator.take_grad(2) == 2.0


def test_set_global_step_prevents_accumulation(make):
    accumulator = make(ConditionalAccumulator, np.float64, ())
    steps = range(1000, 1005)
    for current in steps:
        accumulator.set_global_step(current)
        for local_step in steps:
            accumulator.apply_grad(float(local_step), local_step)
        assert accumulator.take_grad(1) == np.mean([s for s in steps if s >= current])


def test_lowering_the_step_warns_and_works(caplog):
    accumulator = ConditionalAccumulator(np.float32, (), name="mine")
    accumulator.set_global_step(5)
    with caplog.at_level(logging.WARNING):
        accumulator.set_global_step(3)
    assert "mine: the step goes back from 5 to 3" in caplog.text
    assert accumulator.apply_grad(1, 3)


def test_parallel_applies_are_all_in(make):
    accumulator = make(ConditionalAccumulator, np.float64, ())
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(accumulator.apply_grad, [10.0 * n for n in range(1, 11)]))
    assert accumulator.take_grad(1) == 55


def test_each_of_parallel_takers_gets_another_gradient(make):
    accumulator = make(ConditionalAccumulator, np.float64, ())
    takers = [in_thread(accumulator.take_grad, 1, timeout=LIMIT) for _ in range(10)]
    for step in range(10):
        assert accumulator.apply_grad(float(step), step + 100)
    assert sorted(taker.result(LIMIT).item() for taker in takers) == list(range(10))


def test_takers_are_served_in_the_order_in_which_they_came(make):
    accumulator = make(ConditionalAccumulator, np.float64, ())
    first = waiting_taker(accumulator, 2, timeout=LIMIT)
    second = waiting_taker(accumulator, 1, timeout=LIMIT)
    accumulator.apply_grad(1.0, 9)
    assert not second.done()  # one would be enough for the second, which is behind the first
    accumulator.apply_grad(3.0, 9)
    assert first.result(LIMIT) == 2
    accumulator.apply_grad(7.0, 9)
    assert second.result(LIMIT) == 7


def test_a_take_that_is_too_late_leaves_the_gradients_where_they_are(make):
    accumulator = make(ConditionalAccumulator, np.float64, ())
    accumulator.apply_grad(1.0)
    message = r"take_grad: not finished after 0.05 s; 1 of 2 gradients have arrived \(.+\)$"
    with pytest.raises(DeadlineExceededError, match=message):
        accumulator.take_grad(2, timeout=0.05)
    assert (accumulator.num_accumulated(), accumulator.global_step()) == (1, 0)
    assert accumulator.apply_grad(3.0)
    assert accumulator.take_grad(2, timeout=0) == 2


def test_cancelled_takes_raise_and_the_accumulator_can_be_used(make):
    accumulator = make(ConditionalAccumulator, np.float64, ())
    taker = waiting_taker(accumulator, 1)
    accumulator.cancel_pending()
    with pytest.raises(CancelledError):
        taker.result(LIMIT)
    accumulator.apply_grad(4.0)
    assert accumulator.take_grad(1) == 4


@pytest.mark.parametrize("count", [0, -1])
def test_a_take_of_nothing_is_wrong(make, count):
    accumulator = make(ConditionalAccumulator, np.float64, ())
    with pytest.raises(InvalidArgumentError, match=f"count must be > 0, got {count}"):
        accumulator.take_grad(count)
    with pytest.raises(ValueError, match="timeout must be seconds >= 0"):
        accumulator.take_grad(1, timeout=-1)


def test_wrong_shapes_and_dtypes_are_errors_and_change_nothing(make):
    accumulator = make(ConditionalAccumulator, np.float32, (2, 2))
    accumulator.apply_grad(np.ones((2, 2), np.float32))
    for wrong, message in [
        (
            np.ones((2, 3), np.float32),
            r"expected float32 of shape \(2, 2\), got float32 of shape \(2, 3\)",
        ),
        (np.ones(2, np.float32), "does not fit"),
        (np.ones((2, 2)), "expected float32 of shape .*, got float64"),
        ("text", "not an array of float32"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            accumulator.apply_grad(wrong)
    assert accumulator.num_accumulated() == 1
    np.testing.assert_array_equal(accumulator.take_grad(1), np.ones((2, 2)))


@pytest.mark.parametrize("shape", [None, (None,), [None]])
def test_where_any_shape_is_right_those_of_one_step_are_alike(make, shape):
    accumulator = make(ConditionalAccumulator, np.float32, shape)
    accumulator.apply_grad([1, 1])
    with pytest.raises(InvalidArgumentError, match=r"of shape \(2,\), got dense of shape \(1,\)"):
        accumulator.apply_grad([1])
    assert accumulator.take_grad(1).tolist() == [1, 1]
    accumulator.apply_grad([7], 1)
    assert accumulator.take_grad(1).tolist() == [7]


@pytest.mark.parametrize("kind", [ConditionalAccumulator, SparseConditionalAccumulator])
def test_wrong_constructors(kind):
    with pytest.raises(ValueError, match="expected MEAN or SUM, got 'MAX'"):
        kind(np.float32, (), reduction_type="MAX")
    for dtype in (np.int32, "int64", bool, object, "words"):
        with pytest.raises(ValueError, match="dtype"):
            kind(dtype)


def test_a_gradient_is_not_needed_after_the_call(make):
    accumulator = make(ConditionalAccumulator, np.float32, (3,))
    mine = np.ones(3, np.float32)
    accumulator.apply_grad(mine)
    mine[:] = 9
    got = accumulator.take_grad(1)
    assert got.tolist() == [1, 1, 1]
    got[:] = 2  # belongs to the taker
    accumulator.apply_grad([0, 0, 0], 1)
    assert accumulator.take_grad(1).tolist() == [0, 0, 0]


def test_several_accumulators_do_not_know_each_other(make):
    one, two = (make(ConditionalAccumulator, np.float32, ()) for _ in range(2))
    one.apply_grad(1)
    two.apply_grad(2)
    assert [one.take_grad(1).item(), two.take_grad(1).item()] == [1, 2]


def test_empty_gradients(make):
    accumulator = make(ConditionalAccumulator, np.float32, (0, 3))
    accumulator.apply_grad(np.empty((0, 3), np.float32))
    assert accumulator.take_grad(1).shape == (0, 3)
    rows = make(SparseConditionalAccumulator, np.float32, (4, 2))
    rows.apply_grad([], np.empty((0, 2), np.float32))
    indices, values, shape = rows.take_grad(1)
    assert (indices.tolist(), values.shape, shape) == ([], (0, 2), (4, 2))


# Of rows.


def test_each_index_is_averaged_over_the_gradients_that_had_it(make):
    accumulator = make(SparseConditionalAccumulator, np.float32, (3, 2))
    for step in range(2):
        accumulator.apply_grad([0, 1], [[1, 1], [0, 2]], local_step=step)
        accumulator.apply_grad([0, 2], [[0, 0], [3, 0]], (3, 2), step)
        indices, values, shape = accumulator.take_grad(1)
        assert indices.tolist() == [0, 1, 2]
        assert values.tolist() == [[0.5, 0.5], [0, 2], [3, 0]]
        assert shape == (3, 2)
        assert values.dtype == np.float32


def test_sums_of_rows(make):
    accumulator = make(SparseConditionalAccumulator, np.float64, None, reduction_type="SUM")
    accumulator.apply_rows(Rows(np.array([2, 0]), np.array([[3.0], [1.0]])))
    accumulator.apply_rows(Rows(np.array([2]), np.array([[4.0]])))
    assert accumulator.num_accumulated() == 2
    rows = accumulator.take_rows(2)
    assert (rows.indices.tolist(), rows.values.tolist()) == ([0, 2], [[1.0], [7.0]])


def test_rows_of_one_index_in_one_gradient_are_added_and_count_once(make):
    accumulator = make(SparseConditionalAccumulator, np.float32, (None, 1))
    accumulator.apply_grad([1, 1, 0], [[1], [2], [5]])
    accumulator.apply_grad([1], [[5]])
    indices, values, shape = accumulator.take_grad(2)
    assert (indices.tolist(), values.tolist(), shape) == ([0, 1], [[5], [4]], (None, 1))


def test_stale_rows_are_dropped(make):
    accumulator = make(SparseConditionalAccumulator, np.float32, (4, 1))
    accumulator.set_global_step(2)
    assert not accumulator.apply_grad([1], [[1]], local_step=1)
    assert accumulator.apply_grad([1], [[1]], local_step=2)
    assert accumulator.take_rows(1).indices.tolist() == [1]


@pytest.mark.parametrize(
    ("indices", "values", "shape", "message"),
    [
        ([[0], [1]], [[1], [1]], None, "index for every row"),
        ([0], 1, None, "index for every row"),
        ([0, 1], [[1]], None, "index for every row"),
        ([0.5], [[1]], None, "indices are not integers"),
        ([0], [[1, 2]], None, "does not fit"),
        ([0], [1], None, "does not fit"),
        ([4], [[1]], None, "index is out of range"),
        ([-1], [[1]], None, "index is out of range"),
        ([0], [[1]], (4,), r"another shape, expected \(4, 1\), got \(4,\)"),
        ([0], [[1]], (5, 1), r"another shape, expected \(4, 1\), got \(5, 1\)"),
        ([0], np.ones((1, 1)), None, "does not fit, expected float32"),
    ],
)
def test_wrong_rows(make, indices, values, shape, message):
    accumulator = make(SparseConditionalAccumulator, np.float32, (4, 1))
    with pytest.raises(InvalidArgumentError, match=message):
        accumulator.apply_grad(indices, values, shape)
    assert accumulator.num_accumulated() == 0


def test_rows_of_one_step_are_alike_where_any_shape_is_right(make):
    accumulator = make(SparseConditionalAccumulator, np.float32)
    accumulator.apply_grad([1], [[1, 2]])
    with pytest.raises(InvalidArgumentError, match=r"expected rows of shape \(None, 2\)"):
        accumulator.apply_grad([1], [[1]])
    assert accumulator.take_grad(1)[2] == (None, 2)


# Of several tasks.


def test_the_same_accumulator_is_found_on_both_tasks(services):
    one, two = (
        shared_accumulator(
            ConditionalAccumulator, "float32", (1,), service=service, shared_name="both"
        )
        for service in services
    )
    one.apply_grad([1])
    two.apply_grad([3])
    assert one.num_accumulated() == two.num_accumulated() == 2
    assert two.take_grad(2).tolist() == [2]
    assert one.global_step() == two.global_step() == 1


@pytest.mark.parametrize("own", [0, 1])
def test_another_meaning_of_the_name_is_an_error(services, own):
    def ask(kind=ConditionalAccumulator, dtype="float32", shape=(2,), **options):
        return shared_accumulator(
            kind, dtype, shape, service=services[own], shared_name=f"meaning {own}", **options
        )

    ask()
    for options, message in [
        ({"dtype": "float64"}, "float64"),
        ({"shape": (3,)}, r"shape=\(3,\)"),
        ({"shape": None}, "shape=None"),
        ({"kind": SparseConditionalAccumulator}, "rows"),
        ({"reduction_type": "SUM"}, "another reduction_type, expected MEAN, got SUM"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            ask(**options)
    with pytest.raises(TypeError, match="expected ConditionalAccumulator"):
        ask(dict)


@pytest.mark.parametrize("own", [0, 1])
def test_another_limit_of_gradients_is_an_error_and_another_first_step_is_none(services, own):
    def ask(**options):
        part = GradientSpec("v", "float32", (2,))
        open_accumulation(services[own], [part], mean=True, name=f"limit {own}", **options)

    ask(most=3)
    ask(most=3, step=7)
    for most in (2, None):
        with pytest.raises(InvalidArgumentError, match=f"limit of .*, expected 3, got {most}"):
            ask(most=most)


def test_a_reset_ends_takes_that_wait(services):
    accumulator = shared_accumulator(
        ConditionalAccumulator, "float32", (), service=services[1], shared_name="a", container="c"
    )
    taker = waiting_taker(accumulator, 1)
    services[0].reset(["c"])
    with pytest.raises(CancelledError):
        taker.result(LIMIT)
    with pytest.raises(NotFoundError):
        accumulator.apply_grad(1)


@pytest.mark.parametrize("refilled", [False, True])
def test_what_an_interrupted_taker_had_taken_goes_back(refilled):
    accumulator = ConditionalAccumulator(np.float64, ())
    rows = SparseConditionalAccumulator(np.float64, (3,))
    for step, value in enumerate([1.0, 3.0]):
        accumulator.apply_grad(value, step)
        rows.apply_grad([step], [value], local_step=step)
    takes = [Take(2), Take(2)]
    for one, take in zip([accumulator, rows], takes, strict=True):
        one.state_machine.submit(take)
        assert (take.done, one.global_step()) == (True, 1)
    if refilled:
        accumulator.apply_grad(8.0, 1)
        rows.apply_grad([1], [8.0], local_step=1)
    for one, take in zip([accumulator, rows], takes, strict=True):
        one.state_machine.abandon(take)
        assert (one.num_accumulated(), one.global_step()) == (2 + refilled, 0)
    assert accumulator.take_grad(1) == (4 if refilled else 2)
    assert rows.take_rows(1).values.tolist() == [1, 5.5 if refilled else 3]


def test_a_large_gradient_travels_and_its_memory_is_released(services):
    import gc
    import weakref

    accumulator = shared_accumulator(
        ConditionalAccumulator, "float32", (200_000,), service=services[1], shared_name="large"
    )
    gc.disable()
    try:
        accumulator.apply_grad(np.arange(200_000, dtype=np.float32))
        got = accumulator.take_grad(1)
        assert got[-1] == 199_999
        gone = weakref.ref(got)
        del got
        until(lambda: gone() is None)
    finally:
        gc.enable()
