"""What compiled code sees in NumPy's arrays is what Python sees."""

import ml_dtypes
import numpy as np
import pytest

from collectives.arrays.host_arrays import address
from collectives.kernels import buffer_address, machine_code
from collectives.kernels.buffer_address import address_reader, in_python


class Own(np.ndarray):
    """A kind of array of its own."""


def fixed(array):
    array.flags.writeable = False
    return array


def arrays():
    x = np.arange(24.0).reshape(2, 3, 4)
    yield from (x, x.copy(), x[0], x[:1], x[1:], x.T, x[::2], x[:, 1], x[..., ::-1], x.copy("F"))
    yield from (np.array(1.0), np.empty(0), np.empty((0, 3)), np.empty((3, 0)), np.zeros((1, 1)))
    yield from (np.zeros(6), np.zeros(6)[::2], np.zeros((2, 3)), np.zeros((3, 2)).T)
    yield from (np.broadcast_to(1.0, 6), fixed(np.zeros(6)), np.zeros(6).view(Own))
    for dtype in ("f2", "f4", ">f8", "i8", "u1", "?", "c16", ml_dtypes.bfloat16, "S3", "O"):
        yield np.zeros(6, dtype)
    yield np.frombuffer(b"123456781234567", np.float64, 1, 7)  # at an odd address, read-only


def test_this_machine_uses_the_compiled_look():
    assert address_reader() is not in_python


@pytest.mark.parametrize("x", list(arrays()), ids=repr)
def test_arrays_are_seen_as_python_sees_them(x):
    assert address_reader().readable(x) == in_python.readable(x)
    for out in [*arrays(), x, fixed(x.copy()), [1.0] * 6, None, 6, "text"]:
        assert address_reader().writable(x, out) == in_python.writable(x, out)


@pytest.mark.parametrize("x", list(arrays()), ids=repr)
def test_two_arrays_are_bound_where_one_fits_the_other_and_none_is_written_while_it_is_read(x):
    words = np.zeros(2, np.int64)
    for out in [*arrays(), x, x[...], x.copy(), fixed(x.copy()), [1.0] * 6, None, 6, "text"]:
        words[:] = 0
        fits = in_python.readable(x) and in_python.writable(x, out)
        expected = bool(fits) and (out is x or not np.shares_memory(x, out))
        assert bool(address_reader().bind(address(words), x, out)) == expected
        assert words.tolist() == ([address(x), address(out)] if expected else [0, 0])


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4), (4, 1)])
def test_arrays_that_overlap_are_not_bound(shape):
    memory = np.zeros(12)
    kept = np.zeros(2, np.int64)
    words = address(kept)
    x = memory[4:8].reshape(shape)
    for begin in range(9):
        other = memory[begin : begin + 4].reshape(shape)
        assert bool(address_reader().bind(words, x, other)) == (begin in (0, 8))
    assert not address_reader().bind(0, x, x)
    assert not in_python.bind(words, x, x)


def test_arrays_that_lie_otherwise_in_memory_are_looked_at_by_python(monkeypatch):
    def wrong(*kind, arguments=1):
        return lambda *given: 0

    monkeypatch.setattr(machine_code, "function", wrong)
    assert buffer_address.address_reader.__wrapped__() is in_python
