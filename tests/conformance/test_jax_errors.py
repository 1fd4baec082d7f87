"""Errors of operations of strategies.jax: the library's own on every rank, with the line."""

from __future__ import annotations

import contextlib
import inspect
import re

import numpy as np
import pytest

import collectives as cc
from requirements import installed

jax = installed("jax")
jnp = jax.numpy
import strategies.jax as sj  # noqa: E402  (needs JAX)
from strategies.jax import ffi  # noqa: E402


def own_device(comm):
    return jax.default_device(jax.devices()[comm.rank])


def slowly(x):
    """The same, after a computation that JAX runs in a thread of its own."""
    large = jnp.full((400, 400), 1 / 400)
    for _ in range(10):
        large = large @ large
    return x + 0 * large[0, 0]


def works(comm):
    """Whether the operations work after an error, compiled or not."""
    total = jax.jit(lambda x: sj.allreduce(x, op=cc.SUM, comm=comm))
    return total(jnp.ones(())) == sj.allreduce(1.0, op=cc.SUM, comm=comm) == comm.size


@pytest.mark.several
@pytest.mark.parametrize("before", [lambda x: x, slowly], ids=["at once", "in flight"])
def test_calls_that_differ_name_ranks_and_lines(comm, before):
    op = cc.MAX if comm.rank == 1 else cc.SUM
    with own_device(comm):
        line = inspect.currentframe().f_lineno + 1
        program = jax.jit(lambda x: sj.allreduce(before(x), op=op, comm=comm))
        with pytest.raises(cc.MismatchError) as caught, sj.library_errors():
            program(jnp.ones(3))
        text = str(caught.value)
        assert re.search(r"op is SUM on .*0.*, MAX on rank 1", text), text
        assert f"test_jax_errors.py:{line}" in text
        # JAX's own error has the text, and ends no other program after the block.
        assert works(comm)
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"MismatchError: .*MAX on rank 1"):
            program(jnp.ones(3)).block_until_ready()
        # A failed program fails the next one, until such a block: here it has failed, if at all.
        with contextlib.suppress(cc.MismatchError), sj.library_errors():
            jax.effects_barrier()
        assert works(comm)
    assert comm.allreduce(1, op=cc.SUM) == comm.size


@pytest.fixture
def by_callback(monkeypatch):
    """JAX calls operations as it calls any function: before JAX 0.5, and with several devices."""
    monkeypatch.setattr(ffi, "is_usable", lambda: False)


@pytest.mark.several
def test_errors_of_callbacks_are_the_library_s(comm, by_callback):
    op = cc.MAX if comm.rank == 1 else cc.SUM
    with own_device(comm):
        program = jax.jit(lambda x: sj.allreduce(x, op=op, comm=comm))
        with pytest.raises(cc.MismatchError, match="MAX on rank 1"), sj.library_errors():
            program(jnp.ones(3))
        assert works(comm)


@pytest.mark.several
def test_a_wrong_argument_of_one_rank_is_an_error_on_all(comm):
    root = comm.size if comm.rank == 0 else 0
    program = jax.jit(lambda x: sj.broadcast(x, root, comm=comm))
    kind, text = (ValueError, "no such root") if comm.rank == 0 else (cc.MismatchError, "rank 0")
    with own_device(comm):
        with pytest.raises(kind, match=text), sj.library_errors():
            program(jnp.ones(3))
        assert works(comm)


@pytest.mark.several
@pytest.mark.parametrize("compiled", [True, False])
def test_a_missing_rank_is_a_timeout_on_the_ranks_that_wait(comm, compiled):
    def program(x):
        return sj.allreduce(x, op=cc.SUM, timeout=0.5, comm=comm)

    with own_device(comm):
        assert works(comm)
        if comm.rank == 0:
            # Stays away until the others have given up.
            for source in range(1, comm.size):
                comm.recv(source)
        else:
            with (
                pytest.raises(cc.CollectiveTimeout, match="no answer within 0.5 s"),
                sj.library_errors(),
            ):
                (jax.jit(program) if compiled else program)(jnp.ones(3))
            comm.send(0, 0)
    # Only the communicator of the programs has failed.
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_a_reduction_without_a_gradient_says_so(comm):
    words = "allreduce: this reduction has no gradient, expected SUM or MEAN, got MAX"
    for transformed in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(ValueError, match=words):
            transformed(lambda x: sj.allreduce(x, op=cc.MAX, comm=comm).sum())(jnp.ones(3))
    stopped = jax.grad(
        lambda x: (x * sj.allreduce(jax.lax.stop_gradient(x), op=cc.MAX, comm=comm)).sum()
    )
    np.testing.assert_array_equal(stopped(jnp.ones(3)), np.ones(3))


def test_operations_of_the_communicator_name_those_for_traced_arrays(comm):
    for call in (comm.allreduce, comm.broadcast):
        with pytest.raises(TypeError, match=r"such as strategies\.jax\.allreduce"):
            jax.jit(call)(jnp.ones(3))
    assert works_alone(comm)


def works_alone(comm):
    return comm.allreduce(1, op=cc.SUM) == comm.size


WRONG = {
    "rows for some ranks": (
        lambda comm: sj.alltoall(jnp.ones(comm.size + 1), comm=comm),
        "alltoall: expected a multiple of the number of ranks",
    ),
    "a scalar": (
        lambda comm: sj.reduce_scatter(1.0, comm=comm),
        "reduce_scatter: expected an array of rows, got a scalar",
    ),
    "locations": (
        lambda comm: sj.allreduce(jnp.ones(2), op=cc.MAXLOC, comm=comm),
        "allreduce: locations are not available",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_use_is_an_error_before_the_first_message(comm, wrong):
    call, words = WRONG[wrong]
    if wrong == "rows for some ranks" and comm.size == 1:
        call(comm)  # a rank alone shares any number
        return
    with pytest.raises(ValueError, match=words):
        call(comm)


@pytest.mark.parametrize("times", [1, 20], ids=["once", "repeated"])  # then in compiled code
def test_a_closed_communicator(comm, times):
    part = comm.split(0, comm.rank)
    program = jax.jit(
        lambda x: jax.lax.fori_loop(0, times, lambda _, x: sj.allreduce(x, comm=part), x)
    )
    with own_device(comm):
        program(jnp.ones(3)).block_until_ready()
        part.close()
        for _ in range(2):
            with pytest.raises(cc.CollectiveError, match="closed"), sj.library_errors():
                program(jnp.ones(3))
            assert works(comm)  # compiles other programs
