"""Request handler of variables: waits for initial values and dispatches to threads.

The thread that receives messages runs short actions itself if their locks are free. A thread pool
runs all other actions, so that the receiving thread stays free and variables change in parallel.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from strategies.core.thread_pool import ThreadPool
from strategies.errors import CancelledError, OpError
from strategies.rpc import message
from strategies.rpc.registry import ResourceType, register_type
from strategies.rpc.server_requests import ServerRequest
from strategies.rpc.wait_limits import current_settings
from strategies.rpc.wire import Array
from strategies.variables.initial_values import part_from_dict
from strategies.variables.server_ops import ACTIONS, READS, Result, execute
from strategies.variables.stored_variable import StoredVariable, WaitInitialized, make_optimizer

__all__ = ["KIND", "UPDATES", "attempt", "outcome_of", "initialize_once"]

_log = logging.getLogger(__name__)

UPDATES = ThreadPool("updates", lambda: current_settings().update_threads)
"""Threads for long actions on variables."""

# Limits for actions in the receiving thread, which block it for at most 0.2 ms. Dispatching to a
# thread adds 0.1 to 0.2 ms to an update of 1 MB (`benchmarks/servers.py`).
_FEW = 8
_SHORT = 1 << 20  # bytes

# Variables from this size on get a job of their own if a message contains several variables.
_LONG = 1 << 20  # bytes


def attempt(
    operation: str, thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]
) -> Result | OpError:
    """Run an action with the variable's lock held; return its result or error."""
    with thing.lock:
        return _attempt(operation, thing, arrays, options)


def _attempt(
    operation: str, thing: StoredVariable, arrays: Sequence[Array], options: Mapping[str, Any]
) -> Result | OpError:
    try:
        return execute(operation, thing, arrays, options)
    except OpError as error:
        return error
    except BaseException as error:  # also SystemExit of a learning rate
        _log.exception("%s of variable %s has failed", operation, thing.name)
        # As on another task, so that local and remote callers see the same class.
        return message.error_from(message.error_to(error))


def outcome_of(facts: Any, arrays: list[Array]) -> Result | OpError:
    """Decode a result or error from a message; see `_BatchRequest`."""
    return message.error_from(facts) if isinstance(facts, dict) else Result(facts, arrays)


