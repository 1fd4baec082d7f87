"""`collectives.testing`: functions on ranks that are threads, and pytest's fixture."""

import numpy as np
import pytest

import collectives as cc
import strategies
from collectives.testing import run_ranks

pytest_plugins = ["pytester"]


def train(x, *, steps):
    """A user's program: nothing in it knows of threads."""
    comm = cc.init()
    w = strategies.Variable(np.full(3, float(comm.rank)), name="w")
    strategies.broadcast_parameters([w])
    optimizer = strategies.DistributedOptimizer(strategies.Momentum(0.1, 0.9))
    mine = x[comm.rank :: comm.size]
    for _ in range(steps):
        optimizer.apply_gradients([(w.value - mine.mean(0), w)], examples=len(mine))
    return w.value


def test_a_training_function_runs_unchanged(unisono_world):
    before = cc.is_initialized()
    x = np.random.default_rng(0).normal(size=(10, 3))
    weights = unisono_world.run(train, args=(x,), kwargs={"steps": 100})
    assert len(weights) == unisono_world.size
    for w in weights:
        np.testing.assert_array_equal(w, weights[0])
        np.testing.assert_allclose(w, x.mean(0), atol=0.02)
    assert cc.is_initialized() == before


def strategy_mean():
    strategy = strategies.MultiWorkerMirroredStrategy()
    with strategy.scope():
        w = strategy.variable(np.ones(2), name="w")
    value = strategy.run(lambda: w.value * (1 + cc.rank()))
    return strategy.reduce("mean", value).tolist()


def rows_of_a_shared_queue():
    with strategies.rpc.Service(cc.init()) as service:
        queue = strategies.queues.shared_queue(
            strategies.queues.FIFOQueue, 9, np.int64, [()], service=service, shared_name="rows"
        )
        queue.enqueue(cc.rank())
        cc.barrier()
        return sorted(queue.dequeue_many(3).tolist()) if cc.rank() == 0 else None


@pytest.mark.unisono_ranks(3)
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: (cc.rank(), cc.size()), [(0, 3), (1, 3), (2, 3)]),
        (lambda: cc.init().split(cc.rank() % 2).size, [2, 1, 2]),
        (lambda: cc.sendrecv(cc.rank(), (cc.rank() + 1) % 3, source=(cc.rank() - 1) % 3).item(),
         [2, 0, 1]),
        (lambda: cc.allgather_object({"rank": cc.rank()})[2]["rank"], [2, 2, 2]),
        (lambda: cc.shutdown() or cc.size(), [3, 3, 3]),
        (rows_of_a_shared_queue, [[0, 1, 2], None, None]),
        (strategy_mean, [[2.0, 2.0]] * 3),
    ],
)  # fmt: skip
def test_functions_of_the_package_use_the_rank_of_the_thread(unisono_world, function, expected):
    assert unisono_world.run(function) == expected


@pytest.mark.unisono_ranks(2)
def test_the_first_error_ends_the_waits_of_all_ranks(unisono_world):
    seen = []

    def fail():
        comm = cc.init()
        if comm.rank == 1:
            raise KeyError("no such layer")
        try:
            comm.barrier()
        except cc.PeerFailure as error:
            seen.append(str(error))
            raise

    with pytest.raises(KeyError, match="no such layer"):
        unisono_world.run(fail, timeout=300.0)
    (text,) = seen
    assert "barrier: rank 1 has failed by KeyError (rank 0 of 2)" in text
    assert unisono_world.run(cc.rank) == [0, 1]


def test_a_missing_rank_is_named():
    with pytest.raises(cc.CollectiveTimeout, match=r"barrier: .* waiting for rank 1 "):
        run_ranks(lambda: cc.barrier() if cc.rank() == 0 else None, 2, timeout=0.5)


@pytest.mark.parametrize("ranks", [0, -1])
def test_there_is_a_rank_at_least(ranks):
    with pytest.raises(ValueError, match=f"expected an integer >= 1, got {ranks}"):
        run_ranks(cc.rank, ranks)


def test_a_rank_that_is_a_thread_has_one_world():
    with pytest.raises(ValueError, match="there is a world already"):
        run_ranks(lambda: cc.init([0]), 1)


def test_the_plugin_repeats_a_test_by_its_marker(pytester):
    pytester.makepyfile(
        """
        import pytest

        def test_each(unisono_world):
            import collectives as cc
            assert unisono_world.run(cc.size) == [unisono_world.size] * unisono_world.size

        @pytest.mark.unisono_ranks(4)
        def test_four(unisono_world):
            assert unisono_world.size == 4
        """
    )
    result = pytester.runpytest("-v", "--strict-markers", "-p", "unisono_pytest")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*test_each?1 rank? PASSED*", "*test_four?4 ranks? PASSED*"])
