"""What a training program does besides training: it is asked to stop, and says how far it is."""

from __future__ import annotations

import signal
from pathlib import Path

import collectives as cc
import strategies

# Exit status of a run that was asked to stop; it goes on with --resume.
STOPPED_EARLY = 85


class StopRequest:
    """Remember that the batch system asked us to stop (SIGUSR1, SIGTERM)."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: object) -> None:
        self.requested = True


class Report:
    """Progress, metrics and a last word, all from rank 0; to be used with `with`.

    Args:
        comm: the ranks that train.
        folder: where `metrics.jsonl` and `loss.png` go.
        epochs: how many this run has to do.
        resume_step: step of the checkpoint that the run goes on from; None for a new run.
    """

    def __init__(
        self, comm: cc.Communicator, folder: Path, epochs: int, resume_step: int | None
    ) -> None:
        self._comm = comm
        self._metrics, self._picture = folder / "metrics.jsonl", folder / "loss.png"
        self._speed = 0.0
        self._writer = None
        if comm.rank == 0:
            writer = strategies.training.MetricsWriter
            self._writer = writer(self._metrics, resume_step=resume_step)
        self._progress = strategies.training.Progress(
            max(0, epochs), description="epochs", enabled=comm.rank == 0
        )

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.close()
        if self._writer is not None:
            self._writer.close()

    def epoch(self, step: int, epoch: int, facts: dict[str, float]) -> None:
        """Write what an epoch has brought."""
        self._speed = facts["samples_per_second"]
        self._progress.update(loss=facts["loss"])
        if self._writer is not None:
            self._writer.write(step=step, epoch=epoch, **facts)

    def finish(self, accuracy: float, checkpoint: Path | None) -> None:
        """Draw the loss curve and tell people what happened."""
        if self._comm.rank != 0:
            return
        from mpi4py import MPI

        strategies.training.loss_curve(self._metrics, self._picture)
        library = MPI.Get_library_version().split(",")[0].strip("\0\n ")
        ranks, nodes = _count(self._comm.size, "rank"), _count(self._comm.num_nodes, "node")
        print(f"{ranks} on {nodes}, {library}")
        print(f"{self._speed:.0f} samples per second in the last epoch")
        print(f"accuracy on the held-out digits: {accuracy:.4f}")
        print(f"loss curve: {self._picture}")
        print(f"checkpoint: {checkpoint}")
        print(f"metrics:    {self._metrics}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
