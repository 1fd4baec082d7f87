"""A model divided over ranks by `Stages` has the gradients of one process."""

import numpy as np
import pytest

import collectives as cc
import strategies
from requirements import installed

torch = installed("torch")

from strategies.model_parallel.torch import Stages  # noqa: E402

WIDTH, ROWS = 6, 11


class Counted(torch.autograd.Function):
    """The identity; counts the micro-batches between their forward and backward passes."""

    @staticmethod
    def forward(ctx, x, counter):
        ctx.counter = counter
        counter.live += 1
        counter.most = max(counter.most, counter.live)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.counter.live -= 1
        return gradient, None


class Counter(torch.nn.Module):
    live = most = 0

    def forward(self, x):
        return Counted.apply(x, self)


def layers(count, dtype=torch.float64):
    """The same modules on all ranks."""
    random = torch.Generator().manual_seed(count)
    modules = []
    for number in range(count):
        layer = torch.nn.Linear(WIDTH, WIDTH, dtype=dtype)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=dtype) / 2)
        modules.append(torch.nn.Sequential(layer, torch.nn.Tanh()) if number % 2 else layer)
    return modules


def examples(dtype=torch.float64, rows=ROWS, seed=0):
    random = np.random.default_rng(seed)
    return [torch.tensor(random.standard_normal((rows, WIDTH)), dtype=dtype) for _ in range(2)]


def mse(output, target):
    return torch.nn.functional.mse_loss(output, target)


def whole(modules, x, target):
    """The loss of one process, after its backward pass."""
    model = torch.nn.Sequential(*modules)
    loss = mse(model(x), target)
    if loss.requires_grad:
        loss.backward()
    return model, loss.item()


def compared(stages, model, dtype=torch.float64):
    """Each gradient is a sum over ROWS rows in another order, after a few layers."""
    tolerance = 64 * ROWS * torch.finfo(dtype).eps
    expected = dict(model.named_parameters())
    for name, parameter in stages.module.named_parameters():
        wanted = expected[name].grad
        if wanted is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("parts", [1, 2, 4, ROWS])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_gradients_are_those_of_one_process(comm, parts, dtype):
    dtype = getattr(torch, dtype)
    modules, (x, target) = layers(5, dtype), examples(dtype)
    stages = Stages(layers(5, dtype), parts=parts, comm=comm)
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    for _ in range(2):  # gradients add up
        loss = stages.step(x if first else None, target if last else None, mse)
        model, expected = whole(modules, x, target)
        assert abs(loss - expected) <= 64 * ROWS * torch.finfo(dtype).eps
        compared(stages, model, dtype)


def test_stages_are_named_as_in_the_whole_model(comm):
    """Ranks hold the modules of `counts`, and may lack those of other ranks."""
    counts = [1] * (comm.size - 1) + [3]
    modules = layers(comm.size + 2)
    own = range(comm.rank, comm.rank + counts[comm.rank])
    mine = [module if i in own else None for i, module in enumerate(layers(comm.size + 2))]
    stages = Stages(mine, parts=3, counts=counts, comm=comm)
    x, target = examples()
    stages.step(x, target, mse)
    compared(stages, whole(modules, x, target)[0])
    names = comm.allgather_object(list(stages.module.state_dict()))
    assert sum(names, []) == list(torch.nn.Sequential(*modules).state_dict())


@pytest.mark.parametrize("parts", [1, 3, 9])
def test_a_rank_holds_activations_of_few_micro_batches(comm, parts):
    counter = Counter()
    modules = layers(comm.size)
    modules[comm.rank] = torch.nn.Sequential(modules[comm.rank], counter)
    Stages(modules, parts=parts, comm=comm).step(*examples(), mse)
    assert (counter.live, counter.most) == (0, min(comm.size - comm.rank, parts))


@pytest.mark.parametrize("frozen", ["first", "all", "last"])
def test_frozen_modules_have_no_gradients(comm, frozen):
    modules, own = layers(5), layers(5)
    for some in (modules, own):
        for module in {"first": some[:2], "all": some, "last": some[3:]}[frozen]:
            module.requires_grad_(False)
    stages = Stages(own, parts=2, comm=comm)
    stages.step(*examples(), mse)
    compared(stages, whole(modules, *examples())[0])


def test_predictions_are_those_of_one_process(comm):
    x, _ = examples()
    stages = Stages(layers(5), parts=3, comm=comm)
    output = stages.predict(x if comm.rank == 0 else None)
    if comm.rank < comm.size - 1:
        assert output is None
    else:
        assert not output.requires_grad
        expected = torch.nn.Sequential(*layers(5))(x)
        torch.testing.assert_close(output, expected, rtol=1e-13, atol=1e-13)


