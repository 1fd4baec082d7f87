"""Synchronous training on JAX devices of one or many processes.

A function of replicas is compiled once, for all devices of its process: replicas are parts of one
program, not threads. A function that JAX cannot compile runs as under the other strategies, in a
thread per device; the log gives the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np

import collectives as cc
from strategies.averaging.local_replicas import ReplicaGradients
from strategies.averaging.optimizer import ArrayOptimizer, AveragingOptimizer
from strategies.cluster.local_devices import of_jax, put_jax
from strategies.cluster.resolvers import TPUClusterResolver
from strategies.core.communication_options import CommunicationOptions
from strategies.core.process_group import of_this_job
from strategies.optimizers import Optimizer
from strategies.replicas import context, datasets
from strategies.replicas.context import require_cross_replica
from strategies.strategy.base import Strategy

__all__ = ["TPUStrategy"]

log = logging.getLogger(__name__)

R = TypeVar("R")

_MOST_PROGRAMS = 128  # programs kept for later calls


class TPUStrategy(Strategy):
    """Synchronous training on TPUs, or on JAX's other devices, of all ranks.

    `run` compiles the function as `jax.jit` does: the function is called while it is traced, so its
    prints and counters run then. Array and number arguments are traced; strings, variables,
    functions and similar arguments are constants of the program. A function object that is created
    for each call is recompiled each time.

    Inside the function, `all_reduce` and `all_gather` are JAX reductions over the devices of a
    process; `jax.lax` can use the axis "replica". `apply_gradients` and writes to "on_write"
    variables take effect after the program. With several ranks, `collectives` exchanges arrays
    after the program. For `all_reduce` and `all_gather` it does so between two programs; the second
    one recomputes the values that it needs from the first. `merge_call`, `Rows`, batches of
    different lengths, and functions that `jax.jit` rejects are not compiled: then each device has a
    thread.

    Args:
        tpu_cluster_resolver: selects the devices; None for JAX's, TPUs before others.
        devices: names of some devices, such as ["/tpu:0", "/tpu:2"]; None for all.
        comm: the ranks; None for those of the job, without MPI for one process. *Collective*.
        communication_options: how ranks exchange arrays.

    Raises:
        RuntimeError: JAX is not installed, or has no such devices; on all ranks.
        MismatchError: ranks have different numbers of devices; on all ranks.

    Cost: besides the program, one all-reduce of 8 bytes among the ranks per `run`.
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        *,
        devices: Sequence[str] | None = None,
        comm: cc.Communicator | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        resolver = tpu_cluster_resolver or TPUClusterResolver()
        error: Exception | None = None
        # A valid name, so that the constructor below can run and agree about the error.
        names: Sequence[str] = ["/cpu:0"]
        try:
            names = resolver.devices() if devices is None else devices
        except Exception as caught:
            error = caught
        super().__init__(names, of_this_job() if comm is None else comm, communication_options)
        # After the constructor, which creates the ranks.
        self.ranks.agree("TPUStrategy", error)
        self.cluster_resolver = resolver
        # JAX may lack a device on one rank only.
        self._mesh = self.ranks.run_then_agree("TPUStrategy", self._make_mesh)
        self._programs: dict[Any, Any] = {}
        self._reasons: set[str] = set()

    def _make_mesh(self) -> Any:
        from strategies.tpu.arguments import Mesh

        return Mesh(self.devices, [of_jax(name) for name in self.devices])

    def run(
        self,
        fn: Callable[..., R],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> R:
        """Call `fn(*args, **kwargs)` on every replica, compiled; *collective*. See `Strategy.run`.

        Returns:
            the result of `fn`; a `PerReplica` for every array if a process has several devices.
        """
        require_cross_replica(self, "run")
        if not isinstance(args, (list, tuple)):
            return super().run(fn, args, kwargs)
        # A new call: an earlier error must not be taken for this one's.
        self.ranks.start()
        program, given, why, error = None, None, "", None
        try:
            program, given, why = self._compile(fn, [list(args), dict(kwargs or {})])
        except Exception as caught:
            error = caught
        # Collective: if one rank cannot compile, all run threads, since their points must match.
        if self._any_cannot(why):
            if why and why not in self._reasons:
                self._reasons.add(why)
                log.warning("run: not compiled, each device has a thread instead: %s", why)
            # An error of this rank still has to be agreed below.
            if error is None:
                return super().run(fn, args, kwargs)
        result: Any = None
        if error is None:
            assert program is not None
            try:
                result = program(given)
            except Exception as caught:
                error = caught
        self.ranks.agree("run: its end", error)
        return result  # type: ignore[no-any-return]

    def _any_cannot(self, why: str) -> bool:
        """Return whether any rank has a reason not to compile; *collective*."""
        mine = np.array([bool(why)], np.int64)
        return bool(self.ranks.allreduce([mine], cc.MAX)[0][0])

    def _compile(self, fn: Callable[..., Any], given: Any) -> tuple[Any, Any, str]:
        """Return the program for a call and its arguments, or the reason for its absence."""
        import jax

        from strategies.tpu.arguments import Arguments
        from strategies.tpu.program import Program
        from strategies.tpu.replica import Untraceable

        try:
            arguments = Arguments.of(self._mesh, given)
            key = fn, arguments.key
            program = self._programs.get(key)
            if program is None:
                program = Program(self, self._mesh, fn, arguments)
                if len(self._programs) == _MOST_PROGRAMS:
                    self._programs.clear()
                self._programs[key] = program
            return program, arguments, ""
        except Untraceable as error:
            return None, None, str(error)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
            # JAX's errors for control flow, shapes and indices that depend on traced values.
            return None, None, f"what jax.jit refuses: {str(error).splitlines()[0]}"

    def apply_gradients(
        self,
        optimizer: ArrayOptimizer | AveragingOptimizer,
        grads_and_vars: Iterable[tuple[Any, Any]],
        *,
        examples: Any = None,
    ) -> None:
        """Average the gradients of all replicas, and update the variables once; see `Strategy`.

        Inside a compiled function the update runs after the program.
        """
        top = context.current()
        replica = None if top is None or top.strategy is not self else top.replica
        if replica is None or not replica.is_traced:
            super().apply_gradients(optimizer, grads_and_vars, examples=examples)
            return

        def act(strategy: Any, pairs: list[tuple[Any, Any]], told: float | None) -> None:
            from strategies.optimizers.jax_step import donate_gradients

            # These gradients belong to the program. Averaged ones may be in memory of their own.
            direct = self.ranks.size == 1 and isinstance(optimizer, Optimizer)
            with donate_gradients() if direct else nullcontext():
                self._apply(optimizer, [ReplicaGradients(pairs, told)])

        # Examples may be traced, so only the pairs are checked.
        pairs = ReplicaGradients.of(grads_and_vars, None).pairs
        replica.apply(act, pairs, examples)  # type: ignore[attr-defined]

    def placed(self, value: Any, *, shared: bool) -> list[Any]:
        """Return the value for each replica of this process: one replicated array if shared."""
        from strategies.tpu.arguments import is_array

        if not is_array(value):
            raise ValueError(
                f"variable: TPUStrategy computes with JAX, expected an array of NumPy or JAX, got "
                f"{type(value).__name__}"
            )
        if shared:
            return [self._mesh.everywhere(value)] * len(self.devices)
        return [put_jax(value, name) for name in self.devices]

    def _on_devices(self, batches: Iterator[Any]) -> Iterator[Any]:
        from strategies.tpu.arguments import ShardedPerReplica

        placed = datasets.on_devices(batches, self.devices, put_jax)
        return (ShardedPerReplica.of(self._mesh, batch) for batch in placed)
