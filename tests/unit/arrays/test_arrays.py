"""Arrays of every kind: how their elements are read, and what becomes of results."""

import os
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import oracle
from collectives.arrays import host_arrays as arrays
from fakecupy import Buffer, FakeCupy
from requirements import installed


def borrow(x, out=None):
    return arrays.host_view(x, out, operation="allreduce")


def give(loan, value):
    """A result for a loan: all elements `value`, put where an algorithm would put it."""
    host = loan.host
    result = np.full(host.shape, value, host.dtype)
    if loan.target is not None:
        loan.target[...] = result
        result = loan.target
    return loan.restore(result)


@pytest.fixture
def torch():
    return installed("torch")


@pytest.fixture
def jax():
    return installed("jax")


@pytest.fixture
def cupy(monkeypatch):
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_a_numpy_array_is_lent_as_it_is(dtype):
    for x in (np.zeros((4, 6), dtype)[::-2, 1:], np.zeros((), dtype), np.zeros((0, 3), dtype)):
        loan = borrow(x)
        assert loan.host is x
        assert loan.target is None
        result = np.ones(2, dtype)
        assert loan.restore(result) is result


def test_numbers_and_sequences_become_numpy_arrays():
    for x, dtype, shape in [
        (3, int, ()), (2.5, float, ()), (True, bool, ()), (1j, complex, ()),
        ([[1, 2], [3, 4]], int, (2, 2)), ((1.0,), float, (1,)), ([], float, (0,)),
        (np.float32(1), np.float32, ()),
    ]:  # fmt: skip
        loan = borrow(x)
        assert (loan.host.dtype, loan.host.shape) == (dtype, shape)
        assert type(give(loan, 1)) is np.ndarray


def test_another_byte_order_becomes_the_machine_s():
    host = borrow(np.arange(3, dtype=">f4")).host
    assert host.dtype == np.dtype("=f4")
    assert host.tolist() == [0, 1, 2]
    rows = np.array([(1, "a")], [("n", ">i4"), ("name", ">U1")])
    host = borrow(rows).host
    assert host.dtype == [("n", "<i4"), ("name", "<U1")]
    assert host.tolist() == [(1, "a")]


def test_subclasses_of_numpy_arrays_are_plain_arrays_here(tmp_path):
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(3,))
    loan = borrow(mapped)
    assert type(loan.host) is np.ndarray
    assert np.shares_memory(loan.host, mapped)
    assert give(borrow(mapped, mapped), 7) is mapped
    assert mapped.tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (None, "got object .x: NoneType"),
        ("text", "got <U4 .*broadcast_object"),
        (2**70, "got object .x: int"),
        ([[1], [1, 2]], "this list cannot be read"),
        (["text"], "got <U4 .x: list.*broadcast_object"),
        (np.array([None]), "got object .*broadcast_object, gather_object"),
        (np.zeros(2, [("a", "f4"), ("b", [("c", "O")])]), "cannot be sent"),
        (np.zeros(2, "V0"), r"got \|V0"),
        (np.ma.array([1.0, 2.0], mask=[False, True]), "masked array would lose its mask"),
    ],
    ids=repr,
)
def test_elements_without_a_meaning_on_other_ranks_are_refused(x, words):
    with pytest.raises(TypeError, match=f"^allreduce: .*{words}"):
        borrow(x)


def test_a_numpy_out_is_filled_and_returned():
    x = np.zeros((2, 3), np.float32)
    for out in (np.empty((2, 3), np.float32), np.empty((4, 3), np.float32)[::2], x):
        loan = borrow(x, out)
        assert loan.target is out
        assert give(loan, 5) is out
        assert (out == 5).all()


def test_an_out_that_does_not_fit_is_refused():
    x = np.zeros(3, np.float32)
    constant = x.copy()
    constant.flags.writeable = False
    for out, error, words in [
        (np.empty(3), TypeError, "wrong dtype, expected float32, got float64"),
        (np.empty(4, np.float32), ValueError, r"wrong shape, expected \(3,\), got \(4,\)"),
        (constant, ValueError, "read-only"),
        ([0, 0, 0], TypeError, "a device array or a NumPy array, got list"),
        (np.ma.zeros(3, np.float32), TypeError, "mask"),
        (SimpleNamespace(), TypeError, "got types.SimpleNamespace"),
    ]:
        with pytest.raises(error, match=f"^allreduce: .*{words}"):
            borrow(x, out)


