"""SGD, momentum (also Nesterov) and LARS."""

from __future__ import annotations

from collections.abc import Sequence

from strategies.core.validation import number
from strategies.optimizers import rules
from strategies.optimizers.base import LearningRate, Optimizer
from strategies.optimizers.gradient_pairs import Pair
from strategies.optimizers.norms import norm, squares

__all__ = ["LARS", "SGD", "Momentum", "Nesterov"]


class SGD(Optimizer):
    """Gradient descent: `variable -= learning_rate * gradient`.

    Args:
        learning_rate: a number >= 0, or a function from step to rate.

    Example:
        >>> import numpy as np
        >>> weights = np.array([1.0, 2.0])
        >>> SGD(0.5).apply_gradients([(np.array([2.0, 2.0]), weights)])
        >>> weights
        array([0., 1.])
    """

    def __init__(self, learning_rate: LearningRate) -> None:
        super().__init__(learning_rate, rules.sgd)

    def _numbers(self, rate: float, pair: Pair, updates: int) -> Sequence[float]:
        return (rate,)


class Momentum(Optimizer):
    """Gradient descent with momentum, in PyTorch's form.

    For every variable, with a slot that starts at zero:

        slot = momentum * slot + gradient
        variable -= learning_rate * slot                              plain
        variable -= learning_rate * (gradient + momentum * slot)      nesterov

    If the gradient is `Rows`, only these rows of the variable and the slot change.

    Args:
        learning_rate: a number >= 0, or a function from step to rate.
        momentum: a number in [0, 1).
        nesterov: whether to evaluate one step ahead.
    """

    def __init__(
        self, learning_rate: LearningRate, momentum: float = 0.9, *, nesterov: bool = False
    ) -> None:
        # Another rule instead of a flag, so that the loop has no branch.
        rule = rules.nesterov if nesterov else rules.momentum
        super().__init__(learning_rate, rule, {"momentum": 0})
        self._momentum = number("Momentum", "momentum", momentum, below=1)

    def _numbers(self, rate: float, pair: Pair, updates: int) -> Sequence[float]:
        return (rate, self._momentum)


class Nesterov(Momentum):
    """`Momentum` with `nesterov=True`, the usual outer optimizer of local steps.

    Args:
        learning_rate: a number >= 0, or a function from step to rate.
        momentum: a number in [0, 1).
    """

    def __init__(self, learning_rate: LearningRate, momentum: float = 0.9) -> None:
        super().__init__(learning_rate, momentum, nesterov=True)


class LARS(Optimizer):
    """Momentum with a separate rate per variable, for batches of many thousands of rows.

    For every variable of two or more dimensions, with a slot that starts at zero:

        ratio = trust * norm(variable) / (norm(gradient) + weight_decay * norm(variable))
        slot = momentum * slot + learning_rate * ratio * (gradient + weight_decay * variable)
        variable -= slot

    The ratio is 1 if one of the norms is zero. Variables of one dimension or none, such as biases
    and parameters of normalizations, use ratio 1 and no decay, as is usual.

    Args:
        learning_rate: a number >= 0, or a function from step to rate.
        momentum: a number in [0, 1).
        weight_decay: a number >= 0.
        trust: length of a step at rate 1, as a fraction of the variable's norm, >= 0.

    Cost: variable and gradient are read once more, for their norms.

    Source: Y. You, I. Gitman, B. Ginsburg, "Large batch training of convolutional networks",
    arXiv:1708.03888, algorithm 1.
    """

    elementwise = False  # by the norms of the variable and its gradient

    def __init__(
        self,
        learning_rate: LearningRate,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        super().__init__(learning_rate, rules.scaled_momentum, {"momentum": 0})
        self._momentum = number("LARS", "momentum", momentum, below=1)
        self._decay = number("LARS", "weight_decay", weight_decay)
        self._trust = number("LARS", "trust", trust)

    def _numbers(self, rate: float, pair: Pair, updates: int) -> Sequence[float]:
        if pair.value.ndim < 2:
            return (rate, self._momentum, 0.0)
        # The gradient is averaged already, so all ranks compute the same norms.
        length, slope = norm(squares(pair.value)), norm(squares(pair.gradient))
        ratio = 1.0
        # A variable of zeros would never leave zero with ratio 0.
        if length and slope:
            ratio = self._trust * length / (slope + self._decay * length)
        return (rate * ratio, self._momentum, self._decay)
