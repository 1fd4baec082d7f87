"""A program for 2 ranks: what the tables for users of other libraries say, row by row.

`other_libraries.py torch`, `horovod` or `mpi4py` finds the rows of these tables in the pages by
their left cells, and checks each of them. None stands for a row that says that a thing does not
exist, or that is about something that is no call.
"""

from __future__ import annotations

import copy
import itertools
import sys
import tempfile
from pathlib import Path

import numpy as np

import collectives as cc
import strategies
from strategies import model_parallel

DOCS = Path(__file__).resolve().parents[2] / "docs"

comm = cc.init()
assert comm.size == 2
other = 1 - comm.rank
mine = np.arange(4.0) + 10 * comm.rank  # [0 1 2 3] and [10 11 12 13]
total = np.arange(4.0) * 2 + 10


def rows(page: str, head: str) -> list[str]:
    """The left cells of the tables of a page whose first column is called `head`."""
    lines = iter((DOCS / page).read_text().splitlines())
    found = []
    for line in lines:
        if line.startswith(f"| {head} |"):
            table = itertools.takewhile(bool, itertools.islice(lines, 1, None))
            found += [row.split(" | ")[0].removeprefix("| ") for row in table]
    return found


def equal(found, expected) -> None:
    assert np.array_equal(np.asarray(found), np.asarray(expected)), (found, expected)


def on_root(found, expected) -> None:
    """Compare what rank 0 gets; the others get None."""
    if comm.rank == 0:
        equal(found, expected)
    else:
        assert found is None


def in_place(operation, x, **options) -> None:
    result = x.copy()
    assert operation(result, out=result, **options) is result
    equal(result, total)


def all_to_all(x) -> None:
    equal(comm.alltoall(x), [*np.arange(2.0) + 2 * comm.rank, *np.arange(2.0) + 2 * comm.rank + 10])


def scattered() -> None:
    equal(comm.scatter(mine if comm.rank == 0 else None, 0), np.arange(2.0) + 2 * comm.rank)


def gathered() -> None:
    on_root(comm.gather(mine, 0), [*np.arange(4.0), *np.arange(4.0) + 10])


def everything() -> None:
    equal(comm.allgather(mine), [*np.arange(4.0), *np.arange(4.0) + 10])


def uneven() -> None:
    equal(comm.allgather(np.full(comm.rank + 1, comm.rank)), [0, 1, 1])


def exchanged() -> None:
    comm.send(mine, other)
    out = np.empty(4)
    assert comm.recv(other, out=out) is out
    equal(out, np.arange(4.0) + 10 * other)


def one_way() -> None:
    if comm.rank == 0:
        comm.send(mine, 1)
    else:
        equal(comm.recv(0), np.arange(4.0))


def by_request() -> None:
    """Both send first; the second array is received first."""
    wanted = [comm.irecv(other, tag=tag) for tag in (2, 1)]
    sent = [comm.isend(mine + tag, other, tag=tag) for tag in (1, 2)]
    for request, tag in zip(wanted, (2, 1), strict=True):
        equal(request.wait(), np.arange(4.0) + 10 * other + tag)
        assert request.envelope[:3] == (other, tag, (4,))
    for request in sent:
        request.wait()


def from_anybody() -> None:
    request = comm.irecv(None, tag=None)
    comm.send(mine, other, tag=3)
    request.wait()
    assert request.envelope == (other, 3, (4,), np.float64)


def probed() -> None:
    comm.send(mine, other)
    assert comm.probe(other).shape == (4,)
    comm.recv(other)


def scans() -> None:
    out = np.empty(4)
    assert comm.scan(mine, out=out) is out
    equal(out, mine if comm.rank == 0 else total)
    assert comm.exscan(mine) is None if comm.rank == 0 else comm.exscan(mine)[3] == 3


def some_objects() -> None:
    assert comm.gather_object(comm.rank, 0) == ([0, 1] if comm.rank == 0 else None)
    assert comm.scatter_object(["a", "b"] if comm.rank == 0 else None, 0) == "ab"[comm.rank]


def sent_objects() -> None:
    comm.send_object({"rank": comm.rank}, other)
    assert comm.recv_object(other) == {"rank": other}


