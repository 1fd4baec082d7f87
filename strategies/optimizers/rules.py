"""Update formulas of the optimizers, each written once.

A *rule* is a function `(value, gradient, *slots, numbers) -> (value, *slots)`: it returns the new
variable and slots. Loops that numba compiles (`strategies.optimizers.rule_loops`) call it with
numbers, element by element. Devices call it with whole arrays. Both round after each operation, and
neither reorders operations; sums, differences, products, quotients and square roots are rounded
correctly. So an element's result depends only on its inputs, whatever the memory layout.

The loops are defined here although another module compiles them: numba's disk cache is invalidated
when the file of a loop changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_compat

__all__ = [
    "COUNTS",
    "LANES",
    "Rule",
    "adagrad",
    "adam",
    "amsgrad",
    "larger",
    "loop",
    "momentum",
    "nesterov",
    "rmsprop",
    "rmsprop_centered",
    "rmsprop_centered_momentum",
    "rmsprop_momentum",
    "scaled_momentum",
    "sgd",
    "square_root",
]

Rule = Callable[..., tuple[Any, ...]]
Numbers = tuple[Any, ...]


def square_root(x: Any) -> Any:
    """Return the square root of an array; compiled loops overload it for numbers."""
    return array_api_compat.array_namespace(x).sqrt(x)


def larger(x: Any, y: Any) -> Any:
    """Return the larger elements of two arrays, NaN where one of them is NaN."""
    return array_api_compat.array_namespace(x).maximum(x, y)


def sgd(value: Any, gradient: Any, numbers: Numbers) -> tuple[Any]:
    """Gradient descent."""
    (rate,) = numbers
    return (value - rate * gradient,)


def momentum(value: Any, gradient: Any, slot: Any, numbers: Numbers) -> tuple[Any, Any]:
    """Gradient descent along a decaying sum of gradients."""
    rate, kept = numbers
    # The rate is outside of the slot, as in PyTorch: a new rate also scales earlier gradients.
    slot = kept * slot + gradient
    return value - rate * slot, slot


def nesterov(value: Any, gradient: Any, slot: Any, numbers: Numbers) -> tuple[Any, Any]:
    """As momentum, evaluated one step ahead (Nesterov)."""
    rate, kept = numbers
    slot = kept * slot + gradient
    return value - rate * (gradient + kept * slot), slot


def scaled_momentum(value: Any, gradient: Any, slot: Any, numbers: Numbers) -> tuple[Any, Any]:
    """Momentum over steps with the variable's own rate, with decay."""
    rate, kept, decay = numbers
    # The rate is inside of the slot, because it differs between the variable's steps.
    slot = kept * slot + rate * (gradient + decay * value)
    return value - slot, slot


def adagrad(value: Any, gradient: Any, total: Any, numbers: Numbers) -> tuple[Any, Any]:
    """Steps divided by the root of the sum of all squares."""
    rate, within, epsilon = numbers
    # A product instead of a power, which compilers and libraries may round differently.
    total = total + gradient * gradient
    # One of the two epsilons is 0, see `adaptive._epsilons`.
    return value - rate * gradient / (square_root(total + within) + epsilon), total


def rmsprop(value: Any, gradient: Any, square: Any, numbers: Numbers) -> tuple[Any, Any]:
    """Steps divided by the root of a moving mean of squares."""
    # The momentum is unused: all rules of RMSProp take the same numbers.
    rate, decay, rest, _, within, epsilon = numbers
    square = decay * square + rest * (gradient * gradient)
    return value - rate * gradient / (square_root(square + within) + epsilon), square


def rmsprop_momentum(
    value: Any, gradient: Any, square: Any, slot: Any, numbers: Numbers
) -> tuple[Any, Any, Any]:
    """As rmsprop, with momentum."""
    rate, decay, rest, kept, within, epsilon = numbers
    square = decay * square + rest * (gradient * gradient)
    slot = kept * slot + gradient / (square_root(square + within) + epsilon)
    return value - rate * slot, square, slot


