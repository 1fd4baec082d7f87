"""Profilers, dispatch modes and tensors without memory see a process group as they see Gloo's."""

import datetime
import gc
from collections import Counter

import pytest

import collectives as cc
from requirements import installed

torch = installed("torch")
dist = torch.distributed

# The first dispatch mode of a process imports this. On a busy machine it takes longer than the
# timeout, so that other ranks would fail in their first exchange.
import torch._dynamo  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_calls import CALLS, numbers  # noqa: E402

LIMIT = datetime.timedelta(seconds=20)

# By the group's name "gloo" these functions call other operators.
BY_NAME = {"functions_with_gradients", "further_functions_with_gradients"}


# Sparse tensors have other kernels; meshes are of the world's group in both calls.
NOT_COMPARED = {"sparse", "meshes"}


class Operators(TorchDispatchMode):
    """Notes the operators of communication, and whether the group is the program's own."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional":
            self.seen.append(func.name())
        if func.namespace == "c10d":
            group = next(x for x in args if isinstance(x, torch.ScriptObject))
            own = dist.ProcessGroup.unbox(group) is self.group
            self.seen.append((func.name(), own, len(args)))
        return func(*args, **(kwargs or {}))


def by_mode(call, group, *ranks):
    with Operators(group) as mode:
        result = call(group, *ranks)
    return mode.seen, result


def by_counts(call, group, *ranks):
    with CommDebugMode() as mode:
        result = call(group, *ranks)
    return {str(name): count for name, count in mode.get_comm_counts().items()}, result


def by_profiler(call, group, *ranks):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = call(group, *ranks)
    events = profile.key_averages()
    return {x.key: x.count for x in events if "c10d" in x.key}, result


def same(x, y):
    if isinstance(y, list):
        return len(x) == len(y) and all(map(same, x, y))
    return torch.equal(x, y) if isinstance(y, torch.Tensor) else x == y


@pytest.mark.parametrize("observe", [by_mode, by_counts, by_profiler])
@pytest.mark.parametrize("name", CALLS)
def test_profilers_and_modes_see_what_they_see_with_gloo(torch_ranks, name, observe):
    gloo = dist.new_group(backend="gloo", timeout=LIMIT)
    expected, theirs = observe(CALLS[name], gloo, *torch_ranks)
    found, mine = observe(CALLS[name], dist.group.WORLD, *torch_ranks)
    assert same(mine, theirs)
    if name not in BY_NAME | NOT_COMPARED:
        assert found == expected
    dist.barrier()  # of Gloo, whoever closes first is missed


# Calls of `f(group, make, size)` with tensors that `make(number of elements)` returns.
SHORT = {
    "all_reduce": lambda g, make, n: dist.all_reduce(make(2), group=g),
    "async all_reduce": lambda g, make, n: dist.all_reduce(make(2), group=g, async_op=True).wait(),
    "broadcast": lambda g, make, n: dist.broadcast(make(2), 0, group=g),
    "reduce": lambda g, make, n: dist.reduce(make(2), 0, group=g),
    "all_gather": lambda g, make, n: dist.all_gather([make(2) for _ in range(n)], make(2), group=g),
    "all_gather_single": lambda g, make, n: dist.all_gather_single(make(2 * n), make(2), group=g),
    "reduce_scatter": lambda g, make, n: dist.reduce_scatter(
        make(2), [make(2) for _ in range(n)], group=g
    ),
    "reduce_scatter_single": lambda g, make, n: dist.reduce_scatter_single(
        make(2), make(2 * n), group=g
    ),
    "all_to_all_single": lambda g, make, n: dist.all_to_all_single(
        make(2 * n), make(2 * n), group=g
    ),
    "barrier": lambda g, make, n: dist.barrier(group=g),
}


@pytest.mark.parametrize("name", SHORT)
def test_tensors_without_memory_are_not_sent(torch_ranks, name):
    """As on Gloo, a call of one rank alone returns at once."""
    rank, size = torch_ranks
    if rank == size - 1:
        fake = FakeTensorMode()
        with fake:
            SHORT[name](dist.group.WORLD, torch.ones, size)
        if name != "barrier":
            SHORT[name](dist.group.WORLD, lambda n: torch.ones(n, device="meta"), size)
            with fake:
                made = torch.ones(2)
            assert dist.all_reduce(made, async_op=True).wait()  # outside of the mode
    dist.all_reduce(x := torch.ones(1))
    assert x.item() == size


@pytest.mark.parametrize("name", [name for name in SHORT if name != "barrier"])
def test_both_tensors_of_a_subclass_are_sent(torch_ranks, name):
    rank, size = torch_ranks

    def run(make):
        made = []
        SHORT[name](dist.group.WORLD, lambda count: made.append(make(count)) or made[-1], size)
        return made

    pairs = run(lambda count: TwoTensor(numbers(rank, count), numbers(rank + 1, count)))
    # Gloo waits for one of the two only, so the oracle is each tensor alone.
    assert same([x.a for x in pairs], run(lambda count: numbers(rank, count)))
    assert same([x.b for x in pairs], run(lambda count: numbers(rank + 1, count)))


def test_functions_that_write_into_given_tensors(torch_ranks):
    rank, size = torch_ranks
    operators, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    gathered = torch.empty(2 * size)
    work = operators.all_gather_into_tensor_out(numbers(rank, 2), size, group, out=gathered)
    gc.collect()
    operators.wait_tensor(work)
    assert torch.equal(gathered, torch.cat([numbers(r, 2) for r in range(size)]))
    part = torch.empty(2)
    operators.wait_tensor(
        operators.reduce_scatter_tensor_out(numbers(rank, 2 * size), "max", size, group, out=part)
    )
    most = torch.stack([numbers(r, 2 * size) for r in range(size)]).amax(0)
    assert torch.equal(part, most[2 * rank : 2 * rank + 2])
    operators.wait_tensor(operators.all_reduce_(x := torch.ones(3), "sum", group))
    assert x[0] == size


class Works(TorchDispatchMode):
    """Keeps what operators return of a `Work`."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.found.append(result[-1] if isinstance(result, tuple) else result)
        return result


