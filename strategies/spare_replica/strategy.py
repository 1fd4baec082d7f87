"""`SpareReplicaStrategy`: synchronous training that skips the slowest replicas."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import collectives as cc
from collectives import extend
from strategies.core import gradient_sums
from strategies.core.process_group import ProcessGroup
from strategies.core.validation import integer
from strategies.optimizers import Optimizer
from strategies.optimizers.gradient_pairs import Pair, resolve, split
from strategies.remote_optimizers.parameter_host import HostingStrategy, Parameter, ParameterHost
from strategies.replicas import context
from strategies.replicas.context import require_cross_replica
from strategies.replicas.datasets import InputContext
from strategies.rpc.service import Service
from strategies.spare_replica.steps import SpareSteps, StepReport

__all__ = ["SpareReplicaStrategy"]


class SpareReplicaStrategy(HostingStrategy):
    """Synchronous training that needs only some of the replicas per step; the rest are *spare*.

    Every rank is a *worker* with one replica on one device; rank 0 is also the *chief*. A worker
    computes a gradient and sends it in `apply_gradients`. After `replicas_to_aggregate` gradients
    of the current step, the chief updates its variables by their mean. The waiting workers receive
    the new values. Later gradients of this step are dropped, and their workers receive the newest
    values. Every gradient that is used was computed from the newest values.

    With fewer workers than `replicas_to_aggregate`, fast workers compute several gradients per
    step.

    The replicas are not in step: `run`, `reduce` and `gather` act on this rank alone. `variable` is
    collective and uses the chief's value. `apply_gradients` changes variables on all ranks; other
    writes change this rank's variable only.

    Open it with `with` on all ranks. *Collective*: construction, and the end of the block, which
    waits until all ranks have reached it or are dead.

    Args:
        replicas_to_aggregate: number of gradients per step; None for one per rank.
        comm: communicator; None for all ranks of the job.
        tasks: ranks that average gradients. Each handles some of the variables, which spreads the
            load of large models.
        global_step: first step; above 0 when training resumes from a checkpoint.
        timeout: seconds without a sign of life after which a rank that owes a reply counts as
            unreachable.
        device: device of this rank's replica, one of `strategies.devices()`, for its variables and
            batches; None for "/cpu:0". The chief averages and updates in host memory.

    Raises:
        ValueError: `replicas_to_aggregate` or `global_step` is invalid, or a task or the device
            does not exist; on all ranks.
        MismatchError: the arguments differ among ranks; on all ranks.

    Attributes:
        replicas_to_aggregate: number of gradients per step.
        total_num_replicas: number of workers.
        service: service of the strategy; you may use it for other purposes.
    """

    def __init__(
        self,
        replicas_to_aggregate: int | None = None,
        *,
        comm: cc.Communicator | None = None,
        tasks: Sequence[int] = (0,),
        global_step: int = 0,
        timeout: float = 60.0,
        device: str | None = None,
    ) -> None:
        comm = extend.comm_or_world(comm, "SpareReplicaStrategy")
        everyone = ProcessGroup(comm)
        # Before the next lines, because the base sets `_everyone` to this process alone.
        everyone.run_then_agree("SpareReplicaStrategy", lambda: self._be_on(device))
        self._everyone = self._trainers = everyone
        self.total_num_replicas = comm.size
        self.replicas_to_aggregate = (
            comm.size if replicas_to_aggregate is None else replicas_to_aggregate
        )
        self._tasks = tuple(tasks)
        self._everyone.run_then_agree("SpareReplicaStrategy", lambda: self._check(global_step))
        # The text contains the options that must be equal: other ones raise `MismatchError`.
        self._everyone.agree(
            f"SpareReplicaStrategy with replicas_to_aggregate={self.replicas_to_aggregate}, "
            f"tasks={self._tasks}, global_step={global_step}"
        )
        self.service = Service(comm, timeout=timeout)
        self._steps = SpareSteps(
            self.service, aggregate=self.replicas_to_aggregate, tasks=self._tasks, step=global_step
        )
        # Optimizer and variables of the first call; later calls must pass the same.
        self._optimizer: Any = None
        self._keys: list[str] = []
        self._closed = False
        # From now on the chief detects the death of any worker, because all have sent a heartbeat.
        self._everyone.agree("SpareReplicaStrategy: all take part")

    def __enter__(self) -> SpareReplicaStrategy:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            # First, while the service still sends: the chief then knows the reason.
            self._steps.abort(f"{type(error).__name__}: {error}")
            self.service.__exit__(kind, error, trace)
            # Last: leaving the service ends the requests for which the chief's thread waits.
            self._steps.stop()

    @property
    def local_step(self) -> int:
        """Step of this worker's values."""
        return self._steps.local_step

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of gradients that contribute to one step."""
        return self.replicas_to_aggregate

    def _input_context(self) -> InputContext:
        return InputContext(
            self.total_num_replicas, self._trainers.rank, self.replicas_to_aggregate
        )

    def apply_gradients(
        self,
        optimizer: Any,
        grads_and_vars: Iterable[tuple[Any, Any]],
        *,
        examples: Any = None,
    ) -> None:
        """Send a gradient, and wait for newer values.

        Afterwards the variables have these values, and `local_step` is their step. Not collective:
        a worker that is slow or stops calling delays no step while enough other workers call. The
        chief starts to make steps at its own first call.

        Args:
            optimizer: one of `strategies.optimizers`, the same in all calls. Only the chief's
                optimizer is used; it updates the chief's variables.
            grads_and_vars: pairs of a gradient and a variable, on one device; the same variables on
                all ranks and in all calls. A gradient is an array, `Rows`, or None, which counts as
                zero. `Rows` are averaged per index, over the gradients that contain the index.
            examples: number of rows that the gradients average; a step then uses the mean over all
                rows. Gradients of 0 rows count towards the step, and change nothing. None weights
                all gradients equally. Either all workers pass a number, or none.

        Raises:
            ValueError: a gradient does not fit, the variables or the optimizer differ from the
                first call, or `examples` is not a number >= 0.
            InvalidArgumentError: only some workers pass `examples`.
            UnavailableError: the chief or an averaging task cannot be reached; or too many workers
                are dead or have failed.
            OutOfRangeError: too many workers have left.
            OpError: the chief's update has failed; on all ranks.
        """
        pairs = self._check_pairs(optimizer, grads_and_vars, examples)
        if not self._steps.started:
            # At the first call, because only then the variables and the optimizer are known.
            self._steps.start(optimizer, pairs)
            self._optimizer, self._keys = optimizer, [pair.key for pair in pairs]
        self._steps.deliver(pairs, examples)

    def _host(self, parameters: Sequence[Parameter]) -> ParameterHost:
        made = [self.variable(p.value, name=p.name) for p in parameters]
        # One optimizer for the chief's loop, which updates all variables in one call.
        optimizer = _PerVariableOptimizer({p.name: p.optimizer for p in parameters})

        def push(pairs: Any, rates: Any, examples: Any) -> None:  # the chief's rates count
            self.apply_gradients(optimizer, pairs, examples=examples)

        # Values are sent with steps only, so a pull has no newer values to fetch.
        return ParameterHost(made, operator.attrgetter("value"), push, pull=lambda: None)

    def report(self) -> StepReport:
        """Return the use of all gradients so far.

        Raises:
            UnavailableError: the chief cannot be reached.
        """
        return self._steps.report()

    def close(self) -> None:
        """Leave, and wait until all other ranks have left or are dead; harmless when repeated.

        *Collective*. The chief makes steps until all workers have left.
        """
        if not self._closed:
            self._closed = True
            self._steps.leave()
            # The service afterwards: the chief makes steps until all workers have left.
            self.service.close()

    def _be_on(self, device: str | None) -> None:
        super().__init__(None if device is None else [device])

    def _check(self, step: int) -> None:
        integer("SpareReplicaStrategy", "replicas_to_aggregate", self.replicas_to_aggregate)
        integer("SpareReplicaStrategy", "global_step", step, least=0)
        known = range(self.total_num_replicas)
        # Different and existing at once: the intersection is smaller otherwise.
        if not self._tasks or len({*self._tasks} & {*known}) != len(self._tasks):
            raise ValueError(
                f"SpareReplicaStrategy: bad tasks, expected different ones of 0 .. "
                f"{self.total_num_replicas - 1}, got {self._tasks}"
            )

    def _check_pairs(self, optimizer: Any, grads_and_vars: Any, examples: Any) -> list[Pair]:
        """Check that variables and optimizer are those of the first call, and return the pairs."""
        top = context.current()
        if top is None or top.replica is None:
            # Allowed inside a replica as well: each rank has one replica and waits on its own.
            require_cross_replica(self, "apply_gradients")
        gradient_sums.check_examples(examples)
        pairs = resolve(grads_and_vars, "apply_gradients")
        keys = [pair.key for pair in pairs]
        if not keys or (self._keys and keys != self._keys):
            raise ValueError(
                f"apply_gradients: expected the same variables in all calls, with None for those "
                f"without a gradient: {self._keys or 'at least one'}, got {keys}"
            )
        if self._keys and self._optimizer is not optimizer:
            # The chief's loop holds the optimizer of the first call.
            raise ValueError(
                f"apply_gradients: expected the optimizer of the first call, got another one "
                f"({type(optimizer).__name__})"
            )
        return pairs


class _PerVariableOptimizer:
    """Several variables' optimizers, with the interface of one optimizer.

    Args:
        optimizers: name of a variable -> its optimizer; variables may share one.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = dict(optimizers)
        self.step = 0

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
        """Update every variable with its optimizer."""
        shares: dict[int, list[tuple[Any, Any]]] = {}
        pairs = [split(x, "apply_gradients", i) for i, x in enumerate(grads_and_vars)]
        for gradient, variable in pairs:
            # By identity: several variables may share an optimizer, whose step counts once.
            number = id(self._optimizers[variable.name])
            shares.setdefault(number, []).append((gradient, variable))
        for optimizer in self._all():
            optimizer.apply_gradients(shares.get(id(optimizer), []))
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimizer, with the optimizer's number as prefix of each key."""
        states = [optimizer.state_dict() for optimizer in self._all()]
        found = {f"{n}/{key}": value for n, own in enumerate(states) for key, value in own.items()}
        return {"step": self.step, **found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        for number, optimizer in enumerate(self._all()):
            start = f"{number}/"
            own = {key[len(start) :]: v for key, v in state.items() if key.startswith(start)}
            optimizer.load_state_dict(own)
        self.step = int(state["step"])

    def _all(self) -> list[Optimizer]:
        """Return the distinct optimizers in the order of the variables."""
        return list({id(o): o for o in self._optimizers.values()}.values())
