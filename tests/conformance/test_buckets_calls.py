"""Buckets among ranks: many arrays, reduced at once or as they become ready."""

import time

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import oracle
from requirements import installed

LIMIT = 60.0  # an empty cache, and others at work: something is compiled
SHAPES = [(3, 4), (0,), (), (1,), (7_001,), (5, 0), (17,), (300, 5), (2, 3, 5, 7)]
SMALL = {"first_bucket_bytes": 64, "bucket_bytes": 5000}
FOUR = [((2,), "float32")] * 4


def kinds_for(op):
    dtypes = [dtype for dtype in oracle.DTYPES if oracle.is_defined(op, dtype)]
    return [(shape, dtypes[i % len(dtypes)]) for i, shape in enumerate(SHAPES * 2)]


def everyones(comm, kinds, step=0):
    """The arrays of all ranks; other ones at every step."""
    return [[oracle.data(r + 7 * step, s, np.dtype(d)) for s, d in kinds] for r in range(comm.size)]


def assert_reduced(results, inputs, op):
    assert len(results) == len(inputs[0])
    for i, result in enumerate(results):
        oracle.assert_close(np.asarray(result), [arrays[i] for arrays in inputs], op)


def ready_all(buckets, values, order):
    for i in order:
        buckets.ready(i, values[i])


@pytest.mark.parametrize("op", [cc.SUM, cc.MEAN, cc.MAX, cc.PRODUCT], ids=lambda op: op.value)
def test_every_way_equals_one_allreduce_for_each(comm, op):
    kinds = kinds_for(op)
    with comm.plan_buckets(kinds, op=op, **SMALL) as buckets:
        for step in range(3):
            inputs = everyones(comm, kinds, step)
            own = inputs[comm.rank]
            assert_reduced(buckets.allreduce(own), inputs, op)
            for view, x in zip(buckets.views, own, strict=True):
                view[...] = x
            assert_reduced(buckets.allreduce(), inputs, op)
            # Another order on every rank and at every step.
            order = np.random.default_rng((comm.rank, step)).permutation(len(kinds)).tolist()
            ready_all(buckets, own, order)
            assert_reduced(buckets.wait(LIMIT), inputs, op)


def test_buckets_go_by_the_algorithm_that_is_asked_for(comm, world):
    kinds = kinds_for(cc.SUM)
    for algorithm in world.algorithms("allreduce"):
        with comm.plan_buckets(kinds, op=cc.SUM, algorithm=algorithm, **SMALL) as buckets:
            inputs = everyones(comm, kinds)
            assert_reduced(buckets.allreduce(inputs[comm.rank]), inputs, cc.SUM)
    with pytest.raises(ValueError, match="plan_buckets: unknown algorithm, expected one of"):
        comm.plan_buckets(kinds, op=cc.SUM, algorithm="rings")


def test_with_the_sizes_that_are_usual_too(comm):
    kinds = kinds_for(cc.SUM)
    with comm.plan_buckets(kinds, op=cc.SUM) as buckets:
        inputs = everyones(comm, kinds)
        ready_all(buckets, inputs[comm.rank], range(len(kinds)))
        assert_reduced(buckets.wait(LIMIT), inputs, cc.SUM)


def test_every_rank_may_scale_its_values_by_another_number(comm):
    with comm.plan_buckets(FOUR, op=cc.SUM, **SMALL) as buckets:
        ones = [np.ones(2, np.float32)] * 4
        results = buckets.allreduce(ones, scale=comm.rank + 0.5)
        expected = sum(rank + 0.5 for rank in range(comm.size))
        assert all(np.array_equal(x, [expected] * 2) for x in results)
        assert all((x == 1).all() for x in ones)
        with pytest.raises(ValueError, match=r"expected values to scale.*0\.5"):
            buckets.allreduce(scale=0.5)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_integers_are_not_scaled_which_is_an_error_on_all(comm, dtype):
    with comm.plan_buckets([*FOUR, ((2,), dtype)], op=cc.MAX, **SMALL) as buckets:
        ones = [np.ones(2, np.float32)] * 4 + [np.ones(2, dtype)]
        if comm.rank == 0:
            with pytest.raises(TypeError, match=f"expected floats, got {dtype} .scale: 0.5"):
                buckets.allreduce(ones, scale=0.5)
        else:
            with pytest.raises(cc.MismatchError, match="refused on rank 0.*cannot be scaled"):
                buckets.allreduce(ones)
        assert all((x == 1).all() for x in buckets.allreduce(ones))


