"""DistributedOptimizer over arrays: as one process on all batches, whatever the ranks bring."""

import copy
import functools
import itertools
import pickle
import re

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import strategies
import strategies.horovod.numpy as hvd
from oracle import joined
from requirements import installed


def batches_of(rank, steps=8, rows=None):
    """One rank's rows of every step; `rows` of them, or a number that differs between steps."""
    random = np.random.default_rng([5, rank])
    counts = [3 + (rank + step) % 3 if rows is None else rows for step in range(steps)]
    return [(random.standard_normal((n, 6)), random.standard_normal((n, 2))) for n in counts]


def variables_of(dtype=np.float64):
    random = np.random.default_rng(1)
    return [
        strategies.Variable(random.standard_normal((6, 2)).astype(dtype), name="w"),
        strategies.Variable(np.zeros(2, dtype), name="b"),
    ]


def gradients_of(variables, x, y):
    """Of the mean squared error of a linear model; NaN for no rows."""
    error = 2 * (x @ variables[0].value + variables[1].value - y)
    with np.errstate(invalid="ignore"):
        return [x.T @ error / len(x), error.sum(axis=0) / np.float64(len(x))]


def train(optimizer, variables, batches, **options):
    for x, y in batches:
        pairs = zip(gradients_of(variables, x, y), variables, strict=True)
        told = {name: len(x) for name in options}
        optimizer.apply_gradients(pairs, **told)
    return [variable.value for variable in variables]


def assert_alike(comm, values, expected):
    """All ranks have the expected values, and the same bits."""
    for own, exact in zip(values, expected, strict=True):
        # float64, 8 steps of less than 100 roundings each, amplified by Adam's division.
        np.testing.assert_allclose(own, exact, rtol=1e-9, atol=1e-11)
        everyones = comm.allgather(own[np.newaxis])
        np.testing.assert_array_equal(everyones, np.broadcast_to(own, everyones.shape))


