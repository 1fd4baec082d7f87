"""Keras 3 support, with its backends torch and jax: a wrapped optimizer, callbacks, equal steps."""

try:
    import keras  # noqa: F401  (the package needs it)
except ModuleNotFoundError as missing:
    # Keras itself would say only that TensorFlow, its default backend, is not installed.
    if missing.name != "tensorflow":
        raise
    raise ImportError(
        "strategies.keras: Keras uses TensorFlow by default, expected the backend torch or jax; "
        "set KERAS_BACKEND=torch or KERAS_BACKEND=jax before the first import of keras"
    ) from missing

from strategies.averaging.metrics import metric_average
from strategies.keras.batches import in_step
from strategies.keras.callbacks import (
    BroadcastGlobalVariables,
    LearningRateWarmup,
    MetricAverage,
)
from strategies.keras.optimizer import DistributedOptimizer

__all__ = [
    "BroadcastGlobalVariables",
    "DistributedOptimizer",
    "LearningRateWarmup",
    "MetricAverage",
    "in_step",
    "metric_average",
]
