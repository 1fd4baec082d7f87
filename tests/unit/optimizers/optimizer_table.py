"""Every optimizer, and its published formula in float64 over plain NumPy arrays."""

from __future__ import annotations

import numpy as np

from strategies import LARS, SGD, Adagrad, Adam, AdamW, Momentum, RMSProp
from strategies.optimizers import Nesterov

# name -> optimizer at a learning rate
MAKERS = {
    "sgd": lambda rate: SGD(rate),
    "momentum": lambda rate: Momentum(rate, 0.9),
    "nesterov": lambda rate: Nesterov(rate, 0.9),
    "lars": lambda rate: LARS(rate, momentum=0.9, weight_decay=0.1, trust=0.02),
    "adagrad": lambda rate: Adagrad(rate, initial_total=0.1),
    "adagrad-in-root": lambda rate: Adagrad(
        rate, initial_total=0.1, epsilon=1e-3, epsilon_in_root=True
    ),
    "rmsprop": lambda rate: RMSProp(rate, decay=0.9),
    "rmsprop-in-root": lambda rate: RMSProp(rate, decay=0.9, epsilon=1e-3, epsilon_in_root=True),
    "rmsprop-momentum": lambda rate: RMSProp(rate, decay=0.9, momentum=0.8),
    "rmsprop-centered": lambda rate: RMSProp(rate, decay=0.9, centered=True),
    "rmsprop-both": lambda rate: RMSProp(rate, decay=0.9, momentum=0.8, centered=True),
    "adam": lambda rate: Adam(rate, beta2=0.99),
    "amsgrad": lambda rate: Adam(rate, beta2=0.99, amsgrad=True),
    "adamw": lambda rate: AdamW(rate, beta2=0.99, weight_decay=0.1),
    "adamw-amsgrad": lambda rate: AdamW(rate, beta2=0.99, weight_decay=0.1, amsgrad=True),
}
WITH_SLOTS = [name for name in MAKERS if name != "sgd"]

# The most roundings of one change, and how many steps a slot remembers: 1 / (1 - 0.99) at most.
ROUNDINGS, MEMORY = 16, 100


def directions(name, gradients, weights, rate):
    """Yield what is subtracted from the weights, which the caller changes, step by step."""
    first = second = mean = largest = slot = 0.0
    for step, gradient in enumerate(gradients):
        g = gradient.astype(np.float64)
        lr = rate(step)
        if name == "sgd":
            yield lr * g
        elif name in ("momentum", "nesterov"):
            slot = 0.9 * slot + g
            yield lr * (g + 0.9 * slot if name == "nesterov" else slot)
        elif name == "lars":
            decay, ratio = 0.0, 1.0
            if weights.ndim >= 2:
                decay = 0.1
                length, slope = np.sqrt((weights**2).sum()), np.sqrt((g**2).sum())
                if length > 0 and slope > 0:
                    ratio = 0.02 * length / (slope + decay * length)
            slot = 0.9 * slot + lr * ratio * (g + decay * weights)
            yield slot
        elif name == "adagrad":
            second = (0.1 if step == 0 else second) + g**2
            yield lr * g / (np.sqrt(second) + 1e-10)
        elif name == "adagrad-in-root":
            second = (0.1 if step == 0 else second) + g**2
            yield lr * g / np.sqrt(second + 1e-3)
        elif name == "rmsprop-in-root":
            second = 0.9 * second + 0.1 * g**2
            yield lr * g / np.sqrt(second + 1e-3)
        elif name.startswith("rmsprop"):
            second = 0.9 * second + 0.1 * g**2
            mean = 0.9 * mean + 0.1 * g
            centered = name in ("rmsprop-centered", "rmsprop-both")
            direction = g / (np.sqrt(second - mean**2 if centered else second) + 1e-8)
            slot = 0.8 * slot + direction
            yield lr * (slot if name in ("rmsprop-momentum", "rmsprop-both") else direction)
        else:
            t = step + 1
            first = 0.9 * first + 0.1 * g
            second = 0.99 * second + 0.01 * g**2
            largest = np.maximum(largest, second)
            root = np.sqrt((largest if "amsgrad" in name else second) / (1 - 0.99**t))
            decay = 0.1 if "adamw" in name else 0.0
            yield lr * decay * weights + lr * first / (1 - 0.9**t) / (root + 1e-8)


def follow(name, weights, gradients, rate):
    """Return the weights after all steps, and the largest change of any in one step."""
    weights = np.array(weights, np.float64)
    largest = 0.0
    for direction in directions(name, gradients, weights, rate):
        largest = max(largest, np.abs(direction).max(initial=0))
        weights -= direction
    return weights, largest


def rounding_bound(steps, weights, largest_change, eps):
    """Each step rounds the variable once, and its change and slots in some operations."""
    return steps * eps * (np.abs(weights).max(initial=0) + ROUNDINGS * MEMORY * largest_change)
