"""Horovod's names: matched by name in any order, with errors on all ranks."""

import contextlib
import threading

import numpy as np
import pytest
from calls import together

import collectives as cc
import inprocess
import strategies
import strategies.horovod.numpy as hvd
from strategies.horovod.handles import Handle

FLOATS, INTEGERS = ("float16", "float32", "float64"), ("int8", "uint8", "int32", "int64")


@contextlib.contextmanager
def session(comm, **options):
    """A context on a communicator."""
    made = hvd.HorovodContext(comm, **options)
    yield made
    made.close()


@contextlib.contextmanager
def everyone(comm):
    """The process set of all ranks of a context on a communicator."""
    with session(comm) as made:
        yield made.world


def values_of(rank, dtype, shape=(3, 2)):
    numbers = np.random.default_rng([5, rank]).integers(1, 4, shape)
    return numbers.astype(dtype)


def test_allreduce_of_all_dtypes_and_ops(comm):
    with everyone(comm) as ranks:
        for dtype in (*FLOATS, *INTEGERS):
            own = values_of(comm.rank, dtype)
            given = own.copy()
            all_values = np.stack([values_of(r, dtype) for r in range(comm.size)])
            exact = all_values.astype(np.float64)
            # Small integers: exact in every dtype but for the mean, which integers truncate.
            mean = exact.mean(0) if dtype in FLOATS else np.trunc(exact.mean(0))
            expected = {
                hvd.Average: mean, hvd.Sum: exact.sum(0), hvd.Min: exact.min(0),
                hvd.Max: exact.max(0), hvd.Product: exact.prod(0).astype(dtype),
            }  # fmt: skip
            for op, wanted in expected.items():
                result = hvd.allreduce(own, op=op, process_set=ranks)
                assert result.dtype == own.dtype
                assert result.shape == own.shape
                np.testing.assert_allclose(
                    result, wanted, rtol=2e-3 if dtype == "float16" else 1e-6
                )
                changed = own.copy()
                assert hvd.allreduce_(changed, op=op, process_set=ranks) is changed
                np.testing.assert_array_equal(changed, result)
            np.testing.assert_array_equal(own, given)


def test_names_in_another_order_on_every_rank(comm):
    with everyone(comm) as ranks:
        for step in range(3):
            begin, end = (np.random.default_rng([k, step, comm.rank]) for k in (1, 2))
            handles = {}
            for i in begin.permutation(12).tolist():
                x = np.full((i, 2), 10.0 * i + comm.rank, np.float32)
                start = hvd.allreduce_async_ if i % 3 else hvd.allreduce_async
                handles[i] = start(x, name=f"layer {i}", process_set=ranks), x
            for i in end.permutation(12).tolist():
                handle, x = handles[i]
                result = hvd.synchronize(handle)
                assert hvd.poll(handle)
                assert hvd.synchronize(handle) is result
                assert (result is x) == bool(i % 3)
                np.testing.assert_allclose(result, 10 * i + (comm.size - 1) / 2, rtol=1e-6)


def test_different_operations_at_once_in_any_order(comm):
    with everyone(comm) as ranks:
        rank, size = comm.rank, comm.size
        own = np.arange(2 * size, dtype=np.int64) + 100 * rank
        starts = {
            "sum": lambda: hvd.allreduce_async(own, op=hvd.Sum, name="sum", process_set=ranks),
            "rows": lambda: hvd.allgather_async(own[: rank + 1], name="rows", process_set=ranks),
            "root": lambda: hvd.broadcast_async(own, size - 1, name="root", process_set=ranks),
            "share": lambda: hvd.reducescatter_async(
                own, name="share", op=hvd.Sum, process_set=ranks
            ),
            "to all": lambda: hvd.alltoall_async(own, name="to all", process_set=ranks),
        }
        for turn in range(3):
            order = np.random.default_rng([turn, rank]).permutation(sorted(starts))
            handles = {name: starts[name]() for name in order}
            results = {name: hvd.synchronize(handle) for name, handle in handles.items()}
            every = [np.arange(2 * size) + 100 * r for r in range(size)]
            np.testing.assert_array_equal(results["sum"], sum(every))
            rows = np.concatenate([x[: r + 1] for r, x in enumerate(every)])
            np.testing.assert_array_equal(results["rows"], rows)
            np.testing.assert_array_equal(results["root"], every[-1])
            part = slice(2 * rank, 2 * rank + 2)
            np.testing.assert_array_equal(results["share"], sum(every)[part])
            np.testing.assert_array_equal(
                results["to all"], np.concatenate([x[part] for x in every])
            )


