"""`DistributedOptimizer`: wraps an optimizer of any library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, overload

import collectives as cc
from collectives import extend
from strategies.averaging import sharded_optimizer
from strategies.averaging.consistency import Compare
from strategies.averaging.local_optimizer import LocalOptimizer
from strategies.averaging.optimizer import ArrayOptimizer, AveragingOptimizer
from strategies.averaging.options import AveragingOptions, Early, SyncEvery
from strategies.averaging.sharded_optimizer import ShardedOptimizer
from strategies.core import agreement
from strategies.remote_optimizers import dispatch

if TYPE_CHECKING:
    import optax
    from typing_extensions import Unpack

    from strategies.jax.sharded_transformation import ShardedTransformation
    from strategies.torch.optimizer import TorchOptimizer

__all__ = ["DistributedOptimizer", "OptimizerOptions"]


class _OfParameters(Protocol):
    """The interface of a PyTorch optimizer, for type checkers."""

    param_groups: list[dict[str, Any]]

    def add_param_group(self, param_group: dict[str, Any]) -> None: ...


class _OfTrees(Protocol):
    """The interface of an Optax transformation, for type checkers."""

    @property
    def init(self) -> Callable[[Any], Any]: ...

    @property
    def update(self) -> Callable[..., Any]: ...


class OptimizerOptions(TypedDict, total=False):
    """Options of `DistributedOptimizer`, shared by its overloads; `shard_state` is one more."""

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
    sync_every: SyncEvery | None
    outer: Any
    neighbours: Any
    delay: int
    strategy: Any


@overload
def DistributedOptimizer(
    optimizer: ArrayOptimizer, *, shard_state: bool = False, **options: Unpack[OptimizerOptions]
) -> AveragingOptimizer: ...
@overload
def DistributedOptimizer(
    optimizer: _OfParameters, *, shard_state: bool = False, **options: Unpack[OptimizerOptions]
) -> TorchOptimizer: ...
@overload
def DistributedOptimizer(
    optimizer: _OfTrees, *, shard_state: Literal[True], **options: Unpack[OptimizerOptions]
) -> ShardedTransformation: ...
@overload
def DistributedOptimizer(
    optimizer: _OfTrees, *, shard_state: bool = False, **options: Unpack[OptimizerOptions]
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
    sync_every: SyncEvery | None = None,
    outer: Any = None,
    neighbours: Any = None,
    shard_state: bool = False,
    delay: int = 0,
    strategy: Any = None,
) -> Any:
    """Return an optimizer that combines the gradients of all ranks before each update.

    *Collective*: all ranks pass optimizers of one kind, the same parameters in the same order, and
    the same options. All ranks then compute the same bits, so parameters that are equal at the
    start (`broadcast_parameters`) stay equal. The first step compares the parameters: a forgotten
    broadcast raises on all ranks.

    Args:
        optimizer: one of `strategies.optimizers`, a `torch.optim.Optimizer`, or a
            `GradientTransformation` of Optax.
        named_parameters: for PyTorch, such as `model.named_parameters()`: names for errors. Every
            parameter of the optimizer needs a name.
        comm: communicator; None for all ranks of the job.
        op: MEAN or SUM over the ranks.
        compression: compression of gradients, see `Communicator.allreduce`; with feedback, every
            bucket has its residual. None is `cc.NONE`.
        backward_passes_per_step: number of backward passes that a rank accumulates, without
            communication, before an update.
        allow_partial_steps: for PyTorch: whether a step with fewer passes updates; by default the
            passes are kept for the next step. For other optimizers each call is a pass.
        average_aggregated_gradients: whether to divide accumulated gradients by the number of
            passes; by default passes are summed, as PyTorch does in `.grad`.
        gradient_predivide_factor: f: gradients are divided by f, summed, and multiplied by f/size.
            For MEAN only.
        clip_global_norm: largest norm of the averaged gradients over all parameters; larger
            gradients are scaled down to it.
        sparse_as_dense: reduce sparse PyTorch gradients as dense ones, and convert them back for
            the update.
        bucket_bytes: bytes of gradients per bucket.
        overlap: reduce PyTorch gradients during the backward pass. "auto" overlaps if the ranks are
            on several nodes and MPI supports sends from several threads, until three consecutive
            steps had to reduce again. The results are the same: if, on any rank, gradients change
            before `step`, or the number of examples differs from the last step, all gradients are
            reduced again. Costs a copy of the gradients and, for changes that PyTorch does not
            count, two reads (CRC-32C). With several passes the last one overlaps, if `step` is
            called once for all of them.
        compare: properties that ranks compare in the first step, before any change. "all": the bits
            of the parameters, and the optimizer's class, state and settings, such as its learning
            rate; the settings also in every later step. "parameters": the parameters only, for
            settings that differ on purpose. "nothing". Optax has no readable settings: its updates
            in the first two steps are compared instead, and the floating-point scalars of its state
            in every step; parameters only if they are passed to `update`.
        compare_every: compare again every this many steps; None compares in the first step only.
            With `sync_every`, synchronizations count instead of steps.
        sync_every: k: each rank makes k steps by its own gradients, then the parameters of all
            ranks are averaged (local SGD). A function from the number of steps already taken to k
            changes it (post-local SGD). None averages the gradients of every step.
        outer: optimizer that updates the parameters of the last synchronization by the mean over
            ranks of their change, in place of the average, such as
            `strategies.optimizers.Nesterov(0.7)` (DiLoCo). For an optimizer of Optax one of Optax,
            otherwise one of `strategies.optimizers`.
        neighbours: each rank steps by its own gradients, then averages its parameters with its
            neighbours' (gossip), for arrays and PyTorch: a graph of `Communicator.neighbours`, such
            as "ring" or "exponential". The parameters then differ between ranks. None averages over
            all ranks.
        shard_state: each rank updates a part of every parameter and holds the optimizer's state of
            that part alone (ZeRO, stage 1), for elementwise optimizers. A transformation of Optax
            is tried in its first `init`, which raises `ValueError` if it is not elementwise; its
            `update` needs the parameters.
        delay: 1: each step applies the average of the last one, while its own gradients travel
            until the next, for arrays and PyTorch. The first step changes nothing, and the
            gradients of the last step are not applied.
        strategy: strategy whose ranks combine gradients, in place of `comm`; for
            `OneDeviceStrategy` this rank alone. Several devices per process require an optimizer
            for arrays, called in `strategy.run`. A `ParameterServerStrategy` or
            `SpareReplicaStrategy` runs the steps itself, with an equivalent optimizer of this
            package (`strategies.optimizers.torch_equivalents`, `optax_equivalents`); the only other
            option is then `named_parameters`. *Collective* over its tasks.

    Returns:
        An optimizer of the given kind: `AveragingOptimizer`, a `TorchOptimizer`, which is a
        `torch.optim.Optimizer`, or a `GradientTransformation`.

    Raises:
        TypeError: the kind of optimizer is unknown; on all ranks.
        ValueError: an option is out of range, the optimizer is already wrapped, a parameter has no
            name or a duplicate name, or the strategy does not average this way; on all ranks.
        MismatchError: arguments differ among ranks; on all ranks.

    Cost: the comparison of settings needs no message. It takes 3 us per step for 11 PyTorch
    settings in one parameter group, 18 us for 55 settings in 5 groups. The comparison in the first
    step reads parameters and state once, 60 to 150 ms per GB on the host. It sends 17 bytes to
    every rank, in place of the message that compares names and shapes. Arrays on a device are
    copied to the host.
    """
    # In one object, which ranks compare as one text.
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
        sync_every=sync_every,
        outer=outer,
        # A list, because arrays have no single truth value in comparisons.
        neighbours=neighbours.tolist() if hasattr(neighbours, "tolist") else neighbours,
        shard_state=shard_state,
        delay=delay,
    )
    if strategy is not None:
        # A strategy that runs the steps itself has no place for options of averaging.
        if comm is not None or (dispatch.is_hosting(strategy) and rule != AveragingOptions()):
            raise ValueError(
                "DistributedOptimizer: the strategy says how gradients are combined, expected no "
                f"comm, and no option of averaging if it makes the steps itself, got {rule}"
            )
        if dispatch.is_hosting(strategy):
            return dispatch.wrap_optimizer(optimizer, strategy, named_parameters)
        comm = dispatch.ranks_of(strategy)
    # After the branch for strategies: one without MPI must not start it.
    comm = extend.comm_or_world(comm, "DistributedOptimizer")

    # Within `compare`: an error on one rank raises on all.
    def prepare() -> tuple[_Make, list[str]]:
        rule.check()
        dispatch.check_unwrapped(optimizer)
        make, facts = _recognise(optimizer, named_parameters)
        _check_outer(rule.outer, facts[0])
        # A transformation is checked by its first `init`, which has the shapes of parameters.
        if rule.shard_state and facts[0] != _JAX:
            _check_elementwise(optimizer)
        if rule.delay and facts[0] == _JAX:
            raise ValueError(
                "DistributedOptimizer: a compiled step waits for its averages, delay is for arrays "
                f"and PyTorch, got {type(optimizer).__name__}"
            )
        if rule.neighbours is not None and facts[0] == _JAX:
            raise ValueError(
                "DistributedOptimizer: the parameters of a compiled step cannot be changed in "
                f"place, neighbours is for arrays and PyTorch, got {type(optimizer).__name__}"
            )
        if strategy is not None:
            # `facts[0]` is the kind, which decides what a strategy can do with it.
            dispatch.check_averaging(strategy, arrays=facts[0] == _ARRAYS)
        if overlap is True and facts[0] in _AT_ONCE:
            raise ValueError(
                "DistributedOptimizer: all gradients are there at once, overlap is for optimizers "
                f"of PyTorch, got {type(optimizer).__name__}"
            )
        # The options are facts: other ranks would lay out other buckets.
        return make, [*facts, f"options {rule}"]

    # The wrapper is created after the agreement, as its constructor is collective.
    return agreement.compare(comm, "DistributedOptimizer", prepare)(comm, rule)


_Make = Callable[[cc.Communicator, AveragingOptions], Any]

# Kinds of optimizers, which ranks compare first. These two receive all gradients in one call, so
# that no overlap is possible.
_ARRAYS, _JAX = _AT_ONCE = ("kind arrays", "kind jax")


def _recognise(optimizer: Any, named_parameters: Any) -> tuple[_Make, list[str]]:
    """Return the wrapper for this kind of optimizer, and the facts that must agree on all ranks.

    Imports no library except the optimizer's own.
    """
    # By `sys.modules`: an optimizer of PyTorch exists only if PyTorch is imported.
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(optimizer, torch.optim.Optimizer):
        from strategies.torch import parameters

        names = parameters.names_of(optimizer, named_parameters)
        facts = parameters.described(optimizer, names)
        return lambda comm, rule: _wrap_torch(optimizer, names, comm, rule), facts
    # Arrays have names of their own, or none.
    if named_parameters is not None:
        raise ValueError(
            "DistributedOptimizer: named_parameters are for optimizers of PyTorch, got "
            f"{type(optimizer).__name__}"
        )
    _refuse_keras(optimizer)
    # By methods, so that any optimizer with this interface is accepted.
    if callable(getattr(optimizer, "apply_gradients", None)):
        return lambda comm, rule: _wrap_arrays(optimizer, comm, rule), [_ARRAYS]
    # Last, because many objects have methods of these names.
    if all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        return lambda comm, rule: _wrap_jax(optimizer, comm, rule), [_JAX]
    raise TypeError(
        "DistributedOptimizer: the optimizer has no apply_gradients, expected one of "
        "strategies.optimizers, of torch.optim or of Optax, got " + type(optimizer).__name__
    )


def _wrap_arrays(optimizer: Any, comm: cc.Communicator, rule: AveragingOptions) -> Any:
    if rule.sync_every is not None or rule.neighbours is not None:
        return LocalOptimizer(optimizer, comm, rule)
    kind = ShardedOptimizer if rule.shard_state else AveragingOptimizer
    return kind(optimizer, comm, rule)


def _wrap_torch(optimizer: Any, names: Any, comm: cc.Communicator, rule: AveragingOptions) -> Any:
    if rule.sync_every is not None or rule.neighbours is not None:
        from strategies.torch.local_steps import LocalTorchOptimizer

        return LocalTorchOptimizer(optimizer, names, comm, rule)
    if rule.shard_state:
        from strategies.torch.sharded_optimizer import ShardedTorchOptimizer

        return ShardedTorchOptimizer(optimizer, names, comm, rule)
    from strategies.torch.optimizer import TorchOptimizer

    return TorchOptimizer(optimizer, names, comm, rule)


def _wrap_jax(optimizer: Any, comm: cc.Communicator, rule: AveragingOptions) -> Any:
    if rule.shard_state:
        from strategies.jax import sharded_transformation

        return sharded_transformation.wrap(optimizer, comm, rule)
    from strategies.jax import transformation

    return transformation.wrap(optimizer, comm, rule)


def _check_elementwise(optimizer: Any) -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(optimizer, torch.optim.Optimizer):
        from strategies.torch import sharded_optimizer as of_torch

        of_torch.check_elementwise(optimizer)
    else:
        sharded_optimizer.check_elementwise(optimizer)


def _check_outer(outer: Any, kind: str) -> None:
    """Reject an outer optimizer of another kind than the anchors."""
    expected, methods = "strategies.optimizers", ("apply_gradients", "state_dict")
    if kind == _JAX:
        expected, methods = "Optax", ("init", "update")
    if outer is not None and not all(callable(getattr(outer, name, None)) for name in methods):
        raise TypeError(
            f"DistributedOptimizer: expected an optimizer of {expected} as outer, got "
            f"{type(outer).__name__}"
        )


def _refuse_keras(optimizer: Any) -> None:
    """Reject Keras optimizers, whose `apply_gradients` accepts only Keras variables."""
    # By module name, so that Keras is not imported for the check.
    roots = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
    if roots & {"keras", "tf_keras", "tensorflow"}:
        raise TypeError(
            "DistributedOptimizer: optimizers of Keras are wrapped by "
            "strategies.keras.DistributedOptimizer, expected one of strategies.optimizers, of "
            f"torch.optim or of Optax, got {type(optimizer).__module__}."
            f"{type(optimizer).__qualname__}"
        )
