"""Parameters of PyTorch on a ps: push gradients and pull new values, beside NumPy's.

    mpirun -np 2 python benchmarks/servers_torch.py [--json FILE]

Rank 0 is the ps. Both kinds take turns in one run; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

import strategies

ROUNDS, REPEATS = 9, 4
SIZES = {"64 KiB": 1 << 14, "1 MiB": 1 << 18, "16 MiB": 1 << 22, "64 MiB": 1 << 24}
PARAMETERS = 8  # that share these elements, as layers do


def main() -> None:
    """Measure, and print one line per size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    spec = strategies.cluster.ClusterSpec.from_ranks(ps=1)
    figures = {}
    with strategies.Cluster(spec) as cluster, strategies.Server(cluster) as server:
        calls = {size: pair(server, n, size) for size, n in SIZES.items()}
        if cluster.job == "ps":
            server.join()
            return
        for size, (ours, theirs) in calls.items():
            times = in_turns(ours, theirs)
            ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
            ours_ms, theirs_ms = (statistics.median(t) * 1e3 for t in times)
            figures[size] = {"numpy, ms": ours_ms, "torch, ms": theirs_ms, "rate": ratio}
            print(f"{size:>7}  NumPy {ours_ms:8.2f} ms  PyTorch {theirs_ms:8.2f} ms  {ratio:.2f}")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1))


def pair(server, elements: int, name: str):
    """Return a push and pull of variables of NumPy, and one of parameters of PyTorch."""
    each = elements // PARAMETERS
    arrays = strategies.ParameterServerStrategy(
        server, strategies.SGD(0.1), shared_name=f"NumPy {name}"
    )
    variables = [arrays.variable(np.zeros(each, np.float32)) for _ in range(PARAMETERS)]
    pairs = [(np.ones(each, np.float32), variable) for variable in variables]
    tensors = strategies.ParameterServerStrategy(server, shared_name=f"PyTorch {name}")
    parameters = [torch.nn.Parameter(torch.zeros(each)) for _ in range(PARAMETERS)]
    optimizer = strategies.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.1), strategy=tensors
    )
    for parameter in parameters:
        parameter.grad = torch.ones(each)
    return lambda: arrays.apply_gradients(arrays.optimizer, pairs), optimizer.step


def in_turns(*calls) -> list[list[float]]:
    """Return the seconds of each call in every round but the first; the fastest of some."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS + 1):
        for found, call in zip(times, calls, strict=True):
            turns = []
            for _ in range(REPEATS):
                began = time.perf_counter()
                call()
                turns.append(time.perf_counter() - began)
            found.append(min(turns))
    return [found[1:] for found in times]


if __name__ == "__main__":
    main()