def test_calls_without_a_name_belong_together_in_their_order(comm):
    with everyone(comm) as ranks:
        for turn in range(40):  # more than have numbers of their own
            x = np.full(1 + turn % 3, turn + comm.rank, np.float64)
            handles = [hvd.allreduce_async(x + k, process_set=ranks) for k in range(3)]
            for k in (2, 0, 1):
                result = hvd.synchronize(handles[k])
                np.testing.assert_allclose(result, turn + k + (comm.size - 1) / 2)


def test_a_name_is_in_use_until_the_program_sees_the_call_completed(comm):
    """Also if the handle was dropped, whether or not the call is already complete."""
    with everyone(comm) as ranks:
        x = np.ones(2)

        def start():
            return hvd.allreduce_async(x, name="x", process_set=ranks)

        def used():
            with pytest.raises(ValueError, match="the name is in use.*'x' twice"):
                start()

        handle = start()
        if comm.rank == comm.size - 1:
            used()
        assert hvd.synchronize(handle).tolist() == [1, 1]
        if comm.rank != comm.size - 1:  # it matches the refused call
            with pytest.raises(cc.MismatchError, match="the name is in use"):
                hvd.synchronize(start())
        if comm.rank == 0:
            start()  # the handle is dropped
            used()
        else:
            hvd.synchronize(start())
        hvd.barrier(ranks)
        if comm.size == 1:  # the barrier may be complete before the dropped call
            return
        if comm.rank != 0:
            with pytest.raises(cc.MismatchError, match="the name is in use"):
                hvd.synchronize(start())
        assert hvd.synchronize(start()).tolist() == [1, 1]
        start()
        hvd.join(process_set=ranks)  # waits for the dropped call
        assert hvd.synchronize(start()).tolist() == [1, 1]


def test_groups_are_one_call(comm):
    with everyone(comm) as ranks:
        xs = [np.full(n, comm.rank + n, np.float32) for n in (0, 1, 5)]
        summed = hvd.grouped_allreduce(xs, op=hvd.Sum, name="group", process_set=ranks)
        handle = hvd.grouped_allreduce_async(xs, op=hvd.Sum, process_set=ranks)
        joined = hvd.grouped_allgather(xs, process_set=ranks)
        shares = hvd.grouped_reducescatter(xs, op=hvd.Sum, process_set=ranks)
        other = hvd.synchronize(handle)
        changed = [x.copy() for x in xs]
        assert hvd.grouped_allreduce_(changed, op=hvd.Sum, process_set=ranks)[1] is changed[1]
        for i, n in enumerate((0, 1, 5)):
            total = n * comm.size + comm.size * (comm.size - 1) / 2
            for result in (summed[i], other[i], changed[i]):
                np.testing.assert_array_equal(result, np.full(n, total))
            assert len(joined[i]) == n * comm.size
            assert comm.allreduce(len(shares[i]), op=cc.SUM) == n
        assert hvd.grouped_allreduce([], process_set=ranks) == []


