"""The example that serves a network with weights of 8 bits."""

import re
import sys

import pytest

from launcher import ROOT, run


def test_8_bits_take_a_quarter_of_the_memory_and_recognise_as_many_digits():
    program = str(ROOT / "examples" / "eight_bit_weights.py")
    result = run([sys.executable, program, "--hidden", "2048"], timeout=100).checked()
    lines = re.findall(r"^ *(.*): (\S+) MiB, \d+ us a query, accuracy (\S+)$", result.stdout, re.M)
    found = {name: (float(size), float(accuracy)) for name, size, accuracy in lines}
    assert list(found) == ["float32, NumPy", "float32", "8 bits"]
    size, accuracy = found["float32"]
    assert found["float32, NumPy"] == (size, pytest.approx(accuracy, abs=0.01))
    assert accuracy > 0.9
    # A quarter, and for each unit a step of 4 bytes, where it has 64 weights.
    assert found["8 bits"][0] == pytest.approx(size * (1 / 4 + 1 / 64), rel=0.1)
    assert found["8 bits"][1] == pytest.approx(accuracy, abs=0.01)
