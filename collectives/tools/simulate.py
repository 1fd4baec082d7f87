"""`python -m collectives simulate`: time of a call on a simulated cluster.

The closed forms of `explain` know how many messages an algorithm sends, and no more. Here the
algorithms themselves run, each rank a coroutine, on a clock that only messages, lines and loops
move on (`collectives.simulation`): ranks wait for each other as they would.
"""

from __future__ import annotations

import configparser
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from collectives.algorithms import selection
from collectives.algorithms.cost_model import RankLayout
from collectives.calls import signature_check
from collectives.core import links
from collectives.core.errors import PeerFailure
from collectives.simulation import calls
from collectives.simulation.clock import Stopped
from collectives.simulation.cluster import SimulatedCluster
from collectives.tools import explain
from collectives.tools.explain import Question

__all__ = ["AlgorithmRow", "drawable", "least_seconds", "options_of", "rows", "table", "title"]

# Rows that are not of an algorithm: the comparison of a call, and that with the array in it.
_COMPARISON, _TOGETHER = "comparison", "together"


class AlgorithmRow(NamedTuple):
    """What one algorithm takes.

    Attributes:
        algorithm: its name.
        seconds: on the simulated clock; until it was stopped, if it was.
        stopped: whether it took too long to simulate, or too much memory.
        estimated: seconds by the closed form.
        failed: the error with which it ends where a rank dies; "" if with none.
    """

    algorithm: str
    seconds: float
    stopped: bool
    estimated: float
    failed: str = ""


def rows(question: Question, cluster: SimulatedCluster, within: float) -> list[AlgorithmRow]:
    """Simulate a call by every algorithm that it may have.

    Args:
        question: which call.
        cluster: where.
        within: real seconds that each algorithm may take; then it is stopped.

    Returns:
        Of algorithms, fastest first; those that were stopped, and those in which a rank died, come
        last. Then, where ranks compare their calls by messages, what that takes, and what it takes
        where "auto" lets the array travel with it.

    Raises:
        ValueError: there is no such operation, or a negative size.
        ImportError: greenlet is not installed.
    """
    operation, nbytes = question
    layout = cluster.layout
    estimates = selection.estimate(operation, nbytes, layout)
    found = []
    for name, estimated in estimates.items():
        if name == "node":  # its seconds are the engine's, in either way
            found.append(AlgorithmRow(name, estimated, False, estimated))
        else:
            run = partial(calls.seconds, operation, name, nbytes, cluster)
            found.append(_row(name, estimated, run, within))
    found.sort(key=lambda row: (row.stopped, row.seconds))
    if layout.size == 1 or "node" in estimates:
        return found
    auto, _ = explain.pick(question, layout)
    for name, carried in ((_COMPARISON, 0), (_TOGETHER, nbytes)):
        if name in (_COMPARISON, auto):
            run = partial(
                calls.simulate_sequence, carried, cluster, by_nodes=signature_check.per_node(layout)
            )
            found.append(_row(name, signature_check.seconds(carried, layout), run, within))
    return found


def _row(name: str, estimated: float, run: Callable[..., float], within: float) -> AlgorithmRow:
    """Simulate one row."""
    with tqdm(desc=name, unit=" messages", unit_scale=True, disable=None, leave=False) as bar:
        try:
            return AlgorithmRow(name, run(within=within, progress=_show(bar)), False, estimated)
        except Stopped as stopped:
            return AlgorithmRow(name, stopped.reached, True, estimated)
        except PeerFailure as error:
            return AlgorithmRow(name, math.inf, True, estimated, f"PeerFailure: {error}")


def _show(bar: tqdm[object]) -> Callable[[int, float], None]:
    def show(delivered: int, now: float) -> None:
        bar.set_postfix_str(f"{1e3 * now:.3f} ms", refresh=False)
        bar.update(delivered - bar.n)

    return show