def test_results_are_the_views_and_the_views_stay(comm):
    with comm.plan_buckets(FOUR, op=cc.SUM, **SMALL) as buckets:
        first = buckets.views
        for step in range(3):
            for i, view in enumerate(buckets.views):
                view[...] = 10 * step + i
            for i in (1, 0, 3, 2):  # another order than the last-first of the first step
                buckets.ready(i)
            results = buckets.wait(LIMIT)
            for i in range(4):
                assert results[i] is first[i]
                assert first[i].tolist() == [comm.size * (10 * step + i)] * 2
    assert first[3].tolist() == [comm.size * 23] * 2  # also after the end


def test_none_counts_as_zeros(comm):
    with comm.plan_buckets(FOUR, op=cc.SUM) as buckets:
        values = [np.ones(2, np.float32)] * 4
        buckets.allreduce(values)
        values[2] = None
        if comm.rank == 0:
            values[1] = None
        ones = [x[0] for x in buckets.allreduce(values)]
        assert ones == [comm.size, comm.size - 1, 0, comm.size]


def test_a_bucket_is_reduced_before_the_others_are_ready_in_the_order_of_rank_0s_first_step(comm):
    with comm.plan_buckets(FOUR, op=cc.SUM, first_bucket_bytes=1, bucket_bytes=1) as buckets:

        def wait_for(index, value):
            give_up = time.monotonic() + LIMIT
            while buckets.views[index][1] != value:
                assert time.monotonic() < give_up
                time.sleep(0.001)

        values = [np.full(2, 1 + i, np.float32) for i in range(4)]
        order = [1, 3, 0, 2] if comm.rank == 0 else [2, 1, 0, 3]
        buckets.ready(3, values[3])
        wait_for(3, 4 * comm.size)
        ready_all(buckets, values, [i for i in order if i != 3])
        buckets.wait(LIMIT)
        # Rank 0 had 3 1 0 2.
        for i in (3, 1, 0, 2):
            buckets.ready(i, values[i])
            if comm.size > 1:
                wait_for(i, (1 + i) * comm.size)
        buckets.wait(LIMIT)


def test_a_late_rank_is_waited_for_and_other_operations_go_on(comm):
    with comm.plan_buckets(FOUR, op=cc.SUM) as buckets:
        if comm.rank == 0 and comm.size > 1:
            ready_all(buckets, [np.ones(2, np.float32)] * 4, range(4))
            with pytest.raises(cc.CollectiveTimeout, match=r"not reduced within 0\.05 s"):
                buckets.wait(0.05)
            assert comm.allreduce(1, op=cc.SUM) == comm.size
        else:
            assert comm.allreduce(1, op=cc.SUM) == comm.size
            ready_all(buckets, [np.ones(2, np.float32)] * 4, range(4))
        assert [x[0] for x in buckets.wait(LIMIT)] == [comm.size] * 4


def late(buckets):
    ready_all(buckets, [None] * 4, [0, 1, 3])
    buckets.wait(LIMIT)


def twice(buckets):
    ready_all(buckets, [None] * 4, [3, 1, 3])


def whole(buckets):
    buckets.allreduce()


LONG = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("kind", "words", "wrong", "right"),
    [
        (ValueError, "1 of 4 arrays are not ready: c", late, None),
        (ValueError, "ready already .array: d", twice, None),
        (ValueError, "4 of 4 arrays are not ready: a, b, c, d", lambda b: b.wait(LIMIT), None),
        (ValueError, "expected 0 .. 3, got 4", lambda b: b.ready(4), None),
        (ValueError, r"\(2,\), got .* \(3,\) .array: b", lambda b: b.ready(1, LONG), None),
        (TypeError, "expected float32 .* got float64", lambda b: b.ready(1, np.zeros(2)), None),
        (TypeError, "cannot be sent", lambda b: b.ready(1, ["a", "b"]), None),
        (ValueError, "expected 4 arrays, got 3", lambda b: b.allreduce([None] * 3), whole),
        (TypeError, "got int64", lambda b: b.allreduce([None, None, None, 7]), whole),
    ],
)  # fmt: skip
def test_a_mistake_of_one_rank_is_an_error_on_all_and_the_next_step_works(
    comm, kind, words, wrong, right
):
    def step(buckets):
        ready_all(buckets, [None] * 4, range(4))
        buckets.wait(LIMIT)

    culprit = comm.size - 1
    tiny = {"first_bucket_bytes": 1, "bucket_bytes": 1}
    with comm.plan_buckets(FOUR, op=cc.SUM, names="abcd", **tiny) as buckets:
        for _ in range(2):
            if comm.rank == culprit:
                with pytest.raises(kind, match=words):
                    wrong(buckets)
            else:
                with pytest.raises(
                    cc.MismatchError, match=f"refused on rank {culprit}.*{kind.__name__}"
                ):
                    (right or step)(buckets)
            values = [np.full(2, i, np.float32) for i in range(4)]
            ready_all(buckets, values, [2, 3, 1, 0])
            sums = [x[0] for x in buckets.wait(LIMIT)]
            assert sums == [comm.size * i for i in range(4)]
        assert comm.allreduce(1, op=cc.SUM) == comm.size


