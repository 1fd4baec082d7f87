"""Messages between two ranks: matching, progress, and the operations of users."""
