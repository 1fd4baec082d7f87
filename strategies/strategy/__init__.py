"""Strategy base class, and the synchronous strategies."""
