"""Reductions by NCCL as one rank of an MPI job, each on a GPU of its own; else an error."""

from __future__ import annotations

import cupy
import numpy as np

import collectives as cc


def main() -> None:
    comm = cc.init()
    cupy.cuda.Device(comm.local_rank).use()
    for dtype in (np.float16, np.float32, np.float64, np.int64):
        for count in (1, 1000, 300_001, 20_000_000):
            every = [np.arange(count) % 7 + rank for rank in range(comm.size)]
            x = cupy.asarray(every[comm.rank].astype(dtype))
            for op, whole in ((cc.SUM, sum(every)), (cc.MAX, every[-1])):
                result = comm.allreduce(x, op=op, algorithm="nccl")
                # Small integers, exact also in float16.
                np.testing.assert_array_equal(result.get(), whole.astype(dtype))
            shared = comm.broadcast(x, comm.size - 1, algorithm="nccl")
            np.testing.assert_array_equal(shared.get(), every[-1].astype(dtype))
    buckets = comm.plan_buckets([cupy.zeros((n, 3), np.float32) for n in (1, 7, 400_000)])
    for step in range(3):
        gradients = [
            cupy.full((n, 3), step + i + comm.rank, np.float32)
            for i, n in enumerate((1, 7, 400_000))
        ]
        for i, result in enumerate(buckets.allreduce(gradients)):
            expected = step + i + (comm.size - 1) / 2
            np.testing.assert_allclose(cupy.asnumpy(result), expected, rtol=1e-6)
    buckets.close()
    print("all as expected", flush=True)
    cc.shutdown()


main()
