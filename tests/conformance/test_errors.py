"""Ranks that disagree, misuse a call, or do not come: the same clear error everywhere."""

from __future__ import annotations

import re

import numpy as np
import pytest

import collectives as cc
import listed
import oracle
from collectives.communicator import group_of
from collectives.core.settings import Settings
from collectives.transport.transport import describe_ranks
from conftest import UNDER_MPI

seen: set[str] = set()  # texts of errors, of all ranks
NOT_OURS = {
    "'float' object cannot be interpreted as an integer",
    "data type 'no dtype' not understood",
}


@pytest.fixture(autouse=True)
def errors_are_listed():
    """What is raised is on the page of all messages; under MPI the texts are the same."""
    seen.clear()
    yield
    for text in () if UNDER_MPI else seen - NOT_OURS:
        listed.check(text)


def raised(function):
    """Return the exception that `function` raises, or None; its text is on the page of messages."""
    try:
        function()
    except Exception as error:
        seen.add(str(error))
        return error
    return None


def odd(comm, usual, other):
    """Give rank 1 another value than the rest."""
    return other if comm.rank == 1 else usual


MISMATCHES = {
    "shape": lambda c: c.allreduce(np.zeros(odd(c, 4, 6)), op=cc.SUM),
    "a large shape": lambda c: c.allreduce(np.zeros(odd(c, 100_000, 150_000)), op=cc.SUM),
    "float width": lambda c: c.allreduce(np.zeros(4, odd(c, "f8", "f4")), op=cc.SUM),
    "dtype kind": lambda c: c.allreduce(np.zeros(4, odd(c, "f4", "i4")), op=cc.SUM),
    "op": lambda c: c.allreduce(np.zeros(4), op=odd(c, cc.SUM, cc.MAX)),
    "operation": lambda c: odd(c, c.allreduce, c.broadcast)(np.zeros(4)),
    "root": lambda c: c.broadcast(np.zeros(4), odd(c, 0, 1)),
    "algorithm": lambda c: c.allreduce(np.zeros(4), algorithm=odd(c, "ring", "tree")),
    "row shape": lambda c: c.allgather(np.zeros((2, odd(c, 3, 4)))),
    "gather's dtype": lambda c: c.gather(np.zeros(2, odd(c, "f4", "f8"))),
}


@pytest.mark.parametrize("call", MISMATCHES.values(), ids=MISMATCHES.keys())
def test_ranks_that_disagree_all_get_the_same_error_and_can_go_on(comm, call):
    error = raised(lambda: call(comm))
    if comm.size == 1:
        assert error is None
        return
    assert isinstance(error, cc.MismatchError)
    texts = comm.allgather_object(str(error))
    assert set(texts) == {str(error)}
    assert "rank 1" in texts[0]
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_a_mismatch_names_the_field_its_values_and_the_ranks(comm):
    error = raised(MISMATCHES["dtype kind"].__get__(comm))
    if comm.size > 1:
        assert "dtype is float32 on rank" in str(error)
        assert "int32 on rank 1" in str(error)


# Two calls in two lines: what ranks but rank 1 make, and what rank 1 makes.
APART = {
    "calls": lambda c: (lambda: c.allreduce(np.zeros(4)), lambda: c.broadcast(np.zeros(4))),
    "repeated calls": lambda c: (
        [call := lambda: c.allreduce(np.zeros(4)), call()][0],
        lambda: c.broadcast(np.zeros(4)),
    ),
    "a plan": lambda c: (c.plan_allreduce(np.zeros(4)), lambda: c.broadcast(np.zeros(4))),
    "requests": lambda c: (
        lambda: c.allreduce_async(np.zeros(4)).wait(),
        lambda: c.broadcast_async(np.zeros(4)).wait(),
    ),
}


