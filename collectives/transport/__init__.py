"""One array from rank to rank, never waiting without a limit.

`transport` is what algorithms see, `mpi` carries it out, `mailbox` takes messages that nobody asked
for, and `liveness` tells which ranks of a node have died.
"""
