"""Distributed datasets: per-replica batches."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import collectives as cc
from collectives import extend
from strategies.core import array_ops
from strategies.core.agreement import compare
from strategies.core.process_group import ProcessGroup
from strategies.core.pytree import leaves, map_leaves, zip_leaves
from strategies.core.validation import choice
from strategies.errors import NotFoundError
from strategies.input import batch_split, uneven_batches
from strategies.input.batch_split import is_column
from strategies.input.file_batches import FileBatches
from strategies.replicas.per_replica import PerReplica

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

_COMPARED_BATCHES = 3  # more than one, because the labels of two small batches may be equal


@dataclass(frozen=True)
class InputContext:
    """The part of the input that one pipeline reads."""

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
    """The replica that a value is for."""

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


def of_global_batches(
    batches: Iterable[Any], ranks: ProcessGroup, count: int, policy: Policy
) -> Iterator[Any]:
    """Return each of `count` replicas its rows; see `Strategy.distribute_dataset`."""

    def prepare() -> tuple[tuple[Policy, Iterable[Any]], list[str]]:
        # The arguments of `FileBatches` decide which rank reads which file, so they must be equal.
        used = _resolve_policy(batches, ranks, policy)
        facts = batches.facts() if used == "file" and isinstance(batches, FileBatches) else []
        return (used, _batches_of_process(batches, ranks, used)), [f"policy {used}", *facts]

    if ranks.comm is None:
        (used, local), _ = prepare()
    else:
        # Before the first batch, because a rank with another policy would wait in another exchange.
        used, local = compare(ranks.comm, "distribute_dataset", prepare)
    # A single replica takes whole batches.
    if ranks.size * count == 1:
        return iter(local)
    if used == "data":
        # Compared only under "data", where each rank computes its part from an equal batch.
        same = local if ranks.comm is None else _compare_first_batches(local, ranks.comm)
        return _parts_of_same(same, ranks, count)
    return from_function(_own_batches(local, ranks, count), ranks, count)


def of_same_batches(
    batches: Iterable[Any], ranks: ProcessGroup, count: int, policy: Policy
) -> Iterator[Any]:
    """As `of_global_batches`, for processes that are not in step: without communication.

    Raises:
        ValueError: the policy is neither "data" nor "auto", which means "data" here.
    """
    choice("distribute_dataset", "policy", policy, Policy)
    if policy not in ("auto", "data"):
        raise ValueError(
            f"distribute_dataset: the replicas are not in step, expected policy 'data', got "
            f"{policy!r}"
        )
    alone = ranks.size * count == 1
    return iter(batches) if alone else _parts_of_same(batches, ranks, count)


def _resolve_policy(batches: Iterable[Any], ranks: ProcessGroup, policy: Policy) -> Policy:
    """Check the policy and replace "auto" by the policy that it selects."""
    choice("distribute_dataset", "policy", policy, Policy)
    if policy == "auto":
        # Fewer files than processes would leave a process without data.
        files = batches.files if isinstance(batches, FileBatches) else ()
        return "file" if files and len(files) >= ranks.size else "data"
    return policy


def _batches_of_process(
    batches: Iterable[Any], ranks: ProcessGroup, policy: Policy
) -> Iterable[Any]:
    """Return the batches of this process's files under policy "file", otherwise all batches."""
    if policy != "file":
        return batches
    if not isinstance(batches, FileBatches):
        raise NotFoundError(
            "distribute_dataset: batches without files, expected FileBatches for "
            f"policy 'file', got {type(batches).__name__}"
        )
    return batches.share(ranks.rank, ranks.size)


def _compare_first_batches(batches: Iterable[Any], comm: cc.Communicator) -> Iterator[Any]:
    """Yield the batches; compare the first ones among the ranks before yielding them.

    *Collective* for each compared batch.

    Raises:
        MismatchError: the batches differ, or some ranks have fewer; on all ranks.
        Exception: the error of an iterator; on all ranks.
    """
    iterator = iter(batches)

    def prepare() -> tuple[Any, list[Any]]:
        # Inside `compare`, so that an error of the loader raises on all ranks.
        batch = next(iterator, None)
        if batch is None:
            return None, []
        batch_split.rows_of(batch)  # raises for leaves without rows
        return batch, [_fingerprint(leaf) for leaf in leaves(batch, is_column)]

    for _ in range(_COMPARED_BATCHES):
        batch = compare(comm, "distribute_dataset", prepare, _order_difference)
        # `compare` has found the same end on all ranks; otherwise it has raised.
        if batch is None:
            return
        yield batch
    yield from iterator