@pytest.mark.parametrize("calls", APART.values(), ids=APART.keys())
def test_a_mismatch_says_where_each_rank_stands(comm, calls):
    usual, other = calls(comm)
    if comm.size == 1:
        return
    text = str(raised(lambda: odd(comm, usual, other)()))  # a plan is called here
    stands = r"((planned )?allreduce|broadcast) at test_errors.py:\d+ on ranks? [\d ]+"
    assert re.fullmatch(rf".*: calls differ between ranks: {stands}, {stands}", text)
    assert re.search(r"broadcast at test_errors.py:\d+ on rank 1(,|$)", text)
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_a_mismatch_of_buckets_says_where_each_rank_stands(comm):
    with comm.plan_buckets([((2,), "float32")] * 2) as buckets:
        for index in range(2):
            if comm.rank != 1 or index == 0:
                buckets.ready(index, np.ones(2, np.float32))
        text = str(raised(buckets.wait))
    if comm.rank == 1:
        assert "1 of 2 arrays are not ready" in text
    elif comm.size > 1:
        where = r"(allreduce|buckets) at test_errors.py:\d+ on rank"
        assert len(re.findall(where, text)) == 2, text


def test_a_mismatch_in_one_line_names_it_once(comm):
    text = str(raised(MISMATCHES["dtype kind"].__get__(comm)))
    if comm.size > 1:
        assert re.search(r"; allreduce at test_errors.py:\d+ on all ranks$", text)


def test_an_error_of_a_group_names_its_ranks_in_the_world_too(comm):
    if comm.size < 3:
        return
    ranks = list(range(comm.size - 1, 0, -1))  # backwards, without rank 0
    last, other = f"rank 0 (world rank {ranks[0]})", f"rank 1 (world rank {ranks[1]})"
    group = comm.group(ranks)
    if group is not None:
        inner = group.split(0)  # the same ranks again
        for one in (group, inner):
            text = str(raised(lambda one=one: one.allreduce(np.zeros(odd(one, 4, 6)))))
            assert f"(6,) on {other}" in text
            usual = [0, *range(2, one.size)]
            assert f"(4,) on {describe_ranks(usual, ranks)}" in text
        again = group.split(0 if group.rank < 2 else None)
        if again is not None and again.rank == 0:
            error = raised(lambda: again.barrier(timeout=0.2))
            assert isinstance(error, cc.CollectiveTimeout)
            assert f"still waiting for {other}" in str(error)
            assert str(error).endswith(f"({last} of 2)")
    comm.barrier()


def test_a_duplicate_of_the_world_names_ranks_as_the_world_does(comm):
    twin = comm.split(0, comm.rank)
    if comm.size > 1:
        assert "world rank" not in str(raised(lambda: MISMATCHES["shape"](twin)))


REFUSALS = {
    "dtype": (TypeError, lambda c: c.allreduce(odd(c, [1.0], ["text"]), op=cc.SUM)),
    "op": (TypeError, lambda c: c.allreduce([1.0], op=odd(c, cc.SUM, "sum"))),
    "out": (ValueError, lambda c: c.allreduce([1.0], op=cc.SUM, out=np.empty(odd(c, 1, 2)))),
    "root": (ValueError, lambda c: c.broadcast([1.0], odd(c, 0, 99))),
    "algorithm": (ValueError, lambda c: c.allreduce([1.0], algorithm=odd(c, "auto", "best"))),
    "timeout": (ValueError, lambda c: c.barrier(timeout=odd(c, 15, 0))),
    "scalar": (ValueError, lambda c: c.reduce_scatter(odd(c, [1.0], 1.0))),
    "color": (ValueError, lambda c: c.split(odd(c, 0, 1 << 63))),
    "color's kind": (TypeError, lambda c: c.split(odd(c, 0, 0.5))),
    "key": (ValueError, lambda c: c.split(0, odd(c, 0, -(1 << 63) - 1))),
    "shared dtype": (TypeError, lambda c: c.shared_empty(3, odd(c, "f4", "no dtype"))),
    "shared shape": (TypeError, lambda c: c.shared_empty(odd(c, 3, 3.0), "f4")),
}


