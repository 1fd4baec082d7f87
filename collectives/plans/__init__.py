"""Prepared calls: everything that a repeated call needs, in shared memory or by messages."""
