"""Arrays of NumPy, PyTorch, JAX and CuPy, and the reduction operations.

`host` sees an array of any library as host memory and makes results of its kind, `adapters` knows
whose it is, `device` is flat memory on the host or on a device, `streams` and `staging` keep copies
in order, `views` shows memory of ours as arrays of the callers' kinds, `dtypes` decides which
arrays can be moved or reduced, and `reduction` has the operations: SUM, MEAN, MIN, MAX, PRODUCT.
"""
