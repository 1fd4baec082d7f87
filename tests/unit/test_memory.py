"""Memory of gradients that the C library keeps, in a process of its own: it cannot be undone."""

from __future__ import annotations

import sys

import launcher
from requirements import installed

PAGES = """
import resource
import strategies.torch, torch

def pages():  # that the kernel has made for one array of 64 MiB after another
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = pages()
print(strategies.torch.keep_memory(), end=" ")
pages()
print(pages() < given_back / 10, strategies.torch.keep_memory())
"""


def test_memory_that_is_freed_is_kept_for_the_next_array():
    installed("torch")
    done = launcher.run([sys.executable, "-c", PAGES], timeout=60.0)
    assert done.stdout == "True True True\n", done.stdout + done.stderr
