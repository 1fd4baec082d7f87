"""Listing of the checkpoints in a directory: all, latest, best.

A checkpoint's name contains its step. The checkpoint is complete if its manifest is valid and all
files have their full length. Incomplete ones are skipped with a warning in the log. Neither the
pointer `latest` nor clocks decide which is newest: each manifest stores a sequence number.
"""

from __future__ import annotations

import logging
import os
import re

from strategies import errors
from strategies.checkpoint import manifest, retention
from strategies.checkpoint.retention import Best
from strategies.checkpoint.storage import Location, StorageUrl, exists, explained, folders, resolve

__all__ = [
    "DIRECTORY_NAME", "LATEST", "best", "complete", "follow_latest", "latest", "list_steps",
    "name_of", "select",
]  # fmt: skip

_log = logging.getLogger(__name__)
DIRECTORY_NAME = re.compile(r"(?:\.old-)?step-(\d{6,15})")  # 15 digits: `manifest.MAX_STEP`

LATEST = "latest"  # file beside the checkpoints that names the newest, for people


def name_of(step: int) -> str:
    """Return the directory name of a step's checkpoint."""
    return f"step-{step:06d}"


def list_steps(directory: str | os.PathLike[str]) -> list[Location]:
    """Return the checkpoints of a directory ordered by step, complete or not.

    Args:
        directory: path or URL of a directory of checkpoints, or of one checkpoint.

    Raises:
        NotFoundError: the directory has no checkpoint.
    """
    root = resolve(directory)
    with explained("list_steps", root):
        if _is_checkpoint(root):
            return [root]
        candidates = _candidates(root)
    if not candidates:
        raise errors.NotFoundError(f"list_steps: no checkpoint (directory: {root})")
    return [candidates[step] for step in sorted(candidates)]


def latest(directory: str | os.PathLike[str]) -> Location | None:
    """Return the newest complete checkpoint: valid manifest, all files at full length."""
    root = resolve(directory)
    with explained("latest", root):
        found = complete(root) if exists(root) else []
    # `sequence` is unique except after two writers at a URL; then the step decides.
    newest = max(found, key=lambda item: (item[1].sequence, item[1].step), default=None)
    return newest[0] if newest else None


def follow_latest(place: str | os.PathLike[str]) -> Location:
    """Return the newest checkpoint for a path that ends in `latest`; other paths unchanged.

    Raises:
        NotFoundError: the directory has no complete checkpoint.
    """
    root = resolve(place)
    if root.name != LATEST or (not isinstance(root, StorageUrl) and root.is_dir()):
        return root
    newest = latest(root.parent)
    if newest is None:
        raise errors.NotFoundError(f"latest: no checkpoint (directory: {root.parent})")
    return newest


def best(directory: str | os.PathLike[str], best: Best) -> Location | None:
    """Return the complete checkpoint with the best metric; of equal ones the oldest.

    Args:
        directory: path or URL of a directory of checkpoints.
        best: "min" or "max".

    Returns:
        The checkpoint; None if no checkpoint has a metric.
    """
    root = resolve(directory)
    with explained("best", root):
        found = {plan.step: (path, plan) for path, plan in complete(root)} if exists(root) else {}
    chosen = retention.best_of(best, [plan for _, plan in found.values()])
    return None if chosen is None else found[chosen.step][0]


def select(root: Location, step: int | None) -> Location:
    """Return the checkpoint `root` itself, or one in the directory `root`; `latest` is followed.

    Raises:
        NotFoundError: the checkpoint does not exist.
        OpError: the directory cannot be read.
    """
    with explained("restore", root):
        root = follow_latest(root)
        if step is None and _is_checkpoint(root):
            return root
        candidates = _candidates(root)
    path = candidates.get(step) if step is not None else latest(root)
    if path is None and step is None and candidates:
        return candidates[max(candidates)]  # incomplete: reading it raises the reason
    if path is None:
        wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise errors.NotFoundError(
            f"restore: no {wanted}, got steps {sorted(candidates)} (directory: {root})"
        )
    return path


def complete(root: Location) -> list[tuple[Location, manifest.Manifest]]:
    """Return the complete checkpoints of a directory with their manifests."""
    found = []
    for step, path in _candidates(root).items():
        # At a URL the manifest appears last, so its absence is worth no warning.
        if isinstance(path, StorageUrl) and not exists(path / manifest.NAME):
            continue  # still being written, or its writer died
        try:
            plan = manifest.read(path)
        except errors.OpError as error:
            # One damaged checkpoint must not hide the others.
            _log.warning("checkpoint skipped: %s", error)
            continue
        # A renamed or copied directory would be found under a step that it does not hold.
        if plan.step == step:
            found.append((path, plan))
        else:
            _log.warning("checkpoint skipped: holds step %d (directory: %s)", plan.step, path)
    return found


def _is_checkpoint(root: Location) -> bool:
    """Return whether a directory is a checkpoint, by its name or its content."""
    named = DIRECTORY_NAME.fullmatch(root.name) is not None
    if isinstance(root, StorageUrl):
        # A directory at a URL may not exist as such, so the name is enough.
        return named or exists(root / manifest.NAME)
    return (named and root.is_dir()) or (root / manifest.NAME).exists()


def _candidates(root: Location) -> dict[int, Location]:
    """Return step -> directory with the name of a checkpoint; links are not followed."""
    found = {}
    # ".old-step-1" sorts before "step-1", so it is used only if "step-1" is missing.
    for path in folders(root):
        match = DIRECTORY_NAME.fullmatch(path.name)
        # Only the canonical name: step-0000001 would be a second directory of step 1.
        if match and path.name.endswith(name_of(int(match[1]))):
            found[int(match[1])] = path
    return found
