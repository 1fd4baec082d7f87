"""Train the digits on all devices of JAX in all ranks: one program, wherever it runs.

    python examples/jax_devices.py                                       # what JAX has
    JAX_NUM_CPU_DEVICES=8 python examples/jax_devices.py                 # 8 devices of the host
    JAX_NUM_CPU_DEVICES=4 mpirun -np 2 python examples/jax_devices.py    # 4 in each of 2 ranks

All of these end with the same parameters, but for the order in which gradients are added.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import strategies
from common.digits import batches, load

BATCH = 48  # shared evenly by 1 to 4, 6, 8, 12, 16, 24 and 48 devices


def main() -> None:
    """Train, and print the result."""
    options = parse_arguments()
    strategy = strategies.TPUStrategy()
    optimizer = strategies.Momentum(options.learning_rate, 0.9)
    with strategy.scope():
        weights = [strategy.variable(array, name=name) for name, array in start().items()]

    def step(pixels, digits):
        loss, gradients = jax.value_and_grad(loss_of)([w.value for w in weights], pixels, digits)
        pairs = zip(gradients, weights, strict=True)
        strategy.apply_gradients(optimizer, pairs, examples=digits.shape[0])
        return loss

    for epoch in range(options.epochs):
        for batch in strategy.distribute_dataset(global_batches(epoch)):
            loss = strategy.run(step, args=batch)
        mean = strategy.reduce("mean", loss)
        if strategy.is_chief:
            print(f"epoch {epoch + 1}: loss {float(mean):.4f}")
    if strategy.is_chief:
        report(strategy, [np.asarray(w) for w in weights], options.save)


def start() -> dict[str, np.ndarray]:
    """Make the weights of two layers."""
    random = np.random.default_rng(1)
    return {
        "w1": (random.standard_normal((64, 96)) * np.sqrt(2 / 64)).astype(np.float32),
        "b1": np.zeros(96, np.float32),
        "w2": (random.standard_normal((96, 10)) * np.sqrt(2 / 96)).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }


def logits_of(weights, pixels):
    """Compute the network."""
    w1, b1, w2, b2 = weights
    return jax.nn.relu(pixels @ w1 + b1) @ w2 + b2


def loss_of(weights, pixels, digits):
    """Compute the mean cross-entropy."""
    logits = jax.nn.log_softmax(logits_of(weights, pixels))
    return -jnp.take_along_axis(logits, digits[:, None], axis=1).mean()


def global_batches(epoch: int):
    """Yield images and digits, the same on all ranks."""
    pixels, digits = load("training")
    for rows in batches(len(digits), BATCH, epoch):
        if len(rows) == BATCH:  # another length would be another program
            yield pixels[rows].astype(np.float32), digits[rows].astype(np.int32)


def report(strategy, weights, path: str | None) -> None:
    """Say how many held-out digits are recognised, and keep the weights if that is wanted."""
    pixels, digits = load("held out")
    right = (logits_of(weights, pixels).argmax(1) == digits).mean()
    ranks, devices = strategy.ranks.size, len(strategy.devices)
    print(f"{ranks} ranks of {devices} devices\naccuracy on the held-out digits: {right:.4f}")
    if path is not None:
        np.savez(path, *weights)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--save", help="file for the weights, .npz")
    return parser.parse_args()


if __name__ == "__main__":
    main()
