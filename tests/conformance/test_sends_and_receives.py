"""Tags, any source, requests and objects between two ranks, from one thread or several."""

import math
import threading

import numpy as np
import pytest
from calls import LIMIT, together

import collectives as cc
from requirements import installed

# Inside a head; longer than what MPI sends unasked.
COUNTS = (3, 200_000)


def neighbours(comm):
    return (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size


def others(comm):
    return [rank for rank in range(comm.size) if rank != comm.rank]


@pytest.mark.several
def test_arrays_are_received_by_tag_in_another_order_than_sent(comm):
    left, right = neighbours(comm)
    for count in COUNTS:
        for tag in (4, 0, 9, 4):
            comm.send(np.full(count, 100 * comm.rank + tag), right, tag=tag)
        comm.send(np.full(count, -1), right, tag=4)
        for tag in (9, 4, 4):
            np.testing.assert_array_equal(comm.recv(left, tag=tag), 100 * left + tag)
        np.testing.assert_array_equal(comm.recv(left), 100 * left)
        np.testing.assert_array_equal(comm.recv(left, tag=4), -1)


@pytest.mark.several
def test_any_source_and_any_tag_take_what_has_come_and_say_from_whom(comm):
    for count in COUNTS:
        if comm.rank > 0:
            comm.send(np.full(count, comm.rank), 0, tag=10 + comm.rank)
            comm.send(np.full(count, -comm.rank), 0)
        else:
            seen = set()
            for _ in others(comm):
                request = comm.irecv(tag=None)
                x = request.wait(LIMIT)
                source, tag, shape, dtype = request.envelope
                assert (shape, dtype) == ((count,), np.int64)
                if tag == 0:  # each rank's second
                    assert source in seen
                else:
                    assert tag == 10 + source
                    seen.add(source)
                np.testing.assert_array_equal(x, source if tag else -source)
            for _ in others(comm):
                comm.recv(tag=None)
        comm.barrier()


def test_both_sides_send_first_and_many_receives_are_open(comm):
    for count in COUNTS:
        wanted = [
            (source, tag, comm.irecv(source, tag=tag))
            for source in others(comm)
            for tag in (1, 0, 1)
        ]
        sent = [
            comm.isend(np.full(count, 10 * comm.rank + n), dest, tag=tag)
            for dest in others(comm)
            for n, tag in enumerate((0, 1, 1))
        ]
        first = set()
        for source, tag, request in reversed(wanted):
            x = request.wait(LIMIT)
            n = 0 if tag == 0 else 2 if (source, tag) not in first else 1
            first.add((source, tag))
            np.testing.assert_array_equal(x, 10 * source + n)
            assert request.done()
            assert request.envelope[:2] == (source, tag)
        for request in sent:
            assert request.wait(LIMIT) is None


@pytest.mark.several
def test_receives_go_into_out_of_any_strides(comm):
    left, right = neighbours(comm)
    for count in COUNTS:
        whole = np.zeros((count, 2))
        requests = [comm.irecv(left, out=whole[:, 1]), comm.irecv(left, out=np.empty(count))]
        x = np.arange(2.0 * count)[::2] + comm.rank
        sent = [comm.isend(x, right), comm.isend(x + 1, right)]
        got = [request.wait(LIMIT) for request in requests]
        assert np.shares_memory(got[0], whole)
        np.testing.assert_array_equal(whole[:, 1], np.arange(2.0 * count)[::2] + left)
        np.testing.assert_array_equal(got[1], whole[:, 1] + 1)
        assert not whole[:, 0].any()
        for request in sent:
            request.wait(LIMIT)


@pytest.mark.several
def test_an_out_that_does_not_fit_fails_this_request_only(comm):
    left, right = neighbours(comm)
    for count in COUNTS:
        wrong = comm.irecv(left, out=np.empty(count + 1))
        narrow = comm.irecv(left, out=np.empty(count, np.float32))
        right_one = comm.irecv(left)
        for _ in range(3):
            comm.send(np.ones(count), right)
        assert right_one.wait(LIMIT).shape == (count,)
        with pytest.raises(ValueError, match="irecv: out has the wrong shape"):
            wrong.wait(LIMIT)
        with pytest.raises(TypeError, match="irecv: out has the wrong dtype"):
            narrow.wait(LIMIT)
        assert isinstance(wrong.exception(), ValueError)
        assert right_one.exception() is None
    assert comm.allreduce(1.0) == 1


@pytest.mark.several
def test_sendrecv_around_the_ring_also_in_place(comm):
    left, right = neighbours(comm)
    for count in COUNTS:
        x = np.full(count, float(comm.rank))
        for step in range(comm.size):
            np.testing.assert_array_equal(x, (comm.rank - step) % comm.size)
            assert comm.sendrecv(x, right, left, tag=step, out=x) is x
        np.testing.assert_array_equal(comm.sendrecv([comm.rank], right, left), [left])


@pytest.mark.several
def test_probe_tells_what_recv_would_return_and_leaves_it(comm):
    left, right = neighbours(comm)
    with pytest.raises(cc.CollectiveTimeout, match=r"probe: no answer within 0\.01 s"):
        comm.probe(left, tag=3, timeout=0.01)
    comm.barrier()
    for count in COUNTS:
        comm.send(np.zeros((count, 2), np.float32), right, tag=3)
        for _ in range(2):
            found = comm.probe(left, tag=3)
            assert found == (left, 3, (count, 2), np.float32)
        assert comm.recv(found.source, tag=found.tag).shape == found.shape
    assert comm.allreduce(1.0) == 1


@pytest.mark.several
def test_objects_travel_beside_arrays(comm):
    left, right = neighbours(comm)
    large = {"rows": list(range(5000)), "of": comm.rank}
    comm.send_object(("seed", comm.rank), right)
    comm.send(np.ones(3), right)
    comm.send_object(large, right, tag=2)
    assert comm.recv_object(left, tag=2) == {**large, "of": left}
    assert comm.recv_object(left) == ("seed", left)
    assert comm.recv(left).tolist() == [1, 1, 1]
    for count in COUNTS:
        comm.send(np.ones(count), right)
        comm.send_object(list(range(count)), right)
        comm.send(comm.rank, right)
        with pytest.raises(TypeError, match=f"rank {left} sent an array, expected an object"):
            comm.recv_object(left)
        with pytest.raises(TypeError, match=f"rank {left} sent an object, expected an array"):
            comm.recv(left)
        assert comm.recv(left) == left


@pytest.mark.several
def test_callbacks_come_without_a_wait(comm):
    left, right = neighbours(comm)
    for count in COUNTS:
        told, heard = [], threading.Event()

        def note(request, told=told, heard=heard):
            told.append((request.envelope.source, request.wait(0)[0]))
            heard.set()

        request = comm.irecv(left)
        request.add_done_callback(note)
        sent = comm.isend(np.full(count, comm.rank), right)
        assert heard.wait(LIMIT)
        assert told == [(left, left)]
        sent.wait(LIMIT)
        request.add_done_callback(note)
        assert len(told) == 2


def test_a_callback_may_close_the_communicator(comm):
    part, closed, told = comm.split(0), threading.Event(), []

    def close(request):
        told.append(request.wait(0).tolist())
        part.close()
        closed.set()

    if comm.rank > 0:
        part.irecv(0).add_done_callback(close)
    comm.barrier()
    if comm.rank == 0:
        for dest in range(1, comm.size):
            part.send(np.full(3, dest), dest)
        part.close()
    else:
        assert closed.wait(LIMIT)
        assert told == [[comm.rank] * 3]
    with pytest.raises(cc.CollectiveError, match="not usable any more, since it was closed"):
        part.barrier()
    part.close()
    comm.barrier()


@pytest.mark.several
def test_several_threads_send_and_receive_at_once(comm):
    left, right = neighbours(comm)

    def work(tag):
        for n in range(8):
            count = COUNTS[n % 2] // (1 + n)
            x = np.full(count, 100.0 * tag + n + comm.rank)
            request = comm.irecv(left, tag=tag)
            comm.send(x, right, tag=tag)
            np.testing.assert_array_equal(request.wait(LIMIT), x - comm.rank + left)
            assert comm.sendrecv(n, right, left, tag=tag) == n

    together(work, range(3))
    comm.barrier()


def test_a_request_whose_time_is_over_fails_by_itself_and_ends_the_others(comm):
    part = comm.split(0)
    if comm.rank == 0 and comm.size > 1:
        heard = threading.Event()
        longer = part.irecv(1, timeout=math.inf)
        with pytest.raises(cc.CollectiveTimeout, match=r"wait: irecv at .* within 0\.01 s"):
            longer.wait(0.01)
        request = part.irecv(1, tag=5, timeout=0.1)
        longer.add_done_callback(lambda _: heard.set())
        assert heard.wait(LIMIT)
        told = r"irecv: no answer within 0\.1 s, still waiting for rank 1 to send an array with"
        with pytest.raises(cc.CollectiveTimeout, match=rf"{told} tag 5 \(rank 0 of"):
            request.wait()
        with pytest.raises(cc.CollectiveError, match="not usable any more, since irecv failed"):
            longer.wait()
        with pytest.raises(cc.CollectiveError, match="not usable any more, since irecv failed"):
            part.send(1, 1)
    comm.barrier()
    part.close()


def test_what_is_open_when_the_communicator_is_closed_fails_and_is_named(world, caplog):
    def check(comm):
        part = comm.split(0)
        request = part.irecv() if comm.size > 1 else None
        part.close()
        if request is not None:
            with pytest.raises(cc.CollectiveError, match="closed before it was done"):
                request.wait(LIMIT)
        comm.barrier()

    world.run(check)
    named = [record for record in caplog.records if "1 request not done" in record.message]
    assert bool(named) == (world.size > 1)


def test_wrong_arguments_are_named_and_do_no_harm(comm):
    if comm.size == 1:
        with pytest.raises(ValueError, match="recv: there is no other rank"):
            comm.recv()
        return
    left, right = neighbours(comm)
    for tag in (-1, 1 << 63):
        with pytest.raises(ValueError, match=rf"send: tag must be an integer.*got {tag}"):
            comm.send(1, right, tag=tag)
        with pytest.raises(ValueError, match="irecv: tag must be an integer"):
            comm.irecv(left, tag=tag)
    with pytest.raises(TypeError):
        comm.send(1, right, tag="a")
    with pytest.raises(TypeError):
        comm.send(1, None)
    with pytest.raises(ValueError, match="sendrecv: source is not another rank"):
        comm.sendrecv(1, right, comm.size)
    with pytest.raises(ValueError, match="isend: dest is not another rank"):
        comm.isend(1, comm.rank)
    with pytest.raises(TypeError, match="isend: this dtype cannot be sent"):
        comm.isend(["text"], right)
    assert comm.sendrecv(comm.rank, right, left, tag=(1 << 63) - 1) == left


def test_requests_of_groups_and_of_all_ranks_do_not_meet(comm):
    part = comm.split(0, -comm.rank)
    if comm.size > 1:
        left, right = neighbours(comm)
        back, forth = neighbours(part)
        requests = [comm.irecv(left), part.irecv(back)]
        part.isend([100 + part.rank], forth).wait(LIMIT)
        comm.isend([comm.rank], right).wait(LIMIT)
        assert requests[0].wait(LIMIT).tolist() == [left]
        assert requests[1].wait(LIMIT).tolist() == [100 + back]
    part.close()


@pytest.mark.several
def test_tensors_are_received_where_they_are(comm):
    torch = installed("torch")
    left, right = neighbours(comm)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.zeros(5000, dtype=dtype)
        request = comm.irecv(left, out=out)
        x = torch.full((5000,), float(comm.rank), dtype=dtype)
        sent = comm.isend(x, right)
        assert request.wait(LIMIT) is out
        assert bool((out == left).all())
        sent.wait(LIMIT)
