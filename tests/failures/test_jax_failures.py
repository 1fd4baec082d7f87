"""Programs of JAX whose ranks are killed or interrupted, or whose JAX is another one."""

from __future__ import annotations

import re
import sys

import pytest
from victims import needs_fault_tolerance, start

from launcher import ROOT, run
from requirements import needs

HEAD = """
    import jax, jax.numpy as jnp
    from strategies.jax import allreduce, library_errors

    def program(comm, before=lambda x: x):
        def sums(x):
            return jax.lax.fori_loop(
                0, 3, lambda i, x: allreduce(before(x), op=cc.SUM, comm=comm) / comm.size, x
            )
        return jax.jit(sums)

    def slowly(x):
        large = jnp.full((400, 400), 1 / 400)
        for _ in range(10):
            large = large @ large
        return x + 0 * large[0, 0]
"""


@pytest.fixture(scope="module", autouse=True)
def _jax():
    needs("jax")


@pytest.mark.parametrize("before", ["lambda x: x", "slowly"], ids=["at once", "in flight"])
def test_survivors_of_a_killed_rank_raise_and_continue_as_fewer(tmp_path, before):
    needs_fault_tolerance()
    body = f"""
    step = program(comm, {before})
    x = step(jnp.ones(1000))
    if comm.rank == 1:
        die()
    try:
        with library_errors():
            while True:
                x = step(x)
    except cc.PeerFailure as error:
        say("PeerFailure:", error)
    comm = cc.shrink()
    say("then", float(program(comm)(jnp.full(3, comm.size * 1.0))[0]), "of", comm.size)
    """
    result = start(tmp_path, 3, HEAD, body)
    for rank, place in ((0, 0), (2, 1)):
        assert re.search(rf"rank {rank}: PeerFailure: allreduce: .*rank 1\b", result.stdout), result
        assert f"rank {place}: then 2.0 of 2" in result.stdout, result


def test_ctrl_c_ends_the_wait_of_a_program(tmp_path):
    body = """
    step = program(comm)
    step(jnp.ones(3))
    if comm.rank == 1:
        assert comm.recv(0) == 1
        comm.barrier()
        sys.exit()
    try:
        with library_errors():
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            step(jnp.ones(3))
    except KeyboardInterrupt:
        say("interrupted")
    comm.send(1, 1)
    comm.barrier()
    """
    result = start(tmp_path, 2, HEAD, body, options=())
    assert "rank 0: interrupted" in result.stdout, result


def test_another_version_of_the_interface_is_one_warning_and_a_callback(tmp_path):
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 1\n#define XLA_FFI_API_MINOR 2\n")
    text = f"""
import jax, jax.numpy as jnp, optax
import collectives as cc, strategies
from strategies.jax import allreduce, broadcast, library_errors
jax.ffi.include_dir = lambda: {str(tmp_path)!r}
sums = lambda x: jax.lax.fori_loop(0, 3, lambda i, x: allreduce(x, op=cc.SUM) + 1, x)
print(jax.jit(sums)(1.0), jax.jit(jax.grad(sums))(1.0))
tx = strategies.DistributedOptimizer(optax.sgd(1.0))
print(jax.jit(tx.update)(jnp.ones(2), tx.init(jnp.ones(2)))[0])
try:
    with library_errors():
        jax.jit(lambda x: broadcast(x, 5))(1.0)
except (ValueError, jax.errors.JaxRuntimeError) as error:
    print(error)
"""
    result = run([sys.executable, "-c", text], timeout=60, PYTHONPATH=str(ROOT)).checked()
    lines = result.stdout.splitlines()
    assert lines[:2] == ["4.0 1.0", "[-1. -1.]"], result
    assert "broadcast: no such root, expected 0 .. 0, got 5" in result.stdout, result
    words = "interface of XLA does not fit: expected version 0, got 1.2; compiled programs call"
    assert result.stderr.count(words) == 1, result


def test_without_jax_s_tokens_the_errors_are_still_the_library_s():
    text = """
import sys
import jax, jax.numpy as jnp
from strategies.jax import broadcast, library_errors
sys.modules["jax._src.dispatch"] = None  # as if JAX had moved what is not public
program = jax.jit(lambda x: broadcast(x, 5))
for _ in range(2):
    try:
        with library_errors():
            program(jnp.ones(3))
    except ValueError as error:
        print(error)
"""
    result = run([sys.executable, "-c", text], timeout=60, PYTHONPATH=str(ROOT)).checked()
    assert result.stdout.count("broadcast: no such root, expected 0 .. 0, got 5") == 2
