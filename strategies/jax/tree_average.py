"""Averages of trees of arrays, inside and outside compiled programs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import collectives as cc
from strategies.averaging import consistency
from strategies.averaging.accumulation import MIXED_EXAMPLES, GradientAccumulator
from strategies.averaging.averaging import Averaging
from strategies.averaging.consistency import Kind, fingerprint_of
from strategies.averaging.options import OPERATION, AveragingOptions
from strategies.averaging.parameter_spec import ParameterSpec
from strategies.averaging.sharded_buckets import ShardedBuckets, box_of
from strategies.checkpoint.boxes import inside, whole
from strategies.core import array_ops
from strategies.core.pytree import WHOLE
from strategies.core.sparse import Rows
from strategies.jax.host_calls import host_call
from strategies.replicas.context import require_one_replica

__all__ = ["TreeAverage", "name_of", "part_of_rank"]

_FOREIGN = (
    "update: with shard_state each rank has its own part of the state, expected the state of rank "
    "{}, from init or from_slices, got that of another rank; save and broadcast to_slices"
)


def name_of(path: Sequence[Any]) -> str:
    """Return the name of a leaf of a tree."""
    return jax.tree_util.keystr(path) or WHOLE


def part_of_rank(array: Any, rank: int, size: int) -> Any:
    """Return the part of an array that a rank updates with `shard_state`."""
    shape = tuple(array.shape)
    return array[inside(box_of(shape, rank, size), whole(shape))]


def _float_scalars(state: Any, excluded: Sequence[Any]) -> dict[str, Any]:
    """Return the floating-point scalars of a state by name.

    Learning rates (`optax.inject_hyperparams`, line searches), the scale of `reduce_on_plateau` and
    its losses are such scalars. A state does not mark the scalars that updates depend on, so all
    are compared; a rank's own loss in one of them is an error. `excluded` are paths of parameters
    whose own scalars are left out.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {
        name_of(path): leaf
        for path, leaf in leaves
        if (
            isinstance(leaf, float)
            or (getattr(leaf, "shape", None) == () and jnp.issubdtype(leaf.dtype, jnp.floating))
        )
        # Optax ends the path of a parameter's state with the path of the parameter.
        and not any(path[len(path) - len(own) :] == own for own in excluded)
    }


def _plain(leaf: Any) -> Any:
    """Return the data of a random key; other leaves unchanged."""
    # A typed key has no elements that the host could read.
    is_key = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _like(array: Any) -> Any:
    """Return an array of zeros with the shape and dtype of an array, in the memory of one zero."""
    host = array if isinstance(array, jax.core.Tracer) else np.asarray(array)
    return np.broadcast_to(np.zeros((), host.dtype), host.shape)


def _call(
    function: Callable[[Any, Sequence[Any], Sequence[Any]], None],
    owner: Any,
    likes: Sequence[Any],
    given: Sequence[Any],
) -> list[Any]:
    """Call a function of NumPy arrays now, or in the program that JAX traces; see `host_call`."""
    if any(isinstance(x, jax.core.Tracer) for x in given):
        return host_call(function, owner, likes, [jnp.asarray(x) for x in given])
    # New memory, because JAX keeps the arrays while the next step overwrites the buckets.
    results = [np.empty(like.shape, like.dtype) for like in likes]
    function(owner, given, results)
    return [jnp.asarray(x) for x in results]


