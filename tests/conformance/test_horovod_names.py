"""Names, arguments and refusals of Horovod 0.28 for PyTorch, and where the migration page differs.

Each row of the tables is a promise of Horovod's documentation or a test of its own suite.
"""

import contextlib
import inspect
import itertools

import numpy as np
import pytest

import collectives as cc
from launcher import ROOT
from requirements import installed

torch = installed("torch")
hvd = pytest.importorskip("strategies.horovod.torch") if torch else None

PAGE = ROOT / "docs" / "migrate-from-horovod.md"

REDUCED = ["op", "prescale_factor", "postscale_factor", "process_set"]
SHARED = ["op", "process_set", "prescale_factor", "postscale_factor"]
ROWS = ["name", "process_set"]

# Arguments in Horovod's order, which programs may pass by position.
ARGUMENTS = {
    "init": ["comm", "process_sets"],
    "allreduce": ["tensor", "average", "name", "compression", *REDUCED],
    "allreduce_async": ["tensor", "average", "name", *REDUCED],
    "allreduce_": ["tensor", "average", "name", *REDUCED],
    "allreduce_async_": ["tensor", "average", "name", *REDUCED],
    "grouped_allreduce": ["tensors", "average", "name", "compression", *REDUCED],
    "grouped_allreduce_async": ["tensors", "average", "name", *REDUCED],
    "grouped_allreduce_": ["tensors", "average", "name", *REDUCED],
    "grouped_allreduce_async_": ["tensors", "average", "name", *REDUCED],
    "sparse_allreduce_async": ["tensor", "name", "op", "process_set"],
    "reducescatter": ["tensor", "name", "compression", *SHARED],
    "reducescatter_async": ["tensor", "name", *SHARED],
    "grouped_reducescatter": ["tensors", "name", "compression", *SHARED],
    "grouped_reducescatter_async": ["tensors", "name", *SHARED],
    "allgather": ["tensor", *ROWS],
    "allgather_async": ["tensor", *ROWS],
    "grouped_allgather": ["tensors", *ROWS],
    "grouped_allgather_async": ["tensors", *ROWS],
    "broadcast": ["tensor", "root_rank", *ROWS],
    "broadcast_async": ["tensor", "root_rank", *ROWS],
    "broadcast_": ["tensor", "root_rank", *ROWS],
    "broadcast_async_": ["tensor", "root_rank", *ROWS],
    "alltoall": ["tensor", "splits", *ROWS],
    "alltoall_async": ["tensor", "splits", *ROWS],
    "poll": ["handle"],
    "synchronize": ["handle"],
    "join": ["device"],
    "barrier": ["process_set"],
    "broadcast_parameters": ["params", "root_rank"],
    "broadcast_optimizer_state": ["optimizer", "root_rank", "model"],
    "broadcast_object": ["obj", "root_rank", "name", "process_set"],
    "allgather_object": ["obj", "name"],
    "start_timeline": ["file_path", "mark_cycles"],
    "add_process_set": ["ranks"],
    "remove_process_set": ["process_set"],
    "DistributedOptimizer": [
        "optimizer", "named_parameters", "compression", "backward_passes_per_step", "op",
        "gradient_predivide_factor", "num_groups", "groups", "sparse_as_dense", "process_set",
    ],
    "elastic.run": ["func"],
    "elastic.TorchState": ["model", "optimizer"],
    "elastic.ElasticSampler": ["dataset", "shuffle", "seed"],
    "elastic.ElasticSampler.record_batch": ["self", "batch_idx", "batch_size"],
    "elastic.ElasticSampler.record_indices": ["self", "indices"],
    "elastic.ElasticSampler.get_indices": ["self", "batch_idx", "batch_size"],
    "elastic.ElasticSampler.set_epoch": ["self", "epoch"],
    "elastic.ElasticSampler.load_state_dict": ["self", "state"],
    "elastic.State.register_reset_callbacks": ["self", "callbacks"],
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_horovods_in_their_order(name):
    found = hvd
    for part in name.split("."):
        found = getattr(found, part)
    wanted = ARGUMENTS[name]
    # Further arguments of this package follow.
    assert list(inspect.signature(found).parameters)[: len(wanted)] == wanted


NAMES = (
    "shutdown is_initialized size local_size cross_size rank local_rank cross_rank is_homogeneous "
    "mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built "
    "ccl_built cuda_built rocm_built ProcessSet global_process_set Average Sum Adasum Min Max "
    "Product Compression HorovodInternalError SyncBatchNorm stop_timeline elastic"
)


def test_all_names_exist():
    assert not set(NAMES.split()) - set(hvd.__all__)


@contextlib.contextmanager
def everyone(comm):
    """The process set of all ranks of a context on a communicator."""
    made = hvd.HorovodContext(comm)
    yield made.world
    made.close()


class Rounds(type(hvd.Compression.fp16) if hvd else object):
    def compress(self, tensor):
        return tensor.round(), None


def refusals():
    """What all ranks do wrong, which Horovod refuses too: call and words of the error."""
    layer, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

    def wrap(ranks, **options):
        options = {"named_parameters": layer.named_parameters(), **options}
        sgd = torch.optim.SGD(layer.parameters(), 0.1)
        return hvd.DistributedOptimizer(sgd, process_set=ranks, **options)

    both = itertools.chain
    return {
        "average and op": (
            lambda s: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum, process_set=s),
            "expected average or op, got both",
        ),
        "splits of too many rows": (
            lambda s: hvd.alltoall(torch.ones(1), [9] * s.size(), process_set=s),
            "splits do not fit",
        ),
        "splits that are no integers": (
            lambda s: hvd.alltoall(torch.ones(s.size()), torch.ones(s.size()), process_set=s),
            "expected integers as splits, got float32",
        ),
        "scalars to scatter": (
            lambda s: hvd.reducescatter(torch.tensor(1.0), process_set=s),
            "a scalar has no rows",
        ),
        "Adasum of shares": (
            lambda s: hvd.reducescatter(torch.ones(4), op=hvd.Adasum, process_set=s),
            "expected Average, Sum, Min, Max or Product as op",
        ),
        "Adasum of sparse tensors": (
            lambda s: hvd.allreduce(torch.eye(2).to_sparse(), op=hvd.Adasum, process_set=s),
            "expected Average or Sum as op",
        ),
        "names of two models": (
            lambda s: wrap(
                s, named_parameters=both(layer.named_parameters(), other.named_parameters())
            ),
            "two parameters have one name, got 'weight'",
        ),
        "missing names": (
            lambda s: wrap(s, named_parameters=[("weight", layer.weight)]),
            "have no name for a parameter",
        ),
        "parameters without names": (
            lambda s: wrap(s, named_parameters=layer.parameters()),
            r"expected \(name, parameter\) pairs",
        ),
        "groups of text": (lambda s: wrap(s, groups="weight"), "bad groups, expected"),
        "groups of names": (lambda s: wrap(s, groups=[["weight"]]), "bad groups, expected"),
        "a group without a list": (lambda s: wrap(s, groups=[layer.weight]), "bad groups"),
        "a negative number of groups": (lambda s: wrap(s, groups=-1), "bad groups, expected"),
        "no number of groups": (lambda s: wrap(s, groups=1.5), "bad groups, expected"),
        "a parameter in two groups": (
            lambda s: wrap(s, groups=[[layer.weight], [layer.weight]]),
            "in two groups",
        ),
        "a factor for a sum": (
            lambda s: wrap(s, op=hvd.Sum, gradient_predivide_factor=2.0),
            "is for MEAN",
        ),
        "an op of optimizers": (lambda s: wrap(s, op=hvd.Max), "expected MEAN or SUM"),
        "a compression by name": (
            lambda s: wrap(s, compression="fp16"),
            "expected Compression.none, fp16 or bf16 as",
        ),
        "a compression of the program": (
            lambda s: wrap(s, compression=Rounds(None, cc.NONE)),
            "without calls of Rounds.compress",
        ),
        "a negative num_groups": (lambda s: wrap(s, num_groups=-1), "num_groups"),
        "no passes": (lambda s: wrap(s, backward_passes_per_step=0), "backward_passes_per_step"),
        "parameters of text": (
            lambda s: hvd.broadcast_parameters("weight", 0, process_set=s),
            "expected arrays, got str",
        ),
        "an unknown op": (
            lambda s: hvd.allreduce(torch.ones(2), op=99, process_set=s),
            "expected Average, Sum, Min, Max, Product or Adasum as op, got 99",
        ),
    }


