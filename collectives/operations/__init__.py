"""Collective operations, and plans of them for repeated calls."""
