"""Calls that are planned once and made at every step."""

import numpy as np
import pytest
from calls import raised

import collectives as cc
import oracle
from requirements import installed

F32 = np.dtype(np.float32)
# One that travels with its comparison, and several rounds of slots.
COUNTS = [3, 300_007]


def test_a_planned_broadcast_brings_what_the_root_has_then(comm):
    for root in {0, comm.size - 1}:
        for count in COUNTS:
            for dtype in (F32, oracle.BFLOAT16):
                x = np.zeros(count, dtype)
                run = comm.plan_broadcast(x, root)
                for step in range(3):
                    x[...] = oracle.data(comm.rank + step, (count,), dtype)
                    assert run() is x
                    np.testing.assert_array_equal(x, oracle.data(root + step, (count,), dtype))


def test_a_planned_allgather_joins_what_ranks_have_then(comm):
    for count in COUNTS:
        rows = [(count + 2 * rank) * (rank != 1) for rank in range(comm.size)]
        own = slice(sum(rows[: comm.rank]), sum(rows[: comm.rank + 1]))
        for where in ("new", "out", "own part"):
            out = None if where == "new" else np.zeros((sum(rows), 2), F32)
            x = np.zeros((rows[comm.rank], 2), F32) if where != "own part" else out[own]
            run = comm.plan_allgather(x, out=out)
            first = None
            for step in range(3):
                x[...] = comm.rank + step
                joined = run()
                assert joined is (out if where != "new" else (first := first or [joined])[0])
                assert joined.dtype == F32
                wanted = np.repeat(np.arange(comm.size) + step, rows)
                np.testing.assert_array_equal(joined, np.stack([wanted, wanted], 1))
    assert comm.plan_allgather(np.full((), comm.rank))().tolist() == [*range(comm.size)]


@pytest.mark.parametrize("op", [cc.SUM, cc.MEAN, cc.BITWISE_XOR], ids=lambda op: op.value)
def test_a_planned_reduce_scatter_reduces_what_ranks_have_then(comm, op):
    dtypes = [F32, oracle.BFLOAT16, np.dtype(np.int32)]
    for dtype in (d for d in dtypes if oracle.is_defined(op, d)):
        for count in (comm.size + 1, 100_003):
            for counts in (None, [count] + [0] * (comm.size - 1)):
                bounds = np.cumsum(counts)[:-1] if counts else comm.size
                x = np.zeros((count, 2), dtype)
                rows = np.array_split(x, bounds)[comm.rank]
                for out in (None, np.empty(rows.shape, dtype), rows):
                    run = comm.plan_reduce_scatter(x, op=op, out=out, counts=counts)
                    for step in range(2):
                        arrays = [
                            oracle.data(r + step, (count, 2), dtype) for r in range(comm.size)
                        ]
                        x[...] = arrays[comm.rank]
                        result = run()
                        assert out is None or result is out
                        own = [np.array_split(a, bounds)[comm.rank] for a in arrays]
                        oracle.assert_close(result, own, op)


def test_plans_go_by_the_algorithm_that_is_asked_for(comm, world):
    x, size = np.zeros(1031, F32), comm.size
    for algorithm in world.algorithms("allreduce"):
        run = comm.plan_allreduce(x, op=cc.SUM, algorithm=algorithm)
        for step in range(2):
            x[...] = comm.rank + step
            assert (run() == size * (size - 1) / 2 + size * step).all()
    for algorithm in world.algorithms("broadcast"):
        run = comm.plan_broadcast(x, size - 1, algorithm=algorithm)
        x[...] = comm.rank
        assert (run() == size - 1).all()
    for algorithm in world.algorithms("allgather"):
        run = comm.plan_allgather(x, algorithm=algorithm)
        x[...] = comm.rank
        np.testing.assert_array_equal(run(), np.repeat(range(size), 1031))
    for algorithm in world.algorithms("reduce_scatter"):
        run = comm.plan_reduce_scatter(x, op=cc.SUM, algorithm=algorithm)
        x[...] = 1
        assert (run() == size).all()


@pytest.mark.several
def test_plans_of_other_algorithms_are_other_calls(comm, world):
    names = world.algorithms("allreduce")
    mine = names[0] if comm.rank == 0 else names[1]
    error = raised(lambda: comm.plan_allreduce(np.ones(3), algorithm=mine))
    assert isinstance(error, cc.MismatchError)
    assert f"algorithm is {names[0]} on rank 0" in str(error)
    assert comm.allreduce(1, op=cc.SUM) == comm.size


