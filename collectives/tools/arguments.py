"""What `python -m collectives` understands: the options of all commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

__all__ = ["parser", "with_file"]

# What a command needs to understand its options is imported for that command alone.


def parser() -> argparse.ArgumentParser:
    """Make the parser of all commands; which one it is, it says as `command`."""
    parser = argparse.ArgumentParser(
        prog="python -m collectives", description="The collectives of this machine or cluster."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (text, add_options) in _COMMANDS.items():
        add_options(commands.add_parser(name, help=text))
    return parser


def _info_options(info: argparse.ArgumentParser) -> None:
    info.add_argument("--json", action="store_true", help="print one JSON object")


def _check_options(check: argparse.ArgumentParser) -> None:
    _limit(check, "--limit", 20.0, "how long one operation may wait for another rank")
    _limit(check, "--whole", 600.0, "how long all of it may take")


def _limit(command: argparse.ArgumentParser, flag: str, default: float, help: str) -> None:
    help += " (default %(default)g)"
    command.add_argument(flag, type=_seconds, default=default, metavar="SECONDS", help=help)


def _bench_options(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("operation", nargs="?", default="allreduce", help="default %(default)s")
    text = "bytes, FIRST:LAST in steps of 4, or A,B,C (default %(default)s)"
    bench.add_argument("--sizes", default="8:16M", help=text)
    bench.add_argument("--dtype", default="float32", help="default %(default)s")
    bench.add_argument(
        "--peers", default="native", help="comma-separated, empty for none (default %(default)s)"
    )
    bench.add_argument("--algorithm", default="auto", help="default %(default)s")
    text = "call, or for allreduce: plan, shared (a plan in shared memory); default %(default)s"
    bench.add_argument("--through", default="call", help=text)
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    bench.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them with matplotlib")


def _tune_options(tune: argparse.ArgumentParser) -> None:
    tune.add_argument(
        "--out", type=Path, metavar="FILE", help="where to keep it (default: this cluster's file)"
    )
    _limit(tune, "--seconds", 20.0, "how long it may take, roughly")


def _timeline_options(timeline: argparse.ArgumentParser) -> None:
    timeline.add_argument("directory", type=Path, help="as in UNISONO_TIMELINE")
    text = "where the joined one goes (default: DIRECTORY/timeline.json)"
    timeline.add_argument("--out", type=Path, metavar="FILE", help=text)
    text = "draw it with matplotlib: for some ranks and steps"
    timeline.add_argument("--plot", type=Path, metavar="FILE.png", help=text)


def _errors_options(errors: argparse.ArgumentParser) -> None:
    errors.add_argument("words", nargs="*", help="a class, or words of a message; none: all")


def _explain_options(explain: argparse.ArgumentParser) -> None:
    explain.add_argument("operation")
    explain.add_argument("--bytes", required=True, help="of the whole array, as 4M")
    explain.add_argument("--ranks", type=int, required=True)
    explain.add_argument("--nodes", type=int, default=1)
    explain.add_argument(
        "--latency", type=_seconds, metavar="SECONDS", help="of a message between nodes"
    )
    explain.add_argument("--gigabits", type=_seconds, help="per second, of a node's link")
    explain.add_argument(
        "--tuned", metavar="FILE", help="what tune measured, or off (default: this cluster's file)"
    )
    text = "draw the curve for 1, 2, 4 ... of them, with as many ranks on each"
    explain.add_argument("--upto", type=int, metavar="NODES", help=text)
    text = "of the curve, with matplotlib"
    explain.add_argument("--plot", type=Path, metavar="FILE.png", help=text)


def _simulate_options(simulate: argparse.ArgumentParser) -> None:
    text = "a file that says some of the options of a cluster, nodes to dead, below [cluster]"
    simulate.add_argument("--cluster", type=Path, metavar="FILE", help=text)
    simulate.add_argument("--op", default="allreduce", help="default %(default)s")
    text = "of the whole array: 64M, FIRST:LAST in steps of 4, or A,B,C"
    simulate.add_argument("--bytes", help=text)
    simulate.add_argument("--nodes", type=int)
    simulate.add_argument("--ranks", type=int, default=1, help="on each node (default 1)")
    _cluster_options(simulate)
    _step_options(simulate)
    _limit(simulate, "--within", 60.0, "how long one algorithm may take to simulate")
    text = "draw the times of all sizes, or the efficiency of steps, with matplotlib"
    simulate.add_argument("--picture", type=Path, metavar="FILE.png", help=text)


def _cluster_options(simulate: argparse.ArgumentParser) -> None:
    from collectives import links

    def gigabits(text: str) -> float:
        return 8e-9 / links.seconds_per_byte(text)

    text = "of a node's line in either direction, as 100Gbit/s"
    simulate.add_argument("--link", dest="gigabits", type=gigabits, metavar="RATE", help=text)
    text = "of a message between nodes, as 2us"
    simulate.add_argument("--latency", type=links.seconds, metavar="TIME", help=text)
    simulate.add_argument(
        "--tuned", metavar="FILE", help="what tune measured, or off (default: this cluster's file)"
    )
    text = "nodes below one switch (default: all, and it is never the narrow part)"
    simulate.add_argument("--switch", type=int, metavar="NODES", help=text)
    text = "how much more these send than their switch's line up takes (default %(default)g)"
    simulate.add_argument("--oversubscribed", type=_seconds, default=1.0, help=text)
    text = "bytes that a node's line passes at once after it was idle (default 0)"
    simulate.add_argument("--burst", type=int, default=0, metavar="BYTES", help=text)
    text = "cores that the ranks of a host share (default: each rank has one of its own)"
    simulate.add_argument("--cores", type=int, metavar="CORES", help=text)
    text = "nodes that are on one host, as containers are (default 1)"
    simulate.add_argument("--nodes-per-host", type=int, default=1, metavar="NODES", help=text)
    text = "standard deviation of the programs' times over their mean (default %(default)g)"
    simulate.add_argument("--noise", type=float, default=0.0, help=text)
    simulate.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    text = "a rank whose program is slower, as 3:10; may be said several times"
    simulate.add_argument("--slow", type=_slow, action="append", default=[], help=text)
    text = "a rank that dies after some time of the simulated clock, as 3:2ms; also several times"
    simulate.add_argument("--dead", type=_dead, action="append", default=[], help=text)


def _step_options(simulate: argparse.ArgumentParser) -> None:
    from collectives import links

    text = "instead of a call a training step of every rank, on 1, 2, 4 ... of the nodes"
    simulate.add_argument("--step", action="store_true", help=text)
    text = "of a step: how long a rank computes, as 150ms"
    simulate.add_argument("--compute", type=links.seconds, metavar="TIME", help=text)
    text = "of a step: standard deviation of that over its mean (default %(default)g)"
    simulate.add_argument("--spread", type=float, default=0.0, help=text)
    text = "of a step: which share of them takes how many times as long, as 1%%:3"
    simulate.add_argument("--stragglers", type=_stragglers, default=(0.0, 1.0), help=text)
    text = "of a step: times of steps, to draw from in place of --spread; scaled to --compute"
    simulate.add_argument("--times", type=Path, metavar="FILE", help=text)
    text = "of a step: bytes of its buckets, as they get ready: 25M,25M,48M"
    simulate.add_argument("--gradients", metavar="BYTES", help=text)
    text = "of a step: reduce buckets while later ones are computed"
    simulate.add_argument("--overlap", action="store_true", help=text)
    simulate.add_argument("--half", action="store_true", help="of a step: send 16 bits for 32")


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "info": (
        "print versions, MPI's abilities and the ranks; also under mpirun",
        _info_options,
    ),
    "check": (
        "test all operations on this cluster; under mpirun; exit status 0 or 1",
        _check_options,
    ),
    "bench": (
        "measure one operation and its peers; under mpirun",
        _bench_options,
    ),
    "tune": (
        "measure what messages cost here, for `auto` and `explain`; under mpirun",
        _tune_options,
    ),
    "timeline": (
        "join the timelines of all ranks, and print who waited for whom",
        _timeline_options,
    ),
    "errors": (
        "print what an error means and what to do, by its class or its words",
        _errors_options,
    ),
    "explain": (
        "print how long each algorithm should take, and which one that picks",
        _explain_options,
    ),
    "simulate": (
        "run the algorithms on machines whose time is virtual; needs greenlet",
        _simulate_options,
    ),
}


def with_file(arguments: list[str]) -> list[str]:
    """Put what a cluster's file says before the other options, which count where both say it."""
    from collectives.tools import simulate

    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--cluster" and (equals or at + 1 < len(arguments)):
            file = Path(value if equals else arguments[at + 1])
            return [arguments[0], *simulate.options_of(file), *arguments[1:]]
    return arguments


def _slow(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition(":")
    return int(rank), _seconds(factor)


def _stragglers(text: str) -> tuple[float, float]:
    share, percent, factor = text.partition("%:")
    if not percent or not 0 < float(share) <= 100:
        raise argparse.ArgumentTypeError(f"expected a share and a factor as 1%:3, got {text!r}")
    return float(share) / 100, _seconds(factor)


def _dead(text: str) -> tuple[int, float]:
    from collectives import links

    rank, _, after = text.partition(":")
    return int(rank), links.seconds(after)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds > 0, got {text!r}")
    return value
