"""`DistributedOptimizer` for Keras: averages gradients, then the wrapped optimizer applies them.

The wrapper is an instance of a subclass of the optimizer's class, and shares its state. `apply`,
through which all training loops of Keras go, averages first. With the backend torch gradients are
averaged as for optimizers of arrays, with jax as in a transformation of Optax, so that compiled
steps average as well.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import collectives as cc
from collectives import extend
from strategies.averaging.accumulation import GradientAccumulator
from strategies.averaging.averaging import Averaging
from strategies.averaging.consistency import Compare, description, fingerprints_of
from strategies.averaging.options import OPERATION, AveragingOptions
from strategies.averaging.parameter_spec import ParameterSpec
from strategies.core import agreement
from strategies.remote_optimizers.dispatch import check_unwrapped

__all__ = ["DistributedOptimizer", "backend", "in_step_with"]

O = TypeVar("O")  # noqa: E741  (an optimizer of Keras)


def DistributedOptimizer(
    optimizer: O,
    *,
    comm: cc.Communicator | None = None,
    op: Any = cc.MEAN,
    compression: cc.Compression | None = cc.NONE,
    gradient_predivide_factor: float = 1.0,
    bucket_bytes: int | None = None,
    compare: Compare = "all",
    compare_every: int | None = None,
) -> O:
    """Return a Keras optimizer that combines the gradients of all ranks before each update.

    *Collective*, as is every `apply` of the result and the end of every `fit`, where ranks with
    different numbers of steps raise an error. Clipping, loss scales, weight decay, moving averages
    and gradient accumulation of Keras follow the average, so a step is that of one process with the
    rows of all ranks if these have equal numbers of rows.

    Args:
        optimizer: an optimizer of Keras. Wrap a `LossScaleOptimizer` as a whole, so that an
            overflow on one rank makes all of them skip the step.
        comm: communicator; None for all ranks of the job.
        op: MEAN or SUM over the ranks.
        compression: compression of gradients, see `Communicator.allreduce`; None is `cc.NONE`.
        gradient_predivide_factor: as for `strategies.DistributedOptimizer`.
        bucket_bytes: bytes of gradients per bucket.
        compare: as for `strategies.DistributedOptimizer`. The arguments of the optimizer are
            compared here; parameters and state in the first step; the learning rate in every step.
        compare_every: compare again every this many steps; None compares in the first step only.

    Returns:
        An optimizer of a subclass of the optimizer's class, which shares its variables with
        `optimizer`. Saved models, `get_config`, and `from_config` contain the optimizer without the
        wrapper: wrap it again.

    Raises:
        TypeError: not an optimizer of Keras; on all ranks.
        ValueError: the backend is not torch or jax, an option is out of range, or the optimizer is
            already wrapped; on all ranks.
        ImportError: the backend is jax, and Optax is not installed.
        MismatchError: ranks differ in the arguments; on all ranks.
    """
    comm = extend.comm_or_world(comm, OPERATION)
    rule = AveragingOptions(
        op=op,
        compression=cc.NONE if compression is None else compression,
        gradient_predivide_factor=gradient_predivide_factor,
        bucket_bytes=bucket_bytes,
        compare=compare,
        compare_every=compare_every,
    )

    # Within `compare`: an error on one rank raises on all.
    def prepare() -> tuple[Callable[..., _Average], list[str]]:
        rule.check()
        average = _AVERAGES[backend()]
        _check(optimizer)
        settings = _settings(optimizer) if compare == "all" else ""
        return average, [f"optimizer {type(optimizer).__name__}({settings})", f"options {rule}"]

    average = agreement.compare(comm, OPERATION, prepare)(optimizer, comm, rule)
    wrapped = type(optimizer)
    scales_loss = hasattr(optimizer, "inner_optimizer")
    kind = type(
        # Under this name Keras saves the optimizer, and finds the wrapped class.
        wrapped.__name__,
        (_DistributedLossScale if scales_loss else _Distributed, wrapped),
        {"__module__": wrapped.__module__, "_average": average, "_wrapped": wrapped},
    )
    made: Any = object.__new__(kind)
    # Not a copy, because Keras's optimizers find their variables by identity.
    object.__setattr__(made, "__dict__", optimizer.__dict__)
    return cast("O", made)


def backend() -> str:
    """Return the name of Keras's backend.

    Raises:
        ValueError: it is not torch or jax.
    """
    import keras

    name: str = keras.config.backend()
    if name not in _AVERAGES:
        raise ValueError(
            f"strategies.keras: expected the backend torch or jax, got {name}; set KERAS_BACKEND "
            "before the first import of keras"
        )
    return name


def in_step_with(model: Any, what: str) -> cc.Communicator:
    """Return the communicator of a model's steps, over which no step is under way on this rank.

    A collective call over it raises an error on all ranks if another rank still makes steps.

    Args:
        model: a compiled model of Keras.
        what: the caller, for errors.

    Raises:
        ValueError: the model's optimizer is not distributed.
    """
    optimizer = model.optimizer
    if not getattr(type(optimizer), "is_distributed", False):
        raise ValueError(
            f"{what}: the model's optimizer averages no gradients, expected compile with "
            f"strategies.keras.DistributedOptimizer, got {type(optimizer).__name__}"
        )
    return cast("cc.Communicator", optimizer._average.between_steps())


def _check(optimizer: Any) -> None:
    """Raise an error for what is not an optimizer of Keras, or is wrapped."""
    import keras

    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"{OPERATION}: expected an optimizer of Keras, got {type(optimizer).__name__}; others "
            "are wrapped by strategies.DistributedOptimizer"
        )
    check_unwrapped(optimizer)
    check_unwrapped(getattr(optimizer, "inner_optimizer", None))


def _settings(optimizer: Any) -> str:
    """Describe the arguments of an optimizer, except its name and its learning rate."""
    # Learning rates are compared in each step: schedules and callbacks change them.
    config = {**optimizer.get_config(), "name": None, "learning_rate": None}
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        config["inner_optimizer"] = _settings(inner)
    return ", ".join(f"{k}={description(v)}" for k, v in sorted(config.items()) if v is not None)


def _names(variables: Sequence[Any]) -> list[str]:
    """Return a name for each variable; made unique by its position."""
    paths = [_unnumbered(variable.path) for variable in variables]
    count = Counter(paths)
    return [path if count[path] == 1 else f"{path} {i}" for i, path in enumerate(paths)]


@functools.cache
def _unnumbered(path: str) -> str:
    """Return a path without Keras's numbers of layers: a rank may have made further models."""
    return re.sub(r"_\d+(?=[/_]|$)", "", path)


