"""What a training program says in the end."""

from __future__ import annotations

from pathlib import Path

import collectives as cc
import strategies


def report(
    comm: cc.Communicator, accuracy: float, speed: float, checkpoint: Path | None, metrics: Path
) -> None:
    """Draw the loss curve beside the metrics, and print a summary; on rank 0 only."""
    if comm.rank != 0:
        return
    from mpi4py import MPI

    picture = metrics.with_name("loss.png")
    strategies.session.loss_curve(metrics, picture)
    library = MPI.Get_library_version().split(",")[0].strip("\0\n ")
    ranks, nodes = _count(comm.size, "rank"), _count(comm.num_nodes, "node")
    print(f"{ranks} on {nodes}, {library}")
    print(f"{speed:.0f} samples per second in the last epoch")
    print(f"accuracy on the held-out digits: {accuracy:.4f}")
    print(f"loss curve: {picture}")
    print(f"checkpoint: {checkpoint}")
    print(f"metrics:    {metrics}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