class _BatchRequest:
    """One request, started at once: an action on each of several variables."""

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
        # One entry is for all variables; see `requests._question`.
        self._options = options if len(options) > 1 else options * len(things)
        # In the order of the variables, because jobs finish in any order.
        self._outcomes: list[Result | OpError | None] = [None] * len(things)
        self._lock = threading.Lock()
        self._jobs: dict[tuple[int, ...], Callable[[], None]] = {}  # variable numbers -> job
        self._missing = 0
        self._wait = WaitInitialized(things)
        self._wait.on_done = self._go
        # Before `submit`, which runs `_go` at once if all variables have values.
        work.wait(self._withdraw, lambda: self._withdraw(CancelledError("given up")))
        self._wait.submit(self._wait)

    def _withdraw(self, error: OpError) -> None:
        self._wait.withdraw(self._wait, error)  # no effect if all are initialized
        for numbers, job in self._jobs.items():  # running jobs finish
            if UPDATES.withdraw(job):
                self._end(dict.fromkeys(numbers, error))

    def _go(self) -> None:
        self._wait.on_done = None  # breaks a reference cycle that would keep arrays alive
        if self._wait.error is not None:
            self._release()
            self._work.fail(self._wait.error)
        elif not self._at_once():
            self._jobs = {numbers: partial(self._do, numbers) for numbers in self._divide()}
            # Set before the first job is submitted, because jobs may finish at once.
            self._missing = len(self._jobs)
            for job in list(self._jobs.values()):
                UPDATES.submit(job)

    def _at_once(self) -> bool:
        """Run short actions in this thread if all locks are free; return False otherwise."""
        # Cheap tests first: `_bytes` looks at every array.
        if len(self._things) > _FEW or self._not_ready() or self._bytes() > _SHORT:
            return False
        # All locks or none: an action that ran could not be taken back when the next lock is busy.
        with ExitStack() as locks:
            for thing in self._things:
                # The receiving thread must not wait for an update.
                if not thing.lock.acquire(blocking=False):
                    return False
                locks.callback(thing.lock.release)
            for index, thing in enumerate(self._things):
                self._outcomes[index] = _attempt(
                    self._operation, thing, self._arrays[index], self._options[index]
                )
        # Without the locks, because replying copies small arrays.
        self._reply()
        return True

    def _not_ready(self) -> bool:
        """Return whether an optimizer may have to be compiled first, which takes a second."""
        if self._operation != "apply_gradients":
            return False
        # The first step of an optimizer compiles its kernel.
        return any(thing.optimizer is None or not thing.optimizer.step for thing in self._things)

    def _bytes(self) -> int:
        """Estimate the bytes read and written, without arrays that are sent uncopied."""
        rows = self._operation == "gather"
        total = 0
        for thing, arrays, options in zip(self._things, self._arrays, self._options, strict=True):
            total += sum(array.nbytes for array in arrays)
            if self._operation in READS:
                # A read without compression returns a view, and copies nothing.
                whole = "as" in options and not rows
            else:
                # An update by rows copies the whole value only if a view exists.
                whole = len(arrays) < 2 or thing.is_read
            total += thing.initialized_value.nbytes if whole else 0
            length = max(thing.initialized_value.shape[:1], default=1)
            total += (
                arrays[0].size * (thing.initialized_value.nbytes // max(length, 1)) if rows else 0
            )
        return total

    def _divide(self) -> list[tuple[int, ...]]:
        """Return the variables of each job: one job per large variable, one for the rest."""
        numbers = range(len(self._things))
        reads = self._operation in READS
        sizes = [sum(array.nbytes for array in arrays) for arrays in self._arrays]
        # Reads of whole values copy nothing, so they are not worth a job each.
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
            # Errors travel as facts of their variable: the other variables of the request have
            # succeeded.
            facts.append(outcome.facts)
            # The client divides the arrays of the reply by these counts.
            counts.append(len(outcome.arrays))
            arrays += outcome.arrays
        self._release()
        self._work.reply(arrays, facts=facts, counts=counts)

    def _release(self) -> None:
        """Drop the arrays, so that the next message can reuse their memory."""
        self._arrays = []
        self._outcomes = []
        self._work.values = []


def initialize_once(
    thing: StoredVariable, value: Array | Callable[[], Array], wanted: Mapping[str, Any]
) -> None:
    """Set the initial value unless the variable has one; see `StoredVariable.initialize`.

    Raises:
        InvalidArgumentError: the variable has a value with other properties.
    """
    if thing.value is not None:  # without the lock: updates may hold it for long
        thing.check(wanted)
        return
    words = wanted["optimizer"]
    optimizer = None if words is None else make_optimizer(words)
    with thing.lock:
        # False if another request was faster; its value counts.
        first = thing.initialize(value, optimizer, wanted)
    # Without the lock, which the waiting requests need at once.
    if first:
        thing.tell()
    else:
        thing.check(wanted)


def _initialize(thing: StoredVariable, work: ServerRequest) -> None:
    (value,) = work.values
    # Always in the pool, because a slow initializer may hold the lock for seconds.
    UPDATES.submit(partial(_set_first, thing, np.asarray(value), work))


def _make(thing: StoredVariable, work: ServerRequest) -> None:
    """Compute the initial value on this task; the first request wins."""

    def make() -> Array:
        # Inside the function, so that importing the initializer also happens in the pool.
        return part_from_dict(work.arguments["part"])()

    # Always in the pool, because an initializer may take seconds.
    UPDATES.submit(partial(_set_first, thing, make, work))


def _set_first(
    thing: StoredVariable, value: Array | Callable[[], Array], work: ServerRequest
) -> None:
    try:
        initialize_once(thing, value, work.arguments["is"])
    except BaseException as error:  # also SystemExit of an initializer
        work.fail(error)  # the pool would only log it, and the caller would wait for ever
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
        {operation: partial(_BatchRequest, operation) for operation in ACTIONS},
    )
)
