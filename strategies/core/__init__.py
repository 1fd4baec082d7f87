"""Shared by all folders: validation, array helpers, nested containers, agreement of ranks."""