def objects() -> None:
    assert comm.allgather_object({"rank": comm.rank}) == [{"rank": 0}, {"rank": 1}]
    assert comm.broadcast_object({"rank": comm.rank}) == {"rank": 0}


def groups() -> None:
    first = comm.group([0])
    assert (first is None) == (comm.rank == 1)
    if first is not None:
        equal(first.allreduce(1.0), 1.0)
        first.close()


def split() -> None:
    with comm.split(comm.rank % 2, key=0) as half:
        assert half.size == 1


def request() -> None:
    result = mine.copy()
    started = comm.allreduce_async(result, op=cc.SUM, out=result)
    assert started.wait() is result
    assert started.done()
    equal(result, total)


def broadcast() -> None:
    result = mine.copy()
    comm.broadcast(result, 0, out=result)
    equal(result, np.arange(4.0))


def reduced() -> None:
    on_root(comm.reduce(mine, 0, op=cc.SUM), total)


def shares() -> None:
    equal(comm.reduce_scatter(mine, op=cc.SUM), total[2 * comm.rank : 2 * comm.rank + 2])


def joined() -> None:
    """Three batches here, one there: all make three steps, the mean is over all rows."""
    w = strategies.Variable(np.zeros(1), name="w")
    optimizer = strategies.DistributedOptimizer(strategies.SGD(1.0))
    batches = [np.ones((2, 1))] * 3 if comm.rank == 0 else [np.full((4, 1), 4.0)]
    seen = []
    for x in strategies.input.in_step(batches, comm):
        seen.append(len(x))
        optimizer.apply_gradients([(-x.sum(0) / max(len(x), 1), w)], examples=len(x))
    assert seen == ([2, 2, 2] if comm.rank == 0 else [4, 0, 0])
    equal(w.value, [(2 * 1 + 4 * 4) / 6 + 1 + 1])


def saved() -> None:
    folder = comm.broadcast_object(tempfile.mkdtemp())
    with strategies.CheckpointManager(folder, comm) as checkpoints:
        checkpoints.save({"w": np.ones(2)}, step=1)
        equal(checkpoints.restore_or_none().tensors["w"], np.ones(2))


def halved() -> None:
    equal(comm.allreduce(mine.astype(np.float32), op=cc.SUM, compression=cc.FP16), total)
    strategies.DistributedOptimizer(strategies.SGD(1.0), compression=cc.FP16)


def same_as_none() -> None:
    equal(comm.allreduce(mine, op=cc.SUM, compression=cc.NONE), total)
    assert str(cc.NONE) == "none"


def beginning_alike() -> None:
    weights = strategies.broadcast_parameters({"w": np.full(2, float(comm.rank))}, root=1)
    equal(weights["w"], [1, 1])
    equal(comm.broadcast(np.full(2, comm.rank), 1), [1, 1])


def the_world() -> None:
    assert cc.init() is comm
    assert (cc.rank(), cc.size()) == (comm.rank, comm.size)
    assert (cc.node_rank(), cc.num_nodes()) == (0, 1)
    assert (cc.local_rank(), cc.local_size()) == (comm.rank, 2)


def barrier() -> None:
    comm.barrier()
    comm.barrier(timeout=10)


def with_adjoints() -> None:
    """Units of both ranks go forward, their gradients come back summed over the ranks."""
    units, backward = model_parallel.allgather(mine)
    equal(units, np.concatenate([np.arange(4.0), np.arange(4.0) + 10]))
    errors = np.arange(8.0) * (comm.rank + 1)
    equal(backward(errors), 3 * np.arange(8.0)[4 * comm.rank : 4 * comm.rank + 4])


def grouped() -> None:
    equal(cc.grouped_allreduce([mine, mine + 1], op=cc.SUM)[1], total + 2)


def missing(*names: str):
    """A row that says that something does not exist: no such name here."""

    def run() -> None:
        for name in names:
            assert not hasattr(cc, name), name
            assert not hasattr(strategies, name), name

    return run


