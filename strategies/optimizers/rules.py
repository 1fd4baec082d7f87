"""Update formulas of the optimizers, each written once.

A *rule* is a function `(value, gradient, *slots, numbers) -> (value, *slots)`: the new variable and
the new slots from the old ones. It is called with numbers, element by element, in loops that numba
compiles (`strategies.optimizers.numba_step`), and with whole arrays of devices. Both round alike,
after each operation: sum, difference, product, quotient and square root are exact up to that, and
nothing is reordered. So an element's result depends on nothing but its inputs, wherever it lies.

The loops stand here, though another module compiles them, because what numba keeps on disk is
replaced when the file of the loop has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_compat

__all__ = [
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
    """Return the square root of an array; compiled loops have their own for numbers."""
    return array_api_compat.array_namespace(x).sqrt(x)


def larger(x: Any, y: Any) -> Any:
    """Return the larger elements of two arrays, NaN where one of them is NaN."""
    return array_api_compat.array_namespace(x).maximum(x, y)


def sgd(value: Any, gradient: Any, numbers: Numbers) -> tuple[Any]:
    """Gradient descent."""
    (rate,) = numbers
    return (value - rate * gradient,)


def momentum(value: Any, gradient: Any, slot: Any, numbers: Numbers) -> tuple[Any, Any]:
    """Gradient descent along the sum of gradients of which older ones count less."""
    rate, kept = numbers
    slot = kept * slot + gradient
    return value - rate * slot, slot


def nesterov(value: Any, gradient: Any, slot: Any, numbers: Numbers) -> tuple[Any, Any]:
    """As momentum, looking ahead along the slot."""
    rate, kept = numbers
    slot = kept * slot + gradient
    return value - rate * (gradient + kept * slot), slot


def scaled_momentum(value: Any, gradient: Any, slot: Any, numbers: Numbers) -> tuple[Any, Any]:
    """Momentum whose slot holds steps of a rate that is the variable's own, with decay."""
    rate, kept, decay = numbers
    slot = kept * slot + rate * (gradient + decay * value)
    return value - slot, slot


def adagrad(value: Any, gradient: Any, total: Any, numbers: Numbers) -> tuple[Any, Any]:
    """Steps divided by the root of the sum of all squares."""
    rate, within, epsilon = numbers
    total = total + gradient * gradient
    return value - rate * gradient / (square_root(total + within) + epsilon), total


def rmsprop(value: Any, gradient: Any, square: Any, numbers: Numbers) -> tuple[Any, Any]:
    """Steps divided by the root of a moving mean of squares."""
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
    """As rmsprop, with the square of a moving mean taken off: an estimate of the variance."""
    rate, decay, rest, _, within, epsilon = numbers
    square = decay * square + rest * (gradient * gradient)
    mean = decay * mean + rest * gradient
    # Not below zero, where rounding could bring the difference.
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
    step = rate * first / (square_root(second) * scale + epsilon)
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
    """Return a loop `(value, gradient, *slots, numbers)` over flat arrays, to be compiled.

    It reads and writes every array once. All are of one dtype and length.

    Args:
        rule: what happens to each element.
        slots: how many of them it has, 0 to 3.
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
