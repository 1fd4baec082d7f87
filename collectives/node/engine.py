"""Node engine: collectives of one node through shared memory, without messages.

Each rank owns two slots of a segment and a header with two numbers: the last round whose slot is
filled, and the last round whose result is ready. All synchronization uses these two numbers
(`collectives.node.reduce_kernels`).

    small, one shot                          larger, pipelined, for 2 ranks
    (one wait, each rank adds everything)    (chunk a belongs to rank 0, b to rank 1)

    rank 0            rank 1                 rank 0                     rank 1
    x -> slot 0       y -> slot 1            b0 -> slot 0               a1 -> slot 1
    filled            filled                 filled                     filled
    x + slot 1        slot 0 + y             a0 + slot 1 -> slot 0      slot 0 + b1 -> slot 1
                                             ready (next b0 is there)   ready
                                             take b from slot 1         take a from slot 0

    arrays from `shared_empty`: rank 0 adds chunk a of both arrays and writes it to both, rank 1
    chunk b; nothing is copied.

Small arrays have at most 8 KiB, 64 KiB where ranks outnumber the cores, and 256 KiB on two ranks.
Three or more ranks read even their own array from their slot: an in-place sum would overwrite the
array before its turn.

Every call carries a hash of its description. All ranks compare it while they synchronize, at no
extra cost.

Broadcasts and gathers move bytes through the slots in parts of 32 KiB: other ranks read a part
while its writer stores the next one.

Cost per rank, S bytes, P ranks:

    one shot     writes S, reads P S                                      1 wait
    pipelined    reads each part of its chunk once; 2 S (P - 1)/P pass    2 S / slot waits
                 through the segment
    shared       reads and writes S                                       2 waits

Scratch: two slots per rank in the segment.

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

    # Takes the address of a block, and optionally where to note the call's times and its number.
    Kernel = Callable[..., int]

__all__ = ["CopyTable", "Engine", "Event", "KernelCall", "alone", "compile_ahead", "start"]

# Slots grow with the number of ranks, so that a rank's piece of a slot keeps at least 16 KiB.
_PIECE_BYTES = 1 << 14
_MOST_SLOT_BYTES = 1 << 20

# Smallest slot of an engine whose node is a part of a group: its ranks often wait for other nodes,
# and larger slots mean fewer rounds. Reduce-scatter and all-gather of 16 MiB, 2 ranks on each of 4
# machines that share 2 cores, slots of 512 KiB / 1 MiB / 4 MiB, in ms: 120 / 84 / 60 (by messages
# 48, shared arrays 36).
SLOT_BYTES_OF_PART = 1 << 20

# Rounds of short calls rotate over this many bytes of the slots that a rank reads; then the fewest
# and the most bytes of such a call. A store is slow while another core has the line in its level 2
# cache, so the slots should exceed that cache. All-reduce of two near cores of a Zen 4 with 1 MiB
# of level 2 cache, in place, in us:
#     bytes of the slots     1 MiB, without    1 MiB    2 MiB    4 MiB    8 MiB    16 MiB
#     4 KiB                            0.44     0.66     0.66     0.66     0.68      0.67
#     16 KiB                            2.3      1.6      1.0      1.0      1.1       1.2
#     64 KiB                            9.1      5.5      3.4      3.4      3.7       5.7
#     256 KiB                            29       16       13       13       14        24
# Between far cores with streaming stores: 16 KiB 2.0 without, 1.6 with; others equal.
_ROTATED_BYTES = 1 << 22
_LEAST_ROTATED, _MOST_ROTATED = 1 << 13, 1 << 19

_PAGE, _LINE = 4096, 64

# Polls before a kernel returns. With a core for each rank: about 46 us of pauses, then a few
# hundred yields. With fewer cores a spinning rank keeps the rank it waits for from running. 8 bytes
# on 2 cores, in us, for 0 / 20 / 100 / 1000 pauses: 4 ranks 7.6 / 8.0 / 14.5 / 135; 8 ranks 30 / 32
# / 67 / 308. For 20 / 2000 yields instead of 200: 4 ranks 9.1 / 6.8; 8 ranks 42 / 42.
_SPINS, _SPINS_CROWDED, _YIELDS = 2000, 20, 200

# Loads a kernel; the first rank that needs it on a machine compiles it.
_ROUNDS = "collectives.node.reduce_kernels"
_kind = functools.partial(machine_code.function, _ROUNDS, arguments=3)

# Parts of other ranks' streams: rank, first byte, byte after the last, destination.
CopyTable = Sequence[tuple[int, int, int, int]]

# The fields of a `control_block.EVENT`.
Event = Sequence[int]


def compile_ahead() -> None:
    """Compile kernels that this machine has never used, in another process."""
    # First the kernels that most programs do not use in their first calls.
    machine_code.compile_ahead(
        _ROUNDS, "pipelined", "direct", "shared", "pipelined_copy", "one_shot_copy", "one_shot"
    )


def _in_lines(nbytes: int) -> int:
    """Return the bytes of the cache lines that `nbytes` take."""
    return -(-nbytes // _LINE) * _LINE


class KernelCall(NamedTuple):
    """A prepared call: kernel, block, and the memory that the block points to.

    Attributes:
        kernel: compiled code that takes the address of the block.
        block: a `control_block.Block`.
        keep: arrays whose addresses the block holds.
    """

    kernel: Kernel
    block: Any
    keep: tuple[Array, ...]


def alone(transport: Transport) -> Engine:
    """Return the engine of one rank, in private memory, for `Engine.plan_own_copy`."""
    headers, slot = _header_bytes(1), kernel_selection.SLOT_BYTES
    memory = np.zeros(headers + 2 * slot, np.uint8)
    return Engine(transport, memory, headers, slot, slot, peer_watch.PeerWatch(transport, None))


def _header_bytes(size: int) -> int:
    """Return the bytes of headers and status entries, in whole pages."""
    return -(-size * (HEADER.itemsize + STATUS_ENTRY.itemsize) // _PAGE) * _PAGE


def start(transport: Transport, directory: str | None, deadline: Deadline) -> Engine | None:
    """Open the engine of a group of ranks on one node; *collective*.

    Returns:
        the engine; None on all ranks if the ranks have no shared memory.
    """
    if transport.size == 1 or directory is None:
        return None
    slot = max(kernel_selection.SLOT_BYTES, min(_MOST_SLOT_BYTES, transport.size * _PIECE_BYTES))
    if transport.parent is not transport:
        slot = max(slot, SLOT_BYTES_OF_PART)
    room = max(slot, _ROTATED_BYTES // 2 // (transport.size - 1) // _PAGE * _PAGE)
    headers = _header_bytes(transport.size)
    memory = segment.create(transport, headers, 2 * room, directory, deadline)
    if memory is None:
        return None
    memory[::_PAGE].max()  # page faults now, not while a rank waits or times a store
    return Engine(
        transport, memory, headers, slot, room, peer_watch.start(transport, directory, deadline)
    )


class Engine:
    """Collectives of a group of ranks on one node.

    Args:
        transport: the ranks.
        memory: the segment: headers, status entries, then two slots per rank.
        headers: bytes in front of the slots.
        slot: bytes of a round in a slot, at most.
        room: bytes of a slot.
        peers: watch over the other ranks.

    Attributes:
        status_entries: the ranks' last calls, shape (size,), dtype STATUS_ENTRY.
        rank: this rank in the group.
        size: number of ranks.
        driven: number of calls that this rank has begun to `run`.
        shared: registry of arrays that are reduced in place in shared memory.
        peers: watch over the other ranks during waits.
    """

    def __init__(
        self, transport: Transport, memory: Array, headers: int, slot: int, room: int,
        peers: PeerWatch,
    ) -> None:  # fmt: skip
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
            slot_room=room,
            state=ctypes.addressof(self._state),
            scratch=address(self._scratch),
            spins=_SPINS_CROWDED if crowded else _SPINS,
            yields=_YIELDS,
            status_entry=address(self.status_entries[self.rank :]),
        )

    def set_store_mode(self, stores: Stores) -> None:
        """Set how this rank stores data for other ranks; "auto" measures.

        Ranks may use different modes, and change them between two stores: the bits stay the same.
        """
        self._state.store_forced = stores != "auto"
        self._state.store_mode = STREAMING if stores == "streaming" else PLAIN
        self._state.default_mode[NEAR], self._state.default_mode[FAR] = PLAIN, STREAMING

    @property
    def stores(self) -> tuple[str, int]:
        """How this rank stores data for other ranks, and the measurement behind it.

        Returns:
            "plain" or "streaming", and the nanoseconds of a plain store into a cache line that
            another rank has read; 0 if not measured.
        """
        way = "plain" if self._state.store_mode == PLAIN else "streaming"
        return way, 0 if self._state.store_forced else self._state.line_ns

    def agree(self, digest: int, deadline: Deadline) -> bool:
        """Wait for all ranks; return whether their calls have the same digest."""
        return self.publish(None, [], digest, deadline)

    def exchange(self, number: int, digest: int, deadline: Deadline) -> list[int] | None:
        """All-gather one integer, in rank order; None if the digests differ."""
        numbers = np.empty(self.size, np.int64)
        wanted = [(rank, 0, numbers[rank : rank + 1]) for rank in range(self.size)]
        own = np.array([number])
        alike = self.publish(own, wanted, digest, deadline, own.nbytes)
        return numbers.tolist() if alike else None

    def plan_allreduce(
        self, send: Array, out: Array, op: Op, digest: int, among: int = 0
    ) -> KernelCall:
        """Prepare to reduce flat arrays into `out`, which may be `send`.

        Args:
            send: this rank's array; it must outlive the call, as must `out`.
            out: the result, as long as `send`.
            op: the reduction.
            digest: hash of the call's description.
            among: bytes of all results of a grouped operation that this call is a part of.

        Returns:
            a call that can run repeatedly.
        """
        place = self.shared.location_of_pair(send, out)
        bounds = np.array(topology.chunk_bounds(send.size, self.size), np.int64)
        halves = is_half(send.dtype)
        kind = kernel_selection.select(send.nbytes, self.size, crowded=self._crowded, halves=halves)
        kind = kind if place is None else "shared"
        has_behind = kind in ("one_shot", "direct") and self.size == 2
        last = reversed_name(send.dtype, op) if has_behind else None
        needed = [(_ROUNDS, kind), *loop_names(send.dtype, op, of_two=self.size == 2), last]
        machine_code.ensure([name for name in needed if name is not None])
        block = self._block(digest, send, out, op)
        block.count, block.result_group_bytes = send.size, among
        self._set_chunks(block, bounds)
        block.want = WANT_ALL
        if place is not None:
            table = self.shared.addresses(place)
            block.table = address(table)
            return KernelCall(_kind(kind), block, (bounds, table))
        if kind != "pipelined":
            block.stride = self._stride(send.nbytes, min(send.nbytes, self._slot))
        if has_behind:
            block.add_reversed = reversed_loop(send.dtype, op)
        return KernelCall(_kind(kind), block, (bounds,))

    def plan_reduce(
        self, send: Array, out: Array | None, op: Op, root: int, digest: int
    ) -> KernelCall:
        """Prepare `plan_allreduce` with a result on the root; `out` is None on other ranks."""
        bounds = np.array(topology.chunk_bounds(send.size, self.size), np.int64)
        block = self._block(digest, send, out, op)
        self._set_chunks(block, bounds)
        block.want = WANT_ALL if self.rank == root else WANT_NONE
        return KernelCall(_kind("pipelined"), block, (bounds,))

    def plan_reduce_scatter(
        self, send: Array, out: Array | None, bounds: Sequence[int], op: Op, digest: int
    ) -> KernelCall:
        """Prepare `plan_allreduce` for one chunk of the result per rank.

        `out` is as long as `send`, and only this rank's chunk is written. If `out` is None, the
        caller sets the address of the result later.
        """
        table = np.array(bounds, np.int64)
        block = self._block(digest, send, out, op)
        self._set_chunks(block, table)
        block.want = WANT_OWN
        return KernelCall(_kind("pipelined"), block, (table,))

    def publish(
        self, stream: Array | None, wanted: Sequence[tuple[int, int, Array]], digest: int,
        deadline: Deadline, longest: int = 0, kept: tuple[int, int] = (0, 0),
    ) -> bool:  # fmt: skip
        """Publish one stream per rank, and copy parts of the streams of other ranks.

        Args:
            stream: this rank's flat array; None for no bytes.
            wanted: (rank, first byte of its stream, destination array) of every part.
            digest: hash of the call's description.
            deadline: limit of every wait.
            longest: bytes of the longest stream of all ranks, equal on all ranks.
            kept: first byte, and byte after the last, that no other rank reads.

        Returns:
            whether the digests of all ranks agree.
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
        """Prepare to `publish` a stream of `nbytes`.

        Args:
            nbytes: bytes of this rank's stream.
            rows: destinations are in bytes from the address of the result.
            digest: as for `publish`, and so are `longest` and `kept`.
            longest: as for `publish`.
            kept: as for `publish`.
            detail: hash of facts beyond the digest; 0 on all ranks if there are none. If only the
                details differ, nothing is copied and the block's `detail_mismatch` is set; that is
                not an error.
        """
        table = np.array(rows, COPY)
        block = self._block(digest, None, None)
        block.count = nbytes
        block.table, block.rows = address(table), len(rows)
        block.own_first, block.own_stop = kept
        block.rounds = -(-longest // self._slot)
        block.detail = detail
        block.longest_bytes = -(-longest // PART_BYTES) * PART_BYTES
        block.stride = self._stride(longest, min(longest, self._slot))
        block.want_bytes = sum(stop - first for _, first, stop, _ in rows)
        kind = "one_shot_copy" if longest <= PART_BYTES else "pipelined_copy"
        return KernelCall(_kind(kind), block, (table,))

    def plan_own_copy(self, nbytes: int) -> KernelCall:
        """Prepare to copy `nbytes` of this rank's array, which no other rank reads."""
        # By the kernel for short streams, whose slots nothing is stored in.
        return self.plan_publish(nbytes, [(self.rank, 0, nbytes, 0)], 0, 0, kept=(0, nbytes))

    def _stride(self, nbytes: int, in_round: int) -> int:
        """Return the `stride` of a call of `nbytes` with `in_round` bytes per round."""
        # Ranks that share a core share its caches, where the lines should stay.
        if self._crowded or not _LEAST_ROTATED <= nbytes <= _MOST_ROTATED:
            return 0
        return _in_lines(in_round)

    def _set_chunks(self, block: Any, bounds: Array) -> None:
        """Store the ranks' chunks in a block, with the size of their pieces."""
        block.bounds = address(bounds)
        longest = _in_lines(max(1, int(np.diff(bounds).max())) * block.itemsize)
        block.piece_bytes = min(longest, self._slot // self.size // _LINE * _LINE)
        block.stride = self._stride(int(bounds[-1]) * block.itemsize, self.size * block.piece_bytes)

    def run(self, work: KernelCall, deadline: Deadline, status: int | None = None) -> bool:
        """Drive a call until it is done; return False if the ranks' calls differ.

        Args:
            work: the call.
            deadline: limit of every wait.
            status: status that the kernel returned, if the caller has called it.

        Raises:
            CollectiveTimeout: a rank did not enter the call in time.
            PeerFailure: a rank has died, or an awaited rank has left.
        """
        kernel, block = work.kernel, ctypes.addressof(work.block)
        self.driven += 1
        if status is None:
            status = kernel(block)
        before: tuple[int, int] | None = None
        while status == WAITING:
            # Each phase and round has a backoff of its own, which begins with short pauses.
            progress = work.block.phase, work.block.done_rounds
            if progress != before:
                before, wait = progress, self.peers.backoff()
            self.peers.pause(work.block.missing_rank, deadline, wait)
            status = kernel(block)
        return status in (DONE, NOTED)

    def enable_tracing(self, wanted: bool) -> None:
        """Record from now on when calls begin, wait and end, or stop recording."""
        if wanted and self._trace is None:
            self._trace = Trace()  # kept when tracing ends, because a call may still write to it
            self._events = np.frombuffer(self._trace.events, np.int64).reshape(MAX_EVENTS, -1).data
        if wanted:
            self._trace.count = self._trace.wait_began = 0
        self._state.trace = ctypes.addressof(self._trace) if wanted else 0

    def noted(self) -> list[Event]:
        """Return the events since the last call of this method, at most `MAX_EVENTS`."""
        if self._trace is None:
            return []
        count, self._trace.count = self._trace.count, 0
        events: list[Event] = self._events[:count].tolist()
        return events

    def _block(
        self, digest: int, send: Array | None, out: Array | None, op: Op | None = None
    ) -> Any:
        """Return a block with the fields that all kinds of calls share."""
        block = Block.from_buffer_copy(self._template)
        block.hash = digest
        block.send = 0 if send is None else address(send)
        block.out = 0 if out is None else address(out)
        if op is not None and send is not None:
            block.itemsize = send.itemsize
            found = loops(send.dtype, op, of_two=self.size == 2)
            block.fill, block.start, block.add, block.save = found
        return block
