"""Eager messages among ranks that are threads, over functions in C that stand for MPI's."""

import ctypes
import itertools
import threading
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import oracle
from collectives.algorithms import hierarchical
from collectives.algorithms.eager import HEAD_BYTES, EagerExchange
from collectives.arrays import reduction
from collectives.arrays.reduction import MAX, MEAN, SUM
from collectives.calls.signature_check import MAX_PAYLOAD_BYTES
from collectives.core.errors import CollectiveTimeout
from collectives.transport.backoff import Deadline, RankSet
from collectives.transport.transport import NativeMpi

INT, WORD = ctypes.c_int, ctypes.c_int64
START = ctypes.CFUNCTYPE(INT, WORD, INT, WORD, INT, INT, WORD, WORD)
TEST = ctypes.CFUNCTYPE(INT, WORD, WORD, WORD)

COMM, BYTE, TAG = -0x7C000001, 0x4C00010D, 7
FAILURE = 13


class Network:
    """The messages of some ranks.

    Args:
        slow: ranks whose messages are not done before they have looked after the others.
        failing: ranks that cannot receive.
    """

    def __init__(self, slow=(), failing=()):
        self.boxes = defaultdict(deque)  # (source, dest) -> messages
        self.slow = slow
        self.failing = failing
        self.lengths = []
        self.lock = threading.Lock()


class CTransport(RankSet):
    """What eager messages need of a transport."""

    def __init__(self, network, rank, size):
        self.network, self.rank, self.size = network, rank, size
        self.under_way = {}
        self.numbers = itertools.count(1)
        self.looks = 0
        self.kept = []
        self.functions = START(self._isend), START(self._irecv), TEST(self._test)
        addresses = (ctypes.cast(f, ctypes.c_void_p).value for f in self.functions)
        self.native_mpi = NativeMpi(*addresses, COMM % 2**64, BYTE, TAG)

    @property
    def parent(self):
        return self

    def parent_rank(self, rank):
        return rank

    def _isend(self, memory, nbytes, kind, dest, tag, comm, request):
        assert (kind, tag, comm) == (BYTE, TAG, COMM)
        with self.network.lock:
            self.network.lengths.append(nbytes)
            self.network.boxes[self.rank, dest].append(ctypes.string_at(memory, nbytes))
        return self._begun(request, None)

    def _irecv(self, memory, nbytes, kind, source, tag, comm, request):
        assert (kind, tag, comm) == (BYTE, TAG, COMM)
        if self.rank in self.network.failing:
            return FAILURE
        return self._begun(request, (memory, nbytes, source))

    def _begun(self, request, what):
        number = next(self.numbers)
        self.under_way[number] = what
        WORD.from_address(request).value = number
        return 0

    def _test(self, request, flag, status):
        number, network = WORD.from_address(request).value, self.network
        if self.rank in network.slow and not self.looks:
            return 0
        receive = self.under_way[number]
        if receive is not None:
            memory, most, source = receive
            with network.lock:
                box = network.boxes[source, self.rank]
                if not box:
                    return 0
                message = box.popleft()
            assert len(message) <= most
            ctypes.memmove(memory, message, len(message))
        del self.under_way[number]
        INT.from_address(flag).value = 1
        return 0

    def blocking_rank(self, pending):
        return ""

    def check_peers(self, operation, peers):
        self.looks += 1

    def retain(self, memory):
        self.kept.append(memory)

    def error_of(self, code, operation):
        return RuntimeError(f"{operation}: error {code}")


def run(size, call, network=None):
    """Call `call(exchange, transport)` on all ranks; returns what they return."""
    network = network or Network()

    def body(rank):
        transport = CTransport(network, rank, size)
        return call(EagerExchange(transport, MAX_PAYLOAD_BYTES), transport)

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(body, range(size)))
    assert not any(network.boxes.values())
    return results


def deadline(seconds=20.0):
    return Deadline("allreduce", seconds)


