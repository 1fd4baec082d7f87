"""`python -m collectives bench`: times one operation here and its peers.

Definitions, for S bytes and P ranks:

- A time is the slowest rank's. Calls are timed one by one, or, where they take less than
  `BATCH_SECONDS`, in batches that are timed as a whole; before each the ranks meet in a barrier.
  `median` and `p99` are over these times, `max` is the greatest of them.
- S is the size of the whole array: what a rank gives to an allreduce, reduce, broadcast,
  reduce_scatter or alltoall, what an allgather or gather joins, what a scatter shares out.
- `algbw` = S / median. `busbw` = algbw x f is the rate at which the slowest link must have worked,
  which does not depend on P and can be held against the hardware: f = 2 (P - 1)/P for an
  allreduce, 1 for a reduce or broadcast, (P - 1)/P for the rest.
- Peers take turns with ours within the run. `ratio` is the peer's median over ours: above 1 we are
  faster.
- `error` is the greatest difference from the result computed in float64, over the greatest
  magnitude in that result, on any rank.

Source: the definitions of both bandwidths are those of nccl-tests (doc/PERFORMANCE.md).
"""

from __future__ import annotations

import json
import math
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
from collectives.tools import baselines, byte_sizes, info, oracle, plot
from collectives.tools.baselines import PEERS

__all__ = ["OPERATIONS", "BenchOptions", "bus_factor", "measure", "run"]

OPERATIONS = [name for name in selection.ALGORITHMS if name != "barrier"]

# Batches keep the clock's own 0.1 us, and the ranks' unequal leaving of a barrier, small.
BATCH_SECONDS = 2e-4
# Seconds spent on one row, roughly: enough for a p99 at small sizes, five calls at large ones.
ROW_SECONDS = 0.5
_FEWEST, _MOST = 5, 200
_TURNS = 5

# A plan takes 0.6 us for 8 bytes and 4 us for so many, a call 2 us more (`docs/benchmarks`).
SMALL_BYTES = 64 << 10
_HINT = (
    "small arrays that are reduced again and again are faster through a plan: "
    "comm.plan_allreduce, here --through plan"
)

_COLUMNS = ("bytes", "median us", "p99 us", "max us", "algbw GB/s", "busbw GB/s")

_Call = Callable[[], object]


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    Args:
        operation: one of `OPERATIONS`.
        sizes: bytes of the whole array, one row each.
        dtype: one of `oracle.DTYPES`.
        peers: some of `PEERS`.
        algorithm: as the operation's argument.
        through: "call", or for an allreduce "plan" or "shared" (a plan in shared memory).
        root: of the operations that have one.

    Raises:
        ValueError: one of them is not known, or they contradict each other.
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
            ("dtype", self.dtype, oracle.DTYPES),
            *(("peer", peer, PEERS) for peer in self.peers),
            ("algorithm", self.algorithm, algorithms),
            ("way through", self.through, ("call", "plan", "shared")),
        ):
            if value not in known:
                raise ValueError(
                    f"bench: no such {name}, expected one of {' '.join(known)}, got {value!r}"
                )
        plain = (self.operation, self.algorithm) == ("allreduce", "auto")
        if self.through != "call" and not plain:
            raise ValueError(
                f"bench: expected allreduce, auto, for a {self.through!r}, got {self.operation}, "
                f"{self.algorithm}"
            )

    @property
    def wastes_a_plan(self) -> bool:
        """Whether some of the calls would be faster through a plan."""
        plannable = (self.operation, self.algorithm, self.through) == ("allreduce", "auto", "call")
        return plannable and min(self.sizes) <= SMALL_BYTES


def run(options: BenchOptions, to_json: Path | None = None, to_plot: Path | None = None) -> int:
    """Measure and print a table on rank 0; *collective* over the world.

    Args:
        options: what to measure.
        to_json: a file for the figures, written by rank 0.
        to_plot: a file for a plot of them, written by rank 0.

    Returns:
        The exit status, the same on all ranks.
    """
    comm = world.init()
    absent = baselines.missing(options.peers)
    if comm.rank == 0 and to_plot is not None and not plot.is_possible():
        absent = "a plot needs matplotlib: pip install matplotlib"
    absent = max(comm.allgather_object(absent))  # any rank's
    if absent:
        if comm.rank == 0:
            print(f"bench: not installed: {absent}", file=sys.stderr)
        return 1
    try:
        status = _table(comm, options, to_json, to_plot)
        comm.barrier()
    finally:
        baselines.close()
    return status


