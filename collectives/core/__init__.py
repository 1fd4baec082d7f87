"""Shared by all folders: errors, settings, link costs and schedules, without arrays or MPI."""