def least_seconds(question: Question, layout: RankLayout) -> float:
    """Return the time in which the bytes that must pass a node's line pass it, and no message more.

    0 on one node, and for a barrier.
    """
    nodes, beta = layout.num_nodes, layout.machine.network.beta
    away = question.nbytes * (nodes - 1) / nodes * beta
    if question.operation == "barrier" or nodes == 1:
        return 0.0
    if question.operation == "allreduce":
        return 2 * away
    if question.operation == "alltoall":
        return layout.per_node * away
    if question.operation in ("broadcast", "reduce"):
        return question.nbytes * beta
    return away


def table(
    question: Question,
    found: Sequence[AlgorithmRow],
    cluster: SimulatedCluster,
    known: links.MeasuredMachine,
) -> str:
    """Lay the rows out for people.

    Args:
        question: which call.
        found: of `rows`.
        cluster: where.
        known: the links and where they come from.
    """
    layout = cluster.layout
    auto, _ = explain.pick(question, layout)
    least = least_seconds(question, layout)
    lines = [
        f"{question}, {layout.size} ranks on {layout.num_nodes} nodes, simulated",
        links.table(known),
        f"{'algorithm':<14}{'simulated ms':>13}{'of the line':>13}{'estimated ms':>14}",
    ]
    for row in found:
        of_call = row.algorithm in (_COMPARISON, _TOGETHER)
        sign = ">" if row.stopped else ""
        time = "-" if row.failed else f"{sign}{1e3 * row.seconds:.4f}"
        is_shared = least and row.seconds and not row.stopped and not of_call
        share = f"{100 * least / row.seconds:.0f} %" if is_shared else "-"
        marks = ["fastest"] * (row is found[0] and not row.stopped)
        marks += ["picked by auto"] * (row.algorithm == auto)
        marks += ["of the call, before any of these"] * (row.algorithm == _COMPARISON)
        marks += ["in place of it and an algorithm"] * (row.algorithm == _TOGETHER)
        marks += [row.failed or "stopped"] * row.stopped
        text = f"{row.algorithm:<14}{time:>13}{share:>13}{1e3 * row.estimated:14.4f}"
        lines.append(f"{text}  {', '.join(marks)}".rstrip())
    return "\n".join(lines)


def title(operation: str, cluster: SimulatedCluster) -> str:
    """Say in a line what a picture shows."""
    return f"{operation}, {cluster.size} ranks on {cluster.num_nodes} nodes, simulated"


def drawable(
    found: Sequence[tuple[int, Sequence[AlgorithmRow]]],
) -> dict[str, list[tuple[int, float]]]:
    """Return for each algorithm its bytes and seconds, without what was stopped.

    Args:
        found: bytes, and the rows of `rows` for them.
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    for nbytes, several in found:
        for row in several:
            if not row.stopped and row.algorithm != _COMPARISON:
                curves.setdefault(row.algorithm, []).append((nbytes, row.seconds))
    return curves


# What the settings file of a cluster may say: the options of these names.
_OF_A_CLUSTER = ("nodes", "ranks", "link", "latency", "tuned", "switch", "oversubscribed", "burst",
                 "cores", "nodes-per-host",
                 "noise", "seed", "slow", "dead")  # fmt: skip


def options_of(file: Path) -> list[str]:
    """Read the settings file of a cluster as options of the command line.

    Args:
        file: lines such as `nodes = 512` below `[cluster]`; of `slow` and `dead` several in a line.

    Raises:
        OSError: it cannot be read.
        ValueError: it cannot be understood, or names something that is not of a cluster.
    """
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(file.read_text())
        settings = parser["cluster"]
    except (configparser.Error, KeyError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{file}: expected lines below [cluster]: {why}") from None
    found = []
    for name, value in settings.items():
        if name not in _OF_A_CLUSTER:
            raise ValueError(
                f"{file}: unknown setting, expected one of {' '.join(_OF_A_CLUSTER)}, got {name!r}"
            )
        for each in value.split() if name in ("slow", "dead") else [value]:
            found += [f"--{name}", each]
    return found
