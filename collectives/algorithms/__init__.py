"""Schedules that move and reduce flat host buffers; each module offers what it is good at."""
