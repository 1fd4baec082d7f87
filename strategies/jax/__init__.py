"""Unisono under JAX: transformations of Optax, also inside of compiled programs."""
