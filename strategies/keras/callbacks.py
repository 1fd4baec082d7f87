"""Callbacks for `fit`: initial variables of one rank, averaged metrics, a rising learning rate."""

from __future__ import annotations

from typing import Any

import keras

from strategies.averaging.broadcast import broadcast_parameters
from strategies.averaging.metrics import metric_average
from strategies.core import agreement
from strategies.core.validation import integer, number
from strategies.keras.optimizer import in_step_with

__all__ = ["BroadcastGlobalVariables", "LearningRateWarmup", "MetricAverage"]


class BroadcastGlobalVariables(keras.callbacks.Callback):
    """Broadcasts the variables of one rank to all ranks before the first step.

    As if all ranks had built, or loaded, the model of the root: weights, state of layers such as
    batch normalization, and all variables of the optimizer. The states of random generators, such
    as those of dropout layers, stay each rank's own. Place it after callbacks that load variables.

    Also compares the first epoch, the number of epochs and, where Keras knows it, of steps in an
    epoch.

    *Collective*: all ranks pass it to `fit`.

    Args:
        root: rank with the variables.

    Raises:
        ValueError: the optimizer is not distributed, or `root` is not a rank; on all ranks.
        MismatchError: ranks differ in the shapes of variables, or in epochs or steps; on all ranks.
    """

    def __init__(self, root: int = 0) -> None:
        super().__init__()
        self.root = root
        self._begins = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast the variables."""
        comm = in_step_with(self.model, "BroadcastGlobalVariables")
        variables = [*self.model.weights, *self.model.optimizer.variables]
        values = broadcast_parameters([v.value for v in variables], self.root, comm=comm)
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        self._begins = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Compare the loops, in the first epoch."""
        if not self._begins:
            return
        self._begins = False
        own = self.params
        facts = [
            f"{own.get('steps')} steps in an epoch",
            f"epochs {epoch} to {own.get('epochs')}",
        ]
        agreement.compare(
            in_step_with(self.model, "BroadcastGlobalVariables"), "fit", lambda: (None, facts)
        )


class MetricAverage(keras.callbacks.Callback):
    """Averages the metrics of an epoch over the ranks, also those of its validation.

    The mean has equal weights, so ranks need equal numbers of rows. Place it before callbacks that
    read metrics, such as `EarlyStopping` and `ModelCheckpoint`: all ranks then decide alike.

    *Collective*: all ranks pass it to `fit`.

    Raises:
        ValueError: the optimizer is not distributed.
        MismatchError: ranks differ in the names of their metrics, or in the number of steps; on all
            ranks.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the metrics by their means."""
        comm = in_step_with(self.model, "MetricAverage")
        if logs:
            logs.update(metric_average(logs, comm=comm))


class LearningRateWarmup(keras.callbacks.Callback):
    """Raises the learning rate from that of one rank to that of all, step by step.

    With P ranks and steps of batches of all ranks, the rate is `initial_lr / P` before the first
    step and `initial_lr` after `warmup_epochs`, and rises linearly between. Later the callback
    changes nothing, so others may.

    Args:
        initial_lr: learning rate after the warm-up, such as P times that of one rank.
        warmup_epochs: epochs of the warm-up.
        steps_per_epoch: steps in an epoch; None takes the number that Keras knows.

    Raises:
        ValueError: an argument is out of range, or the number of steps is unknown.
        TypeError: the optimizer's learning rate is a schedule.

    Source: P. Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour",
    arXiv:1706.02677, section 2.2.
    """

    def __init__(
        self, initial_lr: float, *, warmup_epochs: int = 5, steps_per_epoch: int | None = None
    ) -> None:
        super().__init__()
        self.initial_lr = number("LearningRateWarmup", "initial_lr", initial_lr)
        self.warmup_epochs = integer("LearningRateWarmup", "warmup_epochs", warmup_epochs)
        self.steps_per_epoch = steps_per_epoch
        self._size = 1
        self._step = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Look up the number of ranks and of steps."""
        self._size = in_step_with(self.model, "LearningRateWarmup").size
        self.steps_per_epoch = self.steps_per_epoch or self.params.get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                "LearningRateWarmup: expected steps_per_epoch, because Keras does not know the "
                "number of steps of this input"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count the steps from the first epoch, also after a resume."""
        assert self.steps_per_epoch is not None
        self._step = epoch * self.steps_per_epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate of the step."""
        assert self.steps_per_epoch is not None
        steps = self.warmup_epochs * self.steps_per_epoch
        if self._step <= steps:
            rate = self.initial_lr * (1 + (self._size - 1) * self._step / steps) / self._size
            # With JAX the state of a running epoch is not in the variables.
            if hasattr(self.model, "jax_state_sync"):
                self.model.jax_state_sync()
            self.model.optimizer.learning_rate = rate
        self._step += 1
