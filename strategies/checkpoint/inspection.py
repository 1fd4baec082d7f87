"""Inspection of checkpoints: contents, integrity and differences."""

from __future__ import annotations

import itertools
import json
import os
import pprint
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from strategies import errors
from strategies.checkpoint import checkpoint, manifest
from strategies.checkpoint.checkpoint_listing import follow_latest
from strategies.checkpoint.storage import Location

__all__ = ["diff", "facts", "show", "verify"]


_WIDTH = 98  # columns of metadata, after an indent of two


def show(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield lines about a checkpoint, or about each in a directory of checkpoints.

    Only manifests are read.

    Raises:
        OpError: as `checkpoint.restore`.
    """
    root = follow_latest(path)
    places = checkpoint.list_steps(root)
    # A directory of checkpoints, unless the path is the only checkpoint itself.
    if [root] != places:
        yield f"{'checkpoint':<20} {'written':<19} {'metric':>10} {'arrays':>7} {'bytes':>14}"
        for place in places:
            plan = manifest.read(place)
            metric = "" if plan.metric is None else f"{plan.metric:.6g}"
            yield (
                f"{place.name:<20} {_time(plan.written):<19} {metric:>10} {len(plan.tensors):>7} "
                f"{sum(plan.files.values()):>14,}"
            )
        return
    plan = manifest.read(root)
    yield f"step      {plan.step}"
    ranks = f"{plan.world_size} rank{'s' * (plan.world_size != 1)}"
    yield f"written   {_time(plan.written)} by {ranks}"
    if plan.metric is not None:
        yield f"metric    {plan.metric:.6g}"
    for file, nbytes in plan.files.items():
        yield f"file      {file}, {nbytes:,} bytes"
    width = max([len(_printable(name)) for name in plan.tensors], default=0)
    for name, entry in plan.tensors.items():
        parts = "" if len(entry.slices) == 1 else f", in {len(entry.slices)} slices"
        yield f"{_printable(name):<{width}}  {entry.dtype:<9} {list(entry.shape)}{parts}"
    yield "metadata"
    text = pprint.pformat(plan.metadata, width=_WIDTH, compact=True, sort_dicts=False)
    yield from (f"  {line}" for line in text.splitlines())


def facts(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of `show` for JSON: of a checkpoint, or of each in a directory.

    Raises:
        OpError: as `checkpoint.restore`.
    """
    root = follow_latest(path)
    places = checkpoint.list_steps(root)
    if [root] != places:
        return {"checkpoints": [{"name": p.name, **_summary(manifest.read(p))} for p in places]}
    plan = manifest.read(root)
    tensors = {
        name: {"dtype": entry.dtype, "shape": entry.shape, "slices": len(entry.slices)}
        for name, entry in plan.tensors.items()
    }
    whole = {"files": dict(plan.files), "tensors": tensors, "metadata": plan.metadata}
    return {**_summary(plan), **whole}


def _summary(plan: manifest.Manifest) -> dict[str, Any]:
    return {
        "step": plan.step,
        "written": plan.written or None,  # seconds since 1970; older manifests have no time
        "ranks": plan.world_size,
        "metric": plan.metric,
        "arrays": len(plan.tensors),
        "bytes": sum(plan.files.values()),
    }


def verify(path: str | os.PathLike[str]) -> Iterator[tuple[Location, errors.OpError | None]]:
    """Read a checkpoint, or each in a directory; yield its path and its error or None.

    Memory is allocated for a small buffer only.

    Raises:
        OpError: the checkpoint does not exist.
    """
    for place in checkpoint.list_steps(follow_latest(path)):
        try:
            checkpoint.verify(place)
        except errors.OpError as error:
            yield place, error
        else:
            yield place, None


def diff(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> Iterator[str]:
    """Yield lines with the differences of two checkpoints; none if they hold the same bits.

    In a directory the newest checkpoint is used. Time, number of ranks and files of the write are
    ignored.

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
    # As bytes, so that NaNs are equal to themselves and -0.0 differs from 0.0.
    here, there = (array.reshape(-1).view(np.uint8).reshape(width) for array in (one, other))
    count = int((here != there).any(axis=1).sum())
    if not count:
        return None
    # Exact for float32 and smaller; the difference of large int64 values is rounded.
    wide = np.complex128 if one.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore"):  # of infinities
        apart = np.abs(one.astype(wide) - other.astype(wide))
    # NaN against a number counts as different above, but has no distance.
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
    """Return local time as text; manifests of older versions have no time and store 0."""
    if seconds == 0:
        return "unknown"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # a forged or damaged time
        return "unknown"


def _printable(name: str) -> str:
    """Return a name with its control characters escaped, which would move the cursor."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)
