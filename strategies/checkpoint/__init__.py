"""Checkpoints: training state in files that are complete or absent.

`saver` takes objects as they are: `state_protocols` knows their kinds, `serialization` turns them
into named arrays and JSON, `restoring` back again. `checkpoint_manager` is for a group of ranks:
`boxes` are parts of arrays, `write_plan` says who writes which, `sharded_writing` how all ranks
write at once, `read_plan` who reads what. `checkpoint` is for one process: `shards` has the arrays,
`manifest` says what is complete, `checkpoint_listing` which checkpoints there are, `storage`
whether that is a directory or a URL, `transaction` how one is committed, `atomic_io` the order of
writes that survives a crash, `retention` which stay, `async_writer` writes in the background,
`inspection` prints one.
"""

from __future__ import annotations

from strategies.checkpoint.boxes import Box, Slice
from strategies.checkpoint.checkpoint import Checkpoint
from strategies.checkpoint.saver import Saver

__all__ = ["Box", "Checkpoint", "Saver", "Slice"]
