"""Simulated ranks: their clock, what they share, and what goes wrong there."""

import dataclasses

import numpy as np
import pytest

import collectives as cc
import inprocess
from collectives.algorithms import ring, selection
from collectives.calls import signature_check
from collectives.core import links, topology
from collectives.core.links import LinkCost, Machine
from collectives.simulation import calls, ranks
from collectives.simulation.clock import Stopped
from collectives.simulation.cluster import POLLING, YIELDING, SimulatedCluster
from collectives.simulation.cpu_scheduler import WaitingRank
from collectives.transport.transport import Deadline

# 1 us and 1 ns per byte in a node, 4 us and 10 ns between, 0.1 ns to combine a byte.
MACHINE = Machine(
    LinkCost(1e-7, 1e-11, 1e-11), LinkCost(1e-6, 1e-9, 1e-10), LinkCost(4e-6, 1e-8, 1e-10)
)
LIMIT = Deadline("test", 60.0)

# Of ranks that run: with the same links, since what goes between nodes in which order follows them.
SETTINGS = dataclasses.replace(
    inprocess.world_settings(shared=True), links=links.defaults()._replace(machine=MACHINE)
)


def run(size, nodes, function, **how):
    """The results of `function(transport)`, and the seconds of every rank."""
    eager = how.pop("eager", 1 << 20)
    cluster = SimulatedCluster(size, nodes, MACHINE, **how)
    ended = ranks.run(cluster, lambda a: function(a.transport), payload=True, eager=eager)
    error = ranks.first_error(ended)
    if error is not None:
        raise error
    return [rank.result for rank in ended], [rank.seconds for rank in ended]


def send_once(nbytes, pairs):
    """A program in which some ranks send to others, all at once."""

    def program(transport):
        data = np.full(nbytes, transport.rank, np.uint8)
        for source, dest in pairs:
            if transport.rank == source:
                transport.send(data, dest, LIMIT)
            if transport.rank == dest:
                transport.receive(data, source, LIMIT)
        return int(data[-1])

    return program


def test_a_message_takes_alpha_and_beta():
    results, seconds = run(2, 2, send_once(1000, [(0, 1)]))
    assert results == [0, 0]
    assert seconds[1] == pytest.approx(4e-6 + 1000e-8)
    assert seconds[0] == pytest.approx(0.5e-6)  # it has gone, and its memory is free
    _, seconds = run(2, 1, send_once(1000, [(0, 1)]))
    assert seconds[1] == pytest.approx(1e-6 + 1000e-9)


def test_a_message_that_asks_first_takes_two_ways_more():
    _, seconds = run(2, 2, send_once(1000, [(0, 1)]), eager=-1)
    way = 3e-6
    assert seconds[1] == pytest.approx(4e-6 + 2 * way + 1000e-8)
    assert seconds[0] == pytest.approx(seconds[1] - 0.5e-6)


@pytest.mark.parametrize(
    ("pairs", "slower"),
    [
        ([(0, 2), (1, 3)], 2),  # out of one node into one
        ([(0, 2), (1, 4)], 2),  # out of one node into two
        ([(0, 4), (2, 5)], 2),  # out of two nodes into one
        ([(0, 2), (3, 1)], 1),  # one out, one in
        ([(0, 1), (2, 4)], 1),  # one of them inside a node
    ],
)
def test_messages_share_the_lines_of_their_nodes(pairs, slower):
    _, seconds = run(6, 3, send_once(100_000, pairs))
    assert seconds[pairs[1][1]] == pytest.approx(4e-6 + slower * 100_000e-8)


def test_who_comes_later_has_the_line_alone_in_the_end():
    def program(transport):
        data = np.zeros(100_000 if transport.rank in (0, 2) else 50_000, np.uint8)
        if transport.rank < 2:
            transport.send(data, transport.rank + 2, LIMIT)
        else:
            transport.receive(data, transport.rank - 2, LIMIT)

    _, seconds = run(4, 2, program)
    assert seconds[3] == pytest.approx(4e-6 + 2 * 50_000e-8)
    assert seconds[2] == pytest.approx(4e-6 + 150_000e-8)


