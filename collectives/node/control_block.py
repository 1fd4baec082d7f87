"""Layout of the shared control structures: call blocks, rank headers and rank state.

The ranks of a node share a segment (`collectives.node.segment`). In it each rank has a *header*
(`HEADER`), which only that rank writes, and two *slots* for its data. A kernel
(`collectives.node.reduce_kernels`) takes the address of a *control block* (`BLOCK`), which holds
the arguments and the progress of a call.

All calls of a communicator are cut into numbered *rounds*. A rank stores the number of a round in
two fields of its header:

    filled   its slot holds the data that other ranks read, or will hold it part by part
    ready    its result for other ranks is complete, or it has read everything it needs

`store` is a release and `load` an acquire: a rank that loads the number also sees everything that
was stored before it.

Fields are 64-bit integers unless a format says otherwise.
"""

import numpy as np

from collectives.kernels.structures import structure

# Status that a kernel returns. WAITING: it has polled for long; call it again with the same block.
# NOTED: the call is done, and tracing is enabled.
DONE, WAITING, MISMATCH, NOTED = range(4)

# How a rank stores bytes: into the caches, or past them.
PLAIN, STREAMING, UNKNOWN = range(3)

# Whether the other ranks of the node share a cache with this one.
NEAR, FAR = range(2)

# `want` of a block: which results of a reduction the rank reads.
WANT_NONE, WANT_OWN, WANT_ALL = range(3)

# `detail` of a `direct` call: whether the result overwrites the input. 0 means no detail.
IN_PLACE, ELSEWHERE = 1, 2

# `tune_timed` of a block: which waits the timing of a call excludes.
WITHOUT_WAITS, WITHOUT_FIRST_WAIT = 1, 2

# Elements that are combined at a time: the tiles of a combination stay in the level 1 cache.
TILE = 2048
TILE_BYTES = TILE * 16  # of the widest type, complex128

# Bytes of a part of a stream: other ranks read a part while the writer stores the next one.
PART_BYTES = 1 << 15

BLOCK = np.dtype(
    [
        # Set by the engine, the same in all calls:
        ("rank", "i8"),
        ("size", "i8"),
        ("headers", "i8"),  # address of rank 0's header
        ("slots", "i8"),  # address of rank 0's slots
        ("slot_bytes", "i8"),  # of a round in a slot, at most
        ("slot_room", "i8"),  # memory of a slot; short rounds rotate in it
        ("state", "i8"),  # address of this rank's STATE
        ("scratch", "i8"),  # address of four tiles, private
        ("spins", "i8"),  # polls of a wait with a pause between them
        ("yields", "i8"),  # polls after these that yield the core, before the kernel returns
        ("status_entry", "i8"),  # address of this rank's STATUS_ENTRY
        # The arguments of the call:
        ("hash", "i8"),  # of the call's description
        ("send", "i8"),  # address of the input; `buffer_address.bind` stores `out` after it
        ("out", "i8"),  # address of the result, may equal `send`
        ("count", "i8"),  # elements (reductions), bytes of the own stream (copies)
        ("bounds", "i8"),  # address of size + 1 element offsets of chunks (unused by one_shot)
        ("want", "i8"),  # WANT_NONE, WANT_OWN or WANT_ALL (pipelined, direct)
        ("table", "i8"),  # address of COPY rows (copies) or of the ranks' array addresses (shared)
        ("rows", "i8"),  # of the table (copies)
        ("rounds", "i8"),  # of the call (pipelined_copy)
        ("own_first", "i8"),  # first byte of the own stream that no other rank reads (copies)
        ("own_stop", "i8"),  # the byte after the last one
        ("longest_bytes", "i8"),  # longest stream of all ranks, in whole parts (pipelined_copy)
        ("want_bytes", "i8"),  # of the result (pipelined_copy)
        # May differ without an error: a hash (copies) or IN_PLACE, ELSEWHERE (direct); 0: none.
        ("detail", "i8"),
        ("stride", "i8"),  # from the bytes of a round in a slot to the next place; 0: one place
        ("piece_bytes", "i8"),  # one rank's share of a slot, in whole cache lines (pipelined)
        ("itemsize", "i8"),  # bytes of an element
        ("fill", "i8"),  # this and the next three: `kernels.loops.Loops`
        ("start", "i8"),
        ("add", "i8"),
        ("save", "i8"),
        ("add_reversed", "i8"),  # address of `loops.reversed_loop` (one_shot, direct)
        # The progress of the call; `phase` and `done_rounds` are 0 between calls:
        ("phase", "i8"),
        ("done_rounds", "i8"),
        ("first_round", "i8"),
        ("missing_rank", "i8"),  # after WAITING
        ("previous_part", "i8"),  # address of the first of two parts that are combined
        ("parts_read", "i8"),  # in this round (pipelined_copy)
        ("sync_rounds", "i8"),  # rounds before arrays are exchanged (direct)
        ("detail_mismatch", "i8"),  # whether `detail` differed in the last call: nothing was moved
        # How results are stored (`collectives.node.result_stores`):
        ("result_mode", "i8"),  # of this call: PLAIN, STREAMING or UNKNOWN
        ("result_best_mode", "i8"),  # PLAIN or STREAMING, by the last comparison
        ("result_calls", "i8"),  # since the last comparison began
        ("result_timed", "i8"),  # whether the comparison times this call
        ("result_ns", "i8"),  # time this call spent copying results
        ("result_best_ns", "i8", 2),  # fastest call by store mode; 0 before any
        ("result_group_bytes", "i8"),  # results of all calls of a grouped operation; 0 if alone
        # How slots are filled (`collectives.node.store_autotuner`):
        ("tune_calls", "i8"),  # so far, modulo the period of comparisons
        ("tune_active", "i8"),  # whether a comparison is in progress
        ("tune_distance", "i8"),  # NEAR or FAR, when the comparison began
        ("tune_timed", "i8"),  # 0 if not timed, else WITHOUT_WAITS or WITHOUT_FIRST_WAIT
        ("tune_ns", "i8"),  # of this call so far
        ("tune_started_ns", "i8"),  # when the clock was started; 0 while it is stopped
        ("tune_best_ns", "i8", 2),  # fastest call by store mode; 0 before any
        ("tune_best_mode", "i8", 2),  # by core distance: 1 + the faster mode; 0 if unknown
    ],
    align=True,
)

