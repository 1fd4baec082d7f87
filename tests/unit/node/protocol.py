"""A model of the rounds in shared memory, explored over every order in which things can happen.

`collectives.node.reduce_kernels` runs on processors of which a test sees few orders of stores and
loads. Here a rank is a list of steps, memory is a tuple, and every order is tried that a processor
allows:

    x86-64   loads happen in order; stores become visible in order, but streamed ones at any time
             before the next fence of their rank has passed
    ARM64    loads and stores happen in any order, but those of one place; a release happens after
             all that its rank has done before, what follows an acquire happens after it

A datum is a number of the call and round that it belongs to. A rank has to find the one that it
expects wherever it looks, and nobody may store where another may still be reading.

A step that has *begun* but may not have happened yet is *open*. Of data this is all that has to be
known: one that is open may be found or not, so that whoever looks there meanwhile is wrong in one
of the two. Only words that are waited for are followed as they become visible, one by one. The same
holds for loads that are open, which only ARM64 has.

Left out are ranks that disagree, which stop; sizes: a slot has two parts, what its rank brings for
others and what it has made; and the return to Python in a wait, which changes nothing.

What a rank does for others has a name, by which the code cites it, in brackets:

    number                     take the numbers of the rounds of a call
    hash, hashes               store what the call is about; compare that of all
    fill, make                 store in the own slot what it brings, what it has made of others'
    change                     fence, when it stops streaming
    fence                      before a word, if it streams
    filled, part, made         store `filled`, `parts`, `ready` of the header
    all filled, all made       wait for such a word of all ranks
    part is there              wait for `parts` of one
    read, take                 load what others bring, what they have made
    read arrays, write arrays  load and store arrays that all ranks reach
    hint                       store, load how a part was stored: whatever is found will do
    times                      load how long calls took by a way of storing, which is told at the
                               end of some: whatever is found will do
    results                    fence behind results that were streamed to the caller's memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["ARM64", "KINDS", "OF_TWO", "X86_64", "Wrong", "explore", "steps_of"]

X86_64, ARM64 = "x86-64", "ARM64"

LOAD, STORE, RELEASE, WAIT, FENCE = "load", "store", "release", "wait", "fence"

TURNS = 2  # rounds of a call that has several
# Of a slot, whose two places are put and read as one, or each by itself.
WHOLE, HALVES = ((False, True),), ((False,), (True,))
TOLD = {"filled": "filled", "parts": "part", "ready": "made"}
AWAITED = {"filled": "all filled", "ready": "all made"}
RESULT = 1000  # of a round, where data of the round are meant by its number


class Step(NamedTuple):
    """What a rank does at a place: the datum that it stores, expects or waits for."""

    kind: str
    place: int
    value: int
    streamed: bool = False  # a store
    ordered: bool = True  # a release


class Wrong(Exception):
    """What the protocol must not let happen."""


class Rank:
    """Writes down the steps of a rank.

    The methods are the functions of `collectives.node.reduce_kernels`, `flows`, `meeting` and
    `stores`, with their names and in their order. `without` leaves one thing out: what a method
    does for a word, such as ("pipelined", "wait", "ready"), or one of two places, such as ("",
    "slot", "").

    Args:
        rank: which one.
        size: how many there are.
        places: numbers of places by their names, which all ranks share.
        streams: whether what is put into a slot is streamed, by how often that was done before.
        without: see above.
        parts: in which a flow puts and reads the two places of a slot.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        places: dict[tuple[object, ...], int],
        streams: Callable[[int], bool],
        without: tuple[str, str, str],
        parts: Sequence[Sequence[bool]] = WHOLE,
    ) -> None:
        self.rank, self.places, self.streams, self.without = rank, places, streams, without
        self.size, self.parts = size, parts
        self.everybody = range(size)
        self.others = [other for other in self.everybody if other != rank]
        self.steps: list[Step] = []
        self.said: list[str] = []
        self.number = self.first = self.met = self.puts = 0
        self.kind, self.is_streaming = "", False

    def call(self, kind: str) -> None:
        """Make the next call."""
        self.kind = kind
        KINDS[kind](self)

    def one_shot(self) -> None:
        number = self.next_round()
        self.begin_stores()
        self.fill(number)
        self.announce(number)
        self.tell("filled", number)
        self.wait("filled", number)
        self.agreed()
        # Of two ranks each reads its own array where it is.
        for rank in self.everybody if self.size > 2 else self.others:
            self.read(rank, number)

    def pipelined(self, take_all: bool = True) -> None:
        self.announce(self.next_round(TURNS))
        self.begin_stores()
        self.by_pieces(take_all)

    def by_pieces(self, take_all: bool = True) -> None:
        self.contribute(0)
        for turn in range(TURNS):
            self.wait("filled", self.numbered(turn))
            if turn == 0:
                self.agreed()
            if turn + 1 < TURNS:
                self.contribute(turn + 1)
            self.combine_piece(turn, take_all)
            self.wait("ready", self.numbered(turn))
            if take_all:
                self.collect(turn)

    def direct(self) -> None:
        """Let two ranks, both in place, hand over whole slots."""
        self.meet()
        for turn in range(TURNS):
            self.fill(self.numbered(turn))
            self.tell("filled", self.numbered(turn))
            self.wait("filled", self.numbered(turn))
            for rank in self.others:
                self.read(rank, self.numbered(turn))

    def elsewhere(self) -> None:
        """Let two ranks, of which one is not in place, go on as `pipelined`."""
        self.meet()
        self.by_pieces()

    def meet(self) -> None:
        """Meet in a round of its own, before arrays are handed over."""
        number = self.next_round(1 + TURNS)
        self.announce(number)
        self.tell("filled", number)
        self.wait("filled", number)
        self.agreed()
        self.begin_stores()
        self.met = 1

    def numbered(self, turn: int) -> int:
        return self.first + self.met + turn

    def reduce_scatter(self) -> None:
        """Let every rank take its own part: `pipelined` with TAKE_OWN."""
        self.pipelined(take_all=False)

    def contribute(self, turn: int) -> None:
        self.fill(self.numbered(turn), [False])
        self.tell("filled", self.numbered(turn))

    def combine_piece(self, turn: int, take_all: bool) -> None:
        for rank in self.others:
            self.read(rank, self.numbered(turn), [False])
        if take_all:
            self.put(self.numbered(turn), "make", result=True)
        self.tell("ready", self.numbered(turn))

    def collect(self, turn: int) -> None:
        for rank in self.others:
            self.said.append("take")
            self.load_slot(rank, self.numbered(turn), result=True)
        self.said.append("results")  # what that is for is in `shared`

    def shared(self) -> None:
        number = self.next_round()
        # The array is what an earlier call has left there, past the caches or not.
        is_streamed = self.streams(self.puts)
        for chunk in self.everybody:
            self._store(("array", self.rank, chunk), number, is_streamed)
        if is_streamed:
            self._fence("results")
        self.announce(number)
        self.tell("filled", number)
        self.wait("filled", number)
        self.agreed()
        self.combine_shared(number)
        self.tell("ready", number)
        self.wait("ready", number)
        for chunk in self.everybody:  # the user reads it
            self._load(("array", self.rank, chunk), number + RESULT)

    def combine_shared(self, number: int) -> None:
        self.said += ["read arrays", "write arrays"]
        for rank in self.everybody:
            self._load(("array", rank, self.rank), number)
        for rank in self.everybody:
            self._store(("array", rank, self.rank), number + RESULT)

    def one_shot_copy(self) -> None:
        number = self.next_round()
        self.announce(number)
        self.begin_stores()
        self.fill(number)
        self.tell("filled", number)
        self.wait("filled", number)
        self.agreed()
        for rank in self.others:
            self.read(rank, number)

    def pipelined_copy(self) -> None:
        self.announce(self.next_round(TURNS))
        self.begin_stores()
        for number in range(self.first, self.first + TURNS):
            self.tell("filled", number)
            for part, halves in enumerate(self.parts):
                self.fill(number, halves)
                self.said.append("hint")
                self.tell("parts", 2 * number + part)
            if number == self.first:
                self.wait("filled", number)
                self.agreed()
            for part, halves in enumerate(self.parts):
                for rank in self.others:
                    self.wait_for(rank, 2 * number + part)
                    self.said.append("hint")
                    self.read(rank, number, halves)
            self.said.append("results")  # what that is for is in `shared`
            self.wait("filled", number)

    def next_round(self, rounds: int = 1) -> int:
        self.said.append("number")
        self.first = self.number + 1
        self.met = 0
        self.number += rounds
        return self.first

    def announce(self, first: int) -> None:
        self.said.append("hash")
        self._store(("hash", self.rank, self._half("hash", first)), first)

    def agreed(self) -> None:
        self.said.append("hashes")
        for rank in self.others:
            self._load(("hash", rank, self._half("hash", self.first)), self.first)

    def begin_stores(self) -> None:
        self.said.append("times")

    def fill(self, number: int, halves: Sequence[bool] = WHOLE[0]) -> None:
        for result in halves:
            self.put(number, "fill", result=result)

    def put(self, number: int, step: str, *, result: bool) -> None:
        self.said += ["change", step]
        before, self.is_streaming = self.is_streaming, self.streams(self.puts)
        if before and not self.is_streaming:
            self._fence("change")  # a timing ends with it, see `collectives.node.core_probe`
        self.puts += 1
        place = ("slot", self.rank, self._half("slot", number), result)
        self._store(place, number + RESULT * result, self.is_streaming)

    def read(self, rank: int, number: int, halves: Sequence[bool] = WHOLE[0]) -> None:
        self.said.append("read")
        for result in halves:
            self.load_slot(rank, number, result=result)

    def load_slot(self, rank: int, number: int, *, result: bool) -> None:
        place = ("slot", rank, self._half("slot", number), result)
        self._load(place, number + RESULT * result)

    def tell(self, word: str, number: int) -> None:
        self.said += ["fence", TOLD[word]]
        if self.is_streaming:
            self._fence(word)
        if self._is_left_out("tell", word):
            return
        ordered = not self._is_left_out("release", word)
        self.steps.append(Step(RELEASE, self._place((word, self.rank)), number, ordered=ordered))

    def wait(self, word: str, number: int) -> None:
        self.said.append(AWAITED[word])
        if not self._is_left_out("wait", word):
            for rank in self.others:
                self.steps.append(Step(WAIT, self._place((word, rank)), number))

    def wait_for(self, rank: int, number: int) -> None:
        self.said.append("part is there")
        if not self._is_left_out("wait", "parts"):
            self.steps.append(Step(WAIT, self._place(("parts", rank)), number))

    def _fence(self, word: str) -> None:
        if not self._is_left_out("fence", word):
            self.steps.append(Step(FENCE, -1, 0))

    def _half(self, what: str, number: int) -> int:
        return 0 if self.without[1] == what else number % 2

    def _is_left_out(self, *what: str) -> bool:
        return self.without in ((self.kind, *what), ("", *what))

    def _store(self, name: tuple[object, ...], value: int, streamed: bool = False) -> None:
        self.steps.append(Step(STORE, self._place(name), value, streamed))

    def _load(self, name: tuple[object, ...], value: int) -> None:
        self.steps.append(Step(LOAD, self._place(name), value))

    def _place(self, name: tuple[object, ...]) -> int:
        return self.places.setdefault(name, len(self.places))


