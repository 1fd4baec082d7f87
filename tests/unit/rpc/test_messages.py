"""What travels between tasks: every value comes back as it was, and damage is an error."""

import random

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from requirements import installed
from strategies import errors
from strategies.errors import DataLossError, InternalError, InvalidArgumentError, OutOfRangeError
from strategies.rpc import message as protocol
from strategies.rpc import wire
from strategies.rpc.message import Kind


def as_arrived(frames):
    """Frames as the receiver has them: arrays of bytes of its own."""
    return [
        np.frombuffer(bytearray(f if isinstance(f, bytes) else f.tobytes()), np.uint8)
        for f in frames
    ]


def travel(given_values):
    layout, frames = wire.pack(given_values)
    return wire.unpack(msgpack.unpackb(msgpack.packb(layout)), as_arrived(frames))


def same(got, sent):
    assert type(got) is type(sent)
    if isinstance(sent, np.ndarray):
        assert (got.shape, got.dtype) == (sent.shape, sent.dtype)
        if sent.dtype == object:
            for one, other in zip(got.flat, sent.flat, strict=True):
                same(one, other)
        else:
            assert got.tobytes() == sent.tobytes()
            assert got.flags.writeable
    else:
        assert got == sent


def objects(*elements):
    array = np.empty(len(elements), object)
    for index, element in enumerate(elements):
        array[index] = element
    return array


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(6).reshape(2, 3).T,
        np.empty((0, 5), np.int8),
        np.array(3.5),
        np.ones(3, ml_dtypes.bfloat16),
        np.ones(3, ml_dtypes.float8_e4m3fn),
        np.ones(2, bool),
        np.float32(1.5),
        np.bool_(True),
        np.int64(-1),
        ml_dtypes.bfloat16(2),
        1.5,
        7,
        "ä\ud800\0",
        b"\xff\0",
        "",
        objects(),
        objects("a", "bc"),
        objects(b"a", "b", np.float32(1), np.arange(3)),
        objects(objects("x", "y"), objects()),
        objects(np.arange(3), np.float32(1), np.ones((100, 100))),
        (1, [2, (3,)], {"a": (), 4: None, (1, 2): True}),
        objects("a", "b", "c", "d").reshape(2, 2),
    ],
    ids=repr,
)
def test_values_come_back_as_they_were(value):
    same(travel([value])[0], value)
    got = travel(["before", value, np.arange(2), value])
    assert got[0] == "before"
    same(got[1], value)
    same(got[3], value)


_elements = st.one_of(
    st.text(), st.binary(), st.floats(allow_nan=False), st.integers(-(2**63), 2**63 - 1)
)


@given(st.lists(st.one_of(_elements, st.lists(_elements).map(lambda x: objects(*x)))))
def test_any_values_come_back_as_they_were(sent):
    for got, value in zip(travel(sent), sent, strict=True):
        same(got, value)


def test_contiguous_arrays_are_not_copied():
    array = np.arange(100.0)
    _, (frame,) = wire.pack([array])
    assert np.shares_memory(frame, array)
    (arrived,) = as_arrived([frame])
    assert np.shares_memory(wire.unpack([["float64", [100]]], [arrived])[0], arrived)


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, 2**70, len, np.array(["2020"], "M8[s]"), np.ones(2, ">f4"), np.array(["a"])],
)
def test_other_things_are_refused(value):
    with pytest.raises(TypeError, match="message:"):
        travel([value])


@pytest.mark.parametrize(
    ("wrap", "write"),
    [
        (objects, lambda packed: msgpack.ExtType(2, msgpack.packb([[1], [packed]]))),
        (lambda inner: (inner,), lambda packed: msgpack.ExtType(1, msgpack.packb([packed]))),
    ],
    ids=["objects", "tuples"],
)
def test_what_is_nested_more_deeply_than_documented_is_refused_on_both_sides(wrap, write):
    nested, packed = "x", "x"
    for _ in range(wire.DEEPEST):
        nested, packed = wrap(nested), write(packed)
    same(travel([nested])[0], nested)
    same(wire.unpack([], as_arrived([msgpack.packb([packed])]))[0], nested)
    with pytest.raises(TypeError, match=rf"expected at most {wire.DEEPEST}"):
        wire.pack([wrap(nested)])
    packed = write(packed)
    with pytest.raises(DataLossError, match=rf"more than {wire.DEEPEST} levels"):
        wire.unpack([], as_arrived([msgpack.packb([packed])]))
    endless = objects("x")
    endless[0] = endless
    with pytest.raises(TypeError, match="nested too deeply"):
        wire.pack([endless])


FLOAT = as_arrived([np.arange(3.0)])


