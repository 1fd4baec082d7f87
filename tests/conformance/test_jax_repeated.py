"""Calls of compiled programs that compiled code repeats: results, records and errors of others."""

from __future__ import annotations

import collections
import inspect
import sys

import numpy as np
import pytest

import collectives as cc
from collectives.communicator import group_of
from requirements import installed

jax = installed("jax")
jnp = jax.numpy
import strategies.jax as sj  # noqa: E402  (needs JAX)
from strategies.jax import call_rules  # noqa: E402  (needs JAX)

TIMES = 20


@pytest.fixture
def by_python(monkeypatch):
    """Count the calls of each rank that Python runs."""
    counts = collections.Counter()
    run = call_rules.run

    def counted(call, operands, results):
        counts[call.comm.rank] += 1
        run(call, operands, results)

    monkeypatch.setattr(call_rules, "run", counted)
    return counts


def uses_engine(comm):
    return comm.size > 1 and group_of(comm).node_engine is not None and comm.num_nodes == 1


def own_device(comm):
    return jax.default_device(jax.devices()[comm.rank])


def repeated(call):
    """A program that makes a call many times, on the result of the last one."""
    return jax.jit(lambda x: jax.lax.fori_loop(0, TIMES, lambda _, x: call(x), x))


CALLS = {
    "allreduce": lambda x, comm: sj.allreduce(x, comm=comm) + 1,
    "allreduce, maximum": lambda x, comm: sj.allreduce(x + comm.rank, op=cc.MAX, comm=comm),
    "allreduce, top-k": lambda x, comm: sj.allreduce(x, compression=cc.TOPK(1), comm=comm) + 1,
    "allreduce, 16 bits": lambda x, comm: sj.allreduce(x, compression=cc.FP16, comm=comm) + 1,
    "broadcast": lambda x, comm: sj.broadcast(x + comm.rank, comm.size - 1, comm=comm),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results_are_those_of_calls_by_python(world, by_python, call):
    def check(comm):
        comm.barrier()
        for shape in ((3,), (2, 3), (70_001,), (0,)):
            x = jnp.ones(shape) * (comm.rank + 1)
            with own_device(comm):
                expected = x
                with jax.disable_jit():
                    for _ in range(TIMES):
                        expected = call(expected, comm)
                before = by_python[comm.rank]
                found = repeated(lambda x: call(x, comm))(x)
                assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()
            if call is CALLS["allreduce"] and uses_engine(comm) and sys.version_info >= (3, 11):
                assert by_python[comm.rank] - before < 4 or not found.size

    world.run(check)


def test_a_call_is_not_taken_for_an_earlier_one(comm):
    """Calls on concrete arrays use the same communicator, and have plans of their own."""
    x = jnp.arange(3.0) + comm.rank
    with own_device(comm):
        for _ in range(3):
            sj.allreduce(x, op=cc.SUM, comm=comm)
        program = jax.jit(lambda x: sj.allreduce(x, op=cc.MAX, comm=comm))
        for _ in range(4):
            np.testing.assert_array_equal(program(x), np.arange(3.0) + comm.size - 1)


@pytest.mark.several
def test_a_mismatch_in_repeated_calls_is_an_error_on_all_ranks(comm):
    with own_device(comm):
        line = inspect.currentframe().f_lineno + 2
        programs = [
            repeated(lambda x, op=op: sj.allreduce(x, op=op, comm=comm)) for op in (cc.MAX, cc.MIN)
        ]
        x = jnp.ones(3)
        for _ in range(2):
            for program in programs:
                program(x).block_until_ready()
        words = "op is MAX on rank 0, MIN on"
        with pytest.raises(cc.MismatchError, match=words) as caught, sj.library_errors():
            programs[comm.rank > 0](x)
        assert f"test_jax_repeated.py:{line}" in str(caught.value)
        np.testing.assert_array_equal(programs[0](x), 1)
