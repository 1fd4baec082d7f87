"""Foundations of all packages: errors, settings, link costs and schedules; no arrays, no MPI."""
