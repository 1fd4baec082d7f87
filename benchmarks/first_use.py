"""The first job on an empty cache of compiled code: how long it takes, with ranks that take turns.

    python benchmarks/first_use.py [--json FILE] [--ranks 2,8] [--delay 0]

Each job finds an empty `NUMBA_CACHE_DIR`. Seconds from `init` on, of the slowest rank, until its
first all-reduce has returned, and until a small program has ended: sums and other operations of
several dtypes, a step of Adam, a CSV file. As ranks do it now, where one process of a machine
compiles what the others wait for and load; as they did it before, when each compiled for itself
(`alone`); and once more with what the first job has left there (`kept`).

`--delay` lets every look into the folder, and every file that is read or written there, take so
many milliseconds longer, as on a slow file system of a network. It is a stand-in by this program
in Python, not a file system.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

LIMIT = 280.0  # seconds for one job

# Python's names of what takes long on a slow file system.
TOUCHES = ("open", "os.rename", "os.remove", "os.mkdir", "os.listdir", "os.scandir")

# Names of compiled code, also under the other name of a file that is being written.
CODE = re.compile(r"\.(o|nbc)(\.[0-9a-f]{16})?$")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--ranks", default="2,8")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds")
    parser.add_argument("--rank", choices=("turns", "alone", "kept"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank_main(options.rank == "alone", options.delay / 1e3)
    jobs = []
    for ranks in map(int, options.ranks.split(",")):
        for how in ("alone", "turns", "kept"):
            if how != "kept":
                folder = tempfile.TemporaryDirectory()
            found = job(ranks, how, folder.name, options.delay)
            jobs.append({"ranks": ranks, "how": how, "delay ms": options.delay, **found})
            print(json.dumps(jobs[-1]), flush=True)
    if options.json:
        facts = {"machine": platform.platform(), "cores": os.cpu_count(), "jobs": jobs}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def job(ranks: int, how: str, folder: str, delay: float) -> dict[str, Any]:
    """Run one job; returns seconds and the load before it."""
    import launcher

    load = os.getloadavg()[0]
    command = [
        launcher.mpirun_path(), "-np", str(ranks),
        "--map-by", ":oversubscribe", "--bind-to", "none",
        sys.executable, __file__, "--rank", how, "--delay", str(delay),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT,
        env={**os.environ, "NUMBA_CACHE_DIR": folder},
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "load": load}


def rank_main(alone: bool, delay: float) -> int:
    """Run the small program as one rank; rank 0 prints what the slowest one took."""
    import numpy as np

    import collectives as cc
    from collectives.kernels import compile_lock

    if alone:

        @contextlib.contextmanager
        def nobody_waits(what: str, most_seconds: float = 0.0) -> Iterator[bool]:
            yield True

        compile_lock.wait_or_lead = nobody_waits  # type: ignore[assignment]
    if delay:
        slow(delay)
    began = time.perf_counter()
    comm = cc.init()
    comm.allreduce(np.ones(1000, np.float32), op=cc.SUM)
    first = time.perf_counter() - began
    for kind in (np.float64, np.int32, np.float16):
        for op in (cc.SUM, cc.MEAN, cc.MAX):
            if not (op == cc.MEAN and kind == np.int32):
                comm.allreduce(np.ones(1000, kind), op=op)
    comm.broadcast(np.ones(1000))
    comm.allgather(np.ones(10))
    comm.allreduce(np.ones(1000, np.float32), op=cc.SUM, compression=cc.FP16)
    learn(comm.rank)
    whole = time.perf_counter() - began
    slowest = comm.allreduce(np.array([first, whole]), op=cc.MAX)
    if comm.rank == 0:
        print(json.dumps({"first all-reduce": slowest[0], "small program": slowest[1]}))
    return 0


def learn(rank: int) -> None:
    """Read a CSV file, and make a step of Adam."""
    import numpy as np

    from strategies.input.csv.parser import decode_csv
    from strategies.optimizers import Adam

    lines = [f"{n},{n}.5,{n}e-3" for n in range(100 + rank)]
    decode_csv(lines, [[0.0]] * 3)
    parameters = [np.ones((100, 10), np.float32), np.ones(10, np.float32)]
    Adam(1e-3).apply_gradients(zip([np.ones_like(p) for p in parameters], parameters, strict=True))


def slow(delay: float) -> None:
    """Delay each access to the cache's folder and to its files."""
    folder = os.environ["NUMBA_CACHE_DIR"]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in TOUCHES:
            name = str(arguments[0])  # without the folder, where a file is opened in an open folder
            if folder in name or CODE.search(name):
                time.sleep(delay)

    sys.addaudithook(hook)


if __name__ == "__main__":
    sys.exit(main())
