"""Newer parts of torch.distributed on CPUs: the same results over the backend as over Gloo."""

from __future__ import annotations

import collections
import datetime
import functools
from pathlib import Path

import pytest

from requirements import installed

torch = installed("torch")
dist, nn = torch.distributed, torch.nn

import torch._dynamo  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402
from torch.distributed import _symmetric_memory as symmetric  # noqa: E402
from torch.distributed import checkpoint, optim, rpc  # noqa: E402
from torch.distributed import tensor as dtensor  # noqa: E402
from torch.distributed.algorithms import join  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: E402
    DDPCommHookType,
    ddp_zero_hook,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.model_averaging import (  # noqa: E402
    averagers,
    hierarchical_model_averager,
)
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor import experimental, parallel  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402, N817

pytestmark = pytest.mark.several

# Ranks import and compile between two calls, which takes longer on a busy machine.
LIMIT = datetime.timedelta(seconds=120)

# Programs of `f(rank, size, place)` over the world's group, which return tensors and other values.
# `place` is a directory of rank 0, different for each backend.
PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2)
    )


def batch_of(rank, step):
    made = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=made)


def train(model, rank, optimizer=None, steps=4):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch_of(rank, step)).square().mean().backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]


def hooked(register, rank, size, place):
    model = DDP(network())
    return train(model, rank, register(model))


def by_state(hook, state=None):
    """Return a program that trains with a hook of DDP."""

    def register(model):
        model.register_comm_hook(state() if state else None, hook)

    return functools.partial(hooked, register)


for kind in DDPCommHookType:
    PROGRAMS[f"hook {kind.name}"] = functools.partial(
        hooked, functools.partial(register_ddp_comm_hook, kind)
    )
    # Compressed from the second step on, with matrices of this size.
    if "POWER" in kind.name:
        hook = kind.value.keywords["comm_hook"]
        state = functools.partial(
            powerSGD_hook.PowerSGDState, None, start_powerSGD_iter=2, min_compression_rate=0.1,
            matrix_approximation_rank=kind.value.keywords["matrix_approximation_rank"],
        )  # fmt: skip
        PROGRAMS[f"hook {kind.name}"] = by_state(hook, state)
for wrapper in (default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper):
    PROGRAMS[f"hook {wrapper.__name__}"] = by_state(wrapper(default_hooks.allreduce_hook))


@program
def hook_then_optimizer(rank, size, place):
    model = DDP(network())
    model._register_fused_optim(torch.optim.SGD, lr=0.1)
    for step in range(4):
        model(batch_of(rank, step)).square().mean().backward()
    return list(model.parameters())


@program
def local_sgd(rank, size, place):
    averages = [
        averagers.PeriodicModelAverager(period=2, warmup_steps=2),
        hierarchical_model_averager.HierarchicalModelAverager(
            collections.OrderedDict([(2, size)]), warmup_steps=2
        ),
    ]
    near, _ = dist.new_subgroups(2 if size % 2 == 0 else size)
    made = []
    for average in averages:
        model = DDP(network())
        state = post_localSGD_hook.PostLocalSGDState(None, near, start_localSGD_iter=2)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        inner = torch.optim.SGD(model.parameters(), 0.1)
        made += train(model, rank, optim.PostLocalSGDOptimizer(inner, average), 6)
    return made


@program
def uneven_data_by_join(rank, size, place):
    model = DDP(network())
    optimizer = optim.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    with join.Join([model, optimizer]):
        train(model, rank, optimizer, 2 + rank)
    return list(model.parameters())


