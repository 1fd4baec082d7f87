"""Chief loop: collects enough gradients, updates, publishes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from strategies.accumulators.remote import AnyAccumulation
from strategies.accumulators.state_machine import Take
from strategies.errors import OpError
from strategies.rpc import message, operation
from strategies.rpc.wire import Array
from strategies.spare_replica.token_queue import TokenQueue

__all__ = ["ChiefLoop"]

_log = logging.getLogger(__name__)

_REMIND_AFTER = 60.0  # seconds after which a step that does not end is reported


class ChiefLoop:
    """A thread that makes steps from `start` until `stop`, or an error.

    Args:
        rounds: where steps are published, and errors.
        accumulations: each with the gradients of some of the variables.
        update: changes the variables by the gradients of each accumulation, and returns copies of
            their values.
    """

    def __init__(
        self,
        rounds: TokenQueue,
        accumulations: Sequence[AnyAccumulation],
        update: Callable[[list[Sequence[Any]]], Sequence[Array]],
    ) -> None:
        self._rounds = rounds
        self._accumulations = accumulations
        self._update = update
        self._lock = threading.Lock()
        self._stopped = False
        self._takes: list[Take] = []
        self._thread = threading.Thread(target=self._run, name="spare replicas", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._begin()
        self._thread.start()

    def stop(self) -> None:
        """End what the thread waits for, and so the thread; harmless when repeated."""
        with self._lock:
            self._stopped = True
            takes = list(self._takes)
        for accumulation, take in zip(self._accumulations, takes, strict=False):
            accumulation.abandon(take)

    def join(self) -> None:
        """Wait for the end of the thread, which was stopped."""
        if self._thread.ident is not None:
            self._thread.join()

    def _begin(self) -> None:
        """Wait for the gradients of the next step."""
        with self._lock:
            self._takes = [Take(self._rounds.aggregate) for _ in self._accumulations]
            takes = list(self._takes)
        for accumulation, take in zip(self._accumulations, takes, strict=True):
            accumulation.submit(take)
        if self._stopped:
            self.stop()

    def _run(self) -> None:
        try:
            while True:
                for accumulation, take in zip(self._accumulations, self._takes, strict=True):
                    self._wait(accumulation, take)
                if self._stopped:  # what was taken went back
                    return
                values = self._update([take.results for take in self._takes])
                self._begin()  # before there are new gradients: the last one wakes this thread
                self._rounds.publish(self._rounds.step + 1, values)
        except Exception as error:
            if not self._stopped:
                _log.exception("spare replicas: step %d has failed", self._rounds.step)
            known = isinstance(error, OpError)
            failure = error if known else message.error_from(message.error_to(error))
            assert isinstance(failure, OpError)
            if failure is not error:
                failure.__cause__ = error
            self._rounds.fail(failure)

    def _wait(self, accumulation: AnyAccumulation, take: Take) -> None:
        woken = threading.Event()
        reminded = False
        while accumulation.when_done(take, woken.set) and not woken.wait(_REMIND_AFTER):
            if not reminded:
                reminded = True
                facts = self._rounds.step, take.count, _REMIND_AFTER, self._rounds.active_workers()
                _log.warning(
                    "spare replicas: step %d waits for %d gradients since %d s; workers %s have "
                    "not delivered any",
                    *facts,
                )
        operation.finish(accumulation, take, "take_grad")
