"""The Slurm that the tests of this folder submit to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster import SlurmCluster, why_not
from requirements import require


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Two idle nodes with four CPUs each."""
    reason = why_not()
    if reason is not None:
        require("slurm", reason)
    with SlurmCluster() as cluster:
        yield cluster
