"""JAX support: collective operations inside compiled programs, and Optax transformations."""

from __future__ import annotations

import jax  # noqa: F401  (the package needs it)

from strategies.jax import operations
from strategies.jax.failures import library_errors
from strategies.jax.operations import *  # noqa: F403  (`__all__` has the operations)

__all__ = [*operations.__all__, "library_errors"]
