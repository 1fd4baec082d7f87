"""`DistributedOptimizer` for arrays: averages gradients, then applies them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

import collectives as cc
from collectives.extend import known_as
from strategies.averaging.accumulation import GradientAccumulator
from strategies.averaging.averaging import Averaging
from strategies.averaging.consistency import Fingerprint, fingerprints_of_optimizer, settings_of
from strategies.averaging.options import AveragingOptions
from strategies.averaging.parameter_spec import ParameterSpec
from strategies.core import array_ops, gradient_sums
from strategies.core.array_ops import is_array
from strategies.core.sparse import Rows, checked_rows
from strategies.optimizers.gradient_pairs import is_variable, refuse_jax, split
from strategies.replicas import context

__all__ = [
    "DELAYED",
    "ArrayOptimizer",
    "AveragingOptimizer",
    "delayed_state",
    "host_value",
    "identity",
    "leaf_of",
    "like_variables",
    "refuse_delayed_join",
]

DELAYED = "delayed"
"""Key of the means of the last step in a `state_dict`."""

Pair = tuple[Any, Any]
T = TypeVar("T")


class ArrayOptimizer(Protocol):
    """An optimizer that changes arrays in place, such as those of `strategies.optimizers`."""

    step: int

    def apply_gradients(self, grads_and_vars: Iterable[Pair]) -> None:
        """Update every variable with its gradient."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""

    # Positional, because implementations differ in the parameter's name.
    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore the result of `state_dict`."""


@known_as("DistributedOptimizer")
class AveragingOptimizer:
    """Averages the gradients over all ranks, then lets the wrapped optimizer apply them.

    Returned by `DistributedOptimizer`. The gradients are in buckets, allocated once, in memory that
    the ranks of a node share. Pickling or copying returns the wrapped optimizer.

    Args:
        optimizer: the optimizer to wrap.
        comm: the ranks.
        rule: options of the averaging.
        settings: returns the settings to compare, without any state. None compares the settings and
            the state of the optimizer.
    """

    is_distributed = True

    def __init__(
        self,
        optimizer: ArrayOptimizer,
        comm: cc.Communicator,
        rule: AveragingOptions,
        settings: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.comm = comm
        self._rule = rule
        self._settings = settings or partial(settings_of, optimizer)
        self._state = (
            # With settings of the caller the state may differ between ranks, so none is compared.
            list[Fingerprint] if settings else partial(fingerprints_of_optimizer, optimizer)
        )
        self._averaging = self._begin(comm)
        self._passes = GradientAccumulator(rule.backward_passes_per_step)

    def __reduce__(self) -> tuple[Any, ...]:
        # A communicator belongs to a process, so a copy is the wrapped optimizer.
        return identity, (self.optimizer,)

    @property
    def step(self) -> int:
        """Number of updates so far."""
        return self.optimizer.step

    def apply_gradients(
        self, grads_and_vars: Iterable[Pair], *, examples: float | None = None
    ) -> None:
        """Average the gradients and update the variables.

        *Collective*: all ranks, with the same variables in the same order. With
        `backward_passes_per_step=k`, only every k-th call communicates; the other calls add up
        gradients. Their errors are raised by the k-th call.

        Args:
            grads_and_vars: pairs of a gradient and its variable, of one shape. A gradient may be
                `Rows` on all ranks. None on some ranks counts as zero there. A variable without a
                gradient on any rank does not change.
            examples: number of rows that this rank's gradients are the mean of; may be 0. The
                average is then over all rows, even if ranks have different numbers of them. None
                weights all ranks equally.

        Raises:
            ValueError: a shape differs, or no rank has an example; on all ranks.
            TypeError: an item is not a pair of arrays; on all ranks.
            MismatchError: ranks differ in the variables' shapes or dtypes, in the settings of the
                optimizer, or in the data compared in the first step; on all ranks.
        """
        top = context.current()
        replica = None if top is None else top.replica
        # A traced replica has no values yet, so it also hands its gradients to the strategy.
        if top is not None and replica and (replica.is_traced or len(top.strategy.devices) > 1):
            # This is one of several replicas of this rank, which update once, together.
            top.strategy.apply_gradients(self, grads_and_vars, examples=examples)
            return
        # This rank must take part in the exchange even after an error, which raises it on all.
        error: Exception | None = None
        leaves: list[ParameterSpec] = []
        gradients: Sequence[Any] = []
        variables: list[Any] = []
        try:
            pairs = [split(x, "apply_gradients", i) for i, x in enumerate(grads_and_vars)]
            variables = [variable for _, variable in pairs]
            leaves = [leaf_of(variable, i) for i, variable in enumerate(variables)]
            gradients = [_fitting(g, leaf) for (g, _), leaf in zip(pairs, leaves, strict=True)]
        except Exception as caught:  # also one of the iterable
            error = caught
        # `add` keeps an error until the step is complete and the other ranks communicate.
        whole = self._passes.add(gradients, examples=examples, error=error)
        if whole is None:
            return
        averaged = self._averaging.average(leaves, whole)
        # Clipping is collective and follows the average, as if one process had all examples.
        self._averaging.clip([g.values if isinstance(g, Rows) else g for g in averaged])
        # With a delay there are averages from the second step on.
        if averaged or not self._rule.delay:
            self._update(averaged, variables)
        self._averaging.start()

    def join(self) -> None:
        """Take part in the steps of the other ranks without data, until all ranks call this.

        *Collective*. A mean is then over the ranks that still make steps. The variables of this
        rank do not change; afterwards, broadcast the variables of the last rank.

        Raises:
            ValueError: this rank has made no step, and another one makes one; on all ranks. Or
                there is a `delay`.
        """
        refuse_delayed_join(self._rule)
        self._passes.clear()
        self._averaging.join()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state; equal on all ranks.

        With a delay also `delayed`: name -> mean of the last step; *collective*.
        """
        return {**self.optimizer.state_dict(), **delayed_state(self._averaging)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the wrapped optimizer's state, which must be the same on all ranks."""
        self.optimizer.load_state_dict({n: x for n, x in state.items() if n != DELAYED})
        self._averaging.load_last_means(state.get(DELAYED))
        # Gradients of passes before the restored state do not belong to its next step.
        self._passes.clear()

    def rebind(self, comm: cc.Communicator) -> None:
        """Average over other ranks from now on; *collective* over them.

        For surviving ranks: the buckets of the old communicator are abandoned, not closed.
        """
        # `close` would be collective over ranks of which some have died.
        self.comm = comm
        last, self._averaging = self._averaging, self._begin(comm)
        last.hand_over(self._averaging)
        self._passes.clear()

    def close(self) -> None:
        """Release the buckets; *collective*. They are recreated when needed."""
        self._averaging.close()

    def _update(self, averaged: Sequence[Any], variables: Sequence[Any]) -> None:
        self.optimizer.apply_gradients(zip(averaged, variables, strict=True))

    def _begin(self, comm: cc.Communicator) -> Averaging:
        return Averaging(comm, self._rule, self._settings, self._state)


def host_value(value: Any, where: str) -> Any:
    """Return an array that changes in place, as a NumPy view if it is in host memory.

    Raises:
        TypeError: it is an array of JAX.
    """
    refuse_jax(value, "apply_gradients", where)
    # Detached: a leaf that requires gradients rejects changes in place.
    value = value.detach() if hasattr(value, "detach") else value
    view = array_ops.host(value)
    return value if view is None else view


def delayed_state(averaging: Averaging) -> dict[str, Any]:
    """Return copies of the means to apply next as an entry of a state, {} without any."""
    last = averaging.last_means() if averaging.rule.delay else None
    return {} if last is None else {DELAYED: {n: array_ops.copy(x) for n, x in last.items()}}


def refuse_delayed_join(rule: AveragingOptions) -> None:
    """Reject `join` with a delay.

    Raises:
        ValueError: there is a delay.
    """
    if rule.delay:
        raise ValueError(
            "join: with delay the last means would be applied on some ranks only, expected steps "
            "with examples=0 on ranks without data"
        )


def identity(optimizer: T) -> T:
    """Return the argument; unpickling or copying a wrapper returns the wrapped optimizer."""
    return optimizer


def leaf_of(variable: Any, position: int) -> ParameterSpec:
    """Return the specification of a variable at this position among the pairs.

    Raises:
        TypeError: it is not an array, or is one of JAX that cannot be replaced.
    """
    named = is_variable(variable)
    value = variable.value if named else variable
    name = variable.name if named else f"unnamed, position {position}"
    if not is_array(value):
        raise TypeError(
            f"apply_gradients: variable is not an array, got {type(value).__name__} (variable: "
            f"{name})"
        )
    # JAX arrays are immutable; a variable with `settle` replaces its array instead.
    if not hasattr(variable, "settle"):
        refuse_jax(value, "apply_gradients", f"variable: {name}")
    return ParameterSpec.of(name, value)


def like_variables(pairs: Iterable[Pair]) -> list[Pair]:
    """Check gradients, and convert them to the dtypes of their variables, as averaging does.

    Raises:
        ValueError: a shape differs.
        TypeError: a value is not an array, or its dtype cannot be converted.
    """
    found = []
    for position, (gradient, variable) in enumerate(pairs):
        leaf = leaf_of(variable, position)
        found.append((gradient_sums.rounded(_fitting(gradient, leaf), leaf.dtype), variable))
    return found


def _fitting(gradient: Any, leaf: ParameterSpec) -> Any:
    """Return a gradient as an array that can be written into its bucket, or None."""
    if gradient is None:
        return None
    if not is_array(gradient) and not isinstance(gradient, Rows):
        gradient = np.asarray(gradient)
    where = f"variable: {leaf.name}"
    return checked_rows(gradient, leaf.shape, leaf.dtype, "apply_gradients", where, cast=True)
