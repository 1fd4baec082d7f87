"""The machines that the tests of this folder run on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from namespaces import NamespaceCluster, why_not
from requirements import require


@pytest.fixture(scope="module")
def two_machines() -> Iterator[NamespaceCluster]:
    """Machines m1 and m2."""
    with _machines(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three_machines() -> Iterator[NamespaceCluster]:
    """Machines m1, m2 and m3."""
    with _machines(3) as cluster:
        yield cluster


@contextmanager
def _machines(count: int) -> Iterator[NamespaceCluster]:
    reason = why_not()
    if reason is not None:
        require("netns", reason)
    with NamespaceCluster(count) as cluster:
        yield cluster
