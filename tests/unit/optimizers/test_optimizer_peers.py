"""Optimizers against those of PyTorch and Optax, over 100 steps."""

from __future__ import annotations

import numpy as np
import pytest

from optimizer_table import rounding_bound
from requirements import installed
from strategies import LARS, SGD, Adagrad, Adam, AdamW, Momentum, RMSProp

STEPS, RATE = 100, 0.01

# (ours, name in torch.optim, its arguments)
TORCH = {
    "sgd": (SGD(RATE), "SGD", {}),
    "momentum": (Momentum(RATE, 0.9), "SGD", {"momentum": 0.9}),
    "nesterov": (
        Momentum(RATE, 0.9, nesterov=True), "SGD", {"momentum": 0.9, "nesterov": True},
    ),
    "adagrad": (Adagrad(RATE), "Adagrad", {}),
    "adagrad, not from zero": (
        Adagrad(RATE, initial_total=0.1, epsilon=1e-3), "Adagrad",
        {"initial_accumulator_value": 0.1, "eps": 1e-3},
    ),
    "rmsprop": (RMSProp(RATE), "RMSprop", {"alpha": 0.9}),
    "rmsprop-momentum": (
        RMSProp(RATE, decay=0.99, momentum=0.8), "RMSprop", {"alpha": 0.99, "momentum": 0.8},
    ),
    "rmsprop-centered": (RMSProp(RATE, centered=True), "RMSprop", {"alpha": 0.9, "centered": True}),
    "rmsprop-both": (
        RMSProp(RATE, decay=0.99, momentum=0.8, centered=True), "RMSprop",
        {"alpha": 0.99, "momentum": 0.8, "centered": True},
    ),
    "adam": (Adam(RATE), "Adam", {}),
    "adam, other betas": (
        Adam(RATE, beta1=0.8, beta2=0.95, epsilon=1e-4), "Adam",
        {"betas": (0.8, 0.95), "eps": 1e-4},
    ),
    "amsgrad": (Adam(RATE, amsgrad=True), "Adam", {"amsgrad": True}),
    "adamw": (AdamW(RATE), "AdamW", {}),
    "adamw-amsgrad": (
        AdamW(RATE, weight_decay=0.1, amsgrad=True), "AdamW",
        {"weight_decay": 0.1, "amsgrad": True},
    ),
}  # fmt: skip

# Each name: (ours, function of optax that returns its own). Optax's momentum holds rates, ours and
# PyTorch's do not, which is the same as long as the rate stays.
OPTAX = {
    "sgd": (SGD(RATE), lambda optax: optax.sgd(RATE)),
    "momentum": (Momentum(RATE, 0.9), lambda optax: optax.sgd(RATE, momentum=0.9)),
    "nesterov": (
        Momentum(RATE, 0.9, nesterov=True),
        lambda optax: optax.sgd(RATE, momentum=0.9, nesterov=True),
    ),
    "adagrad": (
        Adagrad(RATE, initial_total=0.1, epsilon=1e-7, epsilon_in_root=True),
        lambda optax: optax.adagrad(RATE),
    ),
    "rmsprop, its default": (
        RMSProp(RATE, epsilon=1e-3, epsilon_in_root=True),
        lambda optax: optax.rmsprop(RATE, eps=1e-3),
    ),
    "rmsprop-both in root": (
        RMSProp(RATE, momentum=0.8, centered=True, epsilon=1e-3, epsilon_in_root=True),
        lambda optax: optax.rmsprop(RATE, momentum=0.8, centered=True, eps=1e-3),
    ),
    "rmsprop": (RMSProp(RATE), lambda optax: optax.rmsprop(RATE, eps_in_sqrt=False)),
    "rmsprop-momentum": (
        RMSProp(RATE, momentum=0.8),
        lambda optax: optax.rmsprop(RATE, momentum=0.8, eps_in_sqrt=False),
    ),
    "rmsprop-centered": (
        RMSProp(RATE, centered=True),
        lambda optax: optax.rmsprop(RATE, centered=True, eps_in_sqrt=False),
    ),
    "rmsprop-both": (
        RMSProp(RATE, momentum=0.8, centered=True),
        lambda optax: optax.rmsprop(RATE, momentum=0.8, centered=True, eps_in_sqrt=False),
    ),
    "adam": (Adam(RATE), lambda optax: optax.adam(RATE)),
    "adamw": (AdamW(RATE, weight_decay=0.1), lambda optax: optax.adamw(RATE, weight_decay=0.1)),
    # With decay, Optax divides by the norm of the sum of gradient and decay, the paper does not.
    "lars": (
        LARS(RATE, momentum=0.9, trust=0.02),
        lambda optax: optax.lars(
            RATE,
            momentum=0.9,
            trust_coefficient=0.02,
            trust_ratio_mask=lambda parameters: [p.ndim > 1 for p in parameters],
        ),
    ),
}