@pytest.mark.parametrize(("idle", "saved"), [(0.0, 0), (1.5e-3, 100_000), (1.0, 150_000)])
def test_a_line_that_was_idle_lets_a_burst_pass_at_once(idle, saved):
    def program(transport):
        data = np.zeros(100_000, np.uint8)
        for pause in (0.0, idle):
            if transport.rank == 0:
                transport.simulated.advance(pause)
                transport.send(data, 1, LIMIT)
                transport.send(data, 1, LIMIT)
            else:
                transport.receive(data, 0, LIMIT)
                transport.receive(data, 0, LIMIT)

    _, seconds = run(2, 2, program, burst=150_000)
    both = 200_000e-8  # seconds on the line, which was idle before
    first = both - 150_000e-8
    expected = 4e-6 + max(idle, first) + both - saved * 1e-8
    assert seconds[1] == pytest.approx(expected, rel=0.01)


def test_nodes_below_a_switch_share_its_line_up():
    pairs = [(0, 2), (1, 3)]
    how = {"nodes_per_switch": 2}
    _, alone = run(4, 4, send_once(100_000, pairs), **how)
    _, narrow = run(4, 4, send_once(100_000, pairs), oversubscription=4.0, **how)
    assert alone[3] == pytest.approx(4e-6 + 100_000e-8)
    assert narrow[3] == pytest.approx(4e-6 + 4 * 100_000e-8)


@pytest.mark.parametrize("size", [2, 5, 16])
def test_a_ring_takes_what_its_closed_form_says(size):
    cluster = SimulatedCluster(size, size, MACHINE)
    nbytes = 4 * 1000 * size
    simulated = calls.seconds("allreduce", "ring", nbytes, cluster)
    assert simulated == pytest.approx(ring.allreduce_seconds(nbytes, cluster.layout))


@pytest.mark.parametrize(
    ("size", "nodes", "by_nodes"), [(2, 2, False), (16, 16, False), (16, 8, False), (64, 4, True)]
)
@pytest.mark.parametrize("nbytes", [0, 3000])
def test_a_comparison_takes_what_its_closed_form_says(size, nodes, by_nodes, nbytes):
    machine = MACHINE._replace(network=LinkCost(4e-6, 1e-8, 1e-10, eager=2e-6))
    cluster = SimulatedCluster(size, nodes, machine)
    assert signature_check.per_node(cluster.layout) == by_nodes
    simulated = calls.simulate_sequence(nbytes, cluster, by_nodes=by_nodes)
    # The rank that speaks for a node combines the eager messages of its ranks, which is not in the
    # closed form.
    within = 0.3 if by_nodes else 0.01
    assert simulated == pytest.approx(signature_check.seconds(nbytes, cluster.layout), rel=within)
    slow = calls.simulate_sequence(
        nbytes, SimulatedCluster(size, nodes, MACHINE), by_nodes=by_nodes
    )
    assert slow > simulated, "compiled code sends for less"


OTHERS = [
    (operation, algorithm)
    for operation in ("broadcast", "reduce", "reduce_scatter", "allgather")
    for algorithm in selection.ALGORITHMS[operation]
    if algorithm != "native"
]

# One core for the six ranks of three nodes.
CROWDED = {"cores": 1, "nodes_per_host": 3}


