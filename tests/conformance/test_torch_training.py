"""What trains by torch.distributed, over the backend: as one process on the joined batches."""

import copy
import gc
from pathlib import Path

import pytest

import collectives as cc
from requirements import installed

torch = installed("torch")
dist, nn = torch.distributed, torch.nn

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402, N817

import strategies  # noqa: E402
import strategies.torch as ours  # noqa: E402
from strategies import elastic  # noqa: E402


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2)
    )


def batch_of(rank, step, rows=4):
    made = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 6, generator=made), torch.randn(rows, 2, generator=made)


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def alone(size, steps, make=lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9)):
    """The model that one process trains on the joined batches of all ranks."""
    model = network()
    optimizer = make(model.parameters())
    for step in range(steps):
        x, y = map(torch.cat, zip(*(batch_of(r, step) for r in range(size)), strict=True))
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return model


def train(model, rank, steps, optimizer):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch_of(rank, step)).backward()
        optimizer.step()


def assert_alike(model, expected=None, tolerance=1e-5):
    """The same bits on all ranks, and near the expected values: some 100 roundings each step."""
    for i, parameter in enumerate(model.parameters()):
        everyones = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, parameter.detach())
        assert all(torch.equal(x, everyones[0]) for x in everyones)
        if expected is not None:
            other = list(expected.parameters())[i]
            torch.testing.assert_close(parameter, other, rtol=tolerance, atol=tolerance)


