"""Copies between addresses: every byte, and none beside, wherever both begin and however few."""

import numpy as np
import pytest
from numba import njit

from collectives.arrays.host_arrays import address
from collectives.kernels import intrinsics

# Around a line of the cache, and around where the C library is not asked any more.
COUNTS = [0, 1, 63, 64, 65, 4095, 4096, 4159, 4160, 10_001]
OFFSETS = [0, 1, 16, 33, 63]


# Where both begin decides how they are copied: some bytes behind, modulo a page, or not.
_PAGE = 4096


def from_a_page():
    memory = np.zeros(6 * _PAGE, np.uint8)
    return memory[-address(memory) % _PAGE :][: 5 * _PAGE]


@njit
def plain(dest, source, nbytes):
    intrinsics.copy(dest, source, nbytes)


@njit
def streamed(dest, source, nbytes):
    intrinsics.stream(dest, source, nbytes)
    intrinsics.fence()


@pytest.mark.parametrize("copy", [plain, streamed], ids=["plain", "streamed"])
def test_a_copy_moves_every_byte_and_no_other(copy):
    source = from_a_page()
    source[:] = np.random.default_rng(0).integers(1, 256, source.size, np.uint8)
    for count in COUNTS:
        for to in OFFSETS:
            for of in OFFSETS:
                dest = from_a_page()
                copy(address(dest) + _PAGE + to, address(source) + of, count)
                expected = np.zeros_like(dest)
                expected[_PAGE + to :][:count] = source[of:][:count]
                np.testing.assert_array_equal(dest, expected)
