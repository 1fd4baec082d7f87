"""Batches for replicas: cut out of global ones, or read by every process for its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from strategies.checks import choice
from strategies.errors import NotFoundError
from strategies.input import split, uneven
from strategies.input.file_batches import FileBatches
from strategies.ranks import Ranks
from strategies.replicas.per_replica import PerReplica
from strategies.structures import map_leaves, zip_leaves

__all__ = [
    "InputContext",
    "Policy",
    "ValueContext",
    "from_function",
    "of_global_batches",
    "of_same_batches",
    "on_devices",
]

Policy = Literal["auto", "file", "data", "off"]


@dataclass(frozen=True)
class InputContext:
    """Which part of the input one pipeline has to read."""

    num_input_pipelines: int
    input_pipeline_id: int
    num_replicas_in_sync: int

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the rows per replica and step.

        Raises:
            ValueError: the global batch does not divide evenly.
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"get_per_replica_batch_size: the batch cannot be shared evenly, expected a "
                f"multiple of {self.num_replicas_in_sync} replicas, got {global_batch_size}"
            )
        return size


@dataclass(frozen=True)
class ValueContext:
    """For which replica a value is."""

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


def of_global_batches(
    batches: Iterable[Any], ranks: Ranks, count: int, policy: Policy
) -> Iterator[Any]:
    """Give each of `count` replicas its rows; see `Strategy.distribute_dataset`."""
    choice("distribute_dataset", "policy", policy, Policy)
    files = batches.files if isinstance(batches, FileBatches) else ()
    if policy == "auto":
        policy = "file" if files and len(files) >= ranks.size else "data"
    if policy == "file":
        if not isinstance(batches, FileBatches):
            raise NotFoundError(
                "distribute_dataset: batches that know of no files, expected FileBatches for "
                f"policy 'file', got {type(batches).__name__}"
            )
        batches = batches.share(ranks.rank, ranks.size)
    if ranks.size * count == 1:
        return iter(batches)
    if policy == "data":
        return _same_batches(batches, ranks, count)
    return from_function(_own_batches(batches, ranks, count), ranks, count)


def of_same_batches(
    batches: Iterable[Any], ranks: Ranks, count: int, policy: Policy
) -> Iterator[Any]:
    """As `of_global_batches`, for processes that are not in step: nothing is exchanged.

    Raises:
        ValueError: the policy is neither "data" nor "auto", which is "data" here.
    """
    if policy == "auto":
        policy = "data"
    if policy != "data":
        raise ValueError(
            f"distribute_dataset: the replicas are not in step, expected policy 'data', got "
            f"{policy!r}"
        )
    return of_global_batches(batches, ranks, count, policy)


def _same_batches(batches: Iterable[Any], ranks: Ranks, count: int) -> Iterator[Any]:
    """Cut each batch for all replicas; the parts go to the processes in turn."""
    replicas = ranks.size * count
    for batch in batches:
        sizes = split.even_sizes(split.rows_of(batch), replicas)
        parts = split.cut(batch, sizes)
        yield _for_replicas(tuple(parts[ranks.rank :: ranks.size]))


def _own_batches(batches: Iterable[Any], ranks: Ranks, count: int) -> Iterator[Any]:
    """Cut this process's batches, so that all processes together take a global batch per step."""
    sizes = None
    for batch in batches:
        if sizes is None:
            rows = split.rows_of(batch)
            sizes = split.cycle_sizes(rows, ranks.rank, ranks.size, ranks.size * count)
        yield from split.cut(batch, sizes)


def from_function(batches: Iterable[Any], ranks: Ranks, count: int) -> Iterator[Any]:
    """Give each replica of this process the next batch, until no replica anywhere has any.

    A step in which none has a row is left out.
    """
    steps = _steps(batches, count)
    comm = ranks.comm
    used = filter(split.has_rows, steps) if comm is None else uneven.in_step(steps, comm)
    return (_for_replicas(step) for step in used)


def on_devices(
    batches: Iterator[Any], names: Sequence[str], put: Callable[[Any, str], Any]
) -> Iterator[Any]:
    """Bring the batches of this process's replicas to their devices."""

    def brought(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return put(leaf, names[0])
        return PerReplica(tuple(put(x, name) for x, name in zip(leaf.values, names, strict=True)))

    return (map_leaves(brought, batch) for batch in batches)


def _steps(batches: Iterable[Any], count: int) -> Iterator[tuple[Any, ...]]:
    """Yield a batch for each replica; those without one get 0 rows."""
    iterator = iter(batches)
    while step := tuple(itertools.islice(iterator, count)):
        nothing = map_leaves(uneven.like, step[0], split.is_column)
        yield step + (nothing,) * (count - len(step))


def _for_replicas(parts: tuple[Any, ...]) -> Any:
    """Return the batches of this process's replicas as one structure."""
    if len(parts) == 1:
        return parts[0]
    return zip_leaves(PerReplica, parts, "distribute_dataset", split.is_column)
