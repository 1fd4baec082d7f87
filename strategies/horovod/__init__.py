"""Horovod's API: `import strategies.horovod.torch as hvd`, `.jax` or `.numpy`.

`docs/migrate-from-horovod.md` lists the differences of each name.
"""
