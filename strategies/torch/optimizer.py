"""Optimizers of PyTorch whose steps apply the gradients of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

import collectives as cc
from strategies.averaging.averaging import Averaging, Leaf, Rule
from strategies.averaging.overlap import Early
from strategies.averaging.passes import Contribution, Passes
from strategies.sparse import Rows
from strategies.torch.parameters import Names, facts_of_optimizer, leaf, parameters_of

if TYPE_CHECKING:
    # For type checkers it is an optimizer of any class, since it has the attributes of the one that
    # it holds and takes its place: `optimizer = DistributedOptimizer(optimizer)`.
    _Optimizer: Any
else:
    _Optimizer = torch.optim.Optimizer

__all__ = ["TorchOptimizer", "wrap"]


# By which name errors call what users make by it; as in `distributed_optimizer`.
_KNOWN_AS = dict.fromkeys(["TorchOptimizer", "count"], "DistributedOptimizer")


def wrap(
    optimizer: torch.optim.Optimizer, names: Names, comm: cc.Communicator, rule: Rule
) -> TorchOptimizer:
    """Make an optimizer of PyTorch average over the ranks; see `strategies.DistributedOptimizer`.

    *Collective*.

    Args:
        optimizer: what updates the parameters.
        names: of `parameters.names_of`.
        comm: the ranks.
        rule: how they average.
    """
    return TorchOptimizer(optimizer, names, comm, rule)


class TorchOptimizer(_Optimizer):
    """An optimizer of PyTorch whose steps apply the gradients of all ranks.

    Made by `DistributedOptimizer`. It holds the optimizer that it was made of, and shows that one's
    `param_groups`, `state` and `defaults`: schedulers, scalers and checkpoints work with either.

    `step` averages the `.grad` of all parameters and lets the wrapped optimizer step. Whoever wants
    to see or change averaged gradients before, calls `synchronize` first.

    An averaged gradient lies in a bucket, and `.grad` is a view of it: what was put there by one
    step is overwritten by the next one, with `overlap` by the next backward pass. Clone what is to
    be kept.

    Pickled or copied, it becomes the optimizer that it holds: a communicator belongs to a process.

    Args:
        optimizer: what updates the parameters.
        names: parameter -> its name.
        comm: the ranks that average.
        rule: how they do.

    Attributes:
        optimizer: the one that it was made of.
        comm: the ranks.
    """

    # `Optimizer.__init__` is not called: groups, state and hooks are those of the one held here,
    # found by `__getattr__`.
    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Names, comm: cc.Communicator, rule: Rule
    ) -> None:
        self.optimizer = optimizer
        self.comm = comm
        self._rule = rule
        self._names = dict(names)
        facts = functools.partial(facts_of_optimizer, optimizer, self._names)
        self._averaging = Averaging(comm, rule, facts)
        self._passes = Passes(rule.backward_passes_per_step)
        self._counts: dict[int, int] = {}  # position of a parameter -> its backward passes
        self._early: dict[int, tuple[torch.Tensor, int]] = {}  # likewise -> gradient, its version
        self._hooks: list[Any] = []
        # Leaves are made anew for other parameters; these are kept, so that an id stays theirs.
        self._known: list[tuple[int, torch.dtype]] = []
        self._kept: list[torch.Tensor] = []
        self._leaves: list[Leaf] = []
        # What has become of the gradients since the last step: nothing; they were added to those of
        # earlier passes; or they are the ranks' average.
        self._taken = self._averaged = False
        self._asked = False  # by a scaler, which has not looked at the gradients since
        self._count_passes()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not yet there, as in a copy that is being made
            raise AttributeError(name)
        if name == "param_groups":
            self._asked = False
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"TorchOptimizer(rank {self.comm.rank} of {self.comm.size}, {self.optimizer!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.optimizer,)

    def step(
        self, closure: Callable[[], Any] | None = None, *, examples: float | None = None
    ) -> Any:
        """Average the gradients of all ranks, unless `synchronize` has done so, and update.

        *Collective*. A parameter that has no gradient on some ranks gets the others'; without a
        gradient on any rank it is left alone.

        With `backward_passes_per_step=k`, a step that finds fewer than k backward passes since the
        last update takes the gradients away, to add them up, and updates nothing. A step counts as
        one pass if there was no backward pass before it, as when a rank has no data.

        Args:
            closure: computes the loss and the gradients. What it returns is averaged, too, so that
                optimizers that search along a line (LBFGS) take the same way on all ranks. An
                exception in it is raised on all ranks.
            examples: how many rows this rank's gradients are the mean of, 0 allowed; the average is
                then over all rows. None: all ranks count alike.

        Returns:
            The average of what the closure returned, else None.
        """
        if closure is not None:
            return self._step_with(closure, examples)
        if self._asked:
            self._forget()
            raise ValueError(
                "step: the scaler has unscaled gradients before they were averaged; call "
                "optimizer.synchronize() before scaler.unscale_(optimizer)"
            )
        if self._gather(examples):
            self._clip()
            self.optimizer.step()
            self._averaged = False
        self._taken = False
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
        self._count_passes()

    def close(self) -> None:
        """Release the buckets and stop counting backward passes; *collective*."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._rescue(parameters_of(self.optimizer))
        self._averaging.close()

    # GradScaler asks for this in `scaler.step`, before it goes through `param_groups` and looks for
    # infinities in the gradients. A scaler that saw those of its own rank would skip a step that
    # the other ranks make. If it steps without having gone through them, it did so in `unscale_`.
    @property
    def _step_supports_amp_scaling(self) -> bool:
        if not self._averaged or self._backward_passes():
            if not self._gather(None):
                k = self._rule.backward_passes_per_step
                raise ValueError(
                    f"step: with backward_passes_per_step={k} call scaler.step once after {k} "
                    "backward passes"
                )
            self._asked = True
        return False

    def _gather(self, examples: float | None, error: Exception | None = None) -> bool:
        """Average the gradients if there were enough passes; tells whether they are averages."""
        fresh = self._backward_passes()
        if not fresh and (self._averaged or self._taken):
            if examples is not None and self._averaged:
                raise ValueError(
                    "step: the gradients are averaged already, expected examples= as an argument "
                    "of synchronize"
                )
            return self._averaged
        self._counts.clear()
        parameters = parameters_of(self.optimizer)
        if len(self._hooks) != sum(p.requires_grad for p in parameters):  # frozen, or thawed
            self._count_passes()
        self._rescue(parameters)
        gradients, refusal = self._gradients(parameters)
        error = error or refusal
        whole = self._passes.add(gradients, examples=examples, error=error, count=max(1, fresh))
        self._taken, self._averaged = True, whole is not None
        if whole is None:
            for parameter in parameters:
                parameter.grad = None
        else:
            self._average(parameters, whole)
        return self._averaged

    def _rescue(self, parameters: Sequence[torch.Tensor]) -> None:
        """Move gradients that no backward pass has touched out of the early reductions' way."""
        early = self._averaging.early
        if early is not None:
            for i, parameter in enumerate(parameters):
                _moved(early, i, parameter)

    def _gradients(self, parameters: Sequence[torch.Tensor]) -> tuple[list[Any], Any]:
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        if self._rule.sparse_as_dense:
            gradients = [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None and gradient.is_sparse and gradient.sparse_dim() != 1:
                return gradients, ValueError(
                    f"step: a sparse gradient has rows of one dimension only, expected "
                    f"sparse_dim 1, got {gradient.sparse_dim()} (variable: {self._name(parameter)})"
                )
        return gradients, None

    def _average(self, parameters: Sequence[torch.Tensor], whole: Contribution) -> None:
        known = [(id(parameter), parameter.dtype) for parameter in parameters]
        if known != self._known:
            self._leaves = [leaf(parameter, self._name(parameter)) for parameter in parameters]
            self._known, self._kept = known, list(parameters)
        rows = [_rows(g) for g in whole.gradients]
        try:
            unchanged = [
                i
                for i, (gradient, version) in self._early.items()
                if parameters[i].grad is gradient and gradient._version == version
            ]
            contribution = whole._replace(gradients=rows)
            results = self._averaging.average(self._leaves, contribution, unchanged)
        except Exception:
            self._forget()
            raise
        for parameter, result in zip(parameters, results, strict=True):
            if isinstance(result, Rows):
                parameter.grad = _sparse(result, parameter)
            else:
                parameter.grad = result
        self._early.clear()

    def _clip(self) -> None:
        gradients = [p.grad for p in parameters_of(self.optimizer)]
        dense = [g._values() if g is not None and g.is_sparse else g for g in gradients]
        scale = self._averaging.clipping(dense)
        if scale < 1:
            for gradient in dense:
                if gradient is not None:
                    gradient.mul_(scale)

    def _step_with(self, closure: Callable[[], Any], examples: float | None) -> Any:
        if self._rule.backward_passes_per_step > 1:
            raise ValueError("step: a closure is one backward pass, expected no closure, got one")

        def averaged() -> Any:
            error = loss = None
            try:
                loss = closure()
            except Exception as caught:
                error = caught
            self._averaged = self._taken = False
            self._gather(examples, error)
            self._clip()
            if loss is None:
                return None
            value = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(float(loss))
            return self.comm.allreduce(value, op=self._rule.op)

        try:
            return self.optimizer.step(averaged)
        finally:
            self._averaged = self._taken = False

    def _backward_passes(self) -> int:
        """Count the backward passes since gradients were last taken."""
        return max(self._counts.values(), default=0)

    def _forget(self) -> None:
        self._counts.clear()
        self._early.clear()
        self._averaged = self._taken = self._asked = False

    def _count_passes(self) -> None:
        """Let every parameter count the passes that gave it a gradient."""
        # The hooks hold these, and not the optimizer.
        counts, given, averaging = self._counts, self._early, self._averaging

        def counter(position: int) -> Callable[[torch.Tensor], None]:
            def count(parameter: torch.Tensor) -> None:
                counts[position] = counts.get(position, 0) + 1
                early = averaging.early
                if early is not None and early.expects(position):
                    given[position] = _given(early, position, parameter)

            return count

        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(counter(i))
            for i, parameter in enumerate(parameters_of(self.optimizer))
            if parameter.requires_grad
        ]

    def _name(self, parameter: torch.Tensor) -> str:
        name: str = self._names.setdefault(parameter, f"parameter {len(self._names)}")
        return name


def _itself(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer


def _given(early: Early, position: int, parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Let a gradient be reduced early; returns it, and the count of its changes."""
    gradient = _moved(early, position, parameter)
    assert gradient is not None
    early.ready(position, gradient.to_dense() if gradient.is_sparse else gradient)
    return gradient, gradient._version


def _moved(early: Early, position: int, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient, which must not be lost, out of the place where the result will be."""
    gradient = parameter.grad
    dense = None if gradient is None or gradient.is_sparse else gradient
    if dense is not None and early.lies_in_place(position, dense):
        parameter.grad = gradient = dense.clone()
    return gradient


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