KINDS = {
    "one_shot": Rank.one_shot,
    "pipelined": Rank.pipelined,
    "direct": Rank.direct,
    "elsewhere": Rank.elsewhere,
    "reduce_scatter": Rank.reduce_scatter,
    "shared": Rank.shared,
    "one_shot_copy": Rank.one_shot_copy,
    "pipelined_copy": Rank.pipelined_copy,
}
OF_TWO = {"direct", "elsewhere"}


def steps_of(kind: str) -> list[str]:
    """Return the names of the steps that a rank takes in a call, in their order."""
    rank = Rank(0, 2, {}, lambda put: False, ("", "", ""))
    rank.call(kind)
    return rank.said


class State(NamedTuple):
    """Where all ranks stand, and what everybody sees."""

    begun: tuple[int, ...]  # steps, of each rank
    open: tuple[tuple[int, ...], ...]  # of each rank, those that may not have happened yet
    memory: tuple[int, ...]


def explore(
    size: int,
    calls: Sequence[str],
    processor: str,
    streams: Callable[[int, int], bool] = lambda rank, put: False,
    without: tuple[str, str, str] = ("", "", ""),
) -> int:
    """Try every order of what some ranks do; returns in how many states they can be.

    Args:
        size: ranks.
        calls: the kinds of the calls that each of them makes.
        processor: X86_64 or ARM64.
        streams: whether a rank streams what it puts into a slot, by how often it did that before.
        without: what all ranks leave out, see `Rank`.

    Raises:
        Wrong: in one of the orders a rank finds what is not meant for it, stores where another one
            may still read, or all wait for each other.
    """
    places: dict[tuple[object, ...], int] = {}
    programs = []
    for number in range(size):
        parts = HALVES if size == 2 else WHOLE  # of which three ranks have too many states
        rank = Rank(number, size, places, lambda put, n=number: streams(n, put), without, parts)
        for kind in calls:
            rank.call(kind)
        programs.append(rank.steps)
    return _Exploration(programs, len(places), processor).run()


