"""A step of Adam on one thread, against PyTorch's, fused and not, and against NumPy's operators.

    python benchmarks/optimizers.py [--million 25] [--json file]

The variables are one array, and the 161 arrays of ResNet-50, 25.6 million elements in all. All take
turns; figures are medians in milliseconds. `ratio` is ours over PyTorch's fused one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from shapes import resnet50

from strategies import Adam

RATE, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.999, 1e-8


def main() -> None:
    """Measure both lists of variables and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--million", type=float, default=25, help="elements of the one array")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    cases = {
        "one array": [(int(options.million * 1e6),)],
        "resnet-50": resnet50(),
    }
    rows = {name: measure(shapes, options.rounds) for name, shapes in cases.items()}
    columns = ["ours", "torch fused", "torch", "numpy", "ratio"]
    print("Adam, float32, one thread, milliseconds per step")
    print("  ".join(f"{c:>12}" for c in ["variables", *columns]))
    for name, row in rows.items():
        print("  ".join([f"{name:>12}", *(f"{row[c]:12.2f}" for c in columns)]))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def measure(shapes: list[tuple[int, ...]], rounds: int) -> dict[str, float]:
    """Return the median times of all optimizers, which take turns, in milliseconds."""
    import torch

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    gradients = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    optimizer = Adam(RATE, beta1=BETA1, beta2=BETA2, epsilon=EPSILON)
    pairs = [(g, w.copy()) for g, w in zip(gradients, weights, strict=True)]
    cases: dict[str, Callable[[], object]] = {
        "ours": lambda: optimizer.apply_gradients(pairs),
        "numpy": operators(gradients, [w.copy() for w in weights]),
    }
    for name, fused in (("torch fused", True), ("torch", None)):
        parameters = [torch.nn.Parameter(torch.tensor(w)) for w in weights]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.tensor(gradient)
        cases[name] = torch.optim.Adam(parameters, lr=RATE, fused=fused).step
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round in range(rounds + 2):
        for name, run in cases.items():
            began = time.perf_counter()
            run()
            if round >= 2:  # before, code is compiled and memory comes from the system
                times[name].append(1e3 * (time.perf_counter() - began))
    row = {name: statistics.median(values) for name, values in times.items()}
    return {**row, "ratio": row["ours"] / row["torch fused"]}


def operators(gradients: list[np.ndarray], weights: list[np.ndarray]) -> Callable[[], None]:
    """Return a step written with NumPy's operators in place."""
    firsts = [np.zeros_like(w) for w in weights]
    seconds = [np.zeros_like(w) for w in weights]
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        scale = RATE / (1 - BETA1**count)
        root = (1 - BETA2**count) ** 0.5
        for g, w, first, second in zip(gradients, weights, firsts, seconds, strict=True):
            first *= BETA1
            first += (1 - BETA1) * g
            second *= BETA2
            second += (1 - BETA2) * (g * g)
            w -= scale * first / (np.sqrt(second) / root + EPSILON)

    return step


if __name__ == "__main__":
    main()
