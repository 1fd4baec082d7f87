"""Casts to 16-bit floats, and what they are good for in an all-reduce.

    python benchmarks/compression.py                    casts
    mpirun -np 2 python benchmarks/compression.py       casts, and all-reduces

Times are medians in milliseconds, of the slowest rank for the all-reduces. The cases of a size take
turns, so that what else happens on the machine hits all of them. `error` is the largest error
against float64, in units of the largest sum.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np
from mpi4py import MPI

from collectives.algorithms import compressed, ring
from collectives.arrays.host_arrays import Array
from collectives.arrays.reduction import SUM
from collectives.kernels import compression, half_loops
from collectives.transport.mpi import MpiTransport
from collectives.transport.transport import Deadline

FORMATS = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
CAST_ELEMENTS = (1 << 16, 1 << 20, 1 << 24)
MEGABYTES = (1, 16)  # MiB of float32
LIMIT = 60.0  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="times that a case is measured")
    rounds = parser.parse_args().rounds
    world = MPI.COMM_WORLD
    if world.rank == 0:
        for elements in CAST_ELEMENTS:
            casts(elements, rounds)
    world.Barrier()
    if world.size > 1:
        transport = MpiTransport(world)
        for megabytes in MEGABYTES:
            allreduces(transport, megabytes, rounds)
        transport.close()


def casts(elements: int, rounds: int) -> None:
    x = np.random.default_rng(0).standard_normal(elements).astype(np.float32)
    wide = np.empty_like(x)
    residual = np.zeros_like(x)
    print(f"\ncasts of {elements} elements, ms")
    print(f"{'':24}{'ours':>10}{'library':>10}{'ratio':>8}")
    for dtype in FORMATS:
        half = x.astype(dtype)
        out = np.empty_like(half)
        pairs: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
            (
                f"float32 -> {dtype}",
                lambda out=out: half_loops.narrow(x, out),
                lambda out=out: np.copyto(out, x, casting="unsafe"),
            ),
            (
                f"{dtype} -> float32",
                lambda half=half: half_loops.widen(half, wide),
                lambda half=half: np.copyto(wide, half),
            ),
        ]
        for name, ours, theirs in pairs:
            mine, others = medians([ours, theirs], rounds)
            print(f"{name:24}{mine:10.3f}{others:10.3f}{others / mine:8.1f}")
        feedback = lambda out=out: half_loops.narrow(x, out, residual=residual)  # noqa: E731
        (carried,) = medians([feedback], rounds)
        print(f"{'the same with feedback':24}{carried:10.3f}")


def allreduces(transport: MpiTransport, megabytes: int, rounds: int) -> None:
    count = (megabytes << 20) // 4
    everyones = [
        np.random.default_rng(rank).standard_normal(count).astype(np.float32)
        for rank in range(transport.size)
    ]
    x = everyones[transport.rank]
    buffer = np.empty_like(x)
    cases: list[tuple[str, Array, Callable[[], object]]] = []

    def case(name: str, out: Array, run: Callable[[], object]) -> None:
        cases.append((name, out, run))

    def in_place(source: Array, out: Array, run: Callable[[], object]) -> Callable[[], object]:
        def body() -> None:
            out[...] = source
            run()

        return body

    for scheme in (compression.FP16, compression.BF16, compression.INT8):
        codec = scheme.codec(x.dtype, SUM, network=True)
        assert codec is not None
        case(
            f"ours, float32 as {scheme}",
            buffer,
            lambda codec=codec: compressed.allreduce(
                transport, buffer, SUM, deadline(), codec=codec, contribution=x
            ),
        )
    ours = lambda: ring.allreduce(transport, buffer, SUM, deadline())  # noqa: E731
    case("ours, float32", buffer, in_place(x, buffer, ours))
    mpi = lambda: transport.mpi.Allreduce(x, buffer)  # noqa: E731
    case("MPI, float32", buffer, mpi)
    for dtype in FORMATS:
        half = x.astype(dtype)
        work = np.empty_like(half)
        run = lambda work=work: compressed.allreduce_packed(transport, work, SUM, deadline())  # noqa: E731
        case(f"ours, {dtype} array", work, in_place(half, work, run))
    half = x.astype(np.float16)
    result = np.empty_like(half)
    case("MPI, float16 array", result, lambda h=half: transport.mpi.Allreduce(h, result))

    times = medians([run for *_, run in cases], rounds, transport)
    if transport.rank == 0:
        exact = np.sum(everyones, axis=0, dtype=np.float64)
        print(f"\nall-reduce of {count} elements ({megabytes} MiB of float32), "
              f"{transport.size} ranks, ms")  # fmt: skip
        print(f"{'':28}{'time':>10}{'error':>12}")
    for (name, out, run), taken in zip(cases, times, strict=True):
        run()
        if transport.rank == 0:
            error = np.abs(out.astype(np.float64) - exact).max() / np.abs(exact).max()
            print(f"{name:28}{taken:10.3f}{error:12.2e}")


def deadline() -> Deadline:
    return Deadline("benchmark", LIMIT)


def medians(
    functions: list[Callable[[], object]], rounds: int, transport: MpiTransport | None = None
) -> list[float]:
    """Time functions in turns, after a first call of each; milliseconds."""
    times: list[list[float]] = [[] for _ in functions]
    for number in range(rounds + 1):
        for function, own in zip(functions, times, strict=True):
            if transport is not None:
                transport.mpi.Barrier()
            start = time.perf_counter()
            function()
            taken = time.perf_counter() - start
            if transport is not None:
                taken = transport.mpi.allreduce(taken, MPI.MAX)
            if number:
                own.append(1e3 * taken)
    return [statistics.median(own) for own in times]


if __name__ == "__main__":
    main()
