"""Optimizers wherever arrays lie: any layout, any place in a bucket, other libraries, devices."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher import ROOT
from optimizer_table import MAKERS
from other_memory import OtherMemory
from requirements import installed
from strategies import Adam, Momentum

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
LAYOUTS = {
    "C": lambda a: a.copy(),
    "F": np.asfortranarray,
    "strided": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "reversed": lambda a: a[::-1].copy()[::-1],
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "unaligned": lambda a: np.frombuffer(bytearray(b"\0" + a.tobytes()), a.dtype, offset=1).reshape(
        a.shape
    ),
}


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8).tobytes()


def run(name, variable, gradients, arrange=lambda gradient: gradient):
    """Return variable and slots after a step for each gradient."""
    optimizer = MAKERS[name](0.05)
    for gradient in gradients:
        optimizer.apply_gradients([(arrange(gradient), variable)])
    state = optimizer.state_dict()
    return [bits(variable), *(bits(v) for v in state.values() if hasattr(v, "dtype"))]


@settings(max_examples=60)
@given(
    name=st.sampled_from(list(MAKERS)),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    layouts=st.tuples(st.sampled_from(list(LAYOUTS)), st.sampled_from(list(LAYOUTS))),
    seed=st.integers(0, 1000),
)
def test_the_layout_of_an_array_does_not_change_a_bit(name, dtype, shape, layouts, seed):
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal(shape).astype(dtype)
    gradients = [rng.standard_normal(shape).astype(dtype) for _ in range(3)]
    expected = run(name, weights.copy(), gradients)
    variable = LAYOUTS[layouts[0]](weights)
    assert run(name, variable, gradients, LAYOUTS[layouts[1]]) == expected


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_place_in_a_bucket_does_not_change_a_bit(name, dtype):
    # 67 elements: four vectors of 16 and a remainder. Elsewhere, the remainder is other elements.
    rng = np.random.default_rng(12)
    weights = rng.standard_normal((67, 1)).astype(dtype)
    gradients = [rng.standard_normal((67, 1)).astype(dtype) for _ in range(5)]
    expected = run(name, weights.copy(), gradients)
    bucket = np.zeros(200, dtype)
    for place in (0, 1, 2, 3, 5, 8, 16, 31):
        variable = bucket[place : place + 67].reshape(67, 1)
        variable[...] = weights

        def arrange(gradient, start=place // 2):
            part = np.zeros(200, dtype)[start : start + 67].reshape(67, 1)
            part[...] = gradient
            return part

        assert run(name, variable, gradients, arrange) == expected
        assert not bucket[:place].any()
        assert not bucket[place + 67 :].any()
        bucket[...] = 0


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "lars"])
def test_one_large_array_is_as_many_small_ones(name):
    rng = np.random.default_rng(13)
    weights = rng.standard_normal(1000).astype(np.float32)
    gradients = [rng.standard_normal(1000).astype(np.float32) for _ in range(5)]
    together, apart = weights.copy(), weights.copy()
    one, many = MAKERS[name](0.05), MAKERS[name](0.05)
    for gradient in gradients:
        one.apply_gradients([(gradient, together)])
        cuts = (7, 40, 41, 500)
        many.apply_gradients(zip(np.split(gradient, cuts), np.split(apart, cuts), strict=True))
    assert bits(apart) == bits(together)


@pytest.mark.parametrize("name", MAKERS)
def test_read_only_gradients_are_read(name):
    gradient = np.ones(5, np.float32)
    expected = run(name, np.ones(5, np.float32), [gradient])
    gradient.flags.writeable = False
    assert run(name, np.ones(5, np.float32), [gradient]) == expected


@pytest.mark.parametrize("name", MAKERS)
def test_a_gradient_may_be_the_variable(name):
    rng = np.random.default_rng(15)
    variable = rng.standard_normal((9, 9)).astype(np.float32)
    other = variable.copy()
    MAKERS[name](0.1).apply_gradients([(variable, variable)])
    MAKERS[name](0.1).apply_gradients([(other.copy(), other)])
    assert bits(variable) == bits(other)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_steady_state_allocates_no_array_of_the_variables_size(name, dtype):
    variable, gradient = np.ones((2000, 2000), dtype), np.ones((2000, 2000), dtype)
    optimizer = MAKERS[name](0.1)
    optimizer.apply_gradients([(gradient, variable)])
    tracemalloc.start()
    try:
        optimizer.apply_gradients([(gradient, variable)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * 65536 + 65536  # six tiles of 64 KiB for 16-bit floats, and small objects


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_variables_become_infinite_only_where_the_result_is(dtype):
    variable = np.array([60000.0, 1.0], dtype)
    Momentum(1.0).apply_gradients([(np.array([-60000.0, 60000.0], dtype), variable)])
    assert np.isinf(variable[0].astype(np.float64)) == (dtype == np.float16)
    assert variable[1].astype(np.float64) == np.float64(np.float32(-59999).astype(dtype))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_arrays_of_another_memory_stay_there(name, dtype):
    rng = np.random.default_rng(11)
    host = rng.standard_normal((4, 3)).astype(dtype)
    other = OtherMemory(host.copy())
    on_host, elsewhere = MAKERS[name](0.1), MAKERS[name](0.1)
    for _ in range(5):
        gradient = rng.standard_normal((4, 3)).astype(dtype)
        on_host.apply_gradients([(gradient, host)])
        elsewhere.apply_gradients([(OtherMemory(gradient), other)])
    # The formula is the same one; the norms of LARS are summed in another order.
    tolerance = 5 * np.finfo(np.float32).eps if name == "lars" else 0
    np.testing.assert_allclose(other.data.astype("f4"), host.astype("f4"), rtol=tolerance)


def test_a_state_from_host_memory_goes_to_where_the_variable_is():
    on_host, elsewhere = Adam(0.1), Adam(0.1)
    host, other = np.ones(3), OtherMemory(np.ones(3))
    on_host.apply_gradients([(np.ones(3), host)])
    elsewhere.load_state_dict(on_host.state_dict())
    other.data[...] = host
    on_host.apply_gradients([(np.ones(3), host)])
    elsewhere.apply_gradients([(OtherMemory(np.ones(3)), other)])
    np.testing.assert_array_equal(other.data, host)
    assert isinstance(elsewhere.state_dict()["first/0"], OtherMemory)


@pytest.mark.parametrize("name", MAKERS)
def test_gradient_and_variable_in_different_memories(name):
    good = np.ones(2)
    for gradient, variable in [(OtherMemory(np.ones(2)), np.ones(2)), (np.ones(2), OtherMemory(np.ones(2)))]:  # noqa: E501  # fmt: skip
        optimizer = MAKERS[name](0.1)
        with pytest.raises(TypeError, match="another memory .*OtherMemory.*'1', position 1"):
            optimizer.apply_gradients([(np.ones(2), good), (gradient, variable)])
        assert optimizer.step == 0
    np.testing.assert_array_equal(good, [1, 1])


@pytest.fixture
def torch():
    return installed("torch")


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_tensors_of_pytorch_are_changed_in_place(name, dtype, torch):
    rng = np.random.default_rng(14)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    host = rng.standard_normal((5, 7)).astype(kind)
    wide = torch.from_numpy(host.astype(np.float64))
    tensor = wide.to(getattr(torch, dtype)).t().contiguous().t().requires_grad_()
    one, other = MAKERS[name](0.1), MAKERS[name](0.1)
    for _ in range(3):
        gradient = rng.standard_normal((5, 7)).astype(kind)
        tensor.grad = torch.from_numpy(gradient.astype(np.float64)).to(tensor.dtype)
        one.apply_gradients([(gradient, host)])
        other.apply_gradients([(tensor.grad, tensor)])
    np.testing.assert_array_equal(tensor.detach().double().numpy(), host.astype(np.float64))
    np.testing.assert_equal(other.state_dict(), one.state_dict())


def test_a_sparse_tensor_is_rows_or_named(torch):
    table = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.zeros_(table.weight)
    table(torch.tensor([1, 3, 1])).sum().backward()
    MAKERS["sgd"](0.5).apply_gradients([(table.weight.grad, table.weight)])
    assert table.weight[:, 0].tolist() == [0, -1, 0, -0.5]
    both = table.weight.grad.to_dense().to_sparse()
    with pytest.raises(TypeError, match=r"SGD: expected .* that is in 2 \(position 0\)"):
        MAKERS["sgd"](0.5).apply_gradients([(both, table.weight)])
    with pytest.raises(TypeError, match="SGD: variable cannot be read: .*position 0"):
        MAKERS["sgd"](0.5).apply_gradients([(None, both)])


def test_arrays_of_jax_are_gradients_but_no_variables():
    jnp = installed("jax.numpy")
    variable = np.ones(3, np.float32)
    optimizer = Momentum(0.5)
    optimizer.apply_gradients([(jnp.ones(3, jnp.float32), variable)])
    np.testing.assert_array_equal(variable, [0.5] * 3)
    with pytest.raises(TypeError, match="JAX cannot be changed in place, .*Optax.*position 0"):
        optimizer.apply_gradients([(np.ones(3, np.float32), jnp.ones(3, jnp.float32))])


@pytest.mark.packages
def test_importing_loads_no_compiler_and_no_framework():
    program = (
        "import sys, strategies; strategies.Adam()\n"
        "print([name for name in ('numba', 'torch', 'jax', 'cupy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_scratch_of_sixteen_bits_is_not_shared_between_threads_of_the_caller():
    def work(seed):
        rng = np.random.default_rng(seed)
        variable = rng.standard_normal(40_000).astype(np.float16)
        gradients = [rng.standard_normal(40_000).astype(np.float16) for _ in range(3)]
        return run("adam", variable, gradients)

    expected = [work(seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(3))) == expected
