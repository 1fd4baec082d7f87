"""Memory of `collectives.calls.xla_handler`, which Python and compiled code share.

Fields are 64-bit integers.
"""

import numpy as np

from collectives.kernels.structures import structure

__all__ = ["CALL", "TABLE", "Call", "Table"]

CALL = np.dtype(
    [
        ("entry", "i8"),  # address of an `ENTRY` of `fast_path_layout`; 0 if Python runs the call
        ("state", "i8"),  # address of the `STATE` of its group
        ("unusable", "i8"),  # slot of the user's group, which is None if programs may call
    ]
)

TABLE = np.dtype(
    [
        ("calls", "i8"),  # address of the calls by number
        ("none", "i8"),  # address of None
        # Addresses of C functions:
        ("python", "i8"),  # runs the call of a frame
        ("complete", "i8"),  # completes the call of a frame after a status of `repeat`
        ("repeat", "i8"),  # `repeat_at` of `fast_path_kernel`
        ("take_gil", "i8"),  # PyGILState_Ensure
        ("drop_gil", "i8"),  # PyGILState_Release
    ]
)

Call, Table = map(structure, (CALL, TABLE))
