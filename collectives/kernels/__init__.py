"""Compiled loops: prebuilt in the package, or compiled by numba at first use and cached on disk."""
