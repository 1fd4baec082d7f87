"""Model parallelism: layers whose parts are on different ranks.

Each operation returns its result and a function that propagates the gradient back, for arrays of
any library. `strategies.model_parallel.torch` has the same operations for PyTorch's autograd.

Example:
    >>> import collectives as cc
    >>> from strategies import model_parallel
    >>> comm = cc.init()
    >>> joined, backward = model_parallel.allgather([1.0, 2.0], comm=comm)
    >>> len(joined) == 2 * comm.size
    True
    >>> backward(joined).tolist() == [1.0 * comm.size, 2.0 * comm.size]
    True
"""

from strategies.model_parallel import collectives_with_grad
from strategies.model_parallel.collectives_with_grad import *  # noqa: F403  # listed there

__all__ = collectives_with_grad.__all__
