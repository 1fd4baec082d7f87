"""Train a small network of JAX and Optax on scanned handwritten digits, on any number of ranks.

    mpirun -np 2 python examples/jax_digits.py
    mpirun -np 2 python examples/jax_digits.py --resume --epochs 48

Three marked lines make it a program of many ranks: they keep all copies of the model in step, also
inside of the compiled step. The others are those of a program of one rank, but that each rank takes
its share of every batch. The session writes checkpoints, and stops all ranks together when the
batch system asks for it.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import collectives as cc
import strategies
from common.digits import training_and_held_out
from strategies.checkpoint import Saver
from strategies.session import Summaries, TrainingSession, hooks


def main() -> None:
    """Train, and say how many held-out digits are recognised."""
    options = parse_arguments()
    comm = cc.init()  # 1: who takes part

    transformation = optax.sgd(options.learning_rate, momentum=0.9)
    transformation = strategies.DistributedOptimizer(transformation)  # 2: average the gradients
    params = strategies.broadcast_parameters(make(options.hidden, seed=comm.rank))  # 3: same start
    state = transformation.init(params)

    @jax.jit
    def step(params, state, pixels, digits):
        loss, gradients = jax.value_and_grad(loss_of)(params, pixels, digits)
        updates, state = transformation.update(gradients, state, params, examples=len(digits))
        return optax.apply_updates(params, updates), state, loss

    (pixels, digits), held_out = training_and_held_out()

    def train_epoch() -> dict[str, float]:
        params, state = session["params"], session["state"]
        order = np.random.default_rng(options.seed + session.step)  # the same on all ranks
        rows = order.permutation(len(digits))
        for start in range(0, len(rows), options.batch_size):
            share = rows[start : start + options.batch_size][comm.rank :: comm.size]
            params, state, loss = step(params, state, pixels[share], digits[share])
        session.update(params=params, state=state)  # arrays of JAX do not change: these are new
        return {"loss": float(loss)}

    checkpoints = strategies.CheckpointManager(options.checkpoints, comm)
    saver = Saver(checkpoints, params=params, state=state)
    every_epoch = [hooks.StopAtStep(options.epochs), Summaries(progress="epochs")]
    with (
        checkpoints,
        TrainingSession(saver, restore=options.resume, save_steps=10, hooks=every_epoch) as session,
    ):
        while not session.should_stop():
            session.run(train_epoch)

    right = (logits_of(session["params"], held_out[0]).argmax(1) == held_out[1]).mean()
    if comm.rank == 0:
        print(f"accuracy on the held-out digits: {right:.4f}")


def make(hidden: int, seed: int):
    """Make the weights of two layers."""
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "w1": jax.random.normal(first, (64, hidden)) * np.sqrt(2 / 64),
        "b1": jnp.zeros(hidden),
        "w2": jax.random.normal(second, (hidden, 10)) * np.sqrt(2 / hidden),
        "b2": jnp.zeros(10),
    }


def logits_of(params, pixels):
    """Compute the network."""
    return jax.nn.relu(pixels @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss_of(params, pixels, digits):
    """Compute the mean cross-entropy."""
    logits = logits_of(params, pixels)
    return optax.softmax_cross_entropy_with_integer_labels(logits, digits).mean()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=24, help="passes over the training data")
    parser.add_argument("--batch-size", type=int, default=96, help="rows per step, of all ranks")
    parser.add_argument("--hidden", type=int, default=96, help="units of the hidden layer")
    parser.add_argument("--learning-rate", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=1, help="of the order of the rows")
    parser.add_argument("--checkpoints", default="runs/jax-digits", help="where they go")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint")
    return parser.parse_args()


if __name__ == "__main__":
    main()