def test_pipelines_side_by_side_average_their_gradients(comm):
    """Two pipelines, each with half of the rows, as one process with all of them."""
    pipelines = 2 if comm.size % 2 == 0 else 1
    pipeline = comm.rank % pipelines
    line = comm.split(pipeline)
    stages = Stages(layers(5), parts=2, comm=line)
    same_stage = comm.split(line.rank)
    optimizer = strategies.DistributedOptimizer(
        torch.optim.SGD(stages.parameters(), lr=0.5), comm=same_stage
    )
    x, target = examples(rows=12)
    rows = slice(pipeline, None, pipelines)
    stages.step(x[rows], target[rows], mse)
    optimizer.step()
    model, _ = whole(layers(5), x, target)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    expected = model.state_dict()
    for name, value in stages.module.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)
    same_stage.close()
    line.close()


def broken(*_):
    raise KeyError("no such key")


# What is wrong, and facts of the error. `-1` is the last rank; a call is (x, target, loss).
STEPS = {
    "rows": (lambda x, y: (x[:2], y, mse), ValueError, ["at least 1 row in each of 3", "2 rows"]),
    "targets": (lambda x, y: (x, y[:9], mse), ValueError, ["rows of output and target differ"]),
    "nothing": (
        lambda x, y: (None, y, mse),
        TypeError,
        ["a tensor of rows, got NoneType"],
    ),
    "width": (lambda x, y: (x[:, :3], y, mse), RuntimeError, ["shapes cannot be multiplied"]),
    "loss": (lambda x, y: (x, y, broken), RuntimeError, ["no such key"]),
    "many": (lambda x, y: (x, y, lambda o, t: o - t), RuntimeError, ["Scalar"]),
}


@pytest.mark.parametrize("wrong", STEPS)
def test_an_error_on_one_rank_is_raised_by_all(comm, wrong):
    call, kind, facts = STEPS[wrong]
    stages = Stages(layers(5), parts=3, comm=comm)
    x, target = examples()
    own = (KeyError, kind) if wrong == "loss" else kind
    with pytest.raises(own) as caught:
        stages.step(*call(x, target))
    assert all(fact in str(caught.value) for fact in facts), caught.value
    for parameter in stages.parameters():
        parameter.grad = None
    stages.step(x, target, mse)
    compared(stages, whole(layers(5), x, target)[0])


def fails_in_the_second_pass(module, backward):
    """Make a module raise in one direction."""
    passes = []

    def count(*_):
        passes.append(1)
        if len(passes) == 2:
            raise ValueError("the second pass fails")

    if backward:
        module.register_full_backward_hook(count)
    else:
        module.register_forward_hook(count)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_module_that_fails_in_the_middle_of_a_step(comm, backward):
    failing = comm.size // 2
    modules = layers(comm.size)
    if comm.rank == failing:
        fails_in_the_second_pass(modules[failing], backward)
    stages = Stages(modules, parts=4, comm=comm)
    x, target = examples()
    with pytest.raises(ValueError, match="the second pass fails") as caught:
        stages.step(x, target, mse)
    if comm.rank != failing:
        assert f"step of rank {failing}" in str(caught.value)
    for parameter in stages.parameters():
        parameter.grad = None
    stages.step(x, target, mse)
    compared(stages, whole(layers(comm.size), x, target)[0])


# Options, and the error. `odd` is true on the last rank.
OPTIONS = {
    "parts": (lambda size, odd: {"parts": 0}, ValueError, "at least 1 micro-batch, got parts=0"),
    "counts": (lambda size, odd: {"counts": [0] * size}, ValueError, "at least 1 module for each"),
    "few": (lambda size, odd: {"modules": []}, ValueError, "at least 1 module for each"),
    "kind": (lambda size, odd: {"modules": [3] * 5}, TypeError, "expected a torch module"),
    "other parts": (lambda size, odd: {"parts": 2 + odd}, cc.MismatchError, "2 parts .* 3 parts"),
    "other modules": (
        lambda size, odd: {"modules": layers(5 + odd)},
        cc.MismatchError,
        "5 modules .* 6 modules",
    ),
}


@pytest.mark.parametrize("wrong", OPTIONS)
def test_wrong_options_are_an_error_on_all_ranks(comm, wrong):
    options, kind, text = OPTIONS[wrong]
    if kind is cc.MismatchError and comm.size == 1:
        pytest.skip("one rank agrees with itself")
    given = options(comm.size, comm.rank == comm.size - 1)
    with pytest.raises(kind, match=text):
        Stages(**{"modules": layers(5), "parts": 2, "comm": comm, **given})
    assert Stages(layers(5), parts=2, comm=comm).step(*examples(), mse) > 0