def problem(dtype):
    """Return two variables and for each step a gradient of each."""
    rng = np.random.default_rng(30)
    shapes = [(13, 5), (7,)]
    weights = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    gradients = [[rng.standard_normal(s).astype(dtype) for s in shapes] for _ in range(STEPS)]
    return weights, gradients


def fresh(optimizer):
    """Return the optimizer as it was made, since the tables hold one for all tests."""
    optimizer.load_state_dict({"step": 0})
    return optimizer


def compare(ours, weights, gradients, theirs, dtype, drift=0.0):
    """Check that both end with the same variables, up to what they have rounded.

    `drift` is what the other adds to the tolerance, relative to the largest variable.
    """
    variables = [w.copy() for w in weights]
    change = 0.0
    for pair in gradients:
        before = [v.copy() for v in variables]
        ours.apply_gradients(zip(pair, variables, strict=True))
        changes = [np.abs(v - b).max() for v, b in zip(variables, before, strict=True)]
        change = max(change, *changes)
    for variable, other in zip(variables, theirs, strict=True):
        assert other.dtype == variable.dtype == dtype
        bound = 2 * rounding_bound(STEPS, variable, change, np.finfo(dtype).eps)
        difference = np.abs(variable - other).max()
        assert difference <= bound
        # What roundings that do not all go one way leave of it, in float32.
        assert difference <= (1e-6 + drift) * np.abs(variable).max()


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_as_pytorch(name, dtype):
    torch = installed("torch")
    ours, theirs, arguments = TORCH[name]
    weights, gradients = problem(dtype)
    parameters = [torch.nn.Parameter(torch.tensor(w)) for w in weights]
    optimizer = getattr(torch.optim, theirs)(parameters, lr=RATE, **arguments)
    for pair in gradients:
        for parameter, gradient in zip(parameters, pair, strict=True):
            parameter.grad = torch.tensor(gradient)
        optimizer.step()
    results = [p.detach().numpy() for p in parameters]
    # PyTorch multiplies by 1 - rate * decay, which is rounded, and by the same error in every step.
    drift = STEPS * np.finfo(dtype).eps / 2 if theirs == "AdamW" else 0.0
    compare(fresh(ours), weights, gradients, results, dtype, drift)


@pytest.mark.parametrize("name", OPTAX)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_as_optax(name, dtype):
    jax, optax = installed("jax"), installed("optax")
    ours, make = OPTAX[name]
    weights, gradients = problem(dtype)
    with jax.enable_x64(True):
        transformation = make(optax)
        parameters = [jax.numpy.asarray(w) for w in weights]
        state = transformation.init(parameters)

        @jax.jit
        def step(gradients, state, parameters):
            updates, state = transformation.update(gradients, state, parameters)
            return optax.apply_updates(parameters, updates), state

        for pair in gradients:
            parameters, state = step(pair, state, parameters)
        results = [np.asarray(p) for p in parameters]
    compare(fresh(ours), weights, gradients, results, dtype)
