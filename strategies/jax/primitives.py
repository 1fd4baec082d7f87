"""Primitives of JAX: one per operation, with their transformation rules.

All primitives share an *ordered effect*: JAX passes a token from each call to the next one, through
loops and branches and from program to program. So calls run in program order, and XLA drops, merges
or repeats none. The effect is the one of `jax.debug.callback(..., ordered=True)`, the only public
effect that JAX accepts in rematerialized functions and custom derivatives.

Gradients are those of the sum of all ranks' losses (`strategies.model_parallel`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.interpreters import ad, batching, mlir

from strategies.jax import call_rules, ffi
from strategies.jax.call_rules import RULES, Call, adjoint_of
from strategies.jax.failures import record_failure

try:
    from jax.extend.core import Primitive
except ImportError:  # JAX before 0.4.36
    from jax.core import Primitive

__all__ = ["Primitive", "bind", "callback_effect", "lower_in_order", "ordered_effect"]


def bind(call: Call, operands: Sequence[Any]) -> list[Any]:
    """Run a call on concrete arrays, or add it to the program that JAX traces."""
    results: list[Any] = _primitives()[call.operation].bind(*operands, call=call)
    return results


@functools.cache
def _primitives() -> dict[str, Any]:
    """Return the primitive of each operation."""
    return {name: _primitive(name) for name in RULES}


@functools.cache
def ordered_effect() -> Any:
    """Return the effect that orders calls."""
    return _effect_of(lambda: jax.debug.callback(lambda: None, ordered=True))


@functools.cache
def callback_effect() -> Any:
    """Return the effect of `io_callback`, the only ordered one for programs of several devices."""
    return _effect_of(lambda: io_callback(lambda: None, None, ordered=True))


def _effect_of(program: Callable[[], Any]) -> Any:
    (effect,) = jax.make_jaxpr(program)().effects
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
    mlir.register_lowering(primitive, _lower)
    ad.primitive_jvps[primitive] = _jvp
    ad.primitive_transposes[primitive] = _transpose
    batching.primitive_batchers[primitive] = _batch
    return primitive


def _run(*operands: Any, call: Call) -> list[Any]:
    """Run a call at once, after the programs in flight."""
    jax.effects_barrier()
    results = [np.empty(aval.shape, aval.dtype) for aval in _evaluate(*operands, call=call)[0]]
    call_rules.run(call, [np.asarray(x) for x in operands], results)
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
    results = [jax.core.ShapedArray(shape(call, x.shape), x.dtype) for x in operands]
    return results, {ordered_effect()}


def _lower(context: Any, *operands: Any, call: Call) -> Any:
    """Add the call to a program."""
    call_rules.communicator_of(call)
    return lower_in_order(context, operands, functools.partial(call_rules.run, call), call)


def lower_in_order(
    context: Any, operands: Sequence[Any], run: ffi.Runner, call: Call | None = None
) -> Any:
    """Add a call to a program, between two tokens of its effect.

    Programs of one CPU device call the handler, other programs an `io_callback`.

    Args:
        context: JAX's context of the lowering.
        operands: values of the program.
        run: as for `ffi.ProgramCall`.
        call: as for `ffi.ProgramCall`.
    """
    (effect,) = context.tokens_in.effects()
    if not _takes_handler(context):
        return _lower_callback(context, operands, run, effect)
    made = ffi.ProgramCall(run, context.avals_in, context.avals_out, call)
    with_token = context.replace(
        avals_in=[*context.avals_in, _token()], avals_out=[*context.avals_out, _token()]
    )
    lower = jax.ffi.ffi_lowering(made.target, has_side_effect=True)
    token = context.tokens_in.get(effect)
    results = list(lower(with_token, *operands, token, number=np.int64(made.number)))
    context.set_tokens_out(mlir.TokenSet({effect: results.pop()}))
    return results


def _takes_handler(context: Any) -> bool:
    """Return whether a program can call the handler: on one CPU device."""
    module = context.module_context
    devices = getattr(module.axis_context, "num_devices", 1)
    return tuple(module.platforms) == ("cpu",) and devices == 1 and ffi.is_usable()


def _lower_callback(context: Any, operands: Sequence[Any], run: ffi.Runner, effect: Any) -> Any:
    """Add a call by JAX's own callback, whose effect takes the place of another ordered effect."""
    lowering = mlir.lower_fun(
        lambda *values: _by_callback(run, context.avals_out, values), multiple_results=True
    )
    token = context.tokens_in.get(effect)
    inner = context.replace(tokens_in=mlir.TokenSet({callback_effect(): token}), tokens_out=None)
    results = lowering(inner, *operands)
    context.set_tokens_out(mlir.TokenSet({effect: inner.tokens_out.get(callback_effect())}))
    return results


def _by_callback(run: ffi.Runner, avals: Sequence[Any], operands: Sequence[Any]) -> Any:
    """Run a call by JAX's own callback, which copies operands and results."""

    def on_the_host(*given: Any) -> list[Any]:
        results = [np.empty(aval.shape, aval.dtype) for aval in avals]
        try:
            run([np.asarray(x) for x in given], results)
        except BaseException as error:
            record_failure(error)
            raise
        return results

    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    return io_callback(on_the_host, shapes, *operands, ordered=True)


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
