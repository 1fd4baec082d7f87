"""Arrays on a real device: the same properties as on the host, and the order of streams."""

from pathlib import Path

import numpy as np
import pytest

import collectives as cc
import inprocess
import oracle
from collectives.arrays import host_arrays
from launcher import mpirun

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("device_program.py")

# Elements of an array that takes the device long enough to fill for a missing wait to show.
MANY = 1 << 26


def borrow(x, out=None):
    return host_arrays.host_view(x, out, operation="allreduce")


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (257, 3)], ids=str)
def test_a_cupy_array_comes_to_the_host_and_back(cupy, dtype, shape):
    values = oracle.data(0, shape, dtype)
    try:
        x = cupy.asarray(values)
    except (TypeError, ValueError):
        assert dtype == oracle.BFLOAT16  # known to CuPy from 14 on
        pytest.skip("this CuPy has no bfloat16")
    loan = borrow(x)
    np.testing.assert_array_equal(loan.host, values)
    result = loan.restore(np.repeat(loan.host.reshape(-1), 2))
    assert isinstance(result, cupy.ndarray)
    assert (result.device, result.dtype) == (x.device, dtype)
    np.testing.assert_array_equal(result.get(), np.repeat(values.reshape(-1), 2))


def test_views_of_cupy_arrays_are_read_in_their_order(cupy):
    base = cupy.arange(24, dtype=np.float32).reshape(4, 6)
    for x in (base.T, base[::2, 1:], base[::-1], cupy.broadcast_to(base[0], (3, 6))):
        np.testing.assert_array_equal(borrow(x).host, x.get())


def test_the_current_stream_is_waited_for(cupy):
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.zeros(MANY, np.float32)
        for _ in range(20):
            x += 1  # still under way when the array is lent
        assert (borrow(x).host == 20).all()


def test_another_library_s_stream_is_waited_for(cupy):
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.zeros(MANY, np.float32)
        for _ in range(20):
            x += 1
        interface = dict(x.__cuda_array_interface__)

    class Foreign:
        __cuda_array_interface__ = interface
        keep = x

    assert interface["stream"] == stream.ptr
    assert (borrow(Foreign()).host == 20).all()


def test_a_result_is_complete_when_it_is_given_back(cupy):
    for value in range(5):  # pinned memory is used again from the second time on
        loan = borrow(cupy.zeros(MANY // 4, np.float32))
        loan.target[...] = value
        result = loan.restore(loan.target)
        del loan
        with cupy.cuda.Stream(non_blocking=True):
            assert bool((result == value).all())


def test_a_cupy_out_is_written_in_place(cupy):
    x = cupy.ones((4, 3), np.float32)
    for out in (cupy.zeros((4, 3), np.float32), cupy.zeros((8, 3), np.float32)[::2], x):
        loan = borrow(x, out)
        result = np.full((4, 3), 5, np.float32)
        if loan.target is not None:
            loan.target[...] = result
            result = loan.target
        assert loan.restore(result) is out
        assert bool((out == 5).all())
    with pytest.raises(TypeError, match="several of its elements are the same memory"):
        borrow(x, cupy.broadcast_to(cupy.zeros(3, np.float32), (4, 3)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_operations_on_cupy_arrays(cupy, size):
    def check(comm):
        values = [oracle.data(rank, (1030, 3), np.dtype(np.float32)) for rank in range(comm.size)]
        x = cupy.asarray(values[comm.rank])
        for result, expected in [
            (comm.allreduce(x), comm.allreduce(values[comm.rank])),
            (comm.broadcast(x, comm.size - 1), values[-1]),
            (comm.allgather(x), np.concatenate(values)),
            (comm.reduce_scatter(x, op=cc.MAX), comm.reduce_scatter(x.get(), op=cc.MAX)),
        ]:
            assert isinstance(result, cupy.ndarray)
            np.testing.assert_array_equal(result.get(), expected)

    inprocess.run_ranks(size, check, "synchronous", timeout=60)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int64", "bool", "complex64"])
def test_a_cuda_tensor_comes_to_the_host_and_back(torch, name):
    kind = getattr(torch, name)
    base = torch.arange(24, device="cuda").reshape(4, 6).to(kind)
    for x in (base, base.T, base[::2, 1:], base[1, 2], base[:0]):
        loan = borrow(x)
        assert loan.target is loan.host
        assert loan.host.tolist() == x.tolist()
        result = loan.restore(loan.target)
        assert (result.device, result.dtype) == (x.device, kind)
        assert torch.equal(result, x)


def test_results_for_cuda_tensors_have_no_gradient(torch):
    x = torch.ones(3, device="cuda", requires_grad=True)
    loan = borrow(2 * x)
    assert loan.host.tolist() == [2, 2, 2]
    assert not loan.restore(loan.target).requires_grad


def test_the_current_stream_of_torch_is_waited_for(torch):
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.zeros(MANY, device="cuda")
        for _ in range(20):
            x += 1
        loan = borrow(x)
        assert (loan.host == 20).all()
        loan.target[...] = 3
        result = loan.restore(loan.target)
        del loan
    torch.cuda.default_stream().synchronize()
    assert bool((result == 3).all())


def test_a_cuda_tensor_as_out_is_written_in_place(torch):
    parameter = torch.nn.Parameter(torch.zeros(4, 3, device="cuda"))
    for out in (torch.zeros(4, 3, device="cuda"), torch.zeros(3, 4, device="cuda").T, parameter):
        loan = borrow(np.zeros((4, 3), np.float32), out)
        assert loan.restore(np.full((4, 3), 7, np.float32)) is out
        assert bool((out == 7).all())
    loan = borrow(parameter, parameter)
    loan.target[...] = 8
    assert loan.restore(loan.target) is parameter
    assert bool((parameter == 8).all())


def test_a_result_goes_to_the_device_of_its_array(torch):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    x = torch.ones(3, device="cuda:1")
    loan = borrow(x)
    assert loan.restore(loan.target).device == x.device


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool"])
def test_a_jax_array_on_a_device_comes_to_the_host_and_back(jax, name):
    x = jax.numpy.arange(6).reshape(2, 3).astype(name)
    loan = borrow(x)
    assert loan.host.tolist() == x.tolist()
    assert loan.target is None
    result = loan.restore(np.array(loan.host))
    assert isinstance(result, jax.Array)
    assert result.devices() == x.devices()
    assert result.tolist() == x.tolist()
    with pytest.raises(TypeError, match="immutable"):
        borrow(x, x)


def test_ranks_of_a_job_reduce_arrays_of_one_device(cupy):
    done = mpirun(2, PROGRAM, timeout=110)
    assert done.status == 0, done.stderr
    assert done.stdout.count("all as expected") == 2
