"""Parameter servers between machines: what a second ps brings where the links are full.

    python benchmarks/servers_network.py [--json FILE] [--workers 6] [--mbit 1000] [--megabytes 16]

Needs root, iproute2 and Open MPI: the machines are network namespaces on this one
(`tests/netns/namespaces.py`), a rank on each, their links shaped. Workers push gradients of one
variable and get its values, asynchronously, all the time; the variable is on one ps, or in two
parts on two. With few workers their own links are as scarce as those of the ps tasks. A step of a
worker moves the variable's bytes up and down once; the *line time* is that of the bytes of all
workers on the link of one ps. Figures are medians of a worker's steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

import collectives as cc
import strategies

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "netns")]

STEPS = 8  # of a worker in one job, after one that is not counted
JOB_SECONDS = 120.0
WAYS = {"float32": cc.NONE, "bfloat16": cc.BF16}


def main() -> int:
    """Measure, and print a line per number of ps tasks and per way of travelling."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=int, default=1000, help="rate of the links, Mbit/s")
    parser.add_argument("--megabytes", type=int, default=16, help="size of the variable")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank_main(options.workers, options.megabytes)

    from namespaces import NamespaceCluster, why_not

    reason = why_not()
    if reason is not None:
        print(f"benchmarks/servers_network.py: {reason}", file=sys.stderr)
        return 1
    times: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for servers in (1, 2):
            with NamespaceCluster(servers + options.workers) as cluster:
                job = cluster.run(
                    1, __file__, "--rank", "--workers", str(options.workers),
                    "--megabytes", str(options.megabytes),
                    timeout=JOB_SECONDS, shape=f"{options.mbit}mbit",
                )  # fmt: skip
            if job.status != 0:
                print(job.stdout + job.stderr, file=sys.stderr)
                return 1
            for way, seconds in json.loads(job.stdout).items():
                times.setdefault(f"{servers} ps, {way}", []).extend(seconds)
    figures = {name: statistics.median(found) for name, found in times.items()}
    line = options.workers * options.megabytes * 1e6 / (options.mbit * 1e6 / 8)
    print(f"{options.workers} workers, {options.megabytes} MB; line time {line:.3f} s")
    for name, seconds in sorted(figures.items()):
        gain = figures[f"1 ps, {name.split(', ')[1]}"] / seconds
        print(f"{name:16} {seconds:8.3f} s per step  {gain:5.2f} x as fast as one ps")
    if options.json:
        facts = {"workers": options.workers, "mbit": options.mbit, "megabytes": options.megabytes}
        facts["line_seconds"] = line
        options.json.write_text(json.dumps(facts | {"seconds": figures}, indent=1) + "\n")
    return 0


def rank_main(count: int, megabytes: int) -> int:
    """Serve, or train in each of the ways; the first worker prints all workers' times."""
    comm = cc.init()
    servers = comm.size - count
    spec = strategies.cluster.ClusterSpec.from_ranks(ps=servers)
    with strategies.Cluster(spec) as cluster, strategies.Server(cluster) as server:
        made = {way: trained(server, way, megabytes * 250_000) for way in WAYS}
        workers = cluster.workers
        if workers is None:
            server.join()
            return 0
        times = {}
        for way, (strategy, variable) in made.items():
            workers.barrier()
            own = [step(strategy, variable) for _ in range(1 + STEPS)][1:]
            times[way] = workers.allgather(np.array(own)).ravel().tolist()
        if workers.rank == 0:
            print(json.dumps(times), flush=True)
    return 0


def trained(server, way: str, elements: int):
    """Return a strategy and a variable in as many parts as there are ps tasks."""
    servers = len(server.cluster.ranks_of("ps"))
    strategy = strategies.ParameterServerStrategy(
        server,
        strategies.SGD(0.1),
        partitioner=lambda shape, dtype: [servers],
        compression=WAYS[way],
        value_compression=WAYS[way],
        shared_name=way,
    )
    return strategy, strategy.variable(np.zeros(elements, np.float32))


def step(strategy, variable) -> float:
    """Push a gradient; returns seconds until there are new values."""
    gradient = np.ones(variable.shape, variable.dtype)
    began = time.perf_counter()
    strategy.apply_gradients(strategy.optimizer, [(gradient, variable)])
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