def test_factors_before_and_after(comm):
    with everyone(comm) as ranks:
        size = comm.size
        for dtype, before, after, wanted in (
            ("float32", 0.5, 3.0, 1.5 * 7 * size),
            ("float16", 1e-5, 1e5, 7 * size),  # is not rounded to 16 bits as a factor
            ("int32", 0.5, 3.0, 3 * 3 * size),  # 3.5 towards zero
        ):
            x = np.full(4, 7, dtype)
            both = {"prescale_factor": before, "postscale_factor": after}
            result = hvd.allreduce(x, op=hvd.Sum, process_set=ranks, **both)
            assert result.dtype == x.dtype
            # Two roundings of a number with 11 bits, one of them below the normal range.
            np.testing.assert_allclose(result, wanted, rtol=5e-3 if dtype == "float16" else 1e-6)
            hvd.allreduce_(x, op=hvd.Sum, process_set=ranks, **both)
            np.testing.assert_array_equal(x, result)


def test_means_of_integers_fit_and_go_towards_zero(comm):
    with everyone(comm) as ranks:
        assert hvd.allreduce(np.full(2, 120, np.int8), process_set=ranks).tolist() == [120, 120]
        down = np.array([-3 if comm.rank == 0 else 0], np.int32)
        assert hvd.allreduce(down, process_set=ranks).tolist() == [int(-3 / comm.size)]
        assert hvd.allreduce(np.full(1, 200, np.uint8), process_set=ranks).dtype == np.uint8


def test_alltoall_with_splits(comm):
    with everyone(comm) as ranks:
        splits = [(comm.rank + k) % 3 for k in range(comm.size)]
        x = np.repeat(np.arange(comm.size), splits) + 10.0 * comm.rank
        rows, received = hvd.alltoall(x, splits=splits, process_set=ranks)
        wanted = [(r + comm.rank) % 3 for r in range(comm.size)]
        assert received.tolist() == wanted
        sources = np.repeat(np.arange(comm.size), wanted)
        np.testing.assert_array_equal(rows, comm.rank + 10.0 * sources)


def test_join_with_every_op(comm):
    with everyone(comm) as ranks:
        rank, size = comm.rank, comm.size
        for turn in range(3):  # the second time the calls are known
            for step in range(rank + 1):
                x = np.array([step + 1.0, -rank - 2.0], np.float64)
                left = range(step, size)
                ops = {
                    hvd.Average: np.mean, hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max,
                    hvd.Product: np.prod,
                }  # fmt: skip
                for op, of in ops.items():
                    result = hvd.allreduce(x, op=op, name=f"join {op.value}", process_set=ranks)
                    columns = [[step + 1.0 for _ in left], [-r - 2.0 for r in left]]
                    np.testing.assert_allclose(result, [of(column) for column in columns])
                whole = hvd.allreduce(np.array(rank, np.int32), process_set=ranks)
                assert whole == sum(left) // len(left)
                rows = hvd.allgather(np.full(2, rank), name="join rows", process_set=ranks)
                assert rows.tolist() == [r for r in left for _ in range(2)]
            assert hvd.join(process_set=ranks) == size - 1, turn
        assert hvd.allreduce(np.ones(1), process_set=ranks).tolist() == [1]


def test_join_takes_part_in_the_steps_of_the_optimizer(comm):
    with everyone(comm) as ranks:
        rank, size = comm.rank, comm.size
        optimizer = hvd.DistributedOptimizer(strategies.SGD(1.0), process_set=ranks)
        w, expected = np.zeros(2), 0.0
        for _ in range(2):
            for step in range(1 + rank):
                optimizer.apply_gradients([(np.full(2, -1.0 - rank), w)])
                hvd.allreduce(np.ones(1), name="loss", process_set=ranks)
                expected += np.mean([1 + r for r in range(step, size)])
            last = hvd.join(process_set=ranks)
            assert last == size - 1
            assert w.tolist() == [expected] * 2
            expected = hvd.broadcast(np.array(expected), last, process_set=ranks)
            w[:] = expected
        another = hvd.DistributedOptimizer(strategies.SGD(1.0), process_set=ranks)
        with pytest.raises(ValueError, match="expected one DistributedOptimizer .*, got 2; delete"):
            hvd.join(process_set=ranks)
        del another  # a refused call has not joined
        total = hvd.allreduce(np.ones(1), op=hvd.Sum, name="after", process_set=ranks)
        assert total.tolist() == [size]


