"""What no name of an algorithm stands for, on more ranks than any machine of the tests could run.

All-reduces of fewer bits, prefix reductions, and comparisons, with which small operations travel.
Numbers are such that nothing is rounded on the way: a contribution that is missing or comes twice
shows.
"""

from functools import partial

import numpy as np
import pytest
from wrong_steps import wrong_doubling, wrong_neighbours, wrong_prefix

import collectives as cc
from collectives.algorithms import compressed
from collectives.calls import signature_check
from collectives.calls.group import Group
from collectives.calls.signature import hash_of
from collectives.core import topology
from collectives.core.settings import Settings
from collectives.kernels.int8 import MOST, NUMBERS
from collectives.operations.scan import exscan, scan
from collectives.simulation import ranks
from collectives.simulation.cluster import SimulatedCluster
from collectives.simulation.transport import EAGER_BYTES
from collectives.transport.transport import Deadline
from pairwise import also

# -1: no message goes before its receiver has asked, which finds what sends before it receives.
EAGER = {"eager": EAGER_BYTES, "synchronous": -1}

SIZES = [17, 64, also(100), also(256)]
SCHEMES = [cc.FP16, cc.BF16, cc.INT8]
LIMIT = Deadline("test", 60.0)
WITHOUT_MEMORY = Settings(shared_memory=None, timeout=60.0)


def spread(size, per_node):
    return SimulatedCluster(size, -(-size // per_node))


def results(cluster, call, eager):
    """Return what `call(access)` gives on every rank."""
    ended = ranks.run(cluster, call, payload=True, eager=eager)
    if (error := ranks.first_error(ended)) is not None:
        raise error
    return [rank.result for rank in ended]


def whole_numbers(rank, count, scheme):
    """What a rank brings: sums over 256 ranks fit into 8 bits of bfloat16, and 11 of float16.

    Of 8 bits in each block a number is the largest that there is, so that a step is 1.
    """
    random = np.random.default_rng([rank, count])
    most = {cc.FP16: 8, cc.BF16: 1, cc.INT8: MOST}[scheme]
    x = random.integers(-most, most, count, endpoint=True).astype(np.float32)
    if scheme == cc.INT8:
        x[::NUMBERS] = random.choice([-MOST, MOST])
    return x


def conform_compressed(scheme, cluster, *, eager=EAGER_BYTES, op=cc.SUM):
    """Compare an all-reduce of fewer bits with the sum, of 8 bits within the result's rounding."""
    size = cluster.size
    count = (NUMBERS if scheme == cc.INT8 else 1) * 3 * size + 5  # three for each rank, and more
    arrays = [whole_numbers(rank, count, scheme) for rank in range(size)]
    exact = np.max(arrays, axis=0) if op is cc.MAX else np.sum(arrays, axis=0)

    def call(access):
        own = arrays[access.transport.rank]
        result = np.empty_like(own)
        codec = scheme.codec(own.dtype, op, network=True)
        compressed.allreduce(access.transport, result, op, LIMIT, codec=codec, contribution=own)
        return result

    got = results(cluster, call, eager)
    for rank, result in enumerate(got):
        np.testing.assert_array_equal(result, got[0], f"rank {rank} of {size}")
    if scheme == cc.INT8 and op is cc.SUM:
        starts = np.arange(0, count, NUMBERS)
        largest = np.repeat(np.maximum.reduceat(np.abs(exact), starts), NUMBERS)[:count]
        # Half a step, which has been rounded up to a bfloat16.
        assert (np.abs(got[0] - exact) <= 0.5 * largest / MOST * (1 + 2.0**-7)).all()
    else:
        np.testing.assert_array_equal(got[0], exact)


@pytest.mark.parametrize("mode", EAGER)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", [cc.SUM, cc.MAX], ids=lambda op: op.value)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_fewer_bits_give_the_result(scheme, op, size, mode):
    conform_compressed(scheme, spread(size, 1), eager=EAGER[mode], op=op)


def conform_prefix(operation, cluster, *, eager=EAGER_BYTES, dtype=np.int64, op=cc.SUM):
    """Compare what every rank gets of those before it, and the result of the first one."""
    size = cluster.size
    arrays = [
        np.random.default_rng(rank).integers(-(1 << 40), 1 << 40, 700).astype(dtype)
        for rank in range(size)
    ]
    upto = np.maximum.accumulate(arrays) if op is cc.MAX else np.cumsum(arrays, axis=0)

    def call(access):
        group = Group(access.transport, cluster.leaders(), WITHOUT_MEMORY)
        return operation(group, arrays[group.rank], op=op)

    for rank, got in enumerate(results(cluster, call, eager)):
        if operation is exscan and rank == 0:
            assert got is None
        else:
            expected = upto[rank - (operation is exscan)]
            np.testing.assert_array_equal(got, expected, f"rank {rank} of {size}")


@pytest.mark.parametrize("mode", EAGER)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "op"), [(np.int64, cc.SUM), (np.float32, cc.MAX)])
@pytest.mark.parametrize("operation", [scan, exscan], ids=["scan", "exscan"])
def test_every_rank_has_what_those_before_it_bring(operation, dtype, op, size, mode):
    conform_prefix(operation, spread(size, 4), eager=EAGER[mode], dtype=dtype, op=op)


