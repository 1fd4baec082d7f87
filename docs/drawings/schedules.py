"""Algorithms step by step, drawn from the schedules that they follow (`collectives.core.topology`).

Every rank has a row of chunks, and in each chunk the ranks whose numbers it has added up so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from canvas import Canvas
from collectives.core import topology

_CHUNK, _ROW, _LEFT, _TOP, _GAP = 40, 74, 148, 84, 20  # pixels


class Message(NamedTuple):
    """Chunks on their way; they replace what is there, or are added to it."""

    source: int
    dest: int
    chunks: Sequence[int]
    add: bool


def ring() -> Canvas:
    """Draw an all-reduce of 4 ranks around the ring."""
    size = 4
    steps = []
    for add, schedule in ((True, topology.ring_reduce_scatter), (False, topology.ring_allgather)):
        plans = [list(schedule(rank, size)) for rank in range(size)]
        for number in range(size - 1):
            moves = [
                Message(rank, topology.ring_neighbours(rank, size)[1], [plan[number].send], add)
                for rank, plan in enumerate(plans)
            ]
            steps.append(("reduce-scatter" if add else "all-gather", moves))
    return _table(
        size,
        steps,
        "Ring: all-reduce of 4 ranks",
        "Six steps. In each, every rank sends one chunk to its right neighbour. In the first three "
        "the chunk is added to the receiver's own, after which each rank has one complete chunk; "
        "in the last three the complete chunks travel around unchanged.",
    )


def halving() -> Canvas:
    """Draw an all-reduce of 3 ranks by halving and doubling."""
    size = 3
    steps = []
    for add, schedule in (
        (True, topology.halving_reduce_scatter),
        (False, topology.doubling_allgather),
    ):
        plans = [list(schedule(rank, size)) for rank in range(size)]
        for number in range(len(plans[0])):
            moves = []
            for rank, plan in enumerate(plans):
                step = plan[number]
                chunks = [(step.send + i) % size for i in range(step.chunks)]
                moves.append(Message(rank, step.dest, chunks, add))
            steps.append(("halving" if add else "doubling", moves))
    return _table(
        size,
        steps,
        "Halving and doubling: all-reduce of 3 ranks",
        "Four rounds for three ranks. In the first two every rank hands on about half of the "
        "chunks that it is in charge of, which are added to the receiver's, until it has one "
        "complete chunk. In the last two the complete chunks spread the same way backwards.",
    )


def doubling() -> Canvas:
    """Draw an all-reduce of 5 ranks by recursive doubling."""
    size = 5
    parts = [topology.doubling(rank, size) for rank in range(size)]
    guests = [(part.proxy, rank) for rank, part in enumerate(parts) if part.proxy is not None]
    steps = [("to the proxy", [Message(guest, proxy, [0], True) for proxy, guest in guests])]
    for number in range(len(parts[0].partners)):
        moves = [
            Message(rank, part.partners[number], [0], True)
            for rank, part in enumerate(parts)
            if part.partners
        ]
        steps.append(("exchange", moves))
    steps.append(("and back", [Message(proxy, guest, [0], False) for proxy, guest in guests]))
    return _table(
        size,
        steps,
        "Recursive doubling: all-reduce of 5 ranks",
        "Rank 1, the one too many for a power of two, hands its array to rank 0. The other four "
        "exchange whole arrays with one partner and then with another, at twice the distance. At "
        "last rank 1 gets the result from rank 0.",
        chunks=1,
    )


def _table(
    size: int,
    steps: list[tuple[str, list[Message]]],
    title: str,
    text: str,
    chunks: int | None = None,
) -> Canvas:
    """Draw every rank's chunks before and after each step; as many as ranks where not said."""
    number_of_chunks = size if chunks is None else chunks
    width = number_of_chunks * _CHUNK
    across = width + (_GAP if number_of_chunks > 1 else 2 * _GAP)
    canvas = Canvas(_LEFT + size * across, _TOP + _ROW * (len(steps) + 1), title, text)
    for rank in range(size):
        canvas.text(_LEFT + rank * across + width / 2, 62, f"rank {rank}", "ink middle")
    has = [[{rank} for _ in range(number_of_chunks)] for rank in range(size)]
    for row in range(len(steps) + 1):
        y = _TOP + row * _ROW
        label = steps[row - 1][0] if row else "at first"
        canvas.text(20, y + 18, label)
        if row:
            canvas.text(20, y + 34, f"step {row} of {len(steps)}", "soft small")
        for rank in range(size):
            for chunk in range(number_of_chunks):
                ranks = has[rank][chunk]
                whole = len(ranks) == size
                words = "all" if whole else "".join(map(str, sorted(ranks)))
                x = _LEFT + rank * across + chunk * _CHUNK
                canvas.box(x, y, _CHUNK - 3, 26, words, f"h{chunk}" if whole else "empty")
        if row == len(steps):
            break
        moves = steps[row][1]
        before = [[set(chunk) for chunk in rank] for rank in has]
        for source, dest, moved, add in moves:
            for chunk in moved:
                here = _LEFT + source * across + chunk * _CHUNK + _CHUNK / 2
                there = _LEFT + dest * across + chunk * _CHUNK + _CHUNK / 2
                canvas.arrow(here, y + 27, there, y + _ROW - 2)
                arrived = before[source][chunk]
                has[dest][chunk] = has[dest][chunk] | arrived if add else set(arrived)
    return canvas


