"""Options of `simulate`, and their validation."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collectives.algorithms import selection
from collectives.core import links
from collectives.core.command_line import at_least

if TYPE_CHECKING:
    from collectives.simulation.cluster import SimulatedCluster

# Other modules are imported only by `run`, because every command adds these options.

__all__ = ["add", "run"]

# Beyond these limits a simulation takes minutes to set up, or exhausts memory.
_MOST_RANKS, _MOST_BYTES = 1 << 16, 1 << 40

# Largest factor: times stay finite.
_MOST_FACTOR = 1e6

# Options that only a step has.
_OF_A_STEP = ("compute", "gradients", "times", "overlap", "half", "spread", "stragglers")


def add(simulate: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    text = "file with options of the cluster, --nodes to --dead, below [cluster]"
    simulate.add_argument("--cluster", type=Path, metavar="FILE", help=text)
    text = f"operation: {', '.join(selection.ALGORITHMS)} (default: allreduce)"
    simulate.add_argument("--op", choices=list(selection.ALGORITHMS), metavar="NAME", help=text)
    text = "size of the whole array: 64M, FIRST:LAST in steps of 4 times, or A,B,C"
    simulate.add_argument("--bytes", help=text)
    _add_machines(simulate)
    _add_troubles(simulate)
    _add_step(simulate)
    text = "longest real time of one algorithm (default: %(default)g)"
    simulate.add_argument("--within", type=_factor, default=60.0, metavar="SECONDS", help=text)
    text = "draw the times of all sizes, or the efficiency of steps, with matplotlib"
    simulate.add_argument("--picture", type=Path, metavar="FILE.png", help=text)


def _add_machines(simulate: argparse.ArgumentParser) -> None:
    number = at_least(1)
    simulate.add_argument("--nodes", type=number, metavar="N", help="number of nodes")
    text = "ranks on each node (default: 1)"
    simulate.add_argument("--ranks", type=number, default=1, metavar="N", help=text)
    text = "bandwidth of a node's line in each direction, such as 100Gbit/s"
    simulate.add_argument("--link", dest="gigabits", type=_gigabits, metavar="RATE", help=text)
    text = "latency of a message between nodes, such as 2us"
    simulate.add_argument("--latency", type=_time, metavar="TIME", help=text)
    text = "file of tune, or off (default: this cluster's file)"
    simulate.add_argument("--tuned", metavar="FILE", help=text)
    text = "nodes below one switch (default: all nodes)"
    simulate.add_argument("--switch", type=int, metavar="N", help=text)
    text = "rate of these nodes over the rate of their switch's uplink (default: %(default)g)"
    simulate.add_argument(
        "--oversubscribed", type=_factor, default=1.0, metavar="FACTOR", help=text
    )
    text = "bytes that an idle line of a node passes at once (default: 0)"
    simulate.add_argument("--burst", type=int, default=0, metavar="BYTES", help=text)
    text = "cores that the ranks of a host share (default: a core for each rank)"
    simulate.add_argument("--cores", type=int, metavar="N", help=text)
    text = "nodes on one host, as containers are (default: 1)"
    simulate.add_argument("--nodes-per-host", type=int, default=1, metavar="N", help=text)


def _add_troubles(simulate: argparse.ArgumentParser) -> None:
    text = "standard deviation of program times over their mean (default: %(default)g)"
    simulate.add_argument("--noise", type=float, default=0.0, metavar="RATIO", help=text)
    text = "seed of the noise (default: 0)"
    simulate.add_argument("--seed", type=int, default=0, metavar="N", help=text)
    text = "rank whose program is slower, and the factor, such as 3:10; may be repeated"
    simulate.add_argument(
        "--slow", type=_slow, action="append", default=[], metavar="RANK:FACTOR", help=text
    )
    text = "rank that dies, and the simulated time, such as 3:2ms; may be repeated"
    simulate.add_argument(
        "--dead", type=_dead, action="append", default=[], metavar="RANK:TIME", help=text
    )


def _add_step(simulate: argparse.ArgumentParser) -> None:
    text = "simulate a training step instead of a call, on 1, 2, 4 ... of the nodes"
    simulate.add_argument("--step", action="store_true", help=text)
    text = "with --step: time that a rank computes, such as 150ms"
    simulate.add_argument("--compute", type=_time, metavar="TIME", help=text)
    text = "with --step: standard deviation of this time over its mean (default: 0)"
    simulate.add_argument("--spread", type=float, metavar="RATIO", help=text)
    text = "with --step: share of slow steps, and their factor, such as 1%%:3"
    simulate.add_argument("--stragglers", type=_stragglers, metavar="SHARE:FACTOR", help=text)
    text = "with --step: measured times of steps instead of --spread, scaled to --compute"
    simulate.add_argument("--times", type=Path, metavar="FILE", help=text)
    text = "with --step: bytes of the buckets in the order they become ready: 25M,25M,48M"
    simulate.add_argument("--gradients", metavar="BYTES", help=text)
    text = "with --step: reduce buckets while later buckets are computed"
    simulate.add_argument("--overlap", action="store_true", help=text)
    text = "with --step: send 16 bits instead of 32"
    simulate.add_argument("--half", action="store_true", help=text)


def run(options: argparse.Namespace, known: links.MeasuredMachine) -> None:
    """Run the simulation that the options describe, and print it.

    Raises:
        ValueError: the options are invalid.
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
    # A barrier moves no bytes, so any size serves.
    for nbytes in _sizes("bytes", "4" if options.bytes is None else options.bytes):
        question = Question(operation, nbytes)
        found.append((nbytes, simulate.rows(question, cluster, options.within)))
        # At once, because the next size may take minutes.
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
    """Reject missing and contradictory options, before anything is simulated."""
    from collectives.tools import plot

    of_call = [] if options.op == "barrier" else ["bytes"]
    for name in ("nodes", *(["compute", "gradients"] if options.step else of_call)):
        if getattr(options, name) is None:
            raise ValueError(f"simulate: --{name} is missing")
    if options.nodes * options.ranks > _MOST_RANKS:
        raise ValueError(
            f"simulate: expected at most {_MOST_RANKS} ranks, got {options.nodes * options.ranks}"
        )
    if options.step and not (options.bytes is None and options.op is None):
        raise ValueError("simulate: a step reduces its gradients, expected no --bytes and no --op")
    # None and False: not given.
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
        # Of several values for a rank the last one counts.
        noise=options.noise, seed=options.seed, slow=dict(options.slow),
        deaths=dict(options.dead),
    )  # fmt: skip


