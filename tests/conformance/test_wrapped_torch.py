"""Models of PyTorch whose steps a strategy makes: parameter servers and spare replicas."""

import copy

import numpy as np
import pytest

import strategies
from requirements import installed
from served import in_turn, on_workers, only_workers, opened, scenario, training
from strategies.errors import OpError
from strategies.parameter_server import ParameterServerStrategy
from strategies.spare_replica import SpareReplicaStrategy

torch = installed("torch")
SGD, Adam = torch.optim.SGD, torch.optim.Adam


def model_of(seed=3):
    """Ranks may be threads, which share PyTorch's generator of random numbers."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[:] = torch.from_numpy(random.standard_normal(parameter.shape))
    return model


def groups_of(model):
    """Two groups whose settings differ."""
    return [
        {"params": model[0].parameters()},
        {"params": model[2].parameters(), "lr": 0.02, "weight_decay": 0.1},
    ]


def rows_of(step, worker, workers):
    """Rows of a worker in a step; the last worker has none in the first step."""
    count = 0 if step == 0 and worker == workers - 1 > 0 else 2 + worker
    random = np.random.default_rng([step, worker])
    return tuple(torch.from_numpy(random.standard_normal((count, n))).float() for n in (6, 2))


def passed(model, x, y):
    model.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()


KINDS = {
    "sgd": lambda given: SGD(given, lr=0.1),
    "momentum": lambda given: SGD(given, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda given: Adam(given, lr=0.01, amsgrad=True),
    "adamw": lambda given: torch.optim.AdamW(given, lr=0.01, weight_decay=0.2),
    "rmsprop": lambda given: torch.optim.RMSprop(given, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda given: torch.optim.Adagrad(given, lr=0.1, initial_accumulator_value=0.1),
    "uphill": lambda given: SGD(given, lr=0.001, momentum=0.5, maximize=True),
}


@pytest.mark.parametrize("kind", KINDS)
@scenario(synchronous=True, optimizer=lambda: None)
def test_synchronous_servers_make_the_steps_of_one_process(strategy, server, kind):
    steps = 4
    model = model_of(seed=server.cluster.comm.rank)  # the chief's counts
    optimizer = KINDS[kind](groups_of(model))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    optimizer = strategies.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), strategy=strategy
    )
    workers = only_workers(server)
    alone = model_of(seed=server.cluster.training_ranks[0])
    oracle = KINDS[kind](groups_of(alone))
    oracle_schedule = torch.optim.lr_scheduler.StepLR(oracle, 2, gamma=0.5)
    assert list(strategy.variables) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for step in range(steps):
        x, y = rows_of(step, workers.rank, workers.size)
        passed(model, x, y)
        optimizer.step(examples=len(x))
        every = [rows_of(step, worker, workers.size) for worker in range(workers.size)]
        passed(alone, *map(torch.cat, zip(*every, strict=True)))
        oracle.step()
        schedule.step()
        oracle_schedule.step()
        for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
            # Some roundings of numbers around 1 in each step, which RMSprop's root enlarges.
            torch.testing.assert_close(mine, expected, rtol=0, atol=2e-5)
    workers.barrier()


@scenario(optimizer=lambda: None)
def test_each_worker_pushes_at_its_own_rate_when_it_likes(strategy, server):
    weight = torch.nn.Parameter(torch.zeros(3))
    never = torch.nn.Parameter(torch.ones(2))
    inner = SGD([weight, never], lr=1.0)
    optimizer = strategies.DistributedOptimizer(inner, strategy=strategy)
    workers = only_workers(server)
    inner.param_groups[0]["lr"] = 1.0 + workers.rank
    before = (weight**2).sum()

    def push():
        weight.grad = torch.ones(3)
        optimizer.step()
        assert weight.detach().tolist() == [-sum(range(1, workers.rank + 2))] * 3

    in_turn(server, push)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()
    optimizer.pull()
    total = -sum(range(1, workers.size + 1))
    assert weight.detach().tolist() == [total] * 3
    assert never.detach().tolist() == [1, 1]
    weight.grad = None
    assert optimizer.step(lambda: weight.sum()) == 3 * total
    optimizer.zero_grad()
    assert weight.grad is None
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 1.0 + workers.rank
    workers.barrier()


@scenario(optimizer=lambda: None)
def test_a_sparse_embedding_pushes_rows(strategy, server):
    table = torch.nn.Embedding(5, 2, sparse=True)
    torch.nn.init.ones_(table.weight)
    optimizer = strategies.DistributedOptimizer(
        torch.optim.SparseAdam(table.parameters(), lr=0.1), strategy=strategy
    )
    workers = only_workers(server)
    alone = copy.deepcopy(table)
    oracle = torch.optim.SparseAdam(alone.parameters(), lr=0.1)

    def push():
        table(torch.tensor([1, 3, 3])).sum().backward()
        assert table.weight.grad.is_sparse
        optimizer.step()

    in_turn(server, push)
    optimizer.pull()
    for _ in range(workers.size):
        oracle.zero_grad()
        alone(torch.tensor([1, 3, 3])).sum().backward()
        oracle.step()
    torch.testing.assert_close(table.weight, alone.weight, rtol=1e-5, atol=1e-6)
    assert table.weight[[0, 2, 4]].tolist() == [[1, 1]] * 3
    workers.barrier()


class Golden:
    """The three variables of tests/conformance/test_spare_replicas.py, as parameters."""

    def __init__(self, strategy):
        self.strategy, self.worker = strategy, strategy.first_replica_id
        start = [torch.tensor(0.0), torch.tensor(1.0)]
        if self.worker:  # the chief's count
            start = [value + 7 for value in start]
        self.v0, self.v1 = map(torch.nn.Parameter, start)
        self.table = torch.nn.Embedding(2, 1, sparse=True)
        with torch.no_grad():
            self.table.weight[:] = torch.tensor([[3.0], [4.0]])
        named = {"v0": self.v0, "v1": self.v1, "table": self.table.weight}
        self.optimizer = strategies.DistributedOptimizer(
            SGD(named.values(), lr=2.0), named_parameters=named, strategy=strategy
        )

    def step(self):
        self.optimizer.zero_grad()
        slope = self.v0 * (0.1 + 0.2 * self.worker) + self.v1 * (0.9 + 0.2 * self.worker)
        row = self.table(torch.tensor([1])).sum() * (0.1 + 0.2 * self.worker)
        (slope + row).backward()
        self.optimizer.step()

    def check(self, step, v0, v1, row):
        assert self.strategy.local_step == step
        np.testing.assert_allclose(self.v0.item(), v0, rtol=1e-6)
        np.testing.assert_allclose(self.v1.item(), v1, rtol=1e-6)
        np.testing.assert_allclose(self.table.weight.detach(), [[3], [row]], rtol=1e-6)


@on_workers(2)
def test_golden_numbers_of_two_workers(strategy, comm):
    golden = Golden(strategy)
    golden.step()
    golden.check(1, -0.4, -1.0, 4 - 0.4)
    golden.step()
    golden.check(2, -0.8, -3.0, 4 - 0.8)


@on_workers(3, replicas_to_aggregate=2)
def test_golden_numbers_of_three_workers_one_spare(strategy, comm):
    golden = Golden(strategy)
    if comm.rank != 1:
        golden.step()
        golden.check(1, -0.6, -1.2, 4 - 0.6)
    comm.barrier()
    if comm.rank == 1:
        golden.step()  # late: dropped, and the newest values at once
        golden.check(1, -0.6, -1.2, 4 - 0.6)
    comm.barrier()
    if comm.rank != 2:
        golden.step()
        golden.check(2, -1.0, -3.2, 4 - 1.0)
    comm.barrier()
    assert strategy.report().dropped == {0: 0, 1: 1, 2: 0}
    comm.barrier()


def test_spare_replicas_weigh_by_rows_and_step_at_the_chiefs_rate(comm):
    steps = 3
    with SpareReplicaStrategy(comm=comm) as strategy:
        model, alone = model_of(), model_of()
        inner = Adam(groups_of(model), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
        optimizer = strategies.DistributedOptimizer(inner, strategy=strategy)
        oracle = Adam(groups_of(alone), lr=0.05)
        halved = torch.optim.lr_scheduler.StepLR(oracle, 1, gamma=0.5)
        for step in range(steps):
            x, y = rows_of(step, comm.rank, comm.size)
            passed(model, x, y)
            optimizer.step(examples=len(x))
            every = [rows_of(step, rank, comm.size) for rank in range(comm.size)]
            passed(alone, *map(torch.cat, zip(*every, strict=True)))
            oracle.step()
            # The chief's step is made before any of its own next ones: it may advance now.
            schedule.step()
            halved.step()
            for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine, expected, rtol=0, atol=2e-5)


@scenario(optimizer=lambda: None)
def test_what_cannot_be_wrapped_is_an_error_on_all_tasks_and_the_next_call_works(strategy, server):
    weight = torch.nn.Parameter(torch.zeros(3))
    for optimizer, message in [
        (
            torch.optim.NAdam([weight]),
            "expected one of torch.optim with an equivalent: .* got .*NAdam",
        ),
        (SGD([weight], lr=1.0, momentum=0.5, dampening=0.1), "no dampening, expected 0"),
        (torch.optim.Adagrad([weight], lr_decay=0.1), "no lr_decay, expected 0"),
        (Adam([weight], eps=0.0), "epsilon"),
    ]:
        with pytest.raises(ValueError, match=message):
            strategies.DistributedOptimizer(optimizer, strategy=strategy)
    sgd = SGD([weight], lr=1.0)
    with pytest.raises(ValueError, match="no option of averaging if it makes the steps itself"):
        strategies.DistributedOptimizer(sgd, strategy=strategy, overlap=True)
    with pytest.raises(ValueError, match="have no name for a parameter"):
        strategies.DistributedOptimizer(sgd, named_parameters={}, strategy=strategy)
    with pytest.raises(TypeError, match="expected one of strategies.optimizers, of torch.optim"):
        strategies.DistributedOptimizer(object(), strategy=strategy)
    with pytest.raises((ValueError, OpError), match="no optimizer updates it"):
        strategy.variable(np.zeros(1))
    optimizer = strategies.DistributedOptimizer(sgd, strategy=strategy)
    with pytest.raises(ValueError, match="add_param_group: parameters are on other tasks"):
        optimizer.add_param_group({"params": []})
    with pytest.raises(ValueError, match="is wrapped already and .* StrategyTorchOptimizer"):
        strategies.DistributedOptimizer(optimizer, strategy=strategy)
    if training(server):
        weight.grad = torch.ones(3)
        sgd.param_groups[0]["lr"] = float("nan")
        with pytest.raises(ValueError, match="learning rate"):
            optimizer.step()
        sgd.param_groups[0]["lr"] = 1.0
        in_turn(server, optimizer.step)
        optimizer.pull()
        assert weight.detach().tolist() == [-server.cluster.workers.size] * 3
        server.cluster.workers.barrier()


@scenario(optimizer=lambda: None)
def test_one_rank_whose_optimizer_is_refused_is_an_error_on_all(strategy, server):
    weight = torch.nn.Parameter(torch.zeros(3))
    last = server.cluster.comm.rank == server.cluster.comm.size - 1
    optimizer = (torch.optim.NAdam if last else SGD)([weight], lr=1.0)
    with pytest.raises(ValueError, match="NAdam"):
        strategies.DistributedOptimizer(optimizer, strategy=strategy)


@scenario(optimizer=lambda: None)
def test_our_own_optimizers_are_wrapped_as_well(strategy, server):
    optimizer = strategies.DistributedOptimizer(strategies.SGD(0.5), strategy=strategy)
    w = strategy.variable(np.zeros(2), name="w")
    with pytest.raises(ValueError, match="the strategy has another optimizer"):
        strategies.DistributedOptimizer(strategies.SGD(0.5), strategy=strategy)
    if training(server):
        in_turn(server, lambda: optimizer.apply_gradients([(np.ones(2), w)], examples=3))
        strategy.pull()
        assert w.value.tolist() == [-0.5 * server.cluster.workers.size] * 2
        server.cluster.workers.barrier()


@pytest.mark.several
def test_training_goes_on_from_a_state_with_the_same_bits(comm):
    def trained(strategy, server, steps, state=None):
        """Let the chief make these steps; returns the parameter and the state after them."""
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = strategies.DistributedOptimizer(
            SGD([weight], lr=0.1, momentum=0.9), strategy=strategy
        )
        found = None
        if server.cluster.is_chief:
            if state is not None:
                strategy.load_state_dict(state)
                optimizer.pull()
            for step in steps:
                weight.grad = torch.full((3,), step + 1.0)
                optimizer.step()
            found = strategy.state_dict()
        server.cluster.comm.barrier()
        return weight.detach().tolist(), found

    with opened(comm) as server:
        made = [ParameterServerStrategy(server, shared_name=name) for name in "abc"]
        whole, _ = trained(made[0], server, range(6))
        _, state = trained(made[1], server, range(3))
        parts, _ = trained(made[2], server, range(3, 6), state)
        assert parts == whole
        assert (whole != [0, 0, 0]) == server.cluster.is_chief
