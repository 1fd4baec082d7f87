"""Every operation on device arrays, as one rank of an MPI job; an error where one is wrong."""

from __future__ import annotations

import importlib.util

import cupy
import numpy as np

import collectives as cc


def check(comm: cc.Communicator, make, read) -> None:
    """Compare the operations on `make(array)` with those on NumPy arrays."""
    for count in (0, 1, 1000, 300_001, 3_000_000):  # the last two pass in slices
        values = np.random.default_rng(comm.rank).random((count, 2), np.float32)
        x = make(values)
        for run in (
            lambda a: comm.allreduce(a),
            lambda a: comm.allreduce(a, op=cc.MAX, algorithm="ring"),
            lambda a: comm.broadcast(a, comm.size - 1),
            lambda a: comm.allgather(a),
            lambda a: comm.reduce_scatter(a, op=cc.SUM),
        ):
            for _ in range(3):  # the first call, and two like it
                result = run(x)
                assert type(result) is type(x), type(result)
                # By messages of device memory the ranks' numbers may be added in another order.
                np.testing.assert_allclose(read(result), run(values), rtol=2**-20)
        expected = comm.allreduce(values)
        for _ in range(3):
            same, other = make(values), make(np.zeros_like(values))
            for out in (same, other):
                result = comm.allreduce(same if out is same else x, out=out)
                assert result is out
                np.testing.assert_allclose(read(out), expected, rtol=2**-20)


def main() -> None:
    comm = cc.init()
    cupy.cuda.Device(comm.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
    check(comm, cupy.asarray, cupy.asnumpy)
    if importlib.util.find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            check(comm, lambda a: torch.from_numpy(a).cuda(), lambda t: t.cpu().numpy())
    print("all as expected", flush=True)
    cc.shutdown()


main()