@pytest.mark.several
def test_a_rank_that_joins_before_it_has_variables_is_an_error_on_all(comm):
    with everyone(comm) as ranks:
        optimizer = hvd.DistributedOptimizer(strategies.SGD(1.0), process_set=ranks)
        joins = comm.rank == 0
        calls = {
            True: lambda: hvd.join(process_set=ranks),
            False: lambda: optimizer.apply_gradients([(np.ones(2), np.ones(2))]),
        }
        with pytest.raises(ValueError, match="join: this rank has made no step, so its variables"):
            calls[joins]()


@pytest.mark.several
def test_what_rows_would_be_lost_of_is_an_error_while_a_rank_has_joined(comm):
    with everyone(comm) as ranks:
        for _ in range(2):
            if comm.rank == 0:
                hvd.join(process_set=ranks)
            else:
                for call in (
                    lambda: hvd.alltoall(np.ones(comm.size), name="a", process_set=ranks),
                    lambda: hvd.reducescatter(np.ones(5), name="r", process_set=ranks),
                    lambda: hvd.broadcast(np.ones(5), 0, name="b", process_set=ranks),
                ):
                    with pytest.raises(
                        cc.MismatchError, match="not possible after ranks? 0.* joined"
                    ):
                        call()
                hvd.join(process_set=ranks)
            # The same calls again, after all ranks have made them.
            hvd.alltoall(np.ones(comm.size), name="a", process_set=ranks)
            hvd.broadcast(np.ones(5), 0, name="b", process_set=ranks)


MISTAKES = {
    "shape": (lambda last: np.ones(4 if last else 3), {}, r"shape: \(3,\).*\(4,\)"),
    "dtype": (lambda last: np.ones(3, "f4" if last else "f8"), {}, "dtype: float64.*float32"),
    "op": (lambda last: np.ones(3), {"op": (hvd.Sum, hvd.Max)}, "op: SUM.*MAX"),
    "factor": (
        lambda last: np.ones(3),
        {"prescale_factor": (1.0, 2.0)},
        r"prescale_factor.*\(2.0, 1.0\)",
    ),
}


@pytest.mark.several
@pytest.mark.parametrize("what", MISTAKES)
def test_a_mismatch_is_an_error_on_all_ranks(comm, what):
    value, options, words = MISTAKES[what]
    with everyone(comm) as ranks:
        last = comm.rank == comm.size - 1
        own = {name: pair[last] for name, pair in options.items()}
        for name in ("bad", None):
            with pytest.raises(cc.MismatchError, match=f"{words} on rank {comm.size - 1}"):
                hvd.allreduce(value(last), name=name, process_set=ranks, **own)
            assert hvd.allreduce(np.ones(2), name=name, process_set=ranks).tolist() == [1, 1]


@pytest.mark.several
def test_one_name_for_two_operations_is_an_error_on_all_ranks(comm):
    with everyone(comm) as ranks:
        for _ in range(2):
            options = {"op": hvd.Sum} if comm.rank == 0 else {"root_rank": 0}
            call = hvd.broadcast if comm.rank else hvd.allreduce
            with pytest.raises(cc.MismatchError, match="'both'.*operation: allreduce on rank 0"):
                call(np.ones(2), name="both", process_set=ranks, **options)
            for name in ("both", "other"):  # which both know by now
                hvd.allreduce(np.ones(2), name=name, process_set=ranks)
                hvd.broadcast(np.ones(2), 0, name=name, process_set=ranks)
        with pytest.raises(cc.MismatchError, match="root_rank: 0 on rank 0, 1 on rank"):
            hvd.broadcast(np.ones(2), min(comm.rank, 1), name="root", process_set=ranks)