@pytest.mark.parametrize(("kind", "call"), REFUSALS.values(), ids=REFUSALS.keys())
def test_wrong_use_on_one_rank_is_an_error_on_all(comm, kind, call):
    error = raised(lambda: call(comm))
    if comm.rank == 1:
        assert isinstance(error, kind)
    elif comm.size > 1:
        assert isinstance(error, cc.MismatchError)
        assert f"rank 1: {kind.__name__}" in str(error)
    assert comm.allreduce(1, op=cc.SUM) == comm.size


X, N = np.ones(4), np.arange(4)
FIXED = np.broadcast_to(np.float32(1), (4, 2))
HUGE = np.array([2**63 + 1], np.uint64)  # would be negative as int64


@pytest.mark.parametrize(
    ("kind", "words", "call"),
    [
        (TypeError, "mean of integers", lambda c: c.allreduce(np.arange(3))),
        (TypeError, "bool has no sum", lambda c: c.allreduce(np.ones(3, bool), op=cc.SUM)),
        (TypeError, "no order", lambda c: c.allreduce(np.ones(3, complex), op=cc.MAX)),
        (TypeError, "got <U1", lambda c: c.allgather(["a"])),
        (TypeError, "got object .*broadcast_object, gather_object",
         lambda c: c.broadcast(np.array([None]))),
        (TypeError, "expected float64, got float32",
         lambda c: c.allreduce(np.zeros(2), out=np.zeros(2, "f4"))),
        (TypeError, "out .*list", lambda c: c.allreduce(np.zeros(2), out=[0, 0])),
        (ValueError, r"expected \(2,\), got \(3,\)",
         lambda c: c.allreduce(np.zeros(2), out=np.zeros(3))),
        (ValueError, "read-only", lambda c: c.allreduce(np.zeros(2), out=np.broadcast_to(0.0, 2))),
        (ValueError, "expected one of auto node ring .*, got 'best'",
         lambda c: c.allreduce(np.zeros(2), algorithm="best")),
        (ValueError, "no such root, expected 0 ..", lambda c: c.gather([1], -1)),
        (ValueError, "timeout must be seconds > 0", lambda c: c.barrier(timeout=0)),
        (TypeError, "shared_empty: .*cannot be sent.*got object", lambda c: c.shared_empty(2, "O")),
        (TypeError, "cannot be sent.*got ..'a', 'O'",
         lambda c: c.shared_empty(2, [("a", "O")])),
        (ValueError, "integers of 64 bits, got color 9223372036854775808 and key 0",
         lambda c: c.split(1 << 63)),
        (ValueError, "color is negative", lambda c: c.split(-1)),
        (ValueError, "not contiguous", lambda c: c.plan_allreduce(np.zeros((4, 4))[:, 1])),
        (ValueError, "read-only", lambda c: c.plan_allreduce(np.broadcast_to(1.0, 3))),
        (TypeError, "mean of integers", lambda c: c.plan_allreduce(N)),
        (ValueError, r"dimension is negative, got \(-1,\)", lambda c: c.shared_empty(-1, float)),
        (ValueError, "index for every", lambda c: c.sparse_allreduce([1, 2], np.ones((1, 2)))),
        (ValueError, "out of range", lambda c: c.sparse_allreduce([-1], np.ones((1, 2)))),
        (ValueError, "out of range", lambda c: c.sparse_allreduce([7], np.ones(1), num_rows=7)),
        (ValueError, "out of range", lambda c: c.sparse_allreduce(HUGE, np.ones(1))),
        (TypeError, "not integers", lambda c: c.sparse_allreduce([0.5], np.ones(1))),
        (TypeError, "SUM or MEAN", lambda c: c.sparse_allreduce([0], np.ones(1), op=cc.MAX)),
        (ValueError, "unknown algorithm, expected one of auto rows dense, got 'ring'",
         lambda c: c.sparse_allreduce([0], np.ones(1), algorithm="ring")),
        (ValueError, "'dense' needs num_rows",
         lambda c: c.sparse_allreduce([0], np.ones(1), algorithm="dense")),
        (ValueError, "each at most once", lambda c: c.group([0, 0])),
        (ValueError, "counts do not fit", lambda c: c.alltoall(np.zeros(3), counts=[1] * 9)),
        (TypeError, "only integers and bool", lambda c: c.allreduce(X, op=cc.BITWISE_AND)),
        (TypeError, "BITWISE_OR of bfloat16",
         lambda c: c.allreduce(X.astype(oracle.BFLOAT16), op=cc.BITWISE_OR)),
        (TypeError, "only integers need it", lambda c: c.reduce(X, op=cc.INTEGER_MEAN)),
        (TypeError, "SUM of int64 cannot be scaled",
         lambda c: c.allreduce(N, op=cc.SUM, prescale=2)),
        (TypeError, "LOGICAL_OR of float64 cannot be scaled",
         lambda c: c.allreduce(X, op=cc.LOGICAL_OR, postscale=2)),
        (TypeError, "prescale is not a real number, got 'a'",
         lambda c: c.allreduce(X, prescale="a")),
        (TypeError, "postscale is not a real number",
         lambda c: c.reduce_scatter(X, postscale=np.ones(3))),
        (ValueError, "postscale is not finite, got nan",
         lambda c: c.grouped_allreduce([X], postscale=float("nan"))),
        (TypeError, "LOGICAL_OR is not supported, only by",
         lambda c: c.plan_buckets([((3,), "float32")], op=cc.LOGICAL_OR)),
        (TypeError, "MINLOC is not supported, only by",
         lambda c: c.grouped_allreduce([X], op=cc.MINLOC)),
        (TypeError, r"expected x = \(values, indices\), got ndarray",
         lambda c: c.allreduce(X, op=cc.MINLOC)),
        ((TypeError, cc.MismatchError), "expected out = ",
         lambda c: c.reduce((X, N), out=None if c.rank else X, op=cc.MINLOC)),
        (TypeError, "not integers, got float64", lambda c: c.allreduce((X, X), op=cc.MAXLOC)),
        (ValueError, "different shapes",
         lambda c: c.reduce_scatter((X, N[:2]), op=cc.MAXLOC)),
        (TypeError, "MINLOC has no scales",
         lambda c: c.allreduce((X, N), op=cc.MINLOC, prescale=2)),
        (TypeError, "complex numbers have no order",
         lambda c: c.allreduce((X + 1j, N), op=cc.MINLOC)),
        (ValueError, "not contiguous", lambda c: c.plan_broadcast(np.ones((4, 2)).T)),
        (ValueError, "read-only", lambda c: c.plan_allgather(FIXED)),
        (TypeError, "must be a tensor", lambda c: c.plan_reduce_scatter([1.0, 2.0])),
        (ValueError, "no such root", lambda c: c.plan_broadcast(np.ones(2), c.size)),
        (ValueError, "a scalar has no rows", lambda c: c.plan_reduce_scatter(np.ones(()))),
        (ValueError, "counts do not fit",
         lambda c: c.plan_reduce_scatter(np.ones(3), counts=[1] * (c.size + 3))),
        ((ValueError, cc.MismatchError), "out has the wrong shape",
         lambda c: c.plan_allgather(np.ones(3), out=np.ones(3 * c.size + (c.rank == 0)))),
        (ValueError, "out is not contiguous",
         lambda c: c.plan_allgather(np.ones(3), out=np.ones(6 * c.size)[::2])),
        (TypeError, "only integers need it",
         lambda c: c.plan_reduce_scatter(np.ones(3), op=cc.INTEGER_MEAN)),
        (TypeError, "SUM of int64 cannot be scaled",
         lambda c: c.plan_allreduce(np.ones(3, int), op=cc.SUM, prescale=2)),
        (TypeError, "MINLOC has no scales",
         lambda c: c.plan_allreduce((np.ones(3), np.ones(3, int)), op=cc.MINLOC, prescale=2)),
        (ValueError, "plan_allgather: unknown algorithm, expected one of auto node ring",
         lambda c: c.plan_allgather(np.ones(3), algorithm="rings")),
    ],
)  # fmt: skip
def test_wrong_use_on_all_ranks_says_what_was_expected(comm, kind, words, call):
    with pytest.raises(kind, match=words):
        call(comm)
    assert comm.allreduce(1, op=cc.SUM) == comm.size


