"""File format of `python -m collectives tune`: measured links, one file per cluster.

It is `UNISONO_TUNED` if that is set, else NAME.json in the directory `unisono` of
`$XDG_CONFIG_HOME` or `~/.config`, where NAME is `SLURM_CLUSTER_NAME` or the name of rank 0's
machine. `UNISONO_TUNED=off` does without. Rank 0 reads it, and the others take what it found: on
every rank "auto" has to mean the same.
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

# Bytes of the longest file that is read; ours has less than a thousand.
_MOST_BYTES = 1 << 16


def path(configuration: Settings, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return where the file of this cluster is, or would be; None if it has no place."""
    if configuration.tuned is not None:
        return None if configuration.tuned == "off" else Path(configuration.tuned)
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "~"), ".config")
    name = environ.get("SLURM_CLUSTER_NAME") or platform.node() or "machine"
    try:
        place = Path(home).expanduser()
    except RuntimeError:  # nobody's home is known, as in a container with a user of its own
        return None
    return place / "unisono" / (re.sub(r"[^\w.-]", "_", name) + ".json")


def read(file: Path) -> dict[str, LinkCost]:
    """Read what was measured: name of a link -> its numbers.

    Raises:
        ValueError: it is not such a file, or damaged; names it.
        OSError: it cannot be read.
    """
    return _parse(file)[0]


def metadata(file: Path) -> dict[str, Any]:
    """Read how it was measured; errors as `read`."""
    return _parse(file)[1]


def _parse(file: Path) -> tuple[dict[str, LinkCost], dict[str, Any]]:
    with file.open("rb") as stream:
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
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"tuned: {file} is not what `python -m collectives tune` writes: {why}. Remove it, "
            "tune again, or set UNISONO_TUNED=off"
        ) from None


def _link(name: str, numbers: Any) -> LinkCost:
    if name not in Machine._fields:
        raise ValueError(f"expected links {' '.join(Machine._fields)}, got {name!r}")
    may_lack = LinkCost._field_defaults.keys() - numbers.keys()
    values = {field: numbers[field] for field in LinkCost._fields if field not in may_lack}
    for field, value in values.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            raise ValueError(f"expected seconds >= 0 for {field} of {name}, got {value!r}")
    return LinkCost(**{field: float(value) for field, value in values.items()})


def _numbers(link: LinkCost) -> dict[str, float]:
    """Return what is known of a link."""
    return {field: value for field, value in link._asdict().items() if value < math.inf}


def write(file: Path, measured: Mapping[str, LinkCost], facts: Mapping[str, Any]) -> None:
    """Write the file; a reader finds the old one or the new one, never a part.

    Args:
        file: its directory is made if it does not exist.
        measured: name of a link -> its numbers.
        facts: how it was measured, for people.
    """
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "links": {name: _numbers(link) for name, link in measured.items()},
        "measured": dict(facts),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}-{secrets.token_hex(8)}")
    try:
        with aside.open("x") as stream:
            stream.write(json.dumps(content, indent=1) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)


def load_links(configuration: Settings, environ: Mapping[str, str] = os.environ) -> MeasuredMachine:
    """Put together what this process finds: settings, else the file, else defaults.

    Raises:
        ValueError: the file is damaged, or no such file; names it.
        OSError: the file cannot be read.
    """
    known = links.defaults()
    file = path(configuration, environ)
    # The usual place may be out of reach, such as another user's home: then nothing is there.
    if file is not None and (configuration.tuned is not None or os.path.exists(file)):
        try:
            measured = {name: _numbers(link) for name, link in read(file).items()}
        except OSError as error:
            raise ValueError(f"tuned: cannot read {file}: {error.strerror}") from None
        known = links.with_overrides(known, measured, str(file))
    changes = {"node": configuration.node_link, "network": configuration.network_link}
    return links.with_overrides(known, changes, "UNISONO_{}_LINK")
