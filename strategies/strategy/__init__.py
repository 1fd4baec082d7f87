"""The base of all strategies, and those that keep every replica in step."""
