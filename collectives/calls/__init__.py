"""One call of an operation: its group, arguments, signature check and requests."""
