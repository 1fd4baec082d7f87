"""Foundations of all packages: validation, array helpers, pytrees, agreement of ranks."""
