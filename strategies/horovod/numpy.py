"""`import strategies.horovod.numpy as hvd`: Horovod's API for NumPy arrays.

import strategies.horovod.numpy as hvd

hvd.init()
total = hvd.allreduce(x, op=hvd.Sum, name="x")
"""

from strategies.horovod import common, operations
from strategies.horovod.common import *  # noqa: F403  # listed there
from strategies.horovod.objects import broadcast_parameters
from strategies.horovod.operations import *  # noqa: F403

__all__ = ["broadcast_parameters"]
__all__ += sorted({*common.__all__, *operations.__all__})
