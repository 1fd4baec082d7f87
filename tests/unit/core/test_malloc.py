"""Memory of gradients that the C library keeps, in a process of its own: it cannot be undone."""

import sys

import launcher
from requirements import installed

HELD = """
import ctypes
import strategies.torch, torch

class Mallinfo2(ctypes.Structure):  # as in malloc.h
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost",
    )]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo2

def held():  # bytes that the C library has of the system, after an array of 64 MiB
    torch.ones(16 << 20)
    return mallinfo2().arena + mallinfo2().hblkhd

before = held()
print(strategies.torch.keep_memory(), end=" ")
kept = [held() for _ in range(40)]
print(kept[0] > before + (48 << 20), kept[-1] < before + (20 * 64 << 20), end=" ")
print(strategies.torch.keep_memory())
"""


def test_memory_that_is_freed_is_kept_for_the_next_array():
    # Small objects settle between large ones, so some arrays need a new place: of 40 at most 8.
    installed("torch")
    done = launcher.run([sys.executable, "-c", HELD], timeout=60.0)
    assert done.stdout == "True True True True\n", done.stdout + done.stderr
