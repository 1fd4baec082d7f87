"""Inspection of checkpoints: contents, integrity and differences."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from strategies import errors
from strategies.checkpoint import checkpoint, manifest
from strategies.checkpoint.storage import Location, resolve

__all__ = ["diff", "show", "verify"]


def show(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield lines about a checkpoint, or about each in a directory of checkpoints.

    Only manifests are read.

    Raises:
        OpError: as `checkpoint.restore`.
    """
    places = checkpoint.list_steps(path)
    if [resolve(path)] != places:
        yield f"{'checkpoint':<20} {'written':<19} {'metric':>10} {'arrays':>7} {'bytes':>14}"
        for place in places:
            plan = manifest.read(place)
            metric = "" if plan.metric is None else f"{plan.metric:.6g}"
            yield (
                f"{place.name:<20} {_time(plan.written):<19} {metric:>10} {len(plan.tensors):>7} "
                f"{sum(plan.files.values()):>14,}"
            )
        return
    plan = manifest.read(resolve(path))
    yield f"step      {plan.step}"
    yield f"written   {_time(plan.written)} by {plan.world_size} ranks"
    if plan.metric is not None:
        yield f"metric    {plan.metric:.6g}"
    for file, nbytes in plan.files.items():
        yield f"file      {file}, {nbytes:,} bytes"
    width = max([len(_printable(name)) for name in plan.tensors], default=0)
    for name, entry in plan.tensors.items():
        parts = "" if len(entry.slices) == 1 else f", in {len(entry.slices)} slices"
        yield f"{_printable(name):<{width}}  {entry.dtype:<9} {list(entry.shape)}{parts}"
    yield f"metadata  {json.dumps(plan.metadata)}"


def verify(path: str | os.PathLike[str]) -> Iterator[tuple[Location, errors.OpError | None]]:
    """Read all of a checkpoint, or of each in a directory; yield what is wrong with it, or None.

    Memory is taken for a small buffer only.

    Raises:
        OpError: there is no such checkpoint.
    """
    for place in checkpoint.list_steps(path):
        try:
            checkpoint.verify(place)
        except errors.OpError as error:
            yield place, error
        else:
            yield place, None


def diff(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> Iterator[str]:
    """Yield lines that say in what two checkpoints differ, none if they hold the same bits.

    Of a directory the newest counts. When it was written, by how many ranks and in which files does
    not matter.

    Raises:
        OpError: as `checkpoint.restore`.
    """
    first, second = checkpoint.restore(one), checkpoint.restore(other)
    if first.step != second.step:
        yield f"step: {first.step} and {second.step}"
    for name in dict.fromkeys([*first.tensors, *second.tensors]):
        told = _difference(first.tensors.get(name), second.tensors.get(name))
        if told is not None:
            yield f"{_printable(name)}: {told}"
    yield from _differences("metadata", first.metadata, second.metadata)


def _difference(one: Any, other: Any) -> str | None:
    if one is None or other is None:
        return f"only in the {'second' if one is None else 'first'}"
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
    width = (one.size, one.itemsize)
    here, there = (array.reshape(-1).view(np.uint8).reshape(width) for array in (one, other))
    count = int((here != there).any(axis=1).sum())
    if not count:
        return None
    wide = np.complex128 if one.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore"):  # of infinities
        apart = np.abs(one.astype(wide) - other.astype(wide))
    largest = np.max(apart, initial=0.0, where=~np.isnan(apart))
    return f"{count} of {one.size} elements differ, by {largest:.3g} at most"


def _differences(name: str, one: Any, other: Any) -> Iterator[str]:
    """Yield the places where two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from _differences(f"{name}/{key}", one[key], other[key])
    elif isinstance(one, list) and isinstance(other, list):
        for index, (a, b) in enumerate(itertools.zip_longest(one, other)):
            yield from _differences(f"{name}/{index}", a, b)
    elif one != other:
        yield f"{_printable(name)}: {json.dumps(one)[:200]} and {json.dumps(other)[:200]}"


def _time(seconds: float) -> str:
    """Say when, in this machine's time; what an older version wrote does not tell."""
    if seconds == 0:
        return "unknown"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # a forged number
        return "unknown"


def _printable(name: str) -> str:
    """Give a name without what would move the cursor of a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)
