"""How a wait is spent: what is asked of the clock, and what is slept."""

import itertools

import pytest

from collectives.core import compile_time
from collectives.core.errors import CollectiveTimeout
from collectives.transport import backoff
from collectives.transport.backoff import Backoff, CompletedWait, Deadline, RankSet


class Clock:
    """Time passes in naps, and by a step for every look at the clock."""

    def __init__(self, step):
        self.now = 0.0
        self.step = step
        self.naps = []

    def monotonic(self):
        self.now += self.step
        return self.now

    def sleep(self, seconds):
        self.naps.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock(0.001)
    monkeypatch.setattr(backoff, "time", clock)
    return clock


def test_a_short_wait_only_gives_its_core_away(clock):
    wait = Backoff()
    assert [wait.pause() for _ in range(19)] == [False] * 19
    assert clock.naps == []


def test_naps_grow_with_the_wait_up_to_a_limit_and_looks_are_rare(clock):
    wait = Backoff()
    looks = []
    while clock.now < 2:
        if wait.pause():
            looks.append(clock.now)
    assert clock.naps == sorted(clock.naps)
    assert 0.0003 < clock.naps[0] < 0.0004
    assert clock.naps[-1] == 0.005
    assert all(later - looks[0] > 0.1 for later in looks[1:])
    assert all(0.09 < later - look < 0.12 for look, later in itertools.pairwise(looks))
    assert 16 <= len(looks) <= 20


def test_a_thread_beside_one_that_computes_naps_at_once(clock):
    wait = Backoff(first_nap=0.0002)
    assert not wait.pause()
    assert clock.naps == [0.0002]


def test_who_asks_until_a_limit_gets_the_last_answer(clock):
    answers = iter([False, False, True])
    assert backoff.poll_until(lambda: next(answers), limit=1.0, every=0.01)
    assert clock.naps == [0.01, 0.01]
    assert not backoff.poll_until(lambda: False, limit=0.1, every=0.01)
    assert clock.now < 0.2


def test_no_limit_counts_what_this_process_compiles_meanwhile(clock, monkeypatch):
    monkeypatch.setattr(compile_time, "time", clock)
    ranks = RankSet()
    ranks.rank, ranks.size = 0, 2
    missing = [CompletedWait("rank 1 to enter the call", (1,), has_come=False)]
    deadline = Deadline("allreduce", 5.0)
    with compile_time.measure():
        clock.now += 60.0
    deadline.check(ranks, missing)
    clock.now += 5.0
    with pytest.raises(CollectiveTimeout, match="allreduce: no answer within 5 s.* rank 1 to ent"):
        deadline.check(ranks, missing)
