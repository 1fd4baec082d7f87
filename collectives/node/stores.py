"""How a rank hands bytes to the others: stores into the caches, or past them.

A plain store takes the line from the cache of the core that has read it last. Where the two cores
share no cache that may be the slowest way there is; then a rank stores past the caches, which
leaves readers less than half of the rate, so that it does not pay where they do share one. Nobody
else has to know: each rank chooses for what it stores itself.

What systems say of caches is not true in virtual machines, and processes move. So each rank now and
then stores into lines that another rank has read, one line after the other, and takes the time,
which tells near from far; after two pieces in a row that speak against it, it takes itself to have
moved. (The rate of many lines at once, of which a core has more or fewer under way, does not: on
one machine it is 7 GB/s where cores share a cache, on another one up to 9 where they do not.)

    between two cores (of 2026)                      they share a cache   they share none
    ns of a line, as timed here (Zen 3)                        25 to 51        134 to 184
    GB/s of 512 KiB, plainly into such lines                          7        1.5 to 2.2
      (Zen 3)                                                   4 to 15            3 to 5
    past the caches (Zen 3)                          25 to 48, 17 to 22      20 to 30, 17
    reading what was stored plainly (Zen 3)                70, 45 to 54      20 to 30, 12
    reading what was stored past them (Zen 3)              30, 13 to 16      20 to 30, 14
    us of an all-reduce of 1 MiB (Zen 3), plainly                   120               500
      past the caches                                               220               220

What is better there is found out: a call that is made again and again is timed, some calls by
either way, on all ranks the same ones, and the slowest rank decides, since who reads pays for how
others have stored. On another machine, whose host halves at times what its cores hand over, a line
takes 150 ns then, and yet the plain way is the better one, us plainly / past the caches:

                     64 KiB      256 KiB        1 MiB        4 MiB         16 MiB
    all-reduce    4.3 / 4.9  13.9 / 16.4  55.8 / 64.9  222 / 253  1009 / 1125
    broadcast     4.9 / 6.3  10.7 / 13.3  35.2 / 43.5  131 / 165   524 /  650
"""

from __future__ import annotations

from typing import Any

from numba import njit

from collectives.kernels.intrinsics import copy, drain, fence, load, store, stream
from collectives.node import words as w
from collectives.node.meeting import header, now, state

__all__ = [
    "PERIOD", "SOONER", "TRIALS", "begin_stores", "count_waits", "end_stores", "put", "tell",
]  # fmt: skip

# Nanoseconds of a line, from which on the other core shares no cache with this one: 51 at most near
# and 134 at least far, in 2,700 calls in turns, but while cores were moved.
_FAR = 80

# Lines that are timed, in groups of which the fastest counts: in another one a page may be new, or
# the process interrupted. They are taken out of order, so that nothing is fetched ahead of it.
_GROUPS, _GROUP, _STRIDE = 4, 8, 13
_LINE = 64

# How many timings in a row change the place: in one of them the process may have been interrupted.
_ENOUGH = 2

# Bytes that are stored between two timings; after a change, which a moment may have caused, fewer.
_BETWEEN, _SOON = 1 << 25, 1 << 18
# Of a piece that is worth a timing.
_LEAST, _MOST = 1 << 12, w.TILE_BYTES

# Bytes of an array that is worth a comparison. Calls in a row by either way, of which the fastest
# counts; the first of all, which may touch new pages, is none of them. Calls from one comparison to
# the next, so that the slower way costs less than 1 %, and where nothing is known of the place.
_COMPARED_BYTES = 1 << 16
TRIALS, PERIOD, SOONER = 3, 512, 32

# What the other way must take of the time of the usual one: where ranks share cores, some process
# is interrupted in every call.
_CLEARLY = 0.95


@njit
def _found(block: Any) -> int:
    """Return the way that is better here, as far as is known."""
    own = state(block)
    found = block[w.FOUND + own[w.PLACE]]
    return found - 1 if found else own[w.NEAR_WAY + own[w.PLACE]]


@njit
def begin_stores(block: Any, nbytes: int) -> None:
    """Begin a call: say how slots are filled from now on.

    `nbytes` are those that decide whether it is worth a comparison, the same on all ranks; a call
    of 0 never is. Nothing is under way that was stored otherwise: after what it puts, each call
    tells so.
    """
    own = state(block)
    block[w.TRIED] = 0
    if own[w.FIXED]:
        return
    if nbytes >= _COMPARED_BYTES:
        block[w.TRIES] = (block[w.TRIES] + 1) % PERIOD
        turn = block[w.TRIES] % SOONER
        if turn == 1:
            block[w.TRYING] = block[w.TRIES] == 1 or not block[w.FOUND + own[w.PLACE]]
        if block[w.TRYING] and 2 <= turn <= 1 + 2 * TRIALS:
            _try(block, turn)
            return
        if block[w.TRYING] and turn == 3 + 2 * TRIALS:  # after all ranks have ended the last one
            _conclude(block)
    own[w.WAY] = _found(block)


