"""`DistributedOptimizer` with sharded state, for PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

import collectives as cc
from collectives import extend
from strategies.averaging.accumulation import LocalGradient
from strategies.averaging.options import OPERATION, AveragingOptions
from strategies.averaging.sharded_buckets import box_of, part_of
from strategies.averaging.sharded_optimizer import FixedRanks
from strategies.checkpoint.boxes import Slice, inside, whole
from strategies.core import array_ops
from strategies.replicas.context import require_one_replica
from strategies.torch.optimizer import GradState, TorchOptimizer
from strategies.torch.parameters import Names, parameters_of

__all__ = ["ShardedTorchOptimizer", "check_elementwise"]

# Optimizers of `torch.optim` whose result for an element depends on its own numbers alone.
_ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip


class ShardedTorchOptimizer(FixedRanks, TorchOptimizer):
    """A PyTorch optimizer that updates on each rank a part of every parameter.

    Returned by `DistributedOptimizer`. `param_groups` and `defaults` are those of the wrapped
    optimizer, so schedulers work. Its `state` is empty: `state_dict` returns the states of this
    rank's parts as slices, which `Saver` writes in sharded checkpoints. `.grad` is None after the
    average.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Names,
        comm: cc.Communicator,
        rule: AveragingOptions,
    ) -> None:
        # Before the base class, which describes the state of the optimizer.
        state = optimizer.state_dict() if optimizer.state else None
        optimizer.state.clear()
        super().__init__(optimizer, names, comm, rule)
        groups = [
            {**_settings(group), "params": [self._part(p) for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        # An optimizer of the same class for the parts, whose settings are copied in each step.
        self._inner: torch.optim.Optimizer = type(optimizer)(groups)
        if state is not None:
            self.load_state_dict(state)

    @property
    def shards(self) -> list[Slice]:
        """This rank's part of each parameter, for restoring the states by `Saver`."""
        parts = zip(parameters_of(self.optimizer), parameters_of(self._inner), strict=True)
        return [Slice(part, self._box(p).start, tuple(p.shape)) for p, part in parts]

    def step(
        self, closure: Callable[[], Any] | None = None, *, examples: float | None = None
    ) -> Any:
        """Average the gradients, update this rank's parts, and gather the parameters of all ranks.

        *Collective*. Arguments and errors as `TorchOptimizer.step`.

        Returns:
            The closure's result on this rank; None without a closure.
        """
        require_one_replica("step")
        error = loss = None
        if closure is not None:
            try:
                with torch.enable_grad():
                    loss = closure()
            except Exception as caught:
                error = caught
        if self._gather(examples, error):
            self._averaging.clip([part.grad for part in parameters_of(self._inner)])
            for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
                inner.update(_settings(group))
            self._inner.step()
            parameters = [p.detach() for p in parameters_of(self.optimizer)]
            views = [array_ops.host(p) for p in parameters]
            self._averaging.gather(
                [p if v is None else v for p, v in zip(parameters, views, strict=True)],
                parameters_of(self._inner),
            )
        self._held = GradState.OWN
        return loss

    def synchronize(self, *, examples: float | None = None) -> NoReturn:
        """Raise an error: no rank has all averages.

        Raises:
            ValueError: in every case.
        """
        raise ValueError(
            "synchronize: with shard_state each rank has the averages of its part alone, expected "
            "clip_global_norm= for clipping"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raise an error: the parts of parameters stay on their ranks.

        Raises:
            ValueError: in every case.
        """
        raise ValueError("add_param_group: with shard_state the parameters must not change")

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with a `Slice` of each array of a parameter's shape."""
        state: dict[str, Any] = self._inner.state_dict()
        parts = self.shards
        state["state"] = {
            number: {name: _sliced(x, parts[number]) for name, x in of_parameter.items()}
            for number, of_parameter in state["state"].items()
        }
        # The schedulers' changes since the last step.
        state["param_groups"] = self.optimizer.state_dict()["param_groups"]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of this rank, or a whole one, such as one without sharding."""
        parts = self.shards
        states = {
            number: {name: part_of(x, parts[number].box, parts[number].shape)
                     for name, x in of_parameter.items()}
            for number, of_parameter in state_dict["state"].items()
        }  # fmt: skip
        self.optimizer.load_state_dict({**state_dict, "state": {}})
        # The next step copies the settings.
        self._inner.load_state_dict({**self._inner.state_dict(), "state": states})

    # Read by GradScaler alone, which looks for infinities in `.grad`.
    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise ValueError(
            "step: with shard_state each rank has the averages of its part alone, and a loss "
            "scaler looks for infinities in all, expected bfloat16, which needs no scaler"
        )

    def _average(
        self, parameters: Sequence[torch.Tensor], whole: LocalGradient, unchanged: Sequence[int]
    ) -> None:
        try:
            results = self._averaging.average(self._leaves_of(parameters), whole)
        except Exception:
            self._forget()
            raise
        parts = parameters_of(self._inner)
        for parameter, part, result in zip(parameters, parts, results, strict=True):
            # The program may have moved its parameter to other memory.
            part.data = self._part(parameter)
            part.grad = None if result is None else extend.as_tensor(result).to(part.device)
            parameter.grad = None

    def _box(self, parameter: torch.Tensor) -> Any:
        return box_of(tuple(parameter.shape), self.comm.rank, self.comm.size)

    def _part(self, parameter: torch.Tensor) -> torch.Tensor:
        index = inside(self._box(parameter), whole(tuple(parameter.shape)))
        # A view of the parameter where it can be; fused optimizers ignore strides.
        part: torch.Tensor = parameter.detach()[index].contiguous()
        return part


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Reject an optimizer whose result for an element depends on other elements.

    Raises:
        ValueError: it is not known to be elementwise.
    """
    kind = type(optimizer)
    # By name: the module of these classes differs between versions of PyTorch.
    if not (kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE):
        raise ValueError(
            f"{OPERATION}: with shard_state each rank updates a part of every parameter, expected "
            f"an elementwise optimizer of torch.optim, one of {' '.join(_ELEMENTWISE)}, got "
            f"{kind.__module__}.{kind.__qualname__}"
        )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in group.items() if name not in ("params", "param_names")}


def _sliced(value: Any, part: Slice) -> Any:
    shaped = isinstance(value, torch.Tensor) and tuple(value.shape) == part.box.shape
    return Slice(value, part.start, part.shape) if shaped and part.shape else value
