"""`DistributedOptimizer`: wraps an optimizer of any library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, overload

import collectives as cc
from strategies.averaging.consistency import Compare
from strategies.averaging.optimizer import ArrayOptimizer, AveragingOptimizer
from strategies.averaging.options import AveragingOptions, Early
from strategies.core import agreement
from strategies.remote_optimizers import dispatch

if TYPE_CHECKING:
    import optax
    from typing_extensions import Unpack

    from strategies.torch.optimizer import TorchOptimizer

__all__ = ["DistributedOptimizer", "OptimizerOptions"]


class _OfParameters(Protocol):
    """An optimizer of PyTorch, as far as its type goes."""

    param_groups: list[dict[str, Any]]

    def add_param_group(self, param_group: dict[str, Any]) -> None: ...


class _OfTrees(Protocol):
    """A transformation of Optax, as far as its type goes."""

    @property
    def init(self) -> Callable[[Any], Any]: ...

    @property
    def update(self) -> Callable[..., Any]: ...


class OptimizerOptions(TypedDict, total=False):
    """The options of `DistributedOptimizer`, which all of its overloads have."""

    named_parameters: Mapping[str, Any] | Iterable[tuple[str, Any]] | None
    comm: cc.Communicator | None
    op: Any
    compression: cc.Compression | None
    backward_passes_per_step: int
    allow_partial_steps: bool
    average_aggregated_gradients: bool
    gradient_predivide_factor: float
    clip_global_norm: float | None
    sparse_as_dense: bool
    bucket_bytes: int | None
    overlap: Early
    compare: Compare
    compare_every: int | None
    strategy: Any


@overload
def DistributedOptimizer(
    optimizer: ArrayOptimizer, **options: Unpack[OptimizerOptions]
) -> AveragingOptimizer: ...
@overload
def DistributedOptimizer(
    optimizer: _OfParameters, **options: Unpack[OptimizerOptions]
) -> TorchOptimizer: ...
@overload
def DistributedOptimizer(
    optimizer: _OfTrees, **options: Unpack[OptimizerOptions]
) -> optax.GradientTransformationExtraArgs: ...
def DistributedOptimizer(
    optimizer: Any,
    *,
    named_parameters: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
    comm: cc.Communicator | None = None,
    op: Any = cc.MEAN,
    compression: cc.Compression | None = cc.NONE,
    backward_passes_per_step: int = 1,
    allow_partial_steps: bool = False,
    average_aggregated_gradients: bool = False,
    gradient_predivide_factor: float = 1.0,
    clip_global_norm: float | None = None,
    sparse_as_dense: bool = False,
    bucket_bytes: int | None = None,
    overlap: Early = "auto",
    compare: Compare = "all",
    compare_every: int | None = None,
    strategy: Any = None,
) -> Any:
    """Make an optimizer that combines the gradients of all ranks, and then does as the given one.

    *Collective*: all ranks, with optimizers of one kind, the same parameters in the same order, and
    the same options. All ranks compute the same bits from then on, so that parameters that begin
    equal (`broadcast_parameters`) stay equal. That they do begin equal is compared in the first
    step: a forgotten broadcast is an error on all ranks.

    Args:
        optimizer: one of `strategies.optimizers`, a `torch.optim.Optimizer`, or a
            `GradientTransformation` of Optax.
        named_parameters: of PyTorch, such as `model.named_parameters()`: names for errors. Every
            parameter of the optimizer needs one.
        comm: the ranks; the whole job if None.
        op: MEAN or SUM over the ranks.
        compression: how gradients travel, as for `Communicator.allreduce`; with feedback, every
            bucket has its residual. None is `cc.NONE`.
        backward_passes_per_step: how many passes this rank adds up, without communication, before
            it updates anything.
        allow_partial_steps: let a step of PyTorch that finds fewer passes update with these; by
            default it leaves them for the next step. Of other optimizers each call is a pass.
        average_aggregated_gradients: divide what was added up by the number of passes; as it is,
            the passes are summed, as PyTorch does with `.grad`.
        gradient_predivide_factor: f: gradients are divided by f, added up, and multiplied by
            f/size. For MEAN only.
        clip_global_norm: scale averaged gradients down to this norm over all parameters, where it
            is larger.
        sparse_as_dense: reduce sparse gradients of PyTorch as dense ones, and make them sparse
            again for the update.
        bucket_bytes: after how many bytes of gradients a bucket is full.
        overlap: reduce gradients of PyTorch while the backward pass computes others. "auto" does so
            where the ranks are on several nodes and MPI lets several threads send, until three
            steps in a row had to reduce again. The results are the same: if gradients have changed
            until `step`, or are those of another number of examples than in the last step, on any
            rank, all are reduced again. Costs a copy of the gradients and, for changes that PyTorch
            does not count, two reads (CRC-32C). Of several passes the last one overlaps, where
            `step` is called once for all of them.
        compare: what ranks compare in the first step, before anything changes. "all": the bits of
            the parameters, the class and the settings of the optimizer, such as its learning rate,
            and its state; the settings also in every later step. "parameters": these alone, where
            settings differ on purpose. "nothing". Optax has no readable settings: instead its
            updates in the first two steps are compared, and the floating-point scalars of its state
            in every step; parameters only if they are passed to `update`.
        compare_every: compare again in every so many steps; None: in the first one only.
        strategy: whose ranks combine gradients, in place of `comm`; of `OneDeviceStrategy` this
            one alone. Several devices of a process are for optimizers of arrays, which are used in
            `strategy.run`. A `ParameterServerStrategy` or `SpareReplicaStrategy` makes the steps
            itself, by an optimizer of this package that takes the same ones
            (`strategies.optimizers.torch_equivalents`, `optax_equivalents`); beside it
            `named_parameters` is the only option. *Collective* over its tasks.

    Returns:
        An optimizer of the kind that was given: `AveragingOptimizer`, a `TorchOptimizer`, which is
        a `torch.optim.Optimizer`, or a `GradientTransformation`.

    Raises:
        TypeError: there is no such kind of optimizer; on all ranks.
        ValueError: an option is out of range, the optimizer is wrapped already, a parameter has no
            name or the name of another, or the strategy does not average so; on all ranks.
        MismatchError: ranks differ in what they gave; on all ranks.

    Cost: the comparison of settings takes 3 us a step for 11 settings of PyTorch in one parameter
    group, 18 us for 55 in 5 groups, and no message. The comparison in the first step reads
    parameters and state once, 60 to 150 ms per GB on the host, and sends 17 bytes to every rank, in
    place of the message that compares names and shapes; arrays on a device are copied to the host.
    """
    rule = AveragingOptions(
        op=op,
        compression=cc.NONE if compression is None else compression,
        backward_passes_per_step=backward_passes_per_step,
        allow_partial_steps=allow_partial_steps,
        gradient_predivide_factor=gradient_predivide_factor,
        average_aggregated_gradients=average_aggregated_gradients,
        clip_global_norm=clip_global_norm,
        sparse_as_dense=sparse_as_dense,
        bucket_bytes=bucket_bytes,
        overlap=overlap,
        compare=compare,
        compare_every=compare_every,
    )
    if strategy is not None:
        if comm is not None or (dispatch.is_hosting(strategy) and rule != AveragingOptions()):
            raise ValueError(
                "DistributedOptimizer: the strategy says how gradients are combined, expected no "
                f"comm, and no option of averaging if it makes the steps itself, got {rule}"
            )
        if dispatch.is_hosting(strategy):
            return dispatch.wrap_optimizer(optimizer, strategy, named_parameters)
        comm = dispatch.ranks_of(strategy)
    comm = cc.init() if comm is None else comm

    def prepare() -> tuple[_Make, list[str]]:
        rule.check()
        dispatch.check_unwrapped(optimizer)
        make, facts = _recognise(optimizer, named_parameters)
        if strategy is not None:
            dispatch.check_averaging(strategy, arrays=facts[0] == _ARRAYS)
        if overlap is True and facts[0] in _AT_ONCE:
            raise ValueError(
                "DistributedOptimizer: all gradients are there at once, overlap is for optimizers "
                f"of PyTorch, got {type(optimizer).__name__}"
            )
        return make, [*facts, f"options {rule}"]

    return agreement.compare(comm, "DistributedOptimizer", prepare)(comm, rule)


_Make = Callable[[cc.Communicator, AveragingOptions], Any]

# What the ranks compare first. Of these two, all gradients are there before the first is given.
_ARRAYS, _JAX = _AT_ONCE = ("kind arrays", "kind jax")


def _recognise(optimizer: Any, named_parameters: Any) -> tuple[_Make, list[str]]:
    """Tell the kind of an optimizer: what wraps it, and what must be equal on all ranks.

    No library is imported that the optimizer does not come from.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(optimizer, torch.optim.Optimizer):
        from strategies.torch import optimizer as of_torch
        from strategies.torch import parameters

        names = parameters.names_of(optimizer, named_parameters)
        facts = parameters.described(optimizer, names)
        return lambda comm, rule: of_torch.TorchOptimizer(optimizer, names, comm, rule), facts
    if named_parameters is not None:
        raise ValueError(
            "DistributedOptimizer: named_parameters are for optimizers of PyTorch, got "
            f"{type(optimizer).__name__}"
        )
    _refuse_keras(optimizer)
    if callable(getattr(optimizer, "apply_gradients", None)):
        return lambda comm, rule: AveragingOptimizer(optimizer, comm, rule), [_ARRAYS]
    if all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        from strategies.jax import transformation as of_jax

        return lambda comm, rule: of_jax.wrap(optimizer, comm, rule), [_JAX]
    raise TypeError(
        "DistributedOptimizer: the optimizer has no apply_gradients, expected one of "
        "strategies.optimizers, of torch.optim or of Optax, got " + type(optimizer).__name__
    )


def _refuse_keras(optimizer: Any) -> None:
    """Refuse an optimizer of Keras, whose `apply_gradients` takes variables of Keras only."""
    roots = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
    if roots & {"keras", "tf_keras", "tensorflow"}:
        raise TypeError(
            "DistributedOptimizer: optimizers of Keras are not supported, expected one of "
            "strategies.optimizers, of torch.optim or of Optax, got "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
