"""Calls of Python functions by compiled programs, in program order with the operations.

In programs of one CPU device XLA passes its buffers to the function without a copy. In others the
call is an `io_callback`, which copies operands and results.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from collectives.extend import CallOrigin, calls_from, current_origin
from strategies.jax.call_rules import Array
from strategies.jax.primitives import (
    Primitive,
    callback_effect,
    lower_in_order,
    ordered_effect,
)

__all__ = ["host_call"]


def host_call(
    function: Callable[[Any, Sequence[Array], Sequence[Array]], None],
    owner: Any,
    results: Sequence[Any],
    operands: Sequence[Any],
) -> list[Any]:
    """Add the call of a Python function to the program that JAX traces.

    Args:
        function: called with `owner`, the operands and the results to fill, as NumPy arrays that
            are valid during the call. It must not refer to `owner` itself.
        owner: object that the program keeps alive as long as JAX keeps the program.
        results: shape and dtype of every result.
        operands: traced or concrete arrays.

    Returns:
        The results.
    """
    avals = tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in results)
    # A process with several devices may compile the program for all of them.
    effect = ordered_effect() if jax.local_device_count() == 1 else callback_effect()
    call = _HostCall(function, weakref.ref(owner), avals, effect, current_origin())
    found: list[Any] = _primitive().bind(*operands, call=call)
    return found


# Compared by identity, because JAX keeps parameters of primitives in dicts.
@dataclass(frozen=True, eq=False)
class _HostCall:
    """One call in a program.

    Attributes:
        function: as for `host_call`.
        owner: refers to the owner. The handler keeps calls forever, and the owner may have memory
            for all gradients.
        results: shapes and dtypes of the results.
        effect: orders the call among others.
        origin: line of the program.
    """

    function: Callable[[Any, Sequence[Array], Sequence[Array]], None]
    owner: weakref.ref[Any]
    results: tuple[Any, ...]
    effect: Any
    origin: CallOrigin

    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        """Call the function; errors name the line of the program."""
        owner = self.owner()
        if owner is None:
            raise RuntimeError(f"{self.origin.entry}: the transformation no longer exists")
        with calls_from(self.origin):
            self.function(owner, operands, results)


@functools.cache
def _primitive() -> Any:
    primitive = Primitive("host_call")
    primitive.multiple_results = True
    primitive.def_impl(_run)
    primitive.def_effectful_abstract_eval(
        lambda *operands, call: (list(call.results), {call.effect})
    )
    mlir.register_lowering(primitive, _lower)
    return primitive


def _run(*operands: Any, call: _HostCall) -> list[Any]:
    """Run a call at once, after the programs in flight."""
    jax.effects_barrier()
    results = [np.empty(aval.shape, aval.dtype) for aval in call.results]
    call.run([np.asarray(x) for x in operands], results)
    return [jax.numpy.asarray(result) for result in results]


def _lower(context: Any, *operands: Any, call: _HostCall) -> Any:
    context.module_context.add_keepalive(call.owner())
    return lower_in_order(context, operands, call.run)
