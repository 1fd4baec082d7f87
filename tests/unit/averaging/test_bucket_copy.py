"""Gradients of any library in their places in buckets."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from requirements import installed
from strategies.averaging import bucket_copy

torch = installed("torch")


class DeviceTensor(torch.Tensor):
    """Stands for a tensor of a device: it has to be copied to be read."""

    def __dlpack_device__(self):
        return (2, 0)  # CUDA's

    def numpy(self, **options):
        raise TypeError("cannot convert a tensor of a device to a NumPy array")

    def to(self, device):
        assert device == "cpu"
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("given", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_a_tensor_of_a_device_is_copied_to_its_place(dtype, given, requires_grad):
    gradient = torch.tensor([1.0, -2.5, float("inf")], dtype=getattr(torch, given))
    gradient = gradient.as_subclass(DeviceTensor).requires_grad_(requires_grad)
    view = np.zeros(3, dtype)
    bucket_copy.copy_into(view, gradient, 0.5)
    assert view.tolist() == [0.5, -1.25, np.inf]
