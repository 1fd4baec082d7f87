"""Messages of one array between two ranks, with a deadline for every wait."""
