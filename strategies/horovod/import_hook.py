"""Import hook: `import horovod.torch` returns this package's module.

For programs that are not to be changed, and for libraries that import Horovod by themselves.
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
"""Version of Horovod that has these names: its last release."""

_OF_TORCH = "strategies.horovod.torch"
_ELASTIC = "strategies.horovod.elastic"

# Where the names of a module of Horovod are. Those below `horovod.torch` are all in one here.
_MODULES = {
    "horovod": "strategies.horovod",
    "horovod.common": "strategies.horovod.common",
    "horovod.common.elastic": _ELASTIC,
    "horovod.common.exceptions": "strategies.horovod.exceptions",
    "horovod.common.process_sets": "strategies.horovod.common",
    "horovod.torch": _OF_TORCH,
    "horovod.torch.compression": _OF_TORCH,
    "horovod.torch.elastic": _ELASTIC,
    "horovod.torch.elastic.sampler": _ELASTIC,
    "horovod.torch.elastic.state": _ELASTIC,
    "horovod.torch.functions": _OF_TORCH,
    "horovod.torch.mpi_ops": _OF_TORCH,
    "horovod.torch.optimizer": _OF_TORCH,
    "horovod.torch.sync_batch_norm": _OF_TORCH,
}


def install() -> None:
    """Let `horovod` be what is here, in this process; harmless when repeated.

    Raises:
        RuntimeError: Horovod itself has been imported before.
    """
    if any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        return
    if "horovod" in sys.modules:
        raise RuntimeError("install: expected that horovod is not imported yet, but it is")
    sys.meta_path.insert(0, _AliasFinder())


class _AliasFinder(MetaPathFinder):
    """Finds Horovod's modules before Python looks for them elsewhere."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to make a module; None for those of others."""
        if fullname in _MODULES:
            return ModuleSpec(fullname, _Loader(), is_package=True)
        if fullname.startswith("horovod."):
            raise ModuleNotFoundError(
                f"{fullname} is not here, expected one of {', '.join(sorted(_MODULES))}",
                name=fullname,
            )
        return None


class _Loader(Loader):
    """Makes a module whose names are those of one here."""

    def exec_module(self, module: ModuleType) -> None:
        """Let it have these names."""
        ours: Any = importlib.import_module(_MODULES[module.__name__])
        names = getattr(ours, "__all__", ())
        module.__dict__.update({name: getattr(ours, name) for name in names})
        module.__doc__ = ours.__doc__
        if module.__name__ == "horovod":
            module.__dict__["__version__"] = VERSION
