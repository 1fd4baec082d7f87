"""`python -m collectives explain`: predicted times, and the algorithm that "auto" selects.

Needs no MPI, and uses the same links and cost model as "auto".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from collectives.algorithms import selection
from collectives.algorithms.cost_model import RankLayout
from collectives.calls import signature_check
from collectives.core import links, tuning_file
from collectives.core.errors import counted
from collectives.core.settings import Settings, Stores
from collectives.node import kernel_selection
from collectives.tools import byte_sizes

__all__ = [
    "CurvePoint",
    "Question",
    "curve",
    "doubled",
    "facts",
    "ascii_bars",
    "pick",
    "provenance",
    "table",
]

# Operations whose payload may travel with the signature check; others need row counts from it.
_TOGETHER = ("allreduce", "barrier", "broadcast", "reduce", "reduce_scatter", "scatter")

# Columns of the longest bar of a curve; each column is the same factor of time.
_BAR = 30


# Transfers on a node, by kind of call and store setting.
_WAYS = {
    "one_shot": "one round (each rank combines all arrays)",
    "direct": (
        "slots (each rank combines all of both arrays; where one goes elsewhere than in place, a "
        "chunk, and hands the result on)"
    ),
    "pipelined": "chunks (each rank combines one and hands the result on)",
}
_STORED = {
    "auto": "Each rank stores into the caches or past them, as it has measured: `info` says what.",
    "plain": "Each rank stores into the caches: UNISONO_STORES=plain.",
    "streaming": "Each rank stores past the caches: UNISONO_STORES=streaming.",
}


class Question(NamedTuple):
    """The call to explain."""

    operation: str  # a key of `selection.ALGORITHMS`
    nbytes: int  # of the whole array

    def __str__(self) -> str:
        if self.operation == "barrier":
            return self.operation
        return f"{self.operation}, {byte_sizes.size_text(self.nbytes)} bytes"


def table(
    question: Question, layout: RankLayout, known: links.MeasuredMachine, stores: Stores = "auto"
) -> str:
    """Return the modelled time of each algorithm as a table, fastest first.

    Args:
        question: the call.
        layout: the ranks, with the links of `known`.
        known: the links and their sources.
        stores: the store setting.

    Raises:
        ValueError: as `selection.estimate`.
    """
    times = selection.estimate(*question, layout)
    auto, seconds = pick(question, layout)
    rows = [
        f"{question}, {layout}",
        links.table(known),
        f"{'algorithm':<14}{'estimated ms':>12}",
    ]
    fastest = next(iter(times))
    for name, own in times.items():
        marks = ["fastest"] * (name == fastest) + ["picked by auto"] * (name == auto)
        rows.append(f"{name:<14}{1e3 * own:12.4f}  {', '.join(marks)}".rstrip())
    if auto == "node":
        rows += [*_handed_over(question, layout.size), _STORED[stores]]
    elif layout.size > 1:
        compared = 1e3 * signature_check.seconds(0, layout)
        rows.append(f"{'comparison':<14}{compared:12.4f}  of the call, before any of these")
    if auto == "together":
        most = _most_together(question.operation, layout)
        rows.append(
            f"{'together':<14}{1e3 * seconds:12.4f}  picked by auto: up to {most} bytes travel "
            "with the comparison"
        )
    return "\n".join(rows)


def facts(
    question: Question, layout: RankLayout, known: links.MeasuredMachine, most: int | None = None
) -> dict[str, Any]:
    """Return the content of the table, and of the curve up to `most` nodes, for JSON; in seconds.

    Raises:
        ValueError: as `table` and `curve`.
    """
    auto, seconds = pick(question, layout)
    points = [] if most is None else curve(question, layout, most)
    return {
        "operation": question.operation,
        "bytes": question.nbytes,
        "ranks": layout.size,
        "nodes": layout.num_nodes,
        "links": links.facts(known),
        "seconds": selection.estimate(*question, layout),
        "auto": {"algorithm": auto, "seconds": seconds},
        "curve": [
            {name: value for name, value in point._asdict().items() if name != "times"}
            for point in points
        ],
    }


def _handed_over(question: Question, ranks: int) -> list[str]:
    """Describe the kernel that reduces private arrays to all ranks of a node."""
    if question.operation != "allreduce":
        return []
    # 16-bit floats switch kernels at other sizes.
    kinds = [
        kernel_selection.select(question.nbytes, ranks, halves=halves) for halves in (False, True)
    ]
    said = f"Private arrays go in {_WAYS[kinds[0]]}"
    return [said + ("." if kinds[0] == kinds[1] else f", 16-bit floats in {_WAYS[kinds[1]]}.")]


def provenance(configuration: Settings, known: links.MeasuredMachine) -> str:
    """Describe how the links of a tuning file were measured."""
    file = tuning_file.path(configuration)
    # Only if the file is the source of a link.
    if file is None or not any(str(file) in source for source in known.sources):
        return "The links are defaults or settings; `tune` measures those of a cluster."
    facts = tuning_file.metadata(file)
    ranks, nodes, when = (facts.get(name, "?") for name in ("ranks", "nodes", "when"))
    where = f"{counted(ranks, 'rank')} on {counted(nodes, 'node')}"
    return (
        f"The links of the file were measured with {where}, {when}; what more ranks take follows "
        "from messages and bytes, not from a measurement."
    )


class CurvePoint(NamedTuple):
    """Modelled time of a call on a number of nodes."""

    nodes: int
    ranks: int
    auto: str  # choice of "auto": an algorithm, or "together" with the signature check
    seconds: float  # of that choice, with the signature check
    times: dict[str, float]  # of each algorithm, without it


def curve(question: Question, layout: RankLayout, most: int) -> list[CurvePoint]:
    """Return the modelled times of a call on 1, 2, 4 ... nodes.

    Args:
        question: the call.
        layout: number of ranks per node, and links.
        most: nodes of the last point, at least 1, even if it is not a power of two.

    Raises:
        ValueError: as `selection.estimate`, or the nodes have different numbers of ranks.
    """
    if layout.size % layout.num_nodes:
        raise ValueError(f"explain: expected equal nodes with --upto, got {layout}")
    points = []
    for nodes in doubled(most):
        # The same ranks per node, and the same links.
        spread = replace(layout, size=nodes * layout.per_node, num_nodes=nodes)
        times = selection.estimate(*question, spread)
        points.append(CurvePoint(nodes, spread.size, *pick(question, spread), times))
    return points


def doubled(most: int) -> list[int]:
    """Return 1, 2, 4 ... below a number, and the number."""
    return [*(1 << n for n in range((most - 1).bit_length())), most]


def ascii_bars(points: Sequence[CurvePoint]) -> str:
    """Draw a curve as text; equal steps of a bar are equal factors of time."""
    times = [point.seconds for point in points if point.seconds > 0]
    least = min(times, default=1.0)
    # Logarithms, because the times of a curve span powers of ten; equal times must not divide by 0.
    whole = math.log(max(times, default=1.0) / least) or 1.0
    rows = [f"{'nodes':>6}{'ranks':>8}  {'auto':<14}{'estimated ms':>12}"]
    for point in points:
        share = math.log(point.seconds / least) / whole if point.seconds > 0 else 0.0
        rows.append(
            f"{point.nodes:6}{point.ranks:8}  {point.auto:<14}{1e3 * point.seconds:12.4f}  "
            + "#" * (1 + round(share * (_BAR - 1)))
        )
    return "\n".join(rows)


def pick(question: Question, layout: RankLayout) -> tuple[str, float]:
    """Return the choice of "auto", and its modelled seconds with the signature check."""
    auto = selection.automatic(*question, layout)
    seconds = selection.estimate(*question, layout)[auto]
    # The engine compares calls in its own rounds, at no cost.
    if auto == "node" or layout.size == 1:
        return auto, seconds
    if question.nbytes <= _most_together(question.operation, layout):
        return "together", signature_check.seconds(question.nbytes, layout)
    return auto, signature_check.seconds(0, layout) + layout.call + seconds


def _most_together(operation: str, layout: RankLayout) -> int:
    """Return the bytes that may travel with the signature check; -1 if the operation never does."""
    if operation == "allreduce":
        return signature_check.max_piggyback_bytes(layout)
    return signature_check.MAX_PAYLOAD_BYTES if operation in _TOGETHER else -1
