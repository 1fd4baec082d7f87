"""JAX support: Optax transformations that work inside compiled programs."""
