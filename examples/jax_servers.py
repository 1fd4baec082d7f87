"""Train a model of JAX and Optax with parameter servers, or with spare replicas.

    mpirun -np 3 python examples/jax_servers.py
    mpirun -np 4 python examples/jax_servers.py --spare 1

The compiled step is that of one process: its transformation calls a Python function, which pushes
gradients and returns the updates that make the parameters the newest ones.
"""

from __future__ import annotations

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import collectives as cc
import strategies
from common.digits import batches, load

BATCH = 50


def main() -> None:
    """Train, and say how many held-out digits are recognised."""
    options = parse_arguments()
    transformation = optax.sgd(options.learning_rate, momentum=0.5)
    if options.spare is None:
        with_servers(transformation, options)
    else:
        with_spare_replicas(transformation, options)


def with_servers(transformation, options) -> None:
    """Let workers push their gradients to rank 0 and take new parameters from there."""
    spec = strategies.cluster.ClusterSpec.from_ranks(ps=1)
    with strategies.Cluster(spec) as cluster, strategies.Server(cluster) as server:
        # Of n workers that take turns, a gradient is n - 1 updates late: smaller steps.
        strategy = strategies.ParameterServerStrategy(server, rate_scale=2 / cluster.comm.size)
        transformation = strategies.DistributedOptimizer(transformation, strategy=strategy)
        params = make(seed=1)  # the same on all ranks
        state = transformation.init(params)
        if cluster.job == "ps":
            server.join()
            return
        workers = cluster.workers
        step = compiled(transformation)
        for rows in itertools.islice(my_batches(workers.rank), options.steps // workers.size):
            params, state = step(params, state, *rows)
        jax.block_until_ready(params)
        strategy.leave()
        workers.barrier()
        if strategy.is_chief:
            report(transformation.pull(params), f"parameter server, {workers.size} workers")


def with_spare_replicas(transformation, options) -> None:
    """Train by steps of the first gradients that arrive."""
    comm = cc.init()
    with strategies.SpareReplicaStrategy(comm.size - options.spare, comm=comm) as strategy:
        transformation = strategies.DistributedOptimizer(transformation, strategy=strategy)
        params = make(seed=1)
        state = transformation.init(params)
        step, rows = compiled(transformation), my_batches(comm.rank)
        while strategy.local_step < options.steps:
            params, state = jax.block_until_ready(step(params, state, *next(rows)))
        if strategy.is_chief:
            report(params, f"{options.spare} of {comm.size} replicas spare")


def compiled(transformation):
    """Return a compiled step."""

    @jax.jit
    def step(params, state, pixels, digits):
        gradients = jax.grad(loss_of)(params, pixels, digits)
        updates, state = transformation.update(gradients, state, params, examples=len(digits))
        return optax.apply_updates(params, updates), state

    return step


def make(seed: int):
    """Make the weights of two layers."""
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "w1": jax.random.normal(first, (64, 96)) * np.sqrt(2 / 64),
        "b1": jnp.zeros(96),
        "w2": jax.random.normal(second, (96, 10)) * np.sqrt(2 / 96),
        "b2": jnp.zeros(10),
    }


def logits_of(params, pixels):
    """Compute the network."""
    return jax.nn.relu(pixels @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss_of(params, pixels, digits):
    """Compute the mean cross-entropy."""
    logits = logits_of(params, pixels)
    return optax.softmax_cross_entropy_with_integer_labels(logits, digits).mean()


def my_batches(rank: int):
    """Yield images and digits for ever, in an order of this rank's own."""
    pixels, digits = load("training")
    for epoch in itertools.count():
        for rows in batches(len(digits), BATCH, 1000 * rank + epoch):
            yield pixels[rows].astype(np.float32), digits[rows]


def report(params, how: str) -> None:
    """Print the accuracy on held-out digits."""
    pixels, digits = load("held out")
    right = (logits_of(params, pixels).argmax(1) == digits).mean()
    print(f"{how}\naccuracy on the held-out digits: {right:.4f}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spare", type=int, help="so many replicas are spare; no servers")
    parser.add_argument("--steps", type=int, default=800, help="of all workers; of the replicas")
    parser.add_argument("--learning-rate", type=float, default=0.2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
