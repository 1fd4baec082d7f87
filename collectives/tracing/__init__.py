"""What calls did: flight records, status of ranks, timelines, lines of the program."""
