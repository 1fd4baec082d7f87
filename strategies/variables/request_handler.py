"""Request handler of variables: waits for values and dispatches to threads.

Short actions are performed at once, by the thread that takes messages, if nobody holds a lock that
they need. All others are left to a few threads, so that this one stays free, and so that different
variables are changed at the same time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from strategies.errors import CancelledError, OpError
from strategies.rpc import message, pool
from strategies.rpc.registry import ResourceType, register_type
from strategies.rpc.server_requests import ServerRequest
from strategies.rpc.wire import Array
from strategies.variables.initial_values import part_from_dict
from strategies.variables.server_ops import ACTIONS, READS, Result, execute
from strategies.variables.stored_variable import StoredVariable, WaitInitialized, make_optimizer

__all__ = ["KIND", "attempt", "outcome_of", "initialize_once"]

_log = logging.getLogger(__name__)

# A longer first value is copied by another thread than the one that takes messages.
_SHORT_VALUE = 1 << 16  # bytes

# An action on so many variables and bytes takes 0.2 ms at most; with a thread that has to take it
# over, an update of 1 MB takes 0.1 to 0.2 ms more (`benchmarks/servers.py`).
_FEW = 8
_SHORT = 1 << 20  # bytes

# Variables from this size on are changed by different threads, if one message concerns several.
_LONG = 1 << 20  # bytes


def attempt(
    operation: str, thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]
) -> Result | OpError:
    """Perform an action as soon as nobody else is busy with the variable."""
    with thing.lock:
        return _attempt(operation, thing, arrays, options)


def _attempt(
    operation: str, thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]
) -> Result | OpError:
    try:
        return execute(operation, thing, arrays, options)
    except OpError as error:
        return error
    except Exception as error:
        _log.exception("%s of variable %s has failed", operation, thing.name)
        return message.error_from(message.error_to(error))


def outcome_of(facts: Any, arrays: list[Array]) -> Result | OpError:
    """Return an outcome that was sent; see `_BatchRequest`."""
    return message.error_from(facts) if isinstance(facts, dict) else Result(facts, arrays)


class _BatchRequest:
    """One request: an action on each of several variables."""

    def __init__(
        self, operation: str, things: Sequence[StoredVariable], work: ServerRequest
    ) -> None:
        self._operation = operation
        self._things = things
        self._work = work
        arrays = iter(work.values)
        counts = work.arguments["counts"]
        self._arrays = [[next(arrays) for _ in range(count)] for count in counts]
        options = work.arguments["options"]
        self._options = options if len(options) > 1 else options * len(things)
        self._outcomes: list[Result | OpError | None] = [None] * len(things)
        self._lock = threading.Lock()
        self._jobs: dict[tuple[int, ...], Callable[[], None]] = {}  # by numbers of variables
        self._missing = 0
        self._wait = WaitInitialized(things)
        self._wait.on_done = self._go
        work.wait(self._withdraw, lambda: self._withdraw(CancelledError("given up")))

    def start(self) -> None:
        self._wait.submit(self._wait)

    def _withdraw(self, error: OpError) -> None:
        self._wait.withdraw(self._wait, error)  # nothing, if all are ready
        for numbers, job in self._jobs.items():  # one that has begun is finished
            if pool.UPDATES.withdraw(job):
                self._end(dict.fromkeys(numbers, error))

    def _go(self) -> None:
        self._wait.on_done = None  # else arrays live until the garbage collector finds the circle
        if self._wait.error is not None:
            self._release()
            self._work.fail(self._wait.error)
        elif not self._at_once():
            self._jobs = {numbers: partial(self._do, numbers) for numbers in self._divide()}
            self._missing = len(self._jobs)
            for job in list(self._jobs.values()):
                pool.UPDATES.submit(job)

    def _at_once(self) -> bool:
        """Perform everything here if that is short, and if no lock has to be waited for."""
        if len(self._things) > _FEW or self._not_ready() or self._bytes() > _SHORT:
            return False
        with ExitStack() as locks:
            for thing in self._things:
                if not thing.lock.acquire(blocking=False):
                    return False
                locks.callback(thing.lock.release)
            for index, thing in enumerate(self._things):
                self._outcomes[index] = _attempt(
                    self._operation, thing, self._arrays[index], self._options[index]
                )
        self._reply()
        return True

    def _not_ready(self) -> bool:
        """Whether an optimizer may have to be compiled first, which takes a second."""
        if self._operation != "apply_gradients":
            return False
        return any(thing.optimizer is None or not thing.optimizer.step for thing in self._things)

    def _bytes(self) -> int:
        """Return about how many bytes are read or written, apart from what is sent as it is."""
        rows = self._operation == "gather"
        total = 0
        for thing, arrays, options in zip(self._things, self._arrays, self._options, strict=True):
            total += sum(array.nbytes for array in arrays)
            if self._operation in READS:
                whole = "as" in options and not rows
            else:
                whole = len(arrays) < 2 or thing.is_read
            total += thing.initialized_value.nbytes if whole else 0
            length = max(thing.initialized_value.shape[:1], default=1)
            total += (
                arrays[0].size * (thing.initialized_value.nbytes // max(length, 1)) if rows else 0
            )
        return total

    def _divide(self) -> list[tuple[int, ...]]:
        """Return the variables of each job: one for each long variable, and one for all others."""
        numbers = range(len(self._things))
        reads = self._operation in READS
        sizes = [sum(array.nbytes for array in arrays) for arrays in self._arrays]
        long = [n for n in numbers if not reads and sizes[n] >= _LONG]
        short = sorted({*numbers} - {*long})
        return [(n,) for n in long] + ([tuple(short)] if short else [])

    def _do(self, numbers: Sequence[int]) -> None:
        outcomes = {
            n: attempt(self._operation, self._things[n], self._arrays[n], self._options[n])
            for n in numbers
        }
        self._end(outcomes)

    def _end(self, outcomes: Mapping[int, Result | OpError]) -> None:
        with self._lock:
            for number, outcome in outcomes.items():
                self._outcomes[number] = outcome
            self._missing -= 1
            last = self._missing == 0
        if last:
            self._reply()

    def _reply(self) -> None:
        facts: list[Any] = []
        counts = []
        arrays: list[Array] = []
        for outcome in self._outcomes:
            assert outcome is not None
            if isinstance(outcome, OpError):
                outcome = Result(message.error_to(outcome), [])
            facts.append(outcome.facts)
            counts.append(len(outcome.arrays))
            arrays += outcome.arrays
        self._release()
        self._work.reply(arrays, facts=facts, counts=counts)

    def _release(self) -> None:
        """Let go of the arrays, whose memory is wanted for the next message."""
        self._arrays = []
        self._outcomes = []
        self._work.values = []


def _serve(operation: str, things: Sequence[StoredVariable], work: ServerRequest) -> None:
    _BatchRequest(operation, things, work).start()


def initialize_once(
    thing: StoredVariable, value: Array | Callable[[], Array], wanted: Mapping[str, Any]
) -> None:
    """Set the first value, unless there is one; see `StoredVariable.initialize`.

    Raises:
        InvalidArgumentError: there is one, and it was made for something else.
    """
    if thing.value is not None:  # without the lock, which an update may hold for long
        thing.check(wanted)
        return
    words = wanted["optimizer"]
    optimizer = None if words is None else make_optimizer(words)
    with thing.lock:
        first = thing.initialize(value, optimizer, wanted)
    if first:
        thing.tell()
    else:
        thing.check(wanted)


def _initialize(thing: StoredVariable, work: ServerRequest) -> None:
    (value,) = work.values
    value = np.asarray(value)
    if value.nbytes > _SHORT_VALUE:
        pool.UPDATES.submit(partial(_set_first, thing, value, work))
    else:
        _set_first(thing, value, work)


def _make(thing: StoredVariable, work: ServerRequest) -> None:
    """Make the first value here; of several who ask for it, the first."""

    def make() -> Array:
        return part_from_dict(work.arguments["part"])()

    pool.UPDATES.submit(partial(_set_first, thing, make, work))


def _set_first(
    thing: StoredVariable, value: Array | Callable[[], Array], work: ServerRequest
) -> None:
    try:
        initialize_once(thing, value, work.arguments["is"])
    except Exception as error:
        work.fail(error)
    else:
        work.reply()


KIND = register_type(
    ResourceType(
        "Variable",
        lambda description, name: StoredVariable(name),
        StoredVariable.difference,
        {
            "initialize": _initialize,
            "make": _make,
            "missing": lambda thing, work: work.reply(missing=thing.value is None),
        },
        StoredVariable.discard,
        {operation: partial(_serve, operation) for operation in ACTIONS},
    )
)
