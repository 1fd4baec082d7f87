"""Fixtures of all tests, and how ranks agree on the outcome of a test.

Under mpirun every rank runs the same tests in the same order. After each phase of a test the ranks
exchange their outcomes on a private communicator: if one fails, the test fails on all, with the
failing ranks' reports, and no rank runs ahead into the next test.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import hypothesis
import numpy as np
import pytest

import inprocess
import launcher
import listed
import pairwise
import reports
from collectives.algorithms.selection import ALGORITHMS
from collectives.arrays.reduction import MEAN, SUM
from collectives.communicator import from_mpi
from collectives.core.settings import Settings, Stores
from launcher import STORING, WORLD_SIZES

pytest_plugins = ["unisono_pytest"]

# JAX looks at it when it starts: strategies are tested on 8 devices of the host.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

# Machines are shared: how long an example takes says nothing about it.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

WORLD_RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
WORLD_SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("PMI_SIZE", "1")))
UNDER_MPI = os.environ.get("UNISONO_TEST_WORLD") == "mpi"


class ThreadWorld(NamedTuple):
    """Some ranks as threads, which meet in shared memory or exchange messages only."""

    size: int
    mode: str
    shared: bool = False
    stores: Stores = "auto"

    @property
    def kind(self):
        return "shared" if self.shared else self.mode

    @property
    def name(self):
        return f"{self.size}-{self.kind if self.stores == 'auto' else self.stores}"

    def algorithms(self, operation):
        """Names of the algorithms that an operation has in this world."""
        names = [name for name in ALGORITHMS[operation] if name != "native"]
        return _that_store(self, [*names, *(["node"] if self.shared else []), "auto"])

    def run(self, function):
        """Call `function(comm)` on every rank; returns this process's results."""
        settings = inprocess.world_settings(self.shared, self.stores)
        return inprocess.run_ranks(self.size, function, self.mode, settings=settings)


class MpiWorld(NamedTuple):
    """The ranks of the mpirun that runs pytest, of which this process is one."""

    shared: bool
    size: int = WORLD_SIZE
    stores: Stores = "auto"

    @property
    def kind(self):
        return "shared" if self.shared else "messages"

    @property
    def name(self):
        return f"mpi-{self.kind}"

    def algorithms(self, operation):
        """Names of the algorithms that an operation has in this world."""
        meets = self.shared and self.size > 1  # a rank alone meets nobody
        names = [*ALGORITHMS[operation], *(["node"] if meets else []), "auto"]
        return _that_store(self, names)

    def run(self, function):
        """Call `function(comm)` on this rank."""
        from mpi4py import MPI

        settings = inprocess.world_settings(self.shared, self.stores)
        comm = from_mpi(MPI.COMM_WORLD, settings)
        try:
            result = function(comm)
        except pytest.skip.Exception:  # on every rank
            comm.close()
            raise
        comm.close()
        return [result]


def _that_store(world, names):
    """Of a world whose way of storing is forced, the algorithms that go through shared memory."""
    forced = world.stores != "auto"
    return [n for n in names if n in ("node", "hierarchical", "auto")] if forced else names


# The stricter mode at sizes that are no power of two; at one that is, `--long` has both.
_THREAD_WORLDS = [
    ThreadWorld(1, "eager"),
    ThreadWorld(2, "eager"),
    ThreadWorld(2, "synchronous"),
    ThreadWorld(3, "synchronous"),
    ThreadWorld(5, "synchronous"),
    ThreadWorld(3, "eager", shared=True),
]

# In the files `STORING`: until it has measured, "auto" stores into the caches.
_FORCED = ("streaming", "plain")

# Numbers of MPI ranks; with `--long` both kinds have all of them. Messages of more ranks are tested
# among threads, whose order of events is the harder one.
_USUAL_SIZES = {"shared": (1, 2, 4), "messages": (2, 3)}


