"""`ParameterServerStrategy`: asynchronous training with variables on ps tasks.

::

    ps 0   v1 v3      ps 1   v2 v4          each applies gradients to its own variables
        ^ |               ^ |
        | v               | v               one message to each ps and back per step:
    worker 0, worker 1, worker 2            gradients there, new values back

Asynchronous: each push is applied on arrival. Workers never wait for each other, and gradients are
stale. Synchronous: a ps waits for the gradients of all workers and applies their mean.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import collectives as cc
from strategies.averaging.local_replicas import ReplicaGradients, mean_over_replicas
from strategies.cluster.scopes import PlacementRequest
from strategies.core.array_ops import dtype_name
from strategies.core.sparse import Gradient, Rows, checked_rows
from strategies.optimizers import Optimizer
from strategies.parameter_server.client import ServerStats
from strategies.parameter_server.options import ServingOptions, TrainingOptions
from strategies.parameter_server.served_variables import ServedVariables
from strategies.parameter_server.staleness import Decision, StalenessRule
from strategies.parameter_server.variable import ServedVariable
from strategies.remote_optimizers.parameter_host import Parameter, ParameterHost
from strategies.replicas.datasets import InputContext
from strategies.replicas.replica_view import to_host
from strategies.rpc.server import Server
from strategies.variables.partition import Partitioner

__all__ = ["ParameterServerStrategy", "ServerStats"]


class ParameterServerStrategy(ServedVariables):
    """Training with ps tasks that hold the variables; see the module's docstring.

    All tasks create the strategy and its variables. Then ps tasks call `server.join()`, and workers
    run the usual loop: `run`, then `apply_gradients`, which also updates the copies of the
    variables. Workers are not in step. An evaluator calls `pull`.

    Args:
        server: server of the tasks. *Collective* over all of them.
        optimizer: optimizer, copied on the ps tasks for each variable, whose updates its `step`
            counts. None if `DistributedOptimizer(optimizer, strategy=...)` sets it, or if each
            variable has its own.
        synchronous: whether an update uses the gradients of all workers.
        staleness: treatment of stale gradients: `Drop(most)`, `Scale()`, or None to apply all in
            full. Each ps determines the staleness of its part of a gradient from its own updates.
        warmup_steps: number of initial updates by the chief alone. Other workers wait with their
            first gradient, which is dropped, until the warm-up ends or the chief has left.
        rate_scale: factor of the learning rate after the warm-up, such as 2 / (1 + workers) for
            asynchronous training, or workers for synchronous training with larger batches.
        partitioner: shape and dtype -> number of parts along each axis, 1 except for the first.
        choice: `PlacementRequest` -> index of the ps for a part; None for `RoundRobin`.
        devices: devices of each worker, with one replica each; None for "/cpu:0".
        compression: compression of gradients. `cc.FP16` and `cc.BF16` halve the bytes of float32.
            `cc.BF16.with_feedback()` adds the rounding error to the variable's next gradient,
            except for `Rows`. Sums and updates use the variable's dtype. None is `cc.NONE`, also
            for `value_compression`.
        value_compression: compression of values sent to workers; ps tasks keep full precision.
        timeout: seconds that a gradient may wait for other workers or for the end of the warm-up;
            None for no limit.
        shared_name: distinguishes the strategies of one server.

    Raises:
        ValueError: the cluster has no ps or no worker, or an argument is invalid; on all tasks.
        TypeError: the optimizer is not one of `strategies.optimizers`; on all tasks.
        MismatchError: the tasks' arguments differ; on all tasks.

    Attributes:
        cluster: jobs and tasks.
        variables: name -> variable.
        optimizer: optimizer, from the argument or `use`; it is copied and does not change.
        synchronous: whether an update uses the gradients of all workers.
        service: service of the tasks.
        shared_name: name of the strategy on the server.
        last_push: decision of each ps about this worker's last gradients.
        timeout: seconds, from the argument; you may change it for later calls.
    """

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
        self.synchronous = synchronous
        self.timeout = timeout
        self.last_push: tuple[Decision, ...] = ()
        serving = ServingOptions(
            shared_name, partitioner, choice, compression or cc.NONE, value_compression or cc.NONE
        )
        super().__init__(server, optimizer, serving, devices)

        def options() -> TrainingOptions:
            if timeout is not None and not timeout > 0:
                raise ValueError(
                    f"ParameterServerStrategy: bad timeout, expected seconds > 0 or None, got "
                    f"{timeout!r}"
                )
            # The first training task is the chief, or worker 0 without one.
            return TrainingOptions(
                optimizer, synchronous, staleness, warmup_steps, rate_scale, self._workers[0]
            )

        # Checked on all tasks before the agreement below, which waits for all of them.
        training = self._everyone.run_then_agree("ParameterServerStrategy", options)
        # The text contains the options that must be equal: other ones raise `MismatchError`.
        self._everyone.agree(
            f"ParameterServerStrategy of {type(optimizer).__name__}, synchronous={synchronous}, "
            f"staleness={staleness}, warmup_steps={warmup_steps}, rate_scale={rate_scale}, "
            f"devices={len(self.devices)}, compression={serving.compression}, "
            f"value_compression={serving.value_compression}, shared_name={shared_name!r}"
        )
        # Last, when all tasks are known to agree: it opens the servers and registers the workers.
        self._open(training)

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that contribute to one update."""
        # An asynchronous update uses the gradients of one worker.
        workers = len(self._workers) if self.synchronous else 1
        return workers * len(self.devices)

    def apply_gradients(
        self,
        optimizer: Any,
        grads_and_vars: Iterable[tuple[Any, Any]],
        *,
        examples: Any = None,
    ) -> None:
        """Push gradients to the ps tasks, and update the copies of the variables.

        You may call it inside or outside a replica. Asynchronous: gradients are applied on arrival.
        Synchronous: the call waits until all workers that are still training have pushed.

        Args:
            optimizer: optimizer of the strategy, or of all variables in `grads_and_vars` if they
                have their own. Each variable is updated by its own optimizer in both cases.
            grads_and_vars: pairs of a gradient and a variable of this strategy. A gradient is an
                array, `Rows`, or None, which counts as zero.
            examples: number of rows that the gradients average; gradients of 0 rows do not count.
                None weights all replicas and workers equally.

        Raises:
            ValueError: a shape, a dtype or the optimizer does not fit, a variable occurs twice, or
                belongs to another strategy. Nothing was pushed.
            TypeError: `examples` is not an integer.
            UnavailableError: a ps task is lost, or has removed this worker after a silence longer
                than the service's timeout; or only some ps tasks applied the gradients, after which
                all later calls raise as well.
            DeadlineExceededError: gradients of other workers are missing, or the warm-up has not
                ended; the message gives the missing tasks or the progress. Nothing was applied, and
                you may repeat the call.
            FailedPreconditionError: this task is not a worker, or has left.
            DataLossError: an earlier update changed only some variables of a ps.

        Cost: one message to each ps and one back.
        """
        pairs = list(grads_and_vars)
        # The ps tasks have copies of these optimizers, so no other one can be applied.
        own = {id(getattr(variable, "optimizer", None)) for _, variable in pairs}
        if optimizer is not self.optimizer and own != {id(optimizer)}:
            raise ValueError(
                f"apply_gradients: expected the optimizer of the strategy or of all these "
                f"variables, got another one ({type(optimizer).__name__})"
            )
        none: Any = optimizer  # may be None if every variable has its own
        super().apply_gradients(none, pairs, examples=examples)

    def _apply(self, optimizer: Any, replicas: Sequence[ReplicaGradients]) -> None:
        """Check this worker's gradients and push them."""
        # Checked before the first message, so that a wrong gradient reaches no ps.
        useful, examples = _checked(replicas, self.variables)
        self.last_push = self._client.push(useful, examples, self.timeout)

    def use(self, optimizer: Optimizer) -> None:
        """Set the optimizer for variables created from now on; *collective*.

        Raises:
            ValueError: the strategy has another optimizer; on all tasks.
        """

        def check() -> None:
            if self.optimizer is not None and self.optimizer is not optimizer:
                raise ValueError(
                    f"use: the strategy has another optimizer, expected none or the same, got "
                    f"{type(optimizer).__name__} beside {type(self.optimizer).__name__}"
                )

        self._everyone.run_then_agree("use", check)
        self._everyone.agree(f"use of {type(optimizer).__name__}")
        self.optimizer = optimizer

    def _host(self, parameters: Sequence[Parameter]) -> ParameterHost:
        made = [self.variable(p.value, name=p.name, optimizer=p.optimizer) for p in parameters]
        for variable in made:
            variable.in_place = True  # avoids a copy of a whole table for the rows of a step

        def push(pairs: Any, rates: Sequence[float | None], examples: Any) -> None:
            for variable, rate in zip(made, rates, strict=True):
                # Sent with the gradients, because the schedule runs in the wrapped optimizer of the
                # worker.
                variable.learning_rate = rate
            self.apply_gradients(self.optimizer, pairs, examples=examples)

        return ParameterHost(made, operator.attrgetter("local"), push, self.pull)

    def reports(self) -> list[ServerStats]:
        """Return the statistics of each ps task; not on a ps task."""
        return self._client.reports()

    def leave(self) -> None:
        """Stop contributing gradients: other workers no longer wait for this worker.

        The end of the server's block also does this. Harmless when repeated. If another thread has
        pushed gradients that still wait for other workers, they are dropped, and its
        `apply_gradients` raises `FailedPreconditionError`.
        """
        self._client.leave()

    def _input_context(self) -> InputContext:
        workers = len(self._workers)
        return InputContext(workers, self._index, workers * len(self.devices))