@njit
def _try(block: Any, turn: int) -> None:
    """Begin a call of a comparison, which counts only where this rank does not move in it."""
    own = state(block)
    if turn == 2 or block[w.TRIED_IN] != own[w.PLACE]:
        block[w.TRIED_IN] = own[w.PLACE]
        block[w.FASTEST + w.PLAIN] = block[w.FASTEST + w.STREAMING] = 0
    block[w.TRIED] = w.BUT_FOR_WAITS
    block[w.SPENT], block[w.RUNNING] = 0, now(block)
    own[w.WAY] = w.PLAIN if turn <= 1 + TRIALS else w.STREAMING


@njit
def count_waits(block: Any) -> None:
    """Let all further waits of the call count, after those for ranks that enter it late.

    Who reads what moves part by part waits for it, and the one who puts it is no faster.
    """
    if block[w.TRIED]:
        block[w.TRIED] = w.AFTER_THE_FIRST


@njit
def _row(block: Any) -> int:
    """Return where in a header there are the times of calls like this one."""
    return 8 * (w.TOOK + w.TOOK_WORDS * (block[w.HASH] % w.TOOK_ROWS))


@njit
def end_stores(block: Any) -> None:
    """End the call; the others see how long this rank took before they conclude."""
    if not block[w.TRIED]:
        return
    at = w.FASTEST + state(block)[w.WAY]
    spent = block[w.SPENT] + now(block) - block[w.RUNNING]
    block[at] = min(block[at] or spent, spent)
    row = header(block, block[w.RANK]) + _row(block)
    store(row, 0)  # while it changes; whoever calls something else meanwhile finds nothing
    store(row + 8, block[w.FASTEST + w.PLAIN])
    store(row + 16, block[w.FASTEST + w.STREAMING])
    store(row, block[w.HASH])


@njit
def _slowest(block: Any, way: int) -> int:
    """Return how long a call took by one way, of the rank that was slowest; 0 if not known here."""
    slowest = block[w.FASTEST + way]
    for rank in range(block[w.SIZE]):
        row = header(block, rank) + _row(block)  # [times]
        if slowest and load(row) == block[w.HASH]:
            slowest = max(slowest, load(row + 8 * (1 + way)))
    return slowest


@njit
def _conclude(block: Any) -> None:
    """Draw the conclusion of a comparison, if all of it was made here."""
    own = state(block)
    usual = w.PLAIN if own[w.PLACE] == w.NEAR else w.STREAMING
    other = w.PLAIN + w.STREAMING - usual
    took, instead = _slowest(block, usual), _slowest(block, other)
    if took and instead and block[w.TRIED_IN] == own[w.PLACE]:
        way = other if instead < _CLEARLY * took else usual
        block[w.FOUND + own[w.PLACE]] = 1 + way
        own[w.NEAR_WAY + own[w.PLACE]] = way


@njit
def _timed(block: Any, dest: int, source: int, nbytes: int) -> None:
    """Store a piece in the plain way, some lines of it one by one, and draw the conclusion.

    It ends with all stores in the caches, so that what was streamed before needs no fence where
    `tell` finds that this rank does not stream any more.
    """
    own = state(block)
    near = block[w.SCRATCH]
    copy(near, source, nbytes)  # where the bytes come from should not matter
    head = -dest % _LINE
    fastest = 1 << 62
    for group in range(_GROUPS):
        drain()
        began = now(block)
        for line in range(group * _GROUP, (group + 1) * _GROUP):
            at = head + _LINE * (line * _STRIDE % (_GROUPS * _GROUP))
            copy(dest + at, near + at, 8)
            drain()
        fastest = min(fastest, now(block) - began)
    copy(dest, near, nbytes)
    drain()  # [change]
    own[w.LINE_NS] = max(1, fastest // _GROUP)
    place = w.FAR if own[w.LINE_NS] >= _FAR else w.NEAR
    own[w.AGAINST] = 0 if place == own[w.PLACE] else own[w.AGAINST] + 1
    own[w.LEFT] = 0 if own[w.AGAINST] else _BETWEEN
    if own[w.AGAINST] == _ENOUGH:
        own[w.PLACE] = place
        own[w.AGAINST] = 0
        own[w.LEFT] = _SOON
        if not block[w.TRIED]:
            own[w.WAY] = _found(block)


@njit
def put(block: Any, dest: int, source: int, nbytes: int) -> None:
    """Copy bytes to where others read them; `tell` says that they are there."""
    own = state(block)
    if nbytes >= _LEAST and not own[w.FIXED]:
        if own[w.LEFT] <= 0:
            n = min(nbytes, _MOST)
            _timed(block, dest, source, n)
            dest, source, nbytes = dest + n, source + n, nbytes - n
        own[w.LEFT] -= nbytes
    if own[w.WAY] == w.STREAMING:
        stream(dest, source, nbytes)
    else:
        copy(dest, source, nbytes)


@njit
def tell(block: Any, word: int, number: int) -> None:
    """Store a number in a word of this rank's header, after all that was put."""
    if state(block)[w.WAY] == w.STREAMING:
        fence()  # [fence]
    store(header(block, block[w.RANK]) + 8 * word, number)
