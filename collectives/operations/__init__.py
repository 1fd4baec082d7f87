"""The collective operations that users call, and plans of them for repeated calls."""
