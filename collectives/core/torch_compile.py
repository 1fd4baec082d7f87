"""Exclusion of both packages from torch.compile.

A compiled function may call operations, a wrapped optimizer may compile its step, and PyTorch's C++
code calls a process group inside compiled programs. The compiler would trace each such frame, and
fails in calls by address and in threads. Its trace rules name packages that it skips, such as
NumPy. Only programs that compile import these rules, which takes 1 s. So both packages are added
once a program has imported them.
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
    """Make torch.compile skip both packages: now, or once a program imports its rules."""
    rules = sys.modules.get(_RULES)
    if rules is not None:
        _exclude_package(rules)
    else:
        # First in the list, so that this finder sees the import before Python's.
        sys.meta_path.insert(0, _ExcludingFinder())


class _ExcludingFinder(MetaPathFinder):
    """Finds the trace rules as Python would, and adds both packages at the end of their import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the rules with a loader that adds both packages; None for others."""
        if name != _RULES:
            return None
        # Once is enough; a finder that stays would slow down every import.
        with contextlib.suppress(ValueError):  # another thread has removed it
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            # Wrapped, because the rules can be changed only after their module has been executed.
            load = spec.loader.exec_module

            def load_and_add(module: ModuleType) -> None:
                load(module)
                _exclude_package(module)

            spec.loader.exec_module = load_and_add  # type: ignore[method-assign]
        return spec


def _exclude_package(rules: ModuleType) -> None:
    """Add both packages to the skipped ones, if this version of PyTorch has a function for that."""
    # Older and newer versions may lack the function; then programs still run, without the
    # exclusion.
    with contextlib.suppress(AttributeError):
        for package in _OURS:
            rules.add(package)
