"""`python -m collectives bench`: times one operation here and its peers.

Definitions, for S bytes and P ranks:

- A time is the slowest rank's. Calls are timed one by one, or in batches if they take less than
  `BATCH_SECONDS`; before each the ranks synchronize by a barrier. `median` and `p99` are over these
  times, `max` is the largest.
- S is the size of the whole array: the input of a rank for an allreduce, reduce, broadcast,
  reduce_scatter or alltoall, the result of an allgather or gather, the root's input of a scatter.
- `algbw` = S / median. `busbw` = algbw x f is the minimal rate of the slowest link, which is
  independent of P and can be compared with the hardware: f = 2 (P - 1)/P for an allreduce, 1 for a
  reduce or broadcast, (P - 1)/P for the rest.
- Peers alternate with this library within the run. `ratio` is the peer's median over this
  library's: above 1 this library is faster.
- `error` is the largest difference from the result computed in float64, over the largest magnitude
  in that result, on any rank.

Source: the definitions of both bandwidths are those of nccl-tests (doc/PERFORMANCE.md).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from collectives import world
from collectives.algorithms import selection
from collectives.arrays.host_arrays import Array, raw_bytes
from collectives.arrays.reduction import MAX, Op
from collectives.communicator import Communicator
from collectives.core import topology
from collectives.core.errors import counted
from collectives.tools import baselines, byte_sizes, info, oracle, plot
from collectives.tools.baselines import PEERS

__all__ = ["OPERATIONS", "BenchOptions", "bus_factor", "measure", "run"]

OPERATIONS = [name for name in selection.ALGORITHMS if name != "barrier"]

# Batches reduce the weight of the clock's own 0.1 us, and of uneven exits from the barrier.
BATCH_SECONDS = 2e-4
# Approximate seconds per row: enough for a p99 at small sizes, and five calls at large ones.
ROW_SECONDS = 0.5
_FEWEST, _MOST = 5, 200
_TURNS = 5

# A plan takes 0.6 us for 8 bytes and 4 us for 64 KiB, a call 2 us more (`docs/benchmarks`).
SMALL_BYTES = 64 << 10
_HINT = (
    "small arrays that are reduced again and again are faster through a plan: "
    "comm.plan_allreduce, here --through plan"
)

_ALONE = "one rank sends nothing, so busbw is 0; mpirun -np N measures N ranks"

_BUSY = "bench: ranks may wait for a core, and the times contain that: {}"

_COLUMNS = ("bytes", "median us", "p99 us", "max us", "algbw GB/s", "busbw GB/s")

_Call = Callable[[], object]


@dataclass(frozen=True)
class BenchOptions:
    """The benchmark to run.

    Args:
        operation: one of `OPERATIONS`.
        sizes: bytes of the whole array, one row each.
        dtype: one of `oracle.DTYPES`.
        peers: some of `PEERS`.
        algorithm: `algorithm` argument of the operation.
        through: "call", or for an allreduce "plan" or "shared" (a plan in shared memory); several,
            separated by commas, give a row each.
        root: root, for operations that have one.

    Raises:
        ValueError: an option is unknown, or options contradict each other.
    """

    operation: str = "allreduce"
    sizes: Sequence[int] = field(default_factory=lambda: byte_sizes.sizes("8:16M"))
    dtype: str = "float32"
    peers: Sequence[str] = ("native",)
    algorithm: str = "auto"
    through: str = "call"
    root: int = 0

    def __post_init__(self) -> None:
        algorithms = ["auto", "node", *selection.ALGORITHMS.get(self.operation, ())]
        for name, value, known in (
            ("operation", self.operation, OPERATIONS),
            ("--dtype", self.dtype, oracle.DTYPES),
            *(("--peers", peer, PEERS) for peer in self.peers),
            ("--algorithm", self.algorithm, algorithms),
            *(("--through", way, ("call", "plan", "shared")) for way in self.ways),
        ):
            if value not in known:
                raise ValueError(
                    f"bench: bad {name}, expected one of {' '.join(known)}, got {value!r}"
                )
        plain = (self.operation, self.algorithm) == ("allreduce", "auto")
        if self.through != "call" and not plain:
            raise ValueError(
                f"bench: expected allreduce and --algorithm auto for --through {self.through}, got "
                f"{self.operation} and {self.algorithm}"
            )

    @property
    def ways(self) -> list[str]:
        """The parts of `through`."""
        return self.through.split(",")

    @property
    def wastes_a_plan(self) -> bool:
        """Whether some calls would be faster through a plan."""
        plannable = (self.operation, self.algorithm, self.through) == ("allreduce", "auto", "call")
        return plannable and min(self.sizes) <= SMALL_BYTES


def run(options: BenchOptions, to_json: Path | None = None, to_plot: Path | None = None) -> int:
    """Measure and print a table on rank 0; *collective* over the world.

    Args:
        options: the benchmark.
        to_json: file for the figures, written by rank 0.
        to_plot: file for a plot, written by rank 0.

    Returns:
        exit status, the same on all ranks.
    """
    comm = world.init()
    absent = baselines.missing(options.peers)
    if comm.rank == 0 and to_plot is not None and not plot.is_possible():
        absent = "a plot needs matplotlib: pip install matplotlib"
    absent = max(comm.allgather_object(absent))  # of any rank
    if absent:
        if comm.rank == 0:
            print(f"bench: not installed: {absent}", file=sys.stderr)
        return 1
    try:
        status = _table(comm, options, to_json, to_plot)
        # No rank may end Gloo's threads while another rank still uses them.
        comm.barrier()
    finally:
        baselines.close()
    return status


def _table(
    comm: Communicator, options: BenchOptions, to_json: Path | None, to_plot: Path | None
) -> int:
    facts = {**info.gather_facts(comm), "machine": info.machine(comm)}
    busy = sorted(filter(None, comm.allgather_object(_busy(comm))))
    names = {peer: baselines.name(peer) for peer in options.peers}
    compared = [head for name in names.values() for head in (f"{name} us", f"x {name}")]
    heads = [*_COLUMNS, *compared, "error"]
    if len(options.ways) > 1:
        heads.insert(1, "through")
    rows = []
    if comm.rank == 0:
        if busy:
            print(_BUSY.format(busy[-1]), file=sys.stderr, flush=True)
        print(_heading(options, facts, heads), flush=True)
    for nbytes, way in itertools.product(options.sizes, options.ways):
        try:
            row = measure(comm, dataclasses.replace(options, through=way), nbytes)
            rows.append({"through": way, **row})
        except ValueError as error:  # a peer lacks the dtype, on all ranks
            if comm.rank == 0:
                print(error, file=sys.stderr, flush=True)
            return 2
        if comm.rank == 0:
            print(_line(rows[-1], heads), flush=True)
    if comm.rank == 0:
        if comm.size == 1:
            print(_ALONE, flush=True)
        elif options.wastes_a_plan and comm.num_nodes == 1:
            print(_HINT, flush=True)
        if to_json is not None:
            chosen = {k: v for k, v in vars(options).items() if k != "sizes"}
            known = {"names": names, "facts": facts, "rows": rows}
            to_json.write_text(json.dumps({**chosen, **known}, indent=1))
        if to_plot is not None:
            title = f"{options.operation} {options.dtype}, {counted(comm.size, 'rank')}"
            first = [row for row in rows if row["through"] == options.ways[0]]
            plot.draw(title, first, names, bus_factor(options.operation, comm.size), to_plot)
    return 0


def _busy(comm: Communicator) -> str | None:
    """Return why ranks may wait for a core of this node; None if each has one."""
    load, ranks, cores = os.getloadavg()[0], comm.local_size, os.cpu_count() or 1
    # Half a process is the launcher's, which has just started the ranks.
    if load + ranks > cores + 0.5:
        return f"load average {load:.1f} before the start, {ranks} ranks and {cores} cores"
    return None


def bus_factor(operation: str, size: int) -> float:
    """Return busbw / algbw of an operation among `size` ranks."""
    if operation == "allreduce":
        return 2 * (size - 1) / size
    return 1.0 if operation in ("reduce", "broadcast") else (size - 1) / size


def measure(comm: Communicator, options: BenchOptions, nbytes: int) -> dict[str, Any]:
    """Measure one size; *collective*. Return the row on all ranks, with times in seconds."""
    dtype = oracle.DTYPES[options.dtype]
    count = max(1, nbytes // dtype.itemsize)
    # Joins: the size is that of the result, so each rank has a share of it.
    joins = options.operation in ("gather", "allgather")
    bounds = topology.chunk_bounds(count, comm.size)
    inputs = [
        oracle.contribution(r, comm.size, bounds[r + 1] - bounds[r] if joins else count, dtype)
        for r in range(comm.size)
    ]
    op = oracle.ops(options.operation, dtype)[0]
    ours, result = _ours(comm, options, inputs[comm.rank], op)
    cases = {"ours": ours}
    for peer in options.peers:
        cases[peer] = PEERS[peer](options.operation, inputs[comm.rank], bounds, options.root)
    right = oracle.result(options.operation, op, inputs, comm.rank, options.root)
    # Checked before the timing, whose calls overwrite the results.
    error = _error(result(), right)
    # The inputs of all ranks, which only the check needs.
    del inputs
    times = _times(comm, cases)
    median = statistics.median(times["ours"])
    ordered = sorted(times["ours"])
    algbw = count * dtype.itemsize / median
    return {
        "bytes": count * dtype.itemsize,
        "median": median,
        # The smallest time that 99 % of the times do not exceed.
        "p99": ordered[math.ceil(0.99 * len(ordered)) - 1],
        "max": ordered[-1],
        "algbw": algbw,
        "busbw": algbw * bus_factor(options.operation, comm.size),
        "ratios": {p: statistics.median(times[p]) / median for p in times if p != "ours"},
        "peers": {p: statistics.median(times[p]) for p in times if p != "ours"},
        "error": max(comm.allgather_object(error)),
    }


def _ours(
    comm: Communicator, options: BenchOptions, x: Array, op: Op | None
) -> tuple[_Call, Callable[[], Any]]:
    """Return a call to time, and a call whose result is checked."""
    if options.through != "call":
        assert op is not None
        shared = options.through == "shared"
        array = comm.shared_empty(x.shape, x.dtype) if shared else np.empty_like(x)
        # Repeated in-place sums would overflow, except those of zeros.
        array[...] = 0
        plan = comm.plan_allreduce(array, op=op)

        def once() -> Array:
            array[...] = x
            result: Array = plan().copy()
            array[...] = 0
            return result

        return plan, once
    how = oracle.options(options.operation, op, options.root)
    how["algorithm"] = options.algorithm
    # With `out`, so that the time contains no allocation.
    at_root = options.operation == "reduce" and comm.rank == options.root
    if options.operation in ("allreduce", "broadcast") or at_root:
        how["out"] = np.empty_like(x)
    method = getattr(comm, options.operation)

    def call() -> Any:
        return method(x, **how)

    return call, call


def _times(comm: Communicator, cases: dict[str, _Call]) -> dict[str, list[float]]:
    """Time all cases in turns; return the slowest rank's seconds per call for every batch."""
    plans = {}
    for name, call in cases.items():
        # The first call makes plans, connects ranks and touches memory.
        call()
        # The smallest: one interruption would make the batches too short.
        first = min(_time(comm, call, 1) for _ in range(3))
        # Every rank must make the same number of calls.
        seconds = max(float(comm.allreduce(first, op=MAX)), 1e-8)
        batch = max(1, round(BATCH_SECONDS / seconds))
        # All cases of a row share its time.
        batches = round(ROW_SECONDS / len(cases) / (batch * seconds) / _TURNS)
        plans[name] = (batch, max(_FEWEST // _TURNS, min(_MOST, batches)))
    own: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(_TURNS):
        for name, call in cases.items():
            batch, batches = plans[name]
            own[name] += [_time(comm, call, batch) for _ in range(batches)]
    # A batch is as slow as its slowest rank.
    return {name: comm.allreduce(np.array(times), op=MAX).tolist() for name, times in own.items()}


def _time(comm: Communicator, call: _Call, batch: int) -> float:
    # All ranks begin together, up to their exits from the barrier.
    comm.barrier()
    began = time.perf_counter()
    for _ in range(batch):
        call()
    return (time.perf_counter() - began) / batch


def _error(got: Any, right: oracle.Expected | None) -> float:
    """Return the largest error of this rank's result, relative to the result's magnitude."""
    if right is None or not right.values.size:
        return 0.0
    # Exact results must be equal bit for bit.
    if right.values.dtype.kind in "biu" or not right.allowed.any():
        return 0.0 if (raw_bytes(got) == raw_bytes(right.values.astype(got.dtype))).all() else 1.0
    difference = np.abs(got.astype(right.values.dtype) - right.values).max()
    return float(difference / np.abs(right.values).max())


def _heading(options: BenchOptions, facts: dict[str, Any], heads: Sequence[str]) -> str:
    what = f"{options.operation} {options.dtype}, {options.algorithm}, through {options.through}"
    where = f"{counted(facts['ranks'], 'rank')}, {counted(len(facts['nodes']), 'node')}"
    return f"{what}\n{where}; {facts['machine']}\n{facts['mpi_library']}\n{_align(heads, heads)}"


def _line(row: dict[str, Any], heads: Sequence[str]) -> str:
    cells = [byte_sizes.size_text(row["bytes"])]
    cells += [row["through"]] if "through" in heads else []
    cells += [f"{1e6 * row[name]:.2f}" for name in ("median", "p99", "max")]
    cells += [f"{row[name] / 1e9:.3f}" for name in ("algbw", "busbw")]
    for peer, ratio in row["ratios"].items():
        cells += [f"{1e6 * row['peers'][peer]:.2f}", f"{ratio:.2f}"]
    return _align([*cells, f"{row['error']:.1e}"], heads)


def _align(cells: Sequence[str], heads: Sequence[str]) -> str:
    pairs = zip(cells, heads, strict=True)
    return "  ".join(cell.rjust(max(10, len(head))) for cell, head in pairs)
