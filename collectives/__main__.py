"""Command line of `collectives`, such as `python -m collectives check`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from collectives import world
from collectives.algorithms import selection
from collectives.core.command_line import CommandParser, at_least, closed_pipe_ends
from collectives.core.errors import LaunchError, await_turn, in_turn
from collectives.core.version import __version__
from collectives.launch.launcher import launcher_rank

if TYPE_CHECKING:
    from collectives.core import links, settings

# Commands import their modules themselves, so that `explain` works without MPI.


def main(arguments: list[str] | None = None) -> int:
    """Run one command, and return the exit status, which is the same on all ranks."""
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        _parser().print_help()
        return 2
    # Its options may be in a file, so they are inserted before parsing.
    if words[:1] == ["simulate"]:
        try:
            words = _with_file(words)
        except (ImportError, OSError, ValueError) as error:
            return _refuse(error)
    options = _parser().parse_args(words)
    status: int = 0
    try:
        with closed_pipe_ends():
            status = options.run(options)
    except LaunchError as error:
        print(f"python -m collectives {options.command}: {error}", file=sys.stderr)
        return 1
    return status


class _Parser(CommandParser):
    """Parser that reports an error once, although every rank has the same arguments."""

    def error(self, message: str) -> NoReturn:
        _await_turn()
        super().error(message)


def _await_turn() -> None:
    """Let rank 0 report an error and end the job; a rank that the launcher keeps reports later."""
    await_turn(in_turn(SystemExit(2), launcher_rank()))


def _parser() -> argparse.ArgumentParser:
    # Imported here, because every command parses its options, also those of `simulate`.
    from collectives.tools import simulate_options

    parser = _Parser(
        prog="python -m collectives",
        description="Tests, measures and predicts collective operations.",
    )
    parser.add_argument("--version", action="version", version=f"unisono {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, help: str, description: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help, description=description)

    info = add(
        "info", "print versions, settings and ranks; under mpirun",
        "Prints the installed versions, the features of the MPI library, the settings and the "
        "ranks. Start it with mpirun -np N to see N ranks.",
    )  # fmt: skip
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.set_defaults(run=_info)

    check = add(
        "check", "test all operations on this cluster; under mpirun",
        f"Compares the results of every operation with NumPy: {', '.join(_names())}. Also checks "
        "versions, clocks, shared memory and bandwidth. The exit status is 1 if a test fails.",
    )  # fmt: skip
    _limit(check, "--limit", 20.0, "longest wait of one operation for another rank")
    _limit(check, "--whole", 600.0, "longest time of all tests")
    check.add_argument("--json", action="store_true", help="print one JSON object at the end")
    check.set_defaults(run=_check)

    _bench_options(
        add(
            "bench", "measure one operation and its peers; under mpirun",
            "Measures time and bandwidth of an operation, and of the same operation in other "
            "libraries. Start it with mpirun -np N.",
        )
    )  # fmt: skip

    tune = add(
        "tune", "measure the cost of messages for algorithm='auto'; under mpirun",
        "Measures the links of this cluster and writes them to a file. 'auto' and explain use "
        "the file.",
    )  # fmt: skip
    text = "file of the measurements (default: this cluster's file)"
    tune.add_argument("--out", type=Path, metavar="FILE", help=text)
    _limit(tune, "--seconds", 20.0, "approximate time of the measurement")
    tune.set_defaults(run=_tune)

    timeline = add(
        "timeline", "merge the timelines of all ranks, and print who waited for whom",
        "Reads the files that the ranks wrote with UNISONO_TIMELINE=DIRECTORY, merges them for "
        "Perfetto, and prints which ranks were late.",
    )  # fmt: skip
    timeline.add_argument("directory", type=Path, help="directory of the ranks' files")
    text = "merged file (default: DIRECTORY/timeline.json)"
    timeline.add_argument("--out", type=Path, metavar="FILE", help=text)
    text = "also draw it with matplotlib; for few ranks and steps"
    timeline.add_argument("--plot", type=Path, metavar="FILE.png", help=text)
    timeline.add_argument("--json", action="store_true", help="print one JSON object")
    timeline.set_defaults(run=_timeline)

    errors = add(
        "errors", "print the cause and remedy of an error",
        "Prints the cause and the remedy of an error. Lists all errors without arguments. The "
        "exit status is 1 if no error matches.",
    )  # fmt: skip
    text = "a class, such as PeerFailure, or words of a message"
    errors.add_argument("words", nargs="*", help=text)
    errors.set_defaults(run=_errors)

    _explain_options(
        add(
            "explain", "predict the time of each algorithm, and the choice of 'auto'",
            "Predicts the time of an operation by a cost model of messages and bytes. Needs no "
            "MPI.",
        )
    )  # fmt: skip
    simulate = add(
        "simulate", "run the algorithms on a simulated cluster; needs greenlet",
        "Runs an operation, or a training step, with any number of ranks on a simulated clock. "
        "Needs no MPI.",
    )  # fmt: skip
    simulate_options.add(simulate)
    simulate.set_defaults(run=_simulate)
    return parser


def _names(*without: str) -> list[str]:
    return [name for name in selection.ALGORITHMS if name not in without]


def _limit(command: argparse.ArgumentParser, flag: str, default: float, help: str) -> None:
    help += " (default: %(default)g)"
    command.add_argument(flag, type=_seconds, default=default, metavar="SECONDS", help=help)


def _bench_options(bench: argparse.ArgumentParser) -> None:
    text = f"{', '.join(_names('barrier'))} (default: %(default)s)"
    bench.add_argument(
        "operation", nargs="?", default="allreduce", choices=_names("barrier"), help=text,
        metavar="operation",
    )  # fmt: skip
    text = "bytes: FIRST:LAST in steps of 4 times, or A,B,C (default: %(default)s)"
    bench.add_argument("--sizes", type=_sizes, default="8:16M", help=text)
    text = "such as float16, bfloat16, int32 or complex64 (default: %(default)s)"
    bench.add_argument("--dtype", default="float32", help=text)
    text = "libraries to compare with, comma-separated: native, gloo (default: %(default)s)"
    bench.add_argument("--peers", default="native", help=text)
    text = "such as ring or tree, as explain lists them (default: %(default)s)"
    bench.add_argument("--algorithm", default="auto", help=text)
    text = (
        "call, or for allreduce: plan, shared (a plan in shared memory), or several, "
        "comma-separated (default: %(default)s)"
    )
    bench.add_argument("--through", default="call", help=text)
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file")
    bench.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them with matplotlib")
    bench.set_defaults(run=_bench)


def _explain_options(explain: argparse.ArgumentParser) -> None:
    explain.add_argument(
        "operation", choices=_names(), metavar="operation", help=", ".join(_names())
    )
    explain.add_argument("--bytes", type=_size, required=True, help="whole array, such as 4M")
    number: dict[str, Any] = {"type": at_least(1), "metavar": "N"}
    explain.add_argument("--ranks", required=True, help="number of ranks", **number)
    explain.add_argument("--nodes", default=1, help="number of nodes (default: 1)", **number)
    text = "latency of a message between nodes"
    explain.add_argument("--latency", type=_seconds, metavar="SECONDS", help=text)
    text = "bandwidth of a node's link, in Gbit/s; latency stays unless given"
    explain.add_argument("--gigabits", type=_seconds, metavar="RATE", help=text)
    text = "file of tune, or off (default: this cluster's file)"
    explain.add_argument("--tuned", metavar="FILE", help=text)
    text = "also print times on 1, 2, 4 ... N nodes with as many ranks on each"
    explain.add_argument("--upto", help=text, **number)
    text = "draw these times with matplotlib"
    explain.add_argument("--plot", type=Path, metavar="FILE.png", help=text)
    explain.add_argument("--json", action="store_true", help="print one JSON object")
    explain.set_defaults(run=_explain)


def _info(options: argparse.Namespace) -> int:
    from collectives.tools import info

    # Also under mpirun: rank 0 prints the facts of all ranks.
    comm = world.init()
    facts = info.gather_facts(comm)
    if comm.rank == 0:
        print(json.dumps(facts, indent=2) if options.json else info.table(facts))
    return 0


def _check(options: argparse.Namespace) -> int:
    from collectives.tools import check

    return check.run(options.limit, options.whole, options.json)


def _bench(options: argparse.Namespace) -> int:
    from collectives.tools import bench

    try:
        chosen = bench.BenchOptions(
            options.operation,
            options.sizes,
            options.dtype,
            [peer for peer in options.peers.split(",") if peer],
            options.algorithm,
            options.through,
        )
    except ValueError as error:
        # Before MPI starts, so that a wrong option costs nothing.
        return _refuse(error)
    return bench.run(chosen, options.json, options.plot)


def _tune(options: argparse.Namespace) -> int:
    from collectives.tools import tune

    return tune.run(options.out, options.seconds)


def _timeline(options: argparse.Namespace) -> int:
    from collectives.tools import timeline

    return timeline.run(options.directory, options.out, options.plot, options.json)


def _errors(options: argparse.Namespace) -> int:
    from collectives.tools import explain_error

    return explain_error.run(options.words)


def _explain(options: argparse.Namespace) -> int:
    try:
        text = _explanation(options)
    except (OSError, ValueError) as error:
        return _refuse(error)
    print(text)
    return 0


def _explanation(options: argparse.Namespace) -> str:
    from collectives.algorithms.cost_model import RankLayout
    from collectives.tools import explain, plot

    if options.nodes > options.ranks:
        raise ValueError(
            f"explain: expected --nodes <= --ranks, got {options.nodes} and {options.ranks}"
        )
    # First, so that a wrong `--plot` prints its error only.
    if options.plot is not None:
        if options.upto is None:
            raise ValueError("explain: expected --upto with --plot")
        plot.check(options.plot, "--plot")
    configuration, known = _links(options)
    layout = RankLayout(options.ranks, options.nodes, known.machine)
    question = explain.Question(options.operation, options.bytes)
    text = explain.table(question, layout, known, configuration.stores)
    if options.upto is not None:
        points = explain.curve(question, layout, options.upto)
        text += f"\n\n{explain.ascii_bars(points)}\n{explain.provenance(configuration, known)}"
        if options.plot is not None:
            plot.draw_curve(f"{question}, {layout.per_node} ranks a node", points, options.plot)
    if options.json:
        return json.dumps(explain.facts(question, layout, known, options.upto), indent=2)
    return text


def _simulate(options: argparse.Namespace) -> int:
    from collectives.tools import simulate_options

    try:
        _, known = _links(options)
        simulate_options.run(options, known)
    except BrokenPipeError:
        raise
    except (ImportError, OSError, ValueError) as error:
        return _refuse(error)
    return 0


def _with_file(arguments: list[str]) -> list[str]:
    """Insert the options of a cluster file before the other options, which take precedence."""
    from collectives.tools import simulate

    # The file of the first `--cluster`; later options override its options.
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        # Without a value argparse reports the error.
        if name == "--cluster" and (equals or at + 1 < len(arguments)):
            file = Path(value if equals else arguments[at + 1])
            return [arguments[0], *simulate.options_of(file), *arguments[1:]]
    return arguments


def _links(options: argparse.Namespace) -> tuple[settings.Settings, links.MeasuredMachine]:
    """Return the settings and links that "auto" uses, with the overrides of the options."""
    from collectives.core import links, settings, tuning_file

    configuration = settings.from_environment()
    if options.tuned is not None:
        configuration = replace(configuration, tuned=options.tuned)
    network = {}
    if options.latency is not None:
        network["alpha"] = options.latency
    if options.gigabits is not None:
        # 8 bits per byte, 1e9 bits per gigabit.
        network["beta"] = 8e-9 / options.gigabits
    found = tuning_file.load_links(configuration)
    return configuration, links.with_overrides(found, {"network": network}, "options")


# The status of wrong arguments, as from argparse.
def _refuse(error: Exception) -> int:
    _await_turn()
    print(f"python -m collectives: {error}", file=sys.stderr)
    return 2


def _sizes(text: str) -> list[int]:
    from collectives.tools import byte_sizes

    try:
        return byte_sizes.sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("sizes: ")) from None


def _size(text: str) -> int:
    if "," in text or ":" in text:
        raise argparse.ArgumentTypeError(f"expected one number of bytes, got {text!r}")
    return _sizes(text)[0]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        # Refused below, with the same message.
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
