"""Reduction of the gradients of several replicas in one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import collectives as cc
from strategies.averaging.consistency import settings_of
from strategies.averaging.optimizer import ArrayOptimizer, AveragingOptimizer, like_variables
from strategies.averaging.options import AveragingOptions
from strategies.core import array_ops, gradient_sums
from strategies.core.sparse import Rows
from strategies.errors import InvalidArgumentError
from strategies.optimizers.gradient_pairs import split
from strategies.replicas import reductions
from strategies.replicas.context import ReplicaStrategy

__all__ = ["ReplicaGradients", "ReplicaOptimizers", "mean_over_replicas"]


class ReplicaGradients(NamedTuple):
    """The gradients of one replica, or of all replicas of a process.

    Attributes:
        pairs: (gradient or None, variable) pairs, as for optimizers.
        examples: number of rows that they are the mean of; None weights all replicas equally.
    """

    pairs: list[tuple[Any, Any]]
    examples: float | None

    @classmethod
    def of(
        cls, grads_and_vars: Iterable[tuple[Any, Any]], examples: float | None
    ) -> ReplicaGradients:
        """Validate the arguments of a user.

        Raises:
            ValueError: `examples` is negative, infinite or NaN.
            TypeError: an item is not a (gradient, variable) pair.
        """
        gradient_sums.check_examples(examples)
        pairs = [split(x, "apply_gradients", i) for i, x in enumerate(grads_and_vars)]
        return cls(pairs, examples)


def mean_over_replicas(
    replicas: Sequence[ReplicaGradients], memory: gradient_sums.SumBuffers | None = None
) -> ReplicaGradients:
    """Average the gradients of this process's replicas, weighted by their examples.

    A gradient of None counts as zero, unless all replicas have None.

    Args:
        replicas: the gradients of each replica.
        memory: memory of the averages of the last step.

    Raises:
        ValueError: the replicas have different variables, or only some pass examples.
    """
    if len(replicas) == 1:
        return replicas[0]
    # By identity: two variables may have the same name or the same value.
    variables = [[id(variable) for _, variable in replica.pairs] for replica in replicas]
    if any(own != variables[0] for own in variables):
        raise ValueError(
            "apply_gradients: the replicas have different variables, or in another order, got "
            + " and ".join(str([_name(v) for _, v in replica.pairs]) for replica in replicas)
        )
    weights = gradient_sums.weights([replica.examples for replica in replicas], "replicas")
    pairs = []
    for place, (_, variable) in enumerate(replicas[0].pairs):
        column = [replica.pairs[place][0] for replica in replicas]
        pairs.append((_mean(column, weights, _name(variable), memory), variable))
    # The sum of rows, so that the mean over the ranks weights this process by all of its rows.
    return ReplicaGradients(pairs, None if replicas[0].examples is None else sum(weights))


class ReplicaOptimizers:
    """Updates the variables of a strategy with the gradients of all its replicas."""

    def __init__(self, strategy: ReplicaStrategy) -> None:
        self._strategy = strategy
        # Id of an optimizer -> its wrapper that averages over the ranks.
        self._averaging: dict[int, AveragingOptimizer] = {}
        self._memory = gradient_sums.SumBuffers()

    def apply(self, optimizer: Any, replicas: Sequence[ReplicaGradients]) -> None:
        """Update the variables once; *collective*, in the cross-replica context."""
        ranks = self._strategy.ranks

        def local() -> ReplicaGradients:
            _check_kind(optimizer)
            own = mean_over_replicas(replicas, self._memory)
            _check_owner(self._strategy, own.pairs)
            return own

        # Agree first: a replica's error on one rank would leave other ranks in the exchange.
        own = ranks.run_then_agree("apply_gradients", local)
        # The user's own wrapper averages over the ranks itself, with its own options.
        if isinstance(optimizer, AveragingOptimizer):
            optimizer.apply_gradients(own.pairs, examples=own.examples)
        elif ranks.size > 1:
            self._over_ranks(optimizer).apply_gradients(own.pairs, examples=own.examples)
        elif own.examples == 0:
            raise ValueError("apply_gradients: no replica has an example, expected at least one")
        else:
            # One process has no average, but the same checks and conversions of dtypes.
            optimizer.apply_gradients(like_variables(own.pairs))

    def _over_ranks(self, optimizer: ArrayOptimizer) -> AveragingOptimizer:
        """Return an optimizer that averages first; *collective* in the first call for each."""
        if id(optimizer) not in self._averaging:
            ranks = self._strategy.ranks
            assert ranks.comm is not None
            rule = AveragingOptions(
                compression=ranks.options.compression or cc.NONE,
                # 0, the default, leaves the size to `plan_buckets`.
                bucket_bytes=ranks.options.bytes_per_pack or None,
            )
            # It keeps the optimizer alive, so that the id stays unique.
            updates: Any = _Updates(self._strategy, optimizer)
            # Without the state: some strategies keep it and the step count on one rank only.
            everywhere = self._strategy.updates_everywhere
            settings = partial(settings_of, optimizer, schedules=everywhere)
            self._averaging[id(optimizer)] = AveragingOptimizer(updates, ranks.comm, rule, settings)
        return self._averaging[id(optimizer)]


class _Updates(NamedTuple):
    """An optimizer whose updates run where the strategy stores its variables."""

    strategy: ReplicaStrategy
    optimizer: ArrayOptimizer

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
        """Update every variable with its gradient; *collective*."""
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        self.strategy.update(variables, lambda: self.optimizer.apply_gradients(pairs))


def _check_kind(optimizer: Any) -> None:
    if not callable(getattr(optimizer, "apply_gradients", None)):
        raise TypeError(
            f"apply_gradients: the optimizer has no apply_gradients, expected one of "
            f"strategies.optimizers, such as strategies.optimizers.Optax(transformation), got "
            f"{type(optimizer).__name__}"
        )


def _check_owner(strategy: ReplicaStrategy, pairs: Sequence[tuple[Any, Any]]) -> None:
    for _, variable in pairs:
        owner = getattr(variable, "strategy", None)
        if owner is not None and owner is not strategy:
            raise ValueError(
                f"apply_gradients: the variable belongs to another strategy, expected one made by "
                f"this {type(strategy).__name__}, got one of {type(owner).__name__} (variable: "
                f"{_name(variable)})"
            )


def _mean(
    column: list[Any], weights: list[float], name: str, memory: gradient_sums.SumBuffers | None
) -> Any:
    # None counts as zero, but has no dtype or device, so it is left out of the sum.
    given = [
        g if isinstance(g, Rows) else reductions.as_array(g, "apply_gradients")
        for g in column
        if g is not None
    ]
    if len({isinstance(gradient, Rows) for gradient in given}) > 1:
        raise ValueError(
            f"apply_gradients: the gradient is sparse on some replicas and dense on others, "
            f"expected one kind (variable: {name})"
        )
    shapes = [tuple(gradient.shape) for gradient in given if not isinstance(gradient, Rows)]
    if len(set(shapes)) > 1:
        raise InvalidArgumentError(
            f"apply_gradients: the replicas' gradients have different shapes, got "
            f"{', '.join(map(str, shapes))} (variable: {name})"
        )
    dtypes = [array_ops.dtype_name(g.values if isinstance(g, Rows) else g) for g in given]
    if given and isinstance(given[0], Rows):
        near = given[0].values
        given = [Rows(g.indices, array_ops.to_device_of(near, g.values)) for g in given]
    else:
        # Replicas compute on different devices, and a sum needs all of them on one.
        given = [array_ops.to_device_of(given[0], gradient) for gradient in given]
    counted = [weight for g, weight in zip(column, weights, strict=True) if g is not None]
    out = memory.like(name, given[0]) if memory is not None and shapes else None
    return gradient_sums.mean(
        zip(given, counted, strict=True), sum(weights), dtypes[0] if given else "", out
    )


def _name(variable: Any) -> str:
    return getattr(variable, "name", "unnamed")
