"""Calls that are like earlier ones: the short way gives what the long way gives, and meets it."""

import gc
import sys
import time
import weakref

import numpy as np
import pytest

import collectives as cc
import oracle
from collectives import extend
from collectives.communicator import group_of

OPS = [cc.SUM, cc.MEAN, cc.MIN, cc.MAX, cc.PRODUCT]

# One shot, and several rounds of pieces; bfloat16 and read-only arrays have another address book.
SHAPES = [(), (0,), (3,), (4, 5), (70_001,), (300_007,)]


def known(comm):
    """How many calls the communicator remembers."""
    return len(group_of(comm).plans)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.value)
def test_a_reduction_gives_the_same_every_time_wherever_its_result_goes(comm, op):
    for dtype in oracle.DTYPES:
        if not oracle.is_defined(op, dtype):
            continue
        for shape in SHAPES if dtype == np.float32 else [(3,), (1031,)]:
            arrays = [oracle.data(rank, shape, dtype) for rank in range(comm.size)]
            x = arrays[comm.rank]
            first = comm.allreduce(x, op=op)
            oracle.assert_close(first, arrays, op)
            fixed = x.copy()
            fixed.flags.writeable = False
            out, own = np.empty_like(x), x.copy()
            for result in (
                comm.allreduce(x, op=op),
                comm.allreduce(fixed, op=op),
                comm.allreduce(x, op=op, out=out),
                comm.allreduce(own, op=op, out=own),
            ):
                assert result.dtype == dtype
                assert result.tobytes() == first.tobytes()
            reduced = [comm.reduce(x, op=op) for _ in range(2)]
            assert comm.reduce(x, op=op, out=out) is (out if comm.rank == 0 else None)
            if comm.rank == 0:
                oracle.assert_close(out, arrays, op)
                assert {result.tobytes() for result in reduced} == {out.tobytes()}
            else:
                assert reduced == [None, None]
            assert x.tobytes() == arrays[comm.rank].tobytes()


def test_a_broadcast_gives_the_roots_bits_every_time(comm):
    for shape in SHAPES:
        for root in range(comm.size):
            for step in range(3):
                arrays = [oracle.data(r + step, shape, oracle.BFLOAT16) for r in range(9)]
                x, out = arrays[comm.rank], np.empty(shape, oracle.BFLOAT16)
                assert comm.broadcast(x, root, out=out) is out
                new = comm.broadcast(x, root)
                assert not np.shares_memory(new, x)
                own = x.copy()
                assert comm.broadcast(own, root, out=own) is own
                assert {a.tobytes() for a in (out, new, own)} == {arrays[root].tobytes()}


def test_ranks_on_the_short_way_meet_ranks_on_the_long_way(comm):
    x = np.full(1000, comm.rank + 1.0)
    strided = np.full((1000, 2), comm.rank + 1.0)[:, 0]
    total = comm.size * (comm.size + 1) / 2
    for step in range(9):
        y = strided if step % 3 == comm.rank % 3 else x
        np.testing.assert_array_equal(comm.allreduce(y, op=cc.SUM), total)
        out = np.empty((1000, 2))[:, 0] if step % 2 == comm.rank % 2 else np.empty(1000)
        np.testing.assert_array_equal(comm.allreduce(y, op=cc.SUM, out=out), total)
        np.testing.assert_array_equal(comm.broadcast(y, step % comm.size), step % comm.size + 1)
        comm.barrier(timeout=None if step % 2 == comm.rank % 2 else np.float32(20))


def test_rows_are_shared_and_joined_the_same_every_time(comm):
    x = np.arange(35, dtype=np.float32).reshape(7, 5)
    mean = np.array_split(x, comm.size)[comm.rank]
    rounded = comm.size * np.finfo(x.dtype).eps / 2  # a division and size - 1 sums
    for step in range(4):
        np.testing.assert_allclose(comm.reduce_scatter(x), mean, rtol=rounded)
        np.testing.assert_array_equal(comm.allgather(np.float32(3) + x[0, 0]), [3] * comm.size)
        # What one rank brings is like the last time, and what another one brings is not.
        rows = [r if r % 2 else (r + step) % 3 for r in range(comm.size)]
        own = np.full((rows[comm.rank], 2), comm.rank, np.float32)
        joined = comm.allgather(own)
        assert joined.shape == (sum(rows), 2)
        np.testing.assert_array_equal(joined[:, 0], np.repeat(range(comm.size), rows))
        large = comm.allgather(np.full(100_000 + comm.rank, comm.rank))
        lengths = [100_000 + r for r in range(comm.size)]
        np.testing.assert_array_equal(large, np.repeat(range(comm.size), lengths))
    with pytest.raises(ValueError, match="a scalar has no rows"):
        comm.reduce_scatter(np.float32(1))


