"""The names of torch.distributed: errors and questions as with Gloo, and that all were tested."""

import datetime
import pickle
import re
from pathlib import Path

import pytest
from calls import in_thread

from launcher import ROOT
from requirements import installed, require

torch = installed("torch")
dist, nn = torch.distributed, torch.nn

LIMIT = datetime.timedelta(seconds=20)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


# Wrong calls of `f(group, rank, size)`, of all ranks: one kind of error here and with Gloo.
WRONG = {
    "a list": lambda g, r, n: dist.all_reduce([zeros(2)], group=g),
    "no number that can be added": lambda g, r, n: dist.all_reduce(
        zeros(2, dtype=torch.float8_e5m2), group=g
    ),
    "bits of float32": lambda g, r, n: dist.all_reduce(zeros(2), dist.ReduceOp.BAND, group=g),
    "largest complex number": lambda g, r, n: dist.all_reduce(
        zeros(2, dtype=torch.complex64), dist.ReduceOp.MAX, group=g
    ),
    "two dtypes at once": lambda g, r, n: dist.all_reduce_coalesced(
        [zeros(2), zeros(2, dtype=torch.int32)], group=g
    ),
    "no such root": lambda g, r, n: dist.broadcast(zeros(2), n + 3, group=g),
    "a root below zero": lambda g, r, n: dist.reduce(zeros(2), -1, group=g),
    "too many outputs": lambda g, r, n: dist.all_gather(
        [zeros(2) for _ in range(n + 1)], zeros(2), group=g
    ),
    "outputs too long": lambda g, r, n: dist.all_gather(
        [zeros(3) for _ in range(n)], zeros(2), group=g
    ),
    "outputs of another dtype": lambda g, r, n: dist.all_gather(
        [zeros(2, dtype=torch.int32) for _ in range(n)], zeros(2), group=g
    ),
    "an output too long": lambda g, r, n: dist.all_gather_single(
        zeros(2 * n + 1), zeros(2), group=g
    ),
    "an output of another dtype": lambda g, r, n: dist.all_gather_single(
        zeros(2 * n, dtype=torch.int32), zeros(2), group=g
    ),
    "too many parts": lambda g, r, n: dist.reduce_scatter(
        zeros(2), [zeros(2) for _ in range(n + 1)], group=g
    ),
    "a part too long": lambda g, r, n: dist.reduce_scatter(
        zeros(3), [zeros(2) for _ in range(n)], group=g
    ),
    "no equal parts": lambda g, r, n: dist.reduce_scatter_single(
        zeros(2), zeros(2 * n + 1), group=g
    ),
    "a part of another dtype": lambda g, r, n: dist.reduce_scatter_single(
        zeros(2, dtype=torch.int32), zeros(2 * n), group=g
    ),
    "too many rows": lambda g, r, n: dist.all_to_all_single(
        zeros(2 * n), zeros(2 * n), [2] * n, [3] * n, group=g
    ),
    "splits for more ranks": lambda g, r, n: dist.all_to_all_single(
        zeros(2 * n), zeros(2 * n), [2] * (n + 1), [2] * (n + 1), group=g
    ),
    "inputs for more ranks": lambda g, r, n: dist.all_to_all(
        [zeros(2) for _ in range(n + 1)], [zeros(2) for _ in range(n + 1)], group=g
    ),
    "to itself": lambda g, r, n: dist.send(zeros(2), r, group=g),
    "to nobody": lambda g, r, n: dist.send(zeros(2), n + 2, group=g),
    "from nobody": lambda g, r, n: dist.recv(zeros(2), n + 2, group=g),
    "a message of another kind": lambda g, r, n: dist.P2POp(dist.broadcast, zeros(2), 0, g),
    "no messages": lambda g, r, n: dist.batch_isend_irecv([]),
    "no rank of the group": lambda g, r, n: dist.get_group_rank(g, n + 5),
    "no rank of the world": lambda g, r, n: dist.get_global_rank(g, n + 5),
    "a group of nobody": lambda g, r, n: dist.new_group([n + 4]),
    "a group with a rank twice": lambda g, r, n: dist.new_group([0, 0]),
    "subgroups too large": lambda g, r, n: dist.new_subgroups(n + 1),
    "a split without a device": lambda g, r, n: dist.split_group(g, [[r] for r in range(n)]),
    "a group without one of them": lambda g, r, n: dist.shrink_group([n - 1], group=g),
    "a group in a file": lambda g, r, n: pickle.dumps(g),
}


def kind_of_error(call, *arguments):
    """The class of the error of a call, None if there is none."""
    try:
        call(*arguments)
    except Exception as error:
        return type(error)
    return None


