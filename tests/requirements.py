"""Tests of what a laptop may not have: skipped there, failures where they are required.

A skip says which requirement is missing, as "NAME: reason": by the name `tests/run.py` knows such a
skip from one that hides a test.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from types import ModuleType
from typing import NoReturn

import pytest

REQUIREMENTS = (
    "compiler",  # of C++
    "cores",  # two of them
    "frameworks",  # over PyTorch, see `_FRAMEWORKS`; Keras over it and JAX; Flax
    "gpu",  # a CUDA device, and CuPy
    "impi",  # Intel MPI, beside the first MPI library
    "jax",  # with Optax
    "matplotlib",
    "memory",  # more than 2 GiB to share
    "mpich",  # beside the first MPI library
    "netns",  # network namespaces: root, iproute2
    "notebook",  # nbclient and ipykernel, which execute one
    "package",  # what builds ours, and an index of packages
    "pyright",  # the package basedpyright, which needs no network when it runs
    "site",  # Sphinx, Playwright and a Chromium
    "sklearn",
    "slurm",  # a private cluster: root, Debian packages
    "torch",
    "ulfm",  # an MPI library that outlives its ranks: Open MPI 5
)

_FRAMEWORKS = (
    "accelerate", "flax", "ignite", "keras", "lightning", "pytorch_metric_learning",
    "torch_geometric", "torchmetrics", "transformers",
)  # fmt: skip

# Packages that come with another one that has the requirement's name.
_PART_OF = {
    "optax": "jax",
    **dict.fromkeys(_FRAMEWORKS, "frameworks"),
    **dict.fromkeys(("build", "twine"), "package"),
    "basedpyright": "pyright",
    **dict.fromkeys(("ipykernel", "nbclient"), "notebook"),
    **dict.fromkeys(
        ("axe_playwright_python", "furo", "myst_parser", "playwright", "sphinx"), "site"
    ),
}

# What tests may import only after they asked for it.
OPTIONAL = ("cupy", "jax", "jaxlib", "matplotlib", "sklearn", "torch", *_PART_OF)

# In pytest's words the name begins the reason, or follows "Skipped: " if a whole file is skipped.
_MARK = re.compile(rf"(?:^|'Skipped: )({'|'.join(REQUIREMENTS)}): ")


def required(name: str) -> bool:
    """Tell whether UNISONO_REQUIRE names a requirement."""
    return name in os.environ.get("UNISONO_REQUIRE", "").split(",")


def require(name: str, reason: str) -> NoReturn:
    """Skip a test, or a whole file, because of `reason`; fail if UNISONO_REQUIRE lists `name`."""
    assert name in REQUIREMENTS, f"{name} is none of {REQUIREMENTS}"
    if required(name):
        pytest.fail(f"UNISONO_REQUIRE names {name}, but {reason}", pytrace=False)
    pytest.skip(f"{name}: {reason}", allow_module_level=True)


def needs(*packages: str) -> None:
    """Require packages, without importing them."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            require(_PART_OF.get(package, package), f"{package} is not installed")


def installed(module: str) -> ModuleType:
    """Import a module of an optional package, which is required."""
    needs(module.partition(".")[0])
    return importlib.import_module(module)


def missing(skipped: str) -> str | None:
    """Return the requirement that a skip names; None if it has another reason."""
    found = _MARK.search(skipped)
    return found and found[1]
