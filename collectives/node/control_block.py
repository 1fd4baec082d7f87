"""Layout of the shared control structures: call blocks, rank headers and rank state.

The ranks of a node share a segment (`collectives.node.segment`). In it each rank has a *header*,
which only it writes, and two *slots* for its data. A kind of call
(`collectives.node.reduce_kernels`) gets the address of a *block* of 64-bit integers: what it is
about, and where it stands.

All calls of a communicator are cut into numbered *rounds*. A rank stores the number of a round in
its word FILLED when its slot holds what others read, or will do so part by part, and in its word
READY when what it makes for others is there, or when it has read all that it needs. `store` makes
visible what was stored before it to whoever sees it by `load`.
"""

from __future__ import annotations

DONE, WAITING, MISMATCH, NOTED = 0, 1, 2, 3
"""What a kind of call returns; WAITING: it has waited for long, call it again with its block.
NOTED: it is done, and somebody wants to know when it did what."""

# Words of a block. The engine's part, the same for all calls:
RANK, SIZE = 0, 1
HEADERS = 2  # address of rank 0's header
SLOTS = 3  # address of rank 0's slots
SLOT_BYTES = 4
STATE = 5  # address of words that outlive the call, this rank's own: COUNTER ... below
SCRATCH = 6  # address of four tiles of the widest type, this rank's own
SPINS, YIELDS = 7, 8  # polls that spin, and polls that yield, before a wait gives up for now
# The call's:
HASH = 9  # of the call's description
SEND, OUT = 10, 11  # addresses of the contribution and the result; may be equal
COUNT = 12  # elements (one_shot, direct), bytes of the stream (copies: the two `_copy` kinds)
BOUNDS = 13  # address of P + 1 offsets of the ranks' chunks (pipelined, direct, shared)
TAKE = 14  # which results this rank wants (pipelined, direct): TAKE_NONE, TAKE_OWN or TAKE_ALL
TABLE = 15  # address of rows: what this rank wants (copies), the ranks' arrays (shared)
ROWS = 16  # rows of the table (copies)
ROUNDS = 17  # of the call (pipelined_copy)
WIDTH = 18  # bytes of an element
FILL, START, ADD, SAVE = 19, 20, 21, 22  # addresses of the loops; 0 for a plain copy
# Where the call stands; all 0 before it:
PHASE, DONE_ROUNDS, FIRST = 23, 24, 25
MISSING = 26  # the rank that is waited for, after WAITING
EARLIER = 27  # address of the first of two parts that are combined
AT = 28  # parts of the round that have been read (pipelined_copy)
# Bytes of the stream that nobody else wants: the first, and the one after the last (copies).
KEPT, KEPT_TO = 29, 30
LONGEST = 31  # bytes of the longest stream of all ranks, rounded up (pipelined_copy)
TAKEN = 32  # bytes of the result (pipelined_copy)
# What ranks may know differently without an error; 0: nothing. A hash (copies), or where the
# result goes, IN_PLACE or ELSEWHERE (direct).
DETAIL = 33
UNLIKE = 34  # whether they did in the last call, in which nothing has moved then
BEHIND = 35  # address of the loop that combines in place, with what comes before (one_shot, direct)
NOTE = 36  # the engine's: address of the number and time in this rank's note (operations/status)
MET = 37  # rounds of the call before those in which arrays are handed over (direct)
# How the result is stored (`collectives.node.result_stores`):
RESULTS = 38  # in this call: PLAIN, STREAMING or UNKNOWN
BETTER = 39  # PLAIN or STREAMING, by the last comparison
CALLS = 40  # since the last comparison began
TIMED = 41  # whether this call is a part of it
COPYING = 42  # ns of its copies
COPIED = 43  # two words: ns of the copies of a call by either way, of the fastest; 0 for none yet
AMONG = 55  # bytes of all results that this one is made among, if it is not alone
# How slots are filled (`collectives.node.store_autotuner`):
TRIES = 45  # calls so far, counted in a circle
TRYING = 46  # whether a comparison is under way
TRIED_IN = 47  # NEAR or FAR: where it has begun
TRIED = 48  # whether this call is a part of it, and which of its waits do not count
SPENT, RUNNING = 49, 50  # ns of this call but for those waits, and since when it runs; 0 in a wait
FASTEST = 51  # two words: ns of a call by either way, of the fastest; 0 for none yet
FOUND = 53  # two words, for NEAR and FAR: 1 + the way that was faster; 0 for none yet
WORDS = 56

TAKE_NONE, TAKE_OWN, TAKE_ALL = 0, 1, 2
IN_PLACE, ELSEWHERE = 1, 2

# Words of STATE.
COUNTER = 0  # rounds so far
# How this rank stores (`collectives.node.core_probe`, `stores`):
WAY = 1  # PLAIN or STREAMING
FIXED = 2  # whether that is a setting, and nothing is measured
LEFT = 3  # bytes to store before the next timing
AGAINST = 4  # timings in a row that speak against the place
LINE_NS = 5  # of a plain store into a line that others had, the last time
CLOCK = 6  # two words, for the time
TIMES = 8  # address of the words of times, below; 0 where nobody wants to know
PLACE = 9  # NEAR or FAR
NEAR_WAY, FAR_WAY = 10, 11  # in either, where a call has not compared both
STATE_WORDS = 12

PLAIN, STREAMING, UNKNOWN = 0, 1, 2
NEAR, FAR = 0, 1
BUT_FOR_WAITS, AFTER_THE_FIRST = 1, 2  # TRIED: no wait counts, or the first does not

# Words of times: what this rank did when, in ns of the monotonic clock.
NOTES = 0  # how many notes there are
SINCE = 1  # when the wait under way began; 0 if none is
LATE = 2  # the rank that it has given up on for now, -1 for none
FIRST_NOTE = 4
# Words of a note. A wait has the number of its word, FILLED or READY below, and names the last rank
# to come; a call begins as MOVES, or as REDUCES where it combines what it has waited for in FILLED,
# with its first round in place of an end. All else between two notes is copying.
WHAT, FROM_TIME, TO_TIME, LAST = 0, 1, 2, 3
NOTE_WORDS = 4
MOVES, REDUCES, END = 10, 11, 12
# Calls of many megabytes make some hundred; what comes after these is not noted.
MOST_NOTES = 2048
TIMES_WORDS = FIRST_NOTE + NOTE_WORDS * MOST_NOTES

# Words of a header; all but the last in one cache line and its neighbour, which processors fetch in
# pairs.
FILLED, READY, HASHES = 0, 1, 2
PARTS = 4  # parts of its stream that a rank has put into its slots, in all calls
DETAILS = 5  # two words, as those of HASHES
STORED = 7  # how the last part was stored: PLAIN or STREAMING
TOOK = 16  # a table, by hashes: how long calls took by either way (`node.store_autotuner`)
HEADER_BYTES = 384

# Rows of that table, and words of a row: the hash, and ns by PLAIN and by STREAMING.
TOOK_ROWS, TOOK_WORDS = 8, 4

# Elements that are combined at a time, so that they stay in the level 1 cache.
TILE = 2048
TILE_BYTES = TILE * 16  # of the widest type, complex128

# Bytes of a part of a stream, which others read while its rank puts the next one.
PART_BYTES = 1 << 15