@pytest.mark.parametrize(
    ("layout", "frames"),
    [
        ([["float64", [4]]], FLOAT),
        ([["float64", [-1]]], FLOAT),
        ([["float64", ["3"]]], FLOAT),
        ([["float64", [2**62, 2**62]]], FLOAT),
        ([["object", [3]]], FLOAT),
        ([["O", [3]]], FLOAT),
        ([["M8[s]", [3]]], FLOAT),
        ([["f8,f8", [1]]], FLOAT),
        ([["nonsense", [3]]], FLOAT),
        ([[7, [3]]], FLOAT),
        ([["float64"]], FLOAT),
        ([5], FLOAT),
        ([["float64", None]], FLOAT),
        ([["float64", [3]], ["float64", [3]]], FLOAT),
        ([["float64", [3]], None], FLOAT),
        ([["float64", [1 << 70]]], FLOAT),
        ([["float64", [1 << 13]]], FLOAT),
        ([["float64", [3]]], []),
        ([["float64", [3]]], FLOAT * 2),
        ([["float64", [3]]], FLOAT + 2 * as_arrived([msgpack.packb(["one"])])),
        ([], as_arrived([msgpack.packb({"a": 1})])),
        ([], as_arrived([msgpack.packb([msgpack.ExtType(9, b"")])])),
        ([], as_arrived([msgpack.packb([msgpack.ExtType(1, b"x")])])),
        ([], as_arrived([msgpack.packb([msgpack.ExtType(3, b"x")])])),
        ([], as_arrived([msgpack.packb([msgpack.ExtType(3, b"0")])])),
        ([["float64", [3]]], FLOAT + as_arrived([msgpack.packb([msgpack.ExtType(3, b"1")])])),
        ([], as_arrived([msgpack.packb([msgpack.ExtType(2, msgpack.packb([[3], []]))])])),
        ([], as_arrived([b"\xdd\xff\xff\xff\xff"])),
        ([], as_arrived([b""])),
        ([], FLOAT),
    ],
)
def test_values_that_do_not_fit_are_an_error(layout, frames):
    with pytest.raises(DataLossError, match="message: the values cannot be read"):
        wire.unpack(layout, frames)


def test_small_arrays_travel_side_by_side_and_long_ones_are_not_copied():
    arrays = [
        np.arange(3, dtype=np.int8),
        np.ones((300, 300)),
        np.float32(2).reshape(()),
        np.empty((0, 2)),
        np.ones((4, 4))[:, ::2],
    ]
    layout, frames = wire.pack(arrays)
    assert len(frames) == 2
    assert np.shares_memory(frames[1], arrays[1])
    for got, sent in zip(wire.unpack(layout, as_arrived(frames)), arrays, strict=True):
        same(got, sent)
    for wrong in (frames[:1], [frames[0][:8], frames[1]], [frames[1], frames[0]], []):
        with pytest.raises(DataLossError, match="cannot be read"):
            wire.unpack(layout, wrong)


def test_tensors_arrive_as_arrays():
    torch = installed("torch")
    (got,) = travel([[torch.arange(3)]])
    assert got[0].tolist() == [0, 1, 2]


def test_messages_come_back_as_they_were():
    frames = protocol.encode(
        Kind.REQUEST, 2**63, {"c": "exp", "n": "name", "a": {"count": None}}, [np.arange(3), "x"]
    )
    message = protocol.decode(as_arrived(frames))
    assert (message.kind, message.number) == (Kind.REQUEST, 2**63)
    assert message.metadata == {"c": "exp", "n": "name", "a": {"count": None}}
    np.testing.assert_array_equal(message.values[0], np.arange(3))
    assert message.values[1] == "x"
    assert protocol.decode(as_arrived(protocol.encode(Kind.PING))) == (Kind.PING, 0, {}, [])


def test_too_much_metadata_is_refused():
    with pytest.raises(InvalidArgumentError, match="too long"):
        protocol.encode(Kind.REQUEST, 1, {"n": "x" * (1 << 24)})


def test_damaged_messages_are_an_error_and_nothing_else():
    rng = random.Random(0)
    good = as_arrived(protocol.encode(Kind.RESULT, 5, {"a": [1, "b"]}, [np.arange(9), "text", 1.5]))
    read = 0
    for _ in range(20_000):
        frames = [frame.copy() for frame in good]
        for _ in range(rng.randint(1, 3)):
            frame = rng.choice(frames)
            if frame.size:
                frame[rng.randrange(frame.size)] = rng.randrange(256)
        if rng.random() < 0.2:
            at = rng.randrange(len(frames))
            frames[at] = frames[at][: rng.randrange(frames[at].size + 1)]
        if rng.random() < 0.1:
            del frames[rng.randrange(len(frames))]
        try:
            protocol.decode(frames)
            read += 1
        except DataLossError:
            pass
    assert 0 < read < 20_000


@pytest.mark.parametrize(
    "kind", [getattr(errors, name) for name in errors.__all__ if name != "OpError"]
)
def test_errors_keep_class_and_words(kind):
    got = protocol.error_from(protocol.error_to(kind("what is wrong")))
    assert type(got) is kind
    assert got.message == "what is wrong"


def test_errors_of_other_classes_become_ours():
    for error, kind in (
        (ValueError("bad"), InvalidArgumentError),
        (TypeError("bad"), InvalidArgumentError),
        (KeyError("bad"), InternalError),
        (OutOfRangeError("x" * 10_000), OutOfRangeError),
    ):
        got = protocol.error_from(protocol.error_to(error))
        assert type(got) is kind
        assert len(got.message) <= 4096
    assert type(protocol.error_from({"code": "NEW"})) is errors.UnknownError
