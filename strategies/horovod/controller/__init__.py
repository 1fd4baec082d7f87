"""Horovod's controller: which requests all ranks have submitted, and in which order they run."""
