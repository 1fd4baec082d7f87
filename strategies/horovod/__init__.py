"""Horovod's API: `import strategies.horovod.torch as hvd`, `.jax` or `.numpy`.

`docs/migrate-from-horovod.md` says of each name what is the same, what is better, what is absent.
"""