HOOKS = {
    "none": None,
    "ours": (None, ours.ddp_hook),
    "ours with 16 bits": (ours.DdpOptions(compression=cc.FP16), ours.ddp_hook),
    "allreduce": (None, default_hooks.allreduce_hook),
    "fp16": (None, default_hooks.fp16_compress_hook),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.005, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
    ids=str,
)  # fmt: skip
def test_ddp_trains_as_one_process(torch_ranks, hook, options):
    rank, size = torch_ranks
    model = DDP(network(seed=rank), **options)
    model.module.load_state_dict(network().state_dict())
    if HOOKS[hook] is not None:
        model.register_comm_hook(*HOOKS[hook])
    train(model, rank, 8, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    assert_alike(model, alone(size, 8), 1e-5 if "16" not in hook else 0.02)


def is_shared(tensor):
    """Whether the elements lie in a file that is mapped for several processes."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        places, kind, *_ = line.split()
        first, _, last = places.partition("-")
        if int(first, 16) <= tensor.data_ptr() < int(last, 16):
            return kind.endswith("s")
    return False


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_gradients_lie_where_they_are_reduced_from_the_second_backward_pass_on(
    torch_ranks, world, options
):
    rank, size = torch_ranks
    model = DDP(network(), gradient_as_bucket_view=True, bucket_cap_mb=0.005, **options)
    for step in range(3):
        loss_of(model, *batch_of(rank, step)).backward()
        found = {is_shared(parameter.grad) for parameter in model.parameters()}
        assert found == {step > 0 and size > 1 and world.shared}


def absent(self):
    raise AttributeError


# Of another version of PyTorch: attributes that are others, and in which backward pass buckets have
# moved then, if ever.
CHANGES = {
    "nothing": ({}, 1),
    "the engine's module": ({"torch.autograd.graph.__name__": "elsewhere"}, 9),
    "DDP's module": ({"torch.nn.parallel.distributed.__name__": "elsewhere"}, 2),
    "no swap": ({"torch.UntypedStorage._swap_data_ptr_": property(absent)}, 9),
    "another swap": ({"torch.UntypedStorage._swap_data_ptr_": lambda self, other: None}, 9),
}


@pytest.mark.parametrize("change", CHANGES)
def test_ddp_trains_where_pytorch_has_changed(torch_ranks, world, monkeypatch, change):
    rank, size = torch_ranks
    others, moved = CHANGES[change]
    for name, value in others.items():
        monkeypatch.setattr(name, value, raising=False)
    options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.005}
    model = DDP(network(), process_group=dist.new_group(), **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, *batch_of(rank, step)).backward()
        optimizer.step()
        found = {is_shared(parameter.grad) for parameter in model.parameters()}
        assert found == {step >= moved and size > 1 and world.shared}
    assert_alike(model, alone(size, 4))


def test_ddp_stays_alike_for_200_steps(torch_ranks):
    rank, size = torch_ranks
    model = DDP(nn.Sequential(network(), nn.BatchNorm1d(2)))
    train(model, rank, 200, torch.optim.Adam(model.parameters(), 0.01))
    assert_alike(model)


def test_ddp_does_what_else_it_offers(torch_ranks):
    rank, size = torch_ranks
    model = DDP(network(), find_unused_parameters=True)
    with model.no_sync():
        loss_of(model, *batch_of(rank, 0)).backward()
    loss_of(model, *batch_of(rank, 1)).backward()
    one = network()
    for r in range(size):
        for step in range(2):
            (loss_of(one, *batch_of(r, step)) / size).backward()
    for parameter, other in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
    powers = DDP(network())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
    powers.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(powers, rank, 4, torch.optim.SGD(powers.parameters(), 0.1))
    assert_alike(powers)
    uneven = DDP(network())
    with uneven.join():
        for step in range(4 + 3 * rank):
            loss_of(uneven, *batch_of(rank, step)).backward()


def test_a_hook_with_feedback_is_refused_before_any_message(torch_ranks):
    rank, _ = torch_ranks
    for compression in (cc.TOPK(0.1).with_feedback(), cc.INT8.with_feedback()):
        model = DDP(network())
        model.register_comm_hook(ours.DdpOptions(compression=compression), ours.ddp_hook)
        with pytest.raises(ValueError, match="without feedback, or .*DistributedOptimizer"):
            loss_of(model, *batch_of(rank, 0)).backward()
    model = DDP(network())
    model.register_comm_hook(ours.DdpOptions(compression=cc.TOPK(0.1)), ours.ddp_hook)
    train(model, rank, 2, torch.optim.SGD(model.parameters(), 0.1))
    assert_alike(model)


def works_of_process():
    # `isinstance` would dereference weak proxies, whose objects may be gone.
    return [x for x in gc.get_objects() if issubclass(type(x), dist.Work)]


def test_a_mean_over_the_ranks_that_have_data(torch_ranks):
    """DDP's reducer gets the number of these ranks from a `Work` that only C++ holds."""
    rank, size = torch_ranks
    before = {id(work) for work in works_of_process()}
    model, one = DDP(network()), network()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, one)]
    with model.join(divide_by_initial_world_size=False):
        for step in range(2 + rank):
            optimizers[0].zero_grad()
            loss = loss_of(model, *batch_of(rank, step))
            gc.collect()
            loss.backward()
            optimizers[0].step()
    for step in range(1 + size):
        optimizers[1].zero_grad()
        there = [r for r in range(size) if step < 2 + r]
        (sum(loss_of(one, *batch_of(r, step)) for r in there) / len(there)).backward()
        optimizers[1].step()
    assert_alike(model, one)
    del model, optimizers, loss
    gc.collect()
    assert not [work for work in works_of_process() if id(work) not in before]


@pytest.mark.several
def test_a_model_goes_on_after_an_error_and_on_another_group(torch_ranks):
    rank, size = torch_ranks
    model = DDP(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, rank, 4, optimizer)
    loss = loss_of(model, *batch_of(rank, 0))
    if rank == 0:
        with pytest.raises(cc.MismatchError, match="broadcast"):
            dist.broadcast(torch.zeros(1), 0)
        ours.recover(model)
    else:
        # Which rank called what, and where: also the line of the backward pass.
        words = r"\(broadcast\) at test_torch_training.py:\d+ on rank 0"
        words += r".*\(allreduce\) at test_torch_training.py:\d+ on rank"
        with pytest.raises(cc.MismatchError, match=words):
            loss.backward()
        ours.recover(model, dist.group.WORLD)
    train(model, rank, 2, optimizer)
    assert_alike(model)


@pytest.mark.several
def test_a_model_goes_on_among_fewer_ranks(torch_ranks):
    rank, size = torch_ranks
    model = DDP(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, rank, 2, optimizer)
    fewer = dist.new_group(range(size - 1))
    if rank < size - 1:
        ours.recover(model, fewer)
        one = copy.deepcopy(model.module)
        x, y = map(torch.cat, zip(*(batch_of(r, 7) for r in range(size - 1)), strict=True))
        loss_of(one, x, y).backward()
        loss_of(model, *batch_of(rank, 7)).backward()
        for parameter, other in zip(model.module.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)
    dist.barrier()


