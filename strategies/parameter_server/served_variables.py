"""Variables of a strategy on ps tasks: creation, access and checkpoints.

`ParameterServerStrategy` adds the updates by gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies.checkpoint.boxes import Box, Slice
from strategies.cluster.device_setter import RoundRobin
from strategies.core.array_ops import dtype_name
from strategies.core.process_group import ProcessGroup
from strategies.core.sparse import Rows, checked_rows
from strategies.optimizers import Optimizer
from strategies.parameter_server import state_io, variable_factory
from strategies.parameter_server.client import Client
from strategies.parameter_server.options import ServingOptions, TrainingOptions
from strategies.parameter_server.restore import Restore
from strategies.parameter_server.server import PARAMETERS, ParameterServer
from strategies.parameter_server.snapshot import Snapshot
from strategies.parameter_server.variable import ServedVariable
from strategies.parameter_server.variable_factory import VariableFactory, VariableSpec
from strategies.remote_optimizers.parameter_host import HostingStrategy
from strategies.replicas.context import require_cross_replica
from strategies.replicas.replica_view import to_host
from strategies.rpc.server import Server
from strategies.variables import partition

__all__ = ["ServedVariables"]


class ServedVariables(HostingStrategy):
    """A strategy with its variables on ps tasks; *collective* over all tasks.

    Args:
        server: server of the tasks.
        optimizer: optimizer on the ps tasks; None if each variable has its own.
        options: placement and compression of variables.
        devices: devices of each worker, with one replica each; None for "/cpu:0".

    Raises:
        ValueError: the cluster has no ps or no worker, or an argument is invalid; on all tasks.
    """

    synchronous: bool
    timeout: float | None

    def __init__(
        self,
        server: Server,
        optimizer: Optimizer | None,
        options: ServingOptions,
        devices: Sequence[str] | None,
    ) -> None:
        self.cluster = server.cluster
        self.service = server.service
        self.shared_name = options.shared_name
        self.optimizer = optimizer
        self.variables: dict[str, ServedVariable] = {}
        self._workers = tuple(self.cluster.training_ranks)
        self._servers = tuple(self.cluster.ranks_of("ps"))
        self._trainers = ProcessGroup(self.cluster.workers)
        self._partitioner = options.partitioner
        self._shard: ParameterServer | None = None
        everyone = ProcessGroup(self.cluster.comm)
        self._client = everyone.run_then_agree(
            "ParameterServerStrategy", lambda: self._check(devices, options)
        )
        # After `_check`, whose `super().__init__` sets it to this process alone.
        self._everyone = everyone
        # Stateful: all tasks ask it for the same parts in the same order, and get the same places.
        self._choice = options.choice or RoundRobin(len(self._servers))

    def _check(self, devices: Sequence[str] | None, options: ServingOptions) -> Client:
        if not self._servers or not self._workers:
            raise ValueError(
                f"ParameterServerStrategy: expected at least one ps and one worker, got "
                f"{len(self._servers)} and {len(self._workers)} ({self.cluster.spec})"
            )
        super().__init__(devices)
        return Client(self.service, self.cluster, options)

    def _open(self, training: TrainingOptions) -> None:
        """Open the parameter servers; on workers, join; *collective*."""
        name, everyone = self.shared_name, self._everyone

        def serve() -> None:
            if self.cluster.job == "ps":
                own = self.cluster.comm.rank
                _, self._shard = self.service.open(PARAMETERS, {}, name=name, task=own)
                assert self._shard is not None
                self._shard.prepare(training)

        def join() -> None:
            if self.cluster.job != "ps":
                self._client.open()
            if self.cluster.comm.rank in self._workers:
                self._client.join()

        # Workers join only after all ps tasks have set their options.
        everyone.run_then_agree("ParameterServerStrategy", serve)
        everyone.run_then_agree("ParameterServerStrategy", join)
        self._maker = VariableFactory(
            self.cluster, everyone, self._shard, self.variables, self._choice
        )

    @property
    def first_replica_id(self) -> int:
        """Number of this process's first replica among all training replicas."""
        return self._index * len(self.devices)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes shared output, such as checkpoints."""
        return self.cluster.is_chief

    @property
    def _index(self) -> int:
        rank = self.cluster.comm.rank
        # Tasks that do not train, such as an evaluator, read the data as the first worker would.
        return self._workers.index(rank) if rank in self._workers else 0

    def variable(  # type: ignore[override]
        self,
        initial_value: Any,
        *,
        name: str | None = None,
        dtype: Any = None,
        shape: Sequence[int] | None = None,
        optimizer: Optimizer | None = None,
        resident: bool = True,
    ) -> ServedVariable:
        """Create a variable on the ps tasks; *collective* over all tasks.

        Args:
            initial_value: shape (...), or a function that returns it. The chief's value is used;
                shape and dtype must agree on all tasks. Workers see the variable as an array of its
                library, on their devices. With `shape`, an initializer, such as those of
                `strategies.variables.initializers`: each ps creates its own rows only.
            name: name; None for "variable", "variable_1", ...
            dtype: dtype; None for the dtype of the initial value, float32 for an initializer.
            shape: shape of the whole, at least one axis; None for the shape of the initial value.
            optimizer: optimizer of this variable, copied; None for the strategy's.
            resident: whether workers have a full copy. For a large table of which a step uses a few
                rows, pass False: `look_up` returns rows, and gradients are `Rows`.

        Raises:
            ValueError: the name is taken, or the partitioner's result is invalid; on all tasks.
            MismatchError: name, shape or dtype differ among the tasks.

        Cost: a broadcast of the value to all tasks, except with an initializer.
        """
        require_cross_replica(self, "variable")
        chosen = self._free_name() if name is None else name
        own = optimizer or self.optimizer

        # Runs inside the agreement of `make`, so that its errors are raised on all tasks.
        def described() -> VariableSpec:
            self._refuse_taken(chosen)
            if own is None:
                raise ValueError(
                    f"variable: no optimizer updates it, expected one of the strategy or of the "
                    f"variable, or an earlier DistributedOptimizer(..., strategy=strategy), got "
                    f"none (variable: {chosen})"
                )
            return variable_factory.wanted(chosen, initial_value, dtype, shape, self._partitioner)

        variable, pieces = self._maker.make(self, chosen, described, resident=resident)
        # On the ps tasks first, so that no worker uses a part that does not exist yet.
        self._maker.hold(variable, pieces, own)
        variable.optimizer = own
        self._client.add(variable)
        self.variables[chosen] = variable
        self._names.add(chosen)
        return variable

    def pull(self) -> None:
        """Update the copies of all resident variables.

        Raises:
            UnavailableError: a ps task is lost.
            FailedPreconditionError: this is a ps task.
        """
        self._client.pull()

    def look_up(self, variable: ServedVariable, indices: Any) -> Any:
        """Return some rows of a variable, without a copy of the whole.

        Args:
            variable: variable of this strategy, with at least one axis.
            indices: shape (k,), integers from 0; duplicates are allowed.

        Returns:
            Shape (k, ...), new memory, of the library and on the device of the variable's `value`.

        Raises:
            ValueError: an index is out of range.
            UnavailableError: a ps task is lost.
        """
        chosen = to_host(indices)
        # Values without memory, so that the indices can be checked as rows of a gradient.
        like = np.broadcast_to(np.zeros((), variable.dtype), (*chosen.shape, *variable.shape[1:]))
        rows = Rows(chosen, like)
        where = f"variable: {variable.name}"
        checked_rows(rows, variable.shape, dtype_name(variable), "look_up", where)
        return variable.seen(self._client.rows(variable, rows.indices), self, is_copy=True)

    def assign(self, variable: ServedVariable, value: Any) -> None:
        """Set the value of a variable; see `ServedVariable.assign`."""
        array = np.asarray(to_host(value), variable.dtype)
        partition.check_shape("assign", array, variable.shape, variable.name)
        self._client.assign(variable, array)
        # The ps tasks first, so that a lost ps leaves the copy unchanged.
        if variable.resident:
            # A copy, because `array` may share the caller's memory.
            variable.apply_reply(array.copy())

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """Return the training state for a checkpoint; not on a ps task.

        The state is one version of all variables, also while workers train: every push, `assign`
        or load is in the state of all ps tasks or of none. In synchronous training all ps tasks
        have made the same number of updates. The ps tasks make no updates for a few messages.

        Returns:
            `variable/<name>` and, for every slot, `optimizer/<slot>/<name>`, of the variable's
            shape; update counts, see `strategies.parameter_server.state_io`. All arrays are in this
            task's memory.

        Raises:
            UnavailableError: a ps task is lost.
            AbortedError: the ps tasks differ, because an update has failed on some of them.
            DeadlineExceededError: an update has not reached all ps tasks within `timeout`.
        """
        with self.remote_state() as snapshot:
            return snapshot.state_dict()

    def remote_state(self) -> Snapshot:
        """Return the state of `state_dict`, which stays on the ps tasks until it is closed.

        `Saver` calls it if its manager is sharded without ranks: each ps writes its parts. The
        first update of a variable copies it, so a ps needs memory for its variables and slots
        twice.

        Raises:
            OpError: as `state_dict`.
        """
        return self._client.snapshot(synchronous=self.synchronous, timeout=self.timeout)

    def remote_restore(self) -> Restore:
        """Return a restore of `state_dict` from files, by all ps tasks.

        `Saver` calls it if its manager is sharded without ranks: each ps reads its parts. A ps
        needs memory for its variables and slots twice.

        Raises:
            FailedPreconditionError: this is a ps task.
        """
        return self._client.restore()

    def load_state_dict(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Restore a state, also one from other numbers of ps tasks and parts.

        One task, such as the chief, calls it before the workers compute gradients. The other tasks
        then call `pull`. The steps of learning-rate schedules and of the warm-up continue.

        Raises:
            ValueError: the state belongs to other variables or to another optimizer. Nothing has
                changed.
            FailedPreconditionError: gradients are waiting to be applied.
            UnavailableError: a ps task is lost.
        """
        self._client.load_state_dict(state)

    def state_slices(self) -> dict[str, Slice]:
        """Return this ps's slices of `state_dict`, for a sharded checkpoint; *collective*.

        All tasks save together with `CheckpointManager(path, cluster.comm).save(...)`, so that no
        task needs memory for a whole variable. A ps waits for all tasks, so its state contains all
        updates that the workers made before this call. Variables are views, slots are copies. The
        result is empty on other tasks. Workers must not train until the slices are released,
        because updates would copy the viewed variables first.

        Raises:
            ValueError: this ps has several parts of one variable: a slice is one box.
            MismatchError: the strategy is synchronous, and the numbers of updates differ among ps
                tasks; on all tasks.
            CollectiveTimeout: a task makes no call, such as a ps in `Server.join`.
        """
        # A ps waits here for the workers, which have received the replies to their updates.
        self._everyone.agree("state_slices")
        slices, updates = self._everyone.run_then_agree("state_slices: collect", self._own_slices)
        synchronous = self._shard is not None and self._shard.options.synchronous
        # Asynchronous ps tasks make different numbers of updates anyway.
        state_io.check_same_updates(self.cluster.comm, updates if synchronous else None)
        return slices

    def _own_slices(self) -> tuple[dict[str, Slice], int]:
        """Return the slices of this ps and its number of updates; empty and 0 on other tasks."""
        if self._shard is None:
            return {}, 0
        states, updates = self._shard.values.own_state()
        variables, count = self.variables.values(), len(self._servers)
        return state_io.slices(variables, states, self._server_index, count, updates), updates

    @property
    def _server_index(self) -> int:
        return self._servers.index(self.cluster.comm.rank)

    def state_boxes(self) -> dict[str, Box]:
        """Return the box of each array that this task needs for `load_state_slices`; *collective*.

        Returns:
            Name of a variable or slot -> box of the elements of this ps, empty on other tasks. Pass
            it to `CheckpointManager.restore_or_none(slices=...)`, which returns all other arrays
            whole.
        """
        slices, _ = self._everyone.run_then_agree("state_boxes", self._own_slices)
        large = {n: part for n, part in slices.items() if state_io.is_large(n, part.shape)}
        own = {name: part.box for name, part in large.items()}
        axes = {name: len(box.start) for name, box in own.items()}
        # Tasks without a part receive the names and the numbers of axes.
        for told in self.cluster.comm.allgather_object(axes):
            axes |= told
        # An empty box on tasks without a part: all tasks pass the same names to the restore.
        return {name: own.get(name, Box((0,) * n, (0,) * n)) for name, n in sorted(axes.items())}

    def load_state_slices(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Restore this ps's part of a state; no effect on other tasks.

        After all ps tasks have returned, workers call `pull`.

        Args:
            state: the elements of `state_boxes`, and all other arrays whole.

        Raises:
            ValueError: the state belongs to other variables or to another optimizer.
        """
        if self._shard is None:
            return
        like, _ = self._shard.values.own_state()
        states, updates = state_io.own_states(
            state, self.variables.values(), like, self._server_index, len(self._servers)
        )
        del like  # the views would force a copy of every variable
        self._shard.load_own(states, updates)
