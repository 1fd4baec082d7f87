"""The ranks of a node meet in shared memory, without a message.

`segment` is the memory, `rounds` are the compiled meetings in it, `engine` makes operations of
them, and `shared_arrays` knows arrays that lie where all ranks reach them.
"""
