"""`simulate --step`: scaling of a training step over many machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from collectives.calls import signature_check
from collectives.simulation import calls, training
from collectives.simulation.clock import Stopped
from collectives.simulation.cluster import SimulatedCluster
from collectives.simulation.training import Compute
from collectives.tools import explain

__all__ = ["StepPoint", "Step", "points", "table", "times_of"]

# Number of simulated steps, over which times are averaged.
_STEPS = 400


def times_of(file: Path) -> list[float]:
    """Read times of steps in any unit, separated by white space.

    Raises:
        OSError: the file cannot be read.
        ValueError: a word is not a number above zero.
    """
    try:
        words = file.read_text().split()
        found = [float(word) for word in words]
    except ValueError as error:
        raise ValueError(f"{file}: expected times of steps, {error}") from None
    # `float` also reads infinities and NaN.
    if not found or not all(0 < time < math.inf for time in found):
        raise ValueError(f"{file}: expected times of steps above 0, got {words[:5]}")
    return found


class Step(NamedTuple):
    """A training step of one replica.

    Attributes:
        compute: distribution of compute times.
        gradients: bytes of each float32 bucket, in the order in which they are ready.
        overlap: whether buckets are reduced while later gradients are computed.
        half: whether they are sent as 16 bits.
    """

    compute: Compute
    gradients: Sequence[int]
    overlap: bool
    half: bool


class StepPoint(NamedTuple):
    """Simulated step on a number of machines.

    Attributes:
        nodes: number of machines.
        ranks: number of ranks on all of them.
        seconds: mean seconds of a step.
        reducing: seconds of reducing all gradients, without overlap.
        efficiency: share of a replica's time in which it computes.
        exact: whether everything was simulated; else the cost model replaced what took too long.
    """

    nodes: int
    ranks: int
    seconds: float
    reducing: float
    efficiency: float
    exact: bool


def points(step: Step, cluster: SimulatedCluster, within: float) -> list[StepPoint]:
    """Simulate the step on 1, 2, 4 ... machines, up to those of a cluster.

    Args:
        step: step of each rank, which is a replica.
        cluster: cluster of the last point; other points have the same number of ranks per machine.
        within: limit of one all-reduce in real seconds.

    Raises:
        ValueError: a bucket is empty, or machines have different numbers of ranks.
        ImportError: greenlet is not installed.
    """
    if not step.gradients or min(step.gradients) < 1:
        raise ValueError(f"simulate: expected buckets of some bytes, got {list(step.gradients)}")
    if cluster.size % cluster.num_nodes:
        raise ValueError("simulate: a step needs the same number of ranks on every machine")
    if cluster.slow or cluster.deaths:
        raise ValueError(
            "simulate: a step is also simulated on fewer machines, which may lack this rank; "
            "expected --stragglers in place of --slow, and no --dead"
        )
    per_node = cluster.size // cluster.num_nodes
    found = []
    numbers = explain.doubled(cluster.num_nodes)
    for nodes in tqdm(numbers, desc="machines", disable=None, leave=False):
        spread = replace(cluster, size=nodes * per_node, num_nodes=nodes)
        found.append(_point(step, spread, within))
    return found


def _point(step: Step, cluster: SimulatedCluster, within: float) -> StepPoint:
    # The same draws for all buckets.
    drawn = step.compute.draw(_STEPS, cluster.size)
    times: dict[int, tuple[float, bool]] = {}
    buckets = []
    for nbytes, share in zip(step.gradients, training.ready_fractions(step.gradients), strict=True):
        # Buckets of equal bytes take equal time.
        if nbytes not in times:
            # At least one float32.
            times[nbytes] = _seconds(max(4, nbytes // 2) if step.half else nbytes, cluster, within)
        # Without overlap all buckets are ready at the end of the computation.
        buckets.append((share if step.overlap else 1.0, times[nbytes][0]))
    outcome = training.all_reduce(drawn, buckets)
    return StepPoint(
        cluster.num_nodes, cluster.size, 1 / outcome.steps_per_second,
        sum(took for _, took in buckets), 1 - outcome.waiting,
        all(exact for _, exact in times.values()),
    )  # fmt: skip


def _seconds(nbytes: int, cluster: SimulatedCluster, within: float) -> tuple[float, bool]:
    """Return the seconds of the all-reduce that "auto" picks, and whether it was simulated.

    Includes the signature check, except inside a node, where the engine compares calls.
    """
    if cluster.size == 1:
        return 0.0, True
    layout = cluster.layout
    pick, estimated = explain.pick(explain.Question("allreduce", nbytes), layout)
    # The engine is modelled, not simulated.
    if pick == "node":
        return estimated, True
    together = partial(
        calls.simulate_sequence, cluster=cluster, by_nodes=signature_check.per_node(layout)
    )
    try:
        if pick == "together":
            return together(nbytes, within=within), True
        # Ranks compare the call first, by separate messages.
        run = calls.seconds("allreduce", pick, nbytes, cluster, within=within)
        return together(0, within=within) + run, True
    except Stopped:
        # The cost model replaces a simulation that takes too long; the table says so.
        return estimated, False


def table(step: Step, found: Sequence[StepPoint]) -> str:
    """Return the points as a table."""
    whole, compute = sum(step.gradients), step.compute
    spread = f"spread {100 * compute.spread:g} %"
    if compute.measured:
        spread = f"spread as of {len(compute.measured)} measured times"
    if compute.slow_share:
        spread += f", {100 * compute.slow_share:g} % of them {compute.slow_by:g} times as long"
    how = ["overlapped"] * step.overlap + ["as 16 bits"] * step.half
    lines = [
        f"a step of {1e3 * compute.mean:g} ms, {spread}, "
        f"{len(step.gradients)} buckets of {whole} bytes{', '.join(['', *how])}, simulated",
        f"{'machines':>8}{'ranks':>7}{'step ms':>10}{'reducing ms':>13}{'efficiency':>12}",
    ]
    for point in found:
        lines.append(
            f"{point.nodes:8}{point.ranks:7} {1e3 * point.seconds:9.2f} "
            f"{1e3 * point.reducing:12.3f}{100 * point.efficiency:10.1f} %"
            + ("" if point.exact else "  estimated")
        )
    return "\n".join(lines)
