"""`python -m strategies checkpoint show | verify | diff PATH`: look at checkpoints."""

from __future__ import annotations

import argparse
import sys

from strategies import errors
from strategies.training import inspection


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for a difference or damage, 2 for an error."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except (errors.OpError, ImportError) as error:
        print(f"python -m strategies: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m strategies")
    rooms = parser.add_subparsers(dest="room", required=True)
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
    return parser


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
