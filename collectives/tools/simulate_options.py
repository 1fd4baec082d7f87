"""Options of `simulate`, and their validation."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collectives.core import links

if TYPE_CHECKING:
    from collectives.simulation.cluster import SimulatedCluster

# The rest is imported by whoever runs the command: all others have these options to refuse, too.

__all__ = ["add", "run"]

# Beyond these the objects of a simulation alone take minutes, or memory without end.
_MOST_RANKS, _MOST_BYTES = 1 << 16, 1 << 40

# A factor beyond which times are not numbers any more.
_MOST_FACTOR = 1e6

# Of a call, and of a step: what only one of them has.
_OF_A_STEP = ("compute", "gradients", "times", "overlap", "half", "spread", "stragglers")


def add(simulate: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    text = "a file that says some of the options of a cluster, nodes to dead, below [cluster]"
    simulate.add_argument("--cluster", type=Path, metavar="FILE", help=text)
    simulate.add_argument("--op", help="default allreduce")
    text = "of the whole array: 64M, FIRST:LAST in steps of 4, or A,B,C"
    simulate.add_argument("--bytes", help=text)
    _add_machines(simulate)
    _add_troubles(simulate)
    _add_step(simulate)
    text = "how long one algorithm may take to simulate (default %(default)g)"
    simulate.add_argument("--within", type=_factor, default=60.0, metavar="SECONDS", help=text)
    text = "draw the times of all sizes, or the efficiency of steps, with matplotlib"
    simulate.add_argument("--picture", type=Path, metavar="FILE.png", help=text)


def _add_machines(simulate: argparse.ArgumentParser) -> None:
    simulate.add_argument("--nodes", type=int)
    simulate.add_argument("--ranks", type=int, default=1, help="on each node (default 1)")
    text = "of a node's line in either direction, as 100Gbit/s"
    simulate.add_argument("--link", dest="gigabits", type=_gigabits, metavar="RATE", help=text)
    text = "of a message between nodes, as 2us"
    simulate.add_argument("--latency", type=_time, metavar="TIME", help=text)
    simulate.add_argument(
        "--tuned", metavar="FILE", help="what tune measured, or off (default: this cluster's file)"
    )
    text = "nodes below one switch (default: all, and it is never the narrow part)"
    simulate.add_argument("--switch", type=int, metavar="NODES", help=text)
    text = "how much more these send than their switch's line up takes (default %(default)g)"
    simulate.add_argument("--oversubscribed", type=_factor, default=1.0, help=text)
    text = "bytes that a node's line passes at once after it was idle (default 0)"
    simulate.add_argument("--burst", type=int, default=0, metavar="BYTES", help=text)
    text = "cores that the ranks of a host share (default: each rank has one of its own)"
    simulate.add_argument("--cores", type=int, metavar="CORES", help=text)
    text = "nodes that are on one host, as containers are (default 1)"
    simulate.add_argument("--nodes-per-host", type=int, default=1, metavar="NODES", help=text)


def _add_troubles(simulate: argparse.ArgumentParser) -> None:
    text = "standard deviation of the programs' times over their mean (default %(default)g)"
    simulate.add_argument("--noise", type=float, default=0.0, help=text)
    simulate.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    text = "a rank whose program is slower, as 3:10; may be said several times"
    simulate.add_argument("--slow", type=_slow, action="append", default=[], help=text)
    text = "a rank that dies after some time of the simulated clock, as 3:2ms; also several times"
    simulate.add_argument("--dead", type=_dead, action="append", default=[], help=text)


def _add_step(simulate: argparse.ArgumentParser) -> None:
    text = "instead of a call a training step of every rank, on 1, 2, 4 ... of the nodes"
    simulate.add_argument("--step", action="store_true", help=text)
    text = "of a step: how long a rank computes, as 150ms"
    simulate.add_argument("--compute", type=_time, metavar="TIME", help=text)
    text = "of a step: standard deviation of that over its mean (default 0)"
    simulate.add_argument("--spread", type=float, help=text)
    text = "of a step: which share of them takes how many times as long, as 1%%:3"
    simulate.add_argument("--stragglers", type=_stragglers, help=text)
    text = "of a step: times of steps, to draw from in place of --spread; scaled to --compute"
    simulate.add_argument("--times", type=Path, metavar="FILE", help=text)
    text = "of a step: bytes of its buckets, as they get ready: 25M,25M,48M"
    simulate.add_argument("--gradients", metavar="BYTES", help=text)
    text = "of a step: reduce buckets while later ones are computed"
    simulate.add_argument("--overlap", action="store_true", help=text)
    simulate.add_argument("--half", action="store_true", help="of a step: send 16 bits for 32")


def run(options: argparse.Namespace, known: links.MeasuredMachine) -> None:
    """Simulate what is asked, and print it.

    Raises:
        ValueError: it makes no sense.
        OSError: a file cannot be read or written.
        ImportError: greenlet is not installed.
    """
    from collectives.tools import plot, simulate
    from collectives.tools.explain import Question

    _check(options)
    cluster = _cluster(options, known)
    if options.step:
        _run_step(options, cluster)
        return
    operation = "allreduce" if options.op is None else options.op
    found = []
    for nbytes in _sizes("bytes", "4" if options.bytes is None else options.bytes):
        question = Question(operation, nbytes)
        found.append((nbytes, simulate.rows(question, cluster, options.within)))
        print(simulate.table(question, found[-1][1], cluster, known), flush=True)
    if options.picture is not None:
        name = simulate.title(operation, cluster)
        plot.draw_sizes(name, simulate.drawable(found), options.picture)


def _run_step(options: argparse.Namespace, cluster: SimulatedCluster) -> None:
    from collectives.simulation.training import Compute
    from collectives.tools import plot, simulate_step

    measured = [] if options.times is None else simulate_step.times_of(options.times)
    share, factor = options.stragglers or (0.0, 1.0)
    spread = options.spread or 0.0
    compute = Compute(options.compute, spread, share, factor, options.seed, measured)
    gradients = _sizes("gradients", options.gradients)
    step = simulate_step.Step(compute, gradients, options.overlap, options.half)
    found = simulate_step.points(step, cluster, options.within)
    print(simulate_step.table(step, found))
    if options.picture is not None:
        curve = [(point.nodes, point.efficiency) for point in found]
        plot.draw_efficiency("a training step, simulated", curve, options.picture)


def _check(options: argparse.Namespace) -> None:
    """Refuse options that are missing, or do not go together, before anything is simulated."""
    from collectives.tools import plot

    of_call = [] if options.op == "barrier" else ["bytes"]
    for name in ("nodes", *(["compute", "gradients"] if options.step else of_call)):
        if getattr(options, name) is None:
            raise ValueError(f"simulate: --{name} is missing")
    if options.nodes < 1 or options.ranks < 1:
        raise ValueError(
            "simulate: expected one or more nodes with one or more ranks on each, got "
            f"{options.nodes} with {options.ranks}"
        )
    if options.nodes * options.ranks > _MOST_RANKS:
        raise ValueError(
            f"simulate: expected at most {_MOST_RANKS} ranks, got {options.nodes * options.ranks}"
        )
    if options.step and not (options.bytes is None and options.op is None):
        raise ValueError("simulate: a step reduces its gradients, expected no --bytes and no --op")
    others = [name for name in _OF_A_STEP if getattr(options, name) not in (None, False)]
    if others and not options.step:
        raise ValueError(f"simulate: expected --step with --{others[0]}")
    if options.times is not None and options.spread:
        raise ValueError("simulate: expected --spread or --times, got both")
    if options.picture is not None:
        plot.check(options.picture, "--picture")


def _cluster(options: argparse.Namespace, known: links.MeasuredMachine) -> SimulatedCluster:
    from collectives.simulation.cluster import SimulatedCluster

    return SimulatedCluster(
        options.nodes * options.ranks, options.nodes, known.machine,
        nodes_per_switch=options.switch, oversubscription=options.oversubscribed,
        burst=options.burst, cores=options.cores, nodes_per_host=options.nodes_per_host,
        noise=options.noise, seed=options.seed, slow=dict(options.slow),
        deaths=dict(options.dead),
    )  # fmt: skip


def _sizes(option: str, text: str) -> list[int]:
    """Read sizes of arrays of float32."""
    from collectives.tools import byte_sizes

    found = byte_sizes.sizes(text)
    for nbytes in found:
        if not 4 <= nbytes <= _MOST_BYTES:
            raise ValueError(
                f"simulate: --{option} is of float32, expected 4 bytes to 1T, got {nbytes}"
            )
    return found


def _with_reason(expected: str) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Let an option be refused in these words."""

    def decorate(read: Callable[[str], Any]) -> Callable[[str], Any]:
        def checked(text: str) -> Any:
            try:
                return read(text)
            except ValueError:
                raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None

        return checked

    return decorate


