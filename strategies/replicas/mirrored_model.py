"""`MirroredModel`: a PyTorch module, a Flax NNX module or a Keras model with a copy per replica.

The arrays of a model are variables of the strategy: parameters are mirrored, and arrays that the
model itself writes, such as the statistics of a batch norm, are local to each replica and averaged
when they are read. A *form* knows one library. It lists the arrays, and calls a function of the
model with a replica's values of these arrays.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from strategies.core.pytree import is_module
from strategies.replicas import context
from strategies.replicas.context import ReplicaContext, ReplicaStrategy
from strategies.replicas.local_array import detached, is_whole
from strategies.replicas.variable import Aggregation, Variable

__all__ = ["MirroredModel", "Part", "form_of"]

R = TypeVar("R")


class Part(NamedTuple):
    """An array of a model.

    Attributes:
        name: unique in the model.
        value: the array, shape (...).
        is_written: whether the model itself writes it, rather than an optimizer.
    """

    name: str
    value: Any
    is_written: bool

    @property
    def aggregation(self) -> Aggregation:
        """How the values of the replicas are combined; the mean of integers may be a fraction."""
        if not self.is_written:
            return "none"
        return "only_first_replica" if is_whole(self.value) else "mean"


class _Form(Protocol):
    """A model of one library; `values` are in the order of `parts`."""

    parts: list[Part]

    def call(
        self, replica: ReplicaContext, values: list[Any], fn: Callable[[Any], R]
    ) -> tuple[R, list[Any]]:
        """Return `fn(model)`, and the new values of the written parts."""

    def differentiate(
        self, replica: ReplicaContext, values: list[Any], fn: Callable[[Any], Any]
    ) -> tuple[Any, list[Any], list[Any]]:
        """Return the loss, the gradients of the other parts, and the written parts' values."""

    def store(self, values: list[Any]) -> Any:
        """Copy the values into the original model, and return it."""