def of_torch() -> dict:
    """Rows of docs/from-torch-distributed.md."""
    import torch
    from torch.utils.data import DistributedSampler

    def trained(steps: int = 1, passes: int = 1, used: bool = True, **options):
        """The weights of a model after steps of several passes each."""
        torch.manual_seed(comm.rank)
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 1), "b": torch.nn.Linear(2, 1)})
        strategies.broadcast_parameters(model.state_dict())
        begin = copy.deepcopy(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = strategies.DistributedOptimizer(optimizer, **options)
        for _ in range(steps):
            optimizer.zero_grad()
            for number in range(passes):
                x = torch.full((1, 2), float(1 + comm.rank + number))
                model["a" if used or comm.rank == 0 else "b"](x).sum().backward()
            optimizer.step()
        moved = {name: (begin[name] - value) / 0.5 for name, value in model.state_dict().items()}
        assert set(moved) == {"a.weight", "a.bias", "b.weight", "b.bias"}
        return moved

    def sampler() -> None:
        data = torch.utils.data.TensorDataset(torch.arange(5))
        own = DistributedSampler(data, num_replicas=comm.size, rank=comm.rank, shuffle=False)
        assert list(own) == ([0, 2, 4] if comm.rank == 0 else [1, 3, 0])

    def averages() -> None:
        assert torch.allclose(trained()["a.weight"], torch.tensor([1.5, 1.5]))
        trained(steps=3, overlap=True)

    def several_passes() -> None:
        assert torch.allclose(trained(passes=2)["a.weight"], torch.tensor([4.0, 4.0]))

    def unused() -> None:
        moved = trained(used=False)
        assert torch.allclose(moved["a.weight"], torch.tensor([0.5, 0.5]))
        assert torch.allclose(moved["b.weight"], torch.tensor([1.0, 1.0]))

    def clipped() -> None:
        moved = trained(clip_global_norm=1.0)
        assert abs(sum(float((x**2).sum()) for x in moved.values()) - 1) < 1e-5

    def sum_in_place() -> None:
        x = torch.from_numpy(mine.copy())
        assert comm.allreduce(x, op=cc.SUM, out=x) is x
        equal(x, total)
        equal(comm.allreduce(x), total)

    return {
        "`torchrun --nproc-per-node=4 train.py`": None,
        '`init_process_group("gloo")`': the_world,
        "`destroy_process_group()`": None,
        "`DistributedSampler(data)`": sampler,
        "`DistributedDataParallel(model)`": averages,
        "`ddp.module`, `module.` in the names of a `state_dict`": averages,
        "`with ddp.no_sync():`": several_passes,
        "`find_unused_parameters=True`": unused,
        "`register_comm_hook(None, fp16_compress_hook)`": halved,
        "`clip_grad_norm_` after `backward()`": clipped,
        "`with Join([ddp]):`": joined,
        "`SyncBatchNorm.convert_sync_batchnorm(model)`": None,  # has a test of its own
        "running means of batch normalisation, which DDP takes from rank 0": None,
        "`if dist.get_rank() == 0: torch.save(...)`": saved,
        # PyTorch's own have tests of their own: tests/conformance/test_torch_training.py
        "FSDP2, DTensor, `ZeroRedundancyOptimizer`": None,
        "pipelining, a model over several ranks by hand": lambda: (exchanged(), with_adjoints()),
        "`get_rank()`, `get_world_size()`": the_world,
        "`LOCAL_RANK`, `LOCAL_WORLD_SIZE`": the_world,
        "`torch.multiprocessing.spawn(train, nprocs=4)`": the_world,
        "`all_reduce(x)`": sum_in_place,
        "`all_reduce(x, async_op=True)`, `work.wait()`": request,
        "`reduce(x, dst=0)`": reduced,
        "`broadcast(x, src=0)`": broadcast,
        "`all_gather(tensors, x)`, `all_gather_into_tensor(out, x)`": uneven,
        "`gather(x, tensors, dst=0)`, `scatter(x, tensors, src=0)`": lambda: (
            gathered(),
            scattered(),
        ),
        "`reduce_scatter_tensor(out, x)`": shares,
        "`all_to_all_single(out, x)`": lambda: all_to_all(mine),
        "`send(x, dst=1)`, `recv(x, src=0)`": exchanged,
        "`all_gather_object(objects, x)`, `broadcast_object_list(objects)`": lambda: (
            objects(),
            some_objects(),
            sent_objects(),
        ),
        "`barrier()`, `monitored_barrier(timeout)`": barrier,
        "`new_group([0, 2])`": groups,
        "`isend`, `irecv`, `batch_isend_irecv`": by_request,
        "`recv(x)` from any rank, and its source": from_anybody,
    }


def of_horovod() -> dict:
    """Rows of docs/operations/horovod.md."""
    return {
        "`hvd.init()`, `hvd.shutdown()`": the_world,
        "`hvd.rank() size() local_rank() local_size()`": the_world,
        "`hvd.cross_rank() cross_size()`": the_world,
        "`hvd.allreduce(x, op=hvd.Average)`": lambda: equal(
            cc.allreduce(mine, op=cc.MEAN), total / 2
        ),
        "`hvd.allreduce_(x)`": lambda: in_place(cc.allreduce, mine, op=cc.SUM),
        "`hvd.allreduce_async(x)`, `synchronize(handle)`, `poll(handle)`": request,
        "`hvd.allreduce(x, prescale_factor=a, postscale_factor=b)`": lambda: equal(
            cc.allreduce(mine, op=cc.SUM, prescale=2, postscale=0.25), total / 2
        ),
        "`hvd.allreduce(integers)`": lambda: equal(
            cc.allreduce(3 * comm.rank, op=cc.INTEGER_MEAN), 1
        ),
        "`hvd.grouped_allreduce`, `grouped_allgather`, `grouped_reducescatter`": lambda: (
            grouped(),
            equal(cc.grouped_allgather([[comm.rank]])[0], [0, 1]),
            equal(cc.grouped_reduce_scatter([mine], op=cc.SUM)[0].size, 2),
        ),
        "`hvd.allgather`, `broadcast`, `alltoall`, `reducescatter`, `barrier`": lambda: (
            everything(),
            broadcast(),
            all_to_all(mine),
            equal(cc.alltoall(mine, counts=[1, 3], return_counts=True)[1], [1 + 2 * comm.rank] * 2),
            shares(),
        ),
        "`hvd.broadcast(x, root_rank=0)`": beginning_alike,
        "`hvd.broadcast_object`, `allgather_object`": objects,
        "`hvd.ProcessSet([0, 2])`": groups,
        "`hvd.DistributedOptimizer`, `broadcast_parameters`, `broadcast_optimizer_state`": (
            beginning_alike
        ),
        "`hvd.Compression.none`, `Compression.fp16`": lambda: (same_as_none(), halved()),
        "`hvd.join()`": joined,
        "`hvd.Adasum`": missing("Adasum", "ADASUM"),
        "`hvd.SyncBatchNorm`": None,
        "`hvd.elastic`": None,
        "`hvd.callbacks` of Keras": missing("callbacks"),
        "`hvd.is_initialized()`": lambda: equal(cc.is_initialized(), True),
        "names of tensors, fusion buffer, cycle time": None,
        "`horovodrun`": None,
    }


def of_mpi4py() -> dict:
    """Rows of docs/operations/mpi4py.md."""
    from mpi4py import MPI

    def the_same_processes() -> None:
        assert cc.init(MPI.COMM_WORLD) is comm
        assert cc.init([0, 1]) is comm

    def their_own() -> None:
        with cc.from_mpi(MPI.COMM_WORLD) as ours:
            assert (ours.rank, ours.size) == (comm.rank, comm.size)
            assert ours.to_mpi().Get_rank() == comm.rank

    def other_counts() -> None:
        equal(comm.alltoall(mine, counts=[1, 3]).shape, [2 if comm.rank == 0 else 6])

    def scatter_counts() -> None:
        rows = mine if comm.rank == 0 else None
        equal(comm.scatter(rows, 0, counts=[1, 3]).shape, [1 if comm.rank == 0 else 3])

    return {
        "`MPI.COMM_WORLD`": the_same_processes,
        "a communicator of your own": their_own,
        "`Get_rank()`, `Get_size()`": the_world,
        "`Allreduce(x, out, MPI.SUM)`": lambda: in_place(comm.allreduce, mine, op=cc.SUM),
        "`Allreduce(MPI.IN_PLACE, x, MPI.SUM)`": lambda: in_place(comm.allreduce, mine, op=cc.SUM),
        "`allreduce(number)`": lambda: equal(comm.allreduce(comm.rank + 1, op=cc.SUM).item(), 3),
        "`Reduce(x, out, MPI.MAX, 0)`": lambda: on_root(
            comm.reduce(mine, 0, op=cc.MAX), np.arange(4.0) + 10
        ),
        "`MPI.SUM MIN MAX PROD`": lambda: equal(comm.allreduce(2.0, op=cc.PRODUCT), 4.0),
        "`MPI.LAND LOR LXOR`, `BAND BOR BXOR`": lambda: equal(
            [
                comm.allreduce(2 * comm.rank, op=op)
                for op in (cc.LOGICAL_AND, cc.LOGICAL_OR, cc.LOGICAL_XOR)
                + (cc.BITWISE_AND, cc.BITWISE_OR, cc.BITWISE_XOR)
            ],
            [0, 1, 1, 0, 2, 2],
        ),
        "`allreduce((number, rank), MPI.MINLOC)`, `MAXLOC`": lambda: equal(
            comm.allreduce((-comm.rank, comm.rank), op=cc.MINLOC), [-1, 1]
        ),
        "`Op.Create(f)`": lambda: equal(
            comm.allreduce(comm.rank + 1, op=cc.operation(lambda a, b: a + b)), 3
        ),
        "`Bcast(x, 0)`": broadcast,
        "`bcast(obj, 0)`, `allgather(obj)`": objects,
        "`gather(obj)`, `scatter(objs)`": some_objects,
        "`alltoall(objs)`, `reduce(obj)`": missing("alltoall_object"),
        "`Gather`, `Gatherv`": gathered,
        "`Allgather`, `Allgatherv`": lambda: (everything(), uneven()),
        "`Scatter`": scattered,
        "`Scatterv`": scatter_counts,
        "`Alltoall`": lambda: all_to_all(mine),
        "`Alltoallv`": other_counts,
        "`Reduce_scatter_block`, `Reduce_scatter`": shares,
        "`Scan(x, out, MPI.SUM)`, `Exscan`": scans,
        "`Alltoallw`": missing("alltoallw"),
        "neighbourhood collectives": lambda: equal(
            comm.neighbours("ring").average(float(comm.rank)), 0.5
        ),
        "`Iallreduce`, `Ibcast`, ...; `req.Wait()`, `req.Test()`": request,
        "`Send`, `Recv`": one_way,
        "`Isend`, `Irecv`": by_request,
        "`ANY_SOURCE`, `ANY_TAG`, `Status`": from_anybody,
        "`Sendrecv`": lambda: equal(
            comm.sendrecv(mine, other, other), mine + 10 * (other - comm.rank)
        ),
        "`Probe`": probed,
        "`send(obj, dest)`, `recv(source)`": sent_objects,
        "`Split(color, key)`": split,
        "`Split_type(MPI.COMM_TYPE_SHARED)`": lambda: equal(
            [comm.local_rank, comm.local_size, comm.node_rank], [comm.rank, 2, 0]
        ),
        "`Create_group`, `Dup`": groups,
        "`Barrier()`": barrier,
        "`Win.Allocate_shared`": lambda: equal(comm.shared_empty(3, "float32"), np.zeros(3)),
        "`Allreduce_init`, `Bcast_init`, `Allgather_init`, `Reduce_scatter_init`, "
        "`Start`": lambda: (
            equal(comm.plan_allreduce(mine.copy())(), total / 2),
            equal(comm.plan_broadcast(mine.copy(), 0)(), np.arange(4.0)),
            equal(comm.plan_allgather(np.full(1, comm.rank))(), [0, 1]),
            equal(comm.plan_reduce_scatter(np.ones(2), op=cc.SUM)(), [2]),
        ),
        "one-sided operations, files, `Spawn`, Cartesian topologies": None,
        "`Abort()`": None,
    }


TABLES = {
    "torch": ("from-torch-distributed.md", "`torch.distributed`", of_torch),
    "horovod": ("operations/horovod.md", "Horovod", of_horovod),
    "mpi4py": ("operations/mpi4py.md", "mpi4py", of_mpi4py),
}


def main(subject: str) -> None:
    page, head, make = TABLES[subject]
    checks = make()
    written = rows(page, head)
    assert sorted(written) == sorted(checks), set(written) ^ set(checks)
    for row, run in checks.items():
        try:
            if run is not None:
                run()
        except Exception as error:
            raise AssertionError(f"{page}: {row}") from error
    if comm.rank == 0:
        print(f"{len(checks)} rows")


if __name__ == "__main__":
    main(sys.argv[1])
