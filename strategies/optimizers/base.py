"""Base of all optimizers: gradient pairs, slots, steps and state."""

from __future__ import annotations

import abc
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import array_api_compat
import numpy as np

from strategies.core import array_ops
from strategies.core.array_ops import COMPUTE
from strategies.core.validation import number
from strategies.optimizers import gradient_pairs as gradients
from strategies.optimizers import state
from strategies.optimizers.gradient_pairs import Pair
from strategies.optimizers.rules import Rule

__all__ = ["LearningRate", "Optimizer"]

Self = TypeVar("Self", bound="Optimizer")

LearningRate = float | Callable[[int], float]
"""A number, or a function of the number of steps already taken (0 in the first step)."""


class Optimizer(abc.ABC):
    """Changes variables in place, given their gradients.

    Slots are created in the first step of a variable. Their key is the variable's name or, for a
    bare array, its position among the pairs. So bare arrays need the same order in every step.

    Args:
        learning_rate: a number >= 0, or a function from step to rate.
        rule: the update formula.
        slots: names and initial values of the slots, in the order of the rule.
        counted: whether the formula needs the number of updates of a variable.

    Attributes:
        step: number of calls of `apply_gradients` so far.
        elementwise: whether the result for an element depends on its own numbers alone.
    """

    elementwise = True
    _given: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    # In `__new__`, which gets the user's arguments, whatever a subclass passes to `__init__`.
    def __new__(cls: type[Self], *arguments: Any, **named: Any) -> Self:
        """Store the arguments, for the property `arguments`."""
        made = super().__new__(cls)
        made._given = arguments, named
        return made

    def __init__(
        self,
        learning_rate: LearningRate,
        rule: Rule,
        slots: Mapping[str, float] | None = None,
        *,
        counted: bool = False,
    ) -> None:
        self._name = type(self).__name__
        self._learning_rate = learning_rate
        self._rule = rule
        self._kinds = dict(slots or {})
        self._slots: dict[str, list[Any]] = {}
        # None for rules without a count, so that their state has no such entry.
        self._updates: dict[str, int] | None = {} if counted else None
        self._loaded: set[str] = set()
        self.step = 0
        # A schedule is checked in each step, when its rate is known.
        if not callable(learning_rate):
            number(self._name, "learning rate", learning_rate)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, without defaults.

        A new optimizer with these arguments takes the same steps from the start.
        """
        positional, named = self._given
        return dict(self._signature().bind(*positional, **named).arguments)

    @functools.cached_property  # read in every step
    def settings(self) -> dict[str, Any]:
        """All arguments by name, including defaults."""
        parameters = self._signature().parameters.values()
        # Defaults of the class: `arguments` has only what the caller passed.
        return {p.name: p.default for p in parameters if p.default is not p.empty} | self.arguments

    def _signature(self) -> inspect.Signature:
        # Not that of the class: of a subclass without a constructor of its own, Python 3.10 shows
        # the arguments of `__new__`.
        return inspect.signature(self.__init__)  # type: ignore[misc]

    @abc.abstractmethod
    def _numbers(self, rate: float, pair: Pair, updates: int) -> Sequence[float]:
        """Return the numbers of the rule for one variable in this step.

        Args:
            rate: the learning rate.
            pair: the variable and its gradient, before the change.
            updates: number of changes of the variable, including this one; 0 if not counted.
        """

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
        """Change every variable in place; change none if one of the pairs is invalid.

        Args:
            grads_and_vars: (gradient, variable) pairs. A variable is an array (float16, bfloat16,
                float32 or float64) of NumPy, CuPy or PyTorch, or an object with a `name` and such
                an array as `value`; a `Variable` may also hold a JAX array. A gradient has the
                variable's shape and dtype, is `Rows` of them, or is None, which changes nothing.

        Raises:
            ValueError: a shape or dtype differs from the gradient or a slot, an index is out of
                range, or loaded slots belong to other variables; names variable and position.
            TypeError: an argument is not an array, or a gradient is in another memory than its
                variable.
        """
        # All pairs are checked before the first change, so that an error changes nothing.
        pairs = gradients.resolve(grads_and_vars, self._name)
        gradients.check_slots(pairs, self._slots, self._loaded, self._name)
        # Once per step: a schedule may be a costly function.
        rate = self._rate()
        changes = [(pair, self._slots_of(pair)) for pair in pairs if pair.gradient is not None]
        later = []
        for pair, slots in changes:
            updates = 0
            if self._updates is not None:
                # Counted per variable, since a variable without a gradient does not move.
                updates = self._updates[pair.key] = self._updates.get(pair.key, 0) + 1
            with array_ops.device_context(pair.value):
                numbers = self._numbers(rate, pair, updates)
                # Collected, because one compiled program for all variables costs one dispatch.
                if pair.rows is None and array_api_compat.is_jax_array(pair.value):
                    later.append((pair, slots, numbers))
                else:
                    _update(self._rule, pair, slots, numbers)
        if later:
            _update_together(self._rule, later)
        # Stored after all updates: an error above leaves no new slots.
        self._slots |= {pair.key: slots for pair, slots in changes if slots}
        # The slots have found their variables.
        self._loaded.clear()
        self.step += 1

    def prepare(self, variables: Iterable[Any]) -> None:
        """Create the slots of variables now instead of with their first gradients.

        Args:
            variables: variables with a name, named as in `state_dict`, or bare arrays in the order
                of later steps.
        """
        for pair in gradients.resolve([(None, variable) for variable in variables], self._name):
            if pair.key not in self._slots:
                self._slots[pair.key] = self._slots_of(pair)
            if self._updates is not None:
                self._updates.setdefault(pair.key, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`, as copies.

        Returns:
            `step`, and each slot as `<name of the slot>/<name or position of the variable>`: shape
            of the variable, float32 (float64 for a float64 variable), a NumPy array for a variable
            in host memory, otherwise an array like the variable. If the formula needs it,
            `updates/<name or position>`: number of changes of the variable. `variables`: 0 if no
            step had a gradient, so that no slot exists yet.
        """
        # Copies, as the slots change in place in the next step.
        counts = {f"{state.UPDATES}/{key}": n for key, n in (self._updates or {}).items()}
        slots = {
            f"{kind}/{key}": array_ops.copy(slot)
            for key, slots in self._slots.items()
            for kind, slot in zip(self._kinds, slots, strict=True)
        }
        # Distinguishes a state without slots from one whose slots were lost.
        none = {state.VARIABLES: 0} if self.step and self._kinds and not slots else {}
        return {"step": self.step, **none, **counts, **slots}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the state by one from `state_dict`.

        The slots are copied. Each must be in host memory or on the device of its variable. The next
        `apply_gradients` checks that the slots belong to the variables.

        Raises:
            ValueError: a key is missing or unknown, or a value is invalid.
        """
        counted = self._updates is not None
        parsed = state.parse(state_dict, list(self._kinds), counted, self._name)
        self.step, self._slots = parsed.step, parsed.slots
        self._updates = parsed.updates if counted else None
        # Not compared with variables here, which are unknown until the next step.
        self._loaded = set(self._slots)

    def _rate(self) -> float:
        given = self._learning_rate
        rate = given(self.step) if callable(given) else given
        # A schedule may return a negative number or NaN.
        return number(self._name, "learning rate", rate, context=f" (step: {self.step})")

    def _slots_of(self, pair: Pair) -> list[Any]:
        """Return the slots of a variable on its device; create missing ones."""
        value = pair.value
        if pair.key in self._slots:
            slots = self._slots[pair.key]
            # Loaded slots are in host memory; they move to the variable's device in its first step.
            return [array_ops.on_same_device(value, slot) for slot in slots]
        dtype = COMPUTE[array_ops.dtype_name(value)]
        return [array_ops.full(value, initial, dtype) for initial in self._kinds.values()]


def _update_together(rule: Rule, changes: list[tuple[Pair, list[Any], Sequence[float]]]) -> None:
    """Change JAX variables and their slots in one compiled program."""
    from strategies.optimizers.jax_step import VariableUpdate, apply

    given = [VariableUpdate(pair.value, pair.gradient, slots, n) for pair, slots, n in changes]
    for (pair, slots, _), (value, *others) in zip(changes, apply(rule, given), strict=True):
        # Changed in place: the list is already in `changes` of `apply_gradients`.
        slots[:] = others
        assert pair.settle is not None
        pair.settle(value)


def _update(rule: Rule, pair: Pair, slots: list[Any], numbers: Sequence[float]) -> None:
    """Change a variable and its slots in place, or only the rows with a gradient."""
    changed = [pair.value, *slots]
    parts = changed
    # Only the rows with a gradient are read, changed and written.
    if pair.rows is not None:
        parts = [array_ops.take(array, pair.rows) for array in changed]
    if isinstance(pair.value, np.ndarray):
        from strategies.optimizers import host_step

        # A compiled loop instead of NumPy expressions, which would read each array several times.
        host_step.apply(rule, parts[0], pair.gradient, parts[1:], numbers)
    else:
        value, *others = parts
        results = rule(
            # 16-bit floats are computed in float32; the result is rounded once.
            array_ops.arithmetic_dtype(value),
            array_ops.arithmetic_dtype(pair.gradient),
            *others,
            tuple(numbers),
        )
        parts = [
            array_ops.overwrite(part, array_ops.astype(result, array_ops.dtype_name(part)))
            for part, result in zip(parts, results, strict=True)
        ]
    if pair.rows is not None:
        rows = pair.rows
        parts = [
            array_ops.put(array, rows, part) for array, part in zip(changed, parts, strict=True)
        ]
    slots[:] = parts[1:]
    # A variable on several devices copies the new value to the others.
    if pair.settle is not None:
        pair.settle(parts[0])
