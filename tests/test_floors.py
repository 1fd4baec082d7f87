"""Imports point down: the layers of docs/architecture.md, read without running the sources."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

from collectives.communicator import Communicator
from launcher import ROOT

# From the lowest layer up. A component is a folder, or a file beside the folders. It imports
# components of lower layers; inside a folder files import each other, never in a circle.
FLOORS = {
    "collectives": [
        {"arrays", "core"},
        {"kernels", "transport"},
        {"launch", "node"},
        {"algorithms", "tracing"},
        {"calls", "channel", "simulation"},
        {"p2p", "plans"},
        {"devices"},
        {"operations"},
        {"fusion"},
        {"communicator"},
        {"world"},
        {"extend", "testing"},
        {"__init__", "tools"},
        {"__main__"},
    ],
    "strategies": [
        {"errors"},
        {"core"},
        {"checkpoint", "cluster", "launcher", "model_parallel", "optimizers", "quantization"},
        {"elastic", "rpc"},
        {"accumulators", "queues", "session", "variables"},
        {"experiment", "input"},
        {"replicas"},
        {"averaging"},
        {"jax", "strategy", "torch"},
        {"tpu", "remote_optimizers"},
        {"distributed_optimizer", "keras", "parameter_server", "spare_replica"},
        {"demo", "horovod"},
        {"__init__", "__main__"},
    ],
}

# Public modules that the package itself does not import, such as those that load numba.
PUBLIC = {
    "collectives.core.command_line",
    "collectives.core.settings",
    "collectives.extend",
    "collectives.kernels.machine_code",
    "collectives.kernels.numba_compiler",
    "collectives.testing",
    "strategies.quantization",
}

MAY_IMPORT = {
    "greenlet": {"collectives.simulation.clock"},
    "cupy": {
        "collectives.arrays.cuda_adapter",
        "strategies.cluster.gpus",  # bounds its pool
    },
    "mpi4py": {
        "collectives.core.mpi",
        "collectives.transport.mpi",
        "collectives.algorithms.mpi_native",
        "collectives.calls.shared_settings",  # asks the library whether it takes device memory
        "collectives.communicator",
        "collectives.core.oversubscription",
        "collectives.world",  # takes a communicator
        "collectives.launch.processes",
        "collectives.launch.abort_hook",
        "collectives.transport.mailbox",
        "collectives.transport.mpi_messages",
        "collectives.transport.ulfm",
        "collectives.transport.failure_detector",
        "collectives.tools.info",  # asks the library for its version
        "collectives.tools.baselines",  # is what ours is compared with
    },
}


def modules(package: str) -> dict[str, Path]:
    """Module name -> file, for every source file of a package."""
    files = sorted((ROOT / package).rglob("*.py"))
    names = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        names[".".join(parts)] = file
    return names


def imported(file: Path, known: dict[str, Path]) -> set[str]:
    """Names of the modules that a file imports, wherever the import stands: for types, too."""
    found = set()
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else str(node.module))
    return found


def room_of(module: str) -> str:
    """The folder of a module, or the module itself where it stands beside the folders."""
    return (module.split(".") + ["__init__"])[1]


def floor_of(module: str) -> int:
    package, room = module.split(".")[0], room_of(module)
    for number, floor in enumerate(FLOORS[package]):
        if room in floor:
            return number
    raise AssertionError(f"{module} is in no layer: add its component to tests/test_floors.py")


@pytest.mark.parametrize("package", FLOORS)
def test_rooms_import_only_from_floors_below(package):
    known = modules(package)
    for module, file in known.items():
        here = room_of(module)
        for other in imported(file, known) & known.keys():
            there = room_of(other)
            if there != here:
                assert floor_of(other) < floor_of(module), f"{module} imports {other} from above"


@pytest.mark.parametrize("package", ["collectives", "strategies"])
def test_no_module_imports_itself_in_a_circle(package):
    known = modules(package)
    arrows = {name: imported(file, known) & known.keys() for name, file in known.items()}
    below: dict[str, set[str]] = {}
    while len(below) < len(arrows):
        free = [m for m in arrows if m not in below and arrows[m] - {m} <= below.keys()]
        assert free, f"a circle among {sorted(arrows.keys() - below.keys())}"
        below.update({m: arrows[m] for m in free})


def test_folders_of_unit_tests_are_rooms():
    rooms = {room for floors in FLOORS.values() for floor in floors for room in floor}
    unit = ROOT / "tests" / "unit"
    assert {file.relative_to(unit).parts[0] for file in unit.glob("*/*.py")} <= rooms


def test_strategies_use_only_public_names_of_collectives():
    for name, file in modules("strategies").items():
        for module in imported(file, modules("collectives")):
            inside = module.startswith("collectives.") and module not in PUBLIC
            assert not inside, f"{name} imports {module}, expected `import collectives as cc`"


# Variables and attributes of this name hold a communicator, wherever they stand in `strategies`.
COMMUNICATORS = {"comm", "_comm"}


def test_strategies_use_only_public_attributes_of_communicators():
    public = {name for name in dir(Communicator) if not name.startswith("_")}
    public |= {"rank", "size", "local_rank", "local_size", "node_rank", "num_nodes"}
    seen = set()
    for name, file in modules("strategies").items():
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Attribute) or not holds_communicator(node.value):
                continue
            seen.add(node.attr)
            assert node.attr in public, f"{name}:{node.lineno}: {ast.unparse(node)} is internal"
    assert len(seen & public) > 20


def holds_communicator(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in COMMUNICATORS
    return isinstance(node, ast.Name) and node.id in COMMUNICATORS


@pytest.mark.parametrize("library", MAY_IMPORT)
def test_only_some_modules_import(library):
    for package in ("collectives", "strategies"):
        for name, file in modules(package).items():
            roots = {module.split(".")[0] for module in imported(file, {})}
            assert library not in roots or name in MAY_IMPORT[library], f"{name} imports {library}"


# The methods for objects, and files of one call that belong to its user.
PICKLES = {"collectives.calls.pickling", "strategies.launcher"}


def test_no_pickle_on_the_wire_but_in_the_object_methods():
    # mpi4py's methods with small letters pickle whatever they are given; `isend` is ours, too.
    for package in ("collectives", "strategies"):
        for name, file in modules(package).items():
            text = file.read_text()
            for method in (".bcast(", "mpi.isend(", "mpi.irecv(", ".Send_init("):
                assert method not in text, f"{name} calls {method}"
            pickles = re.search(r"import (cloud)?pickle\b", text) is not None
            assert pickles == (name in PICKLES), name


def test_tables_and_lists_in_pages_and_docstrings_are_those_of_the_code():
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    for file, text in tables["texts"]().items():
        assert text == file.read_text(), f"run python docs/tables.py, for {file}"