def _sizes(option: str, text: str) -> list[int]:
    from collectives.tools import byte_sizes

    try:
        found = byte_sizes.sizes(text)
    except ValueError as error:
        raise ValueError(f"simulate: --{option}: {str(error).removeprefix('sizes: ')}") from None
    for nbytes in found:
        if not 4 <= nbytes <= _MOST_BYTES:
            raise ValueError(
                f"simulate: --{option} is of float32, expected 4 bytes to 1T, got {nbytes}"
            )
    return found


def _above_zero(text: str, most: float = _MOST_FACTOR) -> float:
    value = float(text)
    if not 0 < value <= most:
        raise ValueError
    return value


def _rate(text: str) -> float:
    if not text.strip().endswith("/s"):
        raise ValueError  # a bare number would be seconds for a byte
    return 8e-9 / links.seconds_per_byte(text)


def _rank_and(read: Callable[[str], float], text: str) -> tuple[int, float]:
    rank, _, value = text.partition(":")
    return int(rank), read(value)


def _share_and_factor(text: str) -> tuple[float, float]:
    share, percent, factor = text.partition("%:")
    if not percent or math.isnan(float(share)):
        raise ValueError
    return _above_zero(share, 100.0) / 100, _above_zero(factor)


def _reader(expected: str, read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function that reads an option, and states in its errors what the option expects."""

    def checked(text: str) -> Any:
        try:
            return read(text)
        except ValueError:
            # argparse shows the text of this class, and hides that of a ValueError.
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None

    return checked


_factor = _reader(f"a number above 0, up to {_MOST_FACTOR:g}", _above_zero)
_time = _reader("a time above 0 as 2us or 150ms", links.seconds)
_gigabits = _reader("a rate above 0 as 100Gbit/s or 8GB/s", _rate)
_slow = _reader(
    "a rank and how many times as long it takes, as 3:10", partial(_rank_and, _above_zero)
)
_dead = _reader("a rank and when it dies, as 3:2ms", partial(_rank_and, links.seconds))
_stragglers = _reader("a share and a factor as 1%:3", _share_and_factor)