class Halves(nn.Module):
    """A layer in parts, one on each rank: their sum is taken in both passes, inside of DDP's."""

    def __init__(self, whole, rank, size):
        super().__init__()
        part = whole.weight.detach().chunk(size, 1)[rank].clone().requires_grad_()
        self.parts = [part]  # of which DDP knows nothing
        self.first = nn.Linear(6, 6)
        self.rank, self.size = rank, size

    def forward(self, x):
        x = torch.tanh(self.first(x)).chunk(self.size, 1)[self.rank]
        return dist.nn.functional.all_reduce(x @ self.parts[0].T, group=dist.group.WORLD)


def test_ddp_beside_a_layer_in_parts_on_the_same_group(torch_ranks):
    rank, size = torch_ranks
    torch.manual_seed(3)
    whole, first = nn.Linear(6, 2, bias=False), nn.Linear(6, 6)
    if 6 % size:
        return
    parts = Halves(whole, rank, size)
    parts.first.load_state_dict(first.state_dict())
    model = DDP(parts, gradient_as_bucket_view=True)
    one = nn.Sequential(first, nn.Tanh(), whole)
    x, y = batch_of(0, 0)  # the same rows on all ranks
    for _ in range(4):
        model.zero_grad()
        one.zero_grad()
        parts.parts[0].grad = None
        loss_of(model, x, y).backward()
        loss_of(one, x, y).backward()
        # Each rank's loss counts in the sum; of DDP's parameter a rank has its own part's gradient.
        expected = whole.weight.grad.chunk(size, 1)[rank] * size
        torch.testing.assert_close(parts.parts[0].grad, expected)
        torch.testing.assert_close(parts.first.weight.grad, first.weight.grad)


def test_fsdp_trains_as_one_process(torch_ranks):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rank, size = torch_ranks
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        model = network()
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=init_device_mesh("cpu", (size,)), mp_policy=policy)
        train(model, rank, 4, torch.optim.Adam(model.parameters(), 0.01))
        expected = alone(size, 4, lambda ps: torch.optim.Adam(ps, 0.01))
        tolerance = 1e-4 if policy.param_dtype is None else 0.05
        for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
            whole = parameter.full_tensor()
            torch.testing.assert_close(whole, other, rtol=tolerance, atol=tolerance)
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor() > 0


def test_fsdp_over_a_mesh_of_two_dimensions_trains_as_one_process(torch_ranks):
    from torch.distributed.fsdp import fully_shard

    rank, size = torch_ranks
    replicas = 2 if size % 2 == 0 else 1
    model = network()
    mesh = init_device_mesh(
        "cpu", (replicas, size // replicas), mesh_dim_names=("replicas", "parts")
    )
    fully_shard(model, mesh=mesh)
    train(model, rank, 4, torch.optim.Adam(model.parameters(), 0.01))
    expected = alone(size, 4, lambda ps: torch.optim.Adam(ps, 0.01))
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.several  # stages
@pytest.mark.parametrize("kind", ["ScheduleGPipe", "Schedule1F1B"])
def test_layers_in_a_pipeline_have_the_gradients_of_one_process(torch_ranks, kind):
    from torch.distributed import pipelining

    rank, size = torch_ranks
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6) for _ in range(size)]
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    whole = nn.Sequential(*copy.deepcopy(layers))
    loss_of(whole, x, y).backward()
    stage = pipelining.PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = getattr(pipelining, kind)(
        stage, n_microbatches=4, loss_fn=lambda made, y: (made - y).square().mean()
    )
    if rank == 0:
        schedule.step(x)
    elif rank == size - 1:
        schedule.step(target=y)
    else:
        schedule.step()
    torch.testing.assert_close(layers[rank].weight.grad, whole[rank].weight.grad)


