"""What all rooms use: errors, validation, array helpers, nested containers, agreement of ranks."""
