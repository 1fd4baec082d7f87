"""Schedules as integers, for 1 to 33 ranks, without sending anything."""

from __future__ import annotations

import math

import pytest

from collectives import topology

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
