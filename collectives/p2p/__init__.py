"""Point-to-point messages: matching, progress, and the public operations."""
