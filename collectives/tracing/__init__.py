"""Diagnostics of calls: flight records, rank status, timelines and call sites."""
