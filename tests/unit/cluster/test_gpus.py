"""Which GPUs a rank sees, and how much of their memory it may take; on a double of CuPy."""

import os
import sys
from types import SimpleNamespace

import pytest

from collectives import extend
from fakecupy import FakeCupy, Gpu
from strategies.cluster import gpus
from strategies.errors import ResourceExhaustedError

MIB = 1 << 20


@pytest.fixture
def node(monkeypatch, tmp_path):
    """A node whose device files are in a folder; returns what makes so many GPUs there."""
    monkeypatch.setattr("collectives.core.visible_gpus._DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)

    def make(count):
        for name in [*(f"nvidia{i}" for i in range(count)), "nvidiactl", "nvidia-uvm"]:
            (tmp_path / name).touch()

    return make


def rank(local_rank, local_size):
    return SimpleNamespace(local_rank=local_rank, local_size=local_size, size=1)


def process(monkeypatch, *devices):
    """A process that sees these GPUs."""
    cupy = FakeCupy(gpus=devices)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy


def test_what_is_visible_is_known_without_cuda(node):
    assert extend.visible_gpus({}) == []
    node(3)
    assert extend.visible_gpus({}) == ["0", "1", "2"]
    for listed, seen in (("2,0", ["2", "0"]), ("", []), ("-1", []), ("1,-1,0", ["1"]),
                         ("GPU-1f, GPU-2e", ["GPU-1f", "GPU-2e"]), ("1,1", ["1"])):  # fmt: skip
        assert extend.visible_gpus({"CUDA_VISIBLE_DEVICES": listed}) == seen


@pytest.mark.parametrize("count", range(6))
@pytest.mark.parametrize("size", range(1, 6))
def test_each_rank_of_a_node_gets_as_many_devices_as_the_others(count, size):
    devices = [str(i) for i in range(count)]
    shares = [gpus.share_of(devices, local, size) for local in range(size)]
    assert len({len(share) for share in shares}) == 1
    if count >= size:
        assert sum(shares, []) == devices[: count // size * size]
    elif count:
        assert {device for share in shares for device in share} == set(devices)


def test_a_rank_sees_its_share_and_no_more(node, monkeypatch):
    assert gpus.use_gpus(rank(0, 1)) == []
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    node(4)
    assert gpus.use_gpus(rank(1, 2)) == ["2", "3"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert gpus.use_gpus(rank(1, 2)) == ["GPU-b"]


def test_cuda_that_has_been_started_is_noticed(node, monkeypatch):
    node(2)
    process(monkeypatch, Gpu(MIB), Gpu(MIB))
    with pytest.raises(RuntimeError, match=r"started before .* expected 1 \(1\), got 2"):
        gpus.use_gpus(rank(1, 2))
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    process(monkeypatch, Gpu(MIB))
    assert gpus.use_gpus(rank(1, 2)) == ["1"]


def test_two_processes_with_two_fifths_fit_three_do_not(monkeypatch):
    gpu = Gpu(100 * MIB)
    for _ in range(2):
        cupy = process(monkeypatch, gpu)
        gpus.limit_gpu_memory(memory_fraction=0.4)
        assert (cupy.pool.total_bytes(), cupy.pool.used_bytes()) == (40 * MIB, 0)
    assert gpu.free == 20 * MIB
    process(monkeypatch, gpu)
    with pytest.raises(ResourceExhaustedError, match=f"{20 * MIB} free of {100 * MIB}"):
        gpus.limit_gpu_memory(memory_fraction=0.4)


def test_arrays_beyond_the_limit_are_an_error_with_sizes(monkeypatch):
    cupy = process(monkeypatch, Gpu(100 * MIB), Gpu(50 * MIB))
    gpus.limit_gpu_memory(memory_limit=10 * MIB)
    assert cupy.pool.limits == cupy.pool.taken == [10 * MIB] * 2
    first = cupy.cuda.alloc(8 * MIB)
    with pytest.raises(
        ResourceExhaustedError,
        match=f"expected at most {10 * MIB} bytes in all, got {3 * MIB} bytes more than {8 * MIB}",
    ) as caught:
        cupy.cuda.alloc(3 * MIB)
    assert isinstance(caught.value.__cause__, MemoryError)
    del first
    cupy.cuda.alloc(10 * MIB)


def test_growth_takes_memory_when_it_is_needed(monkeypatch):
    cupy = process(monkeypatch, Gpu(100 * MIB))
    gpus.limit_gpu_memory(memory_fraction=0.5, growth=True)
    assert cupy.pool.total_bytes() == 0
    cupy.cuda.alloc(20 * MIB)
    assert cupy.pool.total_bytes() == 20 * MIB  # and is not given back
    with pytest.raises(ResourceExhaustedError, match=f"at most {50 * MIB} bytes"):
        cupy.cuda.alloc(51 * MIB)
    cupy = process(monkeypatch, Gpu(100 * MIB))
    gpus.limit_gpu_memory(growth=True)
    assert (cupy.pool.get_limit(), cupy.pool.total_bytes()) == (0, 0)
    with pytest.raises(ResourceExhaustedError, match=f"at most {100 * MIB} bytes"):
        cupy.cuda.alloc(101 * MIB)


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory_fraction": 0.4, "memory_limit": 1},
        {"memory_limit": MIB, "growth": True},
        {"memory_limit": 0},
        {"memory_limit": -1},
        {"memory_fraction": 0},
        {"memory_fraction": 1.01},
        {"memory_fraction": float("nan")},
        {"memory_fraction": "0.4"},
    ],
)
def test_limits_that_cannot_be_are_refused_before_anything_changes(monkeypatch, wrong):
    cupy = process(monkeypatch, Gpu(MIB))
    with pytest.raises(ValueError, match="limit_gpu_memory: "):
        gpus.limit_gpu_memory(**wrong)
    assert cupy.allocator == cupy.pool.malloc


def test_limits_come_before_the_first_array(monkeypatch):
    cupy = process(monkeypatch, Gpu(MIB))
    cupy.cuda.alloc(512)
    with pytest.raises(RuntimeError, match="taken memory before, expected 0 bytes, got 512"):
        gpus.limit_gpu_memory(memory_fraction=0.5)


def test_without_cupy_or_a_gpu_there_is_nothing_to_limit(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match="CuPy, which is not installed"):
        gpus.limit_gpu_memory(growth=True)
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(available=False))
    with pytest.raises(RuntimeError, match="finds no CUDA device"):
        gpus.limit_gpu_memory(growth=True)
