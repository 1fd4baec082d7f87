"""Slices to one rank while others come from one: how many are under way, and that all arrive."""

import numpy as np
import pytest

import inprocess
from collectives.algorithms import ring
from collectives.communicator import group_of
from collectives.core.settings import Settings
from collectives.transport.transport import Deadline


@pytest.mark.parametrize("mode", inprocess.MODES)
@pytest.mark.parametrize("numbers", [(9, 9), (9, 2), (0, 7), (1, 1), (0, 0)])
def test_all_slices_arrive_in_order_and_few_are_under_way(numbers, mode):
    """Both ranks send as many slices as `numbers` says of them."""

    def program(comm):
        transport, peer = group_of(comm).transport, 1 - comm.rank
        most, under_way, taken = [0], [], []

        def watched(start):
            def begin(array, rank):
                message = start(array, rank)
                under_way.append(message)
                under_way[:] = [each for each in under_way if not each.done()]
                most[0] = max(most[0], len(under_way))
                return message

            return begin

        away = [np.full(3, 10 * comm.rank + n) for n in range(numbers[comm.rank])]
        into = [np.zeros(3, int) for _ in range(numbers[peer])]
        transport.start_send = watched(transport.start_send)
        transport.start_receive = watched(transport.start_receive)
        ring.exchange(transport, away, peer, into, peer, Deadline("exchange", 20.0), taken.append)
        assert taken == list(range(numbers[peer]))
        for number, slice_ in enumerate(into):
            assert slice_.tolist() == [10 * peer + number] * 3
        return most[0]

    settings = Settings(timeout=20, shared_memory=None)
    most = inprocess.run_ranks(2, program, mode=mode, settings=settings)
    assert max(most) <= 8
