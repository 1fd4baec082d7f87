"""Gradients of all ranks become one: in which buckets, when, and weighted by how many rows."""
