"""Simulation: the real algorithms on simulated ranks and a virtual clock."""
