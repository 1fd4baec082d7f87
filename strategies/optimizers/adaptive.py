"""Adaptive optimizers: Adagrad, RMSProp, Adam and AdamW."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from strategies.core.validation import number
from strategies.optimizers import rules
from strategies.optimizers.base import LearningRate, Optimizer
from strategies.optimizers.gradient_pairs import Pair

__all__ = ["Adagrad", "Adam", "AdamW", "RMSProp"]

# A smaller epsilon would be denormal or zero as float32: imprecise, or dividing 0 by 0.
_EPSILON = float(np.finfo(np.float32).tiny)


def _epsilons(name: str, epsilon: float, in_root: bool) -> tuple[float, float]:
    """Return the epsilons to add before and after the square root."""
    checked = number(name, "epsilon", epsilon, least=_EPSILON)
    return (checked, 0.0) if in_root else (0.0, checked)


class Adagrad(Optimizer):
    """Steps that shrink with the sum of the squares of all gradients so far.

    For every variable, with a slot that starts at `initial_total`:

        total = total + gradient ** 2
        variable -= learning_rate * gradient / (sqrt(total) + epsilon)
        variable -= learning_rate * gradient / sqrt(total + epsilon)      if epsilon_in_root

    A gradient of `Rows` has the same effect as its dense equivalent.

    Args:
        learning_rate: a number >= 0, or a function from step to rate.
        initial_total: a number >= 0.
        epsilon: a number > 0.
        epsilon_in_root: whether to add epsilon inside the root, as Optax does.

    Source: J. Duchi, E. Hazan, Y. Singer, "Adaptive subgradient methods for online learning and
    stochastic optimization", JMLR 12 (2011).
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        *,
        initial_total: float = 0.0,
        epsilon: float = 1e-10,
        epsilon_in_root: bool = False,
    ) -> None:
        initial = number("Adagrad", "initial_total", initial_total)
        super().__init__(learning_rate, rules.adagrad, {"total": initial})
        self._epsilons = _epsilons("Adagrad", epsilon, epsilon_in_root)

    def _numbers(self, rate: float, pair: Pair, updates: int) -> Sequence[float]:
        return (rate, *self._epsilons)