def test_working_memory_is_the_caller_s_out_where_that_fits():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    flat = arrays.flat_copy(x, x, x.dtype)
    assert np.shares_memory(flat, x)
    other = np.empty_like(x)
    flat = arrays.flat_copy(x.T.copy().T, other, x.dtype)
    assert np.shares_memory(flat, other)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5]
    for out in (None, other.astype(np.float16), np.empty((4, 3), np.float32)[::2]):
        flat = arrays.flat_copy(x, out, x.dtype)
        assert flat.flags.c_contiguous
        assert flat.tolist() == [0, 1, 2, 3, 4, 5]
        assert out is None or not np.shares_memory(flat, out)
        if out is not None:
            assert arrays.copy_to(flat, out) is out
            np.testing.assert_array_equal(out, x)


def test_a_result_that_only_overlaps_where_it_is_wanted_is_stored():
    whole = np.zeros(10)
    for start in (0, 1, 5):
        whole[:5] = np.arange(5)
        out = whole[start : start + 5]
        assert arrays.copy_to(whole[:5], out) is out
        assert out.tolist() == [0, 1, 2, 3, 4]
    square = np.arange(9.0).reshape(3, 3)
    before = square.copy()
    arrays.copy_to(square.reshape(-1), square.T)
    np.testing.assert_array_equal(square.T, before)
    bits = np.ones(2, np.int32)
    arrays.copy_to(bits, bits.view(np.float32))
    assert bits.view(np.float32).tolist() == [1, 1]


def test_bytes_of_an_array_are_its_memory():
    x = np.array([1, 256], ml_dtypes.bfloat16)
    raw = arrays.raw_bytes(x)
    raw[:2] = raw[2:]
    assert x.tolist() == [256, 256]
    assert arrays.raw_bytes(np.zeros((0, 3))).size == 0


