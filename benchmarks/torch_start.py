"""The start of a script of PyTorch: this project's backend beside Gloo, in turns.

    python benchmarks/torch_start.py [--ranks 2] [--turns 9] [--json FILE]

Each turn is a job under mpirun, by the clock on the wall: import PyTorch, `init_process_group`, one
`all_reduce`, `destroy_process_group`. Gloo gets rank, size and address by variables, as from
`torchrun`, and loads nothing of this project. Medians, and quartiles of the ratio of neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from turns import machine

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = """
import torch
torch.distributed.init_process_group("{backend}")
torch.distributed.all_reduce(x := torch.ones(1024))
assert x[0] == torch.distributed.get_world_size()
torch.distributed.destroy_process_group()
"""

# What an installed project has: PyTorch finds the backend by it.
ENTRY_POINT = "[torch.backends]\nunisono = unisono_torch:register\n"

# Gloo takes these from `torchrun`, which takes longer to start than mpirun does.
VARIABLES = """
import os
os.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
os.environ["WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_SIZE"]
os.environ["LOCAL_WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"]
"""


def main() -> None:
    """Measure, and print a line for each backend."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"unisono": [], "gloo": []}
    with tempfile.TemporaryDirectory() as folder:
        metadata = Path(folder, "unisono-0.dist-info")
        metadata.mkdir()
        metadata.joinpath("METADATA").write_text(
            "Metadata-Version: 2.1\nName: unisono\nVersion: 0\n"
        )
        metadata.joinpath("entry_points.txt").write_text(ENTRY_POINT)
        for turn in range(options.turns + 1):  # the first is not counted
            for backend, found in seconds.items():
                took = started(backend, options.ranks, folder)
                if turn:
                    found.append(took)
    medians = {backend: statistics.median(found) for backend, found in seconds.items()}
    ratios = [ours / theirs for ours, theirs in zip(*seconds.values(), strict=True)]
    quartiles = statistics.quantiles(ratios)
    print(f"{machine()}, {options.ranks} ranks")
    for backend, median in medians.items():
        print(f"{backend:8} {median:6.2f} s")
    print("unisono / gloo, quartiles: " + " ".join(f"{quartile:.2f}" for quartile in quartiles))
    if options.json:
        facts = {"machine": machine(), "ranks": options.ranks, "turns": options.turns}
        facts |= {"seconds": medians, "quartiles of the ratio": quartiles}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


def started(backend: str, ranks: int, folder: str) -> float:
    """Run a job; returns the seconds that it took."""
    program = PROGRAM.format(backend=backend)
    environment = dict(os.environ)
    if backend == "gloo":
        program = VARIABLES + program
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    else:
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), folder])
    script = Path(folder, f"{backend}.py")
    script.write_text(program)
    mpirun = Path(sys.executable).parent / "mpirun"
    command = [str(mpirun), "-np", str(ranks), sys.executable, str(script)]
    began = time.perf_counter()
    subprocess.run(command, env=environment, check=True)
    return time.perf_counter() - began


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
