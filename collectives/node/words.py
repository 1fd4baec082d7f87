"""The words in which ranks of a node meet: of the block of a call, and of the ranks' headers.

The ranks of a node share a segment (`collectives.node.segment`). In it each rank has a *header*,
which only it writes, and two *slots* for its data. A kind of call (`collectives.node.rounds`) gets
the address of a *block* of 64-bit integers that describes one call, works until it is done or has
waited for long, and returns `DONE`, `MISMATCH`, or `WAITING`: call it again with the same block.
"""

from __future__ import annotations

DONE, WAITING, MISMATCH = 0, 1, 2

# Words of a block. The engine's part, the same for all calls:
RANK, SIZE = 0, 1
HEADERS = 2  # address of rank 0's header
SLOTS = 3  # address of rank 0's slots
SLOT_BYTES = 4
COUNTER = 5  # address of the number of rounds so far, this rank's own
SCRATCH = 6  # address of two tiles of the widest type, this rank's own
SPINS, YIELDS = 7, 8  # polls that spin, and polls that yield, before a wait gives up for now
# The call's:
HASH = 9  # of the call's description
SEND, OUT = 10, 11  # addresses of the contribution and the result; may be equal
COUNT = 12  # elements (one_shot), bytes of the stream (publish)
BOUNDS = 13  # address of P + 1 offsets of the ranks' chunks (pipelined, shared)
TAKE = 14  # which results this rank wants (pipelined): TAKE_NONE, TAKE_OWN or TAKE_ALL
TABLE = 15  # address of rows: what this rank wants (publish), the ranks' arrays (shared)
ROWS = 16  # rows of the table (publish)
ROUNDS = 17  # of the call (publish)
WIDTH = 18  # bytes of an element
FILL, START, ADD, SAVE = 19, 20, 21, 22  # addresses of the loops; 0 for a plain copy
# Where the call stands; all 0 before it:
PHASE, DONE_ROUNDS, FIRST = 23, 24, 25
MISSING = 26  # the rank that is waited for, after WAITING
WORDS = 27

TAKE_NONE, TAKE_OWN, TAKE_ALL = 0, 1, 2

# A row of the table of `publish`: whose stream, its first byte, the one after its last, and where
# they go, counted from OUT.
PEER, FROM, TO, DEST = 0, 1, 2, 3

# Words of a header; one cache line with its neighbour, which processors fetch in pairs.
FILLED, READY, HASHES = 0, 1, 2
HEADER_BYTES = 128

# Elements that are combined at a time, so that they stay in the level 1 cache.
TILE = 2048
TILE_BYTES = TILE * 16  # of the widest type, complex128