class MirroredModel:
    """A model with a copy per replica; `Strategy.mirror` returns it.

    Its state, for `Saver`, is one copy: parameters, and averages of the arrays that replicas write.

    Args:
        strategy: strategy of the replicas.
        form: the model.
        variables: the variables of its parts.
    """

    def __init__(
        self, strategy: ReplicaStrategy, form: _Form, variables: Sequence[Variable]
    ) -> None:
        self.variables = tuple(variables)
        self._strategy = strategy
        self._form = form
        pairs = list(zip(form.parts, self.variables, strict=True))
        self._trained = [variable for part, variable in pairs if not part.is_written]
        self._written = [variable for part, variable in pairs if part.is_written]

    def minimize(
        self, optimizer: Any, loss_of: Callable[[Any], Any], *, examples: Any = None
    ) -> Any:
        """Update the model by the gradients of all replicas, inside `run`; *collective*.

        Args:
            optimizer: as for `Strategy.apply_gradients`.
            loss_of: function of this replica's copy of the model; returns the loss, shape (). The
                copy is valid, and keeps changed modes such as `eval()`, in this call only.
            examples: number of rows of which the loss is the mean; see `Strategy.apply_gradients`.

        Returns:
            this replica's loss, without its autograd history.

        Raises:
            RuntimeError: called outside of `run`.
            Exception: as `Strategy.apply_gradients`.
        """
        replica = self._replica("minimize")
        loss, gradients, new = self._form.differentiate(replica, self._values(), loss_of)
        self._write(new)
        pairs = zip(gradients, self._trained, strict=True)
        self._strategy.apply_gradients(optimizer, pairs, examples=examples)
        return loss

    def apply(self, fn: Callable[[Any], R]) -> R:
        """Return `fn(net)` for this replica's copy of the model, inside `run`.

        Raises:
            RuntimeError: called outside of `run`.
        """
        result, new = self._form.call(self._replica("apply"), self._values(), fn)
        self._write(new)
        return result

    def export(self) -> Any:
        """Copy the current values into the model passed to `mirror`; return it; *collective*."""
        return self._form.store(list(self.state_dict().values()))

    def state_dict(self) -> dict[str, Any]:
        """Return name -> array, shape (...), of one copy; *collective*."""
        return {
            part.name: detached(variable.value)
            for part, variable in zip(self._form.parts, self.variables, strict=True)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Assign the arrays of `state_dict()` to all copies.

        Raises:
            KeyError: a name is missing.
            ValueError: a shape differs.
        """
        for part, variable in zip(self._form.parts, self.variables, strict=True):
            variable.assign(state_dict[part.name])

    def _replica(self, operation: str) -> ReplicaContext:
        top = context.current()
        if top is None or top.replica is None or top.strategy is not self._strategy:
            raise RuntimeError(
                f"{operation}: called outside of a replica, expected a call inside run of the "
                f"strategy that mirrors the model; export() returns a model for use outside"
            )
        return top.replica

    def _values(self) -> list[Any]:
        return [variable.value for variable in self.variables]

    def _write(self, new: list[Any]) -> None:
        for variable, value in zip(self._written, new, strict=True):
            variable.assign(value)


def form_of(model: Any, count: int) -> _Form:
    """Return the form of a model for `count` replicas.

    Raises:
        TypeError: the model is of no supported kind.
        ValueError: arrays of the model have no values yet, or Keras uses another backend.
    """
    keras: Any = sys.modules.get("keras")
    nnx: Any = sys.modules.get("flax.nnx")
    form: _Form
    if keras is not None and isinstance(model, keras.Model):
        if keras.backend.backend() != "jax":
            raise ValueError(
                f"mirror: expected the backend jax of Keras, got {keras.backend.backend()}"
            )
        if not model.built:
            raise ValueError("mirror: the Keras model has no variables yet, expected a built one")
        form = _KerasForm(model)
    elif is_module(model):
        form = _TorchForm(model, count)
    elif nnx is not None and isinstance(model, nnx.Module):
        form = _NnxForm(model)
    else:
        raise TypeError(
            f"mirror: expected a PyTorch module, a Flax NNX module or a Keras model, got "
            f"{type(model).__name__}"
        )
    if not form.parts:
        raise ValueError(f"mirror: the {type(model).__name__} has no arrays, expected a model")
    return form


class _TorchForm:
    """A PyTorch module; each replica has a module whose tensors are those of its variables."""

    def __init__(self, module: Any, count: int) -> None:
        torch: Any = sys.modules["torch"]
        self._module = module
        for name, tensor in _tensors(module):
            if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta:
                raise ValueError(
                    f"mirror: the tensor has no value yet, expected an initialized one on a "
                    f"device, got {type(tensor).__name__} (tensor: {name})"
                )
        self.parts = [
            Part(name, tensor, not isinstance(tensor, torch.nn.Parameter))
            for name, tensor in _tensors(module)
        ]
        self._copies = [copy.deepcopy(module) for _ in range(count)]

    def call(
        self, replica: ReplicaContext, values: list[Any], fn: Callable[[Any], R]
    ) -> tuple[R, list[Any]]:
        module = self._bound(replica, values)
        return fn(module), list(module.buffers())

    def differentiate(
        self, replica: ReplicaContext, values: list[Any], fn: Callable[[Any], Any]
    ) -> tuple[Any, list[Any], list[Any]]:
        module = self._bound(replica, values)
        module.zero_grad()  # also of a step that has failed
        loss = fn(module)
        loss.backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        return loss.detach(), gradients, list(module.buffers())

    def store(self, values: list[Any]) -> Any:
        with sys.modules["torch"].no_grad():
            for (_, tensor), value in zip(_tensors(self._module), values, strict=True):
                tensor.copy_(value)
        return self._module

    def _bound(self, replica: ReplicaContext, values: list[Any]) -> Any:
        module = self._copies[replica.local_id]
        for own, original in zip(module.modules(), self._module.modules(), strict=True):
            own.training = original.training
        for (_, tensor), value in zip(_tensors(module), values, strict=True):
            # No copy: the variable's memory. A tensor that is used in several places is one object
            # here, so tied parameters stay tied.
            tensor.data = value.detach()
        return module


def _tensors(module: Any) -> list[tuple[str, Any]]:
    """Return the parameters and buffers of a module by name, each tensor once."""
    return [*module.named_parameters(), *module.named_buffers()]


class _JaxForm(_Form, Protocol):
    """A model as a function of its arrays, which JAX differentiates."""

    def differentiate(
        self, replica: ReplicaContext, values: list[Any], fn: Callable[[Any], Any]
    ) -> tuple[Any, list[Any], list[Any]]:
        places = [i for i, part in enumerate(self.parts) if not part.is_written]

        def loss_of(trained: list[Any]) -> tuple[Any, list[Any]]:
            filled = list(values)
            for i, value in zip(places, trained, strict=True):
                filled[i] = value
            return self.call(replica, filled, fn)

        differentiated = sys.modules["jax"].value_and_grad(loss_of, has_aux=True)
        (loss, new), gradients = differentiated([values[i] for i in places])
        return loss, gradients, new


class _NnxForm(_JaxForm):
    """A Flax NNX module; variables of the type `Param` are trained."""

    def __init__(self, module: Any) -> None:
        jax, nnx = sys.modules["jax"], sys.modules["flax.nnx"]
        self._module = module
        self._graph, params, rest = nnx.split(module, nnx.Param, ...)
        flattened = [jax.tree_util.tree_flatten_with_path(state) for state in (params, rest)]
        self._trees = [tree for _, tree in flattened]
        self._leaves = [leaf for leaves, _ in flattened for _, leaf in leaves]
        # Random keys stay outside of variables: each replica derives its own from them.
        self._is_key = [_is_key(leaf) for leaf in self._leaves]
        self.parts = [
            Part("/".join(str(key.key) for key in path if hasattr(key, "key")), leaf, written)
            for written, (leaves, _) in zip((False, True), flattened, strict=True)
            for path, leaf in leaves
            if not _is_key(leaf)
        ]

    def call(
        self, replica: ReplicaContext, values: list[Any], fn: Callable[[Any], R]
    ) -> tuple[R, list[Any]]:
        jax, nnx = sys.modules["jax"], sys.modules["flax.nnx"]
        rest = iter(values)
        number = replica.replica_id_in_sync_group
        leaves = [
            jax.random.fold_in(leaf, number) if is_key else next(rest)
            for leaf, is_key in zip(self._leaves, self._is_key, strict=True)
        ]
        module = nnx.merge(self._graph, *self._states(leaves))
        result = fn(module)
        new = jax.tree.leaves(nnx.split(module, nnx.Param, ...)[2])
        return result, [leaf for leaf in new if not _is_key(leaf)]

    def store(self, values: list[Any]) -> Any:
        rest = iter(values)
        leaves = [
            leaf if is_key else next(rest)
            for leaf, is_key in zip(self._leaves, self._is_key, strict=True)
        ]
        sys.modules["flax.nnx"].update(self._module, *self._states(leaves))
        return self._module

    def _states(self, leaves: list[Any]) -> list[Any]:
        """Return the states of the parameters and of the rest."""
        params, rest = self._trees
        count = params.num_leaves
        return [params.unflatten(leaves[:count]), rest.unflatten(leaves[count:])]


def _is_key(leaf: Any) -> bool:
    jax = sys.modules["jax"]
    return bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


class _KerasForm(_JaxForm):
    """A Keras model over JAX; its variables have a replica's values in a stateless scope."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._variables = [*model.trainable_variables, *model.non_trainable_variables]
        trained = {id(variable) for variable in model.trainable_variables}
        # By position, because Keras numbers paths by all models that a program has made before.
        self.parts = [
            Part(f"{i}/{variable.name}", variable.value, id(variable) not in trained)
            for i, variable in enumerate(self._variables)
        ]

    def call(
        self, replica: ReplicaContext, values: list[Any], fn: Callable[[Any], R]
    ) -> tuple[R, list[Any]]:
        pairs = list(zip(self._variables, values, strict=True))
        with sys.modules["keras"].StatelessScope(state_mapping=pairs) as scope:
            result = fn(self._model)
        new = []
        for part, (variable, value) in zip(self.parts, pairs, strict=True):
            if part.is_written:
                current = scope.get_current_value(variable)
                new.append(value if current is None else current)
        return result, new

    def store(self, values: list[Any]) -> Any:
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)
        return self._model