class _Exploration:
    """All states that lists of steps can come to."""

    def __init__(self, programs: list[list[Step]], places: int, processor: str) -> None:
        self.programs = programs
        self.places = places
        self.is_arm = processor == ARM64

    def run(self) -> int:
        size = len(self.programs)
        begin = State((0,) * size, ((),) * size, (0,) * self.places)
        seen, left = {begin}, [begin]
        while left:
            state = left.pop()
            following = [after for rank in range(size) for after in self._moves(state, rank)]
            if not following and state.begun != tuple(map(len, self.programs)):
                raise Wrong(f"all wait for each other after {state.begun} steps")
            new = set(following) - seen
            seen |= new
            left += new
        return len(seen)

    def _moves(self, state: State, rank: int) -> Iterator[State]:
        """Yield what can follow by one rank: it begins a step, or what it has told is seen."""
        own, begun, waiting = self.programs[rank], state.begun[rank], state.open[rank]
        if begun < len(own):
            step = own[begun]
            if step.kind == LOAD:
                self._check_load(state, rank, begun)
            elif step.kind == STORE and self._visible(own, waiting, begun):
                self._check_store(state, rank, begun)
            if step.kind == WAIT:
                if state.memory[step.place] >= step.value:
                    yield _after(state, rank, begun + 1, waiting, state.memory)
            elif step.kind == LOAD and not self.is_arm:
                yield _after(state, rank, begun + 1, waiting, state.memory)
            else:
                yield _after(state, rank, begun + 1, (*waiting, begun), state.memory)
        for index, number in enumerate(waiting):
            if own[number].kind in (RELEASE, FENCE):
                anywhere = self.is_arm and not own[number].ordered
                if anywhere or not _behind(own, waiting[:index]):
                    yield self._happened(state, rank, index)

    def _happened(self, state: State, rank: int, index: int) -> State:
        """Return the state after an open release or fence, and what it comes after."""
        own, waiting, memory = self.programs[rank], state.open[rank], state.memory
        step, rest = own[waiting[index]], []
        for number in waiting[:index]:
            earlier = own[number]
            stays = earlier.streamed and not self.is_arm and step.kind == RELEASE
            if stays or not step.ordered:
                rest.append(number)
            elif earlier.kind == STORE:
                memory = _stored(memory, earlier)
        if step.kind == RELEASE:
            memory = _stored(memory, step)
        after = _after(state, rank, state.begun[rank], (*rest, *waiting[index + 1 :]), memory)
        for number in waiting[index + 1 :]:
            hidden = own[number].kind == STORE and not self._visible(own, waiting, number)
            if hidden and self._visible(own, after.open[rank], number):
                self._check_store(after, rank, number)
        return after

    def _visible(self, own: list[Step], waiting: Sequence[int], number: int) -> bool:
        """Tell whether others may find what an open store has stored."""
        if self.is_arm or own[number].streamed:
            return True
        return not _behind(own, [earlier for earlier in waiting if earlier < number])

    def _check_load(self, state: State, rank: int, number: int) -> None:
        """Refuse a load that may find anything but what it expects."""
        step = self.programs[rank][number]
        found = {state.memory[step.place]}
        for earlier in state.open[rank]:
            mine = self.programs[rank][earlier]
            if mine.kind == STORE and mine.place == step.place:
                found = {mine.value}
        for _, other in self._open_at(state, rank, step.place, STORE):
            found.add(other.value)
        if found != {step.value}:
            raise Wrong(f"rank {rank}, step {number}, {step}: finds one of {found}")

    def _check_store(self, state: State, rank: int, number: int) -> None:
        """Refuse a store where another rank may still load, or store another datum."""
        step = self.programs[rank][number]
        for kind in (LOAD, STORE):
            for other, theirs in self._open_at(state, rank, step.place, kind):
                if theirs.value != step.value:
                    raise Wrong(f"rank {rank}, step {number}, {step}: rank {other} is at {theirs}")

    def _open_at(
        self, state: State, rank: int, place: int, kind: str
    ) -> Iterator[tuple[int, Step]]:
        """Yield what other ranks may be doing at a place, as far as it can be noticed."""
        for other, own in enumerate(self.programs):
            if other == rank:
                continue
            for number in state.open[other]:
                step = own[number]
                there = step.kind == kind and step.place == place
                if there and (kind == LOAD or self._visible(own, state.open[other], number)):
                    yield other, step


def _behind(own: list[Step], waiting: Sequence[int]) -> bool:
    """Tell whether a release or a fence is among these open steps."""
    return any(own[number].kind in (RELEASE, FENCE) for number in waiting)


def _after(
    state: State, rank: int, begun: int, waiting: tuple[int, ...], memory: tuple[int, ...]
) -> State:
    return State(
        (*state.begun[:rank], begun, *state.begun[rank + 1 :]),
        (*state.open[:rank], waiting, *state.open[rank + 1 :]),
        memory,
    )


def _stored(memory: tuple[int, ...], step: Step) -> tuple[int, ...]:
    return (*memory[: step.place], step.value, *memory[step.place + 1 :])
