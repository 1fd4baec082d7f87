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
"""A number, or a function of the count of steps already made (0 in the first step)."""


class Optimizer(abc.ABC):
    """Changes variables in place, given their gradients.

    Slots are made when a variable is first changed, under its name or, for a bare array, its
    position among the pairs; so bare arrays must come in the same order every time.

    Args:
        learning_rate: a number >= 0, or a function that gives one for each step.
        rule: the formula.
        slots: names of the slots in the order of the rule, and what they hold at first.
        counted: whether the formula needs to know how often a variable was changed.

    Attributes:
        step: number of calls of `apply_gradients` so far.
    """

    _given: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    def __new__(cls: type[Self], *arguments: Any, **named: Any) -> Self:
        """Note the arguments for `arguments`."""
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
        self._updates: dict[str, int] | None = {} if counted else None
        self._loaded: set[str] = set()
        self.step = 0
        if not callable(learning_rate):
            number(self._name, "learning rate", learning_rate)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, without which the class has others of its own.

        An optimizer that is made with them takes the same steps, from the first one on.
        """
        positional, named = self._given
        return dict(inspect.signature(type(self)).bind(*positional, **named).arguments)

    @functools.cached_property  # read in every step
    def settings(self) -> dict[str, Any]:
        """All arguments by name, those that were not given with their defaults."""
        parameters = inspect.signature(type(self)).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty} | self.arguments

    @abc.abstractmethod
    def _numbers(self, rate: float, pair: Pair, updates: int) -> Sequence[float]:
        """Return the numbers that the rule takes for one variable in this step.

        Args:
            rate: the learning rate.
            pair: the variable and its gradient, before the change.
            updates: how often the variable was changed, with this one; 0 if that is not counted.
        """

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
        """Change every variable in place; none when one of the pairs is wrong.

        Args:
            grads_and_vars: (gradient, variable) pairs. A variable is an array (float16, bfloat16,
                float32 or float64) of NumPy, CuPy or PyTorch, or an object with a `name` and a
                `value` that is one; that of a `Variable` may be JAX's. A gradient has its shape and
                dtype, is `Rows` of those, or is None, which leaves the variable and its slots as
                they are.

        Raises:
            ValueError: a shape or dtype differs, also from the slot, an index is out of range, or
                loaded slots belong to other variables; the message names the variable and its
                position.
            TypeError: something is not an array, or a gradient not in the memory of its variable.
        """
        pairs = gradients.resolve(grads_and_vars, self._name)
        gradients.check_slots(pairs, self._slots, self._loaded, self._name)
        rate = self._rate()
        changes = [(pair, self._slots_of(pair)) for pair in pairs if pair.gradient is not None]
        later = []
        for pair, slots in changes:
            updates = 0
            if self._updates is not None:
                updates = self._updates[pair.key] = self._updates.get(pair.key, 0) + 1
            with array_ops.device_context(pair.value):
                numbers = self._numbers(rate, pair, updates)
                if pair.rows is None and array_api_compat.is_jax_array(pair.value):
                    later.append((pair, slots, numbers))
                else:
                    _update(self._rule, pair, slots, numbers)
        if later:
            _update_together(self._rule, later)
        self._slots |= {pair.key: slots for pair, slots in changes if slots}
        self._loaded.clear()
        self.step += 1

    def prepare(self, variables: Iterable[Any]) -> None:
        """Make the slots of variables now, which come with the first gradient otherwise.

        Args:
            variables: with a name, as `state_dict` calls them, or bare arrays in the order in which
                they will be given.
        """
        for pair in gradients.resolve([(None, variable) for variable in variables], self._name):
            if pair.key not in self._slots:
                self._slots[pair.key] = self._slots_of(pair)
            if self._updates is not None:
                self._updates.setdefault(pair.key, 0)

    def state_dict(self) -> dict[str, Any]:
        """Give what `load_state_dict` needs to go on from here, as copies.

        Returns:
            `step`, and for every slot `<name of the slot>/<name or position of the variable>`:
            shape of the variable, float32 (float64 for a float64 variable), a NumPy array for a
            variable in host memory, else of the variable's kind. If the formula needs it,
            `updates/<name or position>`: how often the variable was changed. Where no step had a
            gradient, so that there are no slots yet, `variables`: 0.
        """
        counts = {f"{state.UPDATES}/{key}": n for key, n in (self._updates or {}).items()}
        slots = {
            f"{kind}/{key}": array_ops.copy(slot)
            for key, slots in self._slots.items()
            for kind, slot in zip(self._kinds, slots, strict=True)
        }
        none = {state.VARIABLES: 0} if self.step and self._kinds and not slots else {}
        return {"step": self.step, **none, **counts, **slots}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state, as given by `state_dict`; what was there before is forgotten.

        The slots are copied; each must be in the same memory as its variable, or in host memory.
        That they belong to the variables is checked by the next `apply_gradients`.

        Raises:
            ValueError: a key is missing or unknown, or a value is of no use.
        """
        counted = self._updates is not None
        parsed = state.parse(state_dict, list(self._kinds), counted, self._name)
        self.step, self._slots = parsed.step, parsed.slots
        self._updates = parsed.updates if counted else None
        self._loaded = set(self._slots)

    def _rate(self) -> float:
        given = self._learning_rate
        rate = given(self.step) if callable(given) else given
        return number(self._name, "learning rate", rate, context=f" (step: {self.step})")

    def _slots_of(self, pair: Pair) -> list[Any]:
        """Return the slots of a variable, new ones if it has none, where the variable is."""
        value = pair.value
        if pair.key in self._slots:
            slots = self._slots[pair.key]
            return [array_ops.on_same_device(value, slot) for slot in slots]
        dtype = COMPUTE[array_ops.dtype_name(value)]
        return [array_ops.full(value, initial, dtype) for initial in self._kinds.values()]


def _update_together(rule: Rule, changes: list[tuple[Pair, list[Any], Sequence[float]]]) -> None:
    """Change variables of JAX, and their slots."""
    from strategies.optimizers.jax_step import VariableUpdate, apply

    given = [VariableUpdate(pair.value, pair.gradient, slots, n) for pair, slots, n in changes]
    for (pair, slots, _), (value, *others) in zip(changes, apply(rule, given), strict=True):
        slots[:] = others
        assert pair.settle is not None
        pair.settle(value)


def _update(rule: Rule, pair: Pair, slots: list[Any], numbers: Sequence[float]) -> None:
    """Change a variable and its slots in place, or the rows of them that have a gradient."""
    changed = [pair.value, *slots]
    parts = changed
    if pair.rows is not None:
        parts = [array_ops.take(array, pair.rows) for array in changed]
    if isinstance(pair.value, np.ndarray):
        from strategies.optimizers import numba_step

        numba_step.apply(rule, parts[0], pair.gradient, parts[1:], numbers)
    else:
        value, *others = parts
        results = rule(
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
    if pair.settle is not None:
        pair.settle(parts[0])
