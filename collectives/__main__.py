"""Command line of `collectives`, such as `python -m collectives check`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from collectives import world
from collectives.core.errors import LaunchError

if TYPE_CHECKING:
    from collectives.core import links, settings

# The other modules are imported by the command that needs them: `explain` does without MPI.


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status, the same on all ranks."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["simulate"]:
        try:
            words = _with_file(words)
        except (ImportError, OSError, ValueError) as error:
            return _refuse(error)
    options = _parser().parse_args(words)
    try:
        status: int = options.run(options)
    except LaunchError as error:
        print(f"python -m collectives {options.command}: {error}", file=sys.stderr)
        return 1
    return status


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, without all options, of which some commands have many."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    from collectives.tools import simulate_options

    parser = _Parser(
        prog="python -m collectives", description="The collectives of this machine or cluster."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    info = commands.add_parser(
        "info", help="print versions, MPI's abilities and the ranks; also under mpirun"
    )
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.set_defaults(run=_info)

    check = commands.add_parser(
        "check", help="test all operations on this cluster; under mpirun; exit status 0 or 1"
    )
    _limit(check, "--limit", 20.0, "how long one operation may wait for another rank")
    _limit(check, "--whole", 600.0, "how long all of it may take")
    check.set_defaults(run=_check)

    _bench_options(
        commands.add_parser("bench", help="measure one operation and its peers; under mpirun")
    )

    tune = commands.add_parser(
        "tune", help="measure what messages cost here, for `auto` and `explain`; under mpirun"
    )
    tune.add_argument(
        "--out", type=Path, metavar="FILE", help="where to keep it (default: this cluster's file)"
    )
    _limit(tune, "--seconds", 20.0, "how long it may take, roughly")
    tune.set_defaults(run=_tune)

    timeline = commands.add_parser(
        "timeline", help="join the timelines of all ranks, and print who waited for whom"
    )
    timeline.add_argument("directory", type=Path, help="as in UNISONO_TIMELINE")
    text = "where the joined one goes (default: DIRECTORY/timeline.json)"
    timeline.add_argument("--out", type=Path, metavar="FILE", help=text)
    text = "draw it with matplotlib: for some ranks and steps"
    timeline.add_argument("--plot", type=Path, metavar="FILE.png", help=text)
    timeline.set_defaults(run=_timeline)

    errors = commands.add_parser(
        "errors", help="print what an error means and what to do, by its class or its words"
    )
    errors.add_argument("words", nargs="*", help="a class, or words of a message; none: all")
    errors.set_defaults(run=_errors)

    _explain_options(
        commands.add_parser(
            "explain", help="print how long each algorithm should take, and which one that picks"
        )
    )
    simulate = commands.add_parser(
        "simulate", help="run the algorithms on machines whose time is virtual; needs greenlet"
    )
    simulate_options.add(simulate)
    simulate.set_defaults(run=_simulate)
    return parser


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
    bench.set_defaults(run=_bench)


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
    explain.set_defaults(run=_explain)


def _info(options: argparse.Namespace) -> int:
    from collectives.tools import info

    comm = world.init()
    facts = info.gather_facts(comm)
    if comm.rank == 0:
        print(json.dumps(facts, indent=2) if options.json else info.table(facts))
    return 0


def _check(options: argparse.Namespace) -> int:
    from collectives.tools import check

    return check.run(options.limit, options.whole)


def _bench(options: argparse.Namespace) -> int:
    from collectives.tools import bench, byte_sizes

    try:
        chosen = bench.BenchOptions(
            options.operation,
            byte_sizes.sizes(options.sizes),
            options.dtype,
            [peer for peer in options.peers.split(",") if peer],
            options.algorithm,
            options.through,
        )
    except ValueError as error:
        return _refuse(error)
    return bench.run(chosen, options.json, options.plot)


def _tune(options: argparse.Namespace) -> int:
    from collectives.tools import tune

    return tune.run(options.out, options.seconds)


def _timeline(options: argparse.Namespace) -> int:
    from collectives.tools import timeline

    return timeline.run(options.directory, options.out, options.plot)


def _errors(options: argparse.Namespace) -> int:
    from collectives.tools import explain_error

    try:
        status = explain_error.run(options.words)
        sys.stdout.flush()
    except BrokenPipeError:  # `errors | head` has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 0
    return status


def _explain(options: argparse.Namespace) -> int:
    from collectives.algorithms.cost_model import RankLayout
    from collectives.tools import byte_sizes, explain, plot

    try:
        if options.plot is not None:
            if options.upto is None:
                raise ValueError("explain: --plot is of the curve, expected --upto with it")
            plot.check(options.plot, "--plot")
        configuration, known = _links(options)
        (nbytes,) = byte_sizes.sizes(options.bytes)
        layout = RankLayout(options.ranks, options.nodes, known.machine)
        question = explain.Question(options.operation, nbytes)
        print(explain.table(question, layout, known, configuration.stores))
        if options.upto is None:
            return 0
        points = explain.curve(question, layout, options.upto)
        print(f"\n{explain.ascii_bars(points)}\n{explain.provenance(configuration, known)}")
        if options.plot is not None:
            plot.draw_curve(f"{question}, {layout.per_node} ranks a node", points, options.plot)
    except (OSError, ValueError) as error:
        return _refuse(error)
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from collectives.tools import simulate_options

    try:
        _, known = _links(options)
        simulate_options.run(options, known)
    except (ImportError, OSError, ValueError) as error:
        return _refuse(error)
    return 0


def _with_file(arguments: list[str]) -> list[str]:
    """Put what a cluster's file says before the other options, which count where both say it."""
    from collectives.tools import simulate

    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--cluster" and (equals or at + 1 < len(arguments)):
            file = Path(value if equals else arguments[at + 1])
            return [arguments[0], *simulate.options_of(file), *arguments[1:]]
    return arguments


def _links(options: argparse.Namespace) -> tuple[settings.Settings, links.MeasuredMachine]:
    """Return the settings and links that `auto` would go by, or what the options say instead."""
    from collectives.core import links, settings, tuning_file

    configuration = settings.from_environment()
    if options.tuned is not None:
        configuration = replace(configuration, tuned=options.tuned)
    network = {}
    if options.latency is not None:
        network["alpha"] = options.latency
    if options.gigabits is not None:
        network["beta"] = 8e-9 / options.gigabits
    found = tuning_file.load_links(configuration)
    return configuration, links.with_overrides(found, {"network": network}, "options")


def _refuse(error: Exception) -> int:
    print(f"python -m collectives: {error}", file=sys.stderr)
    return 2


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
