"""Gradient averaging over ranks: buckets, overlap and weights."""
