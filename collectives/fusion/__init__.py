"""Many arrays in one call: fused operations, and buckets reduced while the caller computes."""
