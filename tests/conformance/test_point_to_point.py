"""Arrays from one rank to another: every kind, every size, in order, and never waiting for ever."""

import time

import numpy as np
import pytest

import collectives as cc
import oracle
from collectives.p2p import endpoint
from collectives.tools.info import library_name
from conftest import UNDER_MPI
from requirements import installed

# None, one, the longest inside a head, the first that is not, larger than what MPI sends unasked.
SHAPES = [(0,), (), (1,), (3, 0, 2), (2, 3, 4), (512,), (171, 3), (1_000_003,)]


def neighbours(comm):
    return (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size


def around(comm, x, **options):
    """Send to the right, receive from the left; alone, there is nobody."""
    left, right = neighbours(comm)
    if comm.size == 1:
        return x
    comm.send(x, right)
    return comm.recv(left, **options)


def test_all_dtypes_and_shapes_arrive_as_they_were_sent(comm):
    left, _ = neighbours(comm)
    for dtype in oracle.DTYPES:
        for shape in SHAPES if dtype == np.float64 else SHAPES[:6]:
            got = around(comm, oracle.data(comm.rank, shape, dtype))
            expected = oracle.data(left, shape, dtype)
            assert (got.dtype, got.shape) == (expected.dtype, shape)
            assert got.tobytes() == expected.tobytes()
            assert got.flags.writeable


def test_arrays_of_any_strides_numbers_and_lists_can_be_sent(comm):
    left, _ = neighbours(comm)
    whole = oracle.data(comm.rank, (40, 60), np.dtype(np.float32))
    others = oracle.data(left, (40, 60), np.dtype(np.float32))
    for view in (lambda x: x.T, lambda x: x[::-2, 5:], lambda x: x[:, 1]):
        np.testing.assert_array_equal(around(comm, view(whole)), view(others))
    assert np.array(around(comm, float(comm.rank))) == left
    np.testing.assert_array_equal(around(comm, [comm.rank, 2]), [left, 2])


@pytest.mark.several
def test_the_sender_may_change_its_array_at_once(comm):
    left, right = neighbours(comm)
    for count in (5, 300_000):
        x = np.full(count, comm.rank, np.float64)
        for _ in range(6):  # more than there are buffers to use again
            comm.send(x, right)
            x += 10
        for number in range(6):
            np.testing.assert_array_equal(comm.recv(left), left + 10 * number)


@pytest.mark.several
def test_out_takes_what_was_sent(comm):
    left, right = neighbours(comm)
    for count in (4, 50_000):
        whole = np.zeros((count, 3))
        for out in (np.empty(count), whole[:, 1]):
            comm.send(np.full(count, comm.rank + 1.0), right)
            assert comm.recv(left, out=out) is out
            np.testing.assert_array_equal(out, left + 1)
        np.testing.assert_array_equal(whole[:, ::2], 0)


@pytest.mark.several
def test_an_out_that_does_not_fit_loses_this_array_only(comm):
    left, right = neighbours(comm)
    for count in (4, 50_000):
        for number in range(3):
            comm.send(np.full(count, number, np.float32), right)
        with pytest.raises(ValueError, match=rf"recv: out has the wrong shape.*\({count},\)"):
            comm.recv(left, out=np.empty(count + 1, np.float32))
        with pytest.raises(TypeError, match="recv: out has the wrong dtype, expected float32"):
            comm.recv(left, out=np.empty(count))
        np.testing.assert_array_equal(comm.recv(left), 2)


def test_everybody_sends_much_to_everybody_before_anybody_receives(comm):
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for number in range(3):
        for dest in others:
            comm.send(np.full(400_000, 100 * comm.rank + number), dest)
    for source in reversed(others):
        for number in range(3):
            np.testing.assert_array_equal(comm.recv(source), 100 * source + number)


def test_operations_of_all_ranks_may_come_between(comm):
    left, right = neighbours(comm)
    for count in (3, 200_000):
        if comm.size > 1:
            comm.send(np.full(count, comm.rank), right)
        request = comm.allreduce_async(np.ones(count), op=cc.SUM)
        total = comm.allreduce(np.full(count, 1.0), op=cc.SUM)
        np.testing.assert_array_equal(total, comm.size)
        np.testing.assert_array_equal(request.wait(20), comm.size)
        if comm.size > 1:
            np.testing.assert_array_equal(comm.recv(left), left)
        # Only some ranks: the numbers of the calls stay in step.
        if comm.size > 1 and comm.rank == 0:
            comm.send(np.zeros(1), 1)
        elif comm.rank == 1:
            comm.recv(0)
        comm.barrier()


def test_closing_waits_for_who_has_not_received_yet(comm):
    part = comm.split(0)
    if comm.rank == 0:
        for dest in range(1, comm.size):
            part.send(np.arange(500_000), dest)
    else:
        np.testing.assert_array_equal(part.recv(0), np.arange(500_000))
    part.close()
    part.close()


def test_groups_number_their_own_ranks(comm):
    backwards = comm.split(0, -comm.rank)
    if comm.size > 1:
        assert backwards.rank == comm.size - 1 - comm.rank
        left, right = neighbours(backwards)
        backwards.send([backwards.rank], right)
        comm.send([100 + comm.rank], (comm.rank + 1) % comm.size)
        assert backwards.recv(left).tolist() == [left]
        assert comm.recv((comm.rank - 1) % comm.size) == 100 + (comm.rank - 1) % comm.size
    backwards.close()


def test_wrong_arguments_are_named_and_do_no_harm(comm):
    for wrong in (-1, comm.size, comm.rank):
        expected = f"expected one of 0 .. {comm.size - 1} but {comm.rank}, got {wrong}"
        with pytest.raises(ValueError, match=rf"send: dest is not another rank, {expected}"):
            comm.send(1.0, wrong)
        with pytest.raises(ValueError, match=rf"recv: source is not another rank, {expected}"):
            comm.recv(wrong)
    with pytest.raises(TypeError):
        comm.send(1.0, "0")
    if comm.size > 1:
        left, right = neighbours(comm)
        with pytest.raises(TypeError, match="send: this dtype cannot be sent"):
            comm.send(["text"], right)
        many = np.zeros(1, [(f"field {i}", "f4") for i in range(200)])
        with pytest.raises(TypeError, match="send: .*too long, expected at most 3072 bytes"):
            comm.send(many, right)
        some = np.ones(1, [(f"field {i}", "f4") for i in range(30)])
        comm.send(some, right)
        assert comm.recv(left) == some
        comm.send(np.repeat(some, 30), right)  # longer than a head
        assert (comm.recv(left) == some).all()
        for timeout in (0, -1, float("nan")):
            with pytest.raises(ValueError, match="recv: timeout must be seconds > 0"):
                comm.recv(left, timeout=timeout)
        comm.send(comm.rank, right)
        assert comm.recv(left) == left
    assert comm.allreduce(1.0) == 1


def test_nothing_sent_is_a_timeout_that_names_the_source(comm):
    part = comm.split(0)
    if comm.rank == 0 and comm.size > 1:
        told = r"recv: no answer within 0\.1 s, still waiting for rank 1 to send an array"
        with pytest.raises(cc.CollectiveTimeout, match=rf"{told} \(rank 0 of {comm.size}\)"):
            part.recv(1, timeout=0.1)
        with pytest.raises(cc.CollectiveError, match="not usable any more, since recv failed"):
            part.send(1, 1)
    comm.barrier()
    part.close()


def test_an_array_that_nobody_receives_is_found_out_by_the_next_call(comm, world):
    if takes_what_nobody_receives(world):
        return
    part = comm.split(0)
    comm.barrier()
    if comm.rank == 0 and comm.size > 1:
        part.send(np.zeros(2_000_000), 1, timeout=0.05)
        time.sleep(0.06)  # not for others: the time is over by now
        told = r"send: no answer within 0\.05 s, still waiting for rank 1 to receive"
        with pytest.raises(cc.CollectiveTimeout, match=told):
            part.recv(1)
    comm.barrier()
    part.close()


def test_what_nobody_has_received_disturbs_no_later_group(comm):
    if not UNDER_MPI:  # which alone numbers them
        return
    for _ in range(20):
        with comm.split(0) as part:
            if part.rank == 0 and part.size > 1:
                part.isend(np.ones(3), 1)
        with comm.split(0) as later:  # to which MPI may give the number of the one before
            for _ in range(5):
                assert later.allreduce(1, op=cc.SUM, algorithm="ring") == comm.size


def takes_what_nobody_receives(world):
    """Whether what is sent has left the sender, as soon as the receiver waits for anything."""
    # Intel MPI keeps it for the receiver, of whatever size.
    return getattr(world, "mode", None) == "eager" or "Intel" in library_name()


def test_who_is_too_far_ahead_waits(world, monkeypatch):
    monkeypatch.setattr(endpoint, "SEND_BUFFER_BYTES", 1 << 20)
    eager = takes_what_nobody_receives(world)

    def far_ahead(part):
        for _ in range(10):
            part.send(np.zeros(100_000), 1, timeout=0.1)

    def check(comm):
        part = comm.split(0)
        if comm.size > 1 and comm.rank == 0:
            for number in range(10):
                part.send(np.full(100_000, number), 1)
            last = comm.recv(1)
            assert last == 9
            if not eager:
                with pytest.raises(cc.CollectiveTimeout, match="no answer within 0.1 s.*rank 1 to"):
                    far_ahead(part)
        elif comm.rank == 1:
            for number in range(10):
                np.testing.assert_array_equal(part.recv(0), number)
            comm.send(9, 0)
        comm.barrier()
        part.close()

    world.run(check)


@pytest.mark.several
@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_arrays_of_other_libraries(comm, kind):
    library = installed(kind)
    left, right = neighbours(comm)
    make = library.tensor if kind == "torch" else library.numpy.array
    for count in (3, 5000):
        comm.send(make([float(comm.rank)] * count), right)
        np.testing.assert_array_equal(comm.recv(left), np.full(count, left, np.float32))
    if kind == "torch":
        comm.send(make([float(comm.rank)] * 3), right)
        out = library.zeros(3)
        assert comm.recv(left, out=out) is out
        assert out.tolist() == [left] * 3