REFUSALS = refusals() if torch else {}


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_use_is_an_error(comm, name):
    call, words = REFUSALS[name]
    with everyone(comm) as ranks:
        with pytest.raises((TypeError, ValueError), match=words):
            call(ranks)
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=ranks)
        assert total.tolist() == [comm.size]


@pytest.mark.several
def test_rows_that_cannot_be_shared_evenly_need_splits(comm):
    with everyone(comm) as ranks, pytest.raises(ValueError, match="cannot be shared evenly"):
        hvd.alltoall(torch.ones(comm.size + 1), process_set=ranks)


def passes(comm, ranks, number, *, clear=False):
    """The change of a weight by a step of SGD, in multiples of the mean gradient of a pass."""
    layer = torch.nn.Linear(3, 2, bias=False)
    torch.nn.init.zeros_(layer.weight)
    sgd = torch.optim.SGD(layer.parameters(), 1.0)
    optimizer = hvd.DistributedOptimizer(sgd, layer.named_parameters(), process_set=ranks)
    for _ in range(number):
        layer(torch.ones(1, 3) * (comm.rank + 1)).sum().backward()
    if clear:
        optimizer.zero_grad()
    optimizer.step()
    optimizer.close()
    return -layer.weight[0, 0].item() / ((comm.size + 1) / 2)