def _table(
    comm: Communicator, options: BenchOptions, to_json: Path | None, to_plot: Path | None
) -> int:
    facts = {**info.gather_facts(comm), "machine": info.machine(comm)}
    names = {peer: baselines.name(peer) for peer in options.peers}
    heads = [*_COLUMNS, *(f"x {name}" for name in names.values()), "error"]
    rows = []
    if comm.rank == 0:
        print(_heading(options, facts, heads), flush=True)
    for nbytes in options.sizes:
        try:
            rows.append(measure(comm, options, nbytes))
        except ValueError as error:  # a peer lacks the dtype, on all ranks
            if comm.rank == 0:
                print(error, file=sys.stderr, flush=True)
            return 2
        if comm.rank == 0:
            print(_line(rows[-1], heads), flush=True)
    if comm.rank == 0:
        if options.wastes_a_plan and comm.num_nodes == 1:
            print(_HINT, flush=True)
        if to_json is not None:
            chosen = {k: v for k, v in vars(options).items() if k != "sizes"}
            known = {"names": names, "facts": facts, "rows": rows}
            to_json.write_text(json.dumps({**chosen, **known}, indent=1))
        if to_plot is not None:
            title = f"{options.operation} {options.dtype}, {comm.size} ranks"
            plot.draw(title, rows, names, bus_factor(options.operation, comm.size), to_plot)
    return 0


def bus_factor(operation: str, size: int) -> float:
    """Return busbw / algbw of an operation among `size` ranks."""
    if operation == "allreduce":
        return 2 * (size - 1) / size
    return 1.0 if operation in ("reduce", "broadcast") else (size - 1) / size


def measure(comm: Communicator, options: BenchOptions, nbytes: int) -> dict[str, Any]:
    """Measure one size; *collective*. Returns the row on all ranks, times in seconds."""
    dtype = oracle.DTYPES[options.dtype]
    count = max(1, nbytes // dtype.itemsize)
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
    error = _error(result(), right)
    del inputs
    times = _times(comm, cases)
    median = statistics.median(times["ours"])
    ordered = sorted(times["ours"])
    algbw = count * dtype.itemsize / median
    return {
        "bytes": count * dtype.itemsize,
        "median": median,
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
    """Return a call to be timed, and one that gives a result to be checked."""
    if options.through != "call":
        assert op is not None
        shared = options.through == "shared"
        array = comm.shared_empty(x.shape, x.dtype) if shared else np.empty_like(x)
        # Repeated in place, numbers would grow until they overflow: zeros stay as they are.
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
    at_root = options.operation == "reduce" and comm.rank == options.root
    if options.operation in ("allreduce", "broadcast") or at_root:
        how["out"] = np.empty_like(x)
    method = getattr(comm, options.operation)

    def call() -> Any:
        return method(x, **how)

    return call, call


def _times(comm: Communicator, cases: dict[str, _Call]) -> dict[str, list[float]]:
    """Time all cases in turns; returns the slowest rank's seconds per call, of every batch."""
    plans = {}
    for name, call in cases.items():
        call()
        first = min(_time(comm, call, 1) for _ in range(3))
        # Every rank has to make the same number of calls.
        seconds = max(float(comm.allreduce(first, op=MAX)), 1e-8)
        batch = max(1, round(BATCH_SECONDS / seconds))
        batches = round(ROW_SECONDS / len(cases) / (batch * seconds) / _TURNS)
        plans[name] = (batch, max(_FEWEST // _TURNS, min(_MOST, batches)))
    own: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(_TURNS):
        for name, call in cases.items():
            batch, batches = plans[name]
            own[name] += [_time(comm, call, batch) for _ in range(batches)]
    return {name: comm.allreduce(np.array(times), op=MAX).tolist() for name, times in own.items()}


def _time(comm: Communicator, call: _Call, batch: int) -> float:
    comm.barrier()
    began = time.perf_counter()
    for _ in range(batch):
        call()
    return (time.perf_counter() - began) / batch


def _error(got: Any, right: oracle.Expected | None) -> float:
    """Return the greatest error of this rank's result, relative to its greatest magnitude."""
    if right is None or not right.values.size:
        return 0.0
    if right.values.dtype.kind in "biu" or not right.allowed.any():
        return 0.0 if (raw_bytes(got) == raw_bytes(right.values.astype(got.dtype))).all() else 1.0
    difference = np.abs(got.astype(right.values.dtype) - right.values).max()
    return float(difference / np.abs(right.values).max())


def _heading(options: BenchOptions, facts: dict[str, Any], heads: Sequence[str]) -> str:
    what = f"{options.operation} {options.dtype}, {options.algorithm}, through {options.through}"
    where = f"{facts['ranks']} ranks, {len(facts['nodes'])} nodes; {facts['machine']}"
    return f"{what}\n{where}\n{facts['mpi_library']}\n{_align(heads, heads)}"


def _line(row: dict[str, Any], heads: Sequence[str]) -> str:
    cells = [byte_sizes.size_text(row["bytes"])]
    cells += [f"{1e6 * row[name]:.2f}" for name in ("median", "p99", "max")]
    cells += [f"{row[name] / 1e9:.3f}" for name in ("algbw", "busbw")]
    cells += [f"{ratio:.2f}" for ratio in row["ratios"].values()]
    return _align([*cells, f"{row['error']:.1e}"], heads)


def _align(cells: Sequence[str], heads: Sequence[str]) -> str:
    pairs = zip(cells, heads, strict=True)
    return "  ".join(cell.rjust(max(10, len(head))) for cell, head in pairs)
