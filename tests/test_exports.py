"""Public names: complete, sorted, documented, and their examples true."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import pydoc

import pytest

import collectives as cc
from requirements import require
from test_floors import modules

MODULES = [
    name.removesuffix(".__init__")
    for package in ("collectives", "strategies")
    for name in modules(package)
    if not name.endswith("__main__")
]


def loaded(name):
    """The module, unless it is one for a package that is not installed, which it is called by."""
    package = name.rpartition(".")[2]
    if package in ("torch", "jax") and importlib.util.find_spec(package) is None:
        require(package, f"{package} is not installed")
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


@pytest.mark.parametrize("package", ["collectives", "strategies"])
def test_dir_shows_what_is_public(package):
    module = importlib.import_module(package)
    assert dir(module) == sorted(module.__all__)


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