def test_a_result_that_covers_a_part_of_its_source_is_right(comm):
    for count in (100, 300_000):
        for shift in (1, -1):
            for _ in range(3):
                memory = np.arange(count + 1.0) + comm.rank
                x, out = (memory[:-1], memory[1:]) if shift == 1 else (memory[1:], memory[:-1])
                expected = comm.size * x + (comm.size * (comm.size - 1) / 2) - comm.size * comm.rank
                comm.allreduce(x, op=cc.SUM, out=out)
                np.testing.assert_array_equal(out, expected)


@pytest.mark.several
def test_ranks_that_disagree_about_a_known_call_all_say_so_and_go_on(comm):
    x, large = np.ones(4, np.float32), np.ones(300_000, np.float32)
    calls = [
        lambda: comm.broadcast(large, 0, out=large),
        lambda: comm.allgather(large),
        lambda: comm.gather(large),
        lambda: comm.allreduce(x, op=cc.SUM),
        lambda: comm.allreduce(x, op=cc.MAX),
        lambda: comm.allreduce(x[:2], op=cc.SUM),
        lambda: comm.reduce(x, 0, op=cc.SUM),
        lambda: comm.broadcast(x, 0),
        lambda: comm.broadcast(x, 1),
        lambda: comm.gather(x),
        lambda: comm.allgather(x),
        lambda: comm.reduce_scatter(x),
        comm.barrier,
    ]
    for call in calls:
        call()
        call()
    for usual, odd in zip(calls, calls[1:], strict=False):
        with pytest.raises(cc.MismatchError, match="calls differ between ranks"):
            odd() if comm.rank == 1 else usual()
        assert comm.allreduce(x, op=cc.SUM)[0] == comm.size
    with pytest.raises(TypeError if comm.rank == 1 else cc.MismatchError):
        comm.allreduce(x, op=[] if comm.rank == 1 else cc.SUM)
    with pytest.raises(ValueError if comm.rank == 1 else cc.MismatchError):
        comm.barrier(timeout=-1 if comm.rank == 1 else None)
    with pytest.raises(ValueError if comm.rank == 1 else cc.MismatchError):
        comm.barrier(timeout="soon" if comm.rank == 1 else None)
    assert comm.allreduce(x, op=cc.SUM)[0] == comm.size


def test_a_shared_array_is_changed_only_where_it_is_the_result(comm):
    shared, private = comm.shared_empty(1000, np.float32), np.empty(1000, np.float32)
    shared[:] = 1
    for _ in range(3):
        np.testing.assert_array_equal(comm.allreduce(shared, op=cc.SUM), comm.size)
        comm.allreduce(shared, op=cc.SUM, out=private)
        np.testing.assert_array_equal(private, comm.size)
        np.testing.assert_array_equal(shared, 1)
    for power in (1, 2, 3):
        comm.allreduce(shared, op=cc.SUM, out=shared)
        np.testing.assert_array_equal(shared, comm.size**power)
    if group_of(comm).node_engine is not None and comm.size > 1:
        before = shared.copy()
        with pytest.raises(cc.MismatchError, match="memory is"):
            comm.allreduce(shared, op=cc.SUM, out=private if comm.rank == 1 else shared)
        np.testing.assert_array_equal(shared, before)
    comm.barrier()


def test_only_so_many_calls_are_remembered(comm):
    for count in range(600):
        total = comm.allreduce(np.ones(count), op=cc.SUM)
        assert total.sum() == count * comm.size
    assert known(comm) <= 256
    assert known(comm) > 0


def test_a_known_call_leaves_a_record_of_its_own(comm):
    x = np.ones((2, 3))
    for _ in range(3):
        comm.allreduce(x, op=cc.MAX, timeout=20)
    last, before = group_of(comm).recorder.records[-1:-3:-1]
    facts = last.facts()
    assert last.number == before.number + 1
    assert (facts["operation"], facts["op"], facts["shape"]) == ("allreduce", "MAX", [2, 3])
    assert facts["dtype"] == "float64"
    assert facts["state"] == "done"
    assert facts["site"].startswith(__file__)
    assert facts["site"] == before.facts()["site"]
    assert before.began < before.ended <= last.began < last.ended <= time.monotonic()
    assert facts["seconds"] == last.ended - last.began


def test_known_calls_name_the_line_of_each_and_that_of_another_thread(comm):
    x = np.ones(3)
    for _ in range(3):
        comm.allreduce(x)
        comm.allreduce(x)
    sites = [record.site.line for record in group_of(comm).recorder.records[-6:]]
    line = sys._getframe().f_lineno - 3
    assert sites == 3 * [line, line + 1]
    here = extend.calls_from(extend.current_origin())
    line = sys._getframe().f_lineno - 1
    with here:
        comm.allreduce(x)
    assert group_of(comm).recorder.records[-1].site.line == line