def test_the_older_fsdp_trains_as_one_process(torch_ranks):
    from torch.distributed.fsdp import FullyShardedDataParallel as Sharded

    rank, size = torch_ranks
    model = Sharded(network(), device_id=torch.device("cpu"))
    train(model, rank, 4, torch.optim.Adam(model.parameters(), 0.01))
    with Sharded.summon_full_params(model):
        assert_alike(model, alone(size, 4, lambda ps: torch.optim.Adam(ps, 0.01)), 1e-4)


def test_compiled_programs_train_as_one_process(torch_ranks):
    frames = []

    def backend(graph, examples):
        frames.append(graph.code)
        return graph

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = network()

        def forward(self, x):
            return self.layers(x)

    rank, size = torch_ranks
    torch.compiler.reset()
    for views in (False, True):
        model = DDP(Model(), gradient_as_bucket_view=views)
        compiled = torch.compile(model, backend=backend)
        train(compiled, rank, 4, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        assert_alike(model, alone(size, 4))

    @torch.compile(backend=backend)
    def total(x):
        dist.all_reduce(x)
        return x + 1

    expected = torch.full((3,), sum(range(size)) + 1.0)
    assert torch.equal(total(torch.full((3,), float(rank))), expected)
    # The layers, and the sum: what C++ calls of this library is none of the compiler's.
    assert len(frames) >= 2
    assert all("linear" in code or "all_reduce" in code for code in frames)


def test_compiled_functions_call_what_is_not_of_torch(torch_ranks):
    import strategies.horovod.torch as hvd

    rank, size = torch_ranks
    torch.compiler.reset()
    comm = cc.init()
    hvd.init(comm)

    @torch.compile(backend="eager")
    def totals(x):
        return comm.allreduce(x * 2, op=cc.SUM) + 1, hvd.allreduce(x, op=hvd.Sum) - 1

    total = sum(range(size))
    ours, theirs = totals(torch.full((3,), float(rank)))
    assert torch.equal(ours, torch.full((3,), 2.0 * total + 1))
    assert torch.equal(theirs, torch.full((3,), total - 1.0))

    model = network()
    plain = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer = strategies.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    train(model, rank, 4, optimizer)
    assert_alike(model, alone(size, 4))
    hvd.shutdown()


def test_no_state_in_memory_of_what_fsdp_has_cut(torch_ranks):
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (torch_ranks[1],)))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for things in ({"model": model}, {"optimizer": optimizer}, {"w": next(model.parameters())}):
        with pytest.raises(ValueError, match="State: .*expected whole arrays here, and Saver for"):
            elastic.State(cc.init(), **things)


def test_optimizer_states_in_parts(torch_ranks):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rank, size = torch_ranks
    model = DDP(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, rank, 4, optimizer)
    assert_alike(model, alone(size, 4, lambda ps: torch.optim.Adam(ps, 0.01)), 1e-4)
    optimizer.consolidate_state_dict()


def test_distributed_tensors_and_tensor_parallel(torch_ranks):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    rank, size = torch_ranks
    mesh = init_device_mesh("cpu", (size,))
    x = torch.arange(36.0).reshape(12, 3)
    parts = distribute_tensor(x, mesh, [Shard(0)])
    assert torch.equal(parts.full_tensor(), x)
    assert torch.equal(parts.redistribute(mesh, [Replicate()]).to_local(), x)
    assert parts.sum().full_tensor() == x.sum()
    one = network()
    model = copy.deepcopy(one)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.testing.assert_close(model(x[:4, :1].expand(4, 6)), one(x[:4, :1].expand(4, 6)))


def test_checkpoints(torch_ranks, tmp_path):
    from torch.distributed import checkpoint

    place = [str(tmp_path)]
    dist.broadcast_object_list(place)
    state = {"w": torch.arange(5.0), "step": torch.tensor(3)}
    saving = checkpoint.async_save(
        state, checkpoint_id=f"{place[0]}/later", process_group=dist.new_group()
    )
    checkpoint.save(state, checkpoint_id=f"{place[0]}/now")
    saving.result()
    for name in ("now", "later"):
        found = {"w": torch.zeros(5), "step": torch.tensor(0)}
        checkpoint.load(found, checkpoint_id=f"{place[0]}/{name}")
        assert torch.equal(found["w"], state["w"])
        assert found["step"] == 3
    dist.barrier()
