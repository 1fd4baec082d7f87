"""Calls of torch.distributed that any of its backends can make, for comparisons with Gloo."""

from requirements import installed

torch = installed("torch")
dist = torch.distributed

import torch.distributed._functional_collectives as functional  # noqa: E402
import torch.distributed.nn  # noqa: E402
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing  # noqa: E402

__all__ = ["CALLS", "numbers"]


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


@call
def other_ways_to_gather_and_scatter(group, rank, size):
    joined, part = torch.zeros(size * 2, 3), torch.zeros(2, 3)
    dist.all_gather_single(joined, numbers(rank, 2, 3), group=group)
    dist.reduce_scatter_single(part, numbers(rank, size * 2, 3), group=group)
    lists = [[torch.zeros(2), torch.zeros(2, 2)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [numbers(rank, 2), numbers(rank, 2, 2)], group=group)
    return [joined, part, *(x for row in lists for x in row)]


@call
def several_at_once(group, rank, size):
    """By a block, as FSDP does, and by functions with lists."""
    made = [numbers(rank, 3), numbers(rank, 2, 2)]
    with coalescing(group=group):
        for x in made:
            dist.all_reduce(x, group=group)
    xs = [numbers(rank, size * 2), numbers(rank, size)]
    for several in (
        functional.all_gather_into_tensor_coalesced(xs, group),
        functional.reduce_scatter_tensor_coalesced(xs, "sum", [0, 0], group),
    ):
        made += [functional.wait_tensor(x) for x in several]
    return made


@call
def permuted(group, rank, size):
    turned = [(r + 1) % size for r in range(size)]
    return [functional.wait_tensor(functional.permute_tensor(numbers(rank, 3), turned, group))]


@call
def complex_numbers(group, rank, size):
    def made(*shape):
        return torch.complex(numbers(rank, *shape), numbers(rank + 1, *shape))

    x, joined, part = made(3), torch.zeros(size * 2, dtype=torch.complex64), made(2)
    dist.all_reduce(x, group=group)
    dist.all_gather_single(joined, made(2), group=group)
    dist.broadcast(part, size - 1, group=group)
    return [x, joined, part]


@call
def sparse(group, rank, size):
    """Tensors of which each rank has a few elements, or rows."""
    where = torch.tensor([[rank, 2, 2], [0, 1, rank % 2]])
    elements = torch.sparse_coo_tensor(where, numbers(rank, 3), (6, 2), check_invariants=False)
    rows = torch.sparse_coo_tensor(where[:1], numbers(rank, 3, 4), (6, 4), check_invariants=False)
    none = torch.sparse_coo_tensor(where[:1, :0], torch.zeros(0), (6,), check_invariants=False)
    made = [elements, rows, none]
    for x in made:
        dist.all_reduce(x, group=group)
    return [part for x in made for part in (x.to_dense(), x.coalesce().indices())]


@call
def subgroups(group, rank, size):
    """Whose ranks are found by their number here, and there."""
    half = max(1, size // 2)
    members = [list(range(half)), list(range(half, size))] if size > 1 else [[0]]
    made, _ = dist.new_subgroups_by_enumeration(members, backend=dist.get_backend(group))
    equal, _ = dist.new_subgroups(1, backend=dist.get_backend(group))
    dist.all_reduce(x := numbers(rank, 3), group=made)
    dist.all_reduce(y := numbers(rank, 3), group=equal)
    ranks = dist.get_process_group_ranks(made)
    here = [dist.get_group_rank(made, r) for r in ranks]
    there = [dist.get_global_rank(made, r) for r in here]
    return [x, y, ranks, here, there, dist.get_rank(made), dist.get_world_size(equal)]


@call
def meshes(group, rank, size):
    mesh = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("one", "all"))
    dist.all_reduce(x := numbers(rank, 2), group=mesh.get_group("all"))
    dist.all_reduce(y := numbers(rank, 2), group=mesh.get_group("one"))
    return [x, y, mesh["all"].get_local_rank(), mesh.get_coordinate()]


@call
def further_functions_with_gradients(group, rank, size):
    made = []
    for function in (
        # Elsewhere Gloo leaves sums of some ranks.
        lambda x: (
            torch.distributed.nn.functional.reduce(x, size - 1, group=group) * (rank == size - 1)
        ),
        lambda x: torch.cat(torch.distributed.nn.functional.gather(x, 0, group=group)),
        lambda x: torch.distributed.nn.functional.scatter(list(x.split(2)), 0, group=group),
        lambda x: torch.cat(
            torch.distributed.nn.functional.all_to_all(
                [torch.zeros(2) for _ in range(size)], list(x.split(2)), group=group
            )
        ),
        lambda x: functional.all_gather_tensor_autograd(x, 0, group),
        lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, group),
        lambda x: functional.all_to_all_single_autograd(x, [2] * size, [2] * size, group),
    ):
        x = numbers(rank, size * 2).requires_grad_()
        y = function(x)
        (y * numbers(rank + 1, *y.shape)).sum().backward()
        made += [y.detach(), x.grad]
    return made
