"""torch.distributed backend: process groups over communicators.

    torch.distributed.init_process_group("unisono")

torch.distributed calls the methods of a group from Python. DDP and functional collectives call the
same methods from C++. Each method checks its tensors and options, and passes the operation to the
group's queue (`strategies.torch.work_queue`)::

    all_reduce(t)                  in this thread, complete on return
    all_reduce(t, async_op=True)   queued: returns a `Work` at once
    a bucket of DDP                in this thread if all ranks share a node, because a queue's
                                   thread would take the core from the backward pass (and
                                   `strategies.torch.ddp_buckets` saves copies); otherwise queued

All groups, including the world's, have their own communicators.
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
from strategies.torch import dispatcher, operations, p2p
from strategies.torch.ddp_buckets import DdpBuckets, is_ddp_bucket, starts_rebuild
from strategies.torch.operations import reduction
from strategies.torch.rendezvous import timeout_seconds
from strategies.torch.work import DONE, CompletedWork, PendingWork, keep_join_works, translated
from strategies.torch.work_queue import WorkQueue

__all__ = ["UnisonoGroup", "create"]

Tensors = Sequence[torch.Tensor]

_HOST = torch.device("cpu")

# Exclusive limit of the tags of `Communicator.group`.
_TAGS = 1 << 14


class _Default:
    """PyTorch's default options."""

    # As in PyTorch's option structures, whose `asyncOp` is true by default.
    asyncOp = True
    reduceOp = distributed.ReduceOp(distributed.ReduceOp.SUM)
    rootRank = 0
    timeout = timedelta(milliseconds=-1)  # PyTorch's value for no timeout


_DEFAULT = _Default()


def _is_asynchronous(opts: Any) -> bool:
    """Return whether the caller waits for the `Work`; before the option existed, it always does."""
    asynchronous: bool = getattr(opts, "asyncOp", True)
    return asynchronous


# Seconds that `shutdown` waits for queued operations, which other ranks may need.
_CLOSE_SECONDS = 5.0


def create(options: Any) -> UnisonoGroup:
    """Make a process group; *collective* over its ranks alone.

    Args:
        options: options that torch.distributed passes to a backend.

    Raises:
        LaunchError: MPI's launcher did not start the processes.
        ValueError: torch.distributed and MPI number the processes differently.
    """
    whole = cc.init()
    rank, size = options.group_rank, options.group_size
    # PyTorch passes ranks of the world in the order of the group.
    ranks = list(options.global_ranks_in_group) or list(range(size))
    # Processes of `spawn` are one world of MPI each.
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
            "`mpirun -np N python train.py`, without rank and world_size"
        )
    keep_join_works()
    dispatcher.install()
    # Groups of the same ranks may be created at once; the tag keeps their messages apart.
    tag = zlib.crc32(str(options.group_id).encode()) % _TAGS
    limit = timeout_seconds(options.timeout, whole)
    try:
        comm = whole.group(ranks, tag=tag)
        assert comm is not None
        comm.barrier(timeout=limit)  # exchange the first messages before another thread may do it
    except cc.CollectiveTimeout as error:
        raise translated(error) from error.__cause__
    return UnisonoGroup(comm, options.store, limit)