class TreeAverage:
    """Averages trees of arrays.

    Args:
        comm: the ranks.
        rule: options of the averaging.

    Attributes:
        comm: communicator of the averages alone. JAX's thread may send while the program's does.
        rule: options of the averaging.
    """

    def __init__(self, comm: cc.Communicator, rule: AveragingOptions) -> None:
        own = comm.split(0, comm.rank)
        assert own is not None
        self.comm, self.rule = own, rule
        self._settings: dict[str, Any] = {}
        self._averaging = Averaging(own, rule, lambda: self._settings)
        self._dtypes: list[str] = []  # of the gradients
        self._updates: ShardedBuckets | None = None  # for updates of other dtypes

    def compare(self, due: Any, params: Any, state: Any, updates: Any) -> None:
        """Compare the ranks' results of an average, if a comparison is due; *collective* then."""
        rule = self.rule
        if rule.compare == "nothing":
            return
        # Parameters may be None: an empty tree has no leaves.
        trees: dict[Kind, Any] = {"parameter": params}
        if rule.compare == "all":
            # With `shard_state` each rank has its own part of the state.
            trees |= {"state": () if rule.shard_state else state, "update": updates}
        paths, _ = jax.tree_util.tree_flatten_with_path(trees)
        names = [(path[0].key, name_of(path[1:])) for path, _ in paths]
        values = [_plain(value) for _, value in paths]

        def on_the_host(own: TreeAverage, hosts: Sequence[Any], results: Sequence[Any]) -> None:
            named = zip(names, hosts, strict=True)
            consistency.compare(
                own.comm,
                OPERATION,
                lambda: [fingerprint_of(kind, name, value) for (kind, name), value in named],
            )

        # A value from a trace is enough: the whole comparison then belongs to the program.
        if not any(isinstance(x, jax.core.Tracer) for x in [*values, due]):
            if due:
                on_the_host(self, values, [])
        else:

            def in_a_program(values: list[Any]) -> None:
                host_call(on_the_host, self, [], values)

            # The same on all ranks, so that all of them compare or none does.
            jax.lax.cond(due, in_a_program, lambda values: None, values)

    def __call__(
        self, updates: Any, examples: Any, passes: int, state: Any, mixed: Any = False
    ) -> tuple[Any, Any]:
        """Return the same tree with the averages over all ranks, and whether a comparison is due.

        With `shard_state` the averages are this rank's part of each.

        Args:
            updates: sums over `passes` passes; means over `examples` unless that is None.
            examples: number of examples, or None.
            passes: number of passes.
            state: state of the wrapped transformation, whose `_float_scalars` are compared.
            mixed: whether only some of the passes had examples; an error on all ranks.
        """
        require_one_replica("update")
        paths, tree = jax.tree_util.tree_flatten_with_path(updates)
        arrays = [array for _, array in paths]
        names = [name_of(path) for path, _ in paths]
        told = examples is not None
        divides = self.rule.shard_state
        # Of a parameter without axes the last bits may differ: each rank sums in its own order.
        scalars = _float_scalars(state, [p for p, x in paths if divides and not jnp.shape(x)])
        settings = list(scalars)
        for name, array in zip(names, arrays, strict=True):
            if isinstance(array, Rows):
                raise TypeError(
                    f"DistributedOptimizer.update: expected a dense gradient, got Rows, which are "
                    f"for strategies.optimizers, or with strategy= a parameter server (variable: "
                    f"{name})"
                )

        def on_the_host(own: TreeAverage, given: Sequence[Any], results: Sequence[Any]) -> None:
            rows, mixed, foreign, *others = given
            # For the checksum, which keeps them: XLA reuses the memory of the operands.
            own._settings = dict(zip(settings, map(copy.copy, others), strict=False))
            hosts = [np.asarray(value) for value in others[len(settings) :]]
            error = ValueError(MIXED_EXAMPLES) if mixed else None
            if foreign:
                error = ValueError(_FOREIGN.format(own.comm.rank))
            averages = own._average(leaves, hosts, float(rows) if told else None, passes, error)
            for result, average in zip(results, [own._averaging.due, *averages], strict=True):
                np.copyto(result, average)

        leaves = [ParameterSpec.of(*pair) for pair in zip(names, map(_like, arrays), strict=True)]
        # An array replaces a missing number.
        rows = np.float32(0) if examples is None else examples
        foreign = state.rank != self.comm.rank if divides else False
        given = [rows, mixed, foreign, *scalars.values(), *arrays]
        # The program must know shapes and dtypes of the results before it runs.
        likes = jax.eval_shape(lambda: list(map(self.part, arrays)) if divides else arrays)
        likes = [jax.ShapeDtypeStruct((), bool), *likes]
        due, *averages = _call(on_the_host, self, likes, given)
        return jax.tree_util.tree_unflatten(tree, averages), due

    def part(self, array: Any) -> Any:
        """Return the part of an array that this rank updates with `shard_state`."""
        return part_of_rank(array, self.comm.rank, self.comm.size)

    def gather(self, parts: Any, likes: Any) -> Any:
        """Return the tree of whole arrays, joined from the parts of all ranks; *collective*.

        Args:
            parts: this rank's part of each array, as `sharded_buckets.box_of` cuts.
            likes: tree of arrays of the whole shapes.
        """
        arrays, tree = jax.tree_util.tree_flatten(parts)
        shapes = [like.shape for like in tree.flatten_up_to(likes)]
        wholes = [
            jax.ShapeDtypeStruct(shape, array.dtype)
            for shape, array in zip(shapes, arrays, strict=True)
        ]

        def on_the_host(own: TreeAverage, given: Sequence[Any], results: Sequence[Any]) -> None:
            own._gather(list(map(np.asarray, given)), results)

        return jax.tree_util.tree_unflatten(tree, _call(on_the_host, self, wholes, arrays))

    def _gather(self, parts: Sequence[Any], results: Sequence[Any]) -> None:
        if [array_ops.dtype_name(x) for x in parts] == self._dtypes:
            self._averaging.gather(results, parts)
            return
        # Such as float32 updates of bfloat16 gradients, which their buckets would round.
        if self._updates is None:
            leaves = [ParameterSpec.of(str(i), x) for i, x in enumerate(results)]
            self._updates = ShardedBuckets(self.comm, cc.SUM)
            self._updates.make(leaves, set(), None)
        self._updates.gather(results, parts)

    def _average(
        self,
        leaves: Sequence[ParameterSpec],
        hosts: Sequence[Any],
        examples: float | None,
        passes: int,
        error: Exception | None,
    ) -> list[Any]:
        # The program has accumulated the passes, so one accumulation is enough.
        self._dtypes = [leaf.dtype for leaf in leaves]
        whole = GradientAccumulator(1).add(hosts, examples=examples, error=error, count=passes)
        assert whole is not None
        averaged = self._averaging.average(leaves, whole)
        # Clipped on the host, where all ranks hold the same averages.
        self._averaging.clip(averaged)
        # A gradient that no rank has means ranks without examples, which the average has rejected.
        return averaged
