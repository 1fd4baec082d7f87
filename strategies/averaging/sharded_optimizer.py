"""`DistributedOptimizer` with sharded state, for arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import collectives as cc
from strategies.averaging.consistency import settings_of
from strategies.averaging.optimizer import ArrayOptimizer, AveragingOptimizer, Pair, host_value
from strategies.averaging.options import OPERATION, AveragingOptions
from strategies.averaging.sharded_buckets import box_of, part_of
from strategies.checkpoint.boxes import Box, Slice, inside, whole
from strategies.optimizers.base import Optimizer
from strategies.optimizers.gradient_pairs import is_variable
from strategies.replicas.context import require_one_replica

__all__ = ["FixedRanks", "ShardedOptimizer", "check_elementwise"]


class _Part(NamedTuple):
    """A variable of the wrapped optimizer: this rank's part of one of the program."""

    name: str
    value: Any


class FixedRanks:
    """What an optimizer with sharded state rejects, because each rank has a part of the state."""

    def join(self) -> NoReturn:
        """Raise an error: each rank must update its part in every step.

        Raises:
            ValueError: in every case.
        """
        raise ValueError(
            "join: with shard_state each rank updates its part in every step, expected steps with "
            "examples=0 on ranks without data"
        )

    def rebind(self, comm: cc.Communicator) -> NoReturn:
        """Raise an error: the state of a dead rank is lost.

        Raises:
            ValueError: in every case.
        """
        raise ValueError(
            "rebind: with shard_state the state of a dead rank is lost, expected a new optimizer, "
            "restored from a checkpoint"
        )


class ShardedOptimizer(FixedRanks, AveragingOptimizer):
    """Averages gradients, and updates on each rank a part of every variable.

    Returned by `DistributedOptimizer`. Each rank holds the slots of its parts alone. The state
    contains them as slices, which `Saver` writes in sharded checkpoints.

    Args:
        optimizer: an elementwise optimizer.
        comm: the ranks.
        rule: options of the averaging.
    """

    def __init__(
        self, optimizer: ArrayOptimizer, comm: cc.Communicator, rule: AveragingOptions
    ) -> None:
        super().__init__(optimizer, comm, rule, partial(settings_of, optimizer))
        self._boxes: dict[str, tuple[Box, tuple[int, ...]]] = {}  # name -> part, whole shape
        self._loaded: Mapping[str, Any] | None = None  # state whose arrays may be whole

    def apply_gradients(
        self, grads_and_vars: Iterable[Pair], *, examples: float | None = None
    ) -> None:
        """Average the gradients, update this rank's parts, and gather the variables of all ranks.

        *Collective*. Arguments and errors as `AveragingOptimizer.apply_gradients`.

        Raises:
            ValueError: a gradient is sparse, or the first step had other variables; on all ranks.
        """
        require_one_replica("apply_gradients")
        super().apply_gradients(grads_and_vars, examples=examples)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, with a `Slice` of each slot."""
        state = self.optimizer.state_dict()
        if self._loaded is not None:
            return state
        return {name: self._sliced(name, value) for name, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of this rank, or a whole one, such as one without sharding."""
        plain = {name: x.array if isinstance(x, Slice) else x for name, x in state.items()}
        super().load_state_dict(plain)
        # The variables, and thereby the parts, may be unknown until the next step.
        self._loaded = dict(state)

    def _update(self, averaged: Sequence[Any], variables: Sequence[Any]) -> None:
        values = [
            host_value(variable.value if is_variable(variable) else variable, f"position {i}")
            for i, variable in enumerate(variables)
        ]
        parts = []
        for i, (variable, value) in enumerate(zip(variables, values, strict=True)):
            # The key of the slots, as without sharding.
            name = variable.name if is_variable(variable) else str(i)
            shape = tuple(value.shape)
            box = box_of(shape, self.comm.rank, self.comm.size)
            self._boxes[name] = box, shape
            parts.append(_Part(name, value[inside(box, whole(shape))]))
        if self._loaded is not None:
            state, self._loaded = self._loaded, None
            self.optimizer.load_state_dict({n: self._own(n, x) for n, x in state.items()})
        self.optimizer.apply_gradients(zip(averaged, parts, strict=True))
        self._averaging.gather(values, [part.value for part in parts])
        for variable in variables:
            # Copies the value to further devices of a variable.
            if hasattr(variable, "settle"):
                variable.settle(variable.value)

    def _box(self, slot: str) -> tuple[Box | None, tuple[int, ...]]:
        return self._boxes.get(slot.partition("/")[2], (None, ()))

    def _own(self, name: str, value: Any) -> Any:
        box, shape = self._box(name)
        return value if box is None else part_of(value, box, shape)

    def _sliced(self, name: str, value: Any) -> Any:
        box, shape = self._box(name)
        # Counts of updates are numbers; a slot without axes is whole on every rank.
        if box is None or not shape or not hasattr(value, "shape"):
            return value
        return Slice(value, box.start, shape)


def check_elementwise(optimizer: Any) -> None:
    """Reject an optimizer whose result for an element depends on other elements.

    Raises:
        ValueError: it is not known to be elementwise.
    """
    if not (isinstance(optimizer, Optimizer) and optimizer.elementwise):
        raise ValueError(
            f"{OPERATION}: with shard_state each rank updates a part of every parameter, expected "
            "an elementwise optimizer, one of strategies.optimizers except LARS, or of torch.optim,"
            f" got {type(optimizer).__name__}"
        )