@pytest.mark.parametrize("told", ["all", "underflow"])
def test_what_numpy_is_told_to_raise_stays_a_result(comm, told):
    with comm.plan_buckets([((3,), "float32")], op=cc.SUM) as buckets:
        given = [np.array([1e-30, 1e30, np.inf], np.float32)]
        how = {"all": {"all": "raise"}, "underflow": {"under": "raise"}}[told]
        with np.errstate(**how):
            (own,) = buckets.allreduce(given, scale=1e-20 if comm.rank else 1e20)
        assert np.isinf(own[1:]).all()


def test_a_rank_whose_values_cannot_be_scaled_tells_the_others(comm):
    culprit = comm.size - 1
    tiny = {"first_bucket_bytes": 1, "bucket_bytes": 1}
    with comm.plan_buckets([((2,), "float32")] * 3, op=cc.SUM, **tiny) as buckets:
        ones = [np.ones(2, np.float32)] * 3
        if comm.rank == culprit:
            with pytest.raises(TypeError):
                buckets.allreduce(ones, scale="two")
        else:
            with pytest.raises(cc.MismatchError, match=f"refused on rank {culprit}"):
                buckets.allreduce(ones, scale=2.0)
        assert [x[0] for x in buckets.allreduce(ones)] == [comm.size] * 3


@pytest.mark.parametrize("before", [[], [3], [3, 2, 1, 0]], ids=str)
@pytest.mark.parametrize("error", [TypeError("odd"), MemoryError("full")], ids=repr)
def test_a_step_may_be_ended_by_an_error_of_the_caller(comm, before, error):
    culprit = comm.size - 1
    with comm.plan_buckets(FOUR, op=cc.SUM, first_bucket_bytes=1, bucket_bytes=1) as buckets:
        for _ in range(2):
            if comm.rank == culprit:
                ready_all(buckets, [None] * 4, before)
                buckets.fail(error)
            else:
                ready_all(buckets, [None] * 4, range(4))
                told = f"refused on rank {culprit}.*{type(error).__name__}: {error}"
                with pytest.raises(cc.MismatchError, match=told):
                    buckets.wait(LIMIT)
            ones = [np.ones(2, np.float32)] * 4
            assert [x[0] for x in buckets.allreduce(ones)] == [comm.size] * 4
    with pytest.raises(cc.CollectiveError, match="the buckets were closed"):
        buckets.fail(error)


def test_allreduce_inside_a_step_is_refused_and_ends_it(comm):
    with comm.plan_buckets(FOUR, op=cc.SUM) as buckets:
        buckets.ready(1)
        with pytest.raises((ValueError, cc.MismatchError), match="a step has begun"):
            buckets.allreduce()
        for view in buckets.views:
            view[...] = 1
        assert [x[0] for x in buckets.allreduce()] == [comm.size] * 4


def test_integers_of_any_kind_are_limits(comm):
    kind = np.int64 if comm.rank == 1 else int
    limits = {name: kind(nbytes) for name, nbytes in SMALL.items()}
    with comm.plan_buckets(FOUR, op=cc.SUM, **limits) as buckets:
        for view in buckets.views:
            view[...] = 1
        assert [x[0] for x in buckets.allreduce()] == [comm.size] * 4


