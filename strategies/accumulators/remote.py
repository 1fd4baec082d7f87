"""Accumulators on another task, by RPC.

`KIND` serves them, and `RemoteAccumulation` is the client. All parts of an accumulator are sent in
one message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from strategies.accumulators.gradient_sum import Gradient, GradientSpec
from strategies.accumulators.state_machine import Accumulation, Apply, Take
from strategies.core.sparse import Rows
from strategies.errors import DataLossError
from strategies.rpc.client import Reply
from strategies.rpc.operation import PendingOperation, RemoteAttempts, serve
from strategies.rpc.registry import ResourceType, describe_difference, register_type
from strategies.rpc.server_requests import ServerRequest
from strategies.rpc.service import Service

__all__ = ["KIND", "AnyAccumulation", "RemoteAccumulation", "open_accumulation"]


def open_accumulation(
    service: Service,
    parts: Sequence[GradientSpec],
    *,
    mean: bool,
    name: str,
    step: int = 0,
    most: int | None = None,
    task: int | str | None = None,
    container: str | None = None,
) -> AnyAccumulation:
    """Find or create an accumulator on a task; see `Service.open`."""
    description: dict[str, Any] = {
        # `and` keeps a shape of None, and () for a scalar.
        "parts": [[p.name, p.dtype, p.shape and list(p.shape), p.form] for p in parts],
        "mean": mean,
        "step": step,
        "most": most,
    }
    if len(parts) == 1:  # for device functions that place by size
        description |= {"shape": parts[0].shape, "dtype": parts[0].dtype}
    address, thing = service.open(KIND, description, name=name, task=task, container=container)
    # On its own task the state machine is used directly, without messages.
    return RemoteAccumulation(service, address) if thing is None else thing


class RemoteAccumulation(RemoteAttempts):
    """The state machine of an accumulator on another task."""

    def request_of(self, attempt: PendingOperation) -> tuple[str, dict[str, Any], list[Any]]:
        """Return operation, arguments and values."""
        if isinstance(attempt, Apply):
            step, worker, examples = attempt.local_step, attempt.worker, attempt.examples
            given = {"step": step, "worker": worker, "examples": examples}
            return "apply", given, _pack(attempt.gradients)
        assert isinstance(attempt, Take)
        return "take", {"count": attempt.count}, []

    def answered(self, attempt: PendingOperation, answer: Reply) -> None:
        """Store the result of an operation."""
        if isinstance(attempt, Apply):
            attempt.accepted = answer.metadata["accepted"]
        elif isinstance(attempt, Take):
            attempt.results = _unpack(answer.values)

    def set_step(self, step: int) -> None:
        """Set the current step."""
        self.service.request(self.address, "set_step", {"step": step})

    def state(self) -> tuple[int, int, dict[int, list[int]]]:
        """Return step, number of gradients, and used and dropped gradients per worker."""
        answer = self.service.request(self.address, "state").metadata
        return answer["step"], answer["count"], {w: list(n) for w, n in answer["tally"]}


AnyAccumulation: TypeAlias = Accumulation | RemoteAccumulation
"""The state machine of an accumulator, on its task or on another."""


def _pack(gradients: Sequence[Gradient]) -> list[Any]:
    """Return gradients as values of a message; `Rows` become a tuple."""
    return [(g.indices, g.values) if isinstance(g, Rows) else g for g in gradients]


def _unpack(values: Sequence[Any]) -> list[Gradient]:
    """Undo `_pack`."""
    gradients: list[Gradient] = []
    for value in values:
        parts = value if isinstance(value, tuple) else (value,)
        # A tuple is a pair of indices and rows, anything else one array or None.
        whole = len(parts) == 1 + isinstance(value, tuple)
        if not whole or not all(
            isinstance(part, np.ndarray) for part in parts if value is not None
        ):
            raise DataLossError(f"message: gradients cannot be read: {type(value).__name__}")
        gradients.append(Rows(*parts) if len(parts) == 2 else value)
    return gradients


# Operations on the accumulator's task.


def _apply(accumulation: Accumulation, work: ServerRequest) -> None:
    given = work.arguments
    attempt = Apply(_unpack(work.values), given["step"], given["worker"], given.get("examples"))
    serve(accumulation, attempt, work, lambda done: work.reply(accepted=done.accepted))


def _take(accumulation: Accumulation, work: ServerRequest) -> None:
    take = Take(work.arguments["count"])
    # Confirmed, so that `abandon` restores the sum if the other task dies before it arrives.
    serve(accumulation, take, work, lambda done: work.reply(_pack(done.results), confirm=True))


def _set_step(accumulation: Accumulation, work: ServerRequest) -> None:
    # Never waits, so it is answered here and needs no operation.
    accumulation.set_step(work.arguments["step"])
    work.reply()


def _state(accumulation: Accumulation, work: ServerRequest) -> None:
    step, count, tally = accumulation.state()
    work.reply(step=step, count=count, tally=list(tally.items()))


def _make(description: Mapping[str, Any], name: str) -> Accumulation:
    parts = [
        GradientSpec(variable, dtype, None if shape is None else tuple(shape), form)
        for variable, dtype, shape, form in description["parts"]
    ]
    mean, step, most = (description[key] for key in ("mean", "step", "most"))
    return Accumulation(parts, mean=mean, name=name, step=step, most=most)


def _difference(accumulation: Accumulation, description: Mapping[str, Any]) -> str | None:
    wanted = _make(description, "")
    if len(accumulation.parts) != len(wanted.parts):
        return (
            "the accumulator has another number of variables, expected "
            f"{len(accumulation.parts)}, got {len(wanted.parts)}"
        )
    for has, asked in zip(accumulation.parts, wanted.parts, strict=True):
        if has != asked:
            return f"the accumulator is of other variables, expected {has}, got {asked}"
    # Not the first step: the accumulator has moved on when a later worker opens it.
    own, other = (
        {"reduction_type": "MEAN" if of.mean else "SUM", "limit of gradients per step": of.most}
        for of in (accumulation, wanted)
    )
    return describe_difference("accumulator", own, other)


KIND = register_type(
    ResourceType(
        "accumulator",
        _make,
        _difference,
        {"apply": _apply, "set_step": _set_step, "state": _state, "take": _take},
        Accumulation.cancel_pending,
    )
)
