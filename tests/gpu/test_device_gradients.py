"""DistributedOptimizer with parameters on a real device."""

import pytest

import inprocess
import strategies

pytestmark = pytest.mark.gpu

STEPS = 4


@pytest.mark.parametrize("overlap", [False, True], ids=["in the step", "overlapped"])
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_of_a_device_are_averaged(torch, size, overlap):
    def check(comm):
        dtypes = [torch.bfloat16, torch.float32, torch.bfloat16]
        parameters = [
            torch.nn.Parameter(torch.zeros(5, device="cuda", dtype=dtype)) for dtype in dtypes
        ]
        optimizer = strategies.DistributedOptimizer(
            torch.optim.SGD(parameters, 1.0), comm=comm, overlap=overlap, bucket_bytes=8
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            losses = [(i + 1) * p.sum().float() for i, p in enumerate(parameters)]
            ((comm.rank + step) * sum(losses)).backward()
            optimizer.step()
        expected = -sum((comm.size - 1) / 2 + step for step in range(STEPS))
        for i, (parameter, dtype) in enumerate(zip(parameters, dtypes, strict=True)):
            assert (parameter.device.type, parameter.dtype) == ("cuda", dtype)
            assert parameter.tolist() == [(i + 1) * expected] * 5  # few enough bits for bfloat16
        optimizer.close()

    inprocess.run_ranks(size, check, "synchronous", timeout=60)
