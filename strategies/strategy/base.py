"""`Strategy`: scope, contexts and the interface of a training loop.

A *strategy* keeps the replicas of a model in step. Code runs in one of two contexts: the
*cross-replica* context, in which the loop is written, and the *replica* context, inside
`strategy.run`, in which one replica computes. Outside of any `scope` the default strategy holds:
one replica, nothing to communicate, so that the same program runs alone.

A process has one replica or more, each on one of its *devices*; the replicas of process `r` are
numbered from `r` times their number on. A value that differs between the replicas of one process is
a `PerReplica`; where a process has only one, it is that replica's value itself.
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
from strategies.replicas.per_replica import PerReplica, differs, select
from strategies.replicas.reductions import Axis, ReduceOp
from strategies.replicas.variable import Aggregation, Synchronization, Variable

__all__ = ["Strategy"]

R = TypeVar("R")


class Strategy:
    """Keeps replicas in step; see the module's docstring for the words.

    Methods that are *collective* are called by all processes of the strategy, in the same order. An
    error on one of them is an error on all.

    Args:
        devices: of this process, a replica each; as many on all processes.
        comm: the processes, None for this one alone.
        options: how they exchange arrays.
        soft_placement: take a CPU device where there is none of the name; the log says so.

    Attributes:
        devices: their names.
        is_placed: whether variables, batches and computation go to these devices; not where the
            strategy was given none.
        ranks: the processes.
        updates_everywhere: whether every process updates the variables that it has, not one for
            all.
        is_in_step: whether the replicas of all processes meet.
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
        self.is_placed = devices is not None

        def found() -> tuple[str, ...]:
            if devices is None:
                return CPU
            return parse_devices(devices, kind, soft_placement=soft_placement)

        self.devices = self.ranks.run_then_agree(kind, found)
        self.ranks.agree(f"{kind} with {len(self.devices)} devices per process")
        # Who makes variables, of whom one is the chief; in some strategies each computes alone.
        self._everyone = self.ranks
        self._names: set[str] = set()
        self._optimizers = ReplicaOptimizers(self)

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas contribute to one step."""
        return self.ranks.size * len(self.devices)

    @property
    def first_replica_id(self) -> int:
        """Number of this process's first replica among all of them."""
        return self._everyone.rank * len(self.devices)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes what is written once: checkpoints, metrics, progress."""
        return self._everyone.rank == 0

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Make this the current strategy in this thread.

        Raises:
            RuntimeError: another strategy's scope is open, or a replica is running.
        """
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
        """Make a variable that starts with the same value on all replicas; *collective*.

        Args:
            initial_value: shape (...), of any library, or a function that returns it. The chief's
                value counts; the others' must have the same shape and dtype.
            name: as in checkpoints; "variable", "variable_1", ... if None.
            dtype: of the variable, that of the initial value if None.
            synchronization: "auto", "on_write" or "on_read"; see `Variable`.
            aggregation: what becomes of the values that replicas write: "none", "sum", "mean" or
                "only_first_replica".

        Raises:
            ValueError: the name is taken, no such synchronization or aggregation, or the mean of
                integers.
            MismatchError: the ranks make variables of other names, shapes or dtypes.
        """
        require_cross_replica(self, "variable")
        chosen = self._free_name() if name is None else name

        def local() -> Variable:
            self._refuse_taken(chosen)
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
        variable.fill(
            everyone.raise_together(
                "variable", lambda: everyone.broadcast_from_chief(variable.components[0])
            )
        )
        self._names.add(chosen)
        return variable

    def run(
        self,
        fn: Callable[..., R],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> R:
        """Call `fn(*args, **kwargs)` on every replica; *collective*.

        The replicas of one process run at the same time, in threads. Each goes on until it meets
        the others: in `merge_call`, `all_reduce` or `all_gather` of its `get_replica_context()`, in
        `apply_gradients`, or by writing to a variable; all replicas of all ranks meet at the same
        points.

        Args:
            fn: what a replica computes.
            args: each replica gets its own value of a `PerReplica`.
            kwargs: the same by name.

        Returns:
            What `fn` returned; a `PerReplica` wherever that differs between the replicas of this
            process. Type checkers are told of the first: with several replicas `local_results`
            gives the values of each.

        Raises:
            ValueError: `args` is neither a list nor a tuple, or the replicas returned different
                structures.
            RuntimeError: called inside a replica, or the replicas do not meet.
            Exception: what `fn` raised in one replica. The others of all ranks end where they meet
                next, by a `BaseException` that runs their `finally` blocks, and on every rank this
                method raises.

        Cost: an all-reduce of 24 bytes at the end and for each meeting.
        """
        require_cross_replica(self, "run")
        result: R = run.run(self, fn, args, kwargs or {})
        return result

    def reduce(self, op: ReduceOp, value: Any, axis: Axis = None) -> Any:
        """Reduce what `run` returned over all replicas; *collective*.

        Args:
            op: "sum" or "mean", in any case.
            value: an array or number, or nested tuples, lists and dicts of them.
            axis: None to combine element by element; else the values are reduced along this axis,
                or these, in each replica first. The mean is then over all elements of all replicas,
                also where replicas hold different numbers of rows.

        Returns:
            The structure of `value` with arrays of its kind and dtype (NumPy arrays for numbers);
            integers have a float64 mean.

        Raises:
            ValueError: unknown op, no such axis, or a sum over several replicas of a value that is
                not different for each, which is most likely a mistake. Its mean is the value.
            RuntimeError: called inside a replica.
        """
        require_cross_replica(self, "reduce")
        return self.ranks.raise_together("reduce", lambda: self._reduce(op, value, axis))

    def _reduce(self, op: Any, value: Any, axis: Axis) -> Any:
        chosen = reductions.parse_op(op, "reduce")
        count = len(self.devices)
        if count == 1 or differs(value):
            values = [select(value, i) for i in range(count)]
            return reductions.reduce(self.ranks, chosen, values, axis)
        if axis is not None or chosen == "mean":
            return reductions.reduce(ProcessGroup(), chosen, [value], axis)
        if any(np.any(leaf) for leaf in reductions.arrays_of(value, "reduce")):
            raise ValueError(
                f"reduce: the value is the same for all {count} replicas of a process, expected "
                f"a PerReplica, such as run returns, or op 'mean', got {value!r}"
            )
        return value

    def gather(self, value: Any, axis: int) -> Any:
        """Join the arrays of all replicas along an axis; *collective*.

        Args:
            value: an array for each replica, or nested tuples, lists and dicts of them. Their
                lengths along the axis may differ. One that is not different for each replica of
                this process is returned as it is.
            axis: where to join, negative ones count from the end.

        Returns:
            The same structure; the arrays in the order of the replicas.

        Raises:
            InvalidArgumentError: the replicas' arrays do not fit, or have no such axis.
            MismatchError: those of different ranks do not fit.
        """
        require_cross_replica(self, "gather")
        count = len(self.devices)
        if count > 1 and not differs(value):
            return value
        values = [select(value, i) for i in range(count)]
        return self.ranks.raise_together(
            "gather", lambda: reductions.gather(self.ranks, values, axis)
        )

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return what the replicas of this process have: a value or structure for each.

        A value that is not different for each is returned as the only one.
        """
        if isinstance(value, Variable):
            return value.components
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

        May be called inside a replica or outside.

        Args:
            optimizer: one of `strategies.optimizers`, or a `DistributedOptimizer` over the same
                ranks, which has more ways to average.
            grads_and_vars: pairs of a gradient and a variable of this strategy. A gradient may be
                None in some replicas, where it counts as zero.
            examples: how many rows the gradients are the mean of. The average is then over all
                rows, also where replicas hold different numbers of them. None: all replicas count
                alike.

        Raises:
            ValueError: a shape does not fit, a variable belongs to another strategy, the replicas
                have different variables, or no replica has an example; on all ranks.
        """
        top = context.current()
        pairs = list(grads_and_vars)
        if top is not None and top.replica is not None and top.strategy is self:

            def merge(payloads: list[ReplicaGradients]) -> list[None]:
                self._apply(optimizer, payloads)
                return [None] * len(payloads)

            own = ReplicaGradients.of(pairs, examples)
            top.replica.synchronize(context.SyncPoint("apply_gradients", own, merge))
            return
        require_cross_replica(self, "apply_gradients")

        def apply() -> None:
            count = range(len(self.devices))
            replicas = [ReplicaGradients.of(select(pairs, i), select(examples, i)) for i in count]
            self._apply(optimizer, replicas)

        with run.selected(self, 0):
            self.ranks.raise_together("apply_gradients", apply)

    def _apply(self, optimizer: Any, replicas: Sequence[ReplicaGradients]) -> None:
        """Update by the gradients of this process's replicas; *collective*."""
        self._optimizers.apply(optimizer, replicas)

    def update(self, variables: Sequence[Any], change: Callable[[], None]) -> None:
        """Change variables where they are; what other strategies do in another place.

        Args:
            variables: those that change.
            change: changes them, the same on all ranks.
        """
        change()

    def placed(self, value: Any, *, shared: bool) -> list[Any]:
        """Return an array for each replica of this process, on its device.

        Args:
            value: the array; it may be returned itself.
            shared: whether replicas may see one array.
        """
        return [put(value, name) if self.is_placed else value for name in self.devices]

    def distribute_dataset(
        self, batches: Iterable[Any], *, policy: Policy = "auto"
    ) -> Iterator[Any]:
        """Give each replica its rows of every global batch; *collective*.

        Args:
            batches: global batches: arrays of shape (batch, ...), lists with a text or other object
                for each row, or nested tuples, lists and dicts of them.
            policy: "data": all processes have the same batches. They compare checksums of the first
                three; one equal array, such as the labels, is enough, so images may be augmented at
                random. Each batch is cut into as many parts as there are replicas, all but the last
                ones of equal size; process `r` of `P` takes the parts `r`, `r + P`, ... "off": each
                process has batches of its own, of the same global size. It cuts them into so many
                parts as well, the first a row longer if need be, and takes as many in a step as it
                has replicas; *collective* in each step. "file": as "off", where each process reads
                whole files of its own: `batches` are `strategies.input.FileBatches`. "auto": "file"
                if they are, with at least a file for each process, else "data".

        Raises:
            NotFoundError: policy "file" for batches that know of no files.
            InvalidArgumentError: policy "file" for fewer files than processes.
            MismatchError: the policies, the arguments of `FileBatches` under "file", or the first
                batches under "data" differ among the processes; on all of them.

        Yields:
            The same structure with a `PerReplica` of consecutive rows, or the rows themselves where
            a process has one replica; there may be 0 of them. They are on the replicas' devices.
        """
        parts = datasets.of_global_batches(batches, self.ranks, len(self.devices), policy)
        return self._on_devices(parts)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]]
    ) -> Iterator[Any]:
        """Let each process read its own part of the data, and keep them in step; *collective*.

        Args:
            dataset_fn: makes this process's batches, of which each of its replicas takes one in a
                step; told by an `InputContext` which part to read.

        Yields:
            Batches until no replica has any left. One that runs out earlier gets batches of 0 rows,
            so that collective operations still meet, and a step in which none has a row is left
            out. An error in one process's pipeline is raised on all of them.

        Raises:
            Exception: what `dataset_fn` raised, on all processes.
        """
        part = InputContext(self.ranks.size, self.ranks.rank, self.num_replicas_in_sync)
        self.ranks.start()
        batches = self.ranks.run_then_agree(
            "distribute_datasets_from_function", lambda: dataset_fn(part)
        )
        return self._on_devices(datasets.from_function(batches, self.ranks, len(self.devices)))

    def distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> PerReplica:
        """Return a `PerReplica` of what the function returns for each replica of this process."""
        first, count = self.first_replica_id, len(self.devices)
        total = self.num_replicas_in_sync
        return PerReplica(tuple(value_fn(ValueContext(first + i, total)) for i in range(count)))

    def _on_devices(self, batches: Iterator[Any]) -> Iterator[Any]:
        return datasets.on_devices(batches, self.devices, put) if self.is_placed else batches

    def _refuse_taken(self, name: str) -> None:
        if name in self._names:
            raise ValueError(f"variable: this name is taken, expected a new one, got {name!r}")

    def _free_name(self) -> str:
        number = 0
        while (name := f"variable_{number}" if number else "variable") in self._names:
            number += 1
        return name
