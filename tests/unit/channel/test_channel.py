"""Letters, doorbells and channels: messages that nobody has asked for."""

import os
import struct
import threading
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import inprocess
from collectives import extend
from collectives.channel import channel
from collectives.channel.doorbell import Doorbell
from collectives.channel.frames import decode, encode
from collectives.core.errors import CollectiveError, PeerFailure
from tapped import flush, receive

LIMIT = 20.0


def frame(length, seed=0):
    return np.random.default_rng([seed, length]).integers(0, 256, length, np.uint8)


# Frames.


@given(st.lists(st.sampled_from([0, 1, 15, 16, 17, 1000, 32768, 32769, 70_000]), max_size=12))
def test_what_is_written_is_read(lengths):
    frames = [frame(length, i) for i, length in enumerate(lengths)]
    head, long = encode(frames)
    left = list(long)
    back = [left.pop(0) if at is None else head[at : at + n] for n, at in decode(head, 0)]
    assert not left
    assert [f.tolist() for f in back] == [f.tolist() for f in frames]
    assert head.size <= 300_000


def test_short_frames_can_be_seen_as_arrays():
    head, long = encode([frame(3), np.arange(5.0).view(np.uint8), frame(1)])
    assert not long
    length, at = decode(head, 0)[1]
    assert at % 16 == 0
    np.testing.assert_array_equal(head[at : at + length].view(np.float64), np.arange(5.0))


def test_only_long_frames_go_alone_and_a_head_stays_short():
    _, long = encode([frame(32768), frame(32769)])
    assert [part.size for part in long] == [32769]
    head, long = encode([frame(32768)] * 20)
    assert head.size <= 1 << 18
    assert len(long) >= 12


@pytest.mark.parametrize(
    "damage",
    [
        lambda head: head[:3],
        lambda head: head[:-1],
        lambda head: np.append(head, np.uint8(0)),
        lambda head: np.append(np.uint8(1), head[1:]),
        lambda head: np.frombuffer(struct.pack("<HxxI", 0x51C0, 1 << 31), np.uint8),
        lambda head: np.frombuffer(struct.pack("<HxxIQ", 0x51C0, 1, 1 << 62), np.uint8),
        lambda head: np.frombuffer(struct.pack("<HxxIQQ", 0x51C0, 2, 2**64 - 1, 1), np.uint8),
    ],
)
def test_what_is_no_head_is_refused_before_memory_is_taken(damage):
    head, _ = encode([frame(10), frame(20)])
    tracemalloc.start()
    try:
        with pytest.raises(CollectiveError, match="what rank 7 sent is not a message"):
            decode(damage(head), 7)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_too_many_frames_are_refused():
    with pytest.raises(ValueError, match="at most 65536 frames"):
        encode([frame(0)] * 65537)


# Doorbells.


def test_a_bell_wakes_who_waits_and_counts_once():
    bell, other = Doorbell(), Doorbell()
    assert other.connect(3, bell.address)
    assert not bell.wait(0)
    for _ in range(5):
        other.ring(3)
    assert bell.wait(LIMIT)
    assert not bell.wait(0)
    bell.ring()
    assert bell.wait(LIMIT)
    woken = []
    thread = threading.Thread(target=lambda: woken.append(bell.wait(LIMIT)))
    thread.start()
    other.ring(3)
    thread.join(LIMIT)
    assert woken == [True]
    bell.close()
    other.ring(3)  # nobody there
    other.ring(4)  # never known
    other.close()


def test_a_bell_that_nobody_hears_does_not_block():
    bell, other = Doorbell(), Doorbell()
    other.connect(0, bell.address)
    for _ in range(100_000):
        other.ring(0)
    assert bell.wait(LIMIT)
    assert not bell.wait(0)
    bell.close()
    other.close()


def test_only_the_right_pipe_is_opened(tmp_path):
    bell = Doorbell()
    process, number, device, inode = bell.address
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    for address in (
        (process, number, device, inode + 1),
        (process, number, device + 1, inode),
        (process, file, device, inode),
        (process, 12345, device, inode),
        (2**22 + 1, number, device, inode),
    ):
        assert not Doorbell().connect(1, address)
    os.close(file)
    bell.close()


def test_bells_leave_no_file_descriptor():
    def count():
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(5):
        bell, other = Doorbell(), Doorbell()
        bell.connect(1, other.address)
        bell.close()
        other.close()
    assert count() == before


# Channels.


@inprocess.on_ranks(2, mode="synchronous")
def test_long_buffers_are_reused_when_the_program_holds_no_view(comm):
    chan = extend.open_channel(comm)
    if comm.rank == 0:
        for number in range(4):
            chan.send(1, [np.full(1_000_000, number, np.uint8)])
            flush(chan)
            comm.barrier()
    else:
        kept, places = [], []
        for number in range(4):
            (got,) = receive(chan).frames
            assert set(got.tolist()) == {number}
            places.append(got.__array_interface__["data"][0])
            if number < 2:
                kept.append(got[5:].view(np.int8))  # a view counts
            del got
            comm.barrier()
        assert len(set(places[:3])) == 3
        assert places[3] == places[2]
        assert [set(k.tolist()) for k in kept] == [{0}, {1}]
    comm.barrier()
    chan.close(all_together=True)


