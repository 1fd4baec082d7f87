"""Tests of distributed code without MPI: ranks as threads of one process."""

from collectives.testing.ranks import World, run_ranks

__all__ = ["World", "run_ranks"]