def _fingerprint(leaf: Any) -> tuple[str, bool]:
    """Return a checksum of an array or column, and whether its rows differ from each other."""
    # Columns of texts and lists have no dtype.
    array = leaf if array_ops.is_array(leaf) or is_column(leaf) else np.asarray(leaf)
    if is_column(array) or getattr(array.dtype, "hasobject", False):
        objects = array if is_column(array) else array.reshape(-1).tolist()
        # Other objects are compared by class: their text may contain addresses.
        rows = [x if isinstance(x, (str, bytes, int, float)) else type(x) for x in objects]
        return f"{zlib.crc32(repr(rows).encode()):08x}", len(set(rows)) > 1
    # Copied to one array, because a device array arrives in parts.
    flat = np.concatenate([np.empty(0, np.uint8), *array_ops.byte_views(array)])
    size, rest = divmod(flat.size, max(1, len(array)))
    # A constant array, such as padding, is equal in any order of rows, so it proves nothing.
    varied = not rest and size > 0 and bool((flat.reshape(-1, size) != flat[:size]).any())
    return f"{zlib.crc32(flat.data):08x}", varied


def _order_difference(
    comm: cc.Communicator, what: str, fingerprints: Sequence[Sequence[Any]]
) -> str | None:
    """Describe how the batches of two ranks differ; None if one array proves the same order.

    Ranks may augment their images at random; then the labels still show the same order.
    """
    if len({len(of_rank) for of_rank in fingerprints}) == 1:
        # Only leaves in the same places can be compared.
        for of_leaf in zip(*fingerprints, strict=True):
            if len(set(of_leaf)) == 1 and of_leaf[0][1]:
                return None
    for rank, of_rank in enumerate(fingerprints):
        if of_rank != fingerprints[0]:
            first, second = (
                f"checksums {' '.join(checksum for checksum, _ in found) or 'of no batch'} on "
                f"{extend.describe_ranks(comm, number)}"
                for number, found in ((0, fingerprints[0]), (rank, of_rank))
            )
            return (
                f"{what}: ranks have different batches, {first}, {second} of {comm.size}. Policy "
                f"'data' needs the same batches in the same order on all ranks: give the loader a "
                f"seed, or use policy 'off'"
            )
    return None


def _parts_of_same(batches: Iterable[Any], ranks: ProcessGroup, count: int) -> Iterator[Any]:
    """Split each batch for all replicas; the parts are dealt to the processes in turn."""
    replicas = ranks.size * count
    for batch in batches:
        sizes = batch_split.even_sizes(batch_split.rows_of(batch), replicas)
        parts = batch_split.cut(batch, sizes)
        # Short parts are at the end. Dealt in turn, they belong to different processes.
        yield _for_replicas(tuple(parts[ranks.rank :: ranks.size]))


def _own_batches(batches: Iterable[Any], ranks: ProcessGroup, count: int) -> Iterator[Any]:
    """Split this process's batches so that all processes together use a global batch per step."""
    sizes: list[int] = []
    for batch in batches:
        rows = batch_split.rows_of(batch)
        # A shorter batch, such as the last one, is cut at the same places.
        if not sizes or rows > sum(sizes):
            sizes = batch_split.cycle_sizes(rows, ranks.rank, ranks.size, ranks.size * count)
        yield from batch_split.cut(batch, sizes)


def from_function(batches: Iterable[Any], ranks: ProcessGroup, count: int) -> Iterator[Any]:
    """Return each replica of this process the next batch, until all replicas have run out.

    Steps in which no replica has a row are skipped.
    """
    steps = _steps(batches, count)
    comm = ranks.comm
    used = (
        # Ranks may have different numbers of batches: `in_step` exchanges who has rows.
        filter(batch_split.has_rows, steps) if comm is None else uneven_batches.in_step(steps, comm)
    )
    return (_for_replicas(step) for step in used)


def on_devices(
    batches: Iterator[Any], names: Sequence[str], put: Callable[[Any, str], Any]
) -> Iterator[Any]:
    """Move the batches of this process's replicas to their devices."""

    def brought(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return put(leaf, names[0])
        # Strict: one batch per device.
        return PerReplica(tuple(put(x, name) for x, name in zip(leaf.values, names, strict=True)))

    return (map_leaves(brought, batch) for batch in batches)


def _steps(batches: Iterable[Any], count: int) -> Iterator[tuple[Any, ...]]:
    """Yield a batch for each replica; replicas without one get 0 rows."""
    iterator = iter(batches)
    while step := tuple(itertools.islice(iterator, count)):
        # An empty batch of the same kind, so that the replica's function needs no special case.
        nothing = map_leaves(uneven_batches.empty_like, step[0], is_column)
        yield step + (nothing,) * (count - len(step))


def _for_replicas(parts: tuple[Any, ...]) -> Any:
    """Return the batches of this process's replicas as one structure."""
    if len(parts) == 1:
        return parts[0]
    return zip_leaves(PerReplica, parts, "distribute_dataset", is_column)