@pytest.mark.several
def test_works_of_operators_outlive_their_python_half(torch_ranks):
    """What C++ holds of a `Work` waits for the message, also after a garbage collection."""
    rank, size = torch_ranks
    for n in (1, 300_000):
        x, y, z = numbers(rank, n), torch.zeros(n), numbers(rank, n)
        with Works() as works:
            dist.irecv(y, (rank - 1) % size)
            dist.isend(x, (rank + 1) % size)
            dist.broadcast(z, size - 1, async_op=True)
        gc.collect()
        assert len(works.found) == 3
        for boxed in reversed(works.found):
            assert dist.Work.unbox(boxed).wait()
        assert torch.equal(y, numbers((rank - 1) % size, n))
        assert torch.equal(z, numbers(size - 1, n))


@pytest.mark.several
def test_gloo_runs_beside_observed_groups(torch_ranks):
    """Gloo's thread frees tensors while the program calls the next operation."""
    rank, size = torch_ranks
    gloo = dist.new_group(backend="gloo", timeout=LIMIT)
    with Works():
        dist.all_reduce(torch.ones(1))
    for _ in range(300):
        outputs = [torch.zeros(1) for _ in range(size)]
        dist.all_gather(outputs, torch.full((1,), float(rank)), group=gloo)
        assert [x.item() for x in outputs] == list(range(size))


@pytest.mark.several
@pytest.mark.parametrize("observe", [by_mode, by_profiler])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_errors_name_the_line_of_the_program(torch_ranks, observe, asynchronous):
    rank, size = torch_ranks

    def call(group, rank, size):
        work = dist.all_reduce(torch.zeros(3 if rank else 4), async_op=asynchronous)
        return work and work.wait()

    with pytest.raises(cc.MismatchError, match="torch.distributed.allreduce") as caught:
        observe(call, dist.group.WORLD, rank, size)
    assert isinstance(caught.value, dist.DistBackendError)
    assert f"test_torch_dispatcher.py:{call.__code__.co_firstlineno + 1}" in str(caught.value)
    dist.all_reduce(x := torch.ones(1))
    assert x.item() == size


def test_ddp_is_observed(torch_ranks):
    """Buckets, which C++ reduces, while one rank alone has a profiler."""
    rank, size = torch_ranks
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(4, 2), gradient_as_bucket_view=True
    )
    counts = Counter()
    for step in range(5):
        model.zero_grad()
        loss = model(torch.full((1, 4), float(rank + step))).sum()
        if rank == 0:
            seen, _ = by_profiler(lambda _, loss=loss: loss.backward(), None)
            counts.update(seen)
        else:
            loss.backward()
        mean = (size - 1) / 2 + step
        assert torch.allclose(model.module.weight.grad, torch.full((2, 4), mean))
    if rank == 0:
        assert counts["c10d::allreduce_"] == 5