def rmsprop_centered(
    value: Any, gradient: Any, square: Any, mean: Any, numbers: Numbers
) -> tuple[Any, Any, Any]:
    """As rmsprop, with the variance instead of the mean of squares."""
    rate, decay, rest, _, within, epsilon = numbers
    square = decay * square + rest * (gradient * gradient)
    mean = decay * mean + rest * gradient
    # `larger` keeps the variance at 0 or more; rounding could make the difference negative.
    variance = larger(square, mean * mean) - mean * mean
    return value - rate * gradient / (square_root(variance + within) + epsilon), square, mean


def rmsprop_centered_momentum(
    value: Any, gradient: Any, square: Any, mean: Any, slot: Any, numbers: Numbers
) -> tuple[Any, Any, Any, Any]:
    """As rmsprop_centered, with momentum."""
    rate, decay, rest, kept, within, epsilon = numbers
    square = decay * square + rest * (gradient * gradient)
    mean = decay * mean + rest * gradient
    variance = larger(square, mean * mean) - mean * mean
    slot = kept * slot + gradient / (square_root(variance + within) + epsilon)
    return value - rate * slot, square, mean, slot


def adam(
    value: Any, gradient: Any, first: Any, second: Any, numbers: Numbers
) -> tuple[Any, Any, Any]:
    """Steps along a moving mean, divided by the root of a moving mean of squares, and decay."""
    rate, beta1, rest1, beta2, rest2, scale, epsilon, decay = numbers
    first = beta1 * first + rest1 * gradient
    second = beta2 * second + rest2 * (gradient * gradient)
    # The bias correction is a factor, which costs less than a division per element.
    step = rate * first / (square_root(second) * scale + epsilon)
    # Decoupled: the decay depends on the value alone, not on the gradient.
    return value - (decay * value + step), first, second


def amsgrad(
    value: Any, gradient: Any, first: Any, second: Any, largest: Any, numbers: Numbers
) -> tuple[Any, Any, Any, Any]:
    """As adam, divided by the root of the largest mean of squares so far."""
    rate, beta1, rest1, beta2, rest2, scale, epsilon, decay = numbers
    first = beta1 * first + rest1 * gradient
    second = beta2 * second + rest2 * (gradient * gradient)
    largest = larger(largest, second)
    step = rate * first / (square_root(largest) * scale + epsilon)
    return value - (decay * value + step), first, second, largest


def loop(rule: Rule, slots: int) -> Callable[..., None]:
    """Return a loop `(value, gradient, *slots, numbers)` over flat arrays, for compilation.

    It reads and writes every array once. All arrays have the same dtype and length.

    Args:
        rule: function to apply to each element.
        slots: number of slots, 0 to 3.
    """

    def none(value: Any, gradient: Any, numbers: Numbers) -> None:
        for i in range(value.size):
            (value[i],) = rule(value[i], gradient[i], numbers)

    def one(value: Any, gradient: Any, a: Any, numbers: Numbers) -> None:
        for i in range(value.size):
            value[i], a[i] = rule(value[i], gradient[i], a[i], numbers)

    def two(value: Any, gradient: Any, a: Any, b: Any, numbers: Numbers) -> None:
        for i in range(value.size):
            value[i], a[i], b[i] = rule(value[i], gradient[i], a[i], b[i], numbers)

    def three(value: Any, gradient: Any, a: Any, b: Any, c: Any, numbers: Numbers) -> None:
        for i in range(value.size):
            value[i], a[i], b[i], c[i] = rule(value[i], gradient[i], a[i], b[i], c[i], numbers)

    return (none, one, two, three)[slots]


LANES = 256
"""Independent sums of a sum of squares, so that additions overlap; it determines the rounding.

25 M float32 take 13 ms with 16 sums, 5.1 with 64 and 2.8 with 256; the dot product of a BLAS
library takes 2.6.
"""

COUNTS = {
    "sgd": (0, 1),
    "momentum": (1, 2),
    "nesterov": (1, 2),
    "scaled_momentum": (1, 3),
    "adagrad": (1, 3),
    "rmsprop": (1, 6),
    "rmsprop_momentum": (2, 6),
    "rmsprop_centered": (2, 6),
    "rmsprop_centered_momentum": (3, 6),
    "adam": (2, 8),
    "amsgrad": (3, 8),
}
"""Name of a rule -> (number of slots, number of numbers)."""
