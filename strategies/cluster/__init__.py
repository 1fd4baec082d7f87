"""Which task a rank is, which devices the tasks have, and what is placed where."""
