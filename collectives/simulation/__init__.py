"""Simulation: the real algorithms on simulated ranks and a virtual clock.

`cluster` says what there is, `clock` lets all ranks take turns in one process, `lines` shares what
leaves and enters a machine among the messages on it, `transport` is what algorithms see of that,
`memory` what they see of buffers, `stages` stands in for the node engine, and `ranks` starts it.
"""
