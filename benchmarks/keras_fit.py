"""A step of Keras's `fit` on JAX against the same model trained by Optax by hand, in turns.

    mpirun -np 2 python benchmarks/keras_fit.py [--rounds 9] [--json FILE]

Both ways average the gradients by `DistributedOptimizer` in a compiled step, and read the same
batches. Prints medians in milliseconds for each number of units in the two hidden layers, and how
many times as long `fit` takes; a ratio is the median of the rounds'. "alone" is `fit` without an
exchange. The rate at which 512 KiB pass from core to core is printed, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")  # ranks fill the cores

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from turns import Handover, machine

import collectives as cc
import strategies
import strategies.keras

INPUTS, CLASSES, ROWS = 784, 10, 64
UNITS = [256, 1024, 4096]
STEPS = 20  # of a turn

Batches = list[tuple[np.ndarray, np.ndarray]]


def main() -> None:
    """Measure; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    comm = cc.init()
    rate = Handover(comm.to_mpi()).rate()
    cases = {str(units): measured(units, options.rounds, comm) for units in UNITS}
    if comm.rank:
        return
    print(f"{rate:.1f} GB/s from core to core")
    for units, found in cases.items():
        times = ", ".join(f"{way} {value:.2f}" for way, value in found.items())
        print(f"{units:>6} units: {times}")
    if options.json:
        facts = {"machine": machine(), "GB/s from core to core": rate, "units": cases}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


def measured(units: int, rounds: int, comm: cc.Communicator) -> dict[str, float]:
    """Return milliseconds of a step, and the ratio."""
    rng = np.random.default_rng(comm.rank)
    batches = [
        (
            rng.normal(size=(ROWS, INPUTS)).astype(np.float32),
            rng.integers(0, CLASSES, ROWS, np.int32),
        )
        for _ in range(STEPS)
    ]
    ways = {
        "fit": by_keras(units, batches, average=True),
        "by hand": by_hand(units, batches),
        "alone": by_keras(units, batches, average=False),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):  # the first compiles
        for way in sorted(ways, reverse=bool(number % 2)):
            comm.barrier()
            began = time.perf_counter()
            ways[way]()
            took = float(comm.allreduce(time.perf_counter() - began, op=cc.MAX))
            if number:
                times[way].append(1e3 * took / STEPS)
    ratio = statistics.median(a / b for a, b in zip(times["fit"], times["by hand"], strict=True))
    return {**{way: statistics.median(found) for way, found in times.items()}, "ratio": ratio}


def by_keras(units: int, batches: Batches, *, average: bool) -> Callable[[], object]:
    """Return a function that trains a Keras model on all batches."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(units, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((INPUTS,)), *layers, keras.layers.Dense(CLASSES)])
    optimizer = keras.optimizers.Adam(1e-3)
    if average:
        optimizer = strategies.keras.DistributedOptimizer(optimizer)
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def forever() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            yield from batches

    source = forever()  # Keras reads ahead, also past the end of an epoch
    return lambda: model.fit(source, steps_per_epoch=STEPS, shuffle=False, verbose=0)


def by_hand(units: int, batches: Batches) -> Callable[[], object]:
    """Return a function that trains the same network by Optax on all batches."""
    widths = [INPUTS, units, units, CLASSES]
    rng = np.random.default_rng(0)
    parameters = [
        (jnp.asarray(rng.normal(0, inputs**-0.5, (inputs, outputs)), jnp.float32),
         jnp.zeros(outputs))
        for inputs, outputs in zip(widths[:-1], widths[1:], strict=True)
    ]  # fmt: skip
    transformation = strategies.DistributedOptimizer(optax.adam(1e-3))

    def loss_of(parameters: Any, x: Any, y: Any) -> Any:
        for weights, bias in parameters[:-1]:
            x = jax.nn.relu(x @ weights + bias)
        weights, bias = parameters[-1]
        scores = x @ weights + bias
        return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()

    def step(parameters: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(parameters, x, y)
        updates, state = transformation.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    compiled = jax.jit(step, donate_argnums=(0, 1))
    now = [parameters, transformation.init(parameters)]

    def train() -> float:
        total: Any = 0.0
        for x, y in batches:
            *now[:], loss = compiled(*now, x, y)
            total += loss
        return float(total) / len(batches)

    return train


if __name__ == "__main__":
    main()
