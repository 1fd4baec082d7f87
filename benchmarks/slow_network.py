"""The ways to send fewer bytes of `examples/compare_compression.py`, at a rate of the network.

    python benchmarks/slow_network.py [--rate 100mbit] [--machines 2] [--timeout 900] [ARGUMENTS...]

Needs root, iproute2 and Open MPI. The machines are network namespaces on this one
(`tests/netns/namespaces.py`). Other arguments are those of the example.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "netns")]


def main() -> int:
    """Run the example on one rank per machine, and print what it prints."""
    from namespaces import NamespaceCluster

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="100mbit", help="rate of each link, as tc writes it")
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=900, help="seconds for the job")
    options, others = parser.parse_known_args()
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    with NamespaceCluster(options.machines) as cluster:
        job = cluster.run(
            1, ROOT / "examples" / "compare_compression.py", *others,
            timeout=options.timeout, shape=options.rate, PYTHONPATH=path,
        )  # fmt: skip
    print(job.stdout, end="")
    print(job.stderr, end="", file=sys.stderr)
    return job.status


if __name__ == "__main__":
    sys.exit(main())
