"""Gradients that become ready in several threads."""

from __future__ import annotations

import threading

import numpy as np
from calls import together

from strategies.averaging.accumulation import LocalGradient
from strategies.averaging.overlap import Overlap

PLACES = 6


class BucketsThatAreMet:
    """Stands for buckets: notes what is ready, and whether two threads were in them at once."""

    def __init__(self):
        self.views = [np.zeros(3) for _ in range(PLACES)]
        self.order = []
        self.met = False
        self.both = threading.Barrier(2)

    def ready(self, place):
        try:
            self.both.wait(0.1)  # in which a second thread that was let in would come
        except threading.BrokenBarrierError:
            self.order.append(place)
        else:
            self.met = True

    def wait(self):
        return self.views


def test_threads_take_turns_in_the_buckets():
    buckets = BucketsThatAreMet()
    contribution = LocalGradient([np.full(3, i) for i in range(PLACES)])
    early = Overlap(buckets, range(PLACES), 2.0, contribution)

    def of_a_device(positions):
        for i in positions:
            early.ready(i, contribution.gradients[i])

    halves = range(0, PLACES, 2), range(1, PLACES, 2)
    together(of_a_device, halves)
    assert not buckets.met
    assert sorted(buckets.order) == list(range(PLACES))
    assert [x.tolist() for x in early.finish()] == [[2.0 * i] * 3 for i in range(PLACES)]
    assert early.matches(contribution, unchanged=range(PLACES))