def _checked(
    replicas: Sequence[ReplicaGradients], variables: Mapping[str, ServedVariable]
) -> tuple[list[tuple[Gradient, ServedVariable]], int | None]:
    """Check a worker's gradients, and return their mean over its replicas in host memory.

    Args:
        replicas: gradients of this worker's replicas.
        variables: variables of the strategy, by name.

    Returns:
        Pairs of gradient and variable, empty for a mean over 0 rows; number of examples.

    Raises:
        ValueError: a shape or dtype does not fit, a variable occurs twice or belongs to another
            strategy.
        TypeError: `examples` is not an integer.
    """
    own = mean_over_replicas(replicas)
    pairs = []
    names: set[str] = set()
    for gradient, variable in own.pairs:
        known = variables.get(getattr(variable, "name", ""))
        if known is None or known is not variable:
            # The same name may belong to a variable of another strategy.
            raise ValueError(
                f"apply_gradients: expected a variable of this strategy, got {variable!r:.200}"
            )
        if known.name in names:
            raise ValueError(f"apply_gradients: a variable is given twice (variable: {known.name})")
        names.add(known.name)
        if gradient is not None:
            given = _on_host(gradient)
            where = f"variable: {known.name}"
            checked_rows(given, known.shape, dtype_name(known), "apply_gradients", where)
            pairs.append((given, known))
    examples = _count(own.examples)
    # A mean over no rows may be NaN. The push itself is still needed, for the round and for new
    # values.
    return [] if examples == 0 else pairs, examples


def _on_host(gradient: Any) -> Gradient:
    """Return a gradient in host memory."""
    if isinstance(gradient, Rows):
        return Rows(gradient.indices, to_host(gradient.values))
    return to_host(gradient)


def _count(examples: Any) -> int | None:
    """Return a number of examples as an int, or None."""
    try:
        # Integers of any library; msgpack could not encode those of NumPy.
        return None if examples is None else operator.index(examples)
    except TypeError:
        raise TypeError(
            f"apply_gradients: bad examples, expected an integer >= 0, got {examples!r}"
        ) from None
