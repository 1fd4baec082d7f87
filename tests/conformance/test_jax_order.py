"""Calls of compiled programs: none is dropped, merged or moved, whatever tempts XLA.

Rank 0 compiles a program. The other ranks run the same program line by line, without compiling. A
call that is missing on rank 0, or in another place, does not fit the calls of the other ranks.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

import collectives as cc
from requirements import installed

jax = installed("jax")
jnp, lax = jax.numpy, jax.lax
import strategies.jax as sj  # noqa: E402  (needs JAX)

pytestmark = pytest.mark.several


def unused_results(x, sums, comm):
    sums(x)
    sj.broadcast(x, 1, comm=comm)
    sj.barrier(comm=comm)
    return sums(x + 1)


def two_equal_calls(x, sums, comm):
    return sums(x) + sums(x)


def constants(x, sums, comm):
    return sums(jnp.ones(3)) + sums(jnp.zeros(3)) + sj.broadcast(np.arange(3.0), 1, comm=comm)


def results_times_zero(x, sums, comm):
    return 0 * sums(jnp.arange(3)) + jnp.where(False, sj.scan(x, comm=comm), sums(x))


def a_late_operand_first(x, sums, comm):
    slow = jnp.full((300, 300), x[0])
    for _ in range(5):
        slow = slow @ slow / 300
    first = sums(slow)
    # All operands of the next calls are ready long before.
    return first[0, :3] + sj.scan(x, comm=comm) + sj.broadcast(x, 1, comm=comm)


def the_same_in_every_turn(x, sums, comm):
    return lax.fori_loop(0, 4, lambda i, total: total + sums(x), jnp.zeros_like(x))


def a_loop_without_a_use(x, sums, comm):
    lax.scan(lambda carry, row: (carry, sums(row)), 0, jnp.stack([x, 2 * x, x]))
    return sj.broadcast(x, 1, comm=comm)


def branches(x, sums, comm):
    def two_calls(x):
        sums(x)
        return sj.broadcast(x, 1, comm=comm)

    # The same predicates on all ranks.
    first = lax.cond(x[2] > -1, two_calls, sums, x)
    second = lax.cond(x[2] > 99, two_calls, sums, x)
    return first + second + lax.switch(jnp.int32(x[2]) * 0 + 1, [two_calls, sums, two_calls], x)


def as_long_as_a_sum_is_small(x, sums, comm):
    return lax.while_loop(lambda c: (c[1] < 99).all(), lambda c: (c[0] + 1, sums(c[1] + 1)), (0, x))


def inner_programs(x, sums, comm):
    inner = jax.jit(lambda x: (sums(x), sj.broadcast(x, 1, comm=comm)))
    inner(x)
    return inner(x)[1]


def messages(x, sums, comm):
    """Two of one tag, whose order decides."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sj.send(x, right, comm=comm)
    sj.send(2 * x, right, comm=comm)
    return sj.recv(x, left, comm=comm) - 2 * sj.recv(x, left, comm=comm)


def gradients(x, sums, comm):
    """The backward pass calls in reverse order."""

    def loss(x):
        sums(x)
        return (sj.scan(sums(x) * x, comm=comm) * sj.broadcast(x, 1, comm=comm)).sum()

    return jax.grad(loss)(x)


PROGRAMS = (
    unused_results, two_equal_calls, constants, results_times_zero, a_late_operand_first,
    the_same_in_every_turn, a_loop_without_a_use, branches, as_long_as_a_sum_is_small,
    inner_programs, messages, gradients,
)  # fmt: skip


def own_device(comm):
    return jax.default_device(jax.devices()[comm.rank])


def line_by_line(program):
    """The program without compiling, its loops and branches in Python."""

    def run(*operands):
        with jax.disable_jit():
            return program(*operands)

    return run


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_compiled_program_makes_the_calls_of_its_lines(comm, program):
    sums = functools.partial(sj.allreduce, op=cc.SUM, comm=comm)
    x = jnp.arange(3.0) + comm.rank % 2
    lines = functools.partial(program, sums=sums, comm=comm)
    with own_device(comm), sj.library_errors():
        found = (jax.jit if comm.rank == 0 else line_by_line)(lines)(x)
        expected = line_by_line(lines)(x)  # together
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


def test_donated_buffers(comm):
    step = functools.partial(sj.allreduce, op=cc.SUM, comm=comm)

    def program(x):
        y = step(x)
        return y + 1, step(x) + step(y)

    with own_device(comm):
        donating = jax.jit(program, donate_argnums=0)
        for _ in range(3):
            first, second = donating(jnp.arange(5.0))
    np.testing.assert_array_equal(first, comm.size * np.arange(5.0) + 1)
    np.testing.assert_array_equal(second, (comm.size + comm.size**2) * np.arange(5.0))


def test_programs_in_flight_run_in_the_order_of_their_starts(comm):
    """Also before calls on concrete arrays; calls of the communicator itself do not interfere."""
    size = comm.size

    @jax.jit
    def slow(x):
        large = jnp.full((400, 400), 1 / 400)
        for _ in range(10):
            large = large @ large
        return sj.allreduce(x + 0 * large[0, 0], op=cc.SUM, comm=comm)

    fast = jax.jit(lambda x: sj.allreduce(x, op=cc.MAX, comm=comm))
    with own_device(comm):
        for number in range(3):
            first = slow(jnp.full(3, float(number)))
            second = fast(jnp.full(3, float(comm.rank)))
            total = comm.allreduce(np.ones(3), op=cc.SUM)
            third = sj.scan(jnp.ones(3), comm=comm)
            np.testing.assert_array_equal(third, [comm.rank + 1.0] * 3)
            np.testing.assert_array_equal(total, [size] * 3)
            np.testing.assert_array_equal(second, [size - 1.0] * 3)
            np.testing.assert_array_equal(first, [size * float(number)] * 3)
