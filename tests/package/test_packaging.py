"""The recipes in `packaging` name the version and the dependencies that setup.cfg has."""

from __future__ import annotations

import ast
import configparser
import re

import pytest

from collectives.core.version import __version__
from launcher import ROOT

FOLDER = ROOT / "packaging"
CONDA = FOLDER / "conda" / "recipe.yaml"
SPACK = FOLDER / "spack" / "packages" / "py_unisono" / "package.py"
EASYBUILD = next((FOLDER / "easybuild").glob("*.eb"))
APPTAINER = FOLDER / "apptainer" / "unisono.def"
DOCKER = FOLDER / "docker" / "Dockerfile"
RECIPES = (CONDA, SPACK, EASYBUILD, APPTAINER, DOCKER)


def lowest() -> dict[str, str]:
    """Return name and lowest version of all that an installation without loops needs."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lines = settings["options"]["install_requires"].split()
    lines += settings["options.extras_require"]["numba"].split()
    return dict(line.split(">=") for line in lines)


def spelled(names: dict[str, str], of_project: dict[str, str]) -> dict[str, str]:
    """Return the dependencies with the names that they have elsewhere."""
    return {names.get(name, name): version for name, version in of_project.items()}


def test_conda_names_the_dependencies():
    text = CONDA.read_text()
    run = text[text.index("  run:\n") : text.index("\ntests:")]
    found = dict(re.findall(r"^ +- ([\w-]+) >=([\d.]+)$", run, re.MULTILINE))
    assert found.pop("python") == "3.10"
    assert found == spelled({"msgpack": "msgpack-python"}, lowest())


def test_spack_names_the_dependencies():
    text = SPACK.read_text()
    found = dict(re.findall(r'^    depends_on\("py-([\w-]+)@([\d.]+):", type="run"\)$', text, re.M))
    assert found == spelled({"ml_dtypes": "ml-dtypes"}, lowest())
    assert 'depends_on("mpi", type="run")\n' in text
    # The checkout that contains the recipe.
    assert SPACK.parents[4] == ROOT


def test_easybuild_has_versions_that_the_project_allows():
    pairs = re.findall(r"^    \('([\w-]+)', '([\d.]+)'", EASYBUILD.read_text(), re.MULTILINE)
    found = {name.lower(): version for name, version in pairs}
    # Part of another module.
    holders = {"numpy": "scipy-bundle", "msgpack": "python-bundle-pypi", "llvmlite": "numba"}
    for name, least in lowest().items():
        version = found[holders.get(name, name)]
        assert name in holders or parts(version) >= parts(least), name


def parts(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_images_have_the_same_system_and_wheel():
    wheel = f"unisono-{__version__}-py3-none-manylinux_2_28_x86_64.whl"
    for path in (APPTAINER, DOCKER):
        text = path.read_text()
        assert wheel in text, path
        assert re.search(r"(?i)^from:? debian:13-slim$", text, re.MULTILINE), path
        assert "openmpi-bin python3 python3-venv" in text, path


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_a_recipe_has_the_version_and_a_row_of_the_page(path):
    where = path.name if path is EASYBUILD else path.read_text()
    assert __version__ in where
    assert f"`{path.relative_to(FOLDER)}`" in (FOLDER / "README.md").read_text()


def test_python_s_recipes_parse():
    for path in (SPACK, EASYBUILD):
        ast.parse(path.read_text())
