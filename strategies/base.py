"""What all strategies share: the scope, the two contexts, and the surface of a training loop.

A *strategy* keeps the replicas of a model in step. Code runs in one of two contexts: the
*cross-replica* context, in which the loop is written, and the *replica* context, inside
`strategy.run`, in which one replica computes. Outside of any `scope` the default strategy holds:
one replica, nothing to communicate, so that the same program runs alone.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from strategies.resources.variables import Variable
from strategies.structures import map_leaves

__all__ = ["DefaultStrategy", "InputContext", "ReduceOp", "Strategy", "get_strategy"]

ReduceOp = Literal["sum", "mean"]


@dataclass(frozen=True)
class InputContext:
    """Which part of the input one pipeline has to read."""

    num_input_pipelines: int
    input_pipeline_id: int
    num_replicas_in_sync: int

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the rows per replica and step.

        Raises:
            ValueError: the global batch does not divide evenly.
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"get_per_replica_batch_size: the batch cannot be shared evenly, expected a "
                f"multiple of {self.num_replicas_in_sync} replicas, got {global_batch_size}"
            )
        return size


class Strategy(ABC):
    """Keeps replicas in step; see the module's docstring for the words."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas contribute to one step."""
        return self._input_context().num_replicas_in_sync

    @property
    @abstractmethod
    def is_chief(self) -> bool:
        """Whether this process writes what is written once: checkpoints, metrics, progress."""

    # What differs between strategies; as it stands here, for one replica in one process.

    def _initial(self, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the value that every replica starts from."""
        return value

    def _sum(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the sum over the replicas."""
        return array

    def _share(self, batch: Any) -> Any:
        """Return this process's rows of a global batch."""
        return batch

    def _in_step(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches so that all processes take the same number of steps."""
        return iter(batches)

    def _input_context(self) -> InputContext:
        """Describe this process's input pipeline."""
        return InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1)

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Make this the current strategy in this thread.

        Raises:
            RuntimeError: another strategy's scope is open, or a replica is running.
        """
        _require_cross_replica("scope")
        if _contexts.scopes and _contexts.scopes[-1] is not self:
            raise RuntimeError(
                f"scope: another strategy's scope is open, expected one strategy per program, got "
                f"{type(self).__name__} inside {type(_contexts.scopes[-1]).__name__}"
            )
        _contexts.scopes.append(self)
        try:
            yield self
        finally:
            _contexts.scopes.pop()

    def variable(
        self,
        initial_value: npt.ArrayLike | Callable[[], npt.ArrayLike],
        *,
        name: str | None = None,
        dtype: Any = None,
    ) -> Variable:
        """Make a variable that is the same on all replicas; *collective* where replicas are ranks.

        Args:
            initial_value: shape (...), or a function that returns it. The chief's value counts; the
                others' must have the same shape and dtype.
            name: as in checkpoints; "variable", "variable_1", ... if None.
            dtype: of the variable, that of the initial value if None.

        Raises:
            ValueError: the name is taken.
        """
        _require_cross_replica("variable")
        chosen = self._free_name() if name is None else name
        if chosen in self._names:
            raise ValueError(f"variable: this name is taken, expected a new one, got {chosen!r}")
        value = initial_value() if callable(initial_value) else initial_value
        variable = Variable(self._initial(np.asarray(value, dtype=dtype)), name=chosen)
        self._names.add(chosen)
        return variable

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `fn(*args, **kwargs)` on every replica and return this process's result.

        Raises:
            ValueError: `args` is neither a list nor a tuple.
            RuntimeError: called inside a replica.
        """
        _require_cross_replica("run")
        if not isinstance(args, (list, tuple)):
            raise ValueError(
                f"run: args is no list or tuple of arguments, got {type(args).__name__}"
            )
        _contexts.in_replica = True
        try:
            return fn(*args, **(kwargs or {}))
        finally:
            _contexts.in_replica = False

    def reduce(self, op: ReduceOp, value: Any, axis: int | None = None) -> Any:
        """Reduce what `run` returned over all replicas; *collective* where replicas are ranks.

        Args:
            op: "sum" or "mean", in any case.
            value: an array or number, or nested tuples, lists and dicts of them.
            axis: None to combine element by element; else the values are reduced along this axis in
                each replica first. The mean is then over all elements of all replicas, also
                where replicas hold different numbers of rows.

        Returns:
            The structure of `value` with NumPy arrays of the same dtype; integers have a float64
            mean.

        Raises:
            ValueError: unknown op, or no such axis.
            RuntimeError: called inside a replica.
        """
        _require_cross_replica("reduce")
        chosen = op.lower() if isinstance(op, str) else op
        if chosen not in get_args(ReduceOp):
            raise ValueError(f"reduce: unknown op, expected 'sum' or 'mean', got {op!r}")

        def one(leaf: Any) -> npt.NDArray[Any]:
            array = np.asarray(leaf)
            if axis is None:
                total, count = self._sum(array), float(self.num_replicas_in_sync)
            else:
                if not -array.ndim <= axis < array.ndim:
                    raise ValueError(
                        f"reduce: no such axis, expected less than {array.ndim} dimensions, "
                        f"got axis {axis} (shape: {array.shape})"
                    )
                total = self._sum(np.sum(array, axis=axis, dtype=array.dtype))
                count = float(self._sum(np.asarray(array.shape[axis], np.float64)))
            if chosen == "sum":
                return total
            dtype = array.dtype if array.dtype.kind in "fc" else np.dtype(np.float64)
            return np.asarray(total / np.float64(count)).astype(dtype)

        return map_leaves(one, value)

    def distribute_dataset(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Give each process its rows of every global batch.

        Args:
            batches: the same global batches on every process: arrays of shape (batch, ...), or
                nested tuples, lists and dicts of them.

        Yields:
            The same structure with this process's consecutive rows; their number differs by at most
            one between processes and may be 0.
        """
        return (self._share(batch) for batch in batches)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]]
    ) -> Iterator[Any]:
        """Let each process read its own part of the data, and keep them in step.

        Args:
            dataset_fn: makes this process's batches; told by an `InputContext` which part to read.

        Yields:
            Batches until no process has any left. A process that runs out earlier gets batches of
            0 rows, so that collective operations still meet. An error in one process's pipeline is
            raised on all of them.
        """
        return self._in_step(dataset_fn(self._input_context()))

    def _free_name(self) -> str:
        number = 0
        while (name := f"variable_{number}" if number else "variable") in self._names:
            number += 1
        return name


class DefaultStrategy(Strategy):
    """One replica in this process, and nothing to communicate."""

    @property
    def is_chief(self) -> bool:
        """Always true."""
        return True


class _Contexts(threading.local):
    """Which scopes are open in this thread, and whether it runs a replica."""

    def __init__(self) -> None:
        self.scopes: list[Strategy] = []
        self.in_replica = False


_contexts = _Contexts()
_default = DefaultStrategy()


def get_strategy() -> Strategy:
    """Return the strategy whose scope is open in this thread, or the default one."""
    return _contexts.scopes[-1] if _contexts.scopes else _default


def _require_cross_replica(method: str) -> None:
    if _contexts.in_replica:
        raise RuntimeError(
            f"{method}: called inside a replica, expected the cross-replica context, outside of "
            f"strategy.run"
        )