OPTIMIZERS = {
    "momentum": lambda: strategies.Momentum(0.05, 0.9),
    "adam": lambda: strategies.Adam(0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_equals_one_process_on_all_rows(comm, kind):
    ranks = [batches_of(r) for r in range(comm.size)]
    exact = train(OPTIMIZERS[kind](), variables_of(), joined(ranks))
    optimizer = strategies.DistributedOptimizer(OPTIMIZERS[kind](), comm=comm)
    values = train(optimizer, variables_of(), ranks[comm.rank], examples=True)
    assert optimizer.step == 8
    assert_alike(comm, values, exact)


def test_ranks_without_rows_weigh_nothing_and_equal_shares_need_no_count(comm):
    ranks = [batches_of(r, rows=0 if r == 1 else 4) for r in range(comm.size)]
    exact = train(strategies.SGD(0.1), variables_of(), joined(ranks))
    optimizer = strategies.DistributedOptimizer(strategies.SGD(0.1), comm=comm)
    assert_alike(comm, train(optimizer, variables_of(), ranks[comm.rank], examples=True), exact)
    ranks = [batches_of(r, rows=4) for r in range(comm.size)]
    exact = train(strategies.SGD(0.1), variables_of(), joined(ranks))
    assert_alike(comm, train(optimizer, variables_of(), ranks[comm.rank]), exact)


@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
def test_passes_are_added_up_without_communication(comm, mean):
    ranks = [batches_of(r, steps=6, rows=4) for r in range(comm.size)]
    optimizer = strategies.DistributedOptimizer(
        strategies.SGD(0.1), comm=comm,
        backward_passes_per_step=3, average_aggregated_gradients=mean,
    )  # fmt: skip
    variables = variables_of()
    for step, (x, y) in enumerate(ranks[comm.rank]):
        before = variables[0].value.copy()
        pairs = list(zip(gradients_of(variables, x, y), variables, strict=True))
        # Passes that only add up are not collective: the ranks may do anything meanwhile.
        if step % 3 == 1 and comm.rank == 0 and comm.size > 1:
            comm.broadcast(np.ones(2), 0)
        optimizer.apply_gradients(pairs)
        if step % 3 == 1 and comm.rank > 0:
            comm.broadcast(np.ones(2), 0)
        assert np.array_equal(before, variables[0].value) == (step % 3 != 2)
    three = [
        [tuple(map(np.concatenate, zip(*r[i : i + 3], strict=True))) for i in (0, 3)] for r in ranks
    ]
    exact = train(strategies.SGD(0.1 * (1 if mean else 3)), variables_of(), joined(three))
    assert optimizer.step == 2
    assert_alike(comm, [v.value for v in variables], exact)


def test_passes_with_examples_are_a_mean_over_all_rows(comm):
    ranks = [batches_of(r, steps=4) for r in range(comm.size)]
    two = [
        [tuple(map(np.concatenate, zip(*r[i : i + 2], strict=True))) for i in (0, 2)] for r in ranks
    ]
    exact = train(strategies.SGD(0.1), variables_of(), joined(two))
    optimizer = strategies.DistributedOptimizer(
        strategies.SGD(0.1), comm=comm, backward_passes_per_step=2
    )
    values = train(optimizer, variables_of(), ranks[comm.rank], examples=True)
    assert_alike(comm, values, exact)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_passes_of_16_bits_are_weighted_in_32(comm, dtype, sparse):
    w = strategies.Variable(np.zeros((2, 1), dtype), name="w")
    optimizer = strategies.DistributedOptimizer(
        strategies.SGD(1.0), comm=comm, backward_passes_per_step=600
    )
    gradient = np.full((2, 1), 100, dtype)
    if sparse:
        gradient = strategies.Rows([0, 1], gradient)
    for _ in range(600):
        # Too large a sum for float16; in bfloat16 it would not grow after 256 passes.
        optimizer.apply_gradients([(gradient, w)], examples=1000)
    # Rounded by the weight of the rank, by the mean and by the update.
    bound = 100 * 3 * ml_dtypes.finfo(dtype).eps if comm.size > 1 else 0
    np.testing.assert_allclose(w.value.astype(float), -100, rtol=0, atol=bound)


def test_an_error_of_any_pass_is_raised_on_all_ranks_by_the_last_one(comm):
    optimizer = strategies.DistributedOptimizer(
        strategies.SGD(1.0), comm=comm, backward_passes_per_step=2
    )
    w = np.zeros(3)
    wrong = np.ones(4 if comm.rank == comm.size - 1 else 3)
    optimizer.apply_gradients([(wrong, w)])
    with pytest.raises(ValueError, match=r"expected \(3,\), got \(4,\)"):
        optimizer.apply_gradients([(np.ones(3), w)])
    np.testing.assert_array_equal(w, 0)
    for _ in range(2):
        optimizer.apply_gradients([(np.ones(3), w)])
    np.testing.assert_array_equal(w, -2)


def test_sum_and_a_split_division(comm):
    w = np.zeros(3)
    strategies.DistributedOptimizer(strategies.SGD(1.0), comm=comm, op=cc.SUM).apply_gradients(
        [(np.full(3, comm.rank + 1.0), w)]
    )
    np.testing.assert_array_equal(w, -sum(range(1, comm.size + 1)))
    w[:] = 0
    optimizer = strategies.DistributedOptimizer(
        strategies.SGD(1.0), comm=comm, gradient_predivide_factor=4.0
    )
    optimizer.apply_gradients([(np.full(3, comm.rank + 1.0), w)])
    np.testing.assert_allclose(w, -(comm.size + 1) / 2, rtol=1e-15 * comm.size)


def test_averaged_gradients_are_clipped_by_their_global_norm(comm):
    optimizer = strategies.DistributedOptimizer(
        strategies.SGD(1.0), comm=comm, clip_global_norm=1.0
    )
    a, b = np.zeros(2), np.zeros((1, 1))
    # The mean over the ranks is 3 and 4, whose norm is 5.
    sign = 1 + (comm.rank - (comm.size - 1) / 2)
    optimizer.apply_gradients([([3 * sign, 0], a), (np.full((1, 1), 4 * sign), b)])
    np.testing.assert_allclose([*a, b[0, 0]], [-0.6, 0, -0.8], rtol=1e-12)
    a[:] = b[:] = 0
    optimizer.apply_gradients([([0.3, 0], a), (np.full((1, 1), 0.4), b)])  # short enough
    np.testing.assert_allclose([*a, b[0, 0]], [-0.3, 0, -0.4], rtol=1e-12)
    optimizer.apply_gradients([([np.inf, 0], a), (None, b)])  # for others to see
    assert np.isinf(a[0])


def test_compression_keeps_what_rounding_leaves_over(comm):
    for compression in (cc.FP16, cc.FP16.with_feedback(), cc.INT8.with_feedback()):
        w, v = np.zeros(5, np.float32), np.zeros((2, 2), np.float32)
        optimizer = strategies.DistributedOptimizer(
            strategies.SGD(1.0), comm=comm, compression=compression
        )
        gradient = np.float32(1 / 3 + comm.rank)
        for _ in range(50):
            optimizer.apply_gradients([(np.full_like(w, gradient), w), (v * 0 + gradient, v)])
        exact = -50 * (1 / 3 + (comm.size - 1) / 2)
        steps = 50 if compression is cc.FP16 else 2
        # Two roundings of numbers up to `size` in each step, or in the last one only; and
        # float32 sums of 50 steps.
        eps = 2.0**-7 if compression.dtype == cc.INT8.dtype else 2.0**-11
        limit = steps * 2 * comm.size * eps + 50 * abs(exact) * 2.0**-23
        np.testing.assert_allclose([*w, *v.flat], exact, rtol=0, atol=limit)


def test_a_compression_of_none_rounds_nothing(comm):
    w = np.zeros(2, np.float32)
    optimizer = strategies.DistributedOptimizer(
        strategies.SGD(1.0), comm=comm, compression=None if comm.rank == 0 else cc.NONE
    )
    optimizer.apply_gradients([(np.full(2, 1 + 2.0**-20, np.float32), w)])
    np.testing.assert_array_equal(w, np.float32(-1 - 2.0**-20))


def test_dtypes_stay_and_wider_gradients_are_rounded(comm):
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        w = np.zeros(4, dtype)
        optimizer = strategies.DistributedOptimizer(strategies.SGD(0.5), comm=comm)
        optimizer.apply_gradients([(np.full(4, 2.0 * (comm.rank + 1)), w)])
        np.testing.assert_array_equal(w.astype(float), -(comm.size + 1) / 2)
        optimizer.apply_gradients([(np.full(4, 2.0), w)], examples=comm.rank + 1)
        np.testing.assert_allclose(w.astype(float), -(comm.size + 1) / 2 - 1, rtol=2.0**-7)


def test_many_variables_of_two_dtypes_in_small_buckets(comm):
    random = np.random.default_rng(3)
    shapes = [(), (0, 3), (1,), *[tuple(random.integers(1, 9, 2)) for _ in range(20)]]
    dtypes = [np.float32 if i % 3 else np.float64 for i in range(len(shapes))]
    values = [np.zeros(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    optimizer = strategies.DistributedOptimizer(strategies.SGD(1.0), comm=comm, bucket_bytes=64)
    for step in range(3):
        optimizer.apply_gradients(
            [(np.full_like(v, i + comm.rank + step), v) for i, v in enumerate(values)]
        )
    for i, v in enumerate(values):
        np.testing.assert_allclose(v, -3 * (i + (comm.size - 1) / 2 + 1), rtol=1e-5)
    optimizer.close()
    optimizer.apply_gradients([(np.ones_like(v), v) for v in values])  # made anew


def test_variables_that_get_gradients_late(comm):
    optimizer = strategies.DistributedOptimizer(strategies.SGD(1.0), comm=comm)
    a, b = np.zeros(2), np.zeros(3)
    optimizer.apply_gradients([(np.ones(2), a), (None, b)])
    np.testing.assert_array_equal(b, 0)
    late = np.ones(3) if comm.rank == comm.size - 1 else None
    optimizer.apply_gradients([(None, a), (late, b)])
    np.testing.assert_array_equal(a, -1)
    np.testing.assert_allclose(b, -1 / comm.size, rtol=1e-15)


def test_a_variable_that_had_gradients_and_has_none_stays(comm):
    optimizer = strategies.DistributedOptimizer(strategies.Momentum(1.0, 0.5), comm=comm)
    first, second = (strategies.Variable(np.zeros(3), name=name) for name in "ab")
    ones = np.ones(3)
    optimizer.apply_gradients([(ones, first), (None, second)])
    optimizer.apply_gradients([(None, first), (ones, second)])
    optimizer.apply_gradients([(None, first), (ones, second)])
    assert first.value.tolist() == [-1.0] * 3  # its momentum has not moved it further
    assert second.value.tolist() == [-2.5] * 3


def test_gradients_of_a_few_rows(comm):
    optimizer = strategies.DistributedOptimizer(strategies.SGD(1.0), comm=comm)
    table, bias = np.zeros((40, 2)), np.zeros(2)
    rows = strategies.Rows([comm.rank, 7, 7], np.ones((3, 2)))
    if comm.rank == 1:
        rows = None  # this rank looked nothing up
    optimizer.apply_gradients([(rows, table), (np.ones(2), bias)])
    exact = np.zeros((40, 2))
    for r in range(comm.size):
        if r != 1:
            np.add.at(exact, [r, 7, 7], -1 / comm.size)
    np.testing.assert_allclose(table, exact, rtol=1e-12)
    np.testing.assert_array_equal(bias, -1)
    if comm.size > 1:
        mixed = np.ones((40, 2)) if comm.rank == 0 else strategies.Rows([1], np.ones((1, 2)))
        with pytest.raises(ValueError, match="sparse on some ranks and dense on others"):
            optimizer.apply_gradients([(mixed, table), (None, bias)])
    wrong = 40 if comm.rank == comm.size - 1 else 1
    bad = strategies.Rows([wrong], np.ones((1, 2)))
    with pytest.raises(ValueError, match="out of range"):
        optimizer.apply_gradients([(bad, table), (None, bias)])
    imaginary = strategies.Rows([1], np.full((1, 2), 1j))
    with pytest.raises(TypeError, match="wrong dtype, expected float64, got complex128"):
        optimizer.apply_gradients([(imaginary, table), (None, bias)])
    np.testing.assert_allclose(table, exact, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rows_count_in_the_dtype_of_their_variable_on_every_rank(comm, dtype):
    optimizer = strategies.DistributedOptimizer(strategies.SGD(1.0), comm=comm)
    table = np.zeros((40, 2), dtype)
    last = comm.size - 1
    # Only on rank 0 an index is repeated, of which the sum is a wider number.
    indices = [4, 4] if comm.rank == 0 else [4]
    rows = strategies.Rows(indices, np.ones((len(indices), 2), dtype))
    optimizer.apply_gradients([(rows, table)])
    # Some ranks compute in float64, and the last one has looked nothing up.
    wide = strategies.Rows([0], np.ones((1, 2), "float64" if comm.rank % 2 else dtype))
    optimizer.apply_gradients([(None if comm.rank == last else wide, table)])
    expected = np.zeros((40, 2))
    expected[4], expected[0] = -(comm.size + 1) / comm.size, -last / comm.size
    # Roundings: of the mean's terms, of their size - 1 additions, of the result, of the update.
    rtol = (comm.size + 2) * 2.0 ** -{"float16": 11, "bfloat16": 8, "float32": 24}[dtype]
    np.testing.assert_allclose(table.astype("float64"), expected, rtol=rtol)


def test_rows_of_several_passes(comm):
    optimizer = strategies.DistributedOptimizer(
        strategies.SGD(1.0), comm=comm, backward_passes_per_step=2
    )
    table = np.zeros((9, 1))
    for _ in range(2):
        rows = strategies.Rows([comm.rank, 8], np.ones((2, 1)))
        optimizer.apply_gradients([(rows, table)])
    np.testing.assert_allclose(table[8], -2, rtol=1e-12)
    np.testing.assert_allclose(table[: comm.size], -2 / comm.size, rtol=1e-12)


def test_a_process_set_averages_alone(comm):
    half = comm.split(comm.rank % 2)
    w = np.zeros(2)
    optimizer = strategies.DistributedOptimizer(strategies.SGD(1.0), comm=half)
    optimizer.apply_gradients([(np.full(2, float(comm.rank)), w)])
    members = range(comm.rank % 2, comm.size, 2)
    np.testing.assert_allclose(w, -np.mean(members), rtol=1e-15)
    half.close()


WRONG = {
    "passes": ({"backward_passes_per_step": 0}, ValueError, "expected an integer >= 1, got 0"),
    "factor": ({"gradient_predivide_factor": -1.0}, ValueError, "gradient_predivide_factor > 0"),
    "both": (
        {"gradient_predivide_factor": 2.0, "op": cc.SUM}, ValueError, "for MEAN, got SUM",
    ),
    "op": ({"op": cc.MAX}, ValueError, "expected MEAN or SUM"),
    "compression": ({"compression": "fp16"}, TypeError, "BF16, INT8 or TOPK .*, got str"),
    "clip": ({"clip_global_norm": 0.0}, ValueError, "clip_global_norm > 0, got 0.0"),
    "names": ({"named_parameters": []}, ValueError, "are for optimizers of PyTorch, got SGD"),
    "sync_every": ({"sync_every": 0}, ValueError, "sync_every, expected an integer >= 1, got 0"),
    "outer": ({"outer": strategies.SGD(1.0)}, ValueError, "expected sync_every with it"),
    "outer kind": (
        {"sync_every": 2, "outer": 0.7}, TypeError, "an optimizer of strategies.optimizers as oute",
    ),
    "delay": ({"delay": 2}, ValueError, "expected 0 or 1 as delay, got 2"),
    **{
        f"{name} {other}": (
            {name: value, other: excluded}, ValueError, f"{name} excludes {other}: .*, got",
        )
        for name, value, excluded_by in [
            ("sync_every", 2, {
                "op": cc.SUM, "backward_passes_per_step": 2, "gradient_predivide_factor": 2.0,
                "clip_global_norm": 1.0, "shard_state": True, "delay": 1,
            }),
            ("shard_state", True, {"compression": cc.FP16, "bucket_bytes": 1024, "delay": 1}),
            ("delay", 1, {"sparse_as_dense": True, "overlap": True}),
        ]
        for other, excluded in excluded_by.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_of_one_rank_are_errors_on_all(comm, case):
    options, kind, words = WRONG[case]
    own = options if comm.rank == comm.size - 1 else {}
    with pytest.raises(kind, match=words):
        strategies.DistributedOptimizer(strategies.SGD(1.0), comm=comm, **own)
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_a_copy_of_a_wrapped_optimizer_is_the_optimizer_that_it_holds(comm):
    optimizer = strategies.DistributedOptimizer(strategies.Momentum(1.0), comm=comm)
    w = strategies.Variable(np.zeros(2), name="w")
    optimizer.apply_gradients([(np.ones(2), w)])
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(made) is strategies.Momentum
        np.testing.assert_equal(made.state_dict(), optimizer.state_dict())


def test_a_wrapped_optimizer_is_not_wrapped_again(comm):
    class Holding(strategies.SGD):
        def __init__(self, optimizer):
            super().__init__(1.0)
            self.optimizer = optimizer

    made = hvd.HorovodContext(comm)
    wrappers = [
        lambda given: strategies.DistributedOptimizer(given, comm=comm),
        lambda given: hvd.DistributedOptimizer(given, process_set=made.world),
    ]
    for first, second in itertools.product(wrappers, repeat=2):
        wrapped = first(strategies.SGD(1.0))
        for given in (wrapped, Holding(wrapped)):
            with pytest.raises(ValueError, match="is wrapped already and .* AveragingOptimi"):
                second(given)
        odd = wrapped if comm.rank == comm.size - 1 else strategies.SGD(1.0)
        with pytest.raises(ValueError, match="is wrapped already"):
            second(odd)
    made.close()


@pytest.mark.several
def test_ranks_that_differ_are_told_in_what(comm):
    last = comm.rank == comm.size - 1
    with pytest.raises(cc.MismatchError, match=r"op=MEAN.* on rank 0, .*op=SUM.* on rank"):
        strategies.DistributedOptimizer(
            strategies.SGD(1.0), comm=comm, op=cc.SUM if last else cc.MEAN
        )
    for option, values in {"shard_state": (False, True), "delay": (0, 1)}.items():
        words = f"{option}={values[0]}.* on rank 0, .*{option}={values[1]}.* on rank"
        with pytest.raises(cc.MismatchError, match=words):
            strategies.DistributedOptimizer(
                strategies.SGD(1.0), comm=comm, **{option: values[last]}
            )
    with pytest.raises(TypeError, match="has no apply_gradients, .* got float"):
        strategies.DistributedOptimizer(0.1 if last else strategies.SGD(1.0), comm=comm)
    optimizer = strategies.DistributedOptimizer(strategies.SGD(1.0), comm=comm)
    a, b = (strategies.Variable(np.zeros(n), name=f"v{n}") for n in (2, 3))
    pairs = [(np.ones(2), a), (np.ones(3), b)]
    with pytest.raises(
        cc.MismatchError, match=r"v2: float64 of shape \(2,\) on rank 0, v3: float64 of shape"
    ):
        optimizer.apply_gradients(pairs[::-1] if last else pairs)
    c = np.zeros(2, np.float32 if last else np.float64)
    with pytest.raises(cc.MismatchError, match=r"float64 .* on rank 0, .*float32 .* on rank"):
        optimizer.apply_gradients([(np.ones_like(c), c)])
    with pytest.raises(ValueError, match=r"some ranks have passed examples, .* got 1 of"):
        optimizer.apply_gradients(pairs, examples=5 if last else None)
    with pytest.raises(TypeError, match="expected \\(gradient, variable\\) pairs, got int"):
        optimizer.apply_gradients([3] if last else pairs)
    with pytest.raises(TypeError, match="wrong dtype, expected float64, got complex128"):
        optimizer.apply_gradients([(np.ones(2) * 1j, a) if last else pairs[0], pairs[1]])
    assert not a.value.any()
    optimizer.apply_gradients(pairs)
    np.testing.assert_array_equal(a.value, -1)


def test_an_exception_while_gradients_are_computed_is_raised_on_all(comm):
    class Broken(Exception):
        pass

    def pairs(comm, w):
        yield np.ones(2), w
        if comm.rank == comm.size - 1:
            raise Broken("the loss is gone")

    w = np.zeros(2)
    optimizer = strategies.DistributedOptimizer(strategies.SGD(1.0), comm=comm)
    expected = Broken if comm.rank == comm.size - 1 else RuntimeError
    with pytest.raises(expected, match="the loss is gone"):
        optimizer.apply_gradients(pairs(comm, w))
    np.testing.assert_array_equal(w, 0)


class Interrupting:
    """A communicator of which one call of a plan is interrupted before it begins."""

    def __init__(self, comm):
        self.comm = comm
        self.interrupt = False

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def plan_allreduce(self, *args, **options):
        plan = self.comm.plan_allreduce(*args, **options)

        def run():
            if self.interrupt:
                self.interrupt = False
                raise KeyboardInterrupt
            plan()

        return run


@pytest.mark.several
def test_ranks_in_different_steps_are_told(comm):
    w, comm = np.zeros(2), Interrupting(comm)
    optimizer = strategies.DistributedOptimizer(
        strategies.SGD(1.0), comm=comm, backward_passes_per_step=1
    )
    optimizer.apply_gradients([(np.ones(2), w)])
    if comm.rank == 0:
        comm.interrupt = True
        with pytest.raises(KeyboardInterrupt):  # in a step that it begins again
            optimizer.apply_gradients([(np.ones(2), w)])
    with pytest.raises(cc.MismatchError, match="ranks are not in the same step"):
        optimizer.apply_gradients([(np.ones(2), w)])


def test_parameters_of_one_rank_reach_all(comm):
    root = comm.size - 1
    own = np.full((2, 3), float(comm.rank))
    variable = strategies.Variable(own, name="w")
    frozen = np.full(2, comm.rank, np.float32)
    frozen.flags.writeable = False
    pair = (np.array(comm.rank), [frozen, comm.rank + 0.5])
    if comm.rank % 2:  # the order of a dict is no fact
        tree = {"pair": pair, "own": own, "none": None}
    else:
        tree = {"own": own, "none": None, "pair": pair}
    got = strategies.broadcast_parameters([tree, variable], root, comm=comm)
    assert got[0]["own"] is own
    assert got[1] is variable
    np.testing.assert_array_equal(own, root)
    np.testing.assert_array_equal(variable.value, root)
    assert got[0]["pair"][0] == root
    np.testing.assert_array_equal(got[0]["pair"][1][0], np.full(2, root, np.float32))
    assert got[0]["pair"][1][1] == root + 0.5
    assert got[0]["none"] is None
    empty = strategies.broadcast_parameters({}, comm=comm)
    assert empty == {}


def test_buffers_of_floats_become_the_mean_of_all_ranks(comm):
    mean = (comm.size - 1) / 2
    own = np.full((2, 3), float(comm.rank))
    frozen = np.full(2, comm.rank, np.float32)
    frozen.flags.writeable = False
    counts = np.array([comm.rank])
    variable = strategies.Variable(own.copy(), name="w")
    tree = {"own": own, "others": (frozen, counts, comm.rank, comm.rank + 0.5), "w": variable}
    got = strategies.average_buffers(tree, comm=comm)
    assert got["own"] is own
    assert got["w"] is variable
    np.testing.assert_array_equal(own, mean)
    np.testing.assert_array_equal(variable.value, mean)
    np.testing.assert_array_equal(got["others"][0], np.full(2, mean, np.float32), strict=True)
    np.testing.assert_array_equal(counts, comm.rank)
    assert got["others"][2:] == (comm.rank, mean + 0.5)


def test_buffers_of_a_module_become_the_mean_of_all_ranks(comm):
    torch = installed("torch")
    model = torch.nn.BatchNorm1d(2)
    rows = torch.tensor([[1.0, 2.0], [3.0, 6.0]]) + comm.rank
    for _ in range(1 + comm.rank):
        model(rows)
    with torch.no_grad():
        model.weight += comm.rank
    expected = np.mean(comm.allgather(model.running_mean.numpy()[np.newaxis]), axis=0)
    assert strategies.average_buffers(model, comm=comm) is model
    np.testing.assert_allclose(model.running_mean.numpy(), expected, rtol=1e-6)
    assert model.num_batches_tracked == 1 + comm.rank
    assert model.weight.tolist() == [1.0 + comm.rank] * 2


def test_wrong_buffers_are_errors_on_all_ranks(comm):
    last = comm.rank == comm.size - 1
    with pytest.raises(TypeError, match="average_buffers: expected arrays, got str"):
        strategies.average_buffers({"w": "no" if last else np.ones(2)}, comm=comm)
    if comm.size > 1:
        with pytest.raises(cc.MismatchError, match=r"w: float64 of shape \(2,\) on rank 0, w: "):
            strategies.average_buffers({"w": np.ones(3 if last else 2)}, comm=comm)


def test_wrong_parameters_are_errors_on_all_ranks(comm):
    last = comm.rank == comm.size - 1
    with pytest.raises(TypeError, match="expected arrays, got str"):
        strategies.broadcast_parameters({"w": "no" if last else np.ones(2)}, comm=comm)
    with pytest.raises(ValueError, match=f"no such root, .* got {comm.size}"):
        strategies.broadcast_parameters([np.ones(2)], comm.size, comm=comm)
    for same in ({"a": {"b": 1.0}, "a/b": 2.0}, {"a": {1: 1.0, "1": 2.0}}):
        given = same if last else {"w": 1.0}
        with pytest.raises(ValueError, match=r"expected one leaf per name, got 2 \(a/[b1]\)"):
            strategies.broadcast_parameters(given, comm=comm)
    if comm.size == 1:
        return
    shape = (3, 2) if last else (2, 3)
    with pytest.raises(cc.MismatchError, match=r"w: float64 of shape \(2, 3\) on rank 0, w: "):
        strategies.broadcast_parameters({"w": np.ones(shape)}, comm=comm)
    more = {"u": np.ones(1), "v": np.ones(1)} if last else {"u": np.ones(1)}
    with pytest.raises(cc.MismatchError, match="nothing on rank 0, v: float64"):
        strategies.broadcast_parameters(more, comm=comm)


def test_optimizer_state_of_one_rank_reaches_all(comm):
    root = comm.size - 1
    make = {"w": np.ones(3)}
    optimizer = strategies.Momentum(0.1, 0.9)
    if comm.rank == root:  # only this one has a state
        optimizer.apply_gradients([(np.arange(3.0), strategies.Variable(make["w"], name="w"))])
    wrapped = strategies.DistributedOptimizer(optimizer, comm=comm)
    assert strategies.broadcast_optimizer_state(wrapped, root, comm=comm) is wrapped
    state = optimizer.state_dict()
    assert state["step"] == 1
    assert type(state["step"]) is int
    np.testing.assert_array_equal(state["momentum/w"], [0, 1, 2])


class Stateful:
    """Whatever has a state."""

    def __init__(self, state, problem=None):
        self.state, self.problem = state, problem

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        if self.problem:
            raise KeyError(self.problem)
        self.state = state


def test_states_keep_their_types(comm):
    state = {
        "betas": (0.9, 0.1 + 0.2), 3: [None, True, 2**70, "text", float("-inf")],
        "arrays": {"half": np.ones(2, ml_dtypes.bfloat16), "empty": np.zeros((0, 2), int)},
    }  # fmt: skip
    thing = Stateful(state if comm.rank == 0 else {})
    strategies.broadcast_optimizer_state(thing, comm=comm)
    assert thing.state["betas"] == (0.9, 0.1 + 0.2)
    assert thing.state[3] == [None, True, 2**70, "text", float("-inf")]
    assert thing.state["arrays"]["half"].dtype == ml_dtypes.bfloat16
    assert thing.state["arrays"]["empty"].shape == (0, 2)
    with pytest.raises(TypeError, match=r"got object \(state\['x'\]\)"):
        strategies.broadcast_optimizer_state(Stateful({"x": object()}), comm=comm)
    if comm.size > 1:
        refuses = Stateful({}, "no room" if comm.rank == 1 else None)
        with pytest.raises((KeyError, RuntimeError), match="no room"):
            strategies.broadcast_optimizer_state(refuses, comm=comm)
    assert comm.allreduce(1, op=cc.SUM) == comm.size


class _Keras:
    """As an optimizer of Keras looks like from outside."""

    __module__ = "keras.src.optimizers.sgd"

    def apply_gradients(self, grads_and_vars):
        raise AssertionError


def test_what_is_easily_given_by_mistake_is_refused_by_name_on_all_ranks(comm):
    class Custom(_Keras):
        pass

    for wrong in (_Keras(), Custom()):
        with pytest.raises(
            TypeError, match=r"wrapped by strategies\.keras\.DistributedOptimizer, expected"
        ):
            strategies.DistributedOptimizer(wrong, comm=comm)
    optimizer = strategies.DistributedOptimizer(strategies.SGD(1.0), comm=comm)
    w = strategies.Variable(np.ones(3), name="w")
    gradient = np.ones(3)
    words = r"pair is swapped, expected \(gradient, variable\), .* \(variable 'w', position 0\)"
    pair = (w, gradient) if comm.rank == comm.size - 1 else (gradient, w)
    with pytest.raises(TypeError, match=words):
        optimizer.apply_gradients([pair])
    np.testing.assert_array_equal(w.value, np.ones(3))
    optimizer.apply_gradients([(gradient, w)])


def test_a_mismatch_names_the_optimizer_and_the_checkpoint(comm, tmp_path):
    optimizer = strategies.DistributedOptimizer(strategies.SGD(0.1), comm=comm)
    x = np.ones(3)
    optimizer.apply_gradients([(x, x)])
    if comm.size == 1:
        return
    manager = strategies.CheckpointManager(tmp_path, comm)
    step = functools.partial(optimizer.apply_gradients, [(x, x)])
    save = functools.partial(manager.save, {"x": x}, step=1)
    with pytest.raises(cc.MismatchError) as caught:
        (step if comm.rank else save)()
    manager.close()
    text = str(caught.value)
    here = r"at test_distributed_optimizer.py:\d+ on rank"
    assert re.search(rf"CheckpointManager.save \(broadcast_object\) {here} 0", text)
    assert re.search(
        rf"DistributedOptimizer.apply_gradients \((planned )?allreduce\) {here}s? 1", text
    )


def test_an_error_of_one_rank_of_a_group_names_it_in_the_world(comm):
    group = comm.split(0, -comm.rank)  # backwards
    weights = {"w": "text" if group.rank == 0 else np.ones(3)}
    with pytest.raises(TypeError, match="expected arrays") as caught:
        strategies.broadcast_parameters(weights, comm=group)
    if group.rank:
        words = f"(broadcast_parameters of rank 0 (world rank {comm.size - 1}) of {comm.size})"
        assert words in str(caught.value)
