"""Schedules as integers, for 1 to 33 ranks, without sending anything."""

import math
import re

import pytest

from collectives.core import topology

SIZES = range(1, 34)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 2, 7, 32, 33, 100])
def test_chunks_cover_all_elements_once_and_differ_by_at_most_one(count, size):
    bounds = topology.chunk_bounds(count, size)
    lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    assert (bounds[0], bounds[-1], len(lengths)) == (0, count, size)
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("steps", [topology.ring_reduce_scatter, topology.ring_allgather])
def test_every_ring_step_receives_what_the_left_neighbour_sends(steps, size):
    schedules = [list(steps(rank, size)) for rank in range(size)]
    for rank in range(size):
        left, right = topology.ring_neighbours(rank, size)
        assert topology.ring_neighbours(left, size)[1] == rank
        assert topology.ring_neighbours(right, size)[0] == rank
        assert len(schedules[rank]) == size - 1
        for own, theirs in zip(schedules[rank], schedules[left], strict=True):
            assert own.receive == theirs.send


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("steps", [topology.ring_reduce_scatter, topology.ring_allgather])
def test_a_ring_sends_on_what_it_has_just_received(steps, size):
    # The pipeline of slices rests on this.
    for rank in range(size):
        schedule = list(steps(rank, size))
        for now, after in zip(schedule, schedule[1:], strict=False):
            assert after.send == now.receive


@pytest.mark.parametrize("size", SIZES)
def test_ring_reduce_scatter_brings_every_contribution_once_to_the_owner(size):
    # holds[rank][chunk]: ranks whose contribution is in this rank's copy of the chunk
    holds = [[{rank} for _ in range(size)] for rank in range(size)]
    schedules = [list(topology.ring_reduce_scatter(rank, size)) for rank in range(size)]
    for step in range(size - 1):
        sent = [set(holds[r][schedules[r][step].send]) for r in range(size)]
        for rank in range(size):
            left, _ = topology.ring_neighbours(rank, size)
            chunk = schedules[rank][step].receive
            assert not holds[rank][chunk] & sent[left]
            holds[rank][chunk] |= sent[left]
    for rank in range(size):
        assert holds[rank][rank] == set(range(size))


@pytest.mark.parametrize("size", SIZES)
def test_ring_allgather_brings_every_chunk_to_every_rank(size):
    has = [{rank} for rank in range(size)]
    schedules = [list(topology.ring_allgather(rank, size)) for rank in range(size)]
    for step in range(size - 1):
        for rank in range(size):
            assert schedules[rank][step].send in has[rank]
        for rank in range(size):
            has[rank].add(schedules[rank][step].receive)
    assert all(h == set(range(size)) for h in has)


