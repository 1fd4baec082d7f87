"""Import hook: `import horovod.torch` returns this package's module.

For programs that you do not want to change, and for libraries that import Horovod.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["VERSION", "install"]

VERSION = "0.28.1"
"""Version of Horovod whose names are provided: its last release."""

_OF_TORCH = "strategies.horovod.torch"
_ELASTIC = "strategies.horovod.elastic"

# Horovod's module -> the module here with its names. `horovod.torch.*` are one module here.
_MODULES = {
    "horovod": "strategies.horovod.runner",
    "horovod.common": "strategies.horovod.common",
    "horovod.common.elastic": _ELASTIC,
    "horovod.common.exceptions": "strategies.horovod.exceptions",
    "horovod.common.process_sets": "strategies.horovod.common",
    "horovod.runner": "strategies.horovod.runner",
    "horovod.torch": _OF_TORCH,
    "horovod.torch.compression": "strategies.horovod.compression",
    "horovod.torch.elastic": _ELASTIC,
    "horovod.torch.elastic.sampler": _ELASTIC,
    "horovod.torch.elastic.state": _ELASTIC,
    "horovod.torch.functions": _OF_TORCH,
    "horovod.torch.mpi_ops": _OF_TORCH,
    "horovod.torch.optimizer": _OF_TORCH,
    "horovod.torch.sync_batch_norm": _OF_TORCH,
}


def install() -> None:
    """Make `horovod` resolve to this package in this process; harmless when repeated.

    Raises:
        RuntimeError: Horovod itself is imported already.
    """
    if any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        return
    # Modules of Horovod itself would be mixed with names from here.
    if "horovod" in sys.modules:
        raise RuntimeError("install: expected that horovod is not imported yet, but it is")
    # In front, so that an installed Horovod is not found.
    sys.meta_path.insert(0, _AliasFinder())


class _AliasFinder(MetaPathFinder):
    """Finds Horovod's modules before Python's other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of a module; None for other packages."""
        if fullname in _MODULES:
            # As packages, because each of them may have submodules.
            return ModuleSpec(fullname, _Loader(), is_package=True)
        if fullname.startswith("horovod."):
            # Raised here, as another finder would look for an installed Horovod.
            raise ModuleNotFoundError(
                f"{fullname} is not available, expected one of {', '.join(sorted(_MODULES))}",
                name=fullname,
            )
        return None


class _Loader(Loader):
    """Loads a module with the names of a module here."""

    def exec_module(self, module: ModuleType) -> None:
        """Copy the names."""
        ours: Any = importlib.import_module(_MODULES[module.__name__])
        names = getattr(ours, "__all__", ())
        # The names are copied, so `horovod.torch` is a module of its own with its own `__name__`.
        module.__dict__.update({name: getattr(ours, name) for name in names})
        module.__doc__ = ours.__doc__
        if module.__name__ == "horovod":
            module.__dict__["__version__"] = VERSION
