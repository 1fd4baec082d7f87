"""Messages of one array between two ranks, with a deadline for every wait.

`transport` is what algorithms see, `mpi` carries it out, `mailbox` takes messages that nobody asked
for, and `liveness` tells which ranks of a node have died.
"""
