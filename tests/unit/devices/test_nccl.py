"""Algorithm `nccl`: arrays of devices stay there. A double stands for CuPy, and for its NCCL."""

import sys

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import fakecupy
import inprocess
from collectives.core.settings import Settings

KINDS = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64", "float16"]


@pytest.fixture(params=[True, False], ids=["bytes", "numbers"])
def cupy(monkeypatch, request):
    fake = fakecupy.FakeCupy(devices=4)
    fake.cuda.nccl.as_bytes = request.param
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "cupy.cuda", fake.cuda)
    return fake


def run(size, check, *, fake=None, **settings):
    """Run ranks in threads, each with a device of its own."""

    def body(comm):
        with fake.cuda.Device(comm.rank):
            return check(comm)

    own = Settings(timeout=inprocess.TIMEOUT, **settings)
    return inprocess.run_ranks(size, body if fake else check, "synchronous", settings=own)


def moved(cupy):
    return [nbytes for name, nbytes in cupy.log if name == "nccl"]


def copied(cupy):
    return [entry for entry in cupy.log if entry[0] in ("to host", "from host")]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("op", [cc.SUM, cc.MEAN, cc.MAX, cc.MIN, cc.PRODUCT])
def test_an_allreduce_stays_on_the_devices(cupy, size, op):
    def check(comm):
        for count in (0, 1, 1000):
            every = [np.arange(count, dtype=np.float32) / 64 + r for r in range(comm.size)]
            x = cupy.late(every[comm.rank])
            result = comm.allreduce(x, op=op, algorithm="nccl")
            total = {cc.SUM: np.sum, cc.MEAN: np.mean, cc.MAX: np.max, cc.MIN: np.min,
                     cc.PRODUCT: np.prod}[op](every, axis=0)  # fmt: skip
            assert isinstance(result, fakecupy.ndarray)
            np.testing.assert_allclose(result.memory, total, rtol=2**-21)
            np.testing.assert_array_equal(x.memory, every[comm.rank])
            assert comm.allreduce(x, op=op, algorithm="nccl", out=x) is x
            np.testing.assert_array_equal(x.memory, result.memory)

    run(size, check, fake=cupy)
    assert not copied(cupy)
    assert sorted(moved(cupy)) == sorted([4, 4, 4000, 4000] * size)


@pytest.mark.parametrize("dtype", [*map(np.dtype, KINDS), np.dtype(ml_dtypes.bfloat16)], ids=str)
def test_every_dtype_of_nccl_is_reduced_and_any_is_broadcast(cupy, dtype):
    def check(comm):
        values = (np.arange(100) % 7 + comm.rank).astype(dtype)
        result = comm.allreduce(cupy.late(values), op=cc.SUM, algorithm="nccl")
        assert result.dtype == dtype
        expected = 2 * (np.arange(100) % 7) + 1
        np.testing.assert_array_equal(result.memory, expected.astype(dtype))
        for kind in (dtype, np.dtype(bool), np.dtype(np.complex64)):
            x = cupy.late(values.astype(np.float32).astype(kind))
            shared = comm.broadcast(x, 1, algorithm="nccl")
            own = (np.arange(100) % 7 + 1).astype(np.float32).astype(kind)
            np.testing.assert_array_equal(shared.memory, own)

    run(2, check, fake=cupy)


def test_the_user_may_let_auto_be_nccl_for_what_it_has(cupy, monkeypatch):
    def check(comm):
        large = np.full(3_000_000, comm.rank + 1, np.float32)  # from one slice on
        for kind in (np.float32, np.int64):
            result = comm.allreduce(cupy.late(large.astype(kind)), op=cc.SUM)
            np.testing.assert_array_equal(result.memory, 3)
        np.testing.assert_array_equal(comm.broadcast(cupy.late(large)).memory, 1)
        packed = comm.allreduce(cupy.late(large), op=cc.SUM, compression=cc.BF16)
        np.testing.assert_array_equal(packed.memory, 3)
        whole = comm.allreduce(cupy.late(np.full(3_000_000, True)), op=cc.MIN)
        assert whole.memory.all()

    run(2, check, fake=cupy, nccl="on")
    assert sorted(moved(cupy)) == sorted([12_000_000, 24_000_000, 12_000_000] * 2)


