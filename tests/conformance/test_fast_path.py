"""Calls that compiled code repeats: results, records, errors and references of all other calls."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

import collectives as cc
import oracle
from collectives.calls import fast_path
from collectives.communicator import group_of
from collectives.kernels import buffer_address

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


def test_references_do_not_grow(comm):
    x, out, dtype = np.ones(3), np.empty(3), np.dtype("f8")

    def counts():
        code = sys._getframe(1).f_code
        return [sys.getrefcount(o) for o in (x, out, dtype, cc.SUM, code, "auto", 1 << 40)]

    def calls(times):
        for _ in range(times):
            comm.allreduce(x, op=cc.SUM, out=out)
            comm.allreduce(x, op=cc.SUM)

    calls(300)  # as many as the recorder keeps, and more
    before = counts()
    calls(3000)
    # Ranks that are threads share some of the objects.
    grown = [after - count for count, after in zip(before, counts(), strict=True)]
    assert max(map(abs, grown)) < 1500, grown


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