class Clock:
    """In place of the channels' clock: time that can be advanced, and naps that are noted."""

    def __init__(self, monkeypatch):
        self.ahead = 0.0
        self.naps = []
        monkeypatch.setattr(channel, "time", self)

    def monotonic(self):
        return time.monotonic() + self.ahead

    def sleep(self, seconds):
        self.naps.append(seconds)


def test_a_waiting_rank_is_woken_at_once_and_sleeps_otherwise(monkeypatch):
    clock, wait = Clock(monkeypatch), Doorbell.wait

    def run(comm):
        chan = extend.open_channel(comm)
        comm.barrier()
        if comm.rank == 0:
            clock.ahead += 100  # nothing has moved for long
            began = time.monotonic()
            chan.wait(LIMIT)  # as long as it ever sleeps
            assert 0.05 < time.monotonic() - began < LIMIT / 2
            this = threading.get_ident()

            def to_the_end(bell, seconds):
                return wait(bell, LIMIT if threading.get_ident() == this else seconds)

            monkeypatch.setattr(Doorbell, "wait", to_the_end)
            comm.barrier()
            while chan.poll() is None:
                chan.wait(LIMIT)
            assert time.monotonic() - began < LIMIT / 2
        else:
            comm.barrier()
            chan.send(0, [b"wake up"])
            flush(chan)
        comm.barrier()
        chan.close(all_together=True)

    inprocess.run_ranks(2, run)


def test_a_message_that_has_not_left_keeps_its_sender_awake(monkeypatch):
    rung, ring = [], Doorbell.ring

    def noted(bell, peer=None):
        rung.append(peer)
        ring(bell, peer)

    monkeypatch.setattr(Doorbell, "ring", noted)

    def run(comm):
        chan = extend.open_channel(comm)
        comm.barrier()
        if comm.rank == 0:
            chan.send(1, [b"taken only when the other side looks"])
            assert not chan.idle
            assert rung == [1, None]  # the other side, and our own thread
        comm.barrier()
        if comm.rank == 1:
            receive(chan)
        flush(chan)
        comm.barrier()
        chan.close(all_together=True)

    inprocess.run_ranks(2, run, "synchronous")


def test_who_cannot_be_woken_looks_by_itself(monkeypatch):
    clock, naps, wait = Clock(monkeypatch), [], Doorbell.wait
    monkeypatch.setattr(Doorbell, "connect", lambda *_: False)
    monkeypatch.setattr(Doorbell, "wait", lambda bell, s: naps.append(s) or wait(bell, s))

    def run(comm):
        chan = extend.open_channel(comm)
        comm.barrier()
        clock.ahead += 100
        chan.wait(1)
        chan.send(1 - comm.rank, [b"hello", frame(100_000)])
        assert bytes(receive(chan).frames[0]) == b"hello"
        flush(chan)
        comm.barrier()
        chan.close(all_together=True)

    for mode in inprocess.MODES:
        inprocess.run_ranks(2, run, mode)
    assert max(naps) == 0.004  # not to hear of deaths alone, as one that is woken


def test_naps_grow_with_the_time_that_nothing_has_moved(monkeypatch):
    clock = Clock(monkeypatch)
    clock.monotonic = lambda: clock.ahead
    mailbox, bell = SimpleNamespace(rank=0, size=1), SimpleNamespace(wait=clock.sleep)
    for woken, idle in ((True, 0.4), (True, 80), (False, 0.0008), (False, 0.016), (False, 80)):
        chan = channel.Channel(mailbox, bell, frozenset, woken_by_all=woken)
        clock.ahead += idle
        chan.wait(1)
    np.testing.assert_allclose(clock.naps, [0.05, 0.1, 0.0001, 0.002, 0.004])


@inprocess.on_ranks(3)
def test_each_sender_has_its_turn(comm):
    chan = extend.open_channel(comm)
    if comm.rank:
        for _ in range(3):
            chan.send(0, [b"x"])
    comm.barrier()
    if comm.rank == 0:
        sources = [receive(chan).source for _ in range(6)]
        assert sorted(sources[:2]) == sorted(sources[2:4]) == [1, 2]
    comm.barrier()
    chan.close(all_together=True)


def test_a_message_that_its_sender_did_not_live_to_finish_is_dropped(monkeypatch):
    take = inprocess.ThreadMailbox.receive

    class Dead:
        def done(self):
            raise PeerFailure("rank 1 died")

    def receive_long(mailbox, into, source):
        return Dead() if source == 1 else take(mailbox, into, source)

    monkeypatch.setattr(inprocess.ThreadMailbox, "receive", receive_long)

    def run(comm):
        chan = extend.open_channel(comm)
        if comm.rank == 1:
            chan.send(0, [b"begun", frame(100_000)])
            chan.send(0, [b"behind"])
        if comm.rank == 2:
            chan.send(0, [b"of another"])
        comm.barrier()
        if comm.rank == 0:
            assert receive(chan).source == 2
            assert chan.poll() is None
        comm.barrier()
        chan.close()

    inprocess.run_ranks(3, run)


@inprocess.on_ranks(2)
def test_a_closed_channel_sends_nothing(comm):
    chan = extend.open_channel(comm)
    comm.barrier()
    chan.close(all_together=True)
    chan.close(all_together=True)
    with pytest.raises(CollectiveError, match="the channel is closed"):
        chan.send(1 - comm.rank, [b"x"])
