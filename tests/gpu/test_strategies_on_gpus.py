"""Strategies with variables on a real device: in step, by parameter servers, by spare replicas."""

import numpy as np
import pytest

import inprocess
import strategies
from served import opened, training

pytestmark = pytest.mark.gpu

GPU, CUDA = "/gpu:0", "cuda"

STRATEGIES = {
    "one device": lambda comm: strategies.OneDeviceStrategy(GPU),
    "multi worker": lambda comm: strategies.MultiWorkerMirroredStrategy(comm, devices=[GPU]),
    "central storage": lambda comm: strategies.CentralStorageStrategy([GPU], comm=comm),
}


def batches():
    random = np.random.default_rng(0)
    return [tuple(random.standard_normal((12, k)).astype(np.float32) for k in (6, 2))] * 5


def expected():
    w = np.ones((6, 2), np.float64)
    for x, y in batches():
        w -= 0.05 * x.T @ (x @ w - y) / len(x)
    return w


def train(strategy, optimizer, w):
    def step(x, y):
        gradient = x.T @ (x @ w.value - y) / max(len(x), 1)
        strategy.apply_gradients(optimizer, [(gradient, w)], examples=len(x))

    for x, y in strategy.distribute_dataset(batches()):
        strategy.run(step, args=(x, y))


def check_result(w, kind):
    assert isinstance(w.value, kind)
    np.testing.assert_allclose(np.asarray(w), expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", STRATEGIES)
@inprocess.on_ranks(2, mode="synchronous", timeout=60)
def test_in_step(comm, cupy, name):
    strategy = STRATEGIES[name](comm)
    w = strategy.variable(np.ones((6, 2), np.float32), name="w")
    train(strategy, strategies.SGD(0.05), w)
    check_result(w, cupy.ndarray)


@inprocess.on_ranks(3, mode="synchronous", timeout=60)
def test_by_a_parameter_server(comm, cupy):
    with opened(comm, ps=1) as server:
        optimizer = strategies.SGD(0.05)
        strategy = strategies.ParameterServerStrategy(
            server, optimizer, synchronous=True, devices=[GPU]
        )
        w = strategy.variable(np.ones((6, 2), np.float32), name="w")
        if training(server):
            train(strategy, optimizer, w)
            check_result(w, cupy.ndarray)


@inprocess.on_ranks(2, mode="synchronous", timeout=60)
def test_by_spare_replicas(comm, cupy):
    with strategies.SpareReplicaStrategy(comm=comm, device=GPU) as strategy:
        w = strategy.variable(np.ones((6, 2), np.float32), name="w")
        train(strategy, strategies.SGD(0.05), w)
        check_result(w, cupy.ndarray)


@inprocess.on_ranks(3, mode="synchronous", timeout=60)
def test_a_model_of_torch_by_a_parameter_server(comm, torch):
    with opened(comm, ps=1) as server:
        strategy = strategies.ParameterServerStrategy(server, synchronous=True)
        w = torch.nn.Parameter(torch.ones(6, 2, device=CUDA))
        optimizer = strategies.DistributedOptimizer(
            torch.optim.SGD([w], lr=0.05), named_parameters=[("w", w)], strategy=strategy
        )
        if not training(server):
            return
        for batch in strategy.distribute_dataset(batches()):
            x, y = (torch.from_numpy(a).to(CUDA) for a in batch)
            optimizer.zero_grad()
            # Half of the sum of squares: the gradient of `expected`.
            ((x @ w - y) ** 2).sum(dim=1).mean().div(2).backward()
            optimizer.step(examples=len(x))
        assert w.device.type == CUDA
        np.testing.assert_allclose(w.detach().cpu().numpy(), expected(), rtol=1e-4, atol=1e-5)