def _above_zero(text: str, most: float = _MOST_FACTOR) -> float:
    value = float(text)
    if not 0 < value <= most:
        raise ValueError
    return value


@_with_reason(f"a number above 0, up to {_MOST_FACTOR:g}")
def _factor(text: str) -> float:
    return _above_zero(text)


@_with_reason("a time above 0 as 2us or 150ms")
def _time(text: str) -> float:
    return links.seconds(text)


@_with_reason("a rate above 0 as 100Gbit/s or 8GB/s")
def _gigabits(text: str) -> float:
    if not text.strip().endswith("/s"):
        raise ValueError  # a bare number would be seconds for a byte
    return 8e-9 / links.seconds_per_byte(text)


@_with_reason("a rank and how many times as long it takes, as 3:10")
def _slow(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition(":")
    return int(rank), _above_zero(factor)


@_with_reason("a rank and when it dies, as 3:2ms")
def _dead(text: str) -> tuple[int, float]:
    rank, _, after = text.partition(":")
    return int(rank), links.seconds(after)


@_with_reason("a share and a factor as 1%:3")
def _stragglers(text: str) -> tuple[float, float]:
    share, percent, factor = text.partition("%:")
    if not percent or math.isnan(float(share)):
        raise ValueError
    return _above_zero(share, 100.0) / 100, _above_zero(factor)
