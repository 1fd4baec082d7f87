"""torch.distributed backend: process groups over communicators.

    torch.distributed.init_process_group("unisono")

torch.distributed calls the methods of a group as Python's, DDP and functional collectives from C++
by the same names. Each looks at its tensors and at the options, and hands what has to be done to
the group's line (`strategies.torch.work_queue`)::

    all_reduce(t)                  here, complete when it returns
    all_reduce(t, async_op=True)   in line: returns a `Work` at once
    a bucket of DDP                here, where all ranks share a node: there it would only take the
                                   core from the backward pass (and `strategies.torch.ddp_buckets`
                                   saves the copies); else in line, beside it

All groups, also the world's, have communicators of their own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

import collectives as cc
from collectives import extend
from strategies.torch import operations, p2p
from strategies.torch.ddp_buckets import DdpBuckets, is_ddp_bucket, starts_rebuild
from strategies.torch.operations import reduction
from strategies.torch.rendezvous import timeout_seconds
from strategies.torch.work import DONE, CompletedWork, PendingWork, keep_join_works, translated
from strategies.torch.work_queue import WorkQueue

__all__ = ["UnisonoGroup", "create"]

Tensors = Sequence[torch.Tensor]

_HOST = torch.device("cpu")

# Tags of `Communicator.group` end here.
_TAGS = 1 << 14


class _Default:
    """Options of a call that gives none, as those of PyTorch."""

    asyncOp = True
    reduceOp = distributed.ReduceOp(distributed.ReduceOp.SUM)
    rootRank = 0
    timeout = timedelta(milliseconds=-1)  # by which PyTorch means none


_DEFAULT = _Default()


def create(options: Any) -> UnisonoGroup:
    """Make a process group; *collective*: its ranks alone.

    Args:
        options: as torch.distributed gives them to a backend.

    Raises:
        LaunchError: the processes were started by something else than MPI's launcher.
        ValueError: torch.distributed numbers them in another way than MPI does.
    """
    whole = cc.init()
    rank, size = options.group_rank, options.group_size
    ranks = list(options.global_ranks_in_group) or list(range(size))
    if whole.size == 1 < size:
        raise ValueError(
            f"init_process_group: expected {size} ranks, but this process is a world of MPI of its "
            "own; instead of torch.multiprocessing.spawn, or torchrun, start the program with "
            f"`mpirun -np {size} python train.py`, which calls the function of a rank once"
        )
    # PyTorch lists no ranks for the group of all ranks.
    incomplete = not options.global_ranks_in_group and size != whole.size
    if incomplete or len(ranks) != size or max(ranks) >= whole.size or ranks[rank] != whole.rank:
        raise ValueError(
            "init_process_group: ranks are not those of MPI, expected this process to be rank "
            f"{whole.rank} of {whole.size}, got {ranks[rank]} of ranks {ranks}; start with "
            "`mpirun -np N python train.py`, and leave rank and world_size away"
        )
    keep_join_works()
    tag = zlib.crc32(str(options.group_id).encode()) % _TAGS
    limit = timeout_seconds(options.timeout, whole)
    try:
        comm = whole.group(ranks, tag=tag)
        assert comm is not None
        comm.barrier(timeout=limit)  # ranks meet by messages, before another thread may take over
    except cc.CollectiveTimeout as error:
        raise translated(error) from error.__cause__
    return UnisonoGroup(comm, options.store, limit)


@extend.known_as("torch.distributed")
class UnisonoGroup(distributed.ProcessGroup):
    """A process group of torch.distributed over a communicator.

    Args:
        comm: its ranks; the group closes it.
        store: by which torch.distributed tells its ranks what it pleases.
        limit: seconds that an operation may take.
    """

    # What torch.distributed asks of any backend: whether it does these in a way of its own.
    supports_splitting = supports_coalescing = supports_shrinking = False

    # C++ looks up methods by these names, also those in camel case.
    def __init__(self, comm: cc.Communicator, store: distributed.Store, limit: float) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm = comm
        self._store = store
        self._limit = limit
        self._line = WorkQueue()
        self._buckets = DdpBuckets(comm) if comm.size > 1 and comm.num_nodes == 1 else None
        self._name = self._description = ""
        # Without threads all is carried out as it is called.
        self._threads = comm.size > 1 and extend.supports_threads(comm)

    def setGroupName(self, name: str) -> None:
        """Keep the name that torch.distributed gives."""
        self._name = name

    def getGroupName(self) -> str:
        """Return it."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """Keep the description that torch.distributed gives."""
        self._description = description

    def getGroupDesc(self) -> str:
        """Return it."""
        return self._description

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return "unisono"

    def getRank(self) -> int:
        """Return this rank in the group."""
        return self.comm.rank

    def getSize(self) -> int:
        """Return the number of ranks."""
        return self.comm.size

    def get_group_store(self) -> distributed.Store:
        """Return the group's store."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [_HOST]

    def _get_backend(self, device: torch.device) -> UnisonoGroup:
        return self

    def __repr__(self) -> str:
        return f"UnisonoGroup({self._name or 'no name'}, {self.comm!r})"

    def allreduce(self, tensors: Tensors, opts: Any = _DEFAULT) -> distributed.Work:
        """Reduce a tensor over all ranks, in place."""
        how = reduction(opts.reduceOp)
        run = partial(operations.allreduce, self.comm, tensors, how, self._limit)
        if not opts.asyncOp:
            self._line.run(run)
            return DONE
        if is_ddp_bucket(tensors[0], extend.caller()):
            return self._reduce_bucket(tensors[0], how)
        return self._start("allreduce", run, opts, tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = _DEFAULT) -> distributed.Work:
        """Reduce several tensors over all ranks, in place."""
        run = partial(
            operations.allreduce, self.comm, tensors, reduction(opts.reduceOp), self._limit
        )
        return self._start("allreduce_coalesced", run, opts, tensors)

    def broadcast(self, tensors: Tensors, opts: Any = _DEFAULT) -> distributed.Work:
        """Give every rank the root's tensor."""
        if self._buckets is not None and starts_rebuild(extend.caller()):
            self._buckets.expect(tensors[0].numel())
        run = partial(operations.broadcast, self.comm, tensors[0], opts.rootRank, self._limit)
        return self._start("broadcast", run, opts, tensors)

    def reduce(self, tensors: Tensors, opts: Any = _DEFAULT) -> distributed.Work:
        """Reduce a tensor over all ranks, in place on the root."""
        op = reduction(opts.reduceOp)
        run = partial(operations.reduce, self.comm, tensors[0], opts.rootRank, op, self._limit)
        return self._start("reduce", run, opts, tensors)

    def allgather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = _DEFAULT
    ) -> distributed.Work:
        """Give every rank the tensors of all ranks, which may differ in shape."""
        run = partial(operations.allgather, self.comm, outputs[0], inputs[0], self._limit)
        return self._start("allgather", run, opts, outputs[0])

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = _DEFAULT
    ) -> distributed.Work:
        """Join the tensors of all ranks in one."""
        run = partial(operations.allgather, self.comm, [output], tensor, self._limit)
        return self._start("all_gather_single", run, opts, [output])

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = _DEFAULT
    ) -> distributed.Work:
        """Do this for several tensors."""
        pairs = [([out], tensor) for out, tensor in zip(outputs, inputs, strict=True)]
        run = partial(operations.allgather_each, self.comm, pairs, self._limit)
        return self._start("all_gather_single_coalesced", run, opts, outputs)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = _DEFAULT
    ) -> distributed.Work:
        """Give every rank several tensors of all ranks: `outputs[rank][number]`."""
        pairs = list(zip(zip(*outputs, strict=True), inputs, strict=True))
        run = partial(operations.allgather_each, self.comm, pairs, self._limit)
        return self._start("allgather_coalesced", run, opts, [t for row in outputs for t in row])

    def gather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = _DEFAULT
    ) -> distributed.Work:
        """Give the root the tensors of all ranks."""
        found = outputs[0] if outputs else []
        run = partial(operations.gather, self.comm, found, inputs[0], opts.rootRank, self._limit)
        return self._start("gather", run, opts, found)

    def scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = _DEFAULT
    ) -> distributed.Work:
        """Give every rank one of the root's tensors."""
        parts = inputs[0] if inputs else []
        run = partial(operations.scatter, self.comm, outputs[0], parts, opts.rootRank, self._limit)
        return self._start("scatter", run, opts, outputs)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = _DEFAULT
    ) -> distributed.Work:
        """Reduce tensors over all ranks, and give each rank one of them."""
        op = reduction(opts.reduceOp)
        run = partial(operations.reduce_scatter, self.comm, outputs[0], inputs[0], op, self._limit)
        return self._start("reduce_scatter", run, opts, outputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = _DEFAULT
    ) -> distributed.Work:
        """Reduce a tensor over all ranks, and give each rank an equal share."""
        op = reduction(opts.reduceOp)
        run = partial(operations.reduce_scatter, self.comm, output, [tensor], op, self._limit)
        return self._start("reduce_scatter_single", run, opts, [output])

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = _DEFAULT
    ) -> distributed.Work:
        """Do this for several tensors."""
        op = reduction(opts.reduceOp)
        pairs = list(zip(outputs, inputs, strict=True))
        run = partial(operations.reduce_scatter_each, self.comm, pairs, op, self._limit)
        return self._start("reduce_scatter_single_coalesced", run, opts, outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = _DEFAULT) -> distributed.Work:
        """Give every rank one of this rank's tensors, and take one of each."""
        run = partial(operations.alltoall, self.comm, outputs, inputs, self._limit)
        return self._start("alltoall", run, opts, outputs)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_sizes: Sequence[int],
        input_sizes: Sequence[int], opts: Any = _DEFAULT,
    ) -> distributed.Work:  # fmt: skip
        """Give every rank some rows of this rank's tensor, and join what all ranks give."""
        sizes = list(output_sizes), list(input_sizes)
        run = partial(operations.alltoall_rows, self.comm, output, tensor, *sizes, self._limit)
        return self._start("all_to_all_single", run, opts, [output])

    def send(self, tensors: Tensors, dest: int, tag: int = 0) -> distributed.Work:
        """Start sending a tensor to another rank."""
        message = self._message("send", tensors[0], dest, tag)
        return PendingWork(message, "send", tensors)

    def recv(self, tensors: Tensors, source: int | None, tag: int = 0) -> distributed.Work:
        """Start receiving a tensor from another rank."""
        message = self._message("recv", tensors[0], source, tag)
        return PendingWork(message, "recv", tensors)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> distributed.Work:
        """Start receiving a tensor from whichever rank sends one."""
        return self.recv(tensors, None, tag)

    def barrier(self, opts: Any = _DEFAULT) -> distributed.Work:
        """Return when every rank has called this."""
        told = opts.timeout.total_seconds()
        limit = told if told > 0 else self._limit
        return self._start("barrier", partial(self.comm.barrier, timeout=limit), opts, ())

    def set_timeout(self, timeout: timedelta) -> None:
        """Let operations that begin from now on take so long."""
        self._limit = timeout.total_seconds()

    def average(self, bucket: torch.Tensor, compression: cc.Compression) -> distributed.Work:
        """Average a bucket of DDP over all ranks, in place."""
        return self._reduce_bucket(bucket, operations.MEAN, compression)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when every rank has called this, or name those that have not, on all ranks.

        Args:
            timeout: of this call; that of the group if None.
            wait_all_ranks: no difference: an error names all ranks that this one waits for, on one
                node all that are missing, else those whose messages are.
        """
        limit = self._limit if timeout is None else timeout.total_seconds()
        self._line.run(partial(self.comm.barrier, timeout=limit))

    # As older programs call them.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def shutdown(self) -> None:
        """Close the group's communicator, unless an operation still uses it; *collective*."""
        if self._line.close():
            self.comm.close()

    def abort(self) -> None:
        """Take no more operations, without waiting for other ranks."""
        self._line.close(0.0)

    def _message(
        self, operation: str, tensor: torch.Tensor, peer: int | None, tag: int
    ) -> p2p.MessageWork:
        """Start sending or receiving a tensor, unless the group has ended, also by an error."""
        begin: Any = p2p.send if operation == "send" else p2p.receive
        try:
            extend.check_usable(self.comm, operation)
            message: p2p.MessageWork = begin(self.comm, tensor, peer, tag, self._limit)
        except Exception as error:
            raise translated(error) from error.__cause__
        return message

    def _start(
        self, operation: str, run: Callable[[], Any], opts: Any, results: Tensors
    ) -> distributed.Work:
        """Carry out an operation, or let it be carried out."""
        if not opts.asyncOp:
            self._line.run(run)
            return DONE
        if self._threads:
            return PendingWork(self._line.submit(run), operation, results)
        self._line.run(run)
        return CompletedWork(results)

    def _reduce_bucket(
        self, tensor: torch.Tensor, how: operations.Reduction, codec: cc.Compression = cc.NONE
    ) -> distributed.Work:
        """Reduce a bucket of DDP."""
        if self._buckets is not None and not tensor.is_sparse:
            self._line.run(partial(self._buckets.allreduce, tensor, how, self._limit, codec))
            return CompletedWork([tensor])
        run = partial(operations.allreduce, self.comm, [tensor], how, self._limit, codec)
        if not self._threads:
            self._line.run(run)
            return CompletedWork([tensor])
        return PendingWork(self._line.submit(run), "allreduce", [tensor])
