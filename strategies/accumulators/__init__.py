"""Gradients added up until enough have come: here or on another task."""
