"""Loops compiled by numba at first use and cached on disk.

`loops` has loops over elements for each dtype and op, which `elementwise` compiles; `machine_code`
loads them, and the rounds of a node, without numba; `compiling` keeps the rest. `intrinsics`
reaches memory by address, `float16` has 16-bit numbers one by one and `combine` two that become
one, `convert` arrays of 16-bit numbers, `cuda` the same on devices, `int8` blocks of 8-bit ones,
which `int8_loops` compiles.
"""