def test_a_part_of_the_ranks_exchanges_messages_under_the_numbers_of_the_whole():
    network = Network(slow=(2,))

    def call(_, transport):
        part = hierarchical.levels(transport, (0, 0, 2, 2)).network
        if transport.rank % 2:  # of each node the first one speaks
            return None
        exchange = EagerExchange(part, MAX_PAYLOAD_BYTES)
        return exchange.reduce((7, ~7), np.array([part.parent_rank(part.rank)]), SUM, deadline())

    zero, one, two, three = run(4, call, network)
    assert (zero.tolist(), one, two.tolist(), three) == ([2], None, [2], None)
    assert {pair for pair, box in network.boxes.items() if pair in ((0, 2), (2, 0))}
    assert not {(0, 1), (1, 0)} & network.boxes.keys()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("op", [SUM, MEAN, MAX], ids=lambda op: op.value)
def test_what_all_bring_is_combined_and_equal_on_all_ranks(size, op):
    dtypes = [d for d in oracle.DTYPES if oracle.is_defined(op, d)]
    dtypes = [d for d in dtypes if reduction.work_dtype(np.dtype(d)) == d]
    assert dtypes

    def call(exchange, transport):
        results = []
        for dtype, n in itertools.product(dtypes, (0, 1, 7, 150)):
            arrays = [(np.arange(n) % 5 + r % 3).astype(dtype) for r in range(size)]
            data = arrays[transport.rank].copy()
            reduction.prescale(data, op, size)
            got = exchange.reduce((n, ~n), data, op, deadline())
            oracle.assert_close(got, arrays, op)
            results.append(got.tobytes())
        return results

    results = run(size, call)
    assert all(result == results[0] for result in results)


def test_a_message_has_the_length_of_what_it_carries():
    network = Network()
    data = np.ones(3)
    run(2, lambda exchange, _: exchange.reduce((1, ~1), data, SUM, deadline()), network)
    assert network.lengths == [HEAD_BYTES + data.nbytes] * 2


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("other", [0, 1, -1])
def test_all_ranks_hear_that_one_means_another_call(size, other):
    """Whose message is longer, and whose hash is the smaller or the larger one."""

    def call(exchange, transport):
        told = []
        for mine, n in ((3, 100), (9, 1)):
            odd = transport.rank == other % size
            number = mine if odd else 5
            data = np.full(n if odd else 10, np.nan)
            told.append(exchange.reduce((number, ~number), data, SUM, deadline()))
        told.append(exchange.reduce((1, ~1), np.ones(2), SUM, deadline()).tolist())
        return told

    assert run(size, call) == [[None, None, [size, size]]] * size


def test_a_wait_for_a_slow_rank_looks_after_the_others_and_goes_on():
    def call(exchange, transport):
        result = exchange.reduce((1, ~1), np.ones(2), SUM, deadline())
        again = exchange.reduce((2, ~2), result, SUM, deadline())
        return again.tolist(), transport.looks

    results = run(2, call, Network(slow=[1]))
    assert [result for result, _ in results] == [[4, 4]] * 2
    assert results[1][1] > 0


def test_a_rank_that_does_not_come_is_named_after_the_limit():
    transport = CTransport(Network(), 0, 2)
    exchange = EagerExchange(transport, MAX_PAYLOAD_BYTES)
    with pytest.raises(CollectiveTimeout, match=r"no answer within 0.3 s.*rank 1 to send 16 bytes"):
        exchange.reduce((1, ~1), np.ones(2), SUM, deadline(0.3))
    assert transport.kept == [exchange]  # where a message may still arrive


def test_an_error_of_mpi_is_explained_by_the_transport():
    transport = CTransport(Network(failing=[0]), 0, 2)
    exchange = EagerExchange(transport, MAX_PAYLOAD_BYTES)
    with pytest.raises(RuntimeError, match=f"allreduce: error {FAILURE}"):
        exchange.reduce((1, ~1), np.ones(2), SUM, deadline())
