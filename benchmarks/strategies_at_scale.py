"""Strategies for 1 to 1,024 simulated replicas: how many times one replica's speed, and how stale.

    python benchmarks/strategies_at_scale.py [--json FILE] [--picture FILE]

Replicas are the seconds that they compute (`collectives.simulation.training`), a machine for each,
lines of 100 Gbit/s and messages of 5 us. An all-reduce takes what the closed form of the algorithm
says that "auto" picks, and rows of sparse gradients are gathered instead;
`benchmarks/simulated_choice.py` holds these against the simulation. Before that, the same functions
are held against what real ranks took, in the files of `benchmarks/spare_replicas.py` (8 ranks) and
`benchmarks/servers_network.py` (6 workers).

Three kinds of machines. Two are assumed: *own* ones, on which steps differ by 2 %; *shared* ones,
on which they differ by 10 %, and every 100th step of a replica takes three times as long. On
*measured* ones steps take what `benchmarks/step_times.py` has seen where other work shared the
cores; only ResNet-50 is trained there. A speedup is gradients that counted per second, times what
one replica alone takes for a gradient on such a machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from spare_replicas import delays

from collectives.algorithms import selection
from collectives.algorithms.cost_model import RankLayout
from collectives.core.links import DEFAULT, LinkCost
from collectives.simulation import training
from collectives.simulation.training import Compute
from collectives.tools import plot

BENCHMARKS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
BETA, LATENCY = 8e-11, 5e-6
STEPS = 300
BUCKET = 25 << 20
REPLICAS = [1, 8, 50, 100, 500, 1024]

MACHINES: dict[str, dict[str, Any]] = {
    "own": {"spread": 0.02},
    "shared": {"spread": 0.1, "slow_share": 0.01, "slow_by": 3.0},
    "measured": {"measured": json.loads((BENCHMARKS / "step-times.json").read_text())["ratios"]},
}


class Model(NamedTuple):
    """A model: bytes that a replica sends in a step, and seconds that it computes."""

    nbytes: int
    seconds: float
    dense: bool


MODELS = {
    "ResNet-50": Model(4 * 25_600_000, 0.15, dense=True),
    "Inception-v3": Model(4 * 23_900_000, 0.2, dense=True),
    "translation, 384 M parameters": Model(4 * 384_000_000, 1.0, dense=True),
    "sparse ranking, 1 MB of rows": Model(1_000_000, 0.05, dense=False),
}

# Speedups of early 2016, on GPUs and lines of then: model -> replicas and times.
PUBLISHED = {
    "Inception-v3": [(50, 32)],
    "translation, 384 M parameters": [(8, 6)],
    "ResNet-50": [(50, 25), (50, 40)],  # "dense models"
    "sparse ranking, 1 MB of rows": [(500, 300)],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--picture", type=Path, help="speedups beside the published ones")
    options = parser.parse_args()
    figures: dict[str, Any] = {"validation": validation(), "speedups": {}}
    for name, value in figures["validation"].items():
        print(f"{name}: simulated / measured {value:.3f}")
    for kind in MACHINES:
        for name in list(MODELS)[: 1 if kind == "measured" else None]:
            found = speedups(name, kind)
            figures["speedups"][f"{name}, {kind} machines"] = found
            print(f"{name}, {kind} machines")
            for way, cells in found.items():
                print(f"  {way:<24}", *(f"{cell['speedup']:9.1f}" for cell in cells.values()))
    figures["spares"] = spares()
    figures["ps tasks"] = tasks()
    for question in ("spares", "ps tasks"):
        print(question, json.dumps(figures[question]))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if options.picture:
        draw(figures["speedups"], options.picture)
    return 0


def validation() -> dict[str, float]:
    """Return what is simulated over what was measured with real ranks."""
    found = {}
    measured = json.loads((BENCHMARKS / "spare-replicas.json").read_text())
    drawn = delays(80, 8, 0.1, 0)  # --steps 80 --median 100
    for spare, row in measured.items():
        simulated = 1e3 / training.spare_replicas(drawn, 8 - int(spare), 0.0).steps_per_second
        found[f"8 ranks, {spare} spare"] = simulated / row["ms per step"]
    measured = json.loads((BENCHMARKS / "servers-network.json").read_text())
    workers, line = measured["workers"], measured["line_seconds"] / measured["workers"]
    for number in (1, 2):
        still = Compute(1e-6).draw(50, workers)
        rate = training.asynchronous(still, number, line).gradients_per_second
        found[f"{workers} workers, {number} ps"] = (
            workers / rate / measured["seconds"][f"{number} ps, float32"]
        )
    return found


def reducing(nbytes: int, replicas: int, *, dense: bool) -> float:
    """Return seconds of an all-reduce; of rows all replicas get those of all others."""
    if replicas == 1:
        return 0.0
    operation, nbytes = ("allreduce", nbytes) if dense else ("allgather", nbytes * replicas)
    machine = DEFAULT._replace(network=LinkCost(LATENCY, BETA, DEFAULT.network.gamma))
    layout = RankLayout(replicas, replicas, machine)
    return selection.estimate(operation, nbytes, layout)[selection.pick(operation, nbytes, layout)]


def buckets(model: Model, replicas: int, share: int = 1) -> list[tuple[float, float]]:
    """Return for each bucket when it is ready, and its all-reduce; bytes are cut by `share`."""
    number = max(1, round(model.nbytes / BUCKET))
    took = reducing(model.nbytes // number // share, replicas, dense=model.dense)
    return [(share, took) for share in training.ready_fractions([model.nbytes // number] * number)]


def speedups(name: str, kind: str) -> dict[str, dict[int, dict[str, float]]]:
    model = MODELS[name]
    compute = Compute(model.seconds, **MACHINES[kind])
    line = model.nbytes * BETA
    found: dict[str, dict[int, dict[str, float]]] = {}
    for replicas in REPLICAS:
        drawn = compute.draw(STEPS, replicas)
        alone = float(drawn.mean())
        ps = max(1, replicas // 8)
        spare = max(1, replicas // 20) if replicas > 1 else 0
        whole = reducing(model.nbytes, replicas, dense=model.dense)
        outcomes = {
            "all-reduce": training.all_reduce(drawn, buckets(model, replicas)),
            "all-reduce, 16 bits": training.all_reduce(drawn, buckets(model, replicas, 2)),
            "5 % spare replicas": training.spare_replicas(drawn, replicas - spare, whole),
            "synchronous, P/8 ps": training.servers(drawn, ps, line),
            "asynchronous, 1 ps": training.asynchronous(drawn, 1, line),
            "asynchronous, P/8 ps": training.asynchronous(drawn, ps, line),
        }
        for way, outcome in outcomes.items():
            found.setdefault(way, {})[replicas] = {
                "speedup": outcome.gradients_per_second * alone,
                "steps per second": outcome.steps_per_second,
                "stale": outcome.stale,
                "waiting": outcome.waiting,
            }
    return found


def spares() -> dict[str, dict[str, float]]:
    """Return, for n replicas on shared machines, which number of spares makes steps fastest.

    The replicas are n in all, as in a job that has been given n machines; a step counts the
    gradients that it needs, so that a spare has to win more than it costs.
    """
    found = {}
    for replicas in (16, 50, 100, 500):
        drawn = Compute(0.15, **MACHINES["shared"]).draw(STEPS, replicas)
        rates = {
            spare: training.spare_replicas(drawn, replicas - spare, 0.02).gradients_per_second
            for spare in sorted(
                {0, *range(1, 11), *(replicas * n // 100 for n in (1, 2, 4, 6, 10))}
            )
            if spare < replicas // 2
        }
        best = max(rates, key=rates.__getitem__)
        found[str(replicas)] = {"spares": best, "times as fast as none": rates[best] / rates[0]}
    return found


def tasks() -> dict[str, dict[str, float]]:
    """Return, for ResNet-50 and 50 workers that do not wait, what more ps tasks bring."""
    model, workers = MODELS["ResNet-50"], 50
    drawn = Compute(model.seconds, **MACHINES["own"]).draw(STEPS, workers)
    found = {}
    for number in (1, 2, 4, 6, 8, 12, 16):
        outcome = training.asynchronous(drawn, number, model.nbytes * BETA)
        found[str(number)] = {
            "speedup": outcome.gradients_per_second * model.seconds,
            "stale": outcome.stale,
        }
    return found


def draw(found: dict[str, Any], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, all_axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for axes, name in zip(all_axes.flat, MODELS, strict=True):
        for way, cells in found[f"{name}, own machines"].items():
            axes.loglog(list(cells), [c["speedup"] for c in cells.values()], "o-", ms=3, label=way)
        axes.loglog(REPLICAS, REPLICAS, ":", color="gray", label="linear")
        axes.plot(*zip(*PUBLISHED[name], strict=True), "k*", ms=10, label="published, early 2016")
        axes.set_title(name)
        axes.set_xlabel("replicas")
        axes.set_ylabel("times one replica")
        axes.grid(alpha=0.3)
    all_axes[0, 0].legend(fontsize=7)
    plot.save(figure, picture)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