@pytest.mark.parametrize("op", [cc.LOGICAL_XOR, cc.INTEGER_MEAN], ids=lambda op: op.value)
def test_plans_go_by_way_of_other_reductions(comm, op):
    for dtype in (d for d in [*oracle.DTYPES] if oracle.is_defined(op, d)):
        x, shared = np.zeros((41, 3), dtype), np.zeros((41, 3), dtype)
        own = np.array_split(x, comm.size)[comm.rank]
        run = comm.plan_allreduce(x, op=op)
        share = comm.plan_reduce_scatter(shared, op=op, out=np.empty_like(own))
        for step in range(2):
            everyones = [oracle.data(r + step, x.shape, dtype) for r in range(comm.size)]
            x[...] = shared[...] = everyones[comm.rank]
            assert run() is x
            oracle.assert_close(x, everyones, op)
            rows = [np.array_split(a, comm.size)[comm.rank] for a in everyones]
            oracle.assert_close(share(), rows, op)
            assert shared.tobytes() == everyones[comm.rank].tobytes()


def test_plans_scale_before_and_after(comm):
    how = {"op": cc.SUM, "prescale": 2.0**-12, "postscale": 2.0**12}
    for dtype in (F32, np.dtype(np.float16)):
        x, large = np.zeros(comm.size * 3, dtype), 30_000
        run, share = comm.plan_allreduce(x, **how), comm.plan_reduce_scatter(x, **how)
        for step in range(2):
            # Whose sum float16 cannot hold, on the way: rank 1 takes back what rank 0 brings.
            x[...] = [large, -large, step][min(comm.rank, 2)]
            wanted = comm.allreduce(x, **how)
            assert np.isfinite(wanted).all()
            np.testing.assert_array_equal(share(), wanted[:3])
            np.testing.assert_array_equal(run(), wanted)


@pytest.mark.parametrize("op", [cc.MINLOC, cc.MAXLOC], ids=lambda op: op.value)
def test_plans_find_where_the_best_numbers_are(comm, op):
    values, indices = np.zeros((17, 2), F32), np.zeros((17, 2), np.int32)
    kept = values.copy(), indices.copy()
    run, share = comm.plan_allreduce((values, indices), op=op), None
    for step in range(2):
        values[...] = oracle.data(comm.rank + step, values.shape, F32)
        indices[...] = comm.rank
        for own, array in zip(kept, (values, indices), strict=True):
            own[...] = array
        wanted = comm.allreduce((values, indices), op=op)
        share = share or comm.plan_reduce_scatter(kept, op=op)
        found = run()
        assert found[0] is values
        for got, right, part in zip(found, wanted, share(), strict=True):
            np.testing.assert_array_equal(got, right)
            np.testing.assert_array_equal(part, np.array_split(right, comm.size)[comm.rank])


def test_tensors_are_planned_too(comm):
    torch = installed("torch")
    x = torch.full((comm.size,), comm.rank + 1.0)
    own, joined = torch.zeros(1), torch.zeros(comm.size)
    share = comm.plan_reduce_scatter(x, op=cc.SUM, out=own)
    join = comm.plan_allgather(own, out=joined)
    made = comm.plan_allgather(own)
    total = comm.size * (comm.size + 1) / 2
    for step in range(1, 3):
        x[...] = step * (comm.rank + 1.0)
        assert share() is own
        assert join() is joined
        assert joined.tolist() == made().tolist() == [step * total] * comm.size
    assert isinstance(made(), torch.Tensor)


def test_plans_and_other_calls_in_any_order(comm):
    x = np.full(5, comm.rank + 1.0)
    joined = comm.plan_allgather(x)
    first = comm.plan_broadcast(np.full(3, comm.rank), comm.size - 1)
    for _ in range(3):
        assert joined().sum() == 5 * comm.size * (comm.size + 1) / 2
        assert comm.allreduce(1, op=cc.SUM) == comm.size
        assert first().tolist() == [comm.size - 1] * 3


@pytest.mark.several
def test_ranks_that_call_other_plans_all_say_so(comm):
    x = np.ones(4)
    plans = {
        "allgather": comm.plan_allgather(x),
        "broadcast": comm.plan_broadcast(x.copy()),
        "reduce_scatter": comm.plan_reduce_scatter(np.ones(comm.size)),
    }
    for name, run in plans.items():
        other = comm.barrier if comm.rank == 1 else run
        error = raised(lambda other=other: other())  # from a line of this file
        assert isinstance(error, cc.MismatchError)
        assert f"planned {name} at test_planned.py" in str(error)
        assert "barrier at test_planned.py" in str(error)
        run()
    other = comm.plan_broadcast(x.copy(), 1)
    error = raised(other if comm.rank == 1 else plans["broadcast"])
    assert "root is 0 on rank" in str(error)
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_an_out_in_which_the_array_lies_elsewhere_is_refused(comm):
    out = np.zeros(3 * comm.size + 1)
    last = comm.rank == comm.size - 1
    x = out[3 * comm.rank : 3 * comm.rank + 3] if not last else out[-3:]
    error = raised(lambda: comm.plan_allgather(x, out=out[:-1]))
    assert isinstance(error, ValueError if last else cc.MismatchError)
    assert "share memory at other places" in str(error)
    assert comm.allreduce(1, op=cc.SUM) == comm.size