# A row of the table of a copy: the rank whose stream is read, the first byte, the byte after the
# last one, and the destination in bytes from `out`.
COPY = np.dtype([("peer", "i8"), ("first", "i8"), ("stop", "i8"), ("dest", "i8")], align=True)

TIMESPEC = np.dtype([("seconds", "i8"), ("nanoseconds", "i8")], align=True)

# State that outlives a call, private to each rank.
STATE = np.dtype(
    [
        ("rounds", "i8"),  # so far
        # How this rank stores into slots (`collectives.node.core_probe`, `slot_stores`):
        ("store_mode", "i8"),  # PLAIN or STREAMING
        ("store_forced", "i8"),  # whether a setting fixes the mode, and nothing is measured
        ("bytes_until_probe", "i8"),  # bytes to store before the next probe
        ("contrary_probes", "i8"),  # consecutive probes that contradict `core_distance`
        ("line_ns", "i8"),  # plain store into a line that another core held, by the last probe
        ("clock", TIMESPEC),
        ("trace", "i8"),  # address of the TRACE; 0 while tracing is off
        ("core_distance", "i8"),  # NEAR or FAR
        ("default_mode", "i8", 2),  # by core distance, for calls without a comparison of their own
    ],
    align=True,
)

# Kinds of traced events: waits for `filled` or `parts`, and for `ready`; the begin of a call that
# moves bytes, and of a call that reduces the data of its `filled` waits; the end of a call. The
# time between two events is copying.
WAIT_FILLED, WAIT_READY, MOVE, REDUCE, END = range(5)

EVENT = np.dtype(
    [
        ("kind", "i8"),
        ("began", "i8"),  # ns of the monotonic clock
        ("ended", "i8"),  # the same; of MOVE and REDUCE the first round of the call
        ("last_rank", "i8"),  # the last rank that a wait waited for; -1 for none
    ],
    align=True,
)

# Events that are kept: a call of many megabytes records some hundred.
MAX_EVENTS = 2048

# Events of this rank while tracing is on.
TRACE = np.dtype(
    [
        ("count", "i8"),  # of events
        ("wait_began", "i8"),  # ns of the monotonic clock; 0 outside a wait
        ("late_rank", "i8"),  # the awaited rank after WAITING; -1 for none
        ("padding", "i8"),  # so that events begin at a multiple of their size
        ("events", EVENT, MAX_EVENTS),
    ],
    align=True,
)

# Durations of calls with one hash (`collectives.node.store_autotuner`).
DURATION = np.dtype([("hash", "i8"), ("ns", "i8", 2), ("padding", "i8")])  # ns by store mode
DURATION_ROWS = 8

# All fields but the last share a cache line and its neighbour, because processors fetch lines in
# pairs.
HEADER = np.dtype(
    [
        ("filled", "i8"),  # last round whose slot is filled, see above
        ("ready", "i8"),  # last round whose result is ready, see above
        ("hashes", "i8", 2),  # of a call, by the parity of its first round
        ("parts", "i8"),  # parts of streams that the rank has stored into its slots, in all calls
        ("details", "i8", 2),  # as `hashes`
        ("part_mode", "i8"),  # how the last part was stored: PLAIN or STREAMING
        ("padding", "i8", 8),
        ("durations", DURATION, DURATION_ROWS),  # a hash table
    ]
)

# The last call of a rank, for the other ranks (`collectives.tracing.peer_status`). An entry fills
# two cache lines, so that writing it does not invalidate the entry of another rank.
STATUS_ENTRY = np.dtype(
    [
        ("number", "i8"),  # of the call; negative after it, 0 before the first
        ("time", "f8"),  # s of the monotonic clock
        ("compiles", "f8"),  # s, when the rank began to compile; 0 if it does not
        ("length", "u2"),  # bytes of the text
        ("text", "S102"),
    ],
    align=True,
)

# When a call began and ended, in s of the monotonic clock (`collectives.tracing.recorder`).
CALL_TIMES = np.dtype([("began", "f8"), ("ended", "f8")], align=True)

Block, State, Trace, CallTimes = map(structure, (BLOCK, STATE, TRACE, CALL_TIMES))
