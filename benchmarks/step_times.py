"""How long the steps of one process take that all do the same: a distribution with its stragglers.

    python benchmarks/step_times.py [--json FILE] [--steps 600]

A step is forward and backward through a perceptron in NumPy, a batch of 64 with layers of 512. On a
quiet machine all steps are alike; on one that other work shares, some take several times as long.
`benchmarks/strategies_at_scale.py` trains replicas with what is written here: 200 quantiles of the
times, as multiples of the median.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--json", type=Path, help="where to write the quantiles")
    options = parser.parse_args()
    times = np.array(measured(options.steps))
    ratios = np.quantile(times, (np.arange(200) + 0.5) / 200) / np.median(times)
    facts = {
        "median ms": 1e3 * float(np.median(times)),
        "spread": float(times.std() / times.mean()),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "ratios": [round(float(ratio), 4) for ratio in ratios],
    }
    print({name: value for name, value in facts.items() if name != "ratios"})
    print("of the median: 10 %, 90 %, 99 %, most:", *ratios[[20, 180, 198, 199]].round(2))
    if options.json:
        options.json.write_text(json.dumps(facts) + "\n")
    return 0


def measured(steps: int) -> list[float]:
    """Return the seconds of each step."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 512)).astype(np.float32)
    layers = [rng.normal(size=(512, 512)).astype(np.float32) / 23 for _ in range(4)]
    times = []
    for _ in range(steps + 10):
        began = time.perf_counter()
        values = [x]
        for layer in layers:
            values.append(np.maximum(values[-1] @ layer, 0))
        error = values[-1]
        for layer, value in zip(layers[::-1], values[-2::-1], strict=True):
            error = (error @ layer.T) * (value > 0)
        times.append(time.perf_counter() - began)
    return times[10:]


if __name__ == "__main__":
    sys.exit(main())
