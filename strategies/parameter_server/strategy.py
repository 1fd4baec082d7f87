"""`ParameterServerStrategy`: asynchronous training with variables on ps tasks.

::

    ps 0   v1 v3      ps 1   v2 v4          each applies gradients to its own variables
        ^ |               ^ |
        | v               | v               one message to each ps and back per step:
    worker 0, worker 1, worker 2            gradients there, new values back

Asynchronous: each push is applied when it arrives, so that no worker waits for another one, and
gradients are stale. Synchronous: a ps waits for the gradients of all workers, and applies their
mean.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import collectives as cc
from strategies.averaging.local_replicas import ReplicaGradients
from strategies.checkpoint.boxes import Box, Slice
from strategies.cluster.device_setter import RoundRobin
from strategies.cluster.scopes import PlacementRequest
from strategies.core.array_ops import dtype_name
from strategies.core.process_group import ProcessGroup
from strategies.core.sparse import Rows, checked_rows
from strategies.core.validation import integer, number
from strategies.optimizers import Optimizer
from strategies.parameter_server import push_validation, variable_factory
from strategies.parameter_server.client import Client, ServerStats
from strategies.parameter_server.server import PARAMETERS, ParameterServer, ServerOptions
from strategies.parameter_server.sharded_checkpoint import ShardedCheckpoint
from strategies.parameter_server.staleness import Decision, StalenessRule
from strategies.parameter_server.variable import ServedVariable
from strategies.parameter_server.variable_factory import VariableFactory, VariableSpec
from strategies.remote_optimizers.parameter_host import Parameter, ParameterHost, refuse_others
from strategies.replicas import datasets
from strategies.replicas.context import require_cross_replica
from strategies.replicas.datasets import InputContext, Policy
from strategies.replicas.replica_view import to_host
from strategies.rpc.server import Server
from strategies.strategy.base import Strategy
from strategies.variables import partition
from strategies.variables.partition import Partitioner

__all__ = ["ParameterServerStrategy", "ServerStats"]


class ParameterServerStrategy(Strategy):
    """Training with ps tasks that hold the variables; see the module's docstring.

    All tasks make the strategy and its variables. Then a ps calls `server.join()`, and workers run
    a loop as with other strategies: `run`, then `apply_gradients`, which also brings the copies of
    the variables up to date. Workers are in no step together; an evaluator calls `pull`.

    Args:
        server: of the tasks. *Collective* over all of them.
        optimizer: used on the ps tasks, a copy for each variable, whose `step` counts the updates
            of that variable. None if `DistributedOptimizer(optimizer, strategy=...)` brings it, or
            each variable is given one.
        synchronous: whether an update is made of the gradients of all workers.
        staleness: what becomes of stale gradients: `Drop(most)`, `Scale()`, or None: nothing. Each
            ps judges its part of a gradient by the number of its own updates.
        warmup_steps: updates that the chief makes alone at first. Others wait with their first
            gradient, which is dropped, until then or until the chief has left.
        rate_scale: what the learning rate is multiplied by after the warm-up; such as
            2 / (1 + workers) for asynchronous training, or workers for synchronous training with
            larger batches.
        partitioner: shape and dtype -> number of parts along each axis, 1 but for the first.
        choice: `PlacementRequest` -> index of the ps for a part; `RoundRobin` if None.
        devices: of each worker, a replica on each; "/cpu:0" if None.
        compression: how gradients travel to the ps tasks: `cc.FP16` or `cc.BF16` halve the bytes of
            float32, `cc.BF16.with_feedback()` adds what rounding has left over to the next gradient
            of the variable (not of `Rows`). They are summed and applied in their own dtype.
            None is `cc.NONE`, here and for values.
        value_compression: how values travel from there. The ps tasks keep all digits.
        timeout: seconds that a gradient may wait for those of other workers, or for the end of the
            warm-up; None for any time.
        shared_name: tells strategies of one server apart.

    Raises:
        ValueError: there is no ps or no worker, or an argument cannot be used; on all tasks.
        TypeError: the optimizer is none of `strategies.optimizers`; on all tasks.
        MismatchError: the tasks' arguments differ; on all of them.

    Attributes:
        cluster: jobs and tasks.
        variables: name -> variable.
        optimizer: as given, or brought by `use`; it is copied, and does not change.
        synchronous: as given.
        service: by which the tasks reach each other.
        shared_name: as given.
        last_push: what each ps has made of this worker's last gradients.
        timeout: as given; what follows may wait longer, if it is changed.
    """

    is_in_step = False

    def __init__(
        self,
        server: Server,
        optimizer: Optimizer | None = None,
        *,
        synchronous: bool = False,
        staleness: StalenessRule = None,
        warmup_steps: int = 0,
        rate_scale: float = 1.0,
        partitioner: Partitioner | None = None,
        choice: Callable[[PlacementRequest], int] | None = None,
        devices: Sequence[str] | None = None,
        compression: cc.Compression | None = cc.NONE,
        value_compression: cc.Compression | None = cc.NONE,
        timeout: float | None = 600.0,
        shared_name: str = "parameters",
    ) -> None:
        compression = cc.NONE if compression is None else compression
        value_compression = cc.NONE if value_compression is None else value_compression
        self.cluster = server.cluster
        self.variables: dict[str, ServedVariable] = {}
        self.synchronous = synchronous
        self.service = server.service
        self.shared_name = shared_name
        self.optimizer = optimizer
        self._partitioner = partitioner
        self.timeout = timeout
        self._all = ProcessGroup(self.cluster.comm)
        self._workers = tuple(self.cluster.training_ranks)
        self.last_push: tuple[Decision, ...] = ()
        self._servers = tuple(self.cluster.ranks_of("ps"))
        self._shard: ParameterServer | None = None
        self._all.run_then_agree(
            "ParameterServerStrategy", lambda: self._check(devices, warmup_steps, rate_scale)
        )
        self._client = self._all.run_then_agree(
            "ParameterServerStrategy",
            lambda: Client(server.service, self.cluster, compression, value_compression),
        )
        self._all.agree(
            f"ParameterServerStrategy of {type(optimizer).__name__}, synchronous={synchronous}, "
            f"staleness={staleness}, warmup_steps={warmup_steps}, rate_scale={rate_scale}, "
            f"devices={len(self.devices)}, compression={compression}, "
            f"value_compression={value_compression}, shared_name={shared_name!r}"
        )
        rules = ServerOptions(
            optimizer, synchronous, staleness, warmup_steps, rate_scale, self._workers[0]
        )
        self._all.run_then_agree("ParameterServerStrategy", lambda: self._serve(shared_name, rules))
        self._all.run_then_agree("ParameterServerStrategy", lambda: self._join(shared_name))
        chosen = choice or RoundRobin(len(self._servers))
        self._maker = VariableFactory(self.cluster, self._all, self._shard, self.variables, chosen)
        self._by_parts = ShardedCheckpoint(self.cluster, self._all, self._shard, self.variables)

    def _check(self, devices: Sequence[str] | None, warmup_steps: int, rate_scale: float) -> None:
        if self.optimizer is not None and not isinstance(self.optimizer, Optimizer):
            raise TypeError(
                f"ParameterServerStrategy: expected one of strategies.optimizers, got "
                f"{type(self.optimizer).__name__}"
            )
        number("ParameterServerStrategy", "rate_scale", rate_scale)
        if not self._servers or not self._workers:
            raise ValueError(
                f"ParameterServerStrategy: expected at least one ps and one worker, got "
                f"{len(self._servers)} and {len(self._workers)} ({self.cluster.spec})"
            )
        integer("ParameterServerStrategy", "warmup_steps", warmup_steps, least=0)
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(
                f"ParameterServerStrategy: bad timeout, expected seconds > 0 or None, got "
                f"{self.timeout!r}"
            )
        super().__init__(devices)

    def _serve(self, name: str, rules: ServerOptions) -> None:
        """On a ps: make the place for its variables."""
        if self.cluster.job == "ps":
            own = self.cluster.comm.rank
            _, self._shard = self.service.open(PARAMETERS, {}, name=name, task=own)
            assert self._shard is not None
            self._shard.prepare(rules)

    def _join(self, name: str) -> None:
        """On other tasks: find the ps; on workers: become a member."""
        if self.cluster.job == "ps":
            return
        self._client.open(name)
        if self.cluster.comm.rank in self._workers:
            self._client.join()

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas contribute to one update."""
        workers = len(self._workers) if self.synchronous else 1
        return workers * len(self.devices)

    @property
    def first_replica_id(self) -> int:
        """Number of this process's first replica among all that train."""
        return self._index * len(self.devices)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes what is written once."""
        return self.cluster.is_chief

    @property
    def _index(self) -> int:
        rank = self.cluster.comm.rank
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
        """Make a variable on the ps tasks; *collective* over all tasks.

        Args:
            initial_value: shape (...), or a function that returns it. The chief's counts; the
                others' must have the same shape and dtype. Workers see the variable as an array of
                its library, on their devices. With `shape`, an initializer, such as
                those of `strategies.variables.initializers`: each ps makes its rows by it, and
                nobody else any.
            name: "variable", "variable_1", ... if None.
            dtype: of the variable, that of the initial value if None; float32 for an initializer.
            shape: of the whole, at least one axis; None if the initial value says it.
            optimizer: of this variable, copied; that of the strategy if None.
            resident: whether workers have a copy of all of it. A large table of which a step uses
                a few rows has none: `look_up` gives rows, and its gradients are `Rows`.

        Raises:
            ValueError: the name is taken, or the partitioner's answer is of no use; on all tasks.
            MismatchError: the tasks make variables of other names, shapes or dtypes.

        Cost: a broadcast of the value to all tasks, if it is not made by an initializer.
        """
        require_cross_replica(self, "variable")
        chosen = self._free_name() if name is None else name

        def described() -> VariableSpec:
            self._refuse_taken(chosen)
            variable_factory.refuse_no_optimizer(chosen, optimizer or self.optimizer)
            return variable_factory.wanted(chosen, initial_value, dtype, shape, self._partitioner)

        variable, pieces = self._maker.make(self, chosen, described, resident=resident)
        self._maker.hold(variable, pieces, optimizer or self.optimizer)
        self._client.add(variable)
        self.variables[chosen] = variable
        self._names.add(chosen)
        return variable

    def use(self, optimizer: Optimizer) -> None:
        """Let variables that are made from now on be updated by this optimizer; *collective*.

        Raises:
            ValueError: the strategy has another optimizer; on all tasks.
        """

        def check() -> None:
            if self.optimizer is not None and self.optimizer is not optimizer:
                raise ValueError(
                    f"use: the strategy has another optimizer, expected none or the same, got "
                    f"{type(optimizer).__name__} beside {type(self.optimizer).__name__}"
                )

        self._all.run_then_agree("use", check)
        self._all.agree(f"use of {type(optimizer).__name__}")
        self.optimizer = optimizer

    def host(
        self, parameters: Callable[[], Sequence[Parameter]], *, alike: bool = False
    ) -> ParameterHost:
        """Put the parameters of a model of another library on the ps tasks; *collective*.

        `DistributedOptimizer(optimizer, strategy=...)` does it.

        Args:
            parameters: gives them, the same on all tasks.
            alike: whether all tasks must have the chief's values, since these cannot be changed.

        Raises:
            Exception: what `parameters` raised; on all tasks.
            ValueError: as `variable`; or values are not alike; on all tasks.
        """
        given = self._all.run_then_agree("DistributedOptimizer", parameters)
        made = [self.variable(p.value, name=p.name, optimizer=p.optimizer) for p in given]
        if alike:
            self._all.run_then_agree("DistributedOptimizer", lambda: refuse_others(given, made))
        for variable in made:
            variable.in_place = True  # not to copy a table for the rows of a step
        own = operator.attrgetter("local")
        return ParameterHost(made, value_of=own, push=self._push_at, pull=self.pull)

    def _push_at(
        self, pairs: list[tuple[Any, Any]], rates: Sequence[float | None], examples: Any
    ) -> None:
        """Push gradients of variables that are updated at this worker's rates."""
        for (_, variable), rate in zip(pairs, rates, strict=True):
            variable.learning_rate = rate
        self.apply_gradients(self.optimizer, pairs, examples=examples)

    def pull(self) -> None:
        """Bring the copies of all resident variables up to date.

        Raises:
            UnavailableError: a ps task is lost.
            FailedPreconditionError: this is a ps task.
        """
        self._client.pull()

    def apply_gradients(
        self,
        optimizer: Any,
        grads_and_vars: Iterable[tuple[Any, Any]],
        *,
        examples: Any = None,
    ) -> None:
        """Push gradients to the ps tasks, and bring the copies of the variables up to date.

        May be called inside a replica or outside. Asynchronous: the gradients are applied as they
        come. Synchronous: this waits until all workers that are still training have pushed.

        Args:
            optimizer: the one of the strategy.
            grads_and_vars: pairs of a gradient and a variable of this strategy. A gradient is an
                array, `Rows`, or None, which counts as zero.
            examples: how many rows the gradients are the mean of; those of 0 rows do not count.
                None: all replicas and workers count alike.

        Raises:
            ValueError: a shape, a dtype or the optimizer does not fit, a variable is given twice,
                or belongs to another strategy. Nothing has been pushed.
            TypeError: `examples` is not an integer.
            UnavailableError: a ps task is lost, or counts this worker as gone, since one has not
                heard of the other for longer than the service's timeout; or some ps tasks have
                applied the gradients and others have not, so that all later calls raise this, too.
            DeadlineExceededError: gradients of others have not come in time, or the warm-up was not
                over; says whose, or how far it is. Nothing was applied, and the call may be
                repeated.
            FailedPreconditionError: this task is not a worker, or has left.

        Cost: a message to each ps and back.
        """
        if optimizer is not self.optimizer:
            raise ValueError(
                f"apply_gradients: expected the optimizer that the strategy was made with, got "
                f"another one ({type(optimizer).__name__})"
            )
        none: Any = optimizer  # it may be, if every variable has its own
        super().apply_gradients(none, grads_and_vars, examples=examples)

    def _apply(self, optimizer: Any, replicas: Sequence[ReplicaGradients]) -> None:
        """Check this worker's gradients, and push them."""
        useful, examples = push_validation.checked(replicas, self.variables)
        self.last_push = self._client.push(useful, examples, self.timeout)

    def look_up(self, variable: ServedVariable, indices: Any) -> Any:
        """Return some rows of a variable, without a copy of the whole.

        Args:
            variable: of this strategy, with at least one axis.
            indices: shape (k,), integers from 0; repetitions are allowed.

        Returns:
            Shape (k, ...), new memory, of the library and on the device of the variable's `value`.

        Raises:
            ValueError: an index is out of range.
            UnavailableError: a ps task is lost.
        """
        chosen = to_host(indices)
        like = np.broadcast_to(np.zeros((), variable.dtype), (*chosen.shape, *variable.shape[1:]))
        rows = Rows(chosen, like)
        where = f"variable: {variable.name}"
        checked_rows(rows, variable.shape, dtype_name(variable), "look_up", where)
        return variable.seen(self._client.rows(variable, rows.indices), self)

    def assign(self, variable: ServedVariable, value: Any) -> None:
        """Let a variable take another value; see `ServedVariable.assign`."""
        array = np.asarray(to_host(value), variable.dtype)
        partition.check_shape("assign", array, variable.shape, variable.name)
        self._client.assign(variable, array)
        if variable.resident:
            variable.apply_reply(array.copy())

    def reports(self) -> list[ServerStats]:
        """Return what each ps task has done so far; not on a ps task."""
        return self._client.reports()

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """Return all that training needs to go on from here, for a checkpoint; not on a ps task.

        Of each ps it is the state between two updates. If it is called by a worker that trains
        synchronously, all are from between the same two.

        Returns:
            `variable/<name>` and, for every slot, `optimizer/<slot>/<name>`, of the variable's
            shape; counts of updates, see `strategies.parameter_server.state_io`. All of it is in
            the memory of this task.

        Raises:
            UnavailableError: a ps task is lost.
        """
        return self._client.state_dict()

    def load_state_dict(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Let training go on from a state, also of other numbers of ps tasks and parts.

        One task calls it, such as the chief, before the workers compute gradients; then the others
        `pull`. Steps of the learning rate's schedule and of a warm-up are counted on.

        Raises:
            ValueError: the state is of other variables or of another optimizer. Nothing has
                changed.
            FailedPreconditionError: gradients wait to be applied.
            UnavailableError: a ps task is lost.
        """
        self._client.load_state_dict(state)

    def state_slices(self) -> dict[str, Slice]:
        """Return what this ps holds of `state_dict`, for a checkpoint by parts; *collective*.

        All tasks save together, `CheckpointManager(path, cluster.comm).save(...)`, so that no task
        needs the memory for a whole variable. A ps waits for all tasks, so its state contains all
        updates that the workers made before this call. Variables are views, slots are copies. The
        result is empty on other tasks. No worker may train meanwhile: an update would first copy
        what is still held.

        Raises:
            ValueError: this ps has several parts of one variable: a slice is one box.
            MismatchError: the strategy is synchronous, and ps tasks have made different numbers of
                updates; on all tasks.
        """
        return self._by_parts.slices()

    def state_boxes(self) -> dict[str, Box]:
        """Return what each task needs of a checkpoint for `load_state_slices`; *collective*.

        Returns:
            Name of a variable or slot -> the elements that this ps holds, none on other tasks; for
            `CheckpointManager.restore_or_none(slices=...)`, which gives everybody the rest.
        """
        return self._by_parts.boxes()

    def load_state_slices(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Let this ps go on from its part of a state; nothing happens on other tasks.

        Afterwards, when all ps tasks have done so, workers `pull`.

        Args:
            state: the elements of `state_boxes`, and the whole of what these do not name.

        Raises:
            ValueError: the state is of other variables or of another optimizer.
        """
        self._by_parts.load(state)

    def leave(self) -> None:
        """Contribute no more gradients: others do not wait for this worker from now on.

        The end of the server's block does so, too. Harmless when repeated. Gradients that another
        thread has pushed and that wait for those of others are not applied: its `apply_gradients`
        raises `FailedPreconditionError`.
        """
        self._client.leave()

    def distribute_dataset(
        self, batches: Iterable[Any], *, policy: Policy = "auto"
    ) -> Iterator[Any]:
        """Give this worker's replicas their rows of every global batch; see `Strategy`.

        Nothing is exchanged. A task that does not train gets all rows.

        Raises:
            ValueError: the policy is neither "data" nor "auto", which is "data" here: workers are
                not in step.
        """
        ranks = ProcessGroup(self.cluster.workers)
        parts = datasets.of_same_batches(batches, ranks, len(self.devices), policy)
        return self._on_devices(parts)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]]
    ) -> Iterator[Any]:
        """Let each worker read its own part of the data; workers do not wait for each other.

        Args:
            dataset_fn: makes this worker's batches, of which each of its replicas takes one in a
                step; told by an `InputContext` which part to read.
        """
        workers = len(self._workers)
        context = InputContext(workers, self._index, workers * len(self.devices))
        parts = datasets.from_function(dataset_fn(context), ProcessGroup(), len(self.devices))
        return self._on_devices(parts)