@program
def checks_of_every_call(rank, size, place):
    """Without DDP, which over Gloo of PyTorch 2.13 ends in a segmentation fault then."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group(timeout=LIMIT)
        dist.all_reduce(x := torch.full((3,), float(rank)), group=group)
        dist.all_gather(rows := [torch.zeros(2) for _ in range(size)], x[:2], group=group)
        return [x, *rows]
    finally:
        dist.set_debug_level(level)


@program
def random_numbers_of_distributed_tensors(rank, size, place):
    mesh = init_device_mesh("cpu", (size,))
    made = []
    for placement in (dtensor.Shard(0), dtensor.Replicate()):
        torch.manual_seed(7)
        x = dtensor.ones(4 * size, 3, device_mesh=mesh, placements=[placement])
        made += [nn.functional.dropout(x, 0.5), x.uniform_(), torch.rand_like(x)]
    return [part for x in made for part in (x.to_local(), x.full_tensor())]


@program
def drawn_distributed_tensors(rank, size, place):
    return [dtensor.rand(4, device_mesh=init_device_mesh("cpu", (size,)))]


@program
def placements_of_distributed_tensors(rank, size, place):
    mesh = init_device_mesh("cpu", (size,))
    kinds = [dtensor.Shard(0), dtensor.Shard(1), dtensor.Replicate()]
    x = torch.arange(5.0 * 7).reshape(5, 7)
    made = []
    for before in kinds:
        whole = dtensor.distribute_tensor(x, mesh, [before])
        made += [whole.redistribute(mesh, [after]).to_local() for after in kinds]
        made += [(whole @ whole.T).full_tensor(), whole.softmax(1).full_tensor()]
    partial = dtensor.DTensor.from_local(x + rank, mesh, [dtensor.Partial()])
    made += [partial.redistribute(mesh, [after]).to_local() for after in kinds]
    return made


@program
def tensors_and_sequences_in_parts(rank, size, place):
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 24))
    parallel.parallelize_module(model, mesh, {
        "0": parallel.SequenceParallel(),
        "1": parallel.ColwiseParallel(input_layouts=dtensor.Shard(1)),
        "3": parallel.RowwiseParallel(output_layouts=dtensor.Shard(-1), use_local_output=False),
    })  # fmt: skip
    torch.manual_seed(1)
    x, labels = torch.randn(2, 12, 12), torch.randint(24, (24,))
    part = dtensor.distribute_tensor(x, mesh, [dtensor.Shard(1)])
    with parallel.loss_parallel():
        loss = nn.functional.cross_entropy(model(part).reshape(24, 24), labels)
        loss.backward()
    return [loss.full_tensor(), *(p.grad.full_tensor() for p in model.parameters())]


POLICIES = {
    "parameters": {"param_dtype": torch.bfloat16},
    "sums": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "outputs": {"param_dtype": torch.float16, "output_dtype": torch.float32},
    "inputs": {"param_dtype": torch.bfloat16, "cast_forward_inputs": True},
}


def mixed_precision(name, rank, size, place):
    model, mesh = network(), init_device_mesh("cpu", (size,))
    policy = MixedPrecisionPolicy(**POLICIES[name])
    for part in (model,) if name == "outputs" else (model[0], model[2], model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=name != "sums")
    return train(model, rank)


for name in POLICIES:
    PROGRAMS[f"mixed precision of {name}"] = functools.partial(mixed_precision, name)


@program
def sums_of_gradients_without_messages(rank, size, place):
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    model.set_requires_gradient_sync(False)
    model(batch_of(rank, 0)).square().mean().backward()
    model.set_requires_gradient_sync(True)
    model(batch_of(rank, 1)).square().mean().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


@program
def mesh_of_three_dimensions(rank, size, place):
    shape = (1, 2, size // 2) if size % 2 == 0 else (1, 1, size)
    names = ("replicas", "parts", "tensors")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    made = [mesh.get_coordinate()]
    for name in names:
        dist.all_reduce(x := torch.full((2,), float(rank)), group=mesh[name].get_group())
        made += [x, mesh[name].get_local_rank(), mesh[name].size()]
    flat = mesh["replicas", "parts"]._flatten("data")
    dist.all_reduce(x := torch.full((2,), float(rank)), group=flat.get_group())
    model = network()
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    parallel.parallelize_module(model, mesh["tensors"], plan)
    fully_shard(model, mesh=mesh["replicas", "parts"])
    return [*made, x, *train(model, flat.get_local_rank())]


@program
def sequences_in_parts(rank, size, place):
    """The messages of `context_parallel`, whose attention is for CUDA only."""
    mesh = init_device_mesh("cpu", (size,))
    x = torch.arange(2.0 * 4 * size * 3).reshape(2, 4 * size, 3)
    part = x.clone()
    with experimental.context_parallel(mesh, buffers=[part], buffer_seq_dims=[1]):
        mine = part.clone()
        (whole,) = experimental._attention.context_parallel_unshard(mesh, [mine], [1])
    assert torch.equal(whole, x)
    return [mine, whole]


@program
def checkpoints_of_other_ranks(rank, size, place):
    """Parts of all ranks, which half of the ranks read."""
    mesh = init_device_mesh("cpu", (size,))
    x = torch.arange(7.0 * 3).reshape(7, 3)
    state = {"x": dtensor.distribute_tensor(x, mesh, [dtensor.Shard(0)]), "step": 3}
    for kind in (checkpoint.save, checkpoint.async_save):
        to = place / kind.__name__
        group = dist.new_group(timeout=LIMIT)
        saving = kind(state, checkpoint_id=to, process_group=group)
        if hasattr(saving, "result"):
            state["x"].to_local().zero_()  # its values are kept already
            saving.result()
        dist.barrier()
        fewer = dist.new_group(range((size + 1) // 2), timeout=LIMIT)
        if rank < (size + 1) // 2:
            half = dist.DeviceMesh.from_group(fewer, "cpu")
            read = {"x": dtensor.zeros(7, 3, device_mesh=half), "step": 0}
            checkpoint.load(read, checkpoint_id=to, process_group=fewer)
            assert torch.equal(read["x"].full_tensor(), x)
            assert read["step"] == 3
        dist.barrier()
    return []


@program
def compiled_functions(rank, size, place):
    group = dist.group.WORLD

    # Without a break: the compiler sees operators, and none of a backend's functions.
    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def call(x):
        total = functional.all_reduce(x, "sum", group)
        rows = functional.all_gather_tensor(total * 2, 0, group)
        part = functional.reduce_scatter_tensor(rows, "sum", 0, group)
        turned = functional.all_to_all_single(rows, None, None, group)
        pairs = functional.all_gather_into_tensor_coalesced([part, part + 1], group)
        return [part, turned, *pairs]

    torch.compiler.reset()
    x = torch.full((2, 3), float(rank + 1))
    return [y + 0 for y in call(x)]


@program
def compiled_gradients(rank, size, place):
    group = dist.group.WORLD

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def call(x):
        rows = functional.all_gather_tensor_autograd(x * x, 0, group)
        return functional.reduce_scatter_tensor_autograd(rows * rows, "sum", 0, group)

    torch.compiler.reset()
    x = torch.full((2, 3), float(rank + 1), requires_grad=True)
    y = call(x)
    y.sum().backward()
    return [y.detach() + 0, x.grad]


@program
def compiled_distributed_tensors(rank, size, place):
    mesh = init_device_mesh("cpu", (size,))

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def call(x):
        parts = dtensor.DTensor.from_local(x, mesh, [dtensor.Shard(0)], run_check=False)
        return (parts * 2).redistribute(mesh, [dtensor.Replicate()]).to_local().sum(0)

    torch.compiler.reset()
    return [call(torch.full((2, 3), float(rank + 1))) + 0]


@program
def stores_and_remote_calls(rank, size, place):
    """Beside the process group: a store of the program, and calls from rank to rank."""
    port = [None]
    store = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, True, LIMIT, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port)
    store = store or dist.TCPStore("127.0.0.1", port[0], size, False, LIMIT)
    store.set(f"rank {rank}", str(rank * 7))
    told = [int(store.get(f"rank {r}")) for r in range(size)]
    assert store.add("ranks", 1) <= size
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{place}", rpc_timeout=LIMIT.total_seconds()
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    pending = [rpc.rpc_async(f"worker{r}", torch.full, ((2,), float(rank))) for r in range(size)]
    dist.all_reduce(x := torch.full((3,), float(rank)))
    answers = [call.wait() for call in pending]
    rpc.shutdown()
    return [told, x, *answers]


@program
def symmetric_memory(rank, size, place):
    return [symmetric.empty(4, device="cpu")]


@program
def shared_symmetric_memory(rank, size, place):
    return [symmetric.rendezvous(torch.zeros(4), dist.group.WORLD)]


# What PyTorch does not offer on CPUs, or that fails with every backend -> words of its error.
REFUSED = {
    "hook BF16_COMPRESS": "required CUDA",
    "hook bf16_compress_wrapper": "required CUDA",
    "hook QUANTIZE_PER_TENSOR": "IndexError",
    "hook QUANTIZE_PER_CHANNEL": "IndexError",
    "hook BATCHED_POWER_SGD": "",
    "hook BATCHED_POWER_SGD_RANK2": "",
    "drawn_distributed_tensors": "",
    "symmetric_memory": "",
    "shared_symmetric_memory": "",
}


def run(name, rank, size, place):
    """Return a program's results; of one that is refused the class of its error."""
    if name not in REFUSED:
        return PROGRAMS[name](rank, size, place)
    with pytest.raises(Exception, match=REFUSED[name]) as caught:
        PROGRAMS[name](rank, size, place)
    return [caught.type, str(caught.value)[:30]]