@pytest.mark.parametrize("how", [{}, CROWDED], ids=["a core each", "one core"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("algorithm", sorted(selection.ALGORITHMS["allreduce"].keys() - {"native"}))
def test_the_bits_and_the_seconds_are_those_of_ranks_that_run(algorithm, dtype, how):
    size, leaders = 6, (0, 0, 2, 2, 4, 4)
    cluster = SimulatedCluster(size, 3, MACHINE, **how)
    assert cluster.leaders() == leaders
    arrays = [np.random.default_rng(r).normal(size=70_001).astype(dtype) for r in range(size)]

    def simulated(access):
        over = access.levels if algorithm == "hierarchical" else access.transport
        buffer = arrays[access.transport.rank].copy()
        memory = access.memory.holding(buffer)
        selection.ALGORITHMS["allreduce"][algorithm].run(over, memory, cc.SUM, LIMIT)
        return buffer

    real = inprocess.run_ranks(
        size,
        lambda comm: comm.allreduce(arrays[comm.rank], op=cc.SUM, algorithm=algorithm),
        leaders=leaders,
        settings=SETTINGS,
    )
    ended = ranks.run(cluster, simulated, payload=True)
    for rank in ended:
        np.testing.assert_array_equal(rank.result, real[0])
    hollow = calls.seconds("allreduce", algorithm, arrays[0].nbytes, cluster)
    assert hollow == pytest.approx(max(rank.seconds for rank in ended), rel=1e-3)
    if how:
        # Where arrays are small the lines do not decide.
        shared, alone = (
            calls.seconds("allreduce", algorithm, 800, each)
            for each in (cluster, SimulatedCluster(size, 3, MACHINE))
        )
        assert shared > 2 * alone


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("operation", "algorithm"), OTHERS, ids=map("-".join, OTHERS))
def test_the_bits_of_the_other_operations_are_those_of_ranks_that_run(operation, algorithm, dtype):
    size, root, leaders = 6, 4, (0, 0, 2, 2, 4, 4)
    # Rows of several elements, not alike on all ranks where that may be.
    count = 6 * 1001 + (3 if operation in ("broadcast", "reduce") else 0)
    arrays = [np.random.default_rng(rank).normal(size=count).astype(dtype) for rank in range(size)]
    bounds = topology.chunk_bounds(count, size)
    run = selection.ALGORITHMS[operation][algorithm].run

    def own(rank):
        return slice(bounds[rank], bounds[rank + 1])

    def simulated(access):
        rank = access.transport.rank
        over = access.levels if algorithm == "hierarchical" else access.transport
        buffer = arrays[rank].copy()
        memory = access.memory.holding(buffer)
        if operation == "broadcast":
            run(over, memory, root, LIMIT)
        elif operation == "reduce":
            run(over, memory, cc.SUM, root, LIMIT)
            return buffer if rank == root else None
        elif operation == "reduce_scatter":
            run(over, memory, bounds, cc.SUM, LIMIT)
            return buffer[own(rank)]
        else:
            run(over, memory, bounds, LIMIT)
        return buffer

    def real(comm):
        x, how = arrays[comm.rank], {"algorithm": algorithm}
        if operation == "broadcast":
            return comm.broadcast(x, root, **how)
        if operation == "reduce":
            return comm.reduce(x, root, op=cc.SUM, **how)
        if operation == "reduce_scatter":
            return comm.reduce_scatter(x, op=cc.SUM, **how)
        return comm.allgather(x[own(comm.rank)], **how)

    expected = inprocess.run_ranks(size, real, leaders=leaders, settings=SETTINGS)
    ended = ranks.run(SimulatedCluster(size, 3, MACHINE), simulated, payload=True)
    assert ranks.first_error(ended) is None
    for rank, bits in zip(ended, expected, strict=True):
        if bits is None:
            assert rank.result is None
        else:
            assert rank.result.dtype == bits.dtype
            np.testing.assert_array_equal(rank.result, bits)


def working(milliseconds):
    """A program that computes, and exchanges nothing."""
    return lambda transport: transport.simulated.advance(milliseconds / 1e3)


@pytest.mark.parametrize(
    ("how", "ends"),
    [
        ({}, [1, 1, 1, 1]),
        ({"cores": 2}, [1, 1, 1, 1]),  # of each node, which has one rank
        ({"cores": 1, "nodes_per_host": 2}, [1, 2, 1, 2]),
        ({"cores": 2, "nodes_per_host": 4}, [1, 1, 2, 2]),
        ({"cores": 3, "nodes_per_host": 4}, [1, 1, 1, 2]),
    ],
)
def test_ranks_share_the_cores_of_their_host(how, ends):
    _, seconds = run(4, 4, working(1), **how)
    assert seconds == pytest.approx([end / 1e3 for end in ends])


def test_ranks_that_fill_the_cores_of_their_node_give_theirs_away_at_once():
    assert SimulatedCluster(4, 2, MACHINE, cores=2).waiting is YIELDING
    assert SimulatedCluster(4, 4, MACHINE, cores=2, nodes_per_host=4).waiting is POLLING
    assert YIELDING.python.polls == YIELDING.eager.polls == 0 < POLLING.eager.polls


def test_a_byte_takes_processors_only_where_they_are_shared():
    program = send_once(1_000_000, [(1, 0)])
    _, alone = run(2, 2, program, cores=2, nodes_per_host=2, copying=1e-9)
    assert run(2, 2, program)[1] == pytest.approx(alone)
    how = {"cores": 1, "nodes_per_host": 2}
    _, free = run(2, 2, program, copying=0.0, **how)
    _, shared = run(2, 2, program, copying=1e-9, **how)
    # The first piece before it goes, the last one when it has come; the sender copies all.
    assert shared[0] == pytest.approx(free[0] + 2 * 65_536e-9)
    assert shared[1] == pytest.approx(free[1] + 1e-3)


@pytest.mark.parametrize("pairs", [[(1, 0)], [(1, 0), (3, 2)]])
def test_bytes_of_all_nodes_pass_the_cores_of_their_host(pairs):
    program = send_once(1_000_000, pairs)
    how = {"cores": 1, "copying": 0.0, "together": 1.5e-8}
    _, alone = run(4, 4, program, nodes_per_host=4, **how | {"together": 0.0})
    _, on_one = run(4, 4, program, nodes_per_host=4, **how)
    _, on_two = run(4, 4, program, nodes_per_host=2, **how)
    byte = 2 * 1.5e-8 * len(pairs)  # for both of its programs
    assert on_one[0] == pytest.approx(alone[0] + 1e6 * (byte - 1e-8), rel=1e-3)
    assert on_two[0] == pytest.approx(alone[0] + 1e6 * (2 * 1.5e-8 - 1e-8), rel=1e-3)
    _, apart = run(4, 4, program, nodes_per_host=1, **how)  # a core for each: nobody shares
    assert apart == pytest.approx(run(4, 4, program)[1])


def test_who_waits_polls_for_a_while_and_then_lets_another_rank_have_the_core():
    waits = POLLING._replace(python=WaitingRank(polls=30e-6, look=2e-6, resume=5e-6))
    how = {"cores": 1, "nodes_per_host": 2, "waits": waits, "copying": 0.0}
    _, alone = run(2, 2, send_once(1000, [(1, 0)]))
    _, shared = run(2, 2, send_once(1000, [(1, 0)]), **how)
    turn = 2e-6 / 2  # half of a look of rank 0, which waits
    assert shared[1] == pytest.approx(alone[1] + 30e-6 + turn)
    assert shared[0] == pytest.approx(alone[0] + 30e-6 + turn + 5e-6)  # and finds its message
    # What comes while a rank still polls finds it on its core.
    how["cores"] = 2
    assert run(2, 2, send_once(1000, [(1, 0)]), **how)[1] == pytest.approx(alone)


@pytest.mark.parametrize("algorithm", ["tree", None])
def test_a_whole_call_has_its_comparison_and_what_python_takes(algorithm):
    def seconds(call=0.0, calls_=1):
        machine = MACHINE._replace(network=MACHINE.network._replace(call=call, eager=2e-6))
        cluster = SimulatedCluster(4, 4, machine)
        return calls.simulate_check(algorithm, 4000, cluster, by_nodes=False, calls=calls_), cluster

    plain, cluster = seconds()
    compared = calls.simulate_sequence(4000 if algorithm is None else 0, cluster, by_nodes=False)
    moved = 0.0 if algorithm is None else calls.seconds("allreduce", algorithm, 4000, cluster)
    assert plain == pytest.approx(compared + moved, rel=0.2)
    assert seconds(call=1e-3)[0] == pytest.approx(plain + (0.0 if algorithm is None else 1e-3))
    assert seconds(calls_=4)[0] == pytest.approx(plain, rel=0.2)


def test_noise_is_the_same_for_the_same_seed_and_slow_ranks_are_waited_for():
    def seconds(**how):
        cluster = SimulatedCluster(8, 8, MACHINE, **how)
        return calls.seconds("allreduce", "ring", 8000, cluster)

    plain = seconds()
    assert seconds(noise=0.3, seed=1) == seconds(noise=0.3, seed=1) != seconds(noise=0.3, seed=2)
    assert seconds(slow={3: 500.0}) > 5 * plain


@pytest.mark.parametrize("how", [{}, {"cores": 2, "nodes_per_host": 4}], ids=["a core each", "two"])
def test_a_dead_rank_is_named_on_all_others(how):
    cluster = SimulatedCluster(4, 4, MACHINE, deaths={2: 50e-6}, **how)

    def program(access):
        for _ in range(100):
            ring.allreduce(access.transport, access.memory.empty(1000, np.dtype("f4")), cc.SUM,
                           LIMIT)  # fmt: skip

    ended = ranks.run(cluster, program, payload=False)
    assert [rank.died for rank in ended] == [False, False, True, False]
    for number in (0, 1, 3):
        error = ended[number].error
        assert isinstance(error, cc.PeerFailure)
        assert str(error) == f"test: rank 2 died (rank {number} of 4)"


def test_who_waits_in_vain_is_told_at_once():
    program = send_once(10, [(0, 1)])
    with pytest.raises(cc.CollectiveTimeout, match="waiting for rank 0 to send 10 bytes .rank 1"):
        run(2, 2, lambda transport: program(transport) if transport.rank else None)


def test_lengths_that_differ_are_an_error():
    def program(transport):
        transport.exchange(
            np.zeros(4 + transport.rank), 1 - transport.rank, np.zeros(4), 1 - transport.rank, LIMIT
        )

    with pytest.raises(cc.MismatchError, match="expected 32 bytes, got 40 .rank 0 of 2"):
        run(2, 2, program)


def test_an_error_of_a_program_is_the_first_one():
    def program(transport):
        if transport.rank == 1:
            raise KeyError("mine")
        transport.receive(np.zeros(1), 1, LIMIT)

    with pytest.raises(KeyError, match="mine"):
        run(3, 3, program)


def test_a_simulation_stops_when_it_has_taken_its_time():
    cluster = SimulatedCluster(64, 64, MACHINE)
    with pytest.raises(Stopped):
        calls.seconds("allreduce", "ring", 1 << 20, cluster, within=1e-6)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"num_nodes": 9}, "expected 1 <= nodes <= ranks"),
        ({"nodes_per_switch": 0}, "nodes below a switch"),
        ({"oversubscription": 0.0}, "oversubscription"),
        ({"noise": -0.5}, "noise"),
        ({"burst": -1}, "burst"),
        ({"cores": 0}, "one or more cores"),
        ({"nodes_per_host": 0}, "nodes on a host"),
        ({"waits": POLLING._replace(python=WaitingRank(-1e-6, 0, 0))}, "python's polls >= 0"),
        ({"waits": POLLING._replace(eager=WaitingRank(0, float("inf"), 0))}, "eager's look"),
        ({"copying": -1.0}, "copying >= 0"),
        ({"together": -1.0}, "together >= 0"),
        ({"seed": -1}, "a seed of 0 or more"),
        ({"slow": {1: -1.0}}, "slowness of rank 1"),
        ({"deaths": {4: 1.0}}, "rank 4"),
    ],
)
def test_a_cluster_that_makes_no_sense_is_refused(how, message):
    with pytest.raises(ValueError, match=message):
        SimulatedCluster(**{"size": 4, "num_nodes": 4, **how})
