"""Node engine: collectives of one node through shared memory, without messages.

Each rank owns two slots of a segment and a header with two numbers: up to which round its slot is
filled, and up to which round its result is ready. Everything else follows from these (see
`collectives.node.reduce_kernels`, which does the work).

    small, one shot                          larger, pipelined, for 2 ranks
    (one wait, everybody adds everything)    (chunk a belongs to rank 0, b to rank 1)

    rank 0            rank 1                 rank 0                     rank 1
    x -> slot 0       y -> slot 1            b0 -> slot 0               a1 -> slot 1
    filled            filled                 filled                     filled
    x + slot 1        slot 0 + y             a0 + slot 1 -> slot 0      slot 0 + b1 -> slot 1
                                             ready (next b0 is there)   ready
                                             take b from slot 1         take a from slot 0

    arrays from `shared_empty`: rank 0 adds chunk a of both arrays and writes it to both, rank 1
    chunk b; nothing is copied.

Small is what has at most 8 KiB, or 64 KiB where ranks outnumber the cores; of two ranks 256 KiB.
More than two ranks read their own array in their slot, too: the sum, in place, would replace it
before its turn.

Every call carries a hash of its description, compared by all ranks as they meet, for free.

Whatever is moved as it is, by a broadcast or an all-gather, passes through the slots in parts of
32 KiB: others read each while its rank puts the next one.

Cost per rank, S bytes, P ranks: one shot writes S and reads P S; pipelined reads each part of its
chunk once and moves 2 S (P - 1)/P through the segment; shared reads and writes S in all. One wait,
2 S / slot waits, two waits. Scratch: two slots per rank in the segment.

Order: rank 0, 1, 2, ... for every element; the same bits on all ranks and in every run.

Sources: S. Jain et al., "Framework for scalable intra-node collective operations using shared
memory", SC18, section IV; J. Peng et al., "Optimizing MPI collectives on shared memory
multi-cores", SC23, section 3.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collectives.arrays.device import is_half
from collectives.arrays.host_arrays import Array, address
from collectives.arrays.reduction import Op
from collectives.core import topology
from collectives.core.settings import Stores
from collectives.kernels import machine_code
from collectives.kernels.loops import loops, reversed_loop, reversed_name
from collectives.kernels.loops import names as loop_names
from collectives.node import kernel_selection, peer_watch, segment
from collectives.node.control_block import (
    COPY,
    DONE,
    FAR,
    HEADER,
    MAX_EVENTS,
    NEAR,
    NOTED,
    PART_BYTES,
    PLAIN,
    STATUS_ENTRY,
    STREAMING,
    TILE_BYTES,
    WAITING,
    WANT_ALL,
    WANT_NONE,
    WANT_OWN,
    Block,
    State,
    Trace,
)
from collectives.node.peer_watch import PeerWatch
from collectives.node.shared_arrays import SharedArrays
from collectives.transport.backoff import Deadline
from collectives.transport.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Callable

    # Of a block; perhaps also where to note the times of the call, and its number.
    Kernel = Callable[..., int]

__all__ = ["CopyTable", "Engine", "Event", "KernelCall", "compile_ahead", "start"]

# With many ranks a slot grows, so that a rank's piece of it keeps at least 16 KiB, up to 1 MiB.
_PIECE_BYTES = 1 << 14
_MOST_SLOT_BYTES = 1 << 20

# At least, where the node is a part of a group, and its ranks often wait: fewer rounds in which
# they meet. Reduce-scatter and all-gather of 16 MiB, 2 ranks on each of 4 machines that share 2
# cores, slots of 512 KiB / 1 MiB / 4 MiB, in ms: 120 / 84 / 60 (by messages 48, shared arrays 36).
SLOT_BYTES_OF_PART = 1 << 20

_PAGE = 4096

# Polls before a kernel returns: with a core for each rank about 46 us of pauses, then a few
# hundred yields; with fewer cores a rank that spins only keeps the one it waits for from running.
# 8 bytes among 4 ranks on 2 cores, in us: 0 pauses 7.6, 20 8.0, 100 14.5, 1000 135; of 8 ranks 30,
# 32, 67, 308. 20 or 2000 yields instead of 200: 9.1, 6.8; of 8 ranks 42, 42.
_SPINS, _SPINS_CROWDED, _YIELDS = 2000, 20, 200

# Loads a kind of call, which the first rank of a machine compiles.
_ROUNDS = "collectives.node.reduce_kernels"
_kind = functools.partial(machine_code.function, _ROUNDS, arguments=3)

# Parts of other ranks' streams: rank, first byte, byte after the last, and where the bytes go.
CopyTable = Sequence[tuple[int, int, int, int]]

# The fields of a `control_block.EVENT`.
Event = Sequence[int]


def compile_ahead() -> None:
    """Let another process compile the kinds of calls that were never made on this machine."""
    # First what the first calls of most programs do not need.
    machine_code.compile_ahead(
        _ROUNDS, "pipelined", "direct", "shared", "pipelined_copy", "one_shot_copy", "one_shot"
    )


class KernelCall(NamedTuple):
    """A call, ready to run: kernel, block, and the memory that the block points to.

    Attributes:
        kernel: compiled code that takes the address of the block.
        block: a `control_block.Block`.
        keep: arrays whose addresses the block holds.
    """

    kernel: Kernel
    block: Any
    keep: tuple[Array, ...]


def start(transport: Transport, directory: str | None, deadline: Deadline) -> Engine | None:
    """Make the engine of a group of ranks on one node; *collective*.

    Returns:
        None on all ranks where there is no shared memory.
    """
    if transport.size == 1 or directory is None:
        return None
    slot = max(kernel_selection.SLOT_BYTES, min(_MOST_SLOT_BYTES, transport.size * _PIECE_BYTES))
    if transport.parent is not transport:
        slot = max(slot, SLOT_BYTES_OF_PART)
    headers = -(-transport.size * (HEADER.itemsize + STATUS_ENTRY.itemsize) // _PAGE) * _PAGE
    memory = segment.create(transport, headers, 2 * slot, directory, deadline)
    if memory is None:
        return None
    memory[::_PAGE].max()  # mapped now, not while somebody waits, or takes the time of a store
    return Engine(
        transport, memory, headers, slot, peer_watch.start(transport, directory, deadline)
    )


class Engine:
    """The operations of a group of ranks on one node.

    Args:
        transport: the ranks.
        memory: the segment: headers, status entries, then two slots per rank.
        headers: bytes in front of the slots.
        slot: bytes of a slot.
        peers: watches the other ranks.

    Attributes:
        status_entries: the ranks' last calls, shape (size,), dtype `control_block.STATUS_ENTRY`.
        rank: this rank among them.
        size: how many there are.
        driven: how many calls this rank has begun to `run`.
        shared: arrays that are reduced where they are.
        peers: watches the other ranks in waits.
    """

    def __init__(
        self, transport: Transport, memory: Array, headers: int, slot: int, peers: PeerWatch
    ) -> None:
        self.peers = peers
        first = transport.size * HEADER.itemsize
        last = first + transport.size * STATUS_ENTRY.itemsize
        self.status_entries = memory[first:last].view(STATUS_ENTRY)
        self.rank = transport.rank
        self.size = transport.size
        self.driven = 0
        self._memory = memory
        self._slot = slot
        self._state = State()
        self.set_store_mode("auto")
        self._trace: Any = None  # a Trace once tracing has been enabled
        self._events: Any = None  # its events, shape (MAX_EVENTS, 4)
        self._scratch = np.empty(4 * TILE_BYTES, np.uint8)
        self.shared = SharedArrays(self.rank, self.size)
        base = address(memory)
        self._crowded = crowded = self.size > (os.cpu_count() or 1)
        self._template = Block(
            rank=self.rank,
            size=self.size,
            headers=base,
            slots=base + headers,
            slot_bytes=slot,
            state=ctypes.addressof(self._state),
            scratch=address(self._scratch),
            spins=_SPINS_CROWDED if crowded else _SPINS,
            yields=_YIELDS,
            status_entry=address(self.status_entries[self.rank :]),
        )

    def set_store_mode(self, stores: Stores) -> None:
        """Say how this rank hands bytes to others, or let it measure; the others may do otherwise.

        Every rank has its own way, which it may change between two stores: the bits do not.
        """
        self._state.store_forced = stores != "auto"
        self._state.store_mode = STREAMING if stores == "streaming" else PLAIN
        self._state.default_mode[NEAR], self._state.default_mode[FAR] = PLAIN, STREAMING

    @property
    def stores(self) -> tuple[str, int]:
        """How this rank hands bytes over: "plain" or "streaming", and what it rests on.

        The second is how many nanoseconds a plain store takes into a line of the cache that another
        rank has read; 0 if not measured.
        """
        way = "plain" if self._state.store_mode == PLAIN else "streaming"
        return way, 0 if self._state.store_forced else self._state.line_ns

    def agree(self, digest: int, deadline: Deadline) -> bool:
        """Wait for all ranks; tell whether they bring the same digest of their call."""
        return self.publish(None, [], digest, deadline)

    def exchange(self, number: int, digest: int, deadline: Deadline) -> list[int] | None:
        """Return a number of every rank, in rank order; None if the digests differ."""
        numbers = np.empty(self.size, np.int64)
        wanted = [(rank, 0, numbers[rank : rank + 1]) for rank in range(self.size)]
        own = np.array([number])
        alike = self.publish(own, wanted, digest, deadline, own.nbytes)
        return numbers.tolist() if alike else None

    def plan_allreduce(
        self, send: Array, out: Array, op: Op, digest: int, among: int = 0
    ) -> KernelCall:
        """Prepare to reduce flat arrays into `out`, which may be `send`.

        The work may be driven again and again while the arrays live; `among` are the bytes of all
        results of a call of which this is a part.
        """
        place = self.shared.location_of_pair(send, out)
        bounds = np.array(topology.chunk_bounds(send.size, self.size), np.int64)
        halves = is_half(send.dtype)
        kind = kernel_selection.select(send.nbytes, self.size, crowded=self._crowded, halves=halves)
        kind = kind if place is None else "shared"
        has_behind = kind in ("one_shot", "direct") and self.size == 2
        last = reversed_name(send.dtype, op.value) if has_behind else None
        needed = [(_ROUNDS, kind), *loop_names(send.dtype, op.value, of_two=self.size == 2), last]
        machine_code.ensure([name for name in needed if name is not None])
        block = self._block(digest, send, out, op)
        block.count, block.result_group_bytes = send.size, among
        block.bounds, block.want = address(bounds), WANT_ALL
        if place is not None:
            table = self.shared.addresses(place)
            block.table = address(table)
            return KernelCall(_kind(kind), block, (bounds, table))
        if has_behind:
            block.add_reversed = reversed_loop(send.dtype, op.value)
        return KernelCall(_kind(kind), block, (bounds,))

    def plan_reduce(
        self, send: Array, out: Array | None, op: Op, root: int, digest: int
    ) -> KernelCall:
        """As `plan_allreduce`, with the result on the root only; `out` is None elsewhere."""
        bounds = np.array(topology.chunk_bounds(send.size, self.size), np.int64)
        block = self._block(digest, send, out, op)
        block.bounds = address(bounds)
        block.want = WANT_ALL if self.rank == root else WANT_NONE
        return KernelCall(_kind("pipelined"), block, (bounds,))

    def plan_reduce_scatter(
        self, send: Array, out: Array | None, bounds: Sequence[int], op: Op, digest: int
    ) -> KernelCall:
        """Prepare a reduction of which every rank takes its chunk; as `plan_allreduce`.

        `out` is as long as `send`, and this rank's chunk of it is written; None: somewhere else.
        """
        table = np.array(bounds, np.int64)
        block = self._block(digest, send, out, op)
        block.bounds, block.want = address(table), WANT_OWN
        return KernelCall(_kind("pipelined"), block, (table,))

    def publish(
        self, stream: Array | None, wanted: Sequence[tuple[int, int, Array]], digest: int,
        deadline: Deadline, longest: int = 0, kept: tuple[int, int] = (0, 0),
    ) -> bool:  # fmt: skip
        """Publish bytes, and copy parts of what others publish.

        Args:
            stream: this rank's flat array, None for no bytes.
            wanted: (rank, first byte of its stream, where to put the bytes) for every part.
            digest: of the call.
            deadline: the limit of every wait.
            longest: bytes of the longest stream of all ranks, equal on all of them.
            kept: bytes of the stream that nobody else wants, from the first to before the second.
        """
        rows = [(r, first, first + a.nbytes, address(a)) for r, first, a in wanted if a.nbytes]
        nbytes = 0 if stream is None else stream.nbytes
        work = self.plan_publish(nbytes, rows, digest, longest, kept)
        if stream is not None:
            work.block.send = address(stream)
        return self.run(work, deadline)

    def plan_publish(
        self, nbytes: int, rows: CopyTable, digest: int, longest: int,
        kept: tuple[int, int] = (0, 0), detail: int = 0,
    ) -> KernelCall:  # fmt: skip
        """Prepare to `publish` so many bytes; as `plan_allreduce`.

        Rows go to places counted from the address of the result; the rest as for `publish`. What
        ranks know of the call beside its digest, by a hash, is its `detail`, 0 on all of them if
        there is none: where they differ in that alone nothing moves, the block's
        `detail_mismatch` is set, and it is no error.
        """
        table = np.array(rows, COPY)
        block = self._block(digest, None, None)
        block.count = nbytes
        block.table, block.rows = address(table), len(rows)
        block.own_first, block.own_stop = kept
        block.rounds = -(-longest // self._slot)
        block.detail = detail
        block.longest_bytes = -(-longest // PART_BYTES) * PART_BYTES
        block.want_bytes = sum(stop - first for _, first, stop, _ in rows)
        kind = "one_shot_copy" if longest <= PART_BYTES else "pipelined_copy"
        return KernelCall(_kind(kind), block, (table,))

    def run(self, work: KernelCall, deadline: Deadline, status: int | None = None) -> bool:
        """Go on with a call until it is done; False if the ranks disagree about it.

        Args:
            work: the call.
            deadline: the limit of every wait.
            status: what the kernel returned, if it has been called.

        Raises:
            CollectiveTimeout: a rank has not come in time.
        """
        kernel, block = work.kernel, ctypes.addressof(work.block)
        self.driven += 1
        if status is None:
            status = kernel(block)
        before: tuple[int, int] | None = None
        while status == WAITING:
            # What comes after a long wait is quick again, so that each thing has a wait of its own.
            progress = work.block.phase, work.block.done_rounds
            if progress != before:
                before, wait = progress, self.peers.backoff()
            self.peers.pause(work.block.missing_rank, deadline, wait)
            status = kernel(block)
        return status in (DONE, NOTED)

    def enable_tracing(self, wanted: bool) -> None:
        """Note from now on when calls begin, wait and end, or do so no more."""
        if wanted and self._trace is None:
            self._trace = Trace()  # kept when tracing ends, because a call may be under way
            self._events = np.frombuffer(self._trace.events, np.int64).reshape(MAX_EVENTS, -1).data
        if wanted:
            self._trace.count = self._trace.wait_began = 0
        self._state.trace = ctypes.addressof(self._trace) if wanted else 0

    def noted(self) -> list[Event]:
        """Return the events since the last call of this method."""
        if self._trace is None:
            return []
        count, self._trace.count = self._trace.count, 0
        events: list[Event] = self._events[:count].tolist()
        return events

    def _block(
        self, digest: int, send: Array | None, out: Array | None, op: Op | None = None
    ) -> Any:
        """Describe a call as far as all kinds of calls are alike."""
        block = Block.from_buffer_copy(self._template)
        block.hash = digest
        block.send = 0 if send is None else address(send)
        block.out = 0 if out is None else address(out)
        if op is not None and send is not None:
            block.itemsize = send.itemsize
            found = loops(send.dtype, op.value, of_two=self.size == 2)
            block.fill, block.start, block.add, block.save = found
        return block
