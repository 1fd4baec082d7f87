"""Operations of strategies.jax: each one, under each transformation, is NumPy's result.

Ranks that are threads have a device each, so that their programs run at the same time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import oracle
from requirements import installed

jax = installed("jax")
jnp = jax.numpy
import strategies.jax as sj  # noqa: E402  (needs JAX)
from strategies.jax.call_rules import RULES  # noqa: E402

SUM, MEAN, MAX = cc.SUM, cc.MEAN, cc.MAX


class Case(NamedTuple):
    """One use of an operation: what a rank calls, and what it gets of the arrays of all ranks."""

    call: Any  # (x, comm) -> result
    expected: Any  # (arrays of all ranks, rank) -> result
    rows: int = 1  # rows of an array, for each rank
    op: Any = None
    linear: bool = True


def root_of(arrays):
    return len(arrays) - 1


def reduced(arrays, op):
    """The reduction of arrays in the precision of NumPy's float64 or complex128."""
    wide = np.complex128 if arrays[0].dtype.kind == "c" else np.float64
    if arrays[0].dtype.kind in "ib":
        wide = arrays[0].dtype
    functions = {SUM: np.sum, MEAN: np.mean, MAX: np.max}
    return functions[op]([a.astype(wide) for a in arrays], axis=0)


def rows_of(array, rank, size):
    return np.array_split(array, size)[rank]


def next_to(rank, comm):
    return {"dest": (rank + 1) % comm.size, "source": (rank - 1) % comm.size}


def edges(rank, comm):
    return {
        "dest": rank + 1 if rank + 1 < comm.size else None,
        "source": rank - 1 if rank else None,
    }


def pass_on(x, comm):
    """Send to the next of two ranks: even ranks to odd ones."""
    if comm.rank % 2:
        return sj.recv(x, comm.rank - 1, comm=comm)
    if comm.rank + 1 < comm.size:
        return sj.send(x, comm.rank + 1, comm=comm) + jnp.zeros_like(x)
    return jnp.zeros_like(x)


