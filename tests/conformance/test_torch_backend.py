"""The backend of torch.distributed: every function for tensors on CPUs, beside Gloo."""

import datetime

import pytest

import collectives as cc
from requirements import installed

torch = installed("torch")
dist = torch.distributed

from torch.distributed import _functional_collectives as functional  # noqa: E402
from torch.distributed import _make_nccl_premul_sum as premul_sum  # noqa: E402
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing  # noqa: E402
from torch_calls import CALLS, numbers  # noqa: E402

LIMIT = datetime.timedelta(seconds=20)


@pytest.mark.parametrize("name", CALLS)
def test_every_function_does_what_it_does_with_gloo(torch_ranks, name):
    gloo = dist.new_group(backend="gloo", timeout=LIMIT)
    expected = CALLS[name](gloo, *torch_ranks)
    found = CALLS[name](dist.group.WORLD, *torch_ranks)
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        if isinstance(y, torch.Tensor):
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            assert torch.equal(x, y)
        else:
            assert x == y
    dist.barrier()  # of Gloo, whoever closes first is missed


def test_what_gloo_does_not_do(torch_ranks):
    rank, size = torch_ranks
    everyones = [numbers(r, 2, 3) for r in range(size)]
    mean = torch.stack(everyones).sum(0) / size

    x = numbers(rank, 2, 3)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    torch.testing.assert_close(x, mean)
    x = numbers(rank, 2, 3)
    dist.all_reduce(x, premul_sum(0.5))
    assert torch.equal(x, torch.stack(everyones).sum(0) / 2)
    x = torch.tensor([True, rank == 0, False])
    dist.all_reduce(x)
    assert x.tolist() == [True, True, False]
    x = torch.tensor([True, rank == 0, False])
    dist.all_reduce(x, dist.ReduceOp.PRODUCT)
    assert x.tolist() == [True, size == 1, False]

    stacked = torch.zeros(size, 2, 3)
    dist.all_gather_into_tensor(stacked, numbers(rank, 2, 3))
    assert torch.equal(stacked, torch.stack(everyones))
    outputs = [torch.zeros(r + 1) for r in range(size)]
    dist.all_gather(outputs, numbers(rank, rank + 1))
    assert all(torch.equal(x, numbers(r, r + 1)) for r, x in enumerate(outputs))
    outputs = [torch.zeros(2, r + 1).t() for r in range(size)]
    dist.all_to_all(outputs, [numbers(rank + r, rank + 1, 2) for r in range(size)])
    assert all(torch.equal(x, numbers(rank + r, r + 1, 2)) for r, x in enumerate(outputs))
    x, parts = torch.zeros(rank + 1), [numbers(rank + r, r + 1) for r in range(size)]
    dist.reduce_scatter(x, parts)
    assert torch.equal(x, sum(numbers(rank + r, rank + 1) for r in range(size)))
    x = torch.zeros(rank + 1, dtype=torch.int32)
    parts = [numbers(rank + r, r + 1, dtype=torch.int32) for r in range(size)]
    dist.reduce_scatter(x, parts, dist.ReduceOp.BAND)
    expected = numbers(rank, rank + 1, dtype=torch.int32)
    for r in range(1, size):
        expected &= numbers(rank + r, rank + 1, dtype=torch.int32)
    assert torch.equal(x, expected)


REDUCED = {
    "float32": lambda: torch.arange(6.0),
    "float64": lambda: torch.arange(6, dtype=torch.float64).reshape(2, 3),
    "bfloat16": lambda: torch.arange(6, dtype=torch.bfloat16),
    "int32": lambda: torch.arange(6, dtype=torch.int32),
    "complex64": lambda: torch.ones(3) + 1j,
    "no axes": lambda: torch.tensor(3.0),
    "strided": lambda: torch.arange(6.0).reshape(2, 3).T,
    "negated": lambda: torch.ones(1, dtype=torch.complex64).conj().imag,
    "a parameter": lambda: torch.nn.Parameter(torch.ones(3)),
}


@pytest.mark.parametrize("make", REDUCED.values(), ids=REDUCED)
def test_a_repeated_call_does_what_the_first_did_with_gloo(torch_ranks, make):
    gloo = dist.new_group(backend="gloo", timeout=LIMIT)
    results = []
    for group in (gloo, dist.group.WORLD):
        for _ in range(6):
            x = make()
            with torch.no_grad():
                dist.all_reduce(x, group=group)
            results.append(x.tolist())
            x.untyped_storage().resize_(0)  # as FSDP does
    assert results == results[:1] * len(results)
    dist.barrier()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_repeated_gathers_shares_and_broadcasts_are_right(torch_ranks, dtype):
    rank, size = torch_ranks
    for step in range(6):
        everyones = [(torch.arange(6).reshape(2, 3) + r + step).to(dtype) for r in range(size)]
        x, joined = everyones[rank], torch.cat(everyones)
        every, stacked = torch.empty_like(joined), torch.empty(size, 2, 3, dtype=dtype)
        dist.all_gather_into_tensor(every, x)
        assert torch.equal(every, joined)
        dist.all_gather_into_tensor(every, every[2 * rank : 2 * rank + 2])
        assert torch.equal(every, joined)
        dist.all_gather_into_tensor(stacked, x)
        assert torch.equal(stacked, torch.stack(everyones))
        mine = torch.empty_like(x)
        dist.reduce_scatter_tensor(mine, every)
        assert torch.equal(mine, size * x)
        dist.broadcast(x, size - 1)
        assert torch.equal(x, (torch.arange(6).reshape(2, 3) + size - 1 + step).to(dtype))
        for changed in (x, every, stacked, mine):
            changed.untyped_storage().resize_(0)  # as FSDP does


