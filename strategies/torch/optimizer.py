"""`DistributedOptimizer` for PyTorch.

Contents of `.grad`::

         backward, enough passes: average of all ranks
    OWN ----------------------------------------------> AVERAGED <--- scaler reads -- ASKED
     ^ \\  too few passes                                |    \\                         ^
     |  `---------------> ADDED ----- backward ------->-+     `---- scaler asks --------'
     |                      |                           |
     `------- step ---------+--------- step ------------'

A step or `synchronize` after a backward pass moves to the right, otherwise it changes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

import collectives as cc
from collectives.extend import known_as
from strategies.averaging.accumulation import GradientAccumulator, LocalGradient
from strategies.averaging.averaging import Averaging
from strategies.averaging.optimizer import DELAYED, delayed_state, refuse_delayed_join
from strategies.averaging.options import AveragingOptions
from strategies.averaging.parameter_spec import ParameterSpec
from strategies.core import agreement
from strategies.core.sparse import Rows
from strategies.replicas.context import require_one_replica
from strategies.torch.backward_hooks import GradientHooks
from strategies.torch.method_guard import MethodGuard
from strategies.torch.optimizer_proxy import OptimizerProxy
from strategies.torch.parameters import Names, facts_of_optimizer, parameters_of, settings_of

__all__ = ["GradState", "TorchOptimizer"]


class GradState(enum.Enum):
    """Contents of `.grad`."""

    OWN = "the gradients of this rank since the last update"
    ADDED = "nothing: they were added to those of earlier passes"
    AVERAGED = "the average of all ranks"
    ASKED = "that, and a scaler that wanted it has not looked at it yet"


@known_as("DistributedOptimizer")
class TorchOptimizer(OptimizerProxy):
    """A PyTorch optimizer whose steps apply the gradients of all ranks.

    Returned by `DistributedOptimizer`. It has the `param_groups`, `state` and `defaults` of the
    wrapped optimizer, so schedulers, scalers and checkpoints work with either of them, and it is an
    instance of the same class.

    `step` averages the `.grad` of all parameters and lets the wrapped optimizer step. Call
    `synchronize` first to read or change averaged gradients.

    Other methods of the wrapped optimizer that change parameters, such as `first_step` of a
    sharpness-aware one, would use gradients of this rank alone. They raise a ValueError unless you
    called `synchronize` after the last backward pass.

    An averaged `.grad` is a view of a bucket, which the next backward pass overwrites; clone it to
    keep it. If gradients are averaged in the step, that pass writes its own gradients to the
    bucket, so that the step copies nothing.

    Pickling or copying returns the wrapped optimizer, because a communicator belongs to a process.

    Attributes:
        optimizer: the wrapped optimizer.
        comm: the ranks that average.
    """

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
        # A copy, which also gets names for parameters that are added later.
        self._names = dict(names)
        state = functools.partial(facts_of_optimizer, optimizer, self._names)
        settings = functools.partial(settings_of, optimizer)
        self._averaging = Averaging(comm, rule, settings, state, one_by_one=True)
        self._passes = GradientAccumulator(rule.backward_passes_per_step)
        self._made_dense: set[int] = set()  # positions of parameters, since the last average
        self._backward = GradientHooks(self._averaging)
        self._method_guard = MethodGuard(optimizer, self._backward)
        # Leaves are recomputed for other parameters. Keeping the parameters keeps their ids unique.
        self._known: list[tuple[int, torch.dtype]] = []
        self._kept: list[torch.Tensor] = []
        self._leaves: list[ParameterSpec] = []
        self._held = GradState.OWN
        parameters = parameters_of(optimizer)
        self._backward.watch(parameters)
        # Before the first backward pass, so that the first step also overlaps.
        if self._averaging.overlaps:
            trained = [i for i, parameter in enumerate(parameters) if parameter.requires_grad]
            self._averaging.prepare(self._leaves_of(parameters), trained)

    def __getattr__(self, name: str) -> Any:
        if name == "param_groups":
            # A scaler that reads `param_groups` looks for infinities in the averages, as it should.
            self._held = GradState.AVERAGED if self._held is GradState.ASKED else self._held
        found = super().__getattr__(name)
        # Only methods can change parameters.
        return self._method_guard.guard(name, found) if inspect.ismethod(found) else found

    def __repr__(self) -> str:
        return f"TorchOptimizer(rank {self.comm.rank} of {self.comm.size}, {self.optimizer!r})"

    def step(
        self, closure: Callable[[], Any] | None = None, *, examples: float | None = None
    ) -> Any:
        """Average the gradients of all ranks, unless `synchronize` has done so, and update.

        *Collective*. A parameter without a gradient on some ranks gets that of the other ranks.
        Without a gradient on any rank it does not change.

        With `backward_passes_per_step=k`, a step after fewer than k backward passes since the last
        update only adds up the gradients and sets `.grad` to None, unless `allow_partial_steps` is
        set. A step without a backward pass, for example on a rank without data, counts as one pass.

        Args:
            closure: computes the loss and the gradients. Its result is also averaged, so that line
                searches (LBFGS) take the same path on all ranks. Its exception is raised on all
                ranks.
            examples: number of rows that this rank's gradients are the mean of; may be 0. The
                average is then over all rows. None weights all ranks equally.

        Returns:
            The average of the closure's results; None without a closure.
        """
        require_one_replica("step")
        if closure is not None:
            return self._step_with(closure, examples)
        if self._held is GradState.ASKED:
            # Otherwise each later step would raise the same error.
            self._forget()
            raise ValueError(
                "step: the scaler has unscaled gradients before they were averaged; call "
                "optimizer.synchronize() before scaler.unscale_(optimizer)"
            )
        if self._gather(examples):
            self._clip()
            self.optimizer.step()
            if self._rule.delay:
                # The averages are in memory that the gradients of this step overwrite.
                self.optimizer.zero_grad(set_to_none=True)
                self._averaging.start()
        self._held = GradState.OWN
        return None

    def join(self) -> None:
        """Take part in the steps of the other ranks without data, until all ranks call this.

        *Collective*. A mean is then over the ranks that still make steps. The parameters of this
        rank do not change; afterwards, broadcast those of the last rank. Gradients without a step
        are discarded.
        """
        refuse_delayed_join(self._rule)
        parameters = parameters_of(self.optimizer)
        self._backward.restore(parameters)
        self.zero_grad()
        self._passes.clear()
        self._averaging.join(self._leaves_of(parameters))

    def synchronize(self, *, examples: float | None = None) -> bool:
        """Average the gradients now, so that you can read or change them before `step`.

        *Collective*. Call it before you clip or unscale gradients (`scaler.unscale_`). The next
        `step` does not average again, unless there is another backward pass before it.

        Returns:
            Whether `.grad` now holds averages; with `backward_passes_per_step=k`, only every k-th
            time.
        """
        return self._gather(examples)

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for `step`, for programs written for Horovod.

        It does nothing, because averaged gradients are not averaged again.
        """
        return contextlib.nullcontext()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of passes before each update; *collective*.

        Raises:
            ValueError: the number is not an integer >= 1; or there were passes since the last
                update.
            MismatchError: ranks differ in the number; on all ranks.
        """

        def prepare() -> tuple[AveragingOptions, list[str]]:
            if self._backward.passes or self._held is not GradState.OWN:
                raise ValueError("set_backward_passes_per_step: expected this right after a step")
            rule = dataclasses.replace(self._rule, backward_passes_per_step=passes)
            rule.check()
            return rule, [f"backward_passes_per_step {passes}"]

        self._rule = agreement.compare(self.comm, "set_backward_passes_per_step", prepare)
        self._averaging.rule = self._rule
        self._passes = GradientAccumulator(passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients since the last step.

        Sums of earlier steps (`backward_passes_per_step`) remain. Between `synchronize` and `step`,
        all ranks must call this or none.
        """
        super().zero_grad(set_to_none)
        # The gradients are gone, so the next step must not take them for averages.
        self._forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the same parameters on all ranks; the next step compares them."""
        super().add_param_group(param_group)
        self._backward.watch(parameters_of(self.optimizer), again=True)

    def close(self) -> None:
        """Release the buckets and stop counting backward passes; *collective*."""
        self._backward.close()
        # Gradients must not stay in buckets that are about to be freed.
        self._backward.restore(parameters_of(self.optimizer))
        self._averaging.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state.

        With a delay also `delayed`: name -> mean of the last step; *collective*.
        """
        return {**super().state_dict(), **delayed_state(self._averaging)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the wrapped optimizer's state."""
        super().load_state_dict({n: x for n, x in state_dict.items() if n != DELAYED})
        self._averaging.load_last_means(state_dict.get(DELAYED))

    def rebind(self, comm: cc.Communicator) -> None:
        """Average over other ranks from now on; *collective* over them.

        For surviving ranks: the buckets of the old communicator are abandoned, not closed.
        """
        self._backward.close()
        self._backward.restore(parameters_of(self.optimizer))
        last = self._averaging
        # All state depends on the communicator, so it is made again.
        self.__init__(self.optimizer, self._names, comm, self._rule)  # type: ignore[misc]
        last.hand_over(self._averaging)
        self.optimizer.zero_grad(set_to_none=True)

    # GradScaler reads this in `scaler.step`, before it reads `param_groups` and looks for
    # infinities in the gradients. With only its own rank's gradients, a scaler would skip a step
    # that other ranks take. If it steps without reading `param_groups`, it did so in `unscale_`.
    @property
    def _step_supports_amp_scaling(self) -> bool:
        if self._rule.delay:
            raise ValueError(
                "step: with delay the averages have the scale of the last step, expected bfloat16, "
                "which needs no loss scaler"
            )
        if not self._averaged or self._backward.passes:
            if not self._gather(None):
                k = self._rule.backward_passes_per_step
                raise ValueError(
                    f"step: with backward_passes_per_step={k} call scaler.step once after {k} "
                    "backward passes"
                )
            self._held = GradState.ASKED
        return False

    @property
    def _averaged(self) -> bool:
        return self._held in (GradState.AVERAGED, GradState.ASKED)

    def _gather(self, examples: float | None, error: Exception | None = None) -> bool:
        """Average the gradients after enough passes; return whether they are averages."""
        fresh = self._backward.passes
        if not fresh and self._held is not GradState.OWN:
            if examples is not None and self._averaged:
                raise ValueError(
                    "step: the gradients are averaged already, expected examples= as an argument "
                    "of synchronize"
                )
            return self._averaged
        parameters = parameters_of(self.optimizer)
        # Before `restore`, which replaces the tensors that `claimed` compares by identity.
        unchanged = self._backward.claimed(parameters)
        self._backward.watch(parameters)  # parameters may have been frozen or unfrozen
        self._backward.restore(parameters)
        gradients, refusal = self._gradients(parameters)
        error = error or refusal
        whole = self._passes.add(
            gradients, examples=examples, error=error, count=max(1, fresh),
            complete=self._rule.allow_partial_steps,
        )  # fmt: skip
        if whole is None:
            self._held = GradState.ADDED
            for parameter in parameters:
                # The gradients are in the sums now, so the next pass starts at zero.
                parameter.grad = None
        else:
            self._held = GradState.AVERAGED
            whole = whole._replace(made_dense=frozenset(self._made_dense))
            self._made_dense.clear()
            self._average(parameters, whole, unchanged)
        return self._averaged

    def _gradients(self, parameters: Sequence[torch.Tensor]) -> tuple[list[Any], Any]:
        """Return the gradients, sparse ones as `Rows`, and the error that prevents averaging."""
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
        except Exception as error:  # for example too little memory for a dense gradient
            return [None] * len(gradients), error

    def _average(
        self, parameters: Sequence[torch.Tensor], whole: LocalGradient, unchanged: Sequence[int]
    ) -> None:
        try:
            results = self._averaging.average(self._leaves_of(parameters), whole, unchanged)
        except Exception:
            self._forget()
            raise
        for i in self._averaging.made_dense:  # optimizers such as SparseAdam reject dense ones
            results[i] = results[i].to_sparse(1)
        # With a delay there are averages from the second step on.
        for parameter, result in zip(parameters, results or [None] * len(parameters), strict=True):
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
            # In place: `_values()` shares memory with the gradient, coalesced or not.
            [g._values() if g is not None and g.is_sparse else g for g in gradients]
        )

    def _step_with(self, closure: Callable[[], Any], examples: float | None) -> Any:
        if self._rule.backward_passes_per_step > 1 or self._rule.delay:
            raise ValueError("step: a closure is one backward pass, expected no closure, got one")

        def averaged() -> Any:
            error = loss = None
            try:
                loss = closure()
            except Exception as caught:
                error = caught
            # LBFGS calls the closure several times in a step, and each call averages again.
            self._held = GradState.OWN
            self._gather(examples, error)
            self._clip()
            if loss is None:
                return None
            value = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(float(loss))
            # Line searches compare losses, so all ranks need the same one.
            return self.comm.allreduce(value, op=self._rule.op)

        try:
            return self.optimizer.step(averaged)
        finally:
            self._held = GradState.OWN

    def _forget(self) -> None:
        self._backward.claimed()
        self._held = GradState.OWN

    def _name(self, parameter: torch.Tensor) -> str:
        name: str = self._names.setdefault(parameter, f"parameter {len(self._names)}")
        return name


def _rows(gradient: torch.Tensor | None) -> Any:
    """Return a sparse gradient as `Rows`; others unchanged."""
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