@pytest.mark.packages
def test_no_array_library_is_imported_for_numpy_arrays():
    code = (
        "import sys, numpy as np\n"
        "from collectives.arrays import host_arrays as host\n"
        "host.host_view([1.0], operation='x')\n"
        "print([m for m in ('torch', 'jax', 'cupy', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4)], ids=str)
def test_a_device_array_is_copied_to_pinned_memory_and_back(cupy, dtype, shape):
    values = oracle.data(0, shape, dtype)
    x = cupy.array(values)
    loan = borrow(x)
    np.testing.assert_array_equal(loan.host, values)
    assert loan.host.dtype == dtype
    assert loan.host.ctypes.data in cupy.pinned
    assert loan.target is loan.host  # where an algorithm may work without another copy
    assert cupy.current.waits == 1
    result = give(loan, 1)
    assert isinstance(result, cupy.ndarray)
    np.testing.assert_array_equal(result.memory, np.ones(shape, dtype))
    np.testing.assert_array_equal(x.memory, values)


def test_the_stream_that_computes_an_array_is_waited_for(cupy):
    x = cupy.array([0.0, 0.0])
    cupy.later(lambda: x.memory.fill(4))  # a kernel that has not run yet
    assert borrow(x).host.tolist() == [4, 4]


def test_another_library_s_stream_is_waited_for(cupy):
    x = Buffer(cupy, [1.0, 2.0], stream=4096)
    cupy.streams[4096].queue.append(lambda: x.memory.fill(8))
    loan = borrow(x)
    assert loan.host.tolist() == [8, 8]
    assert isinstance(give(loan, 1), cupy.ndarray)


def test_a_device_result_is_complete_before_its_pinned_memory_is_used_again(cupy):
    loan = borrow(cupy.array(np.zeros(1000)))
    result = give(loan, 3)
    del loan
    cupy.current.synchronize()
    assert (result.memory == 3).all()


def test_a_device_result_may_have_another_shape(cupy):
    result = borrow(cupy.array(np.zeros((2, 3)))).restore(np.ones((5, 3)))
    assert result.shape == (5, 3)
    assert (result.memory == 1).all()


def test_device_memory_is_used_with_its_own_device_as_the_current_one(cupy):
    loan = borrow(cupy.array([1.0]))
    assert cupy.device.entered == 2  # for pinned memory, and to copy there
    give(loan, 1)
    assert cupy.device.entered == 3


def test_a_device_out_is_written_in_place(cupy):
    x = cupy.array(np.zeros((4, 3)))
    strided = cupy.array(np.zeros((8, 3)))
    strided.memory = strided.memory[::2]
    strided = cupy.ndarray(cupy, strided.memory)
    foreign = Buffer(cupy, np.zeros((4, 3)))
    for out in (cupy.array(np.zeros((4, 3))), strided, x, foreign):
        assert give(borrow(x, out), 6) is out
        assert (out.memory == 6).all()


def test_a_device_out_that_cannot_be_written_is_refused(cupy):
    x = cupy.array(np.zeros((2, 3)))
    repeated = cupy.ndarray(cupy, np.broadcast_to(np.zeros(3), (2, 3)))
    for out, error, words in [
        (Buffer(cupy, np.zeros((2, 3)), read_only=True), TypeError, "it is read-only"),
        (repeated, TypeError, "several of its elements are the same memory"),
        (cupy.array(np.zeros((2, 3)), np.float32), TypeError, "wrong dtype"),
        (cupy.array(np.zeros(6)), ValueError, "wrong shape"),
    ]:
        with pytest.raises(error, match=words):
            borrow(x, out)


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((2, 3), (24, 8), False),
        ((3, 2), (8, -24), False),
        ((2, 3), (24, 16), False),  # interleaved axes without a common element
        ((2, 2, 2), (32, 16, 8), False),
        ((2, 1), (8, 0), False),
        ((0, 3), (0, 0), False),
        ((), (), False),
        ((2, 3), (0, 8), True),
        ((2, 3), (8, 8), True),
        ((2, 3), (16, 8), True),
        ((3, 4), (24, 16), True),
        ((3,), (4,), True),  # elements of 8 bytes
    ],
)
def test_overlapping_elements_cannot_hold_a_result(shape, strides, overlaps):
    memory = np.zeros(64)
    out = np.lib.stride_tricks.as_strided(memory[30:], shape, strides)
    if overlaps:
        with pytest.raises(TypeError, match="several of its elements are the same memory"):
            borrow(np.ones(shape), out)
    else:
        assert give(borrow(np.ones(shape), out), 5) is out
        assert (out == 5).all()


def test_a_device_array_of_objects_is_refused_before_it_is_copied(cupy):
    with pytest.raises(TypeError, match="dtype cannot be sent"):
        borrow(cupy.array([None]))
    assert not cupy.pinned


def test_device_memory_without_cupy_says_what_to_install(cupy, monkeypatch):
    x = Buffer(cupy, [1.0])
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TypeError, match=r"allreduce: .*Buffer cannot be read: .*cupy-cuda12x"):
        borrow(x)
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(available=False))
    with pytest.raises(TypeError, match="finds no CUDA device"):
        borrow(x)


class Exporting:
    """Speaks DLPack and nothing else."""

    def __init__(self, memory, device=1):
        self.memory = memory
        self.device = device

    def __dlpack_device__(self):
        return (self.device, 0)

    def __dlpack__(self, **keywords):
        return self.memory.__dlpack__(**keywords)


def test_memory_shown_by_dlpack_is_shared():
    x = Exporting(np.arange(6.0).reshape(2, 3)[:, ::2])
    loan = borrow(x)
    assert np.shares_memory(loan.host, x.memory)
    assert loan.target is None
    assert type(give(loan, 1)) is np.ndarray
    out = Exporting(np.zeros((2, 2)))
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        with pytest.raises(TypeError, match=r"out .*NumPy 1\.\S+ sees it as read-only"):
            borrow(x, out)
        return
    assert give(borrow(x, out), 9) is out
    assert (out.memory == 9).all()


def test_device_memory_shown_by_dlpack_is_reached_through_cupy(cupy):
    loan = borrow(Exporting(np.arange(3.0), device=2))
    assert loan.host.tolist() == [0, 1, 2]
    assert isinstance(give(loan, 1), cupy.ndarray)


