"""Draw the pictures of docs from the figures that are kept there, and that of a timeline anew.

    python benchmarks/pictures.py

All but the timeline are drawn from the kept JSON, so they say what was measured last. The timeline
is of a program that runs for a tenth of a second.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import allreduce
import control
import model
import movements
import network
import simulated_choice
import spare_replicas
import strategies_at_scale

DOCS = Path(__file__).resolve().parent.parent / "docs"
KEPT = DOCS / "benchmarks"

# Rank 1 computes for longer in the second step.
PROGRAM = """
import time
import numpy as np
import collectives as cc

comm = cc.init()
gradient = np.ones(1 << 20, np.float32)
average = comm.plan_allreduce(gradient)
average()
cc.start_timeline("traces")
for step in range(3):
    with cc.timeline_span("forward"):
        time.sleep(0.012 if step == 1 and comm.rank == 1 else 0.004)
    with cc.timeline_span("backward"):
        time.sleep(0.006)
    average()
cc.stop_timeline()
"""


def kept(name: str) -> dict:
    return json.loads((KEPT / f"{name}.json").read_text())


def main() -> None:
    figures = kept("allreduce-2-ranks")
    options = argparse.Namespace(
        ranks=figures["ranks"], dtype=figures["dtype"], plot=KEPT / "allreduce-2-ranks.svg"
    )
    allreduce.draw(options, figures["states"])
    spares = {int(spare): row for spare, row in kept("spare-replicas").items()}
    spare_replicas.picture(spares, str(KEPT / "spare-replicas.svg"))
    found = kept("strategies-at-scale")["speedups"]
    for ways in found.values():
        for way, cells in ways.items():
            ways[way] = {int(replicas): cell for replicas, cell in cells.items()}
    strategies_at_scale.draw(found, KEPT / "strategies-at-scale.svg")
    shares = kept("simulated-choice")["shares of the line"]
    simulated_choice.draw(shares, KEPT / "simulated-shares.svg")
    movements.draw(kept("movements")["states"], KEPT / "movements.svg")
    network.draw(kept("network")["cases"], KEPT / "network.svg")
    model.draw(kept("model")["layouts"], KEPT / "simulated-beside-real.svg")
    control.draw(kept("control"), KEPT / "control.svg")
    timeline(DOCS / "timeline.svg")


def timeline(picture: Path) -> None:
    """Run `PROGRAM` on two ranks, and draw what it did."""
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else str(shutil.which("mpirun"))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(PROGRAM)
        for command in (
            [mpirun, "-np", "2", sys.executable, "train.py"],
            [sys.executable, "-m", "collectives", "timeline", "traces", "--plot", str(picture)],
        ):
            subprocess.run(command, cwd=folder, check=True, timeout=60)


if __name__ == "__main__":
    main()
