"""Selection of the node engine's kernel, with its cost model.

All ranks of a node choose the same, so by what all of them know: bytes, ranks, cores, the kind of
combining; never by what one of them has measured.
"""

from __future__ import annotations

from collectives.core.links import LinkCost

__all__ = [
    "ONE_SHOT_BYTES",
    "ONE_SHOT_BYTES_CROWDED",
    "ONE_SHOT_BYTES_OF_TWO",
    "SLOT_BYTES",
    "publish_seconds",
    "reduce_seconds",
    "select",
]

# Bytes of a slot: large, so that ranks wait for each other seldom, but a rank's two stay in its
# level 2 cache. Time of a private all-reduce over that of all ranks copying as much, 2 ranks, for
# slots of 256 KiB, 512 KiB, 1 MiB, 2 MiB: arrays of 1 MiB 1.95 1.91 2.15 2.12, of 2 MiB 1.96 1.78
# 1.60 2.27, of 4 MiB 2.14 1.82 1.74 1.84, of 16 MiB 1.99 1.93 1.94 2.12. Where that cache has 512
# KiB (near cores of a Zen 3), over the time with slots of 512 KiB, for 64 KiB, 128 KiB, 256 KiB,
# 1 MiB: of 1 MiB 1.42 1.24 1.03 1.10, of 4 MiB 1.28 1.13 0.96 1.16, of 16 MiB 0.98 0.94 0.92 1.12.
SLOT_BYTES = 1 << 19

# Bytes of an array up to which every rank adds everything itself, with one wait instead of two. One
# shot / pipelined, in us, medians (`benchmarks/allreduce.py` has the peers): 2 ranks on 2 cores
# 8 KiB 0.90 / 1.17, 16 KiB 1.31 / 1.19, 64 KiB 5.7 / 3.6; 4 ranks on 2 cores, where a wait costs a
# change of process, 8 KiB 4.4 / 6.2, 64 KiB 31 / 41, 128 KiB 80 / 52.
ONE_SHOT_BYTES, ONE_SHOT_BYTES_CROWDED = 1 << 13, 1 << 16

# Of two ranks, each of which reads its own array where it is, so that as many bytes pass from core
# to core as by halves; both add, divide and round it, in one loop. How many times as fast as
# pipelined, two near cores of an AMD EPYC, arrays written anew before each call, in place /
# elsewhere, in two hours between which the host has halved the rate of both: 16 KiB 1.42 1.33 /
# 1.23 1.23, 64 KiB 1.19 1.28 / 1.00 1.17, 256 KiB 1.14 1.27 / 0.93 1.14, 512 KiB 0.99 1.22 / 0.94
# 1.21; float16 and bfloat16 in place 64 KiB 1.10, 256 KiB 0.96 to 1.12, 512 KiB to 1 MiB 0.92 to
# 1.00, 4 MiB 0.95 to 1.02, 16 MiB 0.82 to 0.91 (`direct`). Stored past the caches, though near: 64
# KiB 1.19 / 1.03, 256 KiB 1.04 to 1.08 / 0.88 to 0.90; by parts, each read while the next is put,
# no size is faster.
ONE_SHOT_BYTES_OF_TWO = 1 << 18


def select(nbytes: float, ranks: int, *, crowded: bool = False, halves: bool = False) -> str:
    """Return which kind of call reduces private arrays for all, by what all ranks know.

    Args:
        nbytes: of the array.
        ranks: of the node.
        crowded: whether they outnumber its cores.
        halves: whether the numbers are 16-bit floats, whose sums take longer than their bytes.
    """
    if ranks == 2:
        longer = "pipelined" if halves else "direct"
        return "one_shot" if nbytes <= ONE_SHOT_BYTES_OF_TWO else longer
    most = ONE_SHOT_BYTES_CROWDED if crowded else ONE_SHOT_BYTES
    return "one_shot" if nbytes <= most else "pipelined"


def reduce_seconds(nbytes: float, ranks: int, link: LinkCost) -> float:
    """Return how long a reduction should take among ranks of one node.

    One wait and P parts to read; or in slots, of which a rank combines its chunk, or all of two.
    """
    kind = select(nbytes, ranks)
    if kind == "one_shot":
        return link.alpha + nbytes * link.beta + (ranks - 1) * nbytes * link.gamma
    slots = (1 if kind == "direct" else 2) * nbytes / SLOT_BYTES
    moved = 2 * nbytes * (ranks - 1) / ranks * link.beta
    return (1 + slots) * link.alpha + moved + nbytes * link.gamma


def publish_seconds(nbytes: float, link: LinkCost) -> float:
    """Return how long one rank's bytes should take into the segment and every other's out of it."""
    return (1 + nbytes / SLOT_BYTES) * link.alpha + 2 * nbytes * link.beta
