"""Exclusion of both packages from torch.compile.

A compiled function may call operations, a wrapped optimizer may compile its step, and the C++ of
PyTorch calls a process group in the middle of compiled programs. The compiler would take each such
frame for a part of the program, and fails in calls by address and in threads. Its rules name what
it skips, such as NumPy; they are imported by programs that compile, and take 1 s to import. So our
packages are added to them once they are imported.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

__all__ = ["exclude_packages"]

_RULES = "torch._dynamo.trace_rules"
_OURS = ("collectives", "strategies")


def exclude_packages() -> None:
    """Let torch.compile skip both packages: now, or where a program first compiles something."""
    rules = sys.modules.get(_RULES)
    if rules is not None:
        _exclude_package(rules)
    else:
        sys.meta_path.insert(0, _ExcludingFinder())


class _ExcludingFinder(MetaPathFinder):
    """Finds the rules as Python would, and adds our packages at the end of their import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the rules' module with a loader that adds our packages; of others nothing."""
        if name != _RULES:
            return None
        with contextlib.suppress(ValueError):  # another thread has found them, too
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_add(module: ModuleType) -> None:
                load(module)
                _exclude_package(module)

            spec.loader.exec_module = load_and_add  # type: ignore[method-assign]
        return spec


def _exclude_package(rules: ModuleType) -> None:
    """Add both packages to what the compiler skips, where this version lets others do so."""
    with contextlib.suppress(AttributeError):
        for package in _OURS:
            rules.add(package)
