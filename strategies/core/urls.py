"""Files behind URLs, by fsspec."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["fsspec", "is_url"]


def is_url(path: str) -> bool:
    """Return whether a path is a URL, such as `s3://bucket/key`."""
    return "://" in path


def fsspec() -> Any:
    """Import and return fsspec.

    Raises:
        ImportError: fsspec is not installed; names the remedy.
    """
    try:
        return importlib.import_module("fsspec")
    except ImportError as error:
        raise ImportError(
            "files: URLs need fsspec, install it with `pip install fsspec`"
        ) from error
