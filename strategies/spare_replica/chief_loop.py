"""Chief loop: collects enough gradients, updates, publishes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from collectives import extend
from strategies.accumulators.remote import AnyAccumulation
from strategies.accumulators.state_machine import Take
from strategies.errors import OpError
from strategies.rpc import message, operation
from strategies.rpc.wire import Array
from strategies.spare_replica.token_queue import TokenQueue

__all__ = ["ChiefLoop"]

_log = logging.getLogger(__name__)

_REMIND_AFTER = 60.0  # seconds in one step until a warning names the missing workers


class ChiefLoop(extend.BackgroundThread):
    """Thread that runs steps from `start` until `stop` or an error.

    `stop` ends its pending takes.

    Args:
        rounds: queue that publishes steps and errors.
        accumulations: accumulations, each with the gradients of some variables.
        update: updates the variables by the gradients of each accumulation, and returns their
            values, which later updates do not change.
    """

    def __init__(
        self,
        rounds: TokenQueue,
        accumulations: Sequence[AnyAccumulation],
        update: Callable[[list[Sequence[Any]]], Sequence[Array]],
    ) -> None:
        super().__init__("spare-replicas")
        self._rounds = rounds
        self._accumulations = accumulations
        self._update = update
        self._takes: list[Take] = []

    def _wake(self) -> None:
        for accumulation, take in zip(self._accumulations, self._takes, strict=False):
            # Ends a waiting take, and returns gradients that have been taken but not used.
            accumulation.abandon(take)

    def _begin(self) -> None:
        """Request the gradients of the next step."""
        self._takes = [Take(self._rounds.aggregate) for _ in self._accumulations]
        for accumulation, take in zip(self._accumulations, self._takes, strict=True):
            accumulation.submit(take)
        # `stop` may have abandoned the takes of the step before, or these before `submit`.
        if self._stopping:
            self._wake()

    def _run(self) -> None:
        try:
            self._begin()
            while True:
                for accumulation, take in zip(self._accumulations, self._takes, strict=True):
                    # One after the other, but all were requested before, so the waits overlap.
                    self._wait(accumulation, take)
                if self._stopping:  # the takes were abandoned, and their gradients returned
                    return
                values = self._update([take.results for take in self._takes])
                # Before `publish`, which lets workers send the gradients that complete the take.
                self._begin()
                self._rounds.publish(self._rounds.step + 1, values)
        except Exception as error:
            if not self._stopping:
                # After `stop` the abandoned takes end with an error, as intended.
                _log.exception("spare replicas: step %d has failed", self._rounds.step)
            # Other workers receive the error in a message, which keeps only classes of `OpError`.
            known = isinstance(error, OpError)
            failure = error if known else message.error_from(message.error_to(error))
            assert isinstance(failure, OpError)
            if failure is not error:
                failure.__cause__ = error
            # Waiting workers get the error instead of a step.
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
