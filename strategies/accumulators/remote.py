"""Accumulators that are on another task: every attempt is a message there.

`KIND` serves them, and `RemoteAccumulation` is the other end. All parts of an accumulator travel in
one message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strategies.accumulators.engine import Accumulation, Apply, Engine, Take
from strategies.accumulators.sums import Gradient, Part
from strategies.errors import DataLossError
from strategies.remote.attempt import Attempt, RemoteAttempts, serve
from strategies.remote.containers import ResourceKind, Work, register
from strategies.remote.outgoing import Answer
from strategies.remote.service import Service
from strategies.sparse import Rows

__all__ = ["KIND", "RemoteAccumulation", "open_accumulation"]


def open_accumulation(
    service: Service,
    parts: Sequence[Part],
    *,
    mean: bool,
    name: str,
    step: int = 0,
    task: int | str | None = None,
    container: str | None = None,
) -> Engine:
    """Find or make an accumulator on a task; see `Service.open`."""
    description: dict[str, Any] = {
        "parts": [[p.name, p.dtype, p.shape and list(p.shape), p.form] for p in parts],
        "mean": mean,
        "step": step,
    }
    if len(parts) == 1:  # for a device function that goes by size
        description |= {"shape": parts[0].shape, "dtype": parts[0].dtype}
    place, thing = service.open(KIND, description, name=name, task=task, container=container)
    return RemoteAccumulation(service, place) if thing is None else thing


class RemoteAccumulation(RemoteAttempts):
    """The engine of an accumulator of another task."""

    def request_of(self, attempt: Attempt) -> tuple[str, dict[str, Any], list[Any]]:
        """Return operation, arguments and values."""
        if isinstance(attempt, Apply):
            forms, values = _flat(attempt.gradients)
            given = {"forms": forms, "step": attempt.local_step, "worker": attempt.worker}
            return "apply", given, values
        assert isinstance(attempt, Take)
        return "take", {"count": attempt.count}, []

    def answered(self, attempt: Attempt, answer: Answer) -> None:
        """Note what came of an attempt."""
        if isinstance(attempt, Apply):
            attempt.accepted = answer.metadata["accepted"]
        elif isinstance(attempt, Take):
            attempt.results = _unflat(answer.metadata["forms"], answer.values)

    def set_step(self, step: int) -> None:
        """Set the current step."""
        self.service.request(self.place, "set_step", {"step": step})

    def state(self) -> tuple[int, int, dict[int, list[int]]]:
        """Return step, number of gradients in, and what became of each worker's."""
        answer = self.service.request(self.place, "state").metadata
        return answer["step"], answer["count"], {w: list(n) for w, n in answer["tally"]}


def _flat(gradients: Sequence[Gradient]) -> tuple[list[str], list[Any]]:
    """Return gradients as values of a message, and the form of each."""
    forms, values = [], []
    for gradient in gradients:
        if gradient is None:
            forms.append("none")
        elif isinstance(gradient, Rows):
            forms.append("rows")
            values += [gradient.indices, gradient.values]
        else:
            forms.append("dense")
            values.append(gradient)
    return forms, values


_LENGTHS = {"none": 0, "dense": 1, "rows": 2}  # values per form


def _unflat(forms: Sequence[str], values: Sequence[Any]) -> list[Gradient]:
    """Return the gradients of a message.

    Raises:
        DataLossError: forms and values do not fit each other.
    """
    gradients: list[Gradient] = []
    at = 0
    for form in forms:
        part = values[at : at + _LENGTHS.get(form, 0)]
        at += len(part)
        if len(part) != _LENGTHS.get(form, -1) or not all(hasattr(v, "dtype") for v in part):
            raise DataLossError(f"message: gradients cannot be read: {form!r:.80}")
        gradients.append(Rows(*part) if form == "rows" else part[0] if part else None)
    return gradients


# Operations, at the task where the accumulator is.


def _apply(engine: Accumulation, work: Work) -> None:
    given = work.arguments
    attempt = Apply(_unflat(given["forms"], work.values), given["step"], given["worker"])
    serve(engine, attempt, work, lambda done: work.reply(accepted=done.accepted))


def _take(engine: Accumulation, work: Work) -> None:
    def answer(attempt: Take) -> None:
        forms, values = _flat(attempt.results)
        work.reply(values, confirm=True, forms=forms)

    serve(engine, Take(work.arguments["count"]), work, answer)


def _set_step(engine: Accumulation, work: Work) -> None:
    engine.set_step(work.arguments["step"])
    work.reply()


def _state(engine: Accumulation, work: Work) -> None:
    step, count, tally = engine.state()
    work.reply(step=step, count=count, tally=list(tally.items()))


def _make(description: Mapping[str, Any], name: str) -> Accumulation:
    parts = [
        Part(variable, dtype, None if shape is None else tuple(shape), form)
        for variable, dtype, shape, form in description["parts"]
    ]
    return Accumulation(parts, mean=description["mean"], name=name, step=description["step"])


def _difference(engine: Accumulation, description: Mapping[str, Any]) -> str | None:
    wanted = _make(description, "")
    if len(engine.parts) != len(wanted.parts):
        return (
            f"the accumulator has another number of variables, expected {len(engine.parts)}, got "
            f"{len(wanted.parts)}"
        )
    for has, asked in zip(engine.parts, wanted.parts, strict=True):
        if has != asked:
            return f"the accumulator is of other variables, expected {has}, got {asked}"
    if engine.mean != wanted.mean:
        kinds = ["SUM", "MEAN"]
        return (
            f"the accumulator has another reduction_type, expected {kinds[engine.mean]}, got "
            f"{kinds[wanted.mean]}"
        )
    return None


KIND = register(
    ResourceKind(
        "accumulator",
        _make,
        _difference,
        {"apply": _apply, "set_step": _set_step, "state": _state, "take": _take},
        Accumulation.cancel_pending,
    )
)
