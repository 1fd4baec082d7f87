"""A stand-in for an array of a device, in host memory."""

from __future__ import annotations

from types import ModuleType

import ml_dtypes
import numpy as np


class OtherMemory(np.lib.mixins.NDArrayOperatorsMixin):
    """Stands for an array of a device: the array API, but never a NumPy array by itself."""

    def __init__(self, data):
        self.data = data

    shape = property(lambda self: self.data.shape)
    ndim = property(lambda self: self.data.ndim)
    dtype = property(lambda self: self.data.dtype)
    device = "elsewhere"

    def __array__(self, *args, **kwargs):
        raise TypeError("implicit conversion to a NumPy array")

    def __array_namespace__(self, *, api_version=None):
        return NAMESPACE

    def __float__(self):
        return float(self.data)

    def __setitem__(self, key, value):
        assert isinstance(value, OtherMemory)
        key = key.data if isinstance(key, OtherMemory) else key
        assert isinstance(key, np.ndarray) or key is ...
        self.data[key] = value.data

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        assert all(isinstance(x, (OtherMemory, float)) for x in inputs), inputs
        raw = [x.data if isinstance(x, OtherMemory) else x for x in inputs]
        return OtherMemory(np.asarray(getattr(ufunc, method)(*raw, **kwargs)))


def _full(shape, number, *, dtype, device):
    assert device == OtherMemory.device
    return OtherMemory(np.full(shape, number, dtype))


def _asarray(x, *, device=None, copy=None):
    return OtherMemory(np.array(x if isinstance(x, np.ndarray) else x.data, copy=True))


NAMESPACE = ModuleType("elsewhere")
NAMESPACE.__dict__.update(
    float32=np.float32, float64=np.float64, float16=np.float16, bfloat16=ml_dtypes.bfloat16,
    astype=lambda x, dtype: OtherMemory(x.data.astype(dtype)),
    asarray=_asarray, full=_full,
    take=lambda x, i, *, axis: OtherMemory(x.data.take(i.data, axis=axis)),
    sqrt=np.sqrt, maximum=np.maximum, abs=np.abs,
    max=lambda x: OtherMemory(x.data.max()), sum=lambda x: OtherMemory(x.data.sum()),
)  # fmt: skip
