"""Parameters of a PyTorch optimizer: names, and facts compared among ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from strategies.averaging.consistency import Fingerprint, fingerprints_of_state
from strategies.averaging.parameter_spec import ParameterSpec

__all__ = ["Names", "described", "facts_of_optimizer", "names_of", "parameters_of", "settings_of"]

# Keys of a parameter group that hold parameters and names, which are compared elsewhere.
_NOT_SETTINGS = ("params", "param_names")

Names = dict[torch.Tensor, str]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def names_of(optimizer: torch.optim.Optimizer, named_parameters: Any) -> Names:
    """Return a name for every parameter of an optimizer.

    Args:
        optimizer: the optimizer.
        named_parameters: a dict or (name, parameter) pairs, which may include other parameters.
            None uses the optimizer's own names, or numbers.

    Raises:
        TypeError: an item is not a pair of a name and a tensor.
        ValueError: two parameters have one name, or a parameter lacks a name; or the optimizer has
            no parameters, or one of them twice.
    """
    say = "DistributedOptimizer"
    parameters = parameters_of(optimizer)
    # By identity: tensors compare element by element, but hash by identity.
    if len(parameters) != len(set(parameters)):
        raise ValueError(f"{say}: a parameter is given twice to the optimizer")
    if named_parameters is None:
        own = [
            name
            for group in optimizer.param_groups
            # PyTorch has `param_names` only if the program gave names.
            for name in group.get("param_names", [None] * len(group["params"]))
        ]
        numbered = [f"parameter {i}" if name is None else name for i, name in enumerate(own)]
        return dict(zip(parameters, numbered, strict=True))
    mapping = isinstance(named_parameters, Mapping)
    pairs = list(named_parameters.items() if mapping else named_parameters)
    names: Names = {}
    taken: dict[str, torch.Tensor] = {}
    for pair in pairs:
        fits = isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)
        if not fits or not isinstance(pair[1], torch.Tensor):
            raise TypeError(
                f"{say}: expected (name, parameter) pairs as named_parameters, such as "
                f"model.named_parameters(), got {type(pair).__name__}"
            )
        name, parameter = pair
        # The same pair twice is harmless, as with shared parameters.
        if taken.setdefault(name, parameter) is not parameter:
            raise ValueError(f"{say}: two parameters have one name, got {name!r}")
        # The first name of a shared parameter, as in `named_parameters`.
        names.setdefault(parameter, name)
    for i, parameter in enumerate(parameters):
        if parameter not in names:
            raise ValueError(
                f"{say}: named_parameters have no name for a parameter of the optimizer, got "
                f"{len(pairs)} names (position {i}, shape {tuple(parameter.shape)})"
            )
    return names


def described(optimizer: torch.optim.Optimizer, names: Names) -> list[str]:
    """Return facts that must be equal on all ranks: class; name, shape and dtype of parameters."""
    lines = [str(ParameterSpec.of(names[p], p)) for p in parameters_of(optimizer)]
    return [f"kind {type(optimizer).__module__}.{type(optimizer).__qualname__}", *lines]


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the settings of an optimizer's groups by name."""
    groups = optimizer.param_groups
    if len(groups) == 1:
        return {name: value for name, value in groups[0].items() if name not in _NOT_SETTINGS}
    return {
        _of_group(name, i): value
        for i, group in enumerate(groups)
        for name, value in group.items()
        if name not in _NOT_SETTINGS
    }


@functools.cache  # called for each setting in each step
def _of_group(name: str, number: int) -> str:
    return f"{name} of group {number}"


def facts_of_optimizer(optimizer: torch.optim.Optimizer, names: Names) -> list[Fingerprint]:
    """Describe the state of an optimizer by the names of its parameters."""
    # Parameters without a name are not in `names` if they were added later.
    states = {names.get(p, "unnamed"): optimizer.state.get(p) for p in parameters_of(optimizer)}
    return fingerprints_of_state(states)
