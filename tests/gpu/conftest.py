"""Tests that need a CUDA device, CuPy, and for some rows PyTorch or JAX: `make test-gpu`.

They are skipped on machines without; with UNISONO_REQUIRE=gpu they fail there.
"""

import importlib
import os

import pytest

from requirements import require

# JAX would take three quarters of each GPU, which the other libraries and programs need, too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.fixture
def cupy():
    try:
        module = importlib.import_module("cupy")
    except ImportError:
        require("gpu", "CuPy is not installed")
    if not module.cuda.is_available():
        require("gpu", "CuPy finds no CUDA device")
    return module


@pytest.fixture
def torch(cupy):
    try:
        module = importlib.import_module("torch")
    except ImportError:
        require("torch", "it is not installed")
    if not module.cuda.is_available():
        require("torch", "it sees no CUDA device")
    return module


@pytest.fixture
def jax(cupy):
    try:
        module = importlib.import_module("jax")
    except ImportError:
        require("jax", "it is not installed")
    if module.default_backend() != "gpu":
        require("jax", "it sees no CUDA device")
    return module
