"""Requests to all ps tasks about one thing that they keep for this task, such as a snapshot."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from strategies.errors import OpError
from strategies.rpc.client import Reply
from strategies.rpc.multi_request import RequestTo
from strategies.rpc.registry import Address
from strategies.rpc.service import Service

__all__ = ["FILE_LIMIT", "TaskRequests"]

FILE_LIMIT = 3600.0
"""Seconds that a ps may take to write or read files: only a hanging file system takes longer."""

_numbers = itertools.count(1)


class TaskRequests:
    """Requests about one thing, which the ps tasks keep until `close` or the end of this task.

    Args:
        service: service that reaches the ps tasks.
        places: addresses of the parameter servers.
        devices: names of their tasks, for errors.
        kind: operation that begins the thing; the other operations are `kind_...`, and their
            argument `kind` is its number.
        purpose: first word of errors.
    """

    def __init__(
        self,
        service: Service,
        places: Sequence[Address],
        devices: Sequence[str],
        kind: str,
        purpose: str,
    ) -> None:
        self.places = places
        self.devices = devices
        self.told = {kind: next(_numbers)}
        self._service = service
        self._kind = kind
        self._purpose = purpose
        self._requests: list[int] = []

    def begin(self, places: Sequence[Address]) -> None:
        """Begin the thing on some ps tasks."""
        for place in places:
            # No reply: the ps releases the thing when this request, or this task, has ended.
            request = self._service.start(place, self._kind, lambda answer: None, self.told)
            self._requests.append(request)

    def send(self, operation: str) -> None:
        """Send a request to all ps tasks, without waiting for their replies."""
        for place in self.places:
            self._service.start(place, self._name(operation), lambda answer: None, self.told)

    def ask(
        self,
        operation: str,
        told: Sequence[Mapping[str, Any]],
        places: Sequence[Address] | None = None,
        timeout: float | None = None,
    ) -> list[Reply]:
        """Send one request to each ps, in parallel; raise the first error, with its task."""
        chosen = self.places if places is None else places
        questions = [
            RequestTo(place, self._name(operation), {**facts, **self.told})
            for place, facts in zip(chosen, told, strict=True)
        ]
        # All replies are awaited: a ps may still write to a directory that is removed afterwards.
        answers = self._service.ask(questions).answers(timeout)
        for place, answer in zip(chosen, answers, strict=True):
            if answer.error is not None:
                device = self.devices[self.places.index(place)]
                text = answer.error.message.removeprefix(f"{self._purpose}: ")
                raise type(answer.error)(f"{self._purpose}: {text} ({device})") from answer.error
        return answers

    def close(self) -> None:
        """Release the thing on all ps tasks; harmless when repeated."""
        requests, self._requests = self._requests, []
        for request in requests:
            with contextlib.suppress(OpError):  # the service may be closed by now
                self._service.disown(request)

    def _name(self, operation: str) -> str:
        return f"{self._kind}_{operation}"
