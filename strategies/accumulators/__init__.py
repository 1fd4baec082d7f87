"""Gradient accumulators, local or on another task."""

from strategies.accumulators.accumulators import (
    ConditionalAccumulator,
    SparseConditionalAccumulator,
    shared_accumulator,
)

__all__ = ["ConditionalAccumulator", "SparseConditionalAccumulator", "shared_accumulator"]
