"""Step times with spare replicas where ranks are slow now and then.

    mpirun -np 8 python benchmarks/spare_replicas.py [--json FILE] [--picture FILE]

Each rank sleeps before it delivers a gradient, so that more ranks than cores are fine: a log-normal
time, and in every 20th step one rank takes ten times as long. For each number of spare replicas the
mean step time is compared with the time computed from the same delays:

- `expected`: a step ends with the last gradient that it needs; a late rank begins with the newest
  step when it has finished the old one;
- `fresh`: the order statistic alone, as if all ranks began every step at once.

`asynchronous` is the time to apply as many gradients if no rank waits for another one. It shows
the cost of waiting, and the part that spare replicas save without stale gradients.

`--digits` trains the digits instead, to 96 % of the held-out ones, without spares and with two.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np

import collectives as cc
import strategies
from collectives.tools import plot

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SIGMA = 0.5  # of the logarithm of a delay
SLOW_EVERY, SLOW_BY = 20, 10


def main() -> None:
    """Measure, and print one line per number of spare replicas on rank 0."""
    options = parse_arguments()
    comm = cc.init()
    if options.digits:
        figures = digits(comm, options)
    else:
        figures = {
            str(spare): step_time(comm, spare, options) for spare in range(options.most_spares + 1)
        }
        each = asynchronous(comm, options)
        for spare, values in figures.items():
            values["asynchronous"] = 1e3 * each * (comm.size - int(spare))
    if comm.rank == 0:
        for name, values in figures.items():
            line = ", ".join(f"{what} {value:.4g}" for what, value in values.items())
            print(f"{name} spare: {line}")
        if options.json:
            Path(options.json).write_text(json.dumps(figures, indent=1))
        if options.picture:
            picture({int(spare): values for spare, values in figures.items()}, options.picture)


def delays(steps: int, ranks: int, median: float, seed: int) -> np.ndarray:
    """Return seconds for each step and rank, shape (steps, ranks)."""
    drawn = median * np.random.default_rng(seed).lognormal(0, SIGMA, (steps, ranks))
    for step in range(SLOW_EVERY - 1, steps, SLOW_EVERY):
        drawn[step, step // SLOW_EVERY % ranks] *= SLOW_BY
    return drawn


def expected(drawn: np.ndarray, needed: int) -> np.ndarray:
    """Return when each step ends, in seconds: the slow equivalent of what is measured.

    A rank that is late finishes its old gradient, and then begins with the step that is newest.
    """
    now, free, ends = 0.0, np.zeros(drawn.shape[1]), []
    for row in drawn:
        begun = np.maximum(free, now)
        done = begun + row
        now = float(np.sort(done)[needed - 1])
        free = np.where(begun < now, done, free)
        ends.append(now)
    return np.array(ends)


class Timed:
    """An optimizer that notes when it is called, which is once per step, by the chief."""

    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer
        self.times: list[float] = []
        self.kept: list[dict[str, np.ndarray]] = []

    def apply_gradients(self, grads_and_vars) -> None:
        """Update."""
        pairs = list(grads_and_vars)
        self.optimizer.apply_gradients(pairs)
        self.times.append(time.perf_counter())
        self.kept.append({variable.name: variable.value.copy() for _, variable in pairs})


def step_time(comm, spare: int, options) -> dict[str, float]:
    """Make steps of nothing but delays; returns seconds per step, measured and expected."""
    drawn = delays(options.steps, comm.size, options.median / 1000, options.seed)
    needed = comm.size - spare
    with strategies.SpareReplicaStrategy(needed, comm=comm) as strategy:
        w = strategy.variable(np.zeros(1000, np.float32), name="w")
        gradient, optimizer = np.ones(1000, np.float32), Timed(strategies.SGD(0.1))
        comm.barrier()
        while strategy.local_step < options.steps:
            time.sleep(drawn[strategy.local_step, comm.rank])
            strategy.apply_gradients(optimizer, [(gradient, w)])
        report = strategy.report()
    if comm.rank:
        return {}
    measured = float(np.mean(np.diff(optimizer.times)))
    by_rule = float(np.mean(np.diff(expected(drawn, needed))))
    fresh = float(np.sort(drawn, axis=1)[1:, needed - 1].mean())
    return {
        "ms per step": measured * 1e3,
        "expected": by_rule * 1e3,
        "fresh": fresh * 1e3,
        "measured / expected": measured / by_rule,
        "dropped per step": sum(report.dropped.values()) / options.steps,
    }


def asynchronous(comm, options) -> float:
    """Apply gradients on arrival, with the same delays; returns seconds per gradient."""
    drawn = delays(options.steps, comm.size, options.median / 1000, options.seed)
    gradient = np.ones(1000, np.float32)
    with strategies.rpc.Service(comm) as service:
        w = strategies.variables.shared_variable(
            np.zeros(1000, np.float32) if comm.rank == 0 else None,
            service=service,
            shared_name="w",
            optimizer=strategies.SGD(0.1),
        )
        comm.barrier()
        began = time.perf_counter()
        for delay in drawn[:, comm.rank]:
            time.sleep(delay)
            w.apply_gradients(gradient)
            w.read()
        # Ranks end at different times; the rate is that of all while they train.
        each = (time.perf_counter() - began) / options.steps
        return 1 / float(comm.allreduce(1 / each, op=cc.SUM))


def digits(comm, options) -> dict[str, dict[str, float]]:
    """Train without spares and with two in turns; returns seconds until 96 % were recognised."""
    sys.path.insert(0, str(EXAMPLES))
    found: dict[str, list[tuple[float, float]]] = {"0": [], "2": []}
    for number, spare in itertools.product(range(options.rounds), (0, 2)):
        found[str(spare)].append(train(comm, spare, options, options.seed + number))
    medians = {name: np.median(pairs, axis=0) for name, pairs in found.items()}
    figures = {
        name: {"seconds to 96 %": float(both[0]), "steps to 96 %": float(both[1])}
        for name, both in medians.items()
    }
    if comm.rank == 0:
        figures["2"]["share of the time without"] = float(medians["2"][0] / medians["0"][0])
    return figures


def train(comm, spare: int, options, seed: int) -> tuple[float, float]:
    """Train once; returns seconds and steps until 96 %."""
    from spare_replicas import backward, make_network, my_batches

    from common.digits import Network, accuracy, load

    drawn = delays(options.steps, comm.size, options.median / 1000, seed)
    with strategies.SpareReplicaStrategy(comm.size - spare, comm=comm) as strategy:
        network = make_network(strategy, 64, 1)
        optimizer = Timed(strategies.Momentum(0.1, 0.9))
        batches = my_batches(25, seed + comm.rank)
        comm.barrier()
        began = time.perf_counter()
        while strategy.local_step < options.steps:
            time.sleep(drawn[strategy.local_step, comm.rank])
            gradients = backward(network, *next(batches))
            pairs = [(gradients[name], variable) for name, variable in network.items()]
            strategy.apply_gradients(optimizer, pairs)
    pixels, labels = load("held out")
    for step, (ended, weights) in enumerate(zip(optimizer.times, optimizer.kept, strict=True), 1):
        if accuracy(Network(weights).predict(pixels), labels) >= 0.96:
            return ended - began, step
    return float("inf") if comm.rank == 0 else 0.0, options.steps


def picture(figures: dict[int, dict[str, float]], path: str) -> None:
    """Draw the step time over the number of spare replicas.

    Args:
        figures: spare replicas -> "ms per step", and other lines of milliseconds beside it.
        path: of the picture; its end says the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    spares = sorted(figures)
    ratios = ("measured / expected", "dropped per step")
    for name in (name for name in figures[spares[0]] if name not in ratios):
        style = "o-" if name == "ms per step" else "--"
        axes.plot(spares, [figures[spare][name] for spare in spares], style, label=name)
    axes.set_xticks(spares)
    axes.set_xlabel("spare replicas")
    axes.set_ylabel("ms per step")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    plot.save(figure, path)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--median", type=float, default=40, help="of the delays, in ms")
    parser.add_argument("--most-spares", type=int, default=4)
    parser.add_argument("--digits", action="store_true", help="time until the digits are learned")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of --digits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--picture", help="also draw the curve into this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
