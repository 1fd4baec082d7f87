"""Public names: complete, sorted, documented, and their examples true."""

import doctest
import importlib
import importlib.util
import inspect
import os
import pydoc
import re
import sys
import textwrap

import pytest

import collectives as cc
import strategies
from launcher import ROOT, run
from requirements import needs
from test_floors import modules

# By default Keras imports TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "torch")

FILES = {
    name.removesuffix(".__init__"): file
    for package in ("collectives", "strategies")
    for name, file in modules(package).items()
    if not name.endswith("__main__")
}
MODULES = list(FILES)


# What a module imports as soon as it is imported, and what its examples do.
NEEDED = re.compile(
    r"^(?: *>>> |try:\n    )?(?:import|from) (torch|jax|keras|optax)\b", re.MULTILINE
)


def needed(name):
    """Optional packages that a module, its package, or its examples cannot do without."""
    package = name.rpartition(".")[0]
    above = needed(package) if package in FILES else set()
    return above.union(NEEDED.findall(FILES[name].read_text()))


def loaded(name):
    """The module, unless it is one for a package that is not installed."""
    needs(*needed(name))
    return importlib.import_module(name)


@pytest.mark.parametrize("name", MODULES)
def test_all_lists_what_the_module_defines(name):
    module = loaded(name)
    assert module.__doc__, f"{name} says nothing about itself"
    exported = getattr(module, "__all__", [])
    for public in exported:
        assert hasattr(module, public), f"{name}.__all__ lists {public}, which is not there"
    own = {
        public
        for public, thing in vars(module).items()
        if not public.startswith("_") and getattr(thing, "__module__", None) == name
        and (inspect.isfunction(thing) or inspect.isclass(thing))
    }  # fmt: skip
    assert own <= set(exported), f"{name} defines {own - set(exported)} beside __all__"


# Modules that a package imports at their first use; they are not in `__all__`.
AT_FIRST_USE = {
    "collectives": [],
    "strategies": ["experiment", "horovod", "jax", "keras", "model_parallel", "torch"],
}


@pytest.mark.packages
def test_modules_of_strategies_are_imported_at_their_first_use():
    text = f"""
import importlib.util, sys, strategies
for name in {AT_FIRST_USE["strategies"]}:
    assert f"strategies.{{name}}" not in sys.modules, name
    found = hasattr(strategies, name)
    needed = name if name in ("jax", "keras", "torch") else "sys"
    assert found == (importlib.util.find_spec(needed) is not None), name
    assert (f"strategies.{{name}}" in sys.modules) == found, name
strategies.experiment.train_and_evaluate
strategies.model_parallel.allgather
assert not hasattr(strategies, "tensorflow")
"""
    run([sys.executable, "-c", text], timeout=60, PYTHONPATH=str(ROOT)).checked()


@pytest.mark.parametrize("package", ["collectives", "strategies"])
def test_dir_shows_what_is_public(package):
    module = importlib.import_module(package)
    assert dir(module) == sorted([*module.__all__, *AT_FIRST_USE[package]])


def reachable(names):
    """Modules that are in the `__all__` of one of these, or of one that is."""
    found, ahead = set(), list(names)
    while ahead:
        name = ahead.pop()
        if name not in found and not needed(name).difference(present()):
            found.add(name)
            module = importlib.import_module(name)
            things = [getattr(module, public) for public in module.__all__]
            ahead += [thing.__name__ for thing in things if inspect.ismodule(thing)]
    return found


def present():
    """Optional packages that are here."""
    return {name for name in ("torch", "jax", "keras", "optax") if importlib.util.find_spec(name)}


def test_every_public_module_has_a_page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import public_names

    described = set(public_names.MODULES)
    assert reachable(described) <= described
    # What is imported by its own name, and so is in no `__all__`.
    alone = {name for name in MODULES if re.fullmatch(r"strategies(\.horovod|\.model_parallel)?"
             r"\.(torch|jax|keras|numpy|experiment)", name)}  # fmt: skip
    assert {name for name in alone if "__all__" in FILES[name].read_text()} <= described


# What takes longest to import is imported when first needed: docs/support.md has what that leaves.
LATE = ["numba", "llvmlite", "torch", "jax", "optax", "keras", "cupy", "mpi4py.MPI", "matplotlib",
        "sklearn", "tensorboardX", "fsspec"]  # fmt: skip


@pytest.mark.parametrize("package", ["collectives", "strategies"])
def test_importing_a_package_loads_nothing_that_takes_long(package):
    text = f"import sys, {package}; print(*[name for name in {LATE} if name in sys.modules])"
    result = run([sys.executable, "-c", text], timeout=60, PYTHONPATH=str(ROOT)).checked()
    assert result.stdout.split() == []


def test_strategies_shows_few_names_and_the_rest_in_namespaces():
    names = set(strategies.__all__)
    assert len(names) <= 46
    for name in names:
        space = getattr(strategies, name)
        if inspect.ismodule(space) and space is not strategies.optimizers:
            twice = names.intersection(space.__all__) - {"ParameterServerStrategy"}
            assert not twice, f"strategies.{name} has {twice} a second time"


def test_functions_of_the_world_have_the_signatures_of_the_methods():
    functions = [name for name in cc.__all__ if hasattr(cc.Communicator, name)]
    functions = [name for name in functions if inspect.isfunction(getattr(cc.Communicator, name))]
    assert len(functions) >= 28
    for name in functions:
        function, method = getattr(cc, name), getattr(cc.Communicator, name)
        _, *parameters = inspect.signature(method).parameters.values()
        expected = inspect.signature(method).replace(parameters=parameters)
        assert inspect.signature(function) == expected, name
        assert inspect.getdoc(function) == inspect.getdoc(method)
    text = pydoc.plain(pydoc.render_doc(cc.allreduce))
    assert "allreduce(x: 'Any', *, op:" in text
    assert "compression: 'Compression | None' = NONE" in text


@pytest.mark.parametrize("package", ["collectives", "strategies"])
def test_public_functions_and_methods_have_docstrings(package):
    module = importlib.import_module(package)
    for public in module.__all__:
        thing = getattr(module, public)
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        assert inspect.getdoc(thing), f"{package}.{public}"
        for name, member in vars(thing).items() if inspect.isclass(thing) else ():
            if inspect.isfunction(member) and not name.startswith("_"):
                assert inspect.getdoc(member), f"{package}.{public}.{name}"


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(loaded(name), optionflags=options)
    assert result.failed == 0


def test_only_modules_that_say_so_need_optional_packages():
    text = """
        import importlib, sys
        for package in ("torch", "jax", "keras", "optax", "cupy"):
            sys.modules[package] = None  # as if it were not installed
        for name in sys.argv[1:]:
            importlib.import_module(name)
    """
    others = [name for name in MODULES if not needed(name)]
    run([sys.executable, "-c", textwrap.dedent(text), *others], timeout=100).checked()
