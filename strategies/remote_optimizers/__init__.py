"""Wrapped optimizers of models whose parameters a strategy updates elsewhere."""