@pytest.mark.several
def test_an_error_of_one_rank_is_one_of_all(comm):
    with everyone(comm) as ranks:
        for name in (None, "refused"):
            bad = object() if comm.rank == 0 else np.ones(3)
            kind = TypeError if comm.rank == 0 else cc.MismatchError
            with pytest.raises(kind, match="expected an array of numbers"):
                hvd.allreduce(bad, name=name, process_set=ranks)
            # The calls without a name are still the same ones on all ranks.
            assert hvd.allreduce(np.ones(3), name=name, process_set=ranks).tolist() == [1] * 3


def test_a_name_twice_is_an_error_on_all_ranks(comm):
    with everyone(comm) as ranks:
        first = hvd.allreduce_async(np.ones(3), name="twice", process_set=ranks)
        last = comm.rank == comm.size - 1
        if last:
            with pytest.raises(ValueError, match="'twice' twice"):
                hvd.allreduce_async(np.ones(3), name="twice", process_set=ranks)
        assert hvd.synchronize(first).tolist() == [1, 1, 1]
        if not last:
            with pytest.raises(cc.MismatchError, match=f"rank {comm.size - 1} has raised.*twice"):
                hvd.allreduce(np.ones(3), name="twice", process_set=ranks)
        assert hvd.allreduce(np.ones(3), name="twice", process_set=ranks).tolist() == [1, 1, 1]


WRONG = {
    "bool": (lambda **s: hvd.allreduce(np.ones(2, bool), **s), "bool has no MEAN"),
    "order": (lambda **s: hvd.allreduce(np.ones(2, complex), op=hvd.Max, **s), "no order"),
    "both": (lambda **s: hvd.allreduce(np.ones(2), average=True, op=hvd.Sum, **s), "got both"),
    "adasum": (lambda **s: hvd.allreduce(np.ones(2, int), op=hvd.Adasum, **s), "floating-point"),
    "shares": (lambda **s: hvd.reducescatter(np.ones(9), op=hvd.Adasum, **s), "Max or Product"),
    "op": (lambda **s: hvd.allreduce(np.ones(2), op="SUM", **s), "as op, got 'SUM'"),
    "in place": (lambda **s: hvd.allreduce_([1.0], **s), "changed in place"),
    "root": (lambda **s: hvd.broadcast(np.ones(2), 99, **s), "no such root_rank.*got 99"),
    "scalar": (lambda **s: hvd.reducescatter(np.float32(1), **s), "a scalar has no rows"),
    "splits": (lambda **s: hvd.alltoall(np.ones(7), splits=[1] * 99, **s), "splits do not fit"),
}


def test_wrong_arguments(comm):
    with everyone(comm) as ranks:
        for call, words in WRONG.values():
            with pytest.raises((TypeError, ValueError), match=words):
                call(process_set=ranks)
        assert hvd.allreduce([1.0, 2.0], process_set=ranks).tolist() == [1, 2]


class Interrupted:
    """An array whose elements are read when the program is interrupted."""

    shape, dtype = (2,), np.dtype(np.float64)

    def __array__(self, *args, **options):
        raise KeyboardInterrupt


@inprocess.on_ranks(2, timeout=1.0)
def test_a_call_that_one_rank_does_not_finish_ends_on_all(comm):
    made = hvd.HorovodContext(comm)
    first = comm.rank == 0
    with pytest.raises(KeyboardInterrupt if first else cc.CollectiveTimeout):
        hvd.allreduce(Interrupted() if first else np.ones(2), process_set=made.world)
    with pytest.raises(cc.CollectiveError, match="not carried out, since"):
        hvd.allreduce(np.ones(2), process_set=made.world)
    made.close()