@extend.known_as("torch.distributed")
@dispatcher.observable
class UnisonoGroup(distributed.ProcessGroup):
    """A process group of torch.distributed over a communicator.

    Args:
        comm: communicator of the ranks; the group closes it.
        store: key-value store of torch.distributed for the group.
        limit: timeout of an operation in seconds.
    """

    # torch.distributed reads these: the backend has no own implementation of splitting etc.
    supports_splitting = supports_coalescing = supports_shrinking = False

    # C++ looks up methods by these names, also those in camel case.
    def __init__(self, comm: cc.Communicator, store: distributed.Store, limit: float) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm = comm
        self._store = store
        self._limit = limit
        self._queue = WorkQueue()
        # Shared memory exists on one node only.
        self._buckets = DdpBuckets(comm) if comm.size > 1 and comm.num_nodes == 1 else None
        self._name = self._description = ""
        self._devices = [_HOST]
        # Without threads, every operation runs in the call.
        self._threads = comm.size > 1 and extend.supports_threads(comm)

    def setGroupName(self, name: str) -> None:
        """Set the name."""
        self._name = name

    def getGroupName(self) -> str:
        """Return the name."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """Set the description."""
        self._description = description

    def getGroupDesc(self) -> str:
        """Return the description."""
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

    def add_backend(self, device: torch.device, kind: Any, backend: Any) -> None:
        """Use a backend of PyTorch for tensors on another device."""
        self._register_backend(device, kind, backend)
        self._devices.append(device)

    @property
    def _device_types(self) -> list[torch.device]:
        return self._devices

    def _get_backend(self, device: torch.device) -> Any:
        others = [other.type for other in self._devices if other != _HOST]
        return super()._get_backend(device) if device.type in others else self

    def __repr__(self) -> str:
        return f"UnisonoGroup({self._name or 'no name'}, {self.comm!r})"

    # `opts` may be one of several option classes; all have the fields of `_Default`.
    def allreduce(self, tensors: Tensors, opts: Any = _DEFAULT) -> distributed.Work:
        """Reduce a tensor over all ranks, in place."""
        how = reduction(opts.reduceOp)
        run = partial(operations.allreduce, self.comm, tensors, how, self._limit)
        # A synchronous call gets no `Work` of its own, so that a small call stays cheap.
        if not _is_asynchronous(opts):
            self._queue.run(run)
            return DONE
        # The caller's frame decides, because DDP calls this method like any program.
        if is_ddp_bucket(tensors[0], dispatcher.calling_frame()):
            return self._reduce_bucket(tensors[0], how)
        return self._start("allreduce", run, opts, tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = _DEFAULT) -> distributed.Work:
        """Reduce several tensors over all ranks, in place."""
        run = partial(
            operations.allreduce, self.comm, tensors, reduction(opts.reduceOp), self._limit
        )
        return self._start("allreduce_coalesced", run, opts, tensors)

    def broadcast(self, tensors: Tensors, opts: Any = _DEFAULT) -> distributed.Work:
        """Send the root's tensor to every rank."""
        # The broadcast before the second forward pass announces the number of final buckets.
        if self._buckets is not None and starts_rebuild(dispatcher.calling_frame()):
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
        """Gather the tensors of all ranks, which may differ in shape, on every rank."""
        run = partial(operations.allgather, self.comm, outputs[0], inputs[0], self._limit)
        # PyTorch's interface has a list per device, and a host is one device.
        return self._start("allgather", run, opts, outputs[0])

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = _DEFAULT
    ) -> distributed.Work:
        """Gather the tensors of all ranks into one tensor."""
        run = partial(operations.allgather, self.comm, [output], tensor, self._limit)
        return self._start("all_gather_single", run, opts, [output])

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = _DEFAULT
    ) -> distributed.Work:
        """Run `all_gather_single` for several tensors."""
        pairs = [([out], tensor) for out, tensor in zip(outputs, inputs, strict=True)]
        run = partial(operations.allgather_each, self.comm, pairs, self._limit)
        return self._start("all_gather_single_coalesced", run, opts, outputs)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = _DEFAULT
    ) -> distributed.Work:
        """Gather several tensors of all ranks on every rank: `outputs[rank][number]`."""
        # `outputs[rank][number]`, but the operation fills the outputs of one tensor at a time.
        pairs = list(zip(zip(*outputs, strict=True), inputs, strict=True))
        run = partial(operations.allgather_each, self.comm, pairs, self._limit)
        return self._start("allgather_coalesced", run, opts, [t for row in outputs for t in row])

    def gather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = _DEFAULT
    ) -> distributed.Work:
        """Gather the tensors of all ranks on the root."""
        found = outputs[0] if outputs else []
        run = partial(operations.gather, self.comm, found, inputs[0], opts.rootRank, self._limit)
        return self._start("gather", run, opts, found)

    def scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = _DEFAULT
    ) -> distributed.Work:
        """Send one of the root's tensors to each rank."""
        parts = inputs[0] if inputs else []
        run = partial(operations.scatter, self.comm, outputs[0], parts, opts.rootRank, self._limit)
        return self._start("scatter", run, opts, outputs)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = _DEFAULT
    ) -> distributed.Work:
        """Reduce tensors over all ranks; each rank gets one of them."""
        op = reduction(opts.reduceOp)
        run = partial(operations.reduce_scatter, self.comm, outputs[0], inputs[0], op, self._limit)
        return self._start("reduce_scatter", run, opts, outputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = _DEFAULT
    ) -> distributed.Work:
        """Reduce a tensor over all ranks; each rank gets an equal share."""
        op = reduction(opts.reduceOp)
        run = partial(operations.reduce_scatter, self.comm, output, [tensor], op, self._limit)
        return self._start("reduce_scatter_single", run, opts, [output])

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = _DEFAULT
    ) -> distributed.Work:
        """Run `reduce_scatter_single` for several tensors."""
        op = reduction(opts.reduceOp)
        pairs = list(zip(outputs, inputs, strict=True))
        run = partial(operations.reduce_scatter_each, self.comm, pairs, op, self._limit)
        return self._start("reduce_scatter_single_coalesced", run, opts, outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = _DEFAULT) -> distributed.Work:
        """Send one tensor to each rank, and receive one from each."""
        run = partial(operations.alltoall, self.comm, outputs, inputs, self._limit)
        return self._start("alltoall", run, opts, outputs)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_sizes: Sequence[int],
        input_sizes: Sequence[int], opts: Any = _DEFAULT,
    ) -> distributed.Work:  # fmt: skip
        """Send rows of a tensor to each rank, and concatenate the received rows."""
        sizes = list(output_sizes), list(input_sizes)
        run = partial(operations.alltoall_rows, self.comm, output, tensor, *sizes, self._limit)
        return self._start("all_to_all_single", run, opts, [output])

    def send(self, tensors: Tensors, dest: int, tag: int = 0) -> distributed.Work:
        """Start sending a tensor to another rank."""
        # Point-to-point messages do not use the queue: they may complete in any order.
        message = self._message("send", tensors[0], dest, tag)
        return PendingWork(message, "send", tensors)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> distributed.Work:
        """Start receiving a tensor from another rank."""
        message = self._message("recv", tensors[0], source, tag)
        return PendingWork(message, "recv", tensors)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> distributed.Work:
        """Start receiving a tensor from any rank."""
        message = self._message("recv", tensors[0], None, tag)
        return PendingWork(message, "recv", tensors)

    def barrier(self, opts: Any = _DEFAULT) -> distributed.Work:
        """Wait until every rank has called this."""
        told = opts.timeout.total_seconds()
        limit = told if told > 0 else self._limit
        return self._start("barrier", partial(self.comm.barrier, timeout=limit), opts, ())

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations that begin from now on."""
        self._limit = timeout.total_seconds()

    def average(self, bucket: torch.Tensor, compression: cc.Compression) -> distributed.Work:
        """Average a bucket of DDP over all ranks, in place."""
        return self._reduce_bucket(bucket, operations.MEAN, compression)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until every rank has called this, or raise on all ranks and name missing ranks.

        Args:
            timeout: timeout of this call; None uses that of the group.
            wait_all_ranks: ignored: an error names all ranks that this one waits for. On one node
                these are all missing ranks, otherwise the ranks whose messages are missing.
        """
        limit = self._limit if timeout is None else timeout.total_seconds()
        # By the queue, so that earlier operations of this rank are complete before.
        self._queue.run(partial(self.comm.barrier, timeout=limit))

    # Names in older versions of PyTorch.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def shutdown(self) -> None:
        """Close the group's communicator, unless an operation still uses it; *collective*."""
        # The communicator stays open if an operation still uses its memory.
        if self._queue.stop(_CLOSE_SECONDS):
            self.comm.close()
        super().shutdown()  # of other devices' backends

    def abort(self) -> None:
        """Reject further operations, without waiting for other ranks."""
        self._queue.stop(0)
        super().abort()

    def _message(
        self, operation: str, tensor: torch.Tensor, peer: int | None, tag: int
    ) -> p2p.MessageWork:
        """Start sending or receiving a tensor; raise if the group is closed or has failed."""
        begin: Any = p2p.send if operation == "send" else p2p.receive
        try:
            # A message to a failed group would only end by its timeout.
            extend.check_usable(self.comm, operation)
            message: p2p.MessageWork = begin(self.comm, tensor, peer, tag, self._limit)
        except Exception as error:
            raise translated(error) from error.__cause__
        return message

    # `results` keeps the tensors alive until the operation has finished.
    def _start(
        self, operation: str, run: Callable[[], Any], opts: Any, results: Tensors
    ) -> distributed.Work:
        """Run an operation, or queue it if it is asynchronous."""
        if not _is_asynchronous(opts):
            self._queue.run(run)
            return DONE
        if self._threads:
            return PendingWork(self._queue.submit(run), operation, results)
        # Without thread support of MPI it completes here, in the same order on all ranks.
        self._queue.run(run)
        return CompletedWork(results)

    def _reduce_bucket(
        self, tensor: torch.Tensor, how: operations.Reduction, codec: cc.Compression = cc.NONE
    ) -> distributed.Work:
        """Reduce a bucket of DDP."""
        # All ranks share a node: a thread of the queue would take the core of the backward pass.
        if self._buckets is not None and not tensor.is_sparse:
            self._queue.run(partial(self._buckets.allreduce, tensor, how, self._limit, codec))
            return CompletedWork([tensor])
        run = partial(operations.allreduce, self.comm, [tensor], how, self._limit, codec)
        if not self._threads:
            self._queue.run(run)
            return CompletedWork([tensor])
        return PendingWork(self._queue.submit(run), "allreduce", [tensor])
