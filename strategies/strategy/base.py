"""`Strategy`: scope, contexts and the interface of a training loop.

A *strategy* keeps the replicas of a model in step. Code runs in one of two contexts: the
*cross-replica* context, which contains the training loop, and the *replica* context inside
`strategy.run`, where one replica computes. Outside any `scope` the default strategy applies: one
replica without communication, so the same program runs alone.

A process has one or more replicas, each on one of its *devices*; the replicas of process `r` are
numbered from `r` times their number on. A value that differs between the replicas of one process is
a `PerReplica`; with a single replica it is the replica's value itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

import collectives as cc
from strategies.averaging.local_replicas import ReplicaGradients, ReplicaOptimizers
from strategies.averaging.optimizer import ArrayOptimizer, AveragingOptimizer
from strategies.cluster.local_devices import CPU, parse_devices, put
from strategies.core.communication_options import CommunicationOptions
from strategies.core.process_group import ProcessGroup
from strategies.replicas import context, datasets, reductions, run
from strategies.replicas.context import require_cross_replica
from strategies.replicas.datasets import InputContext, Policy, ValueContext
from strategies.replicas.mirrored_model import MirroredModel, form_of
from strategies.replicas.per_replica import PerReplica, differs, select
from strategies.replicas.reductions import Axis, ReduceOp
from strategies.replicas.variable import Aggregation, Synchronization, Variable

__all__ = ["Strategy"]

R = TypeVar("R")


class Strategy:
    """Keeps replicas in step; the module docstring defines the terms.

    All processes of the strategy call *collective* methods, in the same order. An error on one of
    them is raised on all.

    Args:
        devices: devices of this process, one replica each; the same number on all processes.
        comm: the processes; None for this one alone.
        options: how they exchange arrays.
        soft_placement: use a CPU device for a missing one, and log it.

    Attributes:
        devices: their names.
        is_placed: whether variables, batches and computation are placed on these devices; False if
            the strategy was given none.
        ranks: the processes.
        updates_everywhere: whether every process updates its variables, rather than one for all.
        is_in_step: whether the replicas of all processes synchronize.
    """

    updates_everywhere = True
    is_in_step = True

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        comm: cc.Communicator | None = None,
        options: CommunicationOptions | None = None,
        *,
        soft_placement: bool = False,
    ) -> None:
        kind = type(self).__name__
        self.ranks = ProcessGroup(comm, options or CommunicationOptions())
        # Only strategies with explicit devices move arrays; otherwise the user's library decides.
        self.is_placed = devices is not None

        def found() -> tuple[str, ...]:
            # Agreed, as a device may be missing on one rank only.
            if devices is None:
                return CPU
            return parse_devices(devices, kind, soft_placement=soft_placement)

        self.devices = self.ranks.run_then_agree(kind, found)
        # The number is in the name of the point, so ranks with other numbers raise `MismatchError`.
        self.ranks.agree(f"{kind} with {len(self.devices)} devices per process")
        # Processes that create variables; one is the chief. In some strategies each computes alone.
        self._everyone = self.ranks
        # Names of this strategy's variables; each checkpoint needs unique ones.
        self._names: set[str] = set()
        self._optimizers = ReplicaOptimizers(self)

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that contribute to one step."""
        return self.ranks.size * len(self.devices)

    @property
    def first_replica_id(self) -> int:
        """Number of this process's first replica among all replicas."""
        # `_everyone`, because processes that compute alone have numbers as well.
        return self._everyone.rank * len(self.devices)

    @property
    def is_chief(self) -> bool:
        """Whether this process does one-time output: checkpoints, metrics, progress."""
        return self._everyone.rank == 0

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Make this the current strategy in this thread.

        Raises:
            RuntimeError: another strategy's scope is open, or a replica is running.
        """
        # Nested scopes of one strategy are allowed.
        require_cross_replica(self, "scope")
        with context.entered(self, None):
            yield self

    def variable(
        self,
        initial_value: Any,
        *,
        name: str | None = None,
        dtype: Any = None,
        synchronization: Synchronization = "auto",
        aggregation: Aggregation = "none",
    ) -> Variable:
        """Create a variable with the same initial value on all replicas; *collective*.

        Args:
            initial_value: shape (...), of any library, or a function that returns it. The chief's
                value is used; other ranks' values must have the same shape and dtype.
            name: name in checkpoints; "variable", "variable_1", ... if None.
            dtype: dtype of the variable; None for that of the initial value.
            synchronization: "auto", "on_write" or "on_read"; see `Variable`.
            aggregation: how values written by replicas are combined: "none", "sum", "mean" or
                "only_first_replica".

        Raises:
            ValueError: the name is taken, synchronization or aggregation is unknown, or the mean of
                integers is requested.
            MismatchError: the ranks create variables with different names, shapes or dtypes.
        """
        require_cross_replica(self, "variable")
        # Chosen before the exchange, from names that are equal on all ranks.
        chosen = self._free_name() if name is None else name

        def local() -> Variable:
            self._refuse_taken(chosen)
            # Called on every rank, since shape and dtype must be known before the broadcast.
            value = initial_value() if callable(initial_value) else initial_value
            return Variable(
                value,
                name=chosen,
                dtype=dtype,
                synchronization=synchronization,
                aggregation=aggregation,
                strategy=self,
            )

        everyone = self._everyone
        variable = everyone.run_then_agree(f"variable {chosen}", local)
        # One array is enough: all arrays of a process hold the same value here.
        variable.fill(
            everyone.raise_together(
                "variable", lambda: everyone.broadcast_from_chief(variable.components[0])
            )
        )
        # After the last error, so that a name of a failed creation is free again.
        self._names.add(chosen)
        return variable

    def mirror(self, model: Any, *, name: str = "model") -> MirroredModel:
        """Give each replica a copy of a model, with the chief's values; *collective*.

        `minimize` of the result trains the copies, which stay equal. Arrays that the model itself
        writes, such as statistics of a batch norm, are "on_read" variables: each replica has its
        own, and reads outside of replicas return the mean, or the first replica's integers.

        Args:
            model: a PyTorch module, a Flax NNX module, or a built Keras model over JAX. It keeps
                its values until `export`.
            name: prefix of its variables' names.

        Raises:
            TypeError: the model is of another kind; on all ranks.
            ValueError: the model has no values yet, a name is taken, Keras uses another backend, or
                the strategy's replicas do not synchronize; on all ranks.
            MismatchError: the ranks' models differ in names, shapes or dtypes.
        """
        require_cross_replica(self, "mirror")

        def local() -> Any:
            if not self.is_in_step:
                raise ValueError(
                    f"mirror: expected a strategy whose replicas synchronize, got "
                    f"{type(self).__name__}"
                )
            return form_of(model, len(self.devices))

        form = self._everyone.run_then_agree("mirror", local)
        variables = [
            self.variable(
                part.value,
                name=f"{name}/{part.name}",
                synchronization="on_read" if part.is_written else "on_write",
                aggregation=part.aggregation,
            )
            for part in form.parts
        ]
        return MirroredModel(self, form, variables)

    def run(
        self,
        fn: Callable[..., R],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> R:
        """Call `fn(*args, **kwargs)` on every replica; *collective*.

        The replicas of one process run concurrently, in threads. A replica runs until it
        synchronizes with the others: in `merge_call`, `all_reduce` or `all_gather` of its
        `get_replica_context()`, in `apply_gradients`, or in a write to a variable. All replicas of
        all ranks must synchronize at the same points.

        Args:
            fn: computation of a replica.
            args: each replica gets its own value of a `PerReplica`.
            kwargs: the same by name.

        Returns:
            the result of `fn`; a `PerReplica` wherever it differs between the replicas of this
            process. The type hint is that of `fn`: with several replicas `local_results` returns
            the values of each.

        Raises:
            ValueError: `args` is neither a list nor a tuple, or the replicas returned different
                structures.
            RuntimeError: called inside a replica, or the replicas do not synchronize.
            Exception: the error of `fn` in one replica, on every rank. The other replicas of all
                ranks end at their next synchronization point, by a `BaseException` that runs their
                `finally` blocks.

        Cost: an all-reduce of 24 bytes at the end and for each synchronization point.
        """
        # Also outside of any scope: `run` enters the replica context itself.
        require_cross_replica(self, "run")
        result: R = run.run(self, fn, args, kwargs or {})
        return result

    def reduce(self, op: ReduceOp, value: Any, axis: Axis = None) -> Any:
        """Reduce results of `run` over all replicas; *collective*.

        Args:
            op: "sum" or "mean", in any case.
            value: an array or number, or nested tuples, lists and dicts of them.
            axis: None to reduce element by element; else each replica's value is first reduced
                along this axis, or these axes. The mean is then over all elements of all replicas,
                even if replicas hold different numbers of rows.

        Returns:
            the structure of `value`, with arrays of its library and dtype (NumPy arrays for
            numbers); integers have a float64 mean.

        Raises:
            ValueError: the op or axis is unknown; or a sum over several replicas of a value that is
                equal on all, which is most likely a mistake. Its mean is the value.
            RuntimeError: called inside a replica.
        """
        require_cross_replica(self, "reduce")
        # Another rank may be inside the exchange when this rank raises, so the error is agreed.
        return self.ranks.raise_together("reduce", lambda: self._reduce(op, value, axis))

    def _reduce(self, op: Any, value: Any, axis: Axis) -> Any:
        chosen = reductions.parse_op(op, "reduce")
        count = len(self.devices)
        # One replica per process: the value itself is per replica.
        if count == 1 or differs(value):
            values = [select(value, i) for i in range(count)]
            return reductions.reduce(self.ranks, chosen, values, axis)
        if axis is not None or chosen == "mean":
            # Equal on all replicas of this process, so it is reduced like that of a single replica.
            return reductions.reduce(ProcessGroup(), chosen, [value], axis)
        # A sum of zeros is zero on any number of replicas, so it is not a mistake.
        if any(np.any(leaf) for leaf in reductions.arrays_of(value, "reduce")):
            raise ValueError(
                f"reduce: the value is the same for all {count} replicas of a process, expected "
                f"a PerReplica, such as run returns, or op 'mean', got {value!r}"
            )
        return value

    def gather(self, value: Any, axis: int) -> Any:
        """Join the arrays of all replicas along an axis; *collective*.

        Args:
            value: an array per replica, or nested tuples, lists and dicts of them. Lengths along
                the axis may differ. A value that is equal on all replicas of this process is
                returned unchanged.
            axis: axis to join along; negative values count from the end.

        Returns:
            the same structure; arrays are in the order of the replicas.

        Raises:
            InvalidArgumentError: the replicas' arrays do not fit, or lack the axis.
            MismatchError: arrays of different ranks do not fit.
        """
        require_cross_replica(self, "gather")
        count = len(self.devices)
        if count > 1 and not differs(value):
            return value
        # Rows along the axis may differ, but the order of the replicas is fixed.
        values = [select(value, i) for i in range(count)]
        return self.ranks.raise_together(
            "gather", lambda: reductions.gather(self.ranks, values, axis)
        )

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of the replicas of this process, one value or structure each.

        A value that is equal on all replicas is returned once.
        """
        if isinstance(value, Variable):
            return value.components
        # A value that is equal on all replicas counts once, as in TensorFlow's
        # `experimental_local_results`.
        count = len(self.devices) if differs(value) else 1
        return tuple(select(value, i) for i in range(count))

    def apply_gradients(
        self,
        optimizer: ArrayOptimizer | AveragingOptimizer,
        grads_and_vars: Iterable[tuple[Any, Any]],
        *,
        examples: Any = None,
    ) -> None:
        """Average the gradients of all replicas, and update the variables once; *collective*.

        May be called inside or outside a replica.

        Args:
            optimizer: one of `strategies.optimizers`, or a `DistributedOptimizer` over the same
                ranks, which has more options for averaging.
            grads_and_vars: pairs of a gradient and a variable of this strategy. A gradient that is
                None in some replicas counts as zero there.
            examples: number of rows of which the gradients are the mean. The average is then over
                all rows, even if replicas hold different numbers. None: all replicas have equal
                weight.

        Raises:
            ValueError: a shape does not fit, a variable belongs to another strategy, the replicas
                have different variables, or no replica has an example; on all ranks.
        """
        top = context.current()
        # A list, because the pairs are read for each replica.
        pairs = list(grads_and_vars)
        if top is not None and top.replica is not None and top.strategy is self:

            def merge(payloads: list[ReplicaGradients]) -> list[None]:
                # In the first replica's thread, with the gradients of all replicas of this process.
                self._apply(optimizer, payloads)
                return [None] * len(payloads)

            # Validated in the replica's thread, where the user's line is on the stack.
            own = ReplicaGradients.of(pairs, examples)
            top.replica.synchronize(context.SyncPoint("apply_gradients", own, merge))
            return
        require_cross_replica(self, "apply_gradients")

        def apply() -> None:
            count = range(len(self.devices))
            # A gradient outside of replicas may be a `PerReplica`, or one value for all.
            replicas = [ReplicaGradients.of(select(pairs, i), select(examples, i)) for i in count]
            self._apply(optimizer, replicas)

        # New arrays of the optimizer belong to the first replica's device.
        with run.selected(self, 0):
            self.ranks.raise_together("apply_gradients", apply)

    def _apply(self, optimizer: Any, replicas: Sequence[ReplicaGradients]) -> None:
        """Update variables by the gradients of this process's replicas; *collective*."""
        self._optimizers.apply(optimizer, replicas)

    def update(self, variables: Sequence[Any], change: Callable[[], None]) -> None:
        """Change variables; other strategies override where that happens.

        Args:
            variables: variables that change.
            change: changes them, in the same way on all ranks.
        """
        # Each rank applies the same averaged gradients, so no broadcast is needed.
        change()

    def placed(self, value: Any, *, shared: bool) -> list[Any]:
        """Return an array for each replica of this process, on its device.

        Args:
            value: the array; may itself be returned.
            shared: whether replicas may share one array.
        """
        # Without devices the value stays where it is.
        return [put(value, name) if self.is_placed else value for name in self.devices]

    def distribute_dataset(
        self, batches: Iterable[Any], *, policy: Policy = "auto"
    ) -> Iterator[Any]:
        """Yield each replica's rows of every global batch; *collective*.

        Args:
            batches: global batches: arrays of shape (batch, ...), lists with a string or other
                object per row, or nested tuples, lists and dicts of them.
            policy: "data": all processes have the same batches. They compare checksums of the first
                three; one equal array, such as the labels, is enough, so images may be augmented at
                random. Each batch is cut into one part per replica, all but the last ones of equal
                size; process `r` of `P` takes the parts `r`, `r + P`, ... "off": each process has
                its own batches, of the same global size. It cuts them into the same number of
                parts, the first ones a row longer if necessary, and takes one part per own replica
                in a step; *collective* in each step. "file": as "off", but each process reads whole
                files of its own: `batches` are `strategies.input.FileBatches`. "auto": "file" for
                these with at least a file per process, else "data".

        Raises:
            NotFoundError: policy "file" for batches without files.
            InvalidArgumentError: policy "file" for fewer files than processes.
            MismatchError: the policies, the arguments of `FileBatches` under "file", or the first
                batches under "data" differ among the processes; on all of them.

        Yields:
            the same structure with a `PerReplica` of consecutive rows, or the rows themselves if a
            process has one replica; possibly 0 rows. They are on the replicas' devices.
        """
        parts = datasets.of_global_batches(batches, self.ranks, len(self.devices), policy)
        return self._on_devices(parts)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]]
    ) -> Iterator[Any]:
        """Yield batches that each process reads from its own part of the data; *collective*.

        Args:
            dataset_fn: returns this process's batches, one per replica and step; its `InputContext`
                names the part to read.

        Yields:
            batches until no replica has any left. A replica that runs out earlier gets batches of 0
            rows, so that collective operations still synchronize; a step without rows is left out.
            An error in one process's pipeline is raised on all.

        Raises:
            Exception: the error of `dataset_fn`, on all processes.
        """
        part = InputContext(self.ranks.size, self.ranks.rank, self.num_replicas_in_sync)
        # Forget the last error, because the caller has continued after it.
        self.ranks.start()
        batches = self.ranks.run_then_agree(
            "distribute_datasets_from_function", lambda: dataset_fn(part)
        )
        return self._on_devices(datasets.from_function(batches, self.ranks, len(self.devices)))

    def distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> PerReplica:
        """Return a `PerReplica` of the function's results for the replicas of this process."""
        first, count = self.first_replica_id, len(self.devices)
        total = self.num_replicas_in_sync
        return PerReplica(tuple(value_fn(ValueContext(first + i, total)) for i in range(count)))

    def _on_devices(self, batches: Iterator[Any]) -> Iterator[Any]:
        # Lazily: a batch is moved when the loop asks for it.
        return datasets.on_devices(batches, self.devices, put) if self.is_placed else batches

    def _refuse_taken(self, name: str) -> None:
        if name in self._names:
            raise ValueError(f"variable: this name is taken, expected a new one, got {name!r}")

    def _free_name(self) -> str:
        number = 0
        while (name := f"variable_{number}" if number else "variable") in self._names:
            number += 1
        return name
