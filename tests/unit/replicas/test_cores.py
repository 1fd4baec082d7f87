"""Replicas that begin on one core move apart, those on different ones stay."""

import os
import threading

import pytest

from strategies.replicas.core_affinity import CoreAffinity

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="threads have no cores here"
)


@pytest.fixture
def moves(monkeypatch):
    """What threads ask for, while each stays on the core of this process that it is bound to."""
    asked = []
    (first, *_) = sorted(os.sched_getaffinity(0))
    bind = os.sched_setaffinity

    def begin(cores, replicas, others):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {first, *others})
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: asked.append(set(cores)))

        def body(i):
            bind(0, {first})
            cores.spread(i)

        for i in replicas:
            thread = threading.Thread(target=body, args=(i,))
            thread.start()
            thread.join(20)
        return first

    return begin, asked


def test_the_second_on_a_core_moves_once_and_is_free_again(moves):
    begin, asked = moves
    first = begin(CoreAffinity(), [0, 1, 2], others={first_free := 1 << 20, 1 << 21})
    everything = {first, first_free, 1 << 21}
    assert asked == [{first_free}, everything, {1 << 21}, everything]


def test_without_a_free_core_all_stay(moves):
    begin, asked = moves
    begin(CoreAffinity(), [0, 1], others=set())
    assert asked == []


def test_a_replica_is_not_in_its_own_way(moves):
    begin, asked = moves
    begin(CoreAffinity(), [0, 0], others={1 << 20})
    assert asked == []
