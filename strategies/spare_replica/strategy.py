"""`SpareReplicaStrategy`: synchronous training that skips the slowest replicas."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import collectives as cc
from strategies.core import gradient_sums
from strategies.core.process_group import ProcessGroup
from strategies.core.validation import integer
from strategies.optimizers import Optimizer
from strategies.optimizers.gradient_pairs import Pair, resolve, split
from strategies.remote_optimizers.parameter_host import Parameter, ParameterHost, refuse_others
from strategies.replicas import context, datasets
from strategies.replicas.context import require_cross_replica
from strategies.replicas.datasets import InputContext, Policy
from strategies.rpc.service import Service
from strategies.spare_replica.steps import SpareSteps, StepReport
from strategies.strategy.base import Strategy

__all__ = ["SpareReplicaStrategy"]


class SpareReplicaStrategy(Strategy):
    """A step is made as soon as some of the replicas have a gradient; the others are *spare*.

    Every rank is a *worker* with one replica, on one device; rank 0 is also the *chief*. A worker
    computes a gradient and delivers it by `apply_gradients`. When `replicas_to_aggregate` gradients
    of the current step are in, the chief updates its variables by their mean, and each worker that
    waits goes on with the new values. A gradient that comes later is dropped, and its worker goes
    on with the newest values. So each gradient that is used was computed from the newest values.

    If there are fewer workers than `replicas_to_aggregate`, the fast ones compute several gradients
    for one step.

    The replicas are not in step: `run`, `reduce` and `gather` concern this rank alone. All ranks
    make a `variable` together, with the chief's value; it changes by `apply_gradients`, and other
    writes to it concern this rank alone.

    Open it with `with` on all ranks. *Collective*: its construction and the end of the block, which
    waits until all have come there or are dead.

    Args:
        replicas_to_aggregate: how many gradients make a step; all replicas' if None.
        comm: the ranks; those of the job if None.
        tasks: ranks on which gradients are averaged. Each takes some of the variables, so that
            large models are averaged in several places.
        global_step: the first step; not 0 if training goes on from a checkpoint.
        timeout: seconds without a sign of life after which a rank that owes an answer counts as
            unreachable.
        device: of this rank's replica, one of `strategies.devices()`, where its variables and
            batches go; "/cpu:0" if None. The chief averages and updates in host memory.

    Raises:
        ValueError: `replicas_to_aggregate` is not a number of gradients, or there are no such
            tasks, or no such device; on all ranks.
        MismatchError: the ranks mean different things; on all ranks.

    Attributes:
        replicas_to_aggregate: how many gradients make a step.
        total_num_replicas: number of workers.
        service: the one that it works with, which may be used for other things.
    """

    is_in_step = False

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
        comm = cc.init() if comm is None else comm
        everyone = ProcessGroup(comm)
        everyone.run_then_agree("SpareReplicaStrategy", lambda: self._be_on(device))
        self._everyone = everyone
        self.total_num_replicas = comm.size
        self.replicas_to_aggregate = (
            comm.size if replicas_to_aggregate is None else replicas_to_aggregate
        )
        self._tasks = tuple(tasks)
        self._everyone.run_then_agree("SpareReplicaStrategy", lambda: self._check(global_step))
        self._everyone.agree(
            f"SpareReplicaStrategy with replicas_to_aggregate={self.replicas_to_aggregate}, "
            f"tasks={self._tasks}, global_step={global_step}"
        )
        self.service = Service(comm, timeout=timeout)
        self._steps = SpareSteps(
            self.service, aggregate=self.replicas_to_aggregate, tasks=self._tasks, step=global_step
        )
        self._optimizer: Any = None
        self._keys: list[str] = []
        self._closed = False
        self._everyone.agree("SpareReplicaStrategy: all take part")

    def __enter__(self) -> SpareReplicaStrategy:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            self._steps.abort(f"{type(error).__name__}: {error}")
            self.service.__exit__(kind, error, trace)
            self._steps.stop()

    @property
    def local_step(self) -> int:
        """Step of the values that this worker has."""
        return self._steps.local_step

    @property
    def num_replicas_in_sync(self) -> int:
        """How many gradients contribute to one step."""
        return self.replicas_to_aggregate

    def distribute_dataset(
        self, batches: Iterable[Any], *, policy: Policy = "auto"
    ) -> Iterator[Any]:
        """Give this worker its rows of every global batch; see `Strategy`.

        Raises:
            ValueError: the policy is neither "data" nor "auto", which is "data" here: workers are
                not in step.
        """
        return self._on_devices(datasets.of_same_batches(batches, self._everyone, 1, policy))

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]]
    ) -> Iterator[Any]:
        """Let each worker read its own part of the data, at its own pace."""
        worker = self._everyone.rank
        part = InputContext(self.total_num_replicas, worker, self.replicas_to_aggregate)
        return self._on_devices(datasets.from_function(dataset_fn(part), self.ranks, 1))

    def apply_gradients(
        self,
        optimizer: Any,
        grads_and_vars: Iterable[tuple[Any, Any]],
        *,
        examples: Any = None,
    ) -> None:
        """Deliver a gradient, and wait until there are newer values.

        At its end the variables have these values, and `local_step` says which. Not collective: a
        worker that is slow, or does not call it any more, holds up nobody, as long as enough others
        do. The chief begins to make steps at its own first call.

        Args:
            optimizer: one of `strategies.optimizers`, the same in all calls. The chief's updates
                its variables; those of other ranks are not used.
            grads_and_vars: pairs of a gradient and a variable, on one device; the same variables on
                all ranks and in all calls. A gradient may be an array, `Rows`, or None, which
                counts as zero; `Rows` are averaged index by index, over the gradients that had it.
            examples: how many rows the gradients are the mean of: the mean of a step is then over
                its rows. Gradients of 0 rows are among those that make a step, and change nothing.
                None: all gradients count alike; so all workers give a number, or none does.

        Raises:
            ValueError: a gradient does not fit, or other variables, another optimizer, or
                `examples` is not a number >= 0.
            InvalidArgumentError: only some workers say how many examples.
            UnavailableError: the chief, or a task that averages, cannot be reached; or so many
                workers are dead or have failed that no step can be made.
            OutOfRangeError: no step can be made because too many workers have left.
            OpError: the chief's update has failed; on all ranks.
        """
        pairs = self._check_pairs(optimizer, grads_and_vars, examples)
        if not self._steps.started:
            self._steps.start(optimizer, pairs)
            self._optimizer, self._keys = optimizer, [pair.key for pair in pairs]
        self._steps.deliver(pairs, examples)

    def use(self, optimizer: Any) -> None:
        """Do nothing: the optimizer is that of `apply_gradients`."""

    def host(
        self, parameters: Callable[[], Sequence[Parameter]], *, alike: bool = False
    ) -> ParameterHost:
        """Make the parameters of a model of another library variables; *collective*.

        `DistributedOptimizer(optimizer, strategy=...)` does it.

        Args:
            parameters: gives them, the same on all ranks.
            alike: whether all ranks must have the chief's values, since these cannot be changed.

        Raises:
            Exception: what `parameters` raised; on all ranks.
            ValueError: as `variable`; or values are not alike; on all ranks.
        """
        given = self._everyone.run_then_agree("DistributedOptimizer", parameters)
        made = [self.variable(p.value, name=p.name) for p in given]
        if alike:
            self._everyone.run_then_agree(
                "DistributedOptimizer", lambda: refuse_others(given, made)
            )
        optimizer = _PerVariableOptimizer({p.name: p.optimizer for p in given})

        def push(pairs: Any, rates: Any, examples: Any) -> None:  # the chief's rates count
            self.apply_gradients(optimizer, pairs, examples=examples)

        # A worker has the values of its step, and cannot learn of others before the next one.
        value = operator.attrgetter("value")
        return ParameterHost(made, value_of=value, push=push, pull=lambda: None)

    def report(self) -> StepReport:
        """Return what became of the gradients so far.

        Raises:
            UnavailableError: the chief cannot be reached.
        """
        return self._steps.report()

    def close(self) -> None:
        """Leave, and wait until all others have left or are dead; harmless when repeated.

        *Collective*. The chief makes steps until then.
        """
        if not self._closed:
            self._closed = True
            self._steps.leave()
            self.service.close()

    def _be_on(self, device: str | None) -> None:
        super().__init__(None if device is None else [device])

    def _check(self, step: int) -> None:
        integer("SpareReplicaStrategy", "replicas_to_aggregate", self.replicas_to_aggregate)
        integer("SpareReplicaStrategy", "global_step", step, least=0)
        known = range(self.total_num_replicas)
        if not self._tasks or len({*self._tasks} & {*known}) != len(self._tasks):
            raise ValueError(
                f"SpareReplicaStrategy: bad tasks, expected different ones of 0 .. "
                f"{self.total_num_replicas - 1}, got {self._tasks}"
            )

    def _check_pairs(self, optimizer: Any, grads_and_vars: Any, examples: Any) -> list[Pair]:
        """Return the pairs, if everything is as in the other calls."""
        top = context.current()
        if top is None or top.replica is None:
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
            raise ValueError(
                f"apply_gradients: expected the optimizer of the first call, got another one "
                f"({type(optimizer).__name__})"
            )
        return pairs


class _PerVariableOptimizer:
    """The optimizers of several variables, with the interface of one optimizer.

    Args:
        optimizers: name of a variable -> its optimizer; variables may share one.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = dict(optimizers)
        self.step = 0

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
        """Update every variable by its optimizer."""
        shares: dict[int, list[tuple[Any, Any]]] = {}
        pairs = [split(x, "apply_gradients", i) for i, x in enumerate(grads_and_vars)]
        for gradient, variable in pairs:
            number = id(self._optimizers[variable.name])
            shares.setdefault(number, []).append((gradient, variable))
        for optimizer in self._all():
            optimizer.apply_gradients(shares.get(id(optimizer), []))
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimizer, with its number before each key."""
        states = [optimizer.state_dict() for optimizer in self._all()]
        found = {f"{n}/{key}": value for n, own in enumerate(states) for key, value in own.items()}
        return {"step": self.step, **found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for number, optimizer in enumerate(self._all()):
            start = f"{number}/"
            own = {key[len(start) :]: v for key, v in state.items() if key.startswith(start)}
            optimizer.load_state_dict(own)
        self.step = int(state["step"])

    def _all(self) -> list[Optimizer]:
        """Return the distinct optimizers in the order of the variables."""
        return list({id(o): o for o in self._optimizers.values()}.values())