def test_wrong_calls_are_the_kind_of_error_that_they_are_with_gloo(torch_ranks):
    rank, size = torch_ranks
    gloo, ours = dist.new_group(backend="gloo", timeout=LIMIT), dist.new_group()
    for name, call in WRONG.items():
        theirs = kind_of_error(call, gloo, rank, size)
        assert theirs, f"Gloo takes {name}"
        mine = kind_of_error(call, ours, rank, size)
        assert mine, f"no error: {name}"
        assert issubclass(mine, theirs), name
        dist.all_reduce(x := torch.ones(1), group=ours)  # goes on
        assert x.item() == size


def test_questions_are_answered_as_with_gloo(torch_ranks):
    gloo = dist.new_group(backend="gloo", timeout=LIMIT)
    answers = [
        (
            dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group),
            dist.get_group_rank(group, 0), dist.get_global_rank(group, 0),
        )
        for group in (gloo, dist.group.WORLD)
    ]  # fmt: skip
    assert answers[0] == answers[1]
    assert dist.is_initialized()
    assert dist.is_backend_available("unisono")
    assert dist.get_backend() == "unisono"
    assert "unisono" in str(dist.get_backend_config())
    assert dist.get_pg_count() == 2
    assert dist.get_default_backend_for_device("cpu") == "gloo"  # first come
    assert not dist.is_torchelastic_launched()
    assert dist.get_node_local_rank(fallback_rank=3) == 3  # a launcher's variable
    with dist.record_comm("a name for profilers"):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(ValueError, match="GLOO"):
        dist.monitored_barrier()
    dist.group.WORLD.monitored_barrier(LIMIT)


def test_groups_in_several_threads_while_the_world_trains(torch_ranks):
    """Each thread has a model, whose backward passes reduce in the thread that has called them."""
    rank, size = torch_ranks
    groups = [dist.new_group() for _ in range(3)]
    models = [nn.Linear(4, 2, bias=False) for _ in groups]
    for number, model in enumerate(models):
        nn.init.constant_(model.weight, number)
    wrapped = [
        nn.parallel.DistributedDataParallel(m, process_group=g)
        for m, g in zip(models, groups, strict=True)
    ]

    def train(number):
        for step in range(20):
            model = wrapped[number]
            model.zero_grad()
            model(torch.full((1, 4), float(rank + step + number))).sum().backward()
            mean = (size - 1) / 2 + step + number
            assert torch.allclose(models[number].weight.grad, torch.full((2, 4), mean))

    trained = [in_thread(train, number) for number in range(3)]
    for _ in range(20):
        dist.all_reduce(x := torch.ones(3))
        assert x[0] == size
    for one in trained:
        one.result(60)


def test_models_are_copied_and_saved_without_their_group(torch_ranks, tmp_path):
    rank, size = torch_ranks
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    model(torch.ones(1, 3)).sum().backward()
    torch.save(model.module, tmp_path / "model.pt")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    whole = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(whole.weight, model.module.weight)
    again = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(again.module.weight, model.module.weight)
    copied = pickle.loads(pickle.dumps(model))  # of the world's group, as PyTorch has it
    copied(torch.full((1, 3), float(rank))).sum().backward()
    assert torch.allclose(copied.module.bias.grad, torch.ones(3))
    assert torch.allclose(copied.module.weight.grad, torch.full((3, 3), (size - 1) / 2))


# Names that say what a thing is, or that wait for somebody at the keyboard.
NO_CALLS = {
    "AllToAllOptions", "AllreduceCoalescedOptions", "AllreduceOptions", "Backend", "BackendConfig",
    "BarrierOptions", "BroadcastOptions", "DebugLevel", "GatherOptions", "GroupMember", "GroupName",
    "PrefixStore", "ProcessGroup", "ProcessGroupGloo", "ReduceOp", "ReduceOptions",
    "ReduceScatterOptions", "ScatterOptions", "Store", "Work", "default_pg_timeout",
    "get_debug_level", "group", "is_gloo_available", "is_mpi_available", "is_nccl_available",
    "is_ucc_available", "is_xccl_available", "reduce_op", "supports_complex",
}  # fmt: skip


def test_every_public_name_is_called_in_some_test():
    pinned = re.search(r"torch==([\d.]+)", (ROOT / "Makefile").read_text())
    if not torch.__version__.startswith(pinned[1]):
        require("torch", f"names of {torch.__version__} may be others than those of {pinned[1]}")
    files = [ROOT / "tests" / "torch_calls.py", *Path(__file__).parent.glob("test_torch_*.py")]
    text = "\n".join(file.read_text() for file in files)
    called = {name for name in dist.distributed_c10d.__all__ if re.search(rf"dist\.{name}\b", text)}
    assert set(dist.distributed_c10d.__all__) - called == NO_CALLS - called
