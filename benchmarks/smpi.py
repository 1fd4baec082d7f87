"""The simulation beside SimGrid's SMPI: ring, recursive halving, binomial trees, one platform.

    python benchmarks/smpi.py [--json FILE] [--ranks 16,64,256,1024]

Needs `smpicc` and `smpirun` (Debian: libsimgrid-dev). A machine for each rank, lines of 100 Gbit/s
in and out, 2.5 us on each; neither simulation lets programs or sums take time, and no message
asks its receiver first. SMPI's corrections of bandwidth and latency, which were fitted to
another cluster, are off. Its ring and its halving are those of MPI libraries: a round is one
message, where Unisono sends consecutive slices. A row that SMPI does not finish has the reason in
place of its times ("absent").
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from collectives.core.links import DEFAULT, LinkCost
from collectives.simulation import calls
from collectives.simulation.cluster import SimulatedCluster

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

SOURCE = Path(__file__).with_name("smpi.c")
BETA, LATENCY, EAGER = 8e-11, 5e-6, 1 << 30
NOTHING = 1e-15  # seconds; a link has to cost something

# operation, our algorithm, SMPI's, bytes
CASES = [
    ("allreduce", "ring", "lr", 1 << 20),
    ("allreduce", "ring", "lr", 64 << 20),
    ("allreduce", "halving", "rab", 64 << 10),
    ("allreduce", "halving", "rab", 1 << 20),
    ("allreduce", "halving", "rab", 64 << 20),
    ("allreduce", "doubling", "rdb", 512),
    ("broadcast", "tree", "binomial_tree", 512),
    ("broadcast", "tree", "binomial_tree", 64 << 10),
    ("reduce", "tree", "binomial", 512),
    ("reduce", "tree", "binomial", 64 << 10),
]
SELECTORS = {"allreduce": "allreduce", "broadcast": "bcast", "reduce": "reduce"}

# What holds of SMPI up to 3.32: with more it runs out of mappings for its temporary buffers.
MOST_RANK_BYTES = 16 << 30

PLATFORM = """<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <cluster id="c" prefix="n" radical="0-{last}" suffix="" speed="10Gf" bw="12.5GBps" lat="2.5us"
           sharing_policy="SPLITDUPLEX"/>
</platform>
"""

OPTIONS = [
    "network/model:CM02",
    "network/TCP-gamma:0",
    "smpi/bw-factor:1",
    "smpi/lat-factor:1",
    "smpi/simulate-computation:no",
    f"smpi/async-small-thresh:{EAGER}",
    f"smpi/send-is-detached-thresh:{EAGER}",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--ranks", default="16,64,256,1024")
    parser.add_argument("--within", type=float, default=60.0, help="seconds for one simulation")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "smpi"
        subprocess.run(["smpicc", "-O2", SOURCE, "-o", program], check=True)
        for ranks in map(int, options.ranks.split(",")):
            platform = Path(folder) / f"{ranks}.xml"
            platform.write_text(PLATFORM.format(last=ranks - 1))
            for case in CASES:
                theirs = simgrid(program, platform, ranks, case, options.within)
                row: dict[str, Any] = {
                    "ranks": ranks, "operation": case[0], "algorithm": case[1], "smpi": case[2],
                    "bytes": case[3],
                }  # fmt: skip
                if isinstance(theirs, str):
                    row["absent"] = theirs
                else:
                    row |= {"ours": ours(ranks, *case), "theirs": theirs}
                    row["ratio"] = row["ours"] / theirs
                found.append(row)
                print(json.dumps(row), flush=True)
    ratios = [row["ratio"] for row in found if "ratio" in row]
    print(f"{len(ratios)} of {len(found)} rows, ratios {min(ratios):.3f} to {max(ratios):.3f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def ours(ranks: int, operation: str, algorithm: str, _: str, nbytes: int) -> float:
    free = LinkCost(NOTHING, NOTHING, NOTHING)
    machine = DEFAULT._replace(node=free, network=LinkCost(LATENCY, BETA, NOTHING))
    return calls.seconds(
        operation, algorithm, nbytes, SimulatedCluster(ranks, ranks, machine), eager=EAGER
    )


def simgrid(
    program: Path, platform: Path, ranks: int, case: tuple[str, str, str, int], within: float
) -> float | str:
    """Return SMPI's seconds, or why there are none."""
    import launcher

    operation, _, algorithm, nbytes = case
    if ranks * nbytes > MOST_RANK_BYTES:
        return f"SMPI's buffers would take more than {MOST_RANK_BYTES >> 30} GiB"
    configuration = [*OPTIONS, f"smpi/{SELECTORS[operation]}:{algorithm}"]
    command = ["smpirun", "-np", str(ranks), "-platform", str(platform)]
    command += [f"--cfg={option}" for option in configuration]
    command += [str(program), operation, str(nbytes)]
    try:
        done = launcher.run(command, timeout=within)  # ends what the script has started, too
    except AssertionError:
        return f"SMPI takes more than {within:g} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith("seconds")]
    if not lines:
        said = done.stderr.splitlines() or [f"status {done.status}"]
        return f"SMPI fails: {said[-1][:200]}"
    return float(lines[0].split()[1])


if __name__ == "__main__":
    sys.exit(main())
