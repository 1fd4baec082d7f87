"""`DistributedOptimizer` for PyTorch.

What `.grad` holds::

         backward, enough passes: average of all ranks
    OWN ----------------------------------------------> AVERAGED <-- looks at them -- ASKED
     ^ \\  too few passes                                |    \\                         ^
     |  `---------------> ADDED ----- backward ------->-+     `---- a scaler asks ------'
     |                      |                           |
     `------- step ---------+--------- step ------------'

A step or `synchronize` after a backward pass goes to the right, without one it stays where it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

import collectives as cc
from collectives.extend import known_as
from strategies.averaging.accumulation import GradientAccumulator, LocalGradient
from strategies.averaging.averaging import Averaging
from strategies.averaging.optimizer import identity
from strategies.averaging.options import AveragingOptions
from strategies.averaging.parameter_spec import ParameterSpec
from strategies.core import agreement
from strategies.core.sparse import Rows
from strategies.replicas.context import require_one_replica
from strategies.torch.backward_hooks import GradientHooks
from strategies.torch.method_guard import MethodGuard
from strategies.torch.parameters import Names, facts_of_optimizer, parameters_of, settings_of

if TYPE_CHECKING:
    # For type checkers it is an optimizer of any class, since it has the attributes of the one that
    # it holds and takes its place: `optimizer = DistributedOptimizer(optimizer)`.
    _Optimizer: Any
else:
    _Optimizer = torch.optim.Optimizer

__all__ = ["TorchOptimizer"]


class _GradState(enum.Enum):
    """What `.grad` holds."""

    OWN = "the gradients of this rank since the last update"
    ADDED = "nothing: they were added to those of earlier passes"
    AVERAGED = "the average of all ranks"
    ASKED = "that, and a scaler that wanted it has not looked at it yet"


@known_as("DistributedOptimizer")
class TorchOptimizer(_Optimizer):
    """An optimizer of PyTorch whose steps apply the gradients of all ranks.

    Made by `DistributedOptimizer`. It holds the optimizer that it was made of, and shows that one's
    `param_groups`, `state` and `defaults`: schedulers, scalers and checkpoints work with either.

    `step` averages the `.grad` of all parameters and lets the wrapped optimizer step. Whoever wants
    to see or change averaged gradients before, calls `synchronize` first.

    Another method of the wrapped optimizer that changes parameters, such as `first_step` of a
    sharpness-aware one, raises a ValueError unless `synchronize` was called since the last backward
    pass: it would step with gradients of this rank alone.

    An averaged gradient lies in a bucket, and `.grad` is a view of it, which the next backward pass
    overwrites: clone what is to be kept. Where gradients are averaged in the step, that pass writes
    its own ones there, so that the step copies nothing.

    Pickled or copied, it becomes the optimizer that it holds: a communicator belongs to a process.

    Attributes:
        optimizer: the one that it was made of.
        comm: the ranks that average.
    """

    is_distributed = True

    # `Optimizer.__init__` is not called: groups, state and hooks are those of the one held here,
    # found by `__getattr__`. Annotations for editors:
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    state: Any

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Names,
        comm: cc.Communicator,
        rule: AveragingOptions,
    ) -> None:
        self.optimizer = optimizer
        self.comm = comm
        self._rule = rule
        self._names = dict(names)
        state = functools.partial(facts_of_optimizer, optimizer, self._names)
        settings = functools.partial(settings_of, optimizer)
        self._averaging = Averaging(comm, rule, settings, state, one_by_one=True)
        self._passes = GradientAccumulator(rule.backward_passes_per_step)
        self._made_dense: set[int] = set()  # positions of parameters, since the last average
        self._backward = GradientHooks(self._averaging)
        self._method_guard = MethodGuard(optimizer, self._backward)
        # Leaves are made anew for other parameters; these are kept, so that an id stays theirs.
        self._known: list[tuple[int, torch.dtype]] = []
        self._kept: list[torch.Tensor] = []
        self._leaves: list[ParameterSpec] = []
        self._held = _GradState.OWN
        parameters = parameters_of(optimizer)
        self._backward.watch(parameters)
        if self._averaging.overlaps:
            trained = [i for i, parameter in enumerate(parameters) if parameter.requires_grad]
            self._averaging.prepare(self._leaves_of(parameters), trained)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not yet there, as in a copy that is being made
            raise AttributeError(name)
        if name == "param_groups":
            self._held = _GradState.AVERAGED if self._held is _GradState.ASKED else self._held
        found = getattr(self.optimizer, name)
        return self._method_guard.guard(name, found) if inspect.ismethod(found) else found

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.optimizer)})

    def __repr__(self) -> str:
        return f"TorchOptimizer(rank {self.comm.rank} of {self.comm.size}, {self.optimizer!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return identity, (self.optimizer,)

    def step(
        self, closure: Callable[[], Any] | None = None, *, examples: float | None = None
    ) -> Any:
        """Average the gradients of all ranks, unless `synchronize` has done so, and update.

        *Collective*. A parameter that has no gradient on some ranks gets the others'; without a
        gradient on any rank it is left alone.

        With `backward_passes_per_step=k`, a step that finds fewer than k backward passes since the
        last update takes the gradients away, to add them up, and updates nothing, unless
        `allow_partial_steps` is set. A step without a backward pass before it, as when a rank has
        no data, counts as one pass.

        Args:
            closure: computes the loss and the gradients. What it returns is averaged, too, so that
                optimizers that search along a line (LBFGS) take the same way on all ranks. An
                exception in it is raised on all ranks.
            examples: how many rows this rank's gradients are the mean of, 0 allowed; the average is
                then over all rows. None: all ranks count alike.

        Returns:
            The average of what the closure returned, else None.
        """
        require_one_replica("step")
        if closure is not None:
            return self._step_with(closure, examples)
        if self._held is _GradState.ASKED:
            self._forget()
            raise ValueError(
                "step: the scaler has unscaled gradients before they were averaged; call "
                "optimizer.synchronize() before scaler.unscale_(optimizer)"
            )
        if self._gather(examples):
            self._clip()
            self.optimizer.step()
        self._held = _GradState.OWN
        return None

    def synchronize(self, *, examples: float | None = None) -> bool:
        """Average the gradients now, so that they can be seen or changed before `step`.

        *Collective*. Call it before gradients are clipped, or unscaled (`scaler.unscale_`). The
        following `step` does not average again, unless there is another backward pass before it.

        Returns:
            Whether `.grad` now holds averages; with `backward_passes_per_step=k`, only every k-th
            time.
        """
        return self._gather(examples)

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """Return a block around `step`, for programs written for Horovod.

        It does nothing: gradients that `synchronize` has averaged are not averaged again.
        """
        return contextlib.nullcontext()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Add up so many passes before each update from now on; *collective*.

        Raises:
            ValueError: it is not an integer >= 1; or passes have been added up already, or there
                was one since the last step.
            MismatchError: ranks differ in the number; on all ranks.
        """

        def prepare() -> tuple[AveragingOptions, list[str]]:
            if self._backward.passes or self._held is not _GradState.OWN:
                raise ValueError("set_backward_passes_per_step: expected this right after a step")
            rule = dataclasses.replace(self._rule, backward_passes_per_step=passes)
            rule.check()
            return rule, [f"backward_passes_per_step {passes}"]

        self._rule = agreement.compare(self.comm, "set_backward_passes_per_step", prepare)
        self._averaging.rule = self._rule
        self._passes = GradientAccumulator(passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last step.

        What steps have added up before (`backward_passes_per_step`) is kept. Between `synchronize`
        and `step`, all ranks do this or none.
        """
        self.optimizer.zero_grad(set_to_none)
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state; equal on all ranks."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the wrapped optimizer its state back, the same on all ranks."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on all ranks alike; they are compared at the next step."""
        self.optimizer.add_param_group(param_group)
        self._backward.watch(parameters_of(self.optimizer), again=True)

    def close(self) -> None:
        """Release the buckets and stop counting backward passes; *collective*."""
        self._backward.close()
        self._backward.restore(parameters_of(self.optimizer))
        self._averaging.close()

    def rebind(self, comm: cc.Communicator) -> None:
        """Average among other ranks from now on; *collective* over these.

        For ranks that have outlived others: what the old communicator held is let go.
        """
        self._backward.close()
        self._backward.restore(parameters_of(self.optimizer))
        self.__init__(self.optimizer, self._names, comm, self._rule)  # type: ignore[misc]
        self.optimizer.zero_grad(set_to_none=True)

    # GradScaler asks for this in `scaler.step`, before it goes through `param_groups` and looks for
    # infinities in the gradients. A scaler that saw those of its own rank would skip a step that
    # the other ranks make. If it steps without having gone through them, it did so in `unscale_`.
    @property
    def _step_supports_amp_scaling(self) -> bool:
        if not self._averaged or self._backward.passes:
            if not self._gather(None):
                k = self._rule.backward_passes_per_step
                raise ValueError(
                    f"step: with backward_passes_per_step={k} call scaler.step once after {k} "
                    "backward passes"
                )
            self._held = _GradState.ASKED
        return False

    @property
    def _averaged(self) -> bool:
        return self._held in (_GradState.AVERAGED, _GradState.ASKED)

    def _gather(self, examples: float | None, error: Exception | None = None) -> bool:
        """Average the gradients if there were enough passes; tells whether they are averages."""
        fresh = self._backward.passes
        if not fresh and self._held is not _GradState.OWN:
            if examples is not None and self._averaged:
                raise ValueError(
                    "step: the gradients are averaged already, expected examples= as an argument "
                    "of synchronize"
                )
            return self._averaged
        parameters = parameters_of(self.optimizer)
        unchanged = self._backward.claimed(parameters)
        self._backward.watch(parameters)  # they may have been frozen, or thawed
        self._backward.restore(parameters)
        gradients, refusal = self._gradients(parameters)
        error = error or refusal
        whole = self._passes.add(
            gradients, examples=examples, error=error, count=max(1, fresh),
            complete=self._rule.allow_partial_steps,
        )  # fmt: skip
        if whole is None:
            self._held = _GradState.ADDED
            for parameter in parameters:
                parameter.grad = None
        else:
            self._held = _GradState.AVERAGED
            whole = whole._replace(made_dense=frozenset(self._made_dense))
            self._made_dense.clear()
            self._average(parameters, whole, unchanged)
        return self._averaged

    def _gradients(self, parameters: Sequence[torch.Tensor]) -> tuple[list[Any], Any]:
        """Return the gradients, sparse ones as rows, and why they cannot be averaged, or None."""
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        try:
            if self._rule.sparse_as_dense:
                for i, gradient in enumerate(gradients):
                    if gradient is not None and gradient.is_sparse:
                        gradients[i] = gradient.to_dense()
                        self._made_dense.add(i)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None and gradient.is_sparse and gradient.sparse_dim() != 1:
                    raise ValueError(
                        "step: a sparse gradient has rows of one dimension only, expected "
                        f"sparse_dim 1, got {gradient.sparse_dim()} "
                        f"(variable: {self._name(parameter)})"
                    )
            return [_rows(gradient) for gradient in gradients], None
        except Exception as error:  # as when there is no memory for a dense one
            return [None] * len(gradients), error

    def _average(
        self, parameters: Sequence[torch.Tensor], whole: LocalGradient, unchanged: Sequence[int]
    ) -> None:
        try:
            results = self._averaging.average(self._leaves_of(parameters), whole, unchanged)
        except Exception:
            self._forget()
            raise
        for i in self._averaging.made_dense:  # optimizers such as SparseAdam refuse dense ones
            results[i] = results[i].to_sparse(1)
        for parameter, result in zip(parameters, results, strict=True):
            parameter.grad = _sparse(result, parameter) if isinstance(result, Rows) else result

    def _leaves_of(self, parameters: Sequence[torch.Tensor]) -> list[ParameterSpec]:
        known = [(id(parameter), parameter.dtype) for parameter in parameters]
        if known != self._known:
            self._leaves = [ParameterSpec.of(self._name(p), p.detach()) for p in parameters]
            self._known, self._kept = known, list(parameters)
        return self._leaves

    def _clip(self) -> None:
        gradients = [p.grad for p in parameters_of(self.optimizer)]
        self._averaging.clip(
            [g._values() if g is not None and g.is_sparse else g for g in gradients]
        )

    def _step_with(self, closure: Callable[[], Any], examples: float | None) -> Any:
        if self._rule.backward_passes_per_step > 1:
            raise ValueError("step: a closure is one backward pass, expected no closure, got one")

        def averaged() -> Any:
            error = loss = None
            try:
                loss = closure()
            except Exception as caught:
                error = caught
            self._held = _GradState.OWN
            self._gather(examples, error)
            self._clip()
            if loss is None:
                return None
            value = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(float(loss))
            return self.comm.allreduce(value, op=self._rule.op)

        try:
            return self.optimizer.step(averaged)
        finally:
            self._held = _GradState.OWN

    def _forget(self) -> None:
        self._backward.claimed()
        self._held = _GradState.OWN

    def _name(self, parameter: torch.Tensor) -> str:
        name: str = self._names.setdefault(parameter, f"parameter {len(self._names)}")
        return name


def _rows(gradient: torch.Tensor | None) -> Any:
    """See a sparse gradient as rows; others as they are."""
    if gradient is None:
        return None
    gradient = gradient.detach()
    if not gradient.is_sparse:
        return gradient
    return Rows(gradient._indices()[0].cpu(), gradient._values())


def _sparse(rows: Rows, parameter: torch.Tensor) -> torch.Tensor:
    indices = torch.as_tensor(rows.indices, device=parameter.device)[None]
    return torch.sparse_coo_tensor(
        indices, rows.values, tuple(parameter.shape), is_coalesced=True, check_invariants=False
    )