def test_every_call_names_the_users_line_also_through_our_packages(world):
    package = {"__name__": "strategies.somewhere"}
    exec("def call(function, *args, **options):\n return function(*args, **options)\n", package)
    through = package["call"]

    def check(comm):
        x, y, every = np.ones(4 * comm.size), np.ones(4 * comm.size), np.ones(4 * comm.size**2)
        own, right = np.ones(4), (comm.rank + 1) % comm.size
        # Each on a line of its own.
        calls = [
            lambda: comm.allreduce(x),
            lambda: comm.allreduce(x, out=y),
            lambda: comm.allreduce(3.0),
            lambda: comm.reduce(x),
            lambda: comm.reduce_scatter(x),
            lambda: comm.reduce_scatter(x, out=own),
            lambda: comm.broadcast(x),
            lambda: comm.gather(x),
            lambda: comm.allgather(x),
            lambda: comm.allgather(x, out=every),
            lambda: comm.alltoall(x),
            lambda: comm.barrier(),
            lambda: comm.agree(True),
            lambda: comm.scan(x),
            lambda: comm.broadcast_object("text"),
            lambda: through(comm.allreduce, x),
            lambda: through(comm.allgather, x, out=every),
            lambda: through(comm.barrier),
            lambda: through(through, comm.allreduce, x),
            lambda: through(through, comm.scan, x),
        ]
        if comm.size > 1:
            left = (comm.rank - 1) % comm.size
            calls += [
                lambda: comm.sendrecv(x, right, left),
                lambda: through(comm.sendrecv, x, right, left),
            ]
        lines = [call.__code__.co_firstlineno for call in calls]
        for _ in range(3):
            for call, line in zip(calls, lines, strict=True):
                call()
                site = group_of(comm).recorder.records[-1].site
                assert (site.file, site.line) == (__file__, line)

    world.run(check)


def test_a_plan_that_is_recorded_names_the_line_that_calls_it(comm):
    x, indices = np.ones(3), np.arange(3)
    plans = [
        comm.plan_allreduce(x),
        comm.plan_allreduce((x, indices), op=cc.MINLOC),
        comm.plan_broadcast(x),
    ]
    lines = []
    for plan in 3 * plans:
        number = group_of(comm).call_number
        plan()
        if group_of(comm).call_number > number:  # else a kernel made the call alone
            lines.append(group_of(comm).recorder.records[-1].site.line)
    line = sys._getframe().f_lineno - 3
    assert lines == len(lines) * [line]
    if not group_of(comm).uses_messages and comm.size > 1:
        assert not lines
    else:
        assert len(lines) == 3 * len(plans)


def test_no_call_keeps_the_variables_of_its_caller(comm):
    def step():
        held = np.ones(3)
        for _ in range(3):
            comm.allreduce(held)
            comm.allgather(held)
            comm.scan(held)
        return weakref.ref(held)

    gc.disable()  # gone without a search for circles
    try:
        assert step()() is None
    finally:
        gc.enable()


def test_other_ranks_of_the_node_know_the_last_known_call(comm):
    group = comm.group(range(comm.size))
    x, y = np.ones(3), np.zeros(3)
    for names in (["allreduce", "reduce"] * 4, ["allreduce"] * 2):
        for name in names:
            getattr(group, name)(x, op=cc.SUM, out=y)
        line = sys._getframe().f_lineno - 1
        comm.barrier()
        if group_of(group).status is not None:
            said = {group_of(group).status.last(rank) for rank in range(group.local_size)}
            call = f"{name} #{group_of(group).call_number}"
            assert said == {f"after {call} at test_repeats.py:{line}"}
        comm.barrier()  # before the next call of any


def test_a_known_call_into_memory_that_it_reads_takes_the_long_way(comm):
    memory = np.zeros(12)
    for step in range(3):
        for begin in (0, 3, 4, 5, 8):
            memory[:] = np.arange(12) + step
            x, out = memory[4:8], memory[begin : begin + 4]
            expected = comm.size * x
            assert comm.allreduce(x, op=cc.SUM, out=out) is out
            np.testing.assert_array_equal(out, expected)


def test_a_known_call_waits_as_long_as_it_may_and_names_who_is_missing(comm):
    pair = comm.split(0 if comm.rank < 2 else None)
    if comm.size > 1 and comm.rank < 2:
        x = np.ones(3)
        for _ in range(2):
            pair.allreduce(x)
        if comm.rank == 0:
            words = r"no answer within 0\.2 s, still waiting for rank 1( .world rank 1.)? to"
            with pytest.raises(cc.CollectiveTimeout, match=words):
                pair.allreduce(x, timeout=0.2)
            with pytest.raises(cc.CollectiveError, match="since allreduce failed"):
                pair.allreduce(x)
    comm.barrier()
