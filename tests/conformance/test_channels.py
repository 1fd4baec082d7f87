"""Channels between ranks: everything arrives whole, once, in order, whoever sends."""

import threading

import numpy as np

from collectives import extend
from tapped import flush, receive

LIMIT = 20.0


def finish(comm, chan):
    flush(chan)
    comm.barrier()
    chan.close(all_together=True)


def content(source, dest, number):
    """Frames of many lengths, some longer than an eager message."""
    random = np.random.default_rng([source, dest, number])
    lengths = [0, 1, 1000, 40_000, 300_000][: 1 + number % 5]
    return [f"{source} {number}".encode(), *(random.integers(0, 256, n, np.uint8) for n in lengths)]


def test_all_messages_of_all_ranks_arrive_in_order(comm):
    count = 20
    chan = extend.open_channel(comm)
    others = [rank for rank in range(comm.size) if rank != comm.rank]

    def send():
        for number in range(count):
            for dest in others:
                chan.send(dest, content(comm.rank, dest, number))

    thread = threading.Thread(target=send)
    thread.start()
    expected = dict.fromkeys(others, 0)
    for _ in range(count * len(others)):
        source, frames = receive(chan)
        wanted = content(source, comm.rank, expected[source])
        expected[source] += 1
        assert frames[0].tobytes() == wanted[0]
        assert len(frames) == len(wanted)
        for got, sent in zip(frames[1:], wanted[1:], strict=True):
            np.testing.assert_array_equal(got, sent)
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert chan.poll() is None
    assert chan.dead == frozenset()
    finish(comm, chan)


def test_arrays_of_any_dtype_and_shape_travel_as_their_bytes(comm):
    chan = extend.open_channel(comm)
    arrays = [np.arange(6.0).reshape(2, 3), np.zeros((0, 4)), np.arange(50_000)]
    if comm.rank == 0:
        for dest in range(1, comm.size):
            chan.send(dest, arrays)
    else:
        frames = receive(chan).frames
        for got, sent in zip(frames, arrays, strict=True):
            np.testing.assert_array_equal(got.view(sent.dtype).reshape(sent.shape), sent)
            got[...] = 0  # writable, and ours
    finish(comm, chan)


def test_channels_do_not_mix_with_each_other_or_with_operations(comm):
    first, second = extend.open_channel(comm), extend.open_channel(comm)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size > 1:
        second.send(right, [b"second"])
        first.send(right, [b"first"])
    assert comm.allreduce(1.0) == 1.0
    if comm.size > 1:
        for chan, words in ((first, b"first"), (second, b"second")):
            source, frames = receive(chan)
            assert (source, frames[0].tobytes()) == (left, words)
    finish(comm, second)
    finish(comm, first)
