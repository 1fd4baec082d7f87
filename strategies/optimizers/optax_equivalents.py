"""Equivalence table of Optax transformations and optimizers here.

| of Optax | here | only with |
| --- | --- | --- |
| sgd | `SGD`, `Momentum` | |
| adam | `Adam` | no eps_root, mu_dtype, nesterov |
| adamw | `AdamW` | the same, a constant weight_decay, no mask |
| rmsprop | `RMSProp` | initial_scale 0, no nesterov, bias_correction |
| adagrad | `Adagrad` | |

A transformation is a pair of functions without a description. Its settings are read from the
closures of these functions. Then a few steps are compared. So a wrong result, also with a later
version of Optax, raises an error instead of taking a wrong step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from strategies.optimizers.adaptive import Adagrad, Adam, AdamW, RMSProp
from strategies.optimizers.base import LearningRate, Optimizer
from strategies.optimizers.sgd import SGD, Momentum

__all__ = ["equivalent"]

Kept = Mapping[str, Any]
"""Name -> value of the closure of an Optax function."""

_STEPS = 4  # compared steps: with fewer, momentum or a bias correction might not show


def equivalent(transformation: Any) -> Optimizer:
    """Return the optimizer that takes the same steps as an Optax transformation.

    Raises:
        ValueError: no optimizer here does.
    """
    found = _links(transformation.update, transformation.init)
    # `identity` replaces an absent option and does nothing.
    links = [(name, kept) for name, kept in found if name != "identity"]
    make = _TABLE.get(tuple(name for name, _ in links))
    if make is None:
        raise _refusal(f"got {' '.join(name for name, _ in links) or 'no steps'}")
    try:
        # Settings have the names of Optax's own variables, which may change between versions.
        made = make(*[kept for _, kept in links])
    except (KeyError, TypeError, ValueError) as error:
        raise _refusal(f"got other settings: {error}") from error
    _compare(transformation, made)
    return made


def _refusal(got: str) -> ValueError:
    return ValueError(
        "DistributedOptimizer: strategy= uses optimizers of this package, expected optax.sgd, "
        "adam, adamw, rmsprop or adagrad, without other changes of gradients or updates, "
        f"{got}"
    )


def _links(update: Any, init: Any) -> Iterator[tuple[str, Kept]]:
    """Yield the function names of a chain, and the closure of each."""
    # `unwrap`, because Optax decorates some functions.
    kept = inspect.getclosurevars(inspect.unwrap(update)).nonlocals
    of_init = inspect.getclosurevars(inspect.unwrap(init)).nonlocals
    name = update.__qualname__.split(".")[0]
    if name == "chain":
        # Nested chains are flattened: only the order of links matters.
        for pair in zip(kept["update_fns"], of_init["init_fns"], strict=True):
            yield from _links(*pair)
    elif name == "with_extra_args_support":
        yield from _links(kept["tx"].update, kept["tx"].init)
    else:
        # Some settings, such as an initial value, are known to `init` only.
        yield name, {**of_init, **kept}


def _momentum(trace: Kept, scale: Kept) -> Optimizer:
    _only(trace, accumulator_dtype=None)
    return Momentum(_rate(scale), float(trace["decay"]), nesterov=bool(trace["nesterov"]))


def _moments(kept: Kept) -> dict[str, Any]:
    _only(kept, eps_root=0, nesterov=False, mu_dtype=None)
    beta1, beta2, epsilon = (float(kept[name]) for name in ("b1", "b2", "eps"))
    return {"beta1": beta1, "beta2": beta2, "epsilon": epsilon}


def _rmsprop(
    squares: Kept, scale: Kept, trace: Kept | None = None, *, centered: bool = False
) -> Optimizer:
    _only(squares, bias_correction=False)
    momentum = 0.0
    if trace is not None:
        _only(trace, nesterov=False, accumulator_dtype=None)
        momentum = float(trace["decay"])
        # With momentum after a schedule, each step of the sum has another rate.
        if "step_size" not in scale:
            raise ValueError("the learning rate is a schedule, which comes before the momentum")
    return RMSProp(
        _rate(scale),
        decay=float(squares["decay"]),
        momentum=momentum,
        epsilon=float(squares["eps"]),
        epsilon_in_root=bool(squares["eps_in_sqrt"]),
        centered=centered,
    )


def _adagrad(squares: Kept, scale: Kept) -> Optimizer:
    return Adagrad(
        _rate(scale),
        initial_total=float(squares["initial_accumulator_value"]),
        epsilon=float(squares["eps"]),
        epsilon_in_root=True,
    )


def _only(kept: Kept, **expected: Any) -> None:
    """Reject settings that have no counterpart."""
    for name, value in expected.items():
        # Older versions of Optax lack some settings, which then have no effect.
        if name in kept and kept[name] != value:
            raise ValueError(f"{name}={kept[name]}, expected {value}")


def _rate(scale: Kept) -> LearningRate:
    """Return the learning rate, a number or a function; Optax stores its negative."""
    if "step_size" in scale:
        return -float(scale["step_size"])
    schedule: Callable[[int], Any] = scale["step_size_fn"]
    # Optax counts steps as here, from 0.
    return lambda step: -float(schedule(step))


_TABLE: dict[tuple[str, ...], Callable[..., Optimizer]] = {
    ("scale",): lambda scale: SGD(_rate(scale)),
    ("trace", "scale"): _momentum,
    ("scale_by_adam", "scale"): lambda moments, scale: Adam(_rate(scale), **_moments(moments)),
    ("scale_by_adam", "add_decayed_weights", "scale"): lambda moments, decay, scale: AdamW(
        _rate(scale), **_moments(moments), weight_decay=float(decay["weight_decay"])
    ),
    ("scale_by_stddev", "scale"): partial(_rmsprop, centered=True),
    ("scale_by_stddev", "scale", "trace"): partial(_rmsprop, centered=True),
    ("scale_by_rms", "scale"): _rmsprop,
    ("scale_by_rms", "scale", "trace"): _rmsprop,
    ("scale_by_rss", "scale"): _adagrad,
}
# The same links with a schedule as learning rate.
_TABLE |= {
    tuple("scale_by_schedule" if name == "scale" else name for name in names): make
    for names, make in list(_TABLE.items())
}


def _compare(transformation: Any, optimizer: Optimizer) -> None:
    """Raise unless a few steps of both differ by rounding only."""
    theirs = np.array([1.0, -2.0, 0.5], np.float32)
    ours = theirs.copy()
    # From the settings: the comparison must not change the state of `optimizer`.
    trial = type(optimizer)(**optimizer.settings)
    state = transformation.init(theirs)
    # Random gradients, so that different formulas do not agree by chance.
    for gradient in np.random.default_rng(0).standard_normal((_STEPS, 3)).astype(np.float32):
        updates, state = transformation.update(gradient, state, theirs)
        theirs = theirs + np.asarray(updates)
        trial.apply_gradients([(gradient, ours)])
    # The tolerance allows 10 roundings of numbers of size 1 per step.
    if not np.allclose(theirs, ours, rtol=0, atol=10 * _STEPS * np.finfo(np.float32).eps):
        raise _refusal(f"got one that steps to {theirs} where {trial!r} steps to {ours}")
