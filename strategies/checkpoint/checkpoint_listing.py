"""Listing of the checkpoints in a directory: all, latest, best.

A checkpoint has the name of its step, and is complete if its manifest is in order and all files are
there at full length. What is incomplete is passed over with a warning in the log. Neither the
pointer `latest` nor the clock is needed: each manifest holds its place in the order of writing.
"""

from __future__ import annotations

import logging
import os
import re

from strategies import errors
from strategies.checkpoint import manifest, retention
from strategies.checkpoint.retention import Best
from strategies.checkpoint.storage import Location, StorageUrl, exists, explained, folders, resolve

__all__ = ["DIRECTORY_NAME", "best", "select", "complete", "latest", "name_of", "list_steps"]

_log = logging.getLogger(__name__)
DIRECTORY_NAME = re.compile(r"(?:\.old-)?step-(\d{6,15})")  # 15 digits: `manifest.MAX_STEP`


def name_of(step: int) -> str:
    """Return what the directory of a checkpoint is called."""
    return f"step-{step:06d}"


def list_steps(directory: str | os.PathLike[str]) -> list[Location]:
    """Return the checkpoints of a directory in the order of their steps, complete or not.

    Args:
        directory: of checkpoints; or a checkpoint, which is then the only one. A path or URL.

    Raises:
        NotFoundError: there is none.
    """
    root = resolve(directory)
    with explained("places", root):
        if _is_checkpoint(root):
            return [root]
        candidates = _candidates(root)
    if not candidates:
        raise errors.NotFoundError(f"places: no checkpoint (directory: {root})")
    return [candidates[step] for step in sorted(candidates)]


def latest(directory: str | os.PathLike[str]) -> Location | None:
    """Find the newest complete checkpoint: manifest in order, all files there at full length."""
    root = resolve(directory)
    with explained("latest", root):
        found = complete(root) if exists(root) else []
    newest = max(found, key=lambda item: (item[1].sequence, item[1].step), default=None)
    return newest[0] if newest else None


def best(directory: str | os.PathLike[str], best: Best) -> Location | None:
    """Find the complete checkpoint with the best metric; of equal ones that written first.

    Args:
        directory: of checkpoints; a path or URL.
        best: "min" or "max".

    Returns:
        None where no checkpoint has a metric.
    """
    root = resolve(directory)
    with explained("best", root):
        found = {plan.step: (path, plan) for path, plan in complete(root)} if exists(root) else {}
    chosen = retention.best_of(best, [plan for _, plan in found.values()])
    return None if chosen is None else found[chosen.step][0]


def select(root: Location, step: int | None) -> Location:
    """Find the checkpoint that is meant, in a directory or as it is.

    Raises:
        NotFoundError: there is none.
    """
    if step is None and _is_checkpoint(root):
        return root
    candidates = _candidates(root)
    path = candidates.get(step) if step is not None else latest(root)
    if path is None and step is None and candidates:
        return candidates[max(candidates)]  # reading it says why it does not count
    if path is None:
        wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise errors.NotFoundError(
            f"restore: no {wanted}, got steps {sorted(candidates)} (directory: {root})"
        )
    return path


def complete(root: Location) -> list[tuple[Location, manifest.Manifest]]:
    """Give the complete checkpoints of the directory."""
    found = []
    for step, path in _candidates(root).items():
        if isinstance(path, StorageUrl) and not exists(path / manifest.NAME):
            continue  # one that is being written, or that died
        try:
            plan = manifest.read(path)
        except errors.OpError as error:
            _log.warning("checkpoint passed over: %s", error)
            continue
        if plan.step == step:
            found.append((path, plan))
        else:
            _log.warning("checkpoint passed over: holds step %d (directory: %s)", plan.step, path)
    return found


def _is_checkpoint(root: Location) -> bool:
    """Whether the directory is a checkpoint, by its name or its content."""
    named = DIRECTORY_NAME.fullmatch(root.name) is not None
    if isinstance(root, StorageUrl):
        return named or exists(root / manifest.NAME)
    return (named and root.is_dir()) or (root / manifest.NAME).exists()


def _candidates(root: Location) -> dict[int, Location]:
    """Give step -> directory that by its name is a checkpoint; links are not followed."""
    found = {}
    # ".old-step-1" sorts before "step-1" and so counts only where that is missing.
    for path in folders(root):
        match = DIRECTORY_NAME.fullmatch(path.name)
        if match and path.name.endswith(name_of(int(match[1]))):
            found[int(match[1])] = path
    return found
