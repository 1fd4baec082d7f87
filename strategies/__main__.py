"""Command line of `strategies`: checkpoint, demo and submit.

`python -m strategies submit PROGRAM ... -- ARGUMENTS` submits a batch script to Slurm.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from strategies import demo, errors
from strategies.checkpoint import inspection
from strategies.cluster import slurm_submission


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for a difference or damage, 2 for an error."""
    own = sys.argv[1:] if arguments is None else arguments
    end = own.index("--") if "--" in own else len(own)
    options = _parser().parse_args(own[:end])
    options.arguments = own[end + 1 :]
    try:
        status: int = options.run(options)
    except (errors.OpError, ImportError, ValueError) as error:
        print(f"python -m strategies: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m strategies")
    rooms = parser.add_subparsers(dest="command", required=True)
    checkpoint = rooms.add_parser("checkpoint", help="look at checkpoints; without ranks")
    commands = checkpoint.add_subparsers(dest="command", required=True)
    place = "a checkpoint, or a directory of checkpoints; a path or a URL"

    show = commands.add_parser("show", help="print what is in there, by the manifest")
    show.add_argument("path", help=place)
    show.set_defaults(run=_show)

    verify = commands.add_parser("verify", help="read all and compare checksums")
    verify.add_argument("path", help=place)
    verify.set_defaults(run=_verify)

    diff = commands.add_parser("diff", help="say in what two checkpoints differ")
    diff.add_argument("path", help=f"{place}, of which the newest counts")
    diff.add_argument("other")
    diff.set_defaults(run=_diff)
    _add_submit(rooms)

    trial = rooms.add_parser("demo", help="train on some digits with two ranks, and draw the loss")
    trial.add_argument("--ranks", type=int, default=2, help="processes (2)")
    trial.add_argument("--folder", type=Path, help="for the picture (a new temporary one)")
    trial.set_defaults(run=lambda options: demo.run(options.ranks, options.folder))
    return parser


def _add_submit(rooms: Any) -> None:
    made = rooms.add_parser(
        "submit",
        help="write a batch script for Slurm, and submit it",
        epilog="What follows -- are arguments of the program.",
    )
    made.add_argument("program", type=Path, help="a Python file that accepts --resume")
    made.add_argument("--nodes", type=int, default=1)
    made.add_argument("--ranks-per-node", type=int, default=1)
    made.add_argument("--gpus-per-node", type=int, default=0, help="as many as ranks, or none")
    made.add_argument("--cpus-per-rank", type=int, default=1)
    made.add_argument("--time", help="limit, such as 04:00:00")
    made.add_argument("--warning", type=int, default=120, help="seconds before it to stop at")
    made.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION",
        help="further option, such as --sbatch=--partition=long; may be repeated",
    )  # fmt: skip
    made.add_argument(
        "--elastic",
        action="store_true",
        help="those that live go on when ranks die (Open MPI >= 5)",
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
    )
    print(
        slurm_submission.script_of(job) if options.dry_run else slurm_submission.submit(job), end=""
    )
    return 0


def _show(options: argparse.Namespace) -> int:
    for line in inspection.show(options.path):
        print(line)
    return 0


def _verify(options: argparse.Namespace) -> int:
    bad = 0
    for path, error in inspection.verify(options.path):
        print(f"{path}: {'ok' if error is None else error}")
        bad += error is not None
    return int(bad > 0)


def _diff(options: argparse.Namespace) -> int:
    different = 0
    for line in inspection.diff(options.path, options.other):
        print(line)
        different = 1
    return different


if __name__ == "__main__":
    sys.exit(main())
