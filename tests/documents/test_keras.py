"""strategies.keras, and its example: with each backend in processes of its own."""

import re
import sys

import pytest

from launcher import ROOT, mpirun, mpirun_path, run
from requirements import needs, require

CHECKS = ROOT / "tests" / "documents" / "keras_checks.py"

BACKENDS = pytest.mark.parametrize(
    ("backend", "packages"), [("torch", ["torch"]), ("jax", ["jax", "optax"])], ids=["torch", "jax"]
)

# An import of Keras takes 6 s of a core for each rank, on a busy machine 100 s.
SECONDS = 280


@BACKENDS
def test_all_checks_on_three_ranks(tmp_path, backend, packages):
    needs("keras", *packages)
    if not re.search(
        r"Open MPI.* (?:[5-9]|\d\d)\.", run([mpirun_path(), "--version"], timeout=30)[1]
    ):
        require("ulfm", "fault tolerance needs Open MPI 5")
    result = mpirun(
        3, CHECKS, tmp_path, timeout=SECONDS, options=("--with-ft", "ulfm"),
        KERAS_BACKEND=backend, UNISONO_ABORT_ON_EXCEPTION="0", JAX_NUM_CPU_DEVICES="2",
    )  # fmt: skip
    names = re.findall(r"^def check_(\w+)", CHECKS.read_text(), re.MULTILINE)
    passed = re.findall(r"^passed (\w+)$", result.stdout, re.MULTILINE)
    assert sorted(passed) == sorted(names * 3), result.stdout + result.stderr


def test_checks_of_each_rank_are_found():
    assert len(re.findall(r"^def check_\w+\(\):$", CHECKS.read_text(), re.MULTILINE)) > 10


@BACKENDS
def test_the_example_learns_the_digits_and_resumes(tmp_path, backend, packages):
    needs("keras", "sklearn", *packages)
    program = ROOT / "examples" / "keras_digits.py"
    assert re.findall(r"  # (\d): ", program.read_text()) == ["1", "2", "3"]
    parts = (["--epochs", "24"], ["--epochs", "25", "--resume"]) if backend == "torch" else ([],)
    for options in parts:
        result = mpirun(
            2, program, "--checkpoints", tmp_path, *options, timeout=SECONDS, KERAS_BACKEND=backend
        ).checked()
        (accuracy,) = re.findall(r"accuracy on the held-out digits: (\S+)", result.stdout)
        assert float(accuracy) >= 0.96
    # The resumed run makes one epoch more.
    assert result.stdout.count("loss: ") == (1 if backend == "torch" else 24)


BACKEND_OF_NUMPY = """
import keras, strategies.keras
try:
    strategies.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("numpy", "strategies.keras: expected the backend torch or jax, got numpy; set KERAS_BACK"),
        ("tensorflow", "expected the backend torch or jax; set KERAS_BACKEND=torch or"),
    ],
)
def test_other_backends_are_refused(backend, text):
    needs("keras")
    program = BACKEND_OF_NUMPY
    if backend == "tensorflow":
        program = "import strategies; strategies.keras"
    result = run(
        [sys.executable, "-c", program], timeout=SECONDS, PYTHONPATH=str(ROOT),
        KERAS_BACKEND=backend,
    )  # fmt: skip
    assert text in result.stdout + result.stderr, result
