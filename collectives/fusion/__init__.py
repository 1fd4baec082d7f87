"""Fused operations on many arrays, and buckets that overlap with the caller's work."""
