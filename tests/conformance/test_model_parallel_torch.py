"""The building blocks under PyTorch's automatic differentiation."""

import numpy as np
import pytest

import collectives as cc
from requirements import installed
from strategies import model_parallel

torch = installed("torch")

from strategies.model_parallel import torch as parallel  # noqa: E402


def tensor(comm, number, *shape, requires_grad=True):
    values = np.random.default_rng([comm.rank, number]).standard_normal(shape)
    return torch.tensor(values, requires_grad=requires_grad)


BLOCKS = {
    "allgather": {},
    "reduce_scatter": {},
    "allreduce": {},
    "alltoall": {},
    "broadcast": {"root": -1},
    "scatter": {"root": -1},
    "gather": {"root": -1},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_gives_what_the_pair_of_functions_gives(comm, name):
    options = dict.fromkeys(BLOCKS[name], comm.size - 1) | {"comm": comm}
    ragged = name in ("allgather", "gather", "alltoall")
    x = tensor(comm, 1, 5 + comm.rank * ragged, 2)
    result, backward = getattr(model_parallel, name)(x.detach().numpy(), **options)
    y = getattr(parallel, name)(x, **options)
    if result is None:
        assert (y.shape, y.item()) == ((), 0)
        y.backward()
        expected = backward(None)
    else:
        np.testing.assert_array_equal(y.detach().numpy(), result)
        z = tensor(comm, 2, *result.shape, requires_grad=False)
        (y * z).sum().backward()
        expected = backward(z.numpy())
    if expected is None:
        assert x.grad is None
    else:
        np.testing.assert_allclose(x.grad.numpy(), expected, rtol=0, atol=1e-13)


def test_ranks_that_need_no_gradient_help_those_that_do(comm):
    last = comm.size - 1
    x = tensor(comm, 1, 3, requires_grad=comm.rank == last)
    parallel.allreduce(x, comm=comm).sum().backward()
    if comm.rank == last:
        assert x.grad.tolist() == [comm.size] * 3
    else:
        assert x.grad is None
    part = parallel.scatter(x if comm.rank == last else None, last, comm=comm)
    part.sum().backward()
    # Where nobody asks there is no way back.
    y = parallel.allgather(x.detach(), comm=comm)
    assert not y.requires_grad
    with torch.no_grad():
        assert not parallel.allgather(x, comm=comm).requires_grad


def test_a_pipeline_has_the_gradients_of_one_network(comm):
    weights = [torch.tensor(np.random.default_rng(r).standard_normal((4, 4))) for r in range(9)]
    own = weights[comm.rank].clone().requires_grad_()
    x = torch.ones(2, 4, dtype=torch.float64)
    for _ in range(2):
        h = x if comm.rank == 0 else parallel.recv(comm.rank - 1, comm=comm)
        h = torch.tanh(h @ own)
        last = comm.rank == comm.size - 1
        end = (h**2).sum() if last else parallel.send(h, comm.rank + 1, comm=comm)
        own.grad = None
        end.backward()
    whole = [w.clone().requires_grad_() for w in weights[: comm.size]]
    h = x
    for w in whole:
        h = torch.tanh(h @ w)
    (h**2).sum().backward()
    torch.testing.assert_close(own.grad, whole[comm.rank].grad, rtol=1e-12, atol=1e-15)


def test_what_needs_no_gradient_travels_without_a_way_back(comm):
    if comm.rank == 0 and comm.size > 1:
        end = parallel.send(torch.arange(3), 1, comm=comm)
        assert not end.requires_grad
    elif comm.rank == 1:
        got = parallel.recv(0, comm=comm)
        assert got.tolist() == [0, 1, 2]
        assert not got.requires_grad
    assert comm.allreduce(1, op=cc.SUM) == comm.size