def assert_same(mine, theirs, tolerance):
    assert len(mine) == len(theirs)
    for x, y in zip(mine, theirs, strict=True):
        if isinstance(y, torch.Tensor):
            torch.testing.assert_close(x.detach(), y.detach(), rtol=tolerance, atol=tolerance)
        else:
            assert x == y


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_gloo(torch_ranks, tmp_path, name):
    rank, size = torch_ranks
    dist.group.WORLD.set_timeout(LIMIT)
    everyones = [str(tmp_path)]
    dist.broadcast_object_list(everyones)
    place = Path(everyones[0])
    mine = run(name, rank, size, place / "ours")
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", timeout=LIMIT)
    theirs = run(name, rank, size, place / "theirs")
    dist.barrier()  # of Gloo, whoever closes first is missed
    # Two numbers have one sum, so that not a bit differs.
    tolerance = 0 if size < 3 else 0.02 if "hook" in name or "precision" in name else 1e-5
    assert_same(mine, theirs, tolerance)


@pytest.mark.parametrize("interleaved", [False, True])
def test_steps_of_zero_overlap_with_the_backward_pass(torch_ranks, interleaved):
    """PyTorch refuses this on Gloo, so that the oracle is a step after the backward pass."""
    rank, size = torch_ranks
    made = []
    for overlaps in (False, True):
        model = DDP(network())
        optimizer = optim.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, lr=0.01, overlap_with_ddp=overlaps
        )
        if overlaps:
            name = "hook_with_zero_step" + "_interleaved" * interleaved
            hook = getattr(ddp_zero_hook, name)
            inner = default_hooks.allreduce_hook
            model.register_comm_hook(None, hook(inner, model, optimizer))
            train(model, rank, optimizer, 2)  # without updates, while buckets are chosen
        made.append(train(model, rank, optimizer))
    assert_same(*made, 1e-5)
