"""File format of `python -m collectives tune`: measured links, one file per cluster.

The path is `UNISONO_TUNED` if set, else NAME.json in the directory `unisono` of `$XDG_CONFIG_HOME`
or `~/.config`. NAME is `SLURM_CLUSTER_NAME` or the name of rank 0's machine. `UNISONO_TUNED=off`
disables the file. Rank 0 reads it and the other ranks use its result, because "auto" must choose
the same on all ranks.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from collectives.core import links
from collectives.core.links import LinkCost, Machine, MeasuredMachine
from collectives.core.settings import Settings

__all__ = ["metadata", "load_links", "path", "read", "write"]

_FORMAT, _VERSION = "unisono links", 1

# Size limit of a file; `write` makes less than a thousand bytes.
_MOST_BYTES = 1 << 16


def path(configuration: Settings, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of this cluster's file, whether or not it exists; None if it has none."""
    if configuration.tuned is not None:
        return None if configuration.tuned == "off" else Path(configuration.tuned)
    # As the XDG base directory specification says; "~" only without HOME.
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "~"), ".config")
    name = environ.get("SLURM_CLUSTER_NAME") or platform.node() or "machine"
    try:
        place = Path(home).expanduser()
    except RuntimeError:  # the user has no home, as in a container with a user id of its own
        return None
    # A node name may contain characters that a file name cannot.
    return place / "unisono" / (re.sub(r"[^\w.-]", "_", name) + ".json")


def read(file: Path) -> dict[str, LinkCost]:
    """Read the measured links: name of a link -> its cost.

    Raises:
        ValueError: the file is damaged or of another kind; names the file.
        OSError: the file cannot be read.
    """
    return _parse(file)[0]


def metadata(file: Path) -> dict[str, Any]:
    """Read the conditions of the measurement; raises the errors of `read`."""
    return _parse(file)[1]


def _parse(file: Path) -> tuple[dict[str, LinkCost], dict[str, Any]]:
    with file.open("rb") as stream:
        # One byte more than allowed, to detect longer files without reading them.
        data = stream.read(_MOST_BYTES + 1)
    try:
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it is longer than {_MOST_BYTES} bytes")
        content = json.loads(data)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f'it does not say "format": "{_FORMAT}"')
        if content.get("version") != _VERSION:
            raise ValueError(f"expected version {_VERSION}, got {content.get('version')!r}")
        measured = {name: _link(name, numbers) for name, numbers in dict(content["links"]).items()}
        return measured, dict(content.get("measured", {}))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        # Everything that a foreign or damaged JSON file can cause.
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"tuned: {file} is not what `python -m collectives tune` writes: {why}. Remove it, "
            "tune again, or set UNISONO_TUNED=off"
        ) from None


def _link(name: str, numbers: Any) -> LinkCost:
    if name not in Machine._fields:
        raise ValueError(f"expected links {' '.join(Machine._fields)}, got {name!r}")
    # Files of older versions lack newer numbers, which have defaults.
    may_lack = LinkCost._field_defaults.keys() - numbers.keys()
    values = {field: numbers[field] for field in LinkCost._fields if field not in may_lack}
    for field, value in values.items():
        # `bool` is an `int` in Python.
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            raise ValueError(f"expected seconds >= 0 for {field} of {name}, got {value!r}")
    return LinkCost(**{field: float(value) for field, value in values.items()})


def _numbers(link: LinkCost) -> dict[str, float]:
    return {field: value for field, value in link._asdict().items() if value < math.inf}


def write(file: Path, measured: Mapping[str, LinkCost], facts: Mapping[str, Any]) -> None:
    """Write the file atomically: a reader finds the old content or the new one.

    Args:
        file: path; its directory is created if missing.
        measured: name of a link -> its cost.
        facts: conditions of the measurement, for people.
    """
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "links": {name: _numbers(link) for name, link in measured.items()},
        "measured": dict(facts),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    # In the same directory, because a rename must not cross file systems.
    aside = file.with_name(f".{file.name}-{secrets.token_hex(8)}")
    try:
        # "x": never through a link that another user has planted.
        with aside.open("x") as stream:
            stream.write(json.dumps(content, indent=1) + "\n")
            stream.flush()
            # Before the rename: otherwise a crash could leave an empty file under the final name.
            os.fsync(stream.fileno())
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)


def load_links(configuration: Settings, environ: Mapping[str, str] = os.environ) -> MeasuredMachine:
    """Return this process's links: from settings, else the file, else defaults.

    Raises:
        ValueError: the file is damaged, of another kind, or unreadable; names the file.
    """
    known = links.defaults()
    file = path(configuration, environ)
    # The default path may be inaccessible, such as another user's home, which counts as absent.
    if file is not None and (configuration.tuned is not None or os.path.exists(file)):
        try:
            measured = {name: _numbers(link) for name, link in read(file).items()}
        except OSError as error:
            # A path that the user has named must be readable, or the job would run with other
            # links.
            raise ValueError(f"tuned: cannot read {file}: {error.strerror}") from None
        known = links.with_overrides(known, measured, str(file))
    changes = {"node": configuration.node_link, "network": configuration.network_link}
    return links.with_overrides(known, changes, "UNISONO_{}_LINK")