def _worlds(metafunc):
    """The worlds of a test."""
    if UNDER_MPI:
        stores = metafunc.config.getoption("--stores")
        return [MpiWorld(True, stores=stores), *([MpiWorld(False)] if stores == "auto" else [])]
    forced = [ThreadWorld(3, "eager", shared=True, stores=way) for way in _ways(metafunc)[1:]]
    worlds = [*_THREAD_WORLDS, *forced]
    return [w for w in worlds if pairwise.full or (w.size, w.kind) != (2, "synchronous")]


def _ways(metafunc):
    """How ranks that are threads store in a test: as they choose, and forced."""
    forced = metafunc.definition.path.name in STORING
    return ["auto", *_FORCED[: (2 if pairwise.full else 1) if forced else 0]]


@pytest.fixture
def stores(request):
    """How ranks of a node store for each other: the setting of that name."""
    return request.config.getoption("--stores")


def pytest_generate_tests(metafunc):
    """Run a test in every world; one marked `algorithms(operation)` with each algorithm there."""
    if "stores" in metafunc.fixturenames and not UNDER_MPI:
        metafunc.parametrize("stores", _ways(metafunc))
    if "world" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("algorithms")
    worlds = _worlds(metafunc)
    if marker is None:
        metafunc.parametrize("world", worlds, ids=[world.name for world in worlds])
    else:
        pairs = [(world, name) for world in worlds for name in world.algorithms(*marker.args)]
        ids = [f"{world.name}-{name}" for world, name in pairs]
        metafunc.parametrize(("world", "algorithm"), pairs, ids=ids)


@pytest.fixture
def comm(world):
    """In a test that takes it: the communicator, on every rank of the world."""
    return world


def pytest_pyfunc_call(pyfuncitem):
    """Call a test that takes `comm` on every rank of its world."""
    world = pyfuncitem.funcargs.get("comm")
    if not hasattr(world, "run"):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    given = {name: pyfuncitem.funcargs[name] for name in names if name != "comm"}
    world.run(lambda comm: pyfuncitem.obj(comm=comm, **given))
    return True


@pytest.fixture
def torch_ranks(world, monkeypatch):
    """The process group of torch.distributed, over all ranks: (rank, number of ranks)."""
    if not UNDER_MPI:
        pytest.skip("torch.distributed has one world for each process")
    import datetime

    from torch import distributed

    import collectives as cc
    import unisono_torch

    unisono_torch.register()  # as an installed project does
    monkeypatch.setenv("UNISONO_TIMEOUT", "20")
    if not world.shared:
        monkeypatch.setenv("UNISONO_SHARED_MEMORY", "off")
    cc.shutdown()
    distributed.init_process_group("unisono", timeout=datetime.timedelta(seconds=20))
    yield distributed.get_rank(), distributed.get_world_size()
    if distributed.is_initialized():
        distributed.destroy_process_group()
    cc.shutdown()


@pytest.fixture(autouse=True)
def errors_of_jobs_are_listed(request, monkeypatch):
    """In tests/failures: errors of ours that a job prints are on the page of all messages."""
    if request.path.parent.name != "failures":
        return
    run = launcher.run

    def watched(*arguments, **options):
        result = run(*arguments, **options)
        listed.check_output(result.stdout + result.stderr)
        return result

    monkeypatch.setattr(launcher, "run", watched)


def pytest_addoption(parser):
    group = parser.getgroup("unisono")
    group.addoption("--long", action="store_true", help="long proofs at their full length")
    group.addoption(
        "--stores", choices=("auto", "plain", "streaming"), default="auto",
        help="how ranks that are processes store for each other, in their shared memory alone",
    )  # fmt: skip
    group.addoption(
        "--without", type=Path, metavar="REPORT",
        help="leave out the tests that passed in an earlier run, unless they depend on packages",
    )  # fmt: skip


def pytest_configure(config):
    pairwise.full = config.getoption("--long")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session):
    """Compile what every first call needs, before any limit of a test runs.

    Where no file has it yet, this takes 10 s, on a busy machine more than a rank waits for others.
    """
    if hasattr(session.config, "workerinput"):
        return  # whoever started this worker has done so
    if WORLD_RANK == 0:
        with contextlib.suppress(Exception):  # what is wrong is for the tests to say
            inprocess.run_ranks(2, _first_calls, timeout=600, settings=Settings(timeout=600))
    if UNDER_MPI:
        _private_communicator().Barrier()


