"""Calls that compiled code repeats: results, records, errors and references of all other calls."""

from __future__ import annotations

import functools
import itertools
import sys
import threading

import numpy as np
import pytest

import collectives as cc
import oracle
from collectives.calls import fast_path
from collectives.communicator import group_of
from collectives.kernels import buffer_address, machine_code
from requirements import installed

# More than a call is repeated before the fast path learns it.
TIMES = 6

needs_fast_path = pytest.mark.skipif(sys.version_info < (3, 11), reason="not defined")


def learned(comm):
    """Number of calls that the fast path of a communicator knows."""
    return group_of(comm).fast_path.state.known


def uses_engine(comm):
    return comm.size > 1 and group_of(comm).node_engine is not None and comm.num_nodes == 1


CALLS = {
    "allreduce": lambda comm, x, out: comm.allreduce(x, op=cc.SUM, out=out),
    "allreduce, scaled": lambda comm, x, out: comm.allreduce(x, prescale=2.0, out=out),
    "allreduce, 16 bits": lambda comm, x, out: comm.allreduce(x, compression=cc.FP16, out=out),
    "broadcast": lambda comm, x, out: comm.broadcast(x, comm.size - 1, out=out),
    "reduce": lambda comm, x, out: comm.reduce(x, 0, op=cc.MAX, out=out),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("place", ["new", "elsewhere", "in place"])
def test_results_are_those_of_the_first_call(comm, call, place):
    for dtype, shape in (("f4", (3,)), ("f8", (2, 3)), ("f4", (70_001,)), ("f4", (1, 1, 1, 2, 1))):
        results = set()
        for step in range(TIMES):
            x = oracle.data(comm.rank, shape, np.dtype(dtype))
            before = x.copy()
            out = {"new": None, "elsewhere": np.empty_like(x), "in place": x}[place]
            result = call(comm, x, out)
            results.add(None if result is None else result.tobytes())
            assert out is None or result is None or result is out
            if place != "in place":
                assert x.tobytes() == before.tobytes(), step
        assert len(results) == 1


# Calls whose result has another shape than the array; the same with all ranks' arrays; and the
# first row of a rank in the array or the result, whichever is longer.
SHAPED = {
    "allgather": (
        lambda comm, x, out: comm.allgather(x, out=out),
        lambda arrays, rank: np.concatenate(arrays),
        lambda size, rank: 2 * size * rank,
    ),
    "reduce_scatter": (
        lambda comm, x, out: comm.reduce_scatter(x, op=cc.MAX, out=out),
        lambda arrays, rank: np.array_split(np.max(arrays, 0), len(arrays))[rank],
        lambda size, rank: 2 * rank,
    ),
    "reduce_scatter by counts": (
        lambda comm, x, out: comm.reduce_scatter(x, op=cc.MAX, out=out, counts=counts(comm)),
        lambda arrays, rank: np.max(arrays, 0)[: len(arrays[0]) if rank == 0 else 0],
        lambda size, rank: 0 if rank == 0 else 2 * size,
    ),
}


@functools.cache
def all_to_first(size, rows):
    return (rows, *[0] * (size - 1))


def counts(comm):
    return all_to_first(comm.size, 2 * comm.size)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("place", ["new", "elsewhere", "a part"])
@pytest.mark.parametrize(("call", "expected", "first"), SHAPED.values(), ids=SHAPED)
def test_results_of_another_shape_are_right_in_every_call(
    comm, call, expected, first, place, library
):
    convert = installed("torch").from_numpy if library == "torch" else np.asarray
    for dtype, width in (("f4", 1), ("i8", 3), ("f4", 40_001)):
        shape = (2 * comm.size, width)
        for step in range(TIMES):
            arrays = [oracle.data(r + step, shape, np.dtype(dtype)) for r in range(comm.size)]
            right = expected(arrays, comm.rank)
            x, out = arrays[comm.rank], None if place == "new" else np.empty_like(right)
            at = first(comm.size, comm.rank)
            if place == "a part" and len(right) > len(x):
                x = out[at : at + len(x)]
                x[:] = arrays[comm.rank]
            elif place == "a part":
                out = x[at : at + len(right)]
            given = None if out is None else convert(out)
            result = call(comm, convert(x), given)
            assert given is None or result is given
            assert type(result) is type(convert(x))
            np.testing.assert_array_equal(np.asarray(result), right)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_row_counts_may_change_after_a_gather_is_learned(comm, library):
    convert = installed("torch").from_numpy if library == "torch" else np.asarray

    def call(x, out=None):
        return comm.allgather(x, out=out)

    def gathers(rows, times):
        for step in range(times):
            everyones = [np.full((n, 2), 10.0 * step + r) for r, n in enumerate(rows)]
            expected, own = np.concatenate(everyones), convert(everyones[comm.rank])
            np.testing.assert_array_equal(np.asarray(call(own)), expected)
            out = convert(np.empty_like(expected))
            assert call(own, out) is out
            np.testing.assert_array_equal(np.asarray(out), expected)

    few, more = [3] * comm.size, [*[3] * (comm.size - 1), 5]
    gathers(few, TIMES)
    for rows in (more, few, more):
        gathers(rows, 1)
    gathers(more, TIMES)
    # An `out` of the last length, while one rank has other rows.
    out = convert(np.empty((sum(more), 2)))
    with pytest.raises((ValueError, cc.MismatchError), match="allgather: out"):
        call(convert(np.zeros((few[comm.rank], 2))), out)
    gathers(few, TIMES)


@needs_fast_path
def test_calls_of_every_operation_are_learned(comm):
    own = comm.split(0)
    x, part, every = np.ones(2 * own.size), np.ones(2), np.ones(2 * own.size**2)
    calls = [
        lambda: own.allreduce(x, op=cc.SUM),
        lambda: own.broadcast(x, 0, out=x),
        lambda: own.broadcast(x, 0),
        lambda: own.reduce(x, 0),
        lambda: own.allgather(x),
        lambda: own.allgather(x, out=every),
        lambda: own.reduce_scatter(x),
        lambda: own.reduce_scatter(x, out=part),
        lambda: own.barrier(),
    ]
    for number, call in enumerate(calls):
        for _ in range(TIMES):
            call()
        assert learned(own) == (number + 1 if uses_engine(comm) else 0)


# A call of one rank is learned after 500, if its code need not be compiled.
MANY = 510


def is_loaded_by_one_rank():
    kept = machine_code.is_kept("collectives.kernels.fast_path_kernel", "repeat")
    return kept and fast_path.is_usable()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_one_rank_repeats_its_calls_with_the_same_results(comm, call):
    alone = comm.split(comm.rank)
    x = np.array([1.5, np.nan, -0.0])
    out, own, results = np.empty(3), x.copy(), set()
    for step in range(MANY):
        x[0] = own[0] = step
        expected = call(alone, x, None).tobytes()
        assert call(alone, x, out) is out
        assert call(alone, own, own) is own
        results |= {(out.tobytes() == expected, own.tobytes() == expected)}
        own[:] = x
    assert results == {(True, True)}
    is_copy = call not in (CALLS["allreduce, scaled"], CALLS["allreduce, 16 bits"])
    assert learned(alone) == (2 if is_copy and is_loaded_by_one_rank() else 0)


@pytest.mark.parametrize(("call", "expected", "first"), SHAPED.values(), ids=SHAPED)
def test_one_rank_repeats_its_gathers_and_shares(comm, call, expected, first):
    alone = comm.split(comm.rank)
    x, out = np.zeros((2, 3)), np.empty((2, 3))
    for step in range(MANY):
        x[0] = step
        assert call(alone, x, out) is out
        np.testing.assert_array_equal(out, x)
        np.testing.assert_array_equal(call(alone, x, None), x)
    facts = group_of(alone).recorder.records[-1].facts()
    assert (facts["number"], facts["state"]) == (2 * MANY, "done")
    assert learned(alone) == (1 if is_loaded_by_one_rank() else 0)


@needs_fast_path
def test_equal_calls_of_one_line_are_learned(comm):
    x, out = np.ones(5), np.empty(5)
    for op in (cc.SUM, cc.MAX):
        for _ in range(TIMES):
            comm.allreduce(x, op=op, out=out)
    assert learned(comm) == (2 if uses_engine(comm) else 0)
    for _ in range(TIMES):
        comm.allreduce(x, op=cc.MAX, out=out)  # another line
    assert learned(comm) == (3 if uses_engine(comm) else 0)
    comm.shared_empty(5, "float64")
    assert learned(comm) == 0


def test_other_arguments_after_learned_ones_have_results_of_their_own(comm):
    def call(x, **options):
        return comm.allreduce(x, **{"op": cc.SUM, **options})

    x, total = np.arange(6.0), comm.size * np.arange(6.0)
    for _ in range(TIMES):
        call(x)
    fixed = x.copy()
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        call(x, out=fixed)
    for _ in range(TIMES):
        np.testing.assert_array_equal(call(x.reshape(2, 3)), total.reshape(2, 3))
        np.testing.assert_array_equal(call(x[::2]), total[::2])
        np.testing.assert_array_equal(call(x.astype("f4")), total)
        np.testing.assert_array_equal(call(x, op=cc.MEAN), x)
        np.testing.assert_array_equal(call(x, timeout=20), total)
        np.testing.assert_array_equal(call(fixed), total)
        np.testing.assert_array_equal(call(x.tolist()), total)
        np.testing.assert_array_equal(call(x.view(np.recarray)), total)
        both = np.concatenate([x, x])
        assert call(both[:6], out=both[3:9]).tolist() == total.tolist()  # partial overlap
        assert call(both[:6], out=both[6:]) is not None


def test_records_number_name_and_place_every_call(comm):
    group = group_of(comm)
    x, before = np.ones(3), group.call_number
    for _ in range(TIMES):
        comm.allreduce(x, op=cc.SUM, out=x)
        comm.barrier()
    found = [record.facts() for record in group.recorder.records[-2 * TIMES :]]
    numbers = [fact["number"] for fact in found]
    assert numbers == list(range(before + 1, before + 2 * TIMES + 1))
    reductions, barriers = found[::2], found[1::2]
    clock = {"number", "began", "ended", "monotonic", "seconds"}
    for facts in (reductions, barriers):
        rest = [{k: v for k, v in fact.items() if k not in clock} for fact in facts]
        assert rest == [rest[0]] * TIMES
        assert all(fact["ended"] >= fact["began"] for fact in facts)
    assert reductions[0]["operation"] == "allreduce"
    assert reductions[0]["state"] == "done"


# As a module of the package that calls an operation for the program.
LIBRARY = """
def total(comm, x, timeout):
    return comm.allreduce(x, op=SUM, out=x, timeout=timeout)

def call(function, *arguments):
    return function(*arguments)
"""


def test_records_name_the_line_of_the_program(comm):
    library = {"__name__": "strategies.of_a_test", "SUM": cc.SUM}
    exec(compile(LIBRARY, "library.py", "exec"), library)
    total, call = library["total"], library["call"]
    group, x, timeout = group_of(comm), np.zeros(4), float(20)
    for _ in range(TIMES):
        call(total, comm, x, timeout)
        total(comm, x, timeout)
        total(comm, x, timeout), total(comm, x, timeout + 1)
    rows = [record.facts()["site"] for record in group.recorder.records[-4 * TIMES :]]
    first = int(rows[0].rpartition(":")[2])
    assert rows == [f"{__file__}:{first + offset}" for offset in (0, 1, 2, 2)] * TIMES


def test_a_timeout_is_part_of_a_learned_call(comm):
    def call(timeout):
        return comm.allreduce(x, op=cc.SUM, out=x, timeout=timeout)

    x, long = np.zeros(3), float(30)
    for _ in range(TIMES):
        call(long)
        call(None)
    with pytest.raises((TypeError, ValueError), match="timeout"):
        call(-1.0)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_references_do_not_grow(comm, library):
    ones = installed(library).ones
    x, out = ones(3), ones(3)
    dtype = x.dtype

    def counts():
        code = sys._getframe(1).f_code
        shared = (dtype, cc.SUM, code, "auto", None, True, False, type(x))
        return [sys.getrefcount(o) for o in (x, out, *shared)]

    def calls(times):
        for _ in range(times):
            comm.allreduce(x, op=cc.SUM, out=out)
            comm.allreduce(x, op=cc.SUM)

    calls(300)  # as many as the recorder keeps, and more
    seen = [counts()]
    for _ in range(3):
        calls(1000)
        seen.append(counts())
    # The smallest change: what is loaded or collected meanwhile changes the counts once. Ranks that
    # are threads share some of the objects.
    changes = [np.abs(np.subtract(*pair)) for pair in itertools.pairwise(seen)]
    assert max(np.min(changes, axis=0)) < 500, seen


TENSORS = {
    "float32": lambda torch: torch.arange(6.0),
    "bfloat16": lambda torch: torch.arange(6.0, dtype=torch.bfloat16),
    "int64": lambda torch: torch.arange(6).reshape(2, 3),
    "bool": lambda torch: torch.tensor([True, False]),
    "complex64": lambda torch: torch.ones(2, dtype=torch.complex64).conj(),
    "no axes": lambda torch: torch.tensor(3.0),
    "five axes": lambda torch: torch.ones(1, 2, 1, 2, 1),
    "empty": lambda torch: torch.ones(0, 2),
    "strided": lambda torch: torch.arange(6.0).reshape(2, 3).T,
    "a part": lambda torch: torch.arange(8.0)[1:5],
    "with gradient": lambda torch: torch.ones(3, requires_grad=True),
    "a parameter": lambda torch: torch.nn.Parameter(torch.ones(3)),
    "of inference": lambda torch: torch.inference_mode()(torch.ones)(3),
    "negated": lambda torch: torch.ones(1, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("place", ["new", "elsewhere", "in place"])
def test_results_of_tensors_are_those_of_the_first_call(comm, make, place):
    torch = installed("torch")
    calls = {
        "allreduce": lambda x, out: comm.allreduce(x, op=cc.MAX, out=out),
        "broadcast": lambda x, out: comm.broadcast(x, comm.size - 1, out=out),
        "reduce": lambda x, out: comm.reduce(x, comm.size - 1, op=cc.MAX, out=out),
    }
    if make(torch).is_complex():  # MAX is not defined
        del calls["allreduce"], calls["reduce"]
    for call in calls.values():
        for _ in range(TIMES):
            x = make(torch)
            out = {"new": None, "elsewhere": torch.zeros_like(x.detach()), "in place": x}[place]
            result = call(x, out)
            if result is not None:
                assert result is out or (out is None and not result.requires_grad)
                assert result.tolist() == make(torch).tolist()
                assert (result.dtype, result.shape) == (x.dtype, x.shape)


@needs_fast_path
def test_calls_with_tensors_are_learned_beside_those_with_arrays(comm):
    torch = installed("torch")
    own = comm.split(0)
    makes = [
        lambda: torch.ones(3),
        lambda: np.ones(3, "f4"),
        lambda: torch.ones(3, dtype=torch.float64),
        lambda: torch.ones(4, requires_grad=True),
        lambda: torch.nn.Parameter(torch.ones(5)),
    ]
    for make in makes:
        x = make()
        for out in (None, make(), x):
            for _ in range(TIMES):
                own.allreduce(x, op=cc.MAX, out=out)
    out = torch.empty(5)
    for _ in range(TIMES):
        own.allreduce(x, op=cc.MAX, out=out)  # from a parameter to a tensor
    # A call that is not found again would be learned again. In place is another call.
    assert learned(own) == (2 * len(makes) + 1 if uses_engine(comm) else 0)


def test_other_tensors_after_learned_ones_have_results_of_their_own(comm):
    torch = installed("torch")

    def call(x, out=None):
        return comm.allreduce(x, op=cc.SUM, out=out)

    x, total = torch.arange(6.0), [comm.size * i for i in range(6)]
    for _ in range(TIMES):
        call(x)
        call(x, x.clone())
    for _ in range(TIMES):
        assert call(x, torch.zeros(6)).tolist() == total
        assert call(x, np.zeros(6, "f4")).tolist() == total
        assert call(x.numpy()).tolist() == total
        assert call(x.double()).dtype == torch.float64
        assert call(x.reshape(2, 3)).tolist() == [total[:3], total[3:]]
        assert call(torch.stack([x, x], dim=1)[:, 0]).tolist() == total
        assert call(torch.ones(1)).tolist() == [comm.size]
        # Negated lazily: the number in memory is 1.
        assert call((torch.ones(1) * 1j).conj().imag).tolist() == [-comm.size]
        both = torch.cat([x, x])
        assert call(both[:6], both[3:9]).tolist() == total  # partial overlap
        assert call(x, both.expand(1, 12)[0, 6:]).tolist() == total
    for refused in (torch.zeros(5), torch.zeros(6, dtype=torch.float64), torch.zeros(1).expand(6)):
        with pytest.raises((TypeError, ValueError), match="allreduce: out"):
            call(x, refused)
    with pytest.raises(TypeError, match="cannot be read"):
        call(torch.empty(6, device="meta"))
    assert call(x).tolist() == total


def test_parameters_are_reduced_in_place_without_a_graph(comm):
    torch = installed("torch")
    weight = torch.nn.Parameter(torch.ones(3))
    for _ in range(TIMES):
        loss = (weight * weight).sum()
        with torch.no_grad():
            assert comm.allreduce(weight, op=cc.MAX, out=weight) is weight
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        assert weight.is_leaf
        assert weight.requires_grad
        made = comm.allreduce(weight, op=cc.SUM)
        assert (type(made), made.requires_grad) == (torch.Tensor, False)
        assert made.tolist() == [comm.size] * 3


def test_autograd_sees_that_a_learned_call_has_written(comm):
    torch = installed("torch")
    weight = torch.ones(3, requires_grad=True)
    for _ in range(TIMES):
        x, out = torch.ones(3), torch.ones(3)
        of_x, of_out = (weight * x).sum(), (weight * out).sum()
        comm.allreduce(x, op=cc.MAX, out=out)
        of_x.backward()  # needs `x`, which is only read
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            of_out.backward()
        of_x = (weight * x).sum()
        comm.allreduce(x, op=cc.MAX, out=x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            of_x.backward()


@pytest.mark.several
def test_a_mismatch_in_a_learned_call_is_an_error_on_all_ranks(comm):
    def call(op):
        return comm.allreduce(x, op=op, out=x)

    x = np.ones(3)
    for op in (cc.MAX, cc.MIN):
        for _ in range(TIMES):
            call(op)
    with pytest.raises(cc.MismatchError, match="op"):
        call(cc.MAX if comm.rank == 0 else cc.MIN)
    assert call(cc.MAX).tolist() == [1.0] * 3


@needs_fast_path
@pytest.mark.several
@pytest.mark.parametrize(
    ("is_own", "message"), [(False, "another thread"), (True, "KeyboardInterrupt")]
)
def test_a_call_while_another_is_in_compiled_code_is_refused(comm, is_own, message):
    comm.barrier()
    if not uses_engine(comm):
        pytest.skip("about the node engine")
    own = comm.split(0)
    x = np.ones(3)
    for _ in range(TIMES):
        own.allreduce(x, out=x)
    group = group_of(own)
    # As while the kernel runs in another thread, and after an interrupt of this one.
    group.gate = next(iter(group.plans.values()))
    group.fast_path.state.owner = threading.get_ident() if is_own else 1
    with pytest.raises(cc.CollectiveError, match=message):
        own.allreduce(x, out=x)
    comm.barrier()


def test_an_unknown_python_or_numpy_has_no_fast_path(comm, monkeypatch):
    monkeypatch.setattr(fast_path, "is_usable", lambda: False)
    own = comm.split(0)
    x = np.ones(3)
    for _ in range(TIMES):
        own.allreduce(x, op=cc.SUM, out=x)
    assert learned(own) == 0


@needs_fast_path
def test_this_python_and_this_numpy_have_one():
    compiled = buffer_address.address_reader() is not buffer_address.in_python
    assert fast_path.is_usable() == compiled