@pytest.mark.parametrize("size", SIZES)
def test_a_prefix_brings_every_rank_those_before_it_once(size):
    has = [[rank] for rank in range(size)]
    schedules = [list(topology.prefix(rank, size)) for rank in range(size)]
    assert {len(steps) for steps in schedules} == {(size - 1).bit_length()}
    for steps in zip(*schedules, strict=True):
        before = [list(ranks) for ranks in has]
        for rank, step in enumerate(steps):
            if step.dest is not None:
                assert steps[step.dest].source == rank
            if step.source is not None:
                assert steps[step.source].dest == rank
                has[rank] = before[step.source] + before[rank]
    assert has == [list(range(rank + 1)) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_tree_reaches_every_rank_once_in_logarithmic_depth(size):
    for root in {0, 1 % size, size // 2, size - 1}:
        trees = [topology.binomial_tree(rank, size, root) for rank in range(size)]
        assert trees[root].parent is None
        for rank in range(size):
            for child in trees[rank].children:
                assert trees[child].parent == rank
        assert sum(len(tree.children) for tree in trees) == size - 1
        depths = {root: 0}
        while len(depths) < size:
            depths |= {c: depths[r] + 1 for r in list(depths) for c in trees[r].children}
        assert max(depths.values()) <= math.ceil(math.log2(size)) if size > 1 else True


@pytest.mark.parametrize("size", SIZES)
def test_a_subtree_is_a_run_of_ranks_counted_from_the_root(size):
    for root in {0, size // 2, size - 1}:

        def members(rank, root=root):
            tree = topology.binomial_tree(rank, size, root)
            return {rank}.union(*(members(child) for child in tree.children))

        for rank in range(size):
            span = topology.binomial_tree(rank, size, root).span
            assert members(rank) == {(rank + i) % size for i in range(span)}


@pytest.mark.parametrize("size", SIZES)
def test_double_trees_reach_every_rank_and_share_the_work(size):
    for root in {0, 1 % size, size // 2, size - 1}:
        places = [topology.double_tree(rank, size, root) for rank in range(size)]
        for trees in zip(*places, strict=True):
            assert trees[root].parent is None
            assert len(trees[root].children) == min(1, size - 1)
            assert sorted(c for tree in trees for c in tree.children) == [
                rank for rank in range(size) if rank != root
            ]
            depths = {root: 0}
            for rank, tree in enumerate(trees):
                assert len(tree.children) <= 2
                assert all(trees[child].parent == rank for child in tree.children)
            while len(depths) < size:
                depths |= {c: depths[r] + 1 for r in list(depths) for c in trees[r].children}
            assert max(depths.values()) <= (size - 1).bit_length()
        for rank, (one, other) in enumerate(places):
            assert rank == root or not (one.children and other.children)


def test_children_come_in_the_order_of_growing_subtrees():
    tree = topology.binomial_tree(0, 33, 0)
    spans = [topology.binomial_tree(child, 33, 0).span for child in tree.children]
    assert spans[:-1] == sorted(spans[:-1])
    assert tree.children == (1, 2, 4, 8, 16, 32)


def test_nodes_are_numbered_by_their_lowest_rank():
    leaders = [7, 3, 7, 3, 3]  # ranks 0 and 2 on one node, the others on another
    assert [topology.nodes(leaders, rank) for rank in range(5)] == [
        topology.Nodes(0, 2, 0, 2),
        topology.Nodes(0, 3, 1, 2),
        topology.Nodes(1, 2, 0, 2),
        topology.Nodes(1, 3, 1, 2),
        topology.Nodes(2, 3, 1, 2),
    ]


@pytest.mark.parametrize("size", SIZES)
def test_a_cyclic_run_is_cut_where_it_begins_again(size):
    for first in range(size):
        for count in range(size + 1):
            parts = topology.unwrapped(first, count, size)
            assert all(parts), "an empty part"
            assert [c for part in parts for c in part] == [(first + i) % size for i in range(count)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("steps", [topology.halving_reduce_scatter, topology.doubling_allgather])
def test_every_halving_step_receives_what_the_source_sends_to_this_rank(steps, size):
    schedules = [list(steps(rank, size)) for rank in range(size)]
    for rank in range(size):
        assert len(schedules[rank]) == math.ceil(math.log2(size))
        assert sum(step.chunks for step in schedules[rank]) == size - 1
        for number, step in enumerate(schedules[rank]):
            theirs = schedules[step.source][number]
            assert (theirs.dest, theirs.send, theirs.chunks) == (rank, step.receive, step.chunks)
            sent = {(step.send + i) % size for i in range(step.chunks)}
            received = {(step.receive + i) % size for i in range(step.chunks)}
            assert not sent & received, "both happen at once"


@pytest.mark.parametrize("size", SIZES)
def test_halving_brings_every_contribution_once_to_the_owner(size):
    holds = [[{rank} for _ in range(size)] for rank in range(size)]
    schedules = [list(topology.halving_reduce_scatter(rank, size)) for rank in range(size)]
    for number in range(len(schedules[0])):
        before = [[set(chunk) for chunk in chunks] for chunks in holds]
        for rank in range(size):
            step = schedules[rank][number]
            for i in range(step.chunks):
                chunk = (step.receive + i) % size
                assert not holds[rank][chunk] & before[step.source][chunk]
                holds[rank][chunk] |= before[step.source][chunk]
    for rank in range(size):
        assert holds[rank][rank] == set(range(size))


@pytest.mark.parametrize("size", SIZES)
def test_halving_never_touches_a_chunk_that_it_has_sent(size):
    # The sends are waited for at the end only.
    for rank in range(size):
        sent = set()
        for step in topology.halving_reduce_scatter(rank, size):
            assert not sent & {(step.receive + i) % size for i in range(step.chunks)}
            sent |= {(step.send + i) % size for i in range(step.chunks)}


@pytest.mark.parametrize("size", SIZES)
def test_doubling_allgather_brings_every_chunk_to_every_rank(size):
    has = [{rank} for rank in range(size)]
    schedules = [list(topology.doubling_allgather(rank, size)) for rank in range(size)]
    for number in range(len(schedules[0])):
        before = [set(chunks) for chunks in has]
        for rank in range(size):
            step = schedules[rank][number]
            received = {(step.receive + i) % size for i in range(step.chunks)}
            assert received <= before[step.source]
            assert not received & before[rank], "received twice"
            has[rank] |= received
    assert all(chunks == set(range(size)) for chunks in has)


@pytest.mark.parametrize("size", SIZES)
def test_doubling_combines_everything_once_and_alike_on_all_ranks(size):
    parts = [topology.doubling(rank, size) for rank in range(size)]
    value = [str(rank) for rank in range(size)]  # how the contributions were combined
    for rank, part in enumerate(parts):
        if part.guest is not None:
            assert parts[part.guest].proxy == rank
            value[rank] = f"({rank}+{part.guest})"
        if part.proxy is not None:
            assert parts[part.proxy].guest == rank
            assert not part.partners
    active = [rank for rank in range(size) if parts[rank].proxy is None]
    assert len(active) == 1 << (size.bit_length() - 1)
    for level in range(len(active).bit_length() - 1):
        before = list(value)
        for rank in active:
            partner = parts[rank].partners[level]
            assert parts[partner].partners[level] == rank
            value[rank] = f"({before[min(rank, partner)]}+{before[max(rank, partner)]})"
    assert len({value[rank] for rank in active}) == 1
    order = [int(digits) for digits in re.findall(r"\d+", value[active[0]])]
    assert order == list(range(size))


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_of_a_rail_agree_on_it_and_have_the_same_local_rank(size):
    for leaders in ([0] * size, list(range(size)), [r // 2 for r in range(size)],
                    [r % 3 for r in range(size)], [min(r, 2) for r in range(size)]):  # fmt: skip
        rails = [topology.rails(leaders, rank) for rank in range(size)]
        places = [topology.nodes(leaders, rank) for rank in range(size)]
        smallest = min(place.local_size for place in places)
        for rank in range(size):
            assert rails[rank].number == smallest
            assert rails[rank].node[places[rank].local_rank] == rank
            assert len(rails[rank].node) == places[rank].local_size
            if places[rank].local_rank >= smallest:
                assert rails[rank].rail is None
                continue
            assert rails[rank].rail[places[rank].node_rank] == rank
            assert len(rails[rank].rail) == places[rank].num_nodes
            for other in rails[rank].rail:
                assert rails[other].rail == rails[rank].rail
                assert places[other].local_rank == places[rank].local_rank
