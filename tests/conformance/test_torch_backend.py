"""The backend of torch.distributed: every function for tensors on CPUs, beside Gloo."""

from __future__ import annotations

import datetime

import pytest

import collectives as cc
from requirements import installed

torch = installed("torch")
dist = torch.distributed

import torch.distributed._functional_collectives as functional  # noqa: E402
import torch.distributed.nn  # noqa: E402
from torch.distributed import _make_nccl_premul_sum as premul_sum  # noqa: E402

LIMIT = datetime.timedelta(seconds=20)


def numbers(rank, *shape, dtype=torch.float32):
    """Small whole numbers, others on each rank, whose sums are exact in every dtype."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    return ((torch.arange(count) * 7 + rank * 3) % 5 + 1).reshape(shape).to(dtype)


def gather_lists(rank, size, n=3):
    return [torch.zeros(n) for _ in range(size)], numbers(rank, n)


# Calls of `f(group, rank, size)`, which return what they have filled: the same with Gloo.
CALLS = {}


def call(function):
    CALLS[function.__name__] = function
    return function


@call
def all_reduce(group, rank, size):
    made = [numbers(rank, 3, 4), numbers(rank), numbers(rank, 0), numbers(rank, 4, 3).t()]
    for x in made:
        dist.all_reduce(x, group=group)
    return made


@call
def all_reduce_of_every_dtype(group, rank, size):
    dtypes = [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float64]
    made = [numbers(rank, 5, dtype=dtype) for dtype in dtypes]
    for x in made:
        dist.all_reduce(x, group=group)
    return made


@call
def all_reduce_of_bfloat16(group, rank, size):
    x = numbers(rank, 5, dtype=torch.bfloat16)
    dist.all_reduce(x, group=group)
    return [x]


@call
def all_reduce_by_every_op(group, rank, size):
    made = []
    for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        made.append(numbers(rank, 2, 3))
        dist.all_reduce(made[-1], op, group=group)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        made.append(numbers(rank, 6, dtype=torch.int32))
        dist.all_reduce(made[-1], op, group=group)
    return made


@call
def all_reduce_coalesced(group, rank, size):
    made = [numbers(rank, 3), numbers(rank, 2, 2)]
    dist.all_reduce_coalesced(made, group=group)
    return made


@call
def broadcast(group, rank, size):
    made = [numbers(rank, 3, dtype=torch.bool), numbers(rank, 0), numbers(rank)]
    for x in made:
        dist.broadcast(x, size - 1, group=group)
    return made


@call
def reduce(group, rank, size):
    x = numbers(rank, 5)
    dist.reduce(x, size - 1, group=group)
    return [x] if rank == size - 1 else []


@call
def all_gather(group, rank, size):
    outputs, x = gather_lists(rank, size)
    dist.all_gather(outputs, x, group=group)
    return outputs


@call
def all_gather_into_tensor(group, rank, size):
    x = torch.zeros(size * 2, 3)
    dist.all_gather_into_tensor(x, numbers(rank, 2, 3), group=group)
    return [x]


@call
def gather(group, rank, size):
    outputs, x = gather_lists(rank, size)
    dist.gather(x, outputs if rank == size - 1 else None, size - 1, group=group)
    return outputs if rank == size - 1 else []


@call
def scatter(group, rank, size):
    x = torch.zeros(2, 2)
    parts = [numbers(r + 3, 2, 2) for r in range(size)]
    dist.scatter(x, parts if rank == 0 else None, 0, group=group)
    return [x]


@call
def reduce_scatter(group, rank, size):
    x = torch.zeros(3)
    dist.reduce_scatter(x, [numbers(rank + r, 3) for r in range(size)], group=group)
    return [x]


@call
def reduce_scatter_tensor(group, rank, size):
    x = torch.zeros(2, 3)
    dist.reduce_scatter_tensor(x, numbers(rank, size * 2, 3), group=group)
    return [x]


@call
def all_to_all(group, rank, size):
    outputs = [torch.zeros(3) for r in range(size)]
    dist.all_to_all(outputs, [numbers(rank + r, 3) for r in range(size)], group=group)
    return outputs


@call
def all_to_all_single(group, rank, size):
    equal = torch.zeros(size * 2, 3)
    dist.all_to_all_single(equal, numbers(rank, size * 2, 3), group=group)
    rows = [(rank + r) % 3 for r in range(size)]  # as many as the other one gives
    uneven = torch.zeros(sum(rows), 2)
    dist.all_to_all_single(uneven, numbers(rank, sum(rows), 2), rows, rows, group=group)
    return [equal, uneven]


@call
def objects(group, rank, size):
    everyones, chosen, part = [None] * size, [{"of": rank}], [None]
    dist.all_gather_object(everyones, {"rank": rank, "text": "x" * rank}, group=group)
    dist.broadcast_object_list(chosen, size - 1, group=group)
    dist.scatter_object_list(part, [f"for {r}" for r in range(size)], 0, group=group)
    told = [None] * size if rank == 0 else None
    dist.gather_object(rank**2, told, 0, group=group)
    return [everyones, chosen, part, told]


@call
def send_and_receive(group, rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    if size == 1:
        return []
    made = [torch.zeros(3), torch.zeros(200_000), torch.zeros(2, 2)]
    sent = [dist.isend(numbers(rank, *x.shape), right, group, tag=i) for i, x in enumerate(made)]
    received = [dist.irecv(x, left, group, tag=i) for i, x in reversed(list(enumerate(made)))]
    for work in (*received, *sent):
        work.wait()
    one, other = torch.zeros(4), torch.zeros(5)
    pairs = [(dist.isend, numbers(rank, 4), right), (dist.irecv, one, left),
             (dist.isend, numbers(rank, 5), left), (dist.irecv, other, right)]  # fmt: skip
    for work in dist.batch_isend_irecv([dist.P2POp(f, x, r, group) for f, x, r in pairs]):
        work.wait()
    return [*made, one, other]


@call
def receive_from_any(group, rank, size):
    if rank > 0:
        dist.send(numbers(rank, 4), 0, group, tag=3)
        return []
    made = {}
    for _ in range(size - 1):
        x = torch.zeros(4)
        made[dist.recv(x, group=group, tag=3)] = x
    return [x for _, x in sorted(made.items())]


@call
def objects_from_rank_to_rank(group, rank, size):
    told = [None, None]
    if size > 1 and rank == 1:
        dist.send_object_list(["text", {"a": 1}], 0, group)
    if size > 1 and rank == 0:
        dist.recv_object_list(told, 1, group)
    return told


@call
def barrier(group, rank, size):
    dist.barrier(group=group)
    return []


@call
def functions_with_results(group, rank, size):
    x = numbers(rank, size * 2, 3)
    made = [
        functional.all_reduce(x, "sum", group),
        functional.all_gather_tensor(x, 0, group),
        functional.reduce_scatter_tensor(x, "sum", 0, group),
        functional.all_to_all_single(x, None, None, group),
        functional.broadcast(x, 0, group),
        *functional.all_reduce_coalesced([x, x + 1], "max", group),
    ]
    return [functional.wait_tensor(tensor) for tensor in made]


@call
def functions_with_gradients(group, rank, size):
    made = []
    for function in (
        lambda x: torch.distributed.nn.functional.all_reduce(x, group=group),
        lambda x: torch.distributed.nn.functional.broadcast(x, 0, group=group),
        lambda x: torch.cat(torch.distributed.nn.functional.all_gather(x, group=group)),
        lambda x: torch.distributed.nn.functional.reduce_scatter(
            torch.zeros(2), list(x.split(2)), group=group
        ),
        lambda x: torch.distributed.nn.functional.all_to_all_single(
            torch.zeros(size * 2), x, group=group
        ),
    ):
        x = numbers(rank, size * 2).requires_grad_()
        y = function(x)
        (y * numbers(rank + 1, *y.shape)).sum().backward()
        made += [y.detach(), x.grad]
    return made


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
    lambda: torch.zeros(2, 2).to_sparse(),
    lambda: torch.zeros(2, device="meta"),
    lambda: torch.zeros(2, dtype=torch.float8_e4m3fn),
], ids=["sparse", "meta", "float8"])  # fmt: skip
def test_what_cannot_be_reduced_on_one_rank_is_an_error_on_all(torch_ranks, make):
    rank, size = torch_ranks
    with pytest.raises(TypeError if rank == 0 else cc.MismatchError, match="allreduce"):
        dist.all_reduce(make() if rank == 0 else torch.zeros(2))
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == size
