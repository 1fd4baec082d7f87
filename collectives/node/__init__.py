"""Collectives through memory shared by the ranks of a node.

`segment` is the memory, `rounds` are the compiled meetings in it, `engine` makes operations of
them, and `shared_arrays` knows arrays that lie where all ranks reach them.
"""