def _first_calls(comm):
    for count, op in ((1, SUM), (1 << 20, SUM), (1 << 20, MEAN)):
        comm.allreduce(np.ones(count, np.float32), op=op)
    comm.reduce_scatter(np.ones(1 << 20, np.float32), op=SUM)
    shared = comm.shared_empty(1 << 20, np.float32)
    comm.allreduce(shared, op=SUM, out=shared)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "torch_ranks" in fixtures or (UNDER_MPI and "world" in fixtures):
            item.add_marker(pytest.mark.mpi)
    if not pairwise.full:
        _keep(config, items, {i for i in items if not i.get_closest_marker("long")})
    with_parameters = [item for item in items if hasattr(item, "callspec")]
    chosen = _exist(with_parameters) if pairwise.full else _pairwise(with_parameters)
    _keep(config, items, {*items} - {*with_parameters} | {*chosen})
    report = config.getoption("--without")
    if report is not None:
        passed = reports.passed(report)
        # What means something else with other packages runs again.
        again = {i for i in items if i.get_closest_marker("packages")}
        _keep(config, items, again | {i for i in items if reports.name_of(i.nodeid) not in passed})


def _keep(config, items, kept):
    """Deselect the other tests."""
    out = [item for item in items if item not in kept]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item in kept]


def _pairwise(items):
    """Choose from tests with parameters: not their full cross, but all pairs.

    In worlds the number of ranks, how they exchange messages and store, and the algorithm are
    parameters, too. Under MPI the other numbers of ranks take part: each run, which has one of
    them, chooses alike and keeps its own.
    """
    functions = defaultdict(list)
    for item in items:
        functions[item.parent.nodeid, item.originalname].append(item)
    for cases in functions.values():
        rows = [(item, (size, *_factors(item))) for item in cases for size in _sizes(item)]
        for number in pairwise.pairwise([row for _, row in rows]):
            item, (size, *_) = rows[number]
            if size == _size(item):
                yield item


def _exist(items):
    return [item for item in items if _size(item) in _sizes(item)]


def _size(item):
    """The number of ranks of a case; None outside of worlds."""
    world = item.callspec.params.get("world")
    return world and world.size


def _sizes(item):
    """Numbers of ranks with which a case exists."""
    world = item.callspec.params.get("world")
    sizes = [_size(item)]
    if UNDER_MPI and world is not None:
        sizes = WORLD_SIZES if pairwise.full else _USUAL_SIZES[world.kind]
    # A rank alone shares its memory with nobody.
    algorithm = item.callspec.params.get("algorithm")
    several = algorithm == "node" or item.get_closest_marker("several")
    return [n for n in sizes if n != 1 or not several]


def _factors(item):
    """What a case is made of, but for the number of ranks."""
    values = dict(item.callspec.params)
    world = values.pop("world", None)
    # Only ranks that share memory store for each other.
    stores = world and world.shared and world.stores
    return world and world.kind, stores, values.pop("algorithm", None), *map(id, values.values())


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    if UNDER_MPI and WORLD_SIZE > 1:
        _agree(outcome.get_result())


def _agree(report):
    """Make the worst outcome of all ranks the outcome on every rank."""
    comm = _private_communicator()
    reports = comm.allgather((report.outcome, report.longreprtext))
    outcomes = {outcome for outcome, _ in reports}
    if outcomes == {report.outcome} and report.outcome != "failed":
        return
    if outcomes <= {"passed", "skipped"}:
        reports = [("failed", f"{outcome} here, but not on all ranks") for outcome, _ in reports]
    report.outcome = "failed"
    report.longrepr = "\n".join(
        f"--- rank {rank} of {comm.size}: {outcome}\n{text}"
        for rank, (outcome, text) in enumerate(reports)
        if outcome == "failed"
    )


_private = []


def _private_communicator():
    if not _private:
        from mpi4py import MPI

        _private.append(MPI.COMM_WORLD.Dup())
    return _private[0]
