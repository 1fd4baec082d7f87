"""Loops over elements, compiled by numba on first use and kept on disk by `compiling`.

`intrinsics` reaches memory by address, `float16` has 16-bit numbers one by one, `elementwise` the
reductions of each dtype, `convert` arrays of 16-bit numbers, `cuda` the same on devices.
"""