@pytest.mark.several
@pytest.mark.parametrize(
    ("words", "other"),
    [
        ("arrays is", {"like": [*FOUR[:3], ((3,), "float32")]}),
        ("arrays is", {"like": [*FOUR[:3], ((2,), "float64")]}),
        ("arrays is", {"like": [*FOUR[:2], ((1,), "float32"), ((3,), "float32")]}),
        ("count is", {"like": FOUR[:3]}),
        ("op is", {"op": cc.SUM}),
        ("compression is", {"compression": cc.FP16}),
        ("bytes is", {"bucket_bytes": 7}),
        ("refused on rank", {"like": [*FOUR[:3], ((2,), "int32")]}),
        ("refused on rank", {"like": [*FOUR[:3], ((-2,), "float32")]}),
        ("refused on rank", {"like": [*FOUR[:3], ((2,), "datetime64[s]")]}),
        ("refused on rank", {"bucket_bytes": 0}),
        ("refused on rank", {"bucket_bytes": 1e6}),
        ("refused on rank", {"names": ["a"]}),
    ],
)
def test_plans_that_differ_are_an_error_on_all(comm, words, other):
    options = {"like": FOUR} | (other if comm.rank == 1 else {})
    refused = words.startswith("refused") and comm.rank == 1
    with pytest.raises((TypeError, ValueError) if refused else cc.MismatchError) as caught:
        comm.plan_buckets(options.pop("like"), **options)
    assert refused or words in str(caught.value)
    with comm.plan_buckets(FOUR) as buckets:
        buckets.allreduce()


def test_nothing_to_reduce(comm):
    for like in ([], [((0, 3), "float32"), ((0,), "int8")]):
        with comm.plan_buckets(like, op=cc.SUM) as buckets:
            for _ in range(2):
                assert len(buckets.allreduce()) == len(like)
                ready_all(buckets, [None] * len(like), range(len(like)))
                assert [x.size for x in buckets.wait(LIMIT)] == [0] * len(like)
            if like and comm.rank == 0:  # concerns nobody else
                with pytest.raises(ValueError, match="2 of 2 arrays are not ready"):
                    buckets.wait(LIMIT)


def test_after_the_end_nothing_is_reduced(comm):
    buckets = comm.plan_buckets(FOUR)
    buckets.allreduce()
    buckets.close()
    buckets.close()
    for use in (buckets.allreduce, buckets.wait, lambda: buckets.ready(0)):
        with pytest.raises(cc.CollectiveError, match="the buckets were closed"):
            use()
    assert comm.allreduce(1, op=cc.SUM) == comm.size


@pytest.mark.parametrize("compression", [cc.FP16, cc.BF16, cc.INT8], ids=str)
def test_feedback_makes_up_for_the_roundings_over_the_steps(comm, compression):
    feedback = compression.with_feedback()
    kinds = [((5,), "float32"), ((3,), "int32"), ((700,), "float32"), ((5,), "float64")]
    with comm.plan_buckets(kinds, op=cc.SUM, compression=feedback, **SMALL) as buckets:
        total = np.zeros(700)
        values = [
            np.full(shape, 1 / 3 + comm.rank if dtype != "int32" else 3, dtype)
            for shape, dtype in kinds
        ]
        steps = 60
        for _ in range(steps):
            ready_all(buckets, values, [2, 0, 1, 3])
            results = buckets.wait(LIMIT)
            total += results[2]
            assert results[1].tolist() == [3 * comm.size] * 3
        exact = steps * sum(1 / 3 + r for r in range(comm.size))
        # What the last step has left over: roundings of all contributions and of the result.
        eps = {cc.FP16: 2.0**-11, cc.BF16: 2.0**-8, cc.INT8: 2.0**-8}[compression]
        largest = sum(1 / 3 + r + 1 for r in range(comm.size))
        np.testing.assert_allclose(total, exact, rtol=0, atol=2 * largest * eps + steps * 1e-5)


def test_a_step_that_is_taken_back_leaves_no_residual(comm):
    twins = [
        comm.plan_buckets([((700,), "float32")] * 2, compression=cc.FP16.with_feedback(), **SMALL)
        for _ in range(2)
    ]
    rng = np.random.default_rng(comm.rank)
    for step in range(6):
        values = list(rng.normal(size=(2, 700)).astype(np.float32))
        for buckets in twins:
            if buckets is twins[1] and step % 3 == 1:  # other gradients, which nobody wants
                ready_all(buckets, [value * 3 for value in values], [1, 0])
                buckets.wait(LIMIT)
                buckets.restore_feedback()
                buckets.restore_feedback()
                results = [x.copy() for x in buckets.allreduce(values)]
                buckets.restore_feedback()  # of a step that there was not
            else:
                ready_all(buckets, values, [1, 0])
                results = [x.copy() for x in buckets.wait(LIMIT)]
            if buckets is twins[0]:
                expected = results
        np.testing.assert_array_equal(results, expected)
    for buckets in twins:
        buckets.close()


