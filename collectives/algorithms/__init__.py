"""Communication schedules, one module per algorithm, each with its cost model.

They all take the same things:

    transport   the ranks; `levels` where the stages in and between nodes are done in their own ways
    buffer      shape (n,), contiguous, changed in place; the same n on all ranks. What is reduced
                has been prepared by `reduction.prescale`
    bounds      P + 1 offsets; chunk `c` is `buffer[bounds[c]:bounds[c + 1]]`
    op          how to combine
    deadline    the limit of every wait
"""
