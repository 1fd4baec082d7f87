"""From a call to an algorithm: what users call, checked, compared among the ranks, and recorded."""