class _Average(Protocol):
    """Averages the gradients of all ranks."""

    def __call__(
        self, gradients: Sequence[Any], names: Sequence[str], values: Sequence[Any], state: Any
    ) -> list[Any]:
        """Return the averages; *collective*.

        Args:
            gradients: arrays of the backend, or None.
            names: names of the parameters.
            values: the parameters.
            state: arrays of the optimizer by name.
        """

    def between_steps(self) -> cc.Communicator:
        """Wait for the steps that this rank has started; return their communicator."""


class _TorchAverage:
    """Averages tensors of PyTorch."""

    def __init__(self, optimizer: Any, comm: cc.Communicator, rule: AveragingOptions) -> None:
        self._comm = comm
        self._optimizer = optimizer
        self._state: dict[str, Any] = {}
        self._averaging = Averaging(
            comm,
            rule,
            lambda: {"learning_rate": float(self._optimizer.learning_rate)},
            lambda: fingerprints_of("state", self._state.items()),
        )

    def __call__(
        self, gradients: Sequence[Any], names: Sequence[str], values: Sequence[Any], state: Any
    ) -> list[Any]:
        leaves = [
            ParameterSpec.of(name, value.detach())
            for name, value in zip(names, values, strict=True)
        ]
        self._state = state
        whole = GradientAccumulator(1).add(gradients)
        assert whole is not None
        return self._averaging.average(leaves, whole)

    def between_steps(self) -> cc.Communicator:
        return self._comm


class _JaxAverage:
    """Averages arrays of JAX, also in compiled programs."""

    def __init__(self, optimizer: Any, comm: cc.Communicator, rule: AveragingOptions) -> None:
        import optax

        from strategies.jax.transformation import wrap

        self._transformation = wrap(optax.identity(), comm, rule)

    def __call__(
        self, gradients: Sequence[Any], names: Sequence[str], values: Sequence[Any], state: Any
    ) -> list[Any]:
        averaged, _ = self._transformation.update(
            dict(zip(names, gradients, strict=True)), state, dict(zip(names, values, strict=True))
        )
        return [averaged[name] for name in names]

    def between_steps(self) -> cc.Communicator:
        import jax

        # Compiled steps use the communicator in a thread of JAX.
        jax.effects_barrier()
        return self._transformation.comm


_AVERAGES: dict[str, Callable[..., _Average]] = {"jax": _JaxAverage, "torch": _TorchAverage}


class _Distributed:
    """Methods of a wrapped optimizer that come before those of its class."""

    is_distributed = True
    _average: _Average
    _wrapped: Any

    @classmethod
    def from_config(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        """Return an optimizer that is not wrapped: the ranks are not part of a configuration."""
        return cls._wrapped.from_config(config, *args, **kwargs)

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Average the gradients over the ranks, then apply them; *collective*."""
        variables = self._trainable_variables
        if trainable_variables is not None:
            variables = trainable_variables = list(trainable_variables)
            if not self.built:
                self.build(variables)
        if grads:
            values = [variable.value for variable in variables]
            state = [variable.value for variable in self.variables]
            grads = self._averaged(grads, variables, values, state)
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def finalize_variable_values(self: Any, var_list: Any) -> None:
        """End the training: ranks whose others still make steps raise an error; *collective*."""
        # Keras also calls this while it handles an exception, which other ranks need not have.
        if sys.exc_info()[0] is None:
            agreement.compare(self._average.between_steps(), "fit", lambda: (None, ["the end"]))
        super().finalize_variable_values(var_list)  # type: ignore[misc]

    def _averaged(
        self: Any, grads: Any, variables: Sequence[Any], values: Any, state: Any
    ) -> list[Any]:
        own = dict(zip(_names(self.variables), state, strict=True))
        averages: list[Any] = self._average(list(grads), _names(variables), values, own)
        return averages

    def __setattr__(self, name: str, value: Any) -> None:
        # `LossScaleOptimizer` does it to the optimizer that it wraps.
        if name == "loss_scale_factor" and value is None:
            raise ValueError(
                f"{OPERATION}: each rank would skip the steps in which its own gradients overflow, "
                "expected the wrapper around LossScaleOptimizer, got it inside; with the policy "
                "mixed_float16 compile adds one: pass "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
        super().__setattr__(name, value)


class _DistributedLossScale(_Distributed):
    """Methods of a wrapped `LossScaleOptimizer`, which looks for infinities in averages."""

    def stateless_apply(
        self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        """Average the gradients over the ranks, then apply them; *collective*."""
        # `apply`, which averages for other optimizers, is not called by this one's.
        averages = self._averaged(
            grads, self._trainable_variables, trainable_variables, optimizer_variables
        )
        return super().stateless_apply(  # type: ignore[misc]
            optimizer_variables, averages, trainable_variables
        )
