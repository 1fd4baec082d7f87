"""The example of how-to/slow-networks.md, which trains in several ways to send fewer bytes."""

import re

from launcher import ROOT, mpirun
from requirements import needs

EXAMPLE = ROOT / "examples" / "compare_compression.py"
LINE = re.compile(r"^ *(.+): +([\d.]+) % +([\d,]+) bytes +([\d.]+) ms$", re.MULTILINE)


def test_every_way_learns_the_digits():
    needs("torch", "sklearn")
    options = ("--epochs", 8, "--hidden", 64)
    result = mpirun(2, EXAMPLE, *options, timeout=200, UNISONO_SHARED_MEMORY="off").checked()
    accuracy = {way: float(percent) for way, percent, *_ in LINE.findall(result.stdout)}
    ways = ["float32", "16 bits", "8 bits, feedback", "top-k 1 %, feedback", "post-local SGD"]
    assert list(accuracy) == [*ways, "PowerSGD"], result
    # Of 300 digits; the largest 1 % is 48 numbers of a step.
    assert min(accuracy.values()) > 70, result
    assert accuracy["float32"] > 90, result