def tree() -> Canvas:
    """Draw a broadcast to 8 ranks down the binomial tree."""
    size, root = 8, 0
    canvas = Canvas(
        560,
        350,
        "Binomial tree: broadcast to 8 ranks",
        "Rank 0 sends to rank 4 in round 1, to rank 2 in round 2 and to rank 1 in round 3, while "
        "ranks that have the array already send it on: after three rounds all eight have it. A "
        "reduction goes the same way upwards.",
    )
    leaves = iter(range(size))

    def draw(rank: int, began: int) -> tuple[float, float]:
        """Draw a rank below its children's lines; returns the middle of its upper edge."""
        children = topology.binomial_tree(rank, size, root).children[::-1]  # the largest first
        rounds = [began + number + 1 for number in range(len(children))]
        ends = [draw(*child) for child in zip(children, rounds, strict=True)]
        x = sum(x for x, _ in ends) / len(ends) if ends else 80 + 130 * next(leaves)
        y = 60 + 80 * bin(rank).count("1")
        for (x1, y1), number in zip(ends, rounds, strict=True):
            canvas.arrow(x, y + 30, x1, y1 - 2)
            canvas.text((x + x1) / 2 + 8, (y + y1 + 38) / 2, f"round {number}", "soft small")
        canvas.box(x - 24, y, 48, 30, str(rank), f"h{began}")
        return x, y

    draw(root, 0)
    return canvas


def double_tree() -> Canvas:
    """Draw the two binary trees of 7 ranks, each for one half of an array."""
    size, root, wide, left = 7, 0, 62, 24
    canvas = Canvas(
        2 * left + 12 * wide + 60,
        370,
        "Double tree: broadcast to 7 ranks",
        "Two binary trees hang below rank 0, one for each half of the array. Who has children in "
        "one tree is a leaf in the other, but for the root: so every rank sends about as much as "
        "it receives. In the first tree rank 0 sends to rank 4, that to 2 and 6, these to 1, 3 and "
        "5; in the second 0 to 3, that to 1 and 5, these to 6, 2 and 4.",
    )
    for tree, name in enumerate(("first half", "second half")):
        begin = left + tree * (6 * wide + 60)
        places = [topology.double_tree(rank, size, root)[tree] for rank in range(size)]
        canvas.text(begin, 62, name, "soft")
        columns = iter(range(size - 1))

        def draw(rank: int, depth: int, begin=begin, places=places, columns=columns, hue=tree):
            """Draw a rank below its children's lines; returns the middle of its upper edge."""
            children = places[rank].children
            before = [draw(child, depth + 1) for child in children[:1]]
            x = before[0][0] if rank == root else begin + wide * (next(columns) + 0.5)
            ends = [*before, *(draw(child, depth + 1) for child in children[1:])]
            y = 80 + 80 * depth
            for end in ends:
                canvas.arrow(x, y + 30, end[0], end[1] - 2)
            canvas.box(x - 22, y, 44, 30, str(rank), f"h{hue}" if children else "empty")
            return x, y

        draw(root, 0)
    return canvas


def hierarchical() -> Canvas:
    """Draw an all-reduce of two nodes with two ranks each."""
    canvas = Canvas(
        720,
        330,
        "Hierarchical: two nodes, two ranks each",
        "First the ranks of each node reduce in shared memory, each one chunk. Then equal local "
        "ranks of the two nodes, which form a rail, reduce their chunk over the network, both "
        "rails at once. At last each node gathers the chunks in shared memory.",
    )
    stages = [
        ("1  reduce-scatter in each node", "shared memory"),
        ("2  all-reduce on each rail", "network: each byte crosses once"),
        ("3  all-gather in each node", "shared memory"),
    ]
    columns = (290, 390, 530, 630)
    for name, x in zip(("a0", "a1", "b0", "b1"), columns, strict=True):
        canvas.text(x + 30, 62, f"rank {name}", "ink middle")
    for number, (name, where) in enumerate(stages):
        y = 84 + 80 * number
        canvas.text(20, y + 22, name)
        canvas.text(20, y + 40, where, "soft small")
        for place, x in enumerate(columns):
            if number == 0:
                canvas.box(x, y, 28, 40, "0", "h0" if place % 2 == 0 else "empty")
                canvas.box(x + 32, y, 28, 40, "1", "h1" if place % 2 else "empty")
            elif number == 1:
                canvas.box(x, y, 60, 40, f"chunk {place % 2}"[-7:], f"h{place % 2}")
            else:
                canvas.box(x, y, 28, 40, "0", "h0")
                canvas.box(x + 32, y, 28, 40, "1", "h1")
        if number != 1:
            for x in (columns[0], columns[2]):
                canvas.arrow(x + 62, y + 14, x + 98, y + 14)
                canvas.arrow(x + 98, y + 28, x + 62, y + 28)
    for rail, y in ((0, 214), (1, 226)):
        left, right = columns[rail] + 30, columns[2 + rail] + 30
        canvas.line(left, 204, left, y)
        canvas.line(left, y, right, y)
        canvas.arrow(right, y, right, 205)
        canvas.arrow(left, 212, left, 205)
    return canvas
