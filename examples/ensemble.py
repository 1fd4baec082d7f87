"""Let several networks in one program answer together.

    mpirun -np 4 python examples/hyper_parameter_search.py
    python examples/ensemble.py

The probabilities of all networks are averaged: where one errs, the others often do not. They are
asked about digits that neither the training nor the search has seen.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from common.digits import Network, accuracy, load


def members(folder: str) -> list[Network]:
    """Load the networks that the search has kept."""
    files = sorted(Path(folder).glob("best-*.safetensors"))
    if not files:
        raise SystemExit(f"no network in {folder}: run hyper_parameter_search.py before")
    return [Network(load_file(file)) for file in files]


def main() -> None:
    """Ask every network, and all of them together."""
    options = parse_arguments()
    pixels, digits = load("held out")
    answers = np.array([network.predict(pixels) for network in members(options.networks)])
    for number, answer in enumerate(answers, 1):
        print(f"network {number} alone: accuracy {accuracy(answer, digits):.4f}")
    print(f"all {len(answers)} together: accuracy {accuracy(answers.mean(axis=0), digits):.4f}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default="runs/search", help="folder of the networks")
    return parser.parse_args()


if __name__ == "__main__":
    main()