def test_residuals_of_a_checkpoint_continue_with_the_same_bits(comm):
    first, second = (
        comm.plan_buckets([((700,), "float32")] * 2, compression=cc.INT8.with_feedback(), **SMALL)
        for _ in range(2)
    )
    with first, second:
        assert second.feedback() == [{} for _ in first.feedback()]
        rng = np.random.default_rng(comm.rank)
        first.allreduce(list(rng.normal(size=(2, 700)).astype(np.float32)))
        second.load_feedback(first.feedback())
        for _ in range(2):
            values = list(rng.normal(size=(2, 700)).astype(np.float32))
            expected = [x.copy() for x in first.allreduce(values)]
            np.testing.assert_array_equal(second.allreduce(values), expected)
        with pytest.raises(ValueError, match="expected residuals of [0-9]+ buckets, got 0"):
            second.load_feedback([])
    with comm.plan_buckets([((700,), "float32")]) as plain:
        assert plain.feedback() == []


def test_feedback_needs_a_sum(comm):
    with pytest.raises(ValueError, match="feedback adds up errors"):
        comm.plan_buckets(FOUR, op=cc.MAX, compression=cc.FP16.with_feedback())


def test_tensors_share_the_memory_that_is_reduced(comm):
    torch = installed("torch")
    like = [torch.empty(3, 2).t(), torch.empty(5, dtype=torch.bfloat16), torch.empty(())]
    with comm.plan_buckets(like, op=cc.SUM) as buckets:
        for step in range(2):
            values = [torch.full_like(x, comm.rank + step) for x in like]
            values[0] = values[0].contiguous()  # strides of values do not matter
            ready_all(buckets, values, [2, 1, 0])
            results = buckets.wait(LIMIT)
            total = sum(range(comm.size)) + step * comm.size
            for x, result, view in zip(like, results, buckets.views, strict=True):
                assert (result.dtype, result.shape) == (x.dtype, x.shape)
                assert result.data_ptr() == view.data_ptr()
                assert result.stride() == view.stride() == x.stride()
                assert (result == total).all()
        for view in buckets.views:
            view.fill_(1)
        assert all((x == comm.size).all() for x in buckets.allreduce())


def test_arrays_that_never_change_do_not_see_the_next_step(comm):
    jax = installed("jax")
    like = [jax.numpy.zeros((64, 64)), jax.numpy.zeros(3, dtype=jax.numpy.bfloat16)]
    with comm.plan_buckets(like, op=cc.SUM) as buckets:
        first = buckets.allreduce([jax.numpy.ones_like(x) for x in like])
        second = buckets.allreduce([2 * jax.numpy.ones_like(x) for x in like])
        for x, a, b in zip(like, first, second, strict=True):
            assert isinstance(a, jax.Array)
            assert (a.dtype, a.shape) == (x.dtype, x.shape)
            assert (a == comm.size).all()
            assert (b == 2 * comm.size).all()


def test_bfloat16_is_added_in_float32(comm):
    dtype = np.dtype(ml_dtypes.bfloat16)
    with comm.plan_buckets([((300,), dtype)], op=cc.SUM) as buckets:
        inputs = everyones(comm, [((300,), dtype)])
        assert_reduced(buckets.allreduce(inputs[comm.rank]), inputs, cc.SUM)


def test_two_of_them_do_not_disturb_each_other(comm):
    with comm.plan_buckets(FOUR, op=cc.SUM) as a, comm.plan_buckets(FOUR, op=cc.MAX) as b:
        x = [np.full(2, comm.rank + 1.0, np.float32)] * 4
        pair = [(a, "a"), (b, "b")]
        for buckets, _ in pair if comm.rank % 2 else pair[::-1]:
            ready_all(buckets, x, range(4))
        assert b.wait(LIMIT)[0][0] == comm.size
        assert a.wait(LIMIT)[0][0] == comm.size * (comm.size + 1) / 2
