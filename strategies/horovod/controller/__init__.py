"""Horovod's controller: orders the named requests of all ranks."""
