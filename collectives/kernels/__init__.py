"""Loops compiled by numba at first use and cached on disk."""
