"""Arrays of NumPy, PyTorch, JAX and CuPy, and the reduction operations."""