def test_autograd_is_not_told_of_repeated_calls(torch_ranks):
    _, size = torch_ranks
    weight = torch.ones(size, requires_grad=True)
    x, part = torch.ones(size), torch.ones(1)
    calls = [
        lambda: dist.all_reduce(x),
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_gather_into_tensor(x, part),
        lambda: dist.reduce_scatter_tensor(part, x),
    ]
    for call in calls:
        for _ in range(6):
            loss = (weight * x).sum() + (weight * part).sum()
            call()
            loss.backward()  # as with Gloo


def all_reduced(x, size):
    dist.all_reduce(x, dist.ReduceOp.AVG)
    return x


def all_reduced_later(x, size):
    work = dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True)
    assert work.wait()
    return x


def all_reduced_as_a_function(x, size):
    return functional.wait_tensor(functional.all_reduce(x, "avg", dist.group.WORLD))


def all_reduced_together(x, size):
    """Together with floating-point tensors, whose averages are exact."""
    real, other = torch.full((2,), 1.5), x.clone()
    with coalescing():
        for tensor in (x, real, other):
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert real.tolist() == [1.5, 1.5]
    assert torch.equal(x, other)
    return x


def reduced(x, size):
    dist.reduce(x, 0, dist.ReduceOp.AVG)
    return x if dist.get_rank() == 0 else None


def reduce_scattered(x, size):
    mine = torch.empty_like(x)
    dist.reduce_scatter_tensor(mine, x.repeat(size), dist.ReduceOp.AVG)
    return mine


def reduce_scattered_from_lists(x, size):
    mine = torch.empty_like(x)
    dist.reduce_scatter(mine, [x] * size, dist.ReduceOp.AVG)
    return mine


def reduce_scattered_together(x, size):
    mine, real = [torch.empty_like(x), torch.empty_like(x)], torch.empty(2)
    with coalescing():
        for part in mine:
            dist.reduce_scatter_tensor(part, x.repeat(size), dist.ReduceOp.AVG)
        dist.reduce_scatter_tensor(real, torch.full((2 * size,), 1.5), dist.ReduceOp.AVG)
    assert real.tolist() == [1.5, 1.5]
    assert torch.equal(*mine)
    return mine[0]


AVERAGES = [
    all_reduced, all_reduced_later, all_reduced_as_a_function, all_reduced_together, reduced,
    reduce_scattered, reduce_scattered_from_lists, reduce_scattered_together,
]  # fmt: skip


@pytest.mark.parametrize("call", AVERAGES, ids=lambda call: call.__name__)
def test_averages_of_integers_are_truncated(torch_ranks, call):
    """As by `ncclAvg`, and by frameworks over Gloo, which has no such average."""
    rank, size = torch_ranks
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        signed = [[5 + r, -5 - r, 3 * r, -3 * r, 100] for r in range(size)]
        everyones = torch.tensor(signed).abs() if dtype is torch.uint8 else torch.tensor(signed)
        expected = (everyones.double().sum(0) / size).to(dtype)  # which truncates
        found = call(everyones[rank].to(dtype), size)
        assert found is None or torch.equal(found, expected)
    # Truth values have no average, as in NCCL.
    with pytest.raises(TypeError, match="MEAN"):
        call(torch.tensor([True, rank == 0]), size)


def test_tensors_of_any_layout_and_dtype(torch_ranks):
    rank, size = torch_ranks
    x = numbers(rank, 4, 4)
    dist.broadcast(x[:, 1], size - 1)
    assert torch.equal(x[:, 1], numbers(size - 1, 4, 4)[:, 1])
    assert torch.equal(x[:, 2], numbers(rank, 4, 4)[:, 2])
    x = torch.zeros(2, 2)
    parts = [numbers(r, 2, 2).t() for r in range(size)]
    dist.scatter(x, parts if rank == 0 else None, 0)
    assert torch.equal(x, numbers(rank, 2, 2).t())
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32, torch.bool):
        x = numbers(rank, 3).to(dtype)
        dist.broadcast(x, size - 1)
        y = [torch.zeros(3, dtype=dtype) for _ in range(size)]
        dist.all_gather(y, x)
        assert all(part.tolist() == numbers(size - 1, 3).to(dtype).tolist() for part in y)
    x = (numbers(rank, 3) * (1 + 2j)).to(torch.complex64).conj()
    dist.reduce(x, 0)
    if rank == 0:
        assert torch.equal(x, sum(numbers(r, 3) for r in range(size)) * (1 - 2j))
    parameter = torch.nn.Parameter(numbers(rank, 3))
    dist.all_reduce(parameter)
    assert torch.equal(parameter.detach(), sum(numbers(r, 3) for r in range(size)))


@pytest.mark.parametrize("make", [
    lambda: torch.zeros(2, 2).to_sparse_csr(),
    lambda: torch.zeros(2, dtype=torch.float8_e4m3fn),
], ids=["rows of a sparse matrix", "float8"])  # fmt: skip
def test_what_cannot_be_reduced_on_one_rank_is_an_error_on_all(torch_ranks, make):
    rank, size = torch_ranks
    with pytest.raises(TypeError if rank == 0 else cc.MismatchError, match="allreduce"):
        dist.all_reduce(make() if rank == 0 else torch.zeros(2))
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == size
