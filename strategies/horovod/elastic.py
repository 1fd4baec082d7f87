"""Horovod's names for jobs that change their size while they run: each says what to do instead.

A rank that dies ends the job here: its error names the rank, and a job that is submitted again goes
on from the last checkpoint, with any number of ranks.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

_HELP = (
    "write checkpoints by strategies.CheckpointManager, start the job again when it has ended, and "
    "go on from checkpoints.restore_or_none(), with any number of ranks; batches by "
    "strategies.torch.sampler.ShardedSampler, whose state goes into the checkpoint. "
    "docs/migrate-from-horovod.md has an example"
)


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(f"hvd.elastic.{name}: jobs do not change their size here; {_HELP}")


def run(func: Any) -> NoReturn:
    """Say what to do instead of running again after a rank is lost."""
    _refuse("run")


def State(*args: Any, **kwargs: Any) -> NoReturn:
    """Say what to do instead."""
    _refuse("State")


def ObjectState(*args: Any, **kwargs: Any) -> NoReturn:
    """Say what to do instead."""
    _refuse("ObjectState")


def TorchState(*args: Any, **kwargs: Any) -> NoReturn:
    """Say what to do instead."""
    _refuse("TorchState")


def ElasticSampler(*args: Any, **kwargs: Any) -> NoReturn:
    """Say what to do instead."""
    _refuse("ElasticSampler")
