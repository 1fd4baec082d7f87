"""Communication schedules, one module per algorithm, each with its cost model.

All algorithms take the same arguments:

    transport   the ranks; `levels` for algorithms with separate stages inside and between nodes
    buffer      shape (n,), contiguous, changed in place; the same n on all ranks. For a reduction,
                `reduction.prescale` has prepared it
    bounds      P + 1 offsets; chunk `c` is `buffer[bounds[c]:bounds[c + 1]]`
    op          the reduction
    deadline    limit of every wait
"""