def test_a_device_out_of_reach_is_named():
    with pytest.raises(TypeError, match="DLPack device type 8"):
        borrow(Exporting(np.zeros(3), device=8))


class Standard:
    """Follows the array API standard; `writeable` as the memory is."""

    def __init__(self, memory, device="abacus"):
        self.memory = memory
        self.device = device

    def __array__(self, dtype=None, copy=None):
        return self.memory

    def __array_namespace__(self):
        return SimpleNamespace(asarray=lambda memory, device: Standard(memory, device))

    def __setitem__(self, where, other):
        self.memory[where] = other.memory


def test_a_result_is_made_by_the_namespace_of_the_array_on_its_device():
    x = Standard(np.arange(3.0))
    result = give(borrow(x), 2)
    assert isinstance(result, Standard)
    assert result.device == "abacus"
    assert result.memory.tolist() == [2, 2, 2]
    assert x.memory.tolist() == [0, 1, 2]
    assert give(borrow(x, x), 4) is x
    assert x.memory.tolist() == [4, 4, 4]


def test_read_only_device_memory_with_a_namespace_needs_no_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    x = Standard(np.arange(3.0))
    x.__cuda_array_interface__ = {"data": (x.memory.ctypes.data, True)}
    assert isinstance(give(borrow(x), 2), Standard)


def test_an_immutable_out_is_refused_with_the_way_out():
    memory = np.zeros(3)
    memory.flags.writeable = False
    with pytest.raises(TypeError, match="kind are immutable; leave `out` away and take the result"):
        borrow(np.zeros(3), Standard(memory))


TENSOR_DTYPES = [d for d in oracle.DTYPES if d.name not in ("uint16", "uint32", "uint64")]


@pytest.mark.parametrize("dtype", TENSOR_DTYPES, ids=str)
def test_a_tensor_on_the_host_is_shared_and_results_are_tensors(torch, dtype):
    kind = getattr(torch, dtype.name)
    for shape in [(), (0, 3), (4, 6)]:
        values = oracle.data(0, shape, dtype)
        x = torch.zeros(shape, dtype=kind)
        loan = borrow(x)
        loan.host[...] = values  # seen by the tensor: the memory is the same
        assert loan.host.dtype == dtype
        assert loan.target is None
        assert x.tolist() == values.tolist()
        result = loan.restore(np.concatenate([values.reshape(-1)] * 2))
        assert (result.dtype, result.device, result.shape) == (kind, x.device, (2 * values.size,))
        assert result.tolist() == values.reshape(-1).tolist() * 2


def test_views_of_tensors_are_read_without_a_copy(torch):
    for dtype in (torch.float32, torch.bfloat16):
        base = torch.arange(24).reshape(4, 6).to(dtype)
        for x in (base.T, base[1:, ::2], base[0].expand(3, 6), base[2, 3]):
            host = borrow(x).host
            assert host.tolist() == x.tolist()
            base[...] += 1
            assert host.tolist() == x.tolist()


def test_results_for_tensors_with_a_gradient_have_none(torch):
    for x in (
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        2 * torch.ones(3, requires_grad=True),
    ):
        result = give(borrow(x), 1)
        assert type(result) is torch.Tensor
        assert not result.requires_grad


def test_tensors_that_are_conjugated_when_read_come_so(torch):
    x = torch.tensor([1 + 2j, 3 - 4j]).conj()
    loan = borrow(x)
    assert loan.host.tolist() == [1 - 2j, 3 + 4j]
    assert give(borrow(x, x), 5j) is x
    assert x.tolist() == [5j, 5j]
    assert borrow(x.imag).host.tolist() == [5, 5]


def test_a_tensor_as_out_is_written_in_place(torch):
    x = torch.zeros(2, 3)
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    for out in (torch.zeros(2, 3), torch.zeros(3, 2).T, parameter, x):
        loan = borrow(x, out)
        assert loan.target is not None
        assert (loan.target is loan.host) == (out is x)
        assert give(loan, 5) is out
        assert (out == 5).all()
    assert give(borrow(np.zeros((2, 3), np.float32), x), 6) is x
    halves = torch.zeros(3, dtype=torch.bfloat16)
    assert give(borrow(halves, halves), 1.5) is halves
    assert halves.tolist() == [1.5, 1.5, 1.5]