@pytest.mark.parametrize("count", [3, 5000])
def test_a_broadcast_of_none_on_the_other_ranks_says_what_to_pass(comm, count):
    x = np.arange(float(count)) if comm.rank == 0 else None
    for call in (comm.broadcast, lambda x: comm.broadcast_async(x).wait()):
        error = raised(lambda call=call: call(x))
        if comm.size == 1:
            assert error is None
            continue
        assert isinstance(error, cc.MismatchError if comm.rank == 0 else TypeError)
        for words in ("x is None", "np.empty(shape, dtype)", "use broadcast_object"):
            assert words in str(error)
    same = np.empty(count) if comm.rank else x
    np.testing.assert_array_equal(comm.broadcast(same), np.arange(float(count)))


def test_a_rank_that_does_not_come_is_named_and_ends_the_communicator(comm):
    pair = comm.split(0 if comm.rank < 2 else None)
    if comm.rank == 0 and comm.size > 1:
        words = r"barrier: no answer within 0\.2 s, still waiting for rank 1 .*to (send|enter)"
        with pytest.raises(cc.CollectiveTimeout, match=words):
            pair.barrier(timeout=0.2)
        with pytest.raises(cc.CollectiveError, match="since barrier failed: CollectiveTimeout"):
            pair.barrier()
    comm.barrier()