@pytest.mark.several
def test_process_sets(comm):
    with session(comm, process_sets=[hvd.ProcessSet([comm.size - 1])]) as made:
        last = made.sets[1]
        assert last.included() == (comm.rank == comm.size - 1)
        some = made.add(sorted({0, comm.size - 1})[::-1]) if comm.size > 2 else None
        with pytest.raises(ValueError, match="the process set exists already"):
            made.add([comm.size - 1])
        with pytest.raises(ValueError, match=f"expected ranks 0 .. {comm.size - 1}, got"):
            made.add([comm.size])
        if some is not None:
            assert some.ranks == [0, comm.size - 1]
            assert some.process_set_id == 2
            if some.included():
                assert some.size() == 2
                assert some.rank() == min(comm.rank, 1)
                x = np.array([comm.rank])
                assert hvd.allreduce(x, op=hvd.Sum, process_set=some) == comm.size - 1
                root = hvd.broadcast(x, comm.size - 1, process_set=some)
                assert root == comm.size - 1
            else:
                with pytest.raises(ValueError, match="this rank is not a member"):
                    hvd.barrier(some)
            assert made.remove(some)
            assert not made.remove(some)
            with pytest.raises(ValueError, match="was not added"):
                hvd.barrier(some)
        hvd.barrier(made.world)
        if last.included():
            assert hvd.join(process_set=last) == comm.rank
            assert hvd.allgather_object({"r": 1}, process_set=last) == [{"r": 1}]
        with pytest.raises(ValueError, match="the set of all ranks stays"):
            made.remove(made.world)


def test_ranks_that_differ_in_a_process_set(comm):
    with session(comm) as made:
        if comm.size > 1:
            with pytest.raises(cc.MismatchError, match="add_process_set: ranks differ"):
                made.add([0] if comm.rank else [1])
        made.add(range(comm.size)[:-1]) if comm.size > 1 else None


def test_objects_and_parameters(comm):
    with everyone(comm) as ranks:
        root = comm.size - 1
        assert hvd.broadcast_object({"rank": comm.rank}, root, process_set=ranks)["rank"] == root
        assert hvd.allgather_object(comm.rank, process_set=ranks) == list(range(comm.size))
        parameters = {"w": np.full(3, comm.rank), "b": np.full((), comm.rank)}
        hvd.broadcast_parameters(parameters, root_rank=root, process_set=ranks)
        assert parameters["w"].tolist() == [root] * 3
        assert parameters["b"] == root


def test_several_threads_wait(comm):
    with everyone(comm) as ranks:
        results = {}

        def use(k):
            for step in range(5):
                x = np.full(3, float(step + k + comm.rank))
                results[k, step] = hvd.allreduce(x, name=f"thread {k}", process_set=ranks)

        together(use, range(3))
        for (k, step), result in results.items():
            np.testing.assert_allclose(result, step + k + (comm.size - 1) / 2)
        assert len(results) == 15


def test_a_call_goes_on_while_nobody_waits(comm):
    with everyone(comm) as ranks:
        handle = hvd.allreduce_async(np.ones(3), name="alone", process_set=ranks)
        done = threading.Event()
        for _ in range(2000):
            if hvd.poll(handle):
                break
            done.wait(0.01)
        assert isinstance(handle, Handle)
        assert hvd.poll(handle)


def test_a_sampler_keeps_its_rows_until_it_deals_anew(comm):
    sampler = hvd.elastic.ElasticSampler(10, seed=3)
    begin = {"rows": 10, "epoch": 1, "processed_indices": []}
    sampler.load_state(begin, comm=comm)
    rows = list(sampler)
    assert sampler.get_indices(1, 2) == rows[2:4]
    assert len(rows) == len(sampler) == -(-10 // comm.size)
    sampler.record_batch(0, 2)
    assert list(sampler) == rows
    assert sampler.processed_num == 2 * comm.size  # of all ranks
    again = hvd.elastic.ElasticSampler(10, seed=3)
    again.load_state_dict(sampler.state_dict())
    assert again.processed_num == sampler.processed_num
    sampler.reset()
    assert len(sampler) == -(-8 // comm.size)
    assert not set(rows[:2]) & set(sampler)
