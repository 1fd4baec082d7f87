"""Command line of `strategies`: checkpoint, demo and submit.

`python -m strategies submit PROGRAM ... -- ARGUMENTS` submits a batch script to Slurm.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import collectives as cc
from collectives.core.command_line import CommandParser, at_least, closed_pipe_ends
from strategies import demo, errors
from strategies.checkpoint import inspection
from strategies.cluster import slurm_submission


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 for differences or damage, 2 for errors."""
    own = sys.argv[1:] if arguments is None else arguments
    if not own:
        _parser().print_help()
        return 2
    # Arguments after `--` belong to the program, even if they look like options of `submit`.
    end = own.index("--") if "--" in own else len(own)
    options = _parser().parse_args(own[:end])
    options.arguments = own[end + 1 :]
    status: int = 0
    try:
        with closed_pipe_ends():
            status = options.run(options)
    except (errors.OpError, ImportError, ValueError) as error:
        # Errors of the library have a text for users; a bug keeps its traceback.
        print(f"python -m strategies: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m strategies", description="Checkpoints, batch jobs and a demonstration."
    )
    parser.add_argument("--version", action="version", version=f"unisono {cc.__version__}")
    rooms = parser.add_subparsers(dest="command", required=True)
    checkpoint = _add(
        rooms, "checkpoint", "print, verify or compare checkpoints",
        "Reads checkpoints of Saver and CheckpointManager. Each operation has its own --help.",
    )  # fmt: skip
    commands = checkpoint.add_subparsers(dest="operation", required=True)
    place = "a checkpoint, or a directory of checkpoints; a path or a URL"

    show = _add(
        commands, "show", "list the tensors of a checkpoint",
        "Prints step, time, files, tensors and metadata of a checkpoint, or a line for each "
        "checkpoint in a directory. Reads only manifests.",
    )  # fmt: skip
    show.add_argument("path", help=place)
    show.add_argument("--json", action="store_true", help="print one JSON object")
    show.set_defaults(run=_show)

    verify = _add(
        commands, "verify", "read all tensors and compare their checksums",
        "Reads every file of a checkpoint, or of all checkpoints in a directory. The exit status "
        "is 1 if one is damaged.",
    )  # fmt: skip
    verify.add_argument("path", help=place)
    verify.set_defaults(run=_verify)

    diff = _add(
        commands, "diff", "print the differences of two checkpoints",
        "Compares step, tensors and metadata bit by bit. The exit status is 1 if they differ. In a "
        "directory it reads the newest checkpoint.",
    )  # fmt: skip
    diff.add_argument("path", help=place)
    diff.add_argument("other", help="the checkpoint to compare it with")
    diff.set_defaults(run=_diff)
    _add_submit(rooms)

    trial = _add(
        rooms, "demo", "train a small model on two ranks, and plot the loss",
        "Starts mpirun on this machine and trains a classifier of digits. Needs scikit-learn, and "
        "matplotlib for the plot.",
    )  # fmt: skip
    text = "number of processes (default: 2)"
    trial.add_argument("--ranks", type=at_least(1), default=2, metavar="N", help=text)
    trial.add_argument("--folder", type=Path, help="directory for the plot (default: a new one)")
    trial.set_defaults(run=lambda options: demo.run(options.ranks, options.folder))
    return parser


def _add(commands: Any, name: str, help: str, description: str) -> argparse.ArgumentParser:
    """Add a command: a line for the list of commands, and a text for its own `--help`."""
    added: argparse.ArgumentParser = commands.add_parser(name, help=help, description=description)
    return added


def _add_submit(rooms: Any) -> None:
    made = _add(
        rooms, "submit", "write a batch script for Slurm, and submit it",
        "Writes a batch script for Slurm that starts the program by mpirun or srun, forwards "
        "signals, and requeues the job if the program stops on request. Submits it by sbatch.",
    )  # fmt: skip
    made.epilog = "Arguments after -- are passed to the program."
    made.add_argument("program", type=Path, help="a Python file that accepts --resume")
    for name, least, default, text in (
        ("nodes", 1, 1, "number of nodes"),
        ("ranks-per-node", 1, 1, "processes on each node"),
        ("gpus-per-node", 0, 0, "0, or one for each rank"),
        ("cpus-per-rank", 1, 1, "cores of each process"),
        ("warning", 1, 120, "seconds before the time limit at which the program is asked to stop"),
    ):
        text += " (default: %(default)s)"
        made.add_argument(
            f"--{name}", type=at_least(least), default=default, metavar="N", help=text
        )
    made.add_argument("--time", help="time limit, such as 04:00:00 (default: the partition's)")
    made.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION",
        help="further option, such as --sbatch=--partition=long; may be repeated",
    )  # fmt: skip
    made.add_argument(
        "--elastic",
        action="store_true",
        help="let the surviving ranks continue when ranks die (Open MPI >= 5)",
    )
    made.add_argument(
        "--launcher",
        default="mpirun",
        metavar="COMMAND",
        help='mpirun, or "srun --mpi=pmix" and further options of srun (default: %(default)s)',
    )
    made.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")
    made.set_defaults(run=_submit)


def _submit(options: argparse.Namespace) -> int:
    job = slurm_submission.Job(
        options.program,
        options.arguments,
        nodes=options.nodes,
        ranks_per_node=options.ranks_per_node,
        gpus_per_node=options.gpus_per_node,
        cpus_per_rank=options.cpus_per_rank,
        time=options.time,
        warning=options.warning,
        options=options.sbatch,
        elastic=options.elastic,
        launcher=options.launcher,
    )
    print(
        slurm_submission.script_of(job) if options.dry_run else slurm_submission.submit(job), end=""
    )
    return 0


def _show(options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps(inspection.facts(options.path), indent=2))
        return 0
    for line in inspection.show(options.path):
        print(line)
    return 0


def _verify(options: argparse.Namespace) -> int:
    # A damaged checkpoint does not end the loop: all of them are reported.
    bad = 0
    for path, error in inspection.verify(options.path):
        print(f"{path}: {'ok' if error is None else error}")
        bad += error is not None
    return int(bad > 0)


def _diff(options: argparse.Namespace) -> int:
    different = 0
    # Status 1 as of `diff`, so that scripts can compare.
    for line in inspection.diff(options.path, options.other):
        print(line)
        different = 1
    return different


if __name__ == "__main__":
    sys.exit(main())
