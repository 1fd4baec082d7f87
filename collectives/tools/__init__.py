"""Subcommands of `python -m collectives`, one module each."""
