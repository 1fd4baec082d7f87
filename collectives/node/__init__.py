"""Collectives through memory shared by the ranks of a node."""
