"""Limits on a real device's memory; each in a process of its own, whose pool is still empty."""

import sys
import textwrap

import pytest

from launcher import run

pytestmark = pytest.mark.gpu

MIB = 1 << 20

PRELUDE = """
    import cupy
    import strategies
    from strategies.errors import ResourceExhaustedError

    MIB = 1 << 20
    pool = cupy.get_default_memory_pool()

    def refused(mib):
        try:
            cupy.empty(mib * MIB, "uint8")
        except ResourceExhaustedError as error:
            return str(error)
        return "it fits"
"""


def output(text):
    program = textwrap.dedent(PRELUDE) + textwrap.dedent(text)
    result = run([sys.executable, "-c", program], timeout=100)
    assert result.status == 0, result.stderr
    return result.stdout.splitlines()


def test_a_limit_is_taken_at_once_and_never_exceeded(cupy):
    taken, first, second, third = output(
        """
        strategies.cluster.limit_gpu_memory(memory_limit=64 * MIB)
        print(pool.total_bytes())
        held = cupy.empty(48 * MIB, "uint8")
        print(refused(32))
        print(refused(16))
        del held
        print(refused(64))
        """
    )
    assert int(taken) == 64 * MIB
    assert f"expected at most {64 * MIB} bytes in all, got {32 * MIB} bytes more than" in first
    assert second == third == "it fits"


def test_growth_takes_memory_when_it_is_needed(cupy):
    fraction = 256 * MIB / cupy.cuda.runtime.memGetInfo()[1]
    before, after, error = output(
        f"""
        strategies.cluster.limit_gpu_memory(memory_fraction={fraction!r}, growth=True)
        print(pool.total_bytes())
        cupy.empty(32 * MIB, "uint8")
        print(pool.total_bytes())
        print(refused(257))
        """
    )
    assert (int(before), int(after)) == (0, 32 * MIB)
    assert "GPU memory: an array does not fit" in error


def test_a_rank_sees_its_own_device(cupy):
    seen = output(
        """
        import os
        import types
        ranks = types.SimpleNamespace(local_rank=1, local_size=2, size=1)
        listed = strategies.cluster.use_gpus(ranks)
        print(",".join(listed) == os.environ["CUDA_VISIBLE_DEVICES"])
        print(len(listed) == cupy.cuda.runtime.getDeviceCount())
        """
    )
    assert seen == ["True", "True"]