CASES = {
    "allreduce": Case(
        lambda x, comm: sj.allreduce(x, op=SUM, comm=comm),
        lambda arrays, rank: reduced(arrays, SUM), op=SUM,
    ),
    "allreduce mean": Case(
        lambda x, comm: sj.allreduce(x, comm=comm), lambda arrays, rank: reduced(arrays, MEAN),
        op=MEAN,
    ),
    "allreduce scaled": Case(
        lambda x, comm: sj.allreduce(x, op=SUM, prescale=0.5, postscale=0.25, comm=comm),
        lambda arrays, rank: reduced(arrays, SUM) / 8, op=MEAN,
    ),
    "allreduce max": Case(
        lambda x, comm: sj.allreduce(x, op=MAX, comm=comm),
        lambda arrays, rank: reduced(arrays, MAX), op=MAX, linear=False,
    ),
    "grouped_allreduce": Case(
        lambda x, comm: sj.grouped_allreduce({"a": x, "b": [x[:1]]}, op=SUM, comm=comm)["a"],
        lambda arrays, rank: reduced(arrays, SUM), op=SUM,
    ),
    "reduce": Case(
        lambda x, comm: sj.reduce(x, comm.size - 1, op=SUM, comm=comm),
        lambda arrays, rank: reduced(arrays, SUM) * (rank == root_of(arrays)), op=SUM,
    ),
    "reduce mean": Case(
        lambda x, comm: sj.reduce(x, comm=comm),
        lambda arrays, rank: reduced(arrays, MEAN) * (rank == 0), op=MEAN,
    ),
    "broadcast": Case(
        lambda x, comm: sj.broadcast(x, comm.size - 1, comm=comm),
        lambda arrays, rank: arrays[root_of(arrays)],
    ),
    "allgather": Case(
        lambda x, comm: sj.allgather(x, comm=comm), lambda arrays, rank: np.concatenate(arrays)
    ),
    "allgather stacked": Case(
        lambda x, comm: sj.allgather(x, tiled=False, comm=comm),
        lambda arrays, rank: np.stack(arrays),
    ),
    "gather": Case(
        lambda x, comm: sj.gather(x, comm.size - 1, comm=comm),
        lambda arrays, rank: np.concatenate(arrays)[: None if rank == root_of(arrays) else 0],
    ),
    "scatter": Case(
        # On other ranks the argument has the shape of the result.
        lambda x, comm: sj.scatter(x if comm.rank == 0 else x[: len(x) // comm.size], comm=comm),
        lambda arrays, rank: rows_of(arrays[0], rank, len(arrays)),
    ),
    "reduce_scatter": Case(
        lambda x, comm: sj.reduce_scatter(x[1:], op=SUM, comm=comm),  # uneven for several ranks
        lambda arrays, rank: rows_of(reduced(arrays, SUM)[1:], rank, len(arrays)), rows=3, op=SUM,
    ),
    "reduce_scatter mean": Case(
        lambda x, comm: sj.reduce_scatter(x, comm=comm),
        lambda arrays, rank: rows_of(reduced(arrays, MEAN), rank, len(arrays)), op=MEAN,
    ),
    "alltoall": Case(
        lambda x, comm: sj.alltoall(x, comm=comm),
        lambda arrays, rank: np.concatenate([rows_of(a, rank, len(arrays)) for a in arrays]),
        rows=2,
    ),
    "scan": Case(
        lambda x, comm: sj.scan(x, comm=comm),
        lambda arrays, rank: reduced(arrays[: rank + 1], SUM), op=SUM,
    ),
    "scan mean": Case(
        lambda x, comm: sj.scan(x, op=MEAN, comm=comm),
        lambda arrays, rank: reduced(arrays[: rank + 1], MEAN), op=MEAN,
    ),
    "exscan": Case(
        lambda x, comm: sj.exscan(x, comm=comm),
        lambda arrays, rank: reduced([0 * arrays[0], *arrays[:rank]], SUM), op=SUM,
    ),
    "exscan mean": Case(
        lambda x, comm: sj.exscan(x, op=MEAN, comm=comm),
        lambda arrays, rank: reduced(arrays[:rank] or [0 * arrays[0]], MEAN), op=MEAN,
    ),
    "sendrecv": Case(
        lambda x, comm: sj.sendrecv(x, **next_to(comm.rank, comm), comm=comm),
        lambda arrays, rank: arrays[rank - 1],
    ),
    "sendrecv at edges": Case(
        lambda x, comm: sj.sendrecv(x, **edges(comm.rank, comm), tag=3, comm=comm),
        lambda arrays, rank: arrays[rank - 1] if rank else 0 * arrays[0],
    ),
    "send and recv": Case(
        pass_on, lambda arrays, rank: arrays[rank - 1] if rank % 2 else 0 * arrays[rank]
    ),
}  # fmt: skip

ALSO_CALLED = {"barrier", "recv", "send"}  # in programs of these cases
DTYPES = [
    np.dtype(t)
    for t in (
        np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32, np.bool_, np.complex64
    )
]  # fmt: skip
# One for each way in which an operation is made, where programs take long to compile.
FEW = (
    "allreduce", "grouped_allreduce", "reduce mean", "allgather stacked", "scatter", "exscan",
    "sendrecv at edges", "send and recv",
)  # fmt: skip
FEW_CASES = {name: CASES[name] for name in FEW}
WITH_GRADIENT = {name: case for name, case in CASES.items() if case.linear}


def test_every_operation_has_a_case():
    assert {name.partition(" ")[0] for name in CASES} | ALSO_CALLED == set(RULES)
    assert set(sj.__all__) == {*RULES, "library_errors"}


def arrays_of(comm, case, dtype=np.float32, seed=0):
    """The arrays of all ranks, shape (rows, 2)."""
    shape = (case.rows * comm.size, 2)
    return [oracle.data(100 * seed + rank, shape, np.dtype(dtype)) for rank in range(comm.size)]


def assert_near(found, expected, name, dtype=np.float32, roundings=8):
    """Compare with the exact result: numbers below 2, some of which are added on each rank."""
    found, dtype = np.asarray(found), np.dtype(dtype)
    assert found.shape == expected.shape, name
    if dtype.kind in "ib":
        np.testing.assert_array_equal(found, expected.astype(dtype), name)
        return
    unit = float(ml_dtypes.finfo(dtype).eps)
    kind = np.complex128 if dtype.kind == "c" else np.float64
    np.testing.assert_allclose(
        found.astype(kind), expected.astype(kind), rtol=0, atol=16 * roundings * unit, err_msg=name
    )


def own_device(comm):
    return jax.default_device(jax.devices()[comm.rank])


def run(program, operands, comm, form="compiled"):
    """The results of a program; not compiled on a shared device, so that JAX compiles less."""
    if form == "not compiled":
        return program(operands)
    with own_device(comm):
        return jax.jit(program)(operands)


FORMS = ("compiled", "not compiled")


def programs(comm, cases, how):
    """A program that runs a transformed call of every case, in one order on all ranks."""

    def program(operands):
        sj.barrier(comm=comm)
        return {
            name: how(lambda x, case=case: case.call(x, comm), operands[name])
            for name, case in cases.items()
        }

    return program


def own(arrays, comm):
    return {name: jnp.asarray(all_of[comm.rank]) for name, all_of in arrays.items()}


def plainly(function, x):
    return function(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_results(comm, dtype):
    """In float32 also those of concrete arrays, with the same bits."""
    forms = FORMS if dtype == np.float32 else FORMS[:1]
    names = CASES if dtype == np.float32 else [*FEW, "allreduce mean", "allreduce max"]
    cases = {
        name: CASES[name]
        for name in names
        if CASES[name].op is None or oracle.is_defined(CASES[name].op, dtype)
    }
    arrays = {name: arrays_of(comm, case, dtype) for name, case in cases.items()}
    x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with x64(dtype == np.float64):
        program, operands = programs(comm, cases, plainly), own(arrays, comm)
        compiled, *concrete = (run(program, operands, comm, form) for form in forms)
    for name, case in cases.items():
        expected = np.asarray(case.expected(arrays[name], comm.rank))
        assert compiled[name].dtype == dtype, name
        assert_near(compiled[name], expected, name, dtype)
        for results in concrete:
            assert results[name].dtype == dtype, name
            np.testing.assert_array_equal(compiled[name], results[name], name)


def in_fori_loop(function, x):
    return jax.lax.fori_loop(0, 3, lambda i, last: function(x + 0 * i), function(x))


def in_while_loop(function, x):
    first = function(x)
    return jax.lax.while_loop(
        lambda state: state[0] < 2, lambda state: (state[0] + 1, function(x)), (0, first)
    )[1]


def in_scan(function, x):
    return jax.lax.scan(lambda carry, row: (carry, function(row)), 0, jnp.stack([2 * x, x]))[1][1]


def in_cond(function, x):
    # Both branches call, and a rank runs one of them.
    return jax.lax.cond(x.size > jnp.argmax(x), lambda x: function(2 * x) / 2, function, x)


def in_remat(function, x):
    return jax.checkpoint(function)(x)


def in_inner_jit(function, x):
    return jax.jit(function)(x)


NESTED = {
    "fori_loop": in_fori_loop,
    "while_loop": in_while_loop,
    "scan": in_scan,
    "cond": in_cond,
    "remat": in_remat,
    "jit": in_inner_jit,
}


@pytest.mark.parametrize("nested", NESTED)
def test_control_flow(comm, nested):
    arrays = {name: arrays_of(comm, case) for name, case in FEW_CASES.items()}
    found = run(programs(comm, FEW_CASES, NESTED[nested]), own(arrays, comm), comm)
    for name, case in FEW_CASES.items():
        assert_near(found[name], case.expected(arrays[name], comm.rank), name)


@pytest.mark.parametrize("form", FORMS)
def test_vmap_makes_one_call_for_a_batch_of_batches(comm, form):
    def batched(function, x):
        return jax.vmap(jax.vmap(function, in_axes=1, out_axes=1))(x)

    cases = FEW_CASES if form == "compiled" else CASES
    inputs, expected, one = {}, {}, {}
    for name, case in cases.items():
        sets = [[arrays_of(comm, case, seed=1 + i * 2 + j) for j in range(2)] for i in range(3)]
        inputs[name] = jnp.asarray(
            np.stack([np.stack([s[comm.rank] for s in row], 1) for row in sets])
        )
        expected[name] = np.stack(
            [np.stack([case.expected(s, comm.rank) for s in row], 1) for row in sets]
        )
        one[name] = sets[0][0][comm.rank]
    program = programs(comm, cases, batched)
    found = run(program, inputs, comm, form)
    assert operations_of(program, inputs) == operations_of(programs(comm, cases, plainly), one)
    for name in cases:
        assert_near(found[name], expected[name], name)


def operations_of(program, operands):
    """The operations that a program calls, in order."""
    equations = jax.make_jaxpr(program)(operands).eqns
    found = [e.params["call"].operation for e in equations if "call" in e.params]
    assert len(found) >= len(FEW)
    return found


def transposed(case, comm, weights):
    """The gradient on this rank of the sum over ranks of weights times results.

    From the results for arrays that are 1 at one place: column by column of the linear map.
    """
    shape = weights[1].shape
    gradient = np.zeros(shape)
    for index in np.ndindex(shape):
        basis = [np.zeros(shape) for _ in range(comm.size)]
        basis[comm.rank][index] = 1
        for rank in range(comm.size):
            result = case.expected(basis, rank)
            gradient[index] += (result * weights[0](rank, result.shape)).sum()
    return gradient


def weight(rank, shape):
    return np.random.default_rng([7, rank]).uniform(-1, 1, shape).astype(np.float32)


@pytest.mark.parametrize(
    ("nested", "form"),
    [("plain", "not compiled")]
    + [(how, "compiled") for how in ("plain", "scan", "cond", "remat", "jit", "vmap")],
)
def test_gradients_are_those_of_the_sum_of_all_losses(comm, nested, form):
    how = {"plain": plainly, "vmap": lambda f, x: jax.vmap(f)(x[None])[0], **NESTED}[nested]

    def loss_of(function):
        def loss(x):
            result = how(function, x)
            return (result * weight(comm.rank, result.shape)).sum()

        return loss

    cases = WITH_GRADIENT if nested == "plain" else FEW_CASES
    arrays = {name: arrays_of(comm, case) for name, case in cases.items()}
    program = programs(comm, cases, lambda f, x: jax.grad(loss_of(f))(x))
    found = run(program, own(arrays, comm), comm, form)
    for name, case in cases.items():
        exact = transposed(case, comm, (weight, arrays[name][comm.rank]))
        assert_near(found[name], exact, name, roundings=16)


@pytest.mark.parametrize("form", FORMS)
def test_jvp_vjp_and_linear_transpose(comm, form):
    def derived(function, x):
        result, change = jax.jvp(function, (x,), (2 * x,))
        _, back = jax.vjp(function, x)
        ones = jnp.ones_like(result)
        (gradient,) = back(ones)
        (again,) = jax.linear_transpose(function, x)(ones)
        return result, change, gradient, again

    cases = FEW_CASES if form == "compiled" else WITH_GRADIENT
    arrays = {name: arrays_of(comm, case) for name, case in cases.items()}
    found = run(programs(comm, cases, derived), own(arrays, comm), comm, form)
    for name, case in cases.items():
        result, change, gradient, again = found[name]
        expected = case.expected(arrays[name], comm.rank)
        exact = transposed(case, comm, (lambda rank, shape: 1, arrays[name][comm.rank]))
        assert_near(result, expected, name)
        assert_near(change, 2 * expected, name)
        assert_near(gradient, exact, name)
        assert_near(again, exact, name)


def test_a_user_s_derivative_may_call_operations(comm):
    @jax.custom_vjp
    def scaled(x):
        return sj.allreduce(x, op=SUM, comm=comm)

    scaled.defvjp(
        lambda x: (scaled(x), None), lambda _, g: (3 * sj.allreduce(g, op=SUM, comm=comm),)
    )
    with own_device(comm):
        found = jax.jit(jax.grad(lambda x: scaled(x).sum()))(jnp.ones(2))
    np.testing.assert_array_equal(found, [3.0 * comm.size] * 2)


def test_second_derivatives(comm):
    def loss(x):
        return (sj.allreduce(x, op=SUM, comm=comm) ** 3).sum()

    with own_device(comm):
        # The sum of all losses is P (sum x)^3, so the Hessian is 6 P sum x on the diagonal; of the
        # own loss alone, forward over reverse, the tangents of all ranks add up.
        push = jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (jnp.ones_like(x),))[1])
        found = push(jnp.array([1.0, 2.0]))
    size = comm.size
    np.testing.assert_allclose(found, [6.0 * size**3, 12.0 * size**3], rtol=1e-5)


def test_groups_of_ranks(comm):
    part = comm.split(comm.rank % 2)
    with own_device(comm):
        sums = jax.jit(lambda x: [sj.allreduce(x, op=SUM, comm=ranks) for ranks in (part, comm)])
        there, everywhere = sums(jnp.float32(comm.rank))
    assert there == sum(r for r in range(comm.size) if r % 2 == comm.rank % 2)
    assert everywhere == sum(range(comm.size))


def test_results_are_where_the_operands_are(comm):
    device = jax.devices()[-1 - comm.rank]
    x = jnp.ones(2)
    there = jax.device_put(x, device)
    for form in (jax.jit, lambda function: function):
        for operation in (sj.allreduce, sj.allgather):
            call = form(lambda x, operation=operation: operation(x, comm=comm))
            assert call(there).devices() == {device}
            with own_device(comm):
                assert not call(x).committed