def test_autograd_notices_that_an_out_was_written(torch):
    x = torch.ones(3, requires_grad=True)
    saved = 2 * x
    y = saved * saved
    give(borrow(saved.detach(), saved), 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_tensor_out_that_cannot_be_written_is_refused(torch):
    x = torch.zeros(2, 3)
    for out, error, words in [
        (torch.zeros(3).expand(2, 3), TypeError, "several of its elements are the same memory"),
        (torch.zeros(4).as_strided((2, 3), (1, 1)), TypeError, "several of its elements"),
        (torch.zeros(2, 3, dtype=torch.bfloat16), TypeError, "expected float32, got bfloat16"),
        (torch.zeros(6), ValueError, "wrong shape"),
    ]:
        with pytest.raises(error, match=f"^allreduce: .*{words}"):
            borrow(x, out)


def test_tensors_without_readable_elements_are_refused(torch):
    for x, words in [
        (torch.zeros(3).to_sparse(), "; sparse_allreduce .*to_dense"),
        (torch.zeros(3, device="meta"), ": .*meta"),
        (torch.empty(3, dtype=torch.bits8), ": .*Bits8"),
    ]:
        with pytest.raises(TypeError, match=f"^allreduce: .*cannot be read{words}"):
            borrow(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint32", "bool"])
def test_jax_arrays_are_read_without_a_copy_and_results_are_new_ones(jax, dtype):
    for shape in [(), (0, 3), (4, 6)]:
        x = jax.numpy.ones(shape, dtype)
        loan = borrow(x)
        assert loan.host.dtype == x.dtype
        assert x.size == 0 or loan.host.ctypes.data == x.unsafe_buffer_pointer()
        assert loan.target is None
        result = loan.restore(np.zeros((2, *shape), loan.host.dtype))
        assert isinstance(result, jax.Array)
        assert (result.dtype, result.shape) == (x.dtype, (2, *shape))
        assert result.devices() == x.devices()
        assert not np.asarray(result).any()


def test_jax_results_are_bound_to_a_device_only_where_the_array_was(jax):
    free = jax.numpy.ones(3)
    bound = jax.device_put(free, jax.devices()[0])
    assert not give(borrow(free), 1).committed
    assert give(borrow(bound), 1).committed


def test_results_for_split_jax_arrays_are_split_where_the_shape_is_the_same(jax):
    code = (
        "import jax, numpy as np\n"
        "from jax.sharding import Mesh, NamedSharding, PartitionSpec\n"
        "from collectives.arrays import host_arrays as host\n"
        "mesh = Mesh(np.array(jax.devices()), ('rows',))\n"
        "for spec in (PartitionSpec('rows'), PartitionSpec()):\n"
        "    x = jax.device_put(np.arange(6.0), NamedSharding(mesh, spec))\n"
        "    loan = host.host_view(x, operation='reduce_scatter')\n"
        "    assert loan.host.tolist() == [0, 1, 2, 3, 4, 5]\n"
        "    for shape in ((6,), (3,), (6, 2)):\n"
        "        result = loan.restore(np.ones(shape, x.dtype))\n"
        "        assert (result.shape, result.dtype) == (shape, x.dtype)\n"
        "        print(len(result.devices()), result.sharding.is_fully_replicated)\n"
    )
    flags = "--xla_force_host_platform_device_count=2"
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    # Split in two: a result of another shape is on one device. Copied to both: so is every result.
    assert done.stdout.split("\n")[:-1] == ["2 False", *["1 True"] * 2, *["2 True"] * 3]


def test_a_jax_array_is_no_out(jax):
    x = jax.numpy.ones(3)
    with pytest.raises(TypeError, match="are immutable; leave `out` away"):
        borrow(x, x)


def test_jax_arrays_without_elements_are_refused(jax):
    gone = jax.numpy.ones(3)
    gone.delete()
    with pytest.raises(TypeError, match="^allreduce: .*cannot be read: .*deleted"):
        borrow(gone)
    with pytest.raises(TypeError, match="^allreduce: .*operations of strategies.jax, .*traced"):
        jax.jit(borrow)(jax.numpy.ones(3))
