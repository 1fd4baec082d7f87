"""`python -m collectives check`: verifies results and environment of a cluster.

Every operation is compared with NumPy in float64, for every dtype and op it supports. Then common
problems of new clusters are checked: different versions on different machines, unsynchronized
clocks, missing shared memory, a slow network.

After each part the ranks exchange their results over a communicator of its own, so all ranks report
the same verdict even if one of them failed alone. Every wait has a limit; after the limit of the
whole check the process ends and prints the stacks of its threads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from collectives import communicator, world
from collectives.algorithms import selection
from collectives.arrays.reduction import Op
from collectives.communicator import Communicator
from collectives.core import settings
from collectives.core.errors import CollectiveError, counted, some
from collectives.launch import processes
from collectives.tools import environment, oracle
from collectives.tools.environment import CheckLine
from collectives.transport.mpi import MpiTransport

__all__ = ["passed", "run"]

# Limits in seconds of an operation's wait for another rank, and of the whole check: a thousand
# times what a healthy machine needs, short enough to wait for.
OPERATION_SECONDS = 20.0
WHOLE_SECONDS = 600.0

# Extra time for a process in a call that holds the GIL. Its stacks are dumped while they change,
# which may crash it.
_STUCK_SECONDS = 5.0

# Elements of small inputs (more and fewer than ranks), and bytes of a large one.
SMALL_COUNTS = (0, 1, 37)
LARGE_BYTES = 1 << 20


class _CheckCase(NamedTuple):
    operation: str
    op: Op | None
    dtype: str
    size: int  # elements
    algorithm: str

    def __str__(self) -> str:
        if self.operation == "barrier":
            return f"barrier, {self.algorithm}"
        op = "" if self.op is None else f" {self.op.value}"
        return f"{self.operation}{op} {self.dtype}, {self.size} elements, {self.algorithm}"


def run(
    limit: float = OPERATION_SECONDS, whole: float = WHOLE_SECONDS, as_json: bool = False
) -> int:
    """Check everything and print a table on rank 0; *collective* over the world.

    Args:
        limit: seconds that one operation may wait for another rank.
        whole: seconds after which the process is ended.
        as_json: whether to print one JSON object at the end instead of the table.

    Returns:
        exit status, the same on all ranks: 0, or 1 if something failed.
    """
    with _ended_after(whole):
        return _run(limit, as_json)


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """End the process after a time limit, and print the stacks of its threads."""

    def end() -> None:
        print(f"check: Timeout: it is not done after {seconds:g} s", file=sys.stderr, flush=True)
        faulthandler.dump_traceback()  # no other thread runs meanwhile
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + _STUCK_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


def _run(limit: float, as_json: bool) -> int:
    comm = world.init()
    mpi_world = processes.start_mpi(settings.from_environment())
    # Ranks that ran into a time limit reach the exchange later than others, by that limit.
    patient = replace(settings.from_environment(), timeout=10 * limit)
    # A communicator of its own: results are exchanged even if the tested one fails.
    reports = communicator.from_mpi(mpi_world, patient)
    is_table = comm.rank == 0 and not as_json
    lines = []
    try:
        if is_table:
            print(f"ranks: {comm.size}, nodes: {comm.num_nodes}", flush=True)
        for line in _lines(mpi_world, reports, replace(patient, timeout=limit)):
            lines.append(line)
            if is_table:
                print(f"{line.name:<14}  {line.verdict:<6}  {line.text}", flush=True)
    except CollectiveError as error:
        # The verdicts cannot be exchanged, so other ranks may wait forever.
        print(f"check: the ranks cannot exchange their results: {error}", file=sys.stderr)
        sys.stderr.flush()
        mpi_world.Abort(1)
    failed = any(line.verdict == "FAILED" for line in lines)
    if is_table:
        print("FAILED" if failed else "all well", flush=True)
    elif comm.rank == 0:
        ranks = {"ranks": comm.size, "nodes": comm.num_nodes}
        found = {"ok": not failed, **ranks, "lines": [line._asdict() for line in lines]}
        print(json.dumps(found, indent=2), flush=True)
    return int(failed)


def _lines(
    mpi_world: Any, reports: Communicator, configuration: settings.Settings
) -> Iterator[CheckLine]:
    """Yield the lines of the report; the same on all ranks."""
    yield from environment.versions(reports)
    yield environment.threads(reports)
    yield environment.clocks(MpiTransport(mpi_world), reports, configuration.timeout)
    yield environment.nodes(reports)
    # The tested communicator, whose limit is short.
    comm = communicator.from_mpi(mpi_world, configuration)
    yield environment.node_engine(comm, reports, configuration.shared_memory)
    for operation in selection.ALGORITHMS:
        line, intact = _operation(comm, reports, operation)
        yield line
        # After an error a communicator refuses calls, so the next operation gets a new one.
        if not intact:
            comm = communicator.from_mpi(mpi_world, configuration)
    if comm.size > 1:
        yield environment.bandwidth(comm, reports)
        told = environment.stores(comm, reports)
        if told is not None:
            yield told


def _operation(comm: Communicator, reports: Communicator, operation: str) -> tuple[CheckLine, bool]:
    """Check one operation; return its line, and whether the communicator is still usable."""
    cases = list(_cases(operation))
    wrong, error = None, None  # the first wrong result; the reason of an early end
    for case in cases:
        try:
            problem = _try(comm, case)
        except Exception as exception:  # any error belongs in the report of this rank
            error = f"{case}: {type(exception).__name__}: {exception}"
            break
        # Only the first wrong result: later ones often have the same cause.
        if problem is not None and wrong is None:
            wrong = f"{case}: {problem}"
    # Also after an early end, because the other ranks exchange as well.
    findings = reports.allgather_object((wrong, error))
    bad = [f"rank {r}: {found}" for r, (found, _) in enumerate(findings) if found]
    bad += [f"rank {r}: {why}" for r, (_, why) in enumerate(findings) if why]
    intact = not any(why for _, why in findings)
    if bad:
        text = f"on {counted(len({b.split(':')[0] for b in bad}), 'rank')}; {some(bad, 3)}"
        return CheckLine(operation, "FAILED", text), intact
    return CheckLine(operation, "ok", passed(operation)), intact


def passed(operation: str) -> str:
    """Return the text for an operation whose cases have all passed."""
    cases = list(_cases(operation))
    dtypes = len({case.dtype for case in cases if case.size})
    names = " ".join(dict.fromkeys(case.algorithm for case in cases))
    of = f" of {dtypes} dtypes" if dtypes else ""
    return f"{len(cases)} cases{of}; {names}"


def _cases(operation: str) -> Iterator[_CheckCase]:
    """Yield the cases of one operation: all dtypes by "auto", float32 by every algorithm."""
    others = list(selection.ALGORITHMS[operation])
    if operation == "barrier":
        yield from (_CheckCase(operation, None, "", 0, name) for name in ("auto", *others))
        return
    for name, dtype in oracle.DTYPES.items():
        ops = oracle.ops(operation, dtype)
        for op in ops:
            for count in SMALL_COUNTS:
                yield _CheckCase(operation, op, name, count, "auto")
        yield _CheckCase(operation, ops[0], name, LARGE_BYTES // dtype.itemsize, "auto")
    for algorithm in others:
        op = oracle.ops(operation, np.dtype(np.float32))[0]
        for count in (37, LARGE_BYTES // 4):
            yield _CheckCase(operation, op, "float32", count, algorithm)


def _try(comm: Communicator, case: _CheckCase) -> str | None:
    """Run one case; return what is wrong with this rank's result, or None."""
    if case.operation == "barrier":
        comm.barrier(algorithm=case.algorithm)
        return None
    dtype = oracle.DTYPES[case.dtype]
    # Every rank computes all inputs, so the correct result needs no messages.
    inputs = [
        oracle.contribution(r, comm.size, oracle.rows_of(case.operation, r, case.size), dtype)
        for r in range(comm.size)
    ]
    # Not rank 0, the default, which would hide a root that is ignored.
    root = comm.size - 1
    how = oracle.options(case.operation, case.op, root)
    call = getattr(comm, case.operation)
    got = call(inputs[comm.rank], algorithm=case.algorithm, **how)
    if got is not None and got.dtype != dtype:
        return f"dtype {got.dtype} instead of {dtype}"
    return oracle.mismatch(got, oracle.result(case.operation, case.op, inputs, comm.rank, root))
