"""Selection of the node engine's kernel, with its cost model.

All ranks of a node must choose the same kernel. So the choice depends only on facts that are equal
on all ranks (bytes, ranks, cores, dtype), never on a measurement of one rank.
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

# Bytes of a round in a slot: many, so that ranks wait for each other seldom, but two rounds fit
# into a level 2 cache. Time of an all-reduce of private arrays over that of all ranks copying as
# much, 2 ranks:
#     slots of         256 KiB  512 KiB    1 MiB    2 MiB
#     arrays of  1 MiB    1.95     1.91     2.15     2.12
#                2 MiB    1.96     1.78     1.60     2.27
#                4 MiB    2.14     1.82     1.74     1.84
#               16 MiB    1.99     1.93     1.94     2.12
# With a level 2 cache of 512 KiB (near cores of a Zen 3), over the time with slots of 512 KiB:
#     slots of          64 KiB  128 KiB  256 KiB    1 MiB
#     arrays of  1 MiB    1.42     1.24     1.03     1.10
#                4 MiB    1.28     1.13     0.96     1.16
#               16 MiB    0.98     0.94     0.92     1.12
SLOT_BYTES = 1 << 19

# Bytes of an array up to which every rank adds everything itself, with one wait instead of two. One
# shot / pipelined, in us, medians (`benchmarks/allreduce.py` has the peers):
#     2 ranks on 2 cores: 8 KiB 0.90 / 1.17, 16 KiB 1.31 / 1.19, 64 KiB 5.7 / 3.6
#     4 ranks on 2 cores: 8 KiB 4.4 / 6.2, 64 KiB 31 / 41, 128 KiB 80 / 52, because a wait costs a
#     context switch
ONE_SHOT_BYTES, ONE_SHOT_BYTES_CROWDED = 1 << 13, 1 << 16

# The same for two ranks. Each reads its own array in place, so that no more bytes pass between the
# cores than with two halves, and one loop adds, divides and rounds. Speed over pipelined, two near
# cores of an AMD EPYC, arrays written before each call; two runs, between which the host halved the
# rate of both kernels:
#                        in place          elsewhere
#     16 KiB         1.42    1.33       1.23    1.23
#     64 KiB         1.19    1.28       1.00    1.17
#     256 KiB        1.14    1.27       0.93    1.14
#     512 KiB        0.99    1.22       0.94    1.21
# float16 and bfloat16 in place: 64 KiB 1.10, 256 KiB 0.96 to 1.12, 512 KiB to 1 MiB 0.92 to 1.00,
# 4 MiB 0.95 to 1.02, 16 MiB 0.82 to 0.91 (`direct`). With streaming stores between near cores: 64
# KiB 1.19 / 1.03, 256 KiB 1.04 to 1.08 / 0.88 to 0.90. Reading parts while the next is stored is
# faster at no size.
ONE_SHOT_BYTES_OF_TWO = 1 << 18


def select(nbytes: float, ranks: int, *, crowded: bool = False, halves: bool = False) -> str:
    """Return the kernel that reduces private arrays to all ranks.

    Args:
        nbytes: bytes of the array.
        ranks: ranks of the node.
        crowded: whether the ranks outnumber the cores.
        halves: whether elements are 16-bit floats, whose sums take longer than their copies.
    """
    if ranks == 2:
        longer = "pipelined" if halves else "direct"
        return "one_shot" if nbytes <= ONE_SHOT_BYTES_OF_TWO else longer
    most = ONE_SHOT_BYTES_CROWDED if crowded else ONE_SHOT_BYTES
    return "one_shot" if nbytes <= most else "pipelined"


def reduce_seconds(nbytes: float, ranks: int, link: LinkCost) -> float:
    """Return the modelled seconds of a reduction among ranks of one node.

    One shot: one wait, and P parts to read. Pipelined: slot by slot, each rank combines its chunk.
    Direct, on two ranks: slot by slot, each rank combines everything.
    """
    kind = select(nbytes, ranks)
    if kind == "one_shot":
        return link.alpha + nbytes * link.beta + (ranks - 1) * nbytes * link.gamma
    slots = (1 if kind == "direct" else 2) * nbytes / SLOT_BYTES
    moved = 2 * nbytes * (ranks - 1) / ranks * link.beta
    return (1 + slots) * link.alpha + moved + nbytes * link.gamma


def publish_seconds(nbytes: float, link: LinkCost) -> float:
    """Return the modelled seconds to store one rank's bytes in the segment and copy them out."""
    return (1 + nbytes / SLOT_BYTES) * link.alpha + 2 * nbytes * link.beta
