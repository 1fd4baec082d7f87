"""Primitives of JAX: one per operation, with their transformation rules.

All primitives share an *ordered effect*: JAX passes a token from each call to the next one, through
loops and branches and from program to program. So calls run in program order, and XLA drops, merges
or repeats none. The effect is the one of `jax.debug.callback(..., ordered=True)`, the only public
effect that JAX accepts in rematerialized functions and custom derivatives.

Gradients are those of the sum of all ranks' losses (`strategies.model_parallel`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from strategies.jax import ffi
from strategies.jax.call_rules import RULES, Call, adjoint_of

try:
    from jax.extend.core import Primitive
except ImportError:  # JAX before 0.4.36
    from jax.core import Primitive

__all__ = ["bind"]


def bind(call: Call, operands: Sequence[Any]) -> list[Any]:
    """Run a call on concrete arrays, or add it to the program that JAX traces."""
    results: list[Any] = _primitives()[call.operation].bind(*operands, call=call)
    return results


@functools.cache
def _primitives() -> dict[str, Any]:
    """Return the primitive of each operation."""
    return {name: _primitive(name) for name in RULES}


@functools.cache
def _effect() -> Any:
    """Return the effect that orders calls."""
    program = jax.make_jaxpr(lambda: jax.debug.callback(lambda: None, ordered=True))()
    (effect,) = program.effects
    return effect


@functools.cache
def _token() -> Any:
    """Return the abstract value of a token."""
    (token,) = jax.make_jaxpr(jax.lax.create_token)().out_avals
    return token


def _primitive(name: str) -> Any:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(_run)
    primitive.def_effectful_abstract_eval(_evaluate)
    mlir.register_lowering(primitive, _lower, platform="cpu")
    ad.primitive_jvps[primitive] = _jvp
    ad.primitive_transposes[primitive] = _transpose
    batching.primitive_batchers[primitive] = _batch
    return primitive


def _run(*operands: Any, call: Call) -> list[Any]:
    """Run a call at once, after the programs in flight."""
    jax.effects_barrier()
    results = [np.empty(aval.shape, aval.dtype) for aval in _evaluate(*operands, call=call)[0]]
    ffi.ProgramCall(call, operands, results).run_on([np.asarray(x) for x in operands], results)
    return [_placed(*pair) for pair in zip(results, operands, strict=True)]


def _placed(result: Any, operand: Any) -> Any:
    """Return a result on the operand's device, if the operand is committed to one."""
    device = operand.device if getattr(operand, "committed", False) else None
    # The `device` of a sharded array is its sharding, which fits this shape only.
    if result.shape != operand.shape and not getattr(device, "is_fully_replicated", True):
        device = None
    return jnp.asarray(result, device=device)


def _evaluate(*operands: Any, call: Call) -> tuple[list[Any], set[Any]]:
    """Return shapes and dtypes of the results, and the effect."""
    shape = RULES[call.operation].shape
    return [jax.core.ShapedArray(shape(call, x.shape), x.dtype) for x in operands], {_effect()}


def _lower(context: Any, *operands: Any, call: Call) -> list[Any]:
    """Add the handler's call to a program, between two tokens."""
    ffi.register()
    number = ffi.ProgramCall(call, context.avals_in, context.avals_out).numbered()
    with_token = context.replace(
        avals_in=[*context.avals_in, _token()], avals_out=[*context.avals_out, _token()]
    )
    lower = jax.ffi.ffi_lowering(ffi.TARGET, has_side_effect=True)
    token = context.tokens_in.get(_effect())
    results = list(lower(with_token, *operands, token, number=np.int64(number)))
    context.set_tokens_out(mlir.TokenSet({_effect(): results.pop()}))
    return results


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> Any:
    """Run the operation, and run it again on the tangents: linear maps are their derivatives."""
    results = bind(call, primals)
    # Integers have no tangents.
    moving = [i for i, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.inexact)]
    changes = [ad.Zero(_tangent_of(x)) for x in results]
    if any(not isinstance(tangents[i], ad.Zero) for i in moving):
        adjoint_of(call, 0)
        told = bind(call, [ad.instantiate_zeros(tangents[i]) for i in moving])
        for i, change in zip(moving, told, strict=True):
            changes[i] = change
    return results, changes


def _tangent_of(x: Any) -> Any:
    """Return shape and dtype of the tangent of an array."""
    is_number = jnp.issubdtype(x.dtype, jnp.inexact)
    return jax.core.ShapedArray(x.shape, x.dtype if is_number else jax.dtypes.float0)


def _transpose(cotangents: Sequence[Any], *operands: Any, call: Call) -> list[Any]:
    """Run the adjoint, also for a result that has no gradient here: other ranks may have one."""
    avals = [x.aval if ad.is_undefined_primal(x) else x for x in operands]
    back, factor = adjoint_of(call, avals[0].shape[0] if avals and avals[0].shape else 0)
    given = [ad.instantiate_zeros(x) for x in cotangents]
    if factor != 1:
        given = [x * np.asarray(factor, x.dtype) for x in given]
    # A message has its array on the other rank: here zeros have the shape.
    if call.operation == "send":
        given = [jnp.zeros(x.shape, x.dtype) for x in avals]
    found = bind(back, given)
    if call.operation == "recv":
        found = [jnp.zeros(x.shape, x.dtype) for x in avals]
    return [
        x if ad.is_undefined_primal(operand) else None
        for x, operand in zip(found, operands, strict=True)
    ]


def _batch(operands: Sequence[Any], axes: Sequence[Any], *, call: Call) -> Any:
    """Run one call for the whole batch."""
    rule = RULES[call.operation]
    axis = int(rule.has_rows)
    (size,) = {x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None}
    # Every operand gets the axis.
    stacked = [
        jnp.broadcast_to(x, (size, *x.shape)) if a is None else jnp.moveaxis(x, a, 0)
        for x, a in zip(operands, axes, strict=True)
    ]
    results = bind(call, [jnp.moveaxis(x, 0, axis) for x in stacked])
    # `send` has one scalar for all of them.
    return results, [axis if x.ndim else None for x in results]
