"""Arrays on a device are saved as they are, and come back where they were."""

import numpy as np
import pytest

import strategies
from strategies.checkpoint import Saver

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("background", [False, True])
def test_cupy(cupy, tmp_path, background):
    weights = cupy.arange(6.0).reshape(2, 3)
    optimizer = strategies.Momentum(0.1, 0.9)
    optimizer.apply_gradients([(cupy.ones((2, 3)), weights)])
    expected = cupy.asnumpy(weights)
    with strategies.CheckpointManager(tmp_path, background=background) as checkpoints:
        saver = Saver(checkpoints, model=[weights], optimizer=optimizer)
        saver.save(1)
        weights[...] = 0
        assert saver.restore() == 1
    assert saver["model"][0] is weights
    assert (cupy.asnumpy(weights) == expected).all()


@pytest.mark.parametrize("background", [False, True])
def test_torch(torch, tmp_path, background):
    model = torch.nn.Linear(3, 2, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())
    rng = torch.cuda.default_generators[0]

    def step():
        optimizer.zero_grad()
        model(torch.randn(4, 3, device="cuda").bfloat16()).float().sum().backward()
        optimizer.step()
        return [tensor.float().cpu().numpy() for tensor in model.state_dict().values()]

    step()
    with strategies.CheckpointManager(tmp_path, background=background) as checkpoints:
        saver = Saver(checkpoints, model=model, optimizer=optimizer, rng=rng)
        saver.save(1)
        expected = step()
        assert saver.restore() == 1
    assert all(parameter.is_cuda for parameter in model.parameters())
    for one, other in zip(step(), expected, strict=True):
        assert np.array_equal(one, other)