class RMSProp(Optimizer):
    """Steps divided by the root of a moving mean of the squares of gradients.

    For every variable, with slots that start at zero:

        square = decay * square + (1 - decay) * gradient ** 2
        mean = decay * mean + (1 - decay) * gradient                      if centered
        step = gradient / (sqrt(square) + epsilon)
        step = gradient / (sqrt(square - mean ** 2) + epsilon)            if centered
        step = gradient / sqrt(square (- mean ** 2) + epsilon)            if epsilon_in_root
        slot = momentum * slot + step                                     if momentum is not 0
        variable -= learning_rate * (slot or step)

    If the gradient is `Rows`, only these rows of the variable and the slots change.

    Args:
        learning_rate: a number >= 0, or a function from step to rate.
        decay: a number in [0, 1).
        momentum: a number in [0, 1).
        epsilon: a number > 0.
        epsilon_in_root: whether to add epsilon inside the root, as Optax does by default.
        centered: whether to divide by an estimate of the standard deviation.

    Source: T. Tieleman, G. Hinton, "Lecture 6.5: RMSProp", Coursera, 2012; centered: A. Graves,
    "Generating sequences with recurrent neural networks", arXiv:1308.0850, section 4.2.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        *,
        decay: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-8,
        epsilon_in_root: bool = False,
        centered: bool = False,
    ) -> None:
        self._decay = number("RMSProp", "decay", decay, below=1)
        self._momentum = number("RMSProp", "momentum", momentum, below=1)
        self._epsilons = _epsilons("RMSProp", epsilon, epsilon_in_root)
        # Only the slots that the rule uses, because checkpoints store all of them.
        slots = ["square", *["mean"] * centered, *["momentum"] * (self._momentum > 0)]
        choices: dict[tuple[str, ...], rules.Rule] = {
            ("square",): rules.rmsprop,
            ("square", "mean"): rules.rmsprop_centered,
            ("square", "momentum"): rules.rmsprop_momentum,
            ("square", "mean", "momentum"): rules.rmsprop_centered_momentum,
        }
        super().__init__(learning_rate, choices[tuple(slots)], dict.fromkeys(slots, 0.0))

    def _numbers(self, rate: float, pair: Pair, updates: int) -> Sequence[float]:
        return (rate, self._decay, 1 - self._decay, self._momentum, *self._epsilons)


class _ByMoments(Optimizer):
    """Base of Adam and AdamW: moving means and their bias correction."""

    _decay = 0.0

    def __init__(
        self, rate: LearningRate, beta1: float, beta2: float, epsilon: float, amsgrad: bool
    ) -> None:
        slots = ["first", "second", *["largest"] * bool(amsgrad)]
        rule = rules.amsgrad if amsgrad else rules.adam
        super().__init__(rate, rule, dict.fromkeys(slots, 0.0), counted=True)
        self._beta1 = number(self._name, "beta1", beta1, below=1)
        self._beta2 = number(self._name, "beta2", beta2, below=1)
        self._epsilon = number(self._name, "epsilon", epsilon, least=_EPSILON)

    def _numbers(self, rate: float, pair: Pair, updates: int) -> Sequence[float]:
        # The bias corrections are numbers of the step, so the loop over elements has no powers.
        beta1, beta2 = self._beta1, self._beta2
        # The root of the correction is taken here, once, instead of for each element.
        first, second = 1 - beta1**updates, math.sqrt(1 - beta2**updates)
        # AdamW's decay uses the rate without bias correction.
        decay = rate * self._decay
        # In the order of `rules.adam` and `rules.amsgrad`.
        return (rate / first, beta1, 1 - beta1, beta2, 1 - beta2, 1 / second, self._epsilon, decay)


class Adam(_ByMoments):
    """Steps along a moving mean of gradients, divided by the root of the moving mean of squares.

    For every variable, changed for the t-th time, with slots that start at zero:

        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient ** 2
        largest = maximum(largest, second)                                if amsgrad
        root = sqrt((largest if amsgrad else second) / (1 - beta2 ** t))
        variable -= learning_rate * first / (1 - beta1 ** t) / (root + epsilon)

    If the gradient is `Rows`, only these rows of the variable and the slots change, and t counts
    the changes of any row. So rows that rarely have a gradient keep their old means. This is cheap
    and common, but differs from the dense equivalent with zeros.

    Args:
        learning_rate: a number >= 0, or a function from step to rate.
        beta1: a number in [0, 1).
        beta2: a number in [0, 1).
        epsilon: a number > 0.
        amsgrad: whether the divisor of an element never decreases.

    Source: D. Kingma, J. Ba, "Adam: a method for stochastic optimization", arXiv:1412.6980,
    algorithm 1; amsgrad: S. Reddi, S. Kale, S. Kumar, "On the convergence of Adam and beyond",
    arXiv:1904.09237, algorithm 2, with the bias correction above.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, amsgrad)


class AdamW(_ByMoments):
    """Adam with weight decay that is separate from the gradient.

    As `Adam`, and each step also subtracts `learning_rate * weight_decay * variable`. If the
    gradient is `Rows`, the decay also applies to these rows only.

    Args:
        learning_rate: a number >= 0, or a function from step to rate.
        beta1: a number in [0, 1).
        beta2: a number in [0, 1).
        epsilon: a number > 0.
        weight_decay: a number >= 0.
        amsgrad: whether the divisor of an element never decreases.

    Source: I. Loshchilov, F. Hutter, "Decoupled weight decay regularization", arXiv:1711.05101,
    algorithm 2, where the decay is multiplied by the learning rate, as in PyTorch and optax.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, amsgrad)
        self._decay = number("AdamW", "weight_decay", weight_decay)
