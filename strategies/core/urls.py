"""Files behind URLs, by fsspec."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["fsspec", "is_url"]


def is_url(path: str) -> bool:
    """Whether this names something behind a URL, such as `s3://bucket/key`."""
    return "://" in path


def fsspec() -> Any:
    """Return the package.

    Raises:
        ImportError: it is not installed; says how to install it.
    """
    try:
        return importlib.import_module("fsspec")
    except ImportError as error:
        raise ImportError(
            "files: URLs need fsspec, install it with `pip install fsspec`"
        ) from error