def unused(comm, ranks, decay):
    """The weight of a layer without a gradient on any rank, after a step with weight decay."""
    used, idle = torch.nn.Linear(3, 2), torch.nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([*used.parameters(), idle], 1.0, weight_decay=decay)
    hvd.broadcast_parameters(used.state_dict(), 0, process_set=ranks)
    optimizer = hvd.DistributedOptimizer(sgd, process_set=ranks)
    used(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.close()
    return idle.item()


def synchronized(comm, ranks):
    """The change by `synchronize` and `step`, in multiples of the sum of all gradients."""
    layer = torch.nn.Linear(3, 2, bias=False)
    torch.nn.init.zeros_(layer.weight)
    sgd = torch.optim.SGD(layer.parameters(), 1.0)
    optimizer = hvd.DistributedOptimizer(sgd, op=hvd.Sum, process_set=ranks)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.synchronize()
    optimizer.step()
    optimizer.close()
    return -layer.weight[0, 0].item() / comm.size


def twice(comm, ranks):
    """The results of two calls of `synchronize`."""
    handle = hvd.allreduce_async(torch.ones(2), process_set=ranks)
    return [hvd.synchronize(handle).sum().item() for _ in range(2)]


def closure(comm, ranks):
    """The loss that a step with a closure returns, without the mean of all losses."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0), process_set=ranks)

    def loss():
        (result := (weight + comm.rank).sum()).backward()
        return result

    result = optimizer.step(loss).item()
    optimizer.close()
    return result - (comm.size - 1) / 2


def lbfgs(comm, ranks):
    """The learning rate of an LBFGS optimizer after the broadcast of its state."""
    optimizer = torch.optim.LBFGS([torch.zeros(1)], lr=1.0 + comm.rank)
    hvd.broadcast_optimizer_state(optimizer, 0, process_set=ranks)
    return optimizer.param_groups[0]["lr"]


def mixed(comm, ranks):
    """A group of tensors of several dtypes."""
    group = [torch.ones(1), torch.ones(1, dtype=torch.int64)]
    return [str(x.dtype) for x in hvd.grouped_allreduce(group, process_set=ranks)]


# Row of the migration page -> call and result here, where Horovod does something else.
DIFFERENCES = {
    "more backward passes than `backward_passes_per_step`": (
        lambda c, s: passes(c, s, 3),
        3.0,
    ),
    "`zero_grad` between `backward` and `step`": (
        lambda c, s: passes(c, s, 1, clear=True),
        0.0,
    ),
    "`step` after `synchronize`, without `skip_synchronize`": (synchronized, 1.0),
    "a parameter without a gradient on all ranks": (lambda c, s: unused(c, s, 0.5), 1.0),
    "a second `synchronize` of a handle": (twice, [2.0, 2.0]),
    "the loss of `step(closure)`": (closure, 0.0),
    "`broadcast_optimizer_state` of LBFGS": (lbfgs, 1.0),
    "a group of several dtypes": (mixed, ["torch.float32", "torch.int64"]),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_on_the_page(comm, name):
    call, wanted = DIFFERENCES[name]
    with everyone(comm) as ranks:
        result = call(comm, ranks)
    assert result == pytest.approx(wanted)
    assert f"| {name} |" in PAGE.read_text()


def test_names_of_errors_that_programs_catch():
    for kind in (cc.MismatchError, cc.CollectiveTimeout, cc.PeerFailure):
        assert issubclass(kind, hvd.HorovodInternalError)
        assert issubclass(kind, RuntimeError)


@pytest.mark.parametrize(
    "dtype", ["uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bool"]
)
def test_rows_of_every_dtype_of_horovod(comm, dtype):
    kind, rank, size = getattr(torch, dtype), comm.rank, comm.size
    with everyone(comm) as ranks:
        own = torch.full((rank + 1, 2), rank % 2, dtype=kind)
        rows = hvd.allgather(own, process_set=ranks)
        assert rows.dtype == kind
        assert rows[:, 0].tolist() == [r % 2 for r in range(size) for _ in range(r + 1)]
        root = hvd.broadcast(own[:1], size - 1, process_set=ranks)
        assert root.tolist() == [[(size - 1) % 2] * 2]
        # Rank r sends r rows to each rank.
        given = torch.full((rank * size, 2), rank % 2, dtype=kind)
        parts, received = hvd.alltoall(given, [rank] * size, process_set=ranks)
        assert received.tolist() == list(range(size))
        np.testing.assert_array_equal(parts[:, 0], [r % 2 for r in range(size) for _ in range(r)])
        # Fewer rows than ranks: the last ranks get none.
        if dtype != "bool":
            share = hvd.reducescatter(torch.ones(1, 3, dtype=kind), op=hvd.Sum, process_set=ranks)
            assert share.tolist() == ([[size] * 3] if rank == 0 else [])


def test_gradients_are_switched_on_and_off(comm):
    """As for two networks that train in turns (Horovod's `test_dynamic_requires_grad`)."""
    with everyone(comm) as ranks:
        first, second = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
        both = [first, second]
        for layer in both:
            torch.nn.init.ones_(layer.weight)
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(x.parameters(), 0.1), process_set=ranks)
            for x in both
        ]
        for turn in range(4):
            for layer in both:
                layer.weight.requires_grad_(layer is both[turn % 2])
            before = [layer.weight.detach().clone() for layer in both]
            optimizers[turn % 2].zero_grad()
            second(first(torch.full((1, 2), comm.rank + 1.0))).sum().backward()
            optimizers[turn % 2].step()
            changed = [
                not torch.equal(layer.weight, old) for layer, old in zip(both, before, strict=True)
            ]
            assert changed == [turn % 2 == 0, turn % 2 == 1]
            for layer in both:
                rows = comm.allgather(layer.weight.detach().numpy()[np.newaxis])
                np.testing.assert_array_equal(rows, rows[:1].repeat(comm.size, 0))
        for optimizer in optimizers:
            optimizer.close()
