"""Queues of typed elements: four kinds, one state machine, here or on another task."""
