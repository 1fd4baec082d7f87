"""What torch.compile leaves alone, whichever is imported first."""

import sys

import pytest

from launcher import ROOT, run
from requirements import needs

needs("torch")

# Files of both packages, of a program, and whether the compiler would skip functions in them.
LOOK = """
import sys

import pytest
from torch._dynamo import trace_rules
import collectives, strategies
for file in (collectives.__file__, strategies.__file__, "/home/me/train.py"):
    print(trace_rules.check_file(file).skipped)
print(sum(type(finder).__module__ == "collectives.core.torch_compile" for finder in sys.meta_path))
"""


@pytest.mark.parametrize("first", ["collectives", "strategies", "torch._dynamo", "torch"])
def test_the_compiler_skips_both_packages(first):
    result = run([sys.executable, "-c", f"import {first}\n{LOOK}"], cwd=ROOT, timeout=120)
    assert result.stdout.split() == ["True", "True", "False", "0"], result.stderr


def test_importing_imports_no_compiler():
    code = "import torch, collectives, strategies, sys; print('torch._dynamo' in sys.modules)"
    result = run([sys.executable, "-c", code], cwd=ROOT, timeout=120)
    assert result.stdout.split() == ["False"], result.stderr