def test_a_long_wait_is_reported_in_the_log(comm, caplog):
    pair = comm.split(0 if comm.rank < 2 else None)
    if comm.rank == 0 and comm.size > 1:
        group_of(pair).settings = Settings(stall_warning=0.1)
        with pytest.raises(cc.CollectiveTimeout):
            pair.barrier(timeout=0.3)
        warnings = [r.getMessage() for r in caplog.records if "has waited" in r.getMessage()]
        assert len(warnings) == 1
        assert re.match(r"\[0/2\] barrier has waited \d+ s for rank 1 .*to ", warnings[0])
    comm.barrier()


@pytest.mark.several
def test_out_of_a_broadcast_is_not_touched_where_ranks_disagree(comm):
    for count in (3, 5000):
        out = np.full(count, 7.0)
        with pytest.raises(cc.MismatchError, match="root"):
            comm.broadcast(np.zeros(count), odd(comm, 0, 1), out=out)
        np.testing.assert_array_equal(out, 7.0)
        x = np.full(count, float(comm.rank))
        x.flags.writeable = False
        assert comm.broadcast(x, 1, out=out) is out
        np.testing.assert_array_equal(out, 1.0)


@pytest.mark.parametrize("count", [3, 100_000])
def test_what_numpy_is_told_to_raise_stays_a_result(comm, count):
    # Else the one rank that meets it would leave the others waiting.
    tiny = np.full(count, 1e-40 if comm.rank == 0 else 1.0, np.float32)
    odd_one = np.full(count, complex(np.inf, np.nan) if comm.rank == 0 else 1j)
    large = np.full(count, 60_000, np.float16)
    rows = np.full((count, 1), 60_000, np.float16)
    with np.errstate(all="raise"):
        comm.allreduce(tiny)
        comm.allreduce(odd_one)
        reduced = comm.reduce(large, op=cc.SUM)
        comm.reduce_scatter(large, op=cc.SUM)
        _, added = comm.sparse_allreduce(np.zeros(count, int), rows, op=cc.SUM)
    if comm.rank == 0:
        assert np.isinf(reduced).all() == (comm.size > 1)
    assert np.isinf(added).all()