def test_what_nccl_cannot_do_is_an_error_on_all_and_the_next_call_works(cupy):
    def check(comm):
        x = cupy.array(np.ones(4, np.float32))
        for wrong, message in [
            (lambda: comm.allreduce(np.ones(4), algorithm="nccl"), "needs an array on a CUDA dev"),
            (
                lambda: comm.allreduce(cupy.array(np.ones(4, bool)), op=cc.MAX, algorithm="nccl"),
                "NCCL has no MAX of bool, expected one of SUM PRODUCT MAX MIN MEAN of int8",
            ),
            (
                lambda: comm.allreduce(x, algorithm="nccl", compression=cc.FP16),
                "moves arrays as they are, expected no compression",
            ),
            (lambda: comm.allreduce(x, algorithm="nccl", prescale=2.0), "one that is staged thro"),
            (lambda: comm.reduce(x, algorithm="nccl"), "unknown algorithm"),
        ]:
            with pytest.raises((TypeError, ValueError), match=message):
                wrong()
        with pytest.raises((cc.MismatchError, ValueError)):
            comm.allreduce(x if comm.rank else np.ones(4, np.float32), algorithm="nccl")
        with pytest.raises(cc.MismatchError, match="algorithm"):
            comm.allreduce(x, algorithm="nccl" if comm.rank else "ring")
        assert (comm.allreduce(x, op=cc.SUM, algorithm="nccl").memory == 2).all()
        with (
            cupy.cuda.Device(comm.rank + 2),
            pytest.raises(ValueError, match=rf"expected an array on GPU {comm.rank}, got one on"),
        ):
            comm.allreduce(cupy.array(np.ones(4, np.float32)), algorithm="nccl")
        assert (comm.allreduce(x, op=cc.SUM, algorithm="nccl").memory == 2).all()

    run(2, check, fake=cupy)


def test_ranks_on_one_gpu_are_told(cupy):
    def check(comm):
        x = cupy.array(np.ones(4, np.float32))
        with pytest.raises(ValueError, match=r"a GPU for each rank, got one for ranks 0, 1 \(GPU"):
            comm.allreduce(x, algorithm="nccl")
        assert (comm.allreduce(x, op=cc.SUM).memory == 2).all()

    run(2, check)  # both on the first device


def test_a_rank_without_nccl_is_told_on_all(cupy):
    def check(comm):
        x = cupy.array(np.ones(4, np.float32))
        if comm.rank == 1:
            # As CuPy is where the wheel of NCCL is missing on that machine.
            x.device.__class__ = type("Lacking", (fakecupy.Device,), {"pci_bus_id": lacking})
        with pytest.raises(
            ValueError, match="needs NCCL on all ranks, got on rank 1: no such libr"
        ):
            comm.allreduce(x, algorithm="nccl")
        assert (comm.allreduce(x, op=cc.SUM).memory == 2).all()

    run(2, check, fake=cupy)


def test_where_there_is_no_nccl_at_all(cupy):
    cupy.cuda.nccl.available = False

    def check(comm):
        with pytest.raises(ValueError, match="got on rank 0: CuPy finds no NCCL"):
            comm.broadcast(cupy.array(np.ones(4, np.float32)), algorithm="nccl")

    run(2, check, fake=cupy)


@property
def lacking(device):
    raise RuntimeError("no such library")


def test_a_failure_inside_of_nccl_is_an_error_and_ends_the_group(cupy):
    def check(comm):
        x = cupy.array(np.ones(4, np.float32))
        comm.allreduce(x, algorithm="nccl")
        comm.barrier()
        (clique,) = cupy.cuda.nccl.cliques.values()
        clique.failed = "NCCL_ERROR_SYSTEM_ERROR: a line is down"
        cupy.later(stuck)  # a kernel that does not end
        with pytest.raises(cc.CollectiveError, match=r"NCCL failed: .*line is down \(rank \d of 2"):
            comm.allreduce(x, algorithm="nccl")
        assert clique.here[comm.rank].ended == "aborted"
        with pytest.raises(cc.CollectiveError, match="not usable any more"):
            comm.barrier()

    run(2, check, fake=cupy)


def stuck():
    raise AssertionError("it has ended")


stuck.is_due = lambda: False


def test_a_kernel_that_does_not_end_is_a_timeout(cupy):
    def check(comm):
        x = cupy.array(np.ones(4, np.float32))
        comm.allreduce(x, algorithm="nccl")
        cupy.later(stuck)
        with pytest.raises(cc.CollectiveTimeout, match="still waiting for other ranks in NCCL"):
            comm.allreduce(x, algorithm="nccl", timeout=0.3)
        (clique,) = cupy.cuda.nccl.cliques.values()
        assert clique.here[comm.rank].ended == "aborted"

    run(2, check, fake=cupy)