def conform_comparison(cluster, *, eager=EAGER_BYTES, count=300):
    """Compare a call of all ranks, with which sums travel; then one of which one means another."""
    size = cluster.size
    odd = 2 * size // 3
    arrays = [np.random.default_rng([r, 1]).integers(-9, 9, count) for r in range(size)]

    def call(access):
        group = Group(access.transport, cluster.leaders(), WITHOUT_MEMORY)
        own = signature_check.Piggyback(arrays[group.rank].copy(), cc.SUM)
        alike, other = {"op": "SUM"}, {"op": "MAX"}
        got = signature_check.verify(group, hash_of(alike), alike, LIMIT, own)
        mine = other if group.rank == odd else alike
        with pytest.raises(cc.MismatchError, match=f"op is .*MAX on rank {odd};"):
            signature_check.verify(group, hash_of(mine), mine, LIMIT, own)
        return got

    for rank, got in enumerate(results(cluster, call, eager)):
        np.testing.assert_array_equal(got, np.sum(arrays, axis=0), f"rank {rank} of {size}")


@pytest.mark.parametrize("mode", EAGER)
@pytest.mark.parametrize("count", [0, 300])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("per_node", "speakers"), [(1, 8), (3, 8), (2, 1)])
def test_a_comparison_finds_the_odd_one_and_carries_a_sum(
    size, per_node, speakers, count, mode, monkeypatch
):
    monkeypatch.setattr(
        signature_check, "MAX_SPEAKERS", speakers
    )  # 1: as with many ranks on a node
    conform_comparison(spread(size, per_node), eager=EAGER[mode], count=count)


MUTATIONS = {
    "float16": ("ring_neighbours", wrong_neighbours, partial(conform_compressed, cc.FP16)),
    "bfloat16": ("ring_neighbours", wrong_neighbours, partial(conform_compressed, cc.BF16)),
    "int8": ("ring_neighbours", wrong_neighbours, partial(conform_compressed, cc.INT8)),
    "scan": ("prefix", wrong_prefix, partial(conform_prefix, scan)),
    "exscan": ("prefix", wrong_prefix, partial(conform_prefix, exscan)),
    "comparison": ("doubling", wrong_doubling, conform_comparison),
    "of nodes": ("doubling", wrong_doubling, conform_comparison),
}


@pytest.mark.parametrize("case", MUTATIONS)
def test_a_wrong_step_beyond_16_ranks_is_caught(case, monkeypatch):
    schedule, mutate, conform = MUTATIONS[case]
    monkeypatch.setattr(topology, schedule, mutate(getattr(topology, schedule)))
    per_node = 2 if case == "of nodes" else 1
    monkeypatch.setattr(signature_check, "MAX_SPEAKERS", 1)  # of a node of two one rank speaks
    conform(SimulatedCluster(16 * per_node, 16))  # where it does no harm
    with pytest.raises((AssertionError, cc.CollectiveError)):
        conform(SimulatedCluster(20 * per_node, 20))
