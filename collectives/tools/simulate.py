"""`python -m collectives simulate`: time of a call on a simulated cluster.

The cost model of `explain` knows only numbers of messages. Here the algorithms themselves run, each
rank as a coroutine, on a virtual clock that messages, lines and loops advance
(`collectives.simulation`): ranks wait for each other as in a real job.
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

# Rows without an algorithm: the signature check of a call, and the check that carries the array.
_COMPARISON, _TOGETHER = "comparison", "together"


class AlgorithmRow(NamedTuple):
    """Simulated time of one algorithm.

    Attributes:
        algorithm: its name.
        seconds: seconds on the simulated clock, up to a stop.
        stopped: whether the simulation exceeded its limit of time or memory.
        estimated: modelled seconds.
        failed: error that ended the call after a rank died; "" without one.
    """

    algorithm: str
    seconds: float
    stopped: bool
    estimated: float
    failed: str = ""


def rows(question: Question, cluster: SimulatedCluster, within: float) -> list[AlgorithmRow]:
    """Simulate a call by every algorithm of its operation.

    Args:
        question: the call.
        cluster: the cluster.
        within: limit in real seconds for each algorithm.

    Returns:
        rows of algorithms, fastest first; stopped and failed ones come last. If ranks compare calls
        by messages, further rows: the signature check, and the check that carries the array if
        "auto" does that.

    Raises:
        ValueError: the operation is unknown, or the size negative.
        ImportError: greenlet is not installed.
    """
    operation, nbytes = question
    layout = cluster.layout
    estimates = selection.estimate(operation, nbytes, layout)
    found = []
    for name, estimated in estimates.items():
        if name == "node":  # modelled, not simulated
            found.append(AlgorithmRow(name, estimated, False, estimated))
        else:
            run = partial(calls.seconds, operation, name, nbytes, cluster)
            found.append(_row(name, estimated, run, within))
    # Stopped algorithms last, whatever their times.
    found.sort(key=lambda row: (row.stopped, row.seconds))
    # The engine compares calls without messages.
    if layout.size == 1 or "node" in estimates:
        return found
    auto, _ = explain.pick(question, layout)
    for name, carried in ((_COMPARISON, 0), (_TOGETHER, nbytes)):
        # The check that carries the array only if "auto" picks it.
        if name in (_COMPARISON, auto):
            run = partial(
                calls.simulate_sequence, carried, cluster, by_nodes=signature_check.per_node(layout)
            )
            found.append(_row(name, signature_check.seconds(carried, layout), run, within))
    return found


def _row(name: str, estimated: float, run: Callable[..., float], within: float) -> AlgorithmRow:
    # `disable=None`: a bar only on a terminal.
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
        # tqdm counts increments.
        bar.update(delivered - bar.n)

    return show


def least_seconds(question: Question, layout: RankLayout) -> float:
    """Return the time in which a node's line transfers the necessary bytes, a lower bound.

    0 on one node, and for a barrier.
    """
    nodes, beta = layout.num_nodes, layout.machine.network.beta
    away = question.nbytes * (nodes - 1) / nodes * beta
    if question.operation == "barrier" or nodes == 1:
        return 0.0
    if question.operation == "allreduce":
        # As a reduce-scatter and an allgather, which move the same bytes.
        return 2 * away
    if question.operation == "alltoall":
        # Every rank of a node has an array of its own.
        return layout.per_node * away
    if question.operation in ("broadcast", "reduce"):
        # The root's node sends or receives every byte once.
        return question.nbytes * beta
    return away


def table(
    question: Question,
    found: Sequence[AlgorithmRow],
    cluster: SimulatedCluster,
    known: links.MeasuredMachine,
) -> str:
    """Return the rows as a table.

    Args:
        question: the call.
        found: result of `rows`.
        cluster: the cluster.
        known: the links and their sources.
    """
    layout = cluster.layout
    auto, _ = explain.pick(question, layout)
    least = least_seconds(question, layout)
    lines = [
        f"{question}, {layout}, simulated",
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
    """Return the title of a picture."""
    return f"{operation}, {cluster.layout}, simulated"


def drawable(
    found: Sequence[tuple[int, Sequence[AlgorithmRow]]],
) -> dict[str, list[tuple[int, float]]]:
    """Return bytes and seconds for each algorithm, without stopped ones.

    Args:
        found: bytes, and the result of `rows` for them.
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    for nbytes, several in found:
        for row in several:
            if not row.stopped and row.algorithm != _COMPARISON:
                curves.setdefault(row.algorithm, []).append((nbytes, row.seconds))
    return curves


# Options that the settings file of a cluster may contain.
_OF_A_CLUSTER = ("nodes", "ranks", "link", "latency", "tuned", "switch", "oversubscribed", "burst",
                 "cores", "nodes-per-host",
                 "noise", "seed", "slow", "dead")  # fmt: skip


def options_of(file: Path) -> list[str]:
    """Return the settings file of a cluster as command-line options.

    Args:
        file: lines such as `nodes = 512` below `[cluster]`; `slow` and `dead` take several values.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is invalid, or has an unknown setting.
    """
    # Percent signs in values are plain text.
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(file.read_text())
        settings = parser["cluster"]
    except (configparser.Error, KeyError, UnicodeDecodeError) as error:
        # Errors of configparser span several lines.
        why = " ".join(str(error).split())
        raise ValueError(f"{file}: expected lines below [cluster]: {why}") from None
    found = []
    for name, value in settings.items():
        if name not in _OF_A_CLUSTER:
            raise ValueError(
                f"{file}: unknown setting, expected one of {' '.join(_OF_A_CLUSTER)}, got {name!r}"
            )
        # Options that may be repeated.
        for each in value.split() if name in ("slow", "dead") else [value]:
            found += [f"--{name}", each]
    return found
