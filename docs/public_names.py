"""Pages of all public names, written anew for every build from each module's `__all__`.

A name that several modules offer is described once, on the first page that has it; the others lead
there. So a new name needs no line here, and none is described under two addresses.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path

import messages

# Module -> introduction of its page. Names are assigned to pages in this order: components come
# before the package that repeats some of their names.
MODULES = {
    "collectives": "Operations among ranks. What a communicator has as a method is a function "
    "here, too: of the communicator of all ranks.",
    "collectives.testing": "Tests of distributed code without MPI.",
    "collectives.extend": "For libraries that are built on `collectives`, as `strategies` is.",
    "strategies.errors": "What queues, readers, services and files raise.",
    "strategies.optimizers": "Rules by which gradients change variables.",
    "strategies.parameter_server": "Variables on ps tasks, and workers that do not wait.",
    "strategies.optimizers.schedules": "Learning rates that change with the step.",
    "strategies.checkpoint": "Checkpoints: saving, restoring and reading slices.",
    "strategies.elastic": "Jobs that go on when ranks die, preemption, faults for tests.",
    "strategies.session": "Training loops with hooks, metrics and progress.",
    "strategies.session.hooks": "What happens beside the steps of a session.",
    "strategies.cluster": "Jobs and tasks, resolvers, devices and placement.",
    "strategies.input": "From files to batches, on all ranks.",
    "strategies.queues": "Queues, here or on another rank.",
    "strategies.variables": "Variables that tasks serve.",
    "strategies.variables.initializers": "First values, made part by part.",
    "strategies.variables.partition": "How a variable is cut over tasks.",
    "strategies.accumulators": "Gradients that wait until there are enough of them.",
    "strategies.rpc": "Functions on other ranks, and the service behind.",
    "strategies.replicas": "What a replica knows of itself.",
    "strategies.model_parallel": "A model over several ranks.",
    "strategies.model_parallel.torch": "The same for PyTorch's autograd, and a pipeline.",
    "strategies.quantization": "8-bit weights for serving.",
    "strategies.experiment": "One program for all tasks of a cluster.",
    "strategies": "Strategies, and what a training program needs most. More is in its modules.",
    "strategies.torch": "For PyTorch.",
    "strategies.jax": "For JAX: operations inside compiled programs.",
    "strategies.keras": "For Keras 3, with its backends torch and jax.",
    "strategies.horovod.elastic": "Horovod's names for jobs whose ranks may die: `hvd.elastic`.",
    "strategies.horovod.torch": "Horovod's names for PyTorch.",
    "strategies.horovod.jax": "Horovod's names for JAX.",
    "strategies.horovod.numpy": "Horovod's names for NumPy.",
}
# By default Keras imports TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "torch")

# Sections of our docstrings that are a sentence on the line of their name.
_SENTENCE = re.compile(r"^(Collective|Cost|Meaning|Order|Sources?): (?=\S)")
_OPTIONAL = ("cupy", "jax", "jaxlib", "keras", "optax", "torch")


def write(folder: Path) -> None:
    """Write a page for each module, and their index, into a folder that belongs to them."""
    folder.mkdir(exist_ok=True)
    seen: dict[int, str] = {}
    for name, intro in MODULES.items():
        module = _module(name)
        lines = [name, "=" * len(name), "", intro, "", f".. py:module:: {name}", ""]
        for public in sorted(module.__all__, key=str.lower):
            lines += _entry(f"{name}.{public}", getattr(module, public), seen)
        _keep(folder / f"{name}.rst", "\n".join(lines) + "\n")
    lines = ["All public names", "================", ""]
    lines += ["From the docstrings: shapes, dtypes, units, errors and the ranks that get them.", ""]
    lines += [".. toctree::", "   :maxdepth: 1", ""]
    lines += [f"   {name}" for name in sorted(MODULES)]
    lines += ["   messages"]
    _keep(folder / "index.rst", "\n".join(lines) + "\n")
    _keep(folder / "messages.md", messages.page(folder.parent.parent))


def sentences(app: object, what: str, name: str, thing: object, options: object,
              lines: list[str]) -> None:  # fmt: skip
    """Make `Cost: one message ...` a paragraph, for `autodoc-process-docstring`."""
    made: list[str] = []
    inside = False
    for line in lines:
        if match := _SENTENCE.match(line):
            made += ["", f"**{match[1]}.** {line[match.end() :]}"]
            inside = True
        elif inside and line.startswith(" "):
            made.append(line.strip())
        else:
            inside = False
            made.append(line)
    lines[:] = made


def _entry(path: str, thing: object, seen: dict[int, str]) -> Iterator[str]:
    if inspect.ismodule(thing):
        yield (
            f"`{path}`: :doc:`a module of its own <{thing.__name__}>`"
            if (thing.__name__ in MODULES)
            else f"`{path}`: a module."
        )
        yield ""
        return
    described = inspect.isclass(thing) or inspect.isroutine(thing)
    first = seen.setdefault(id(thing), path) if described else path
    if first != path:
        yield f"`{path}`: see :py:obj:`{first}`."
        yield ""
        return
    if inspect.isclass(thing):
        kind = "exception" if issubclass(thing, BaseException) else "class"
    else:
        kind = "function" if inspect.isroutine(thing) else "data"
    yield f".. auto{kind}:: {path}"
    if kind == "class":
        yield "   :inherited-members: object, Exception, tuple, Module, Optimizer, Callback"
    yield ""


def _module(name: str) -> object:
    """Import a module; what it needs of absent packages is made up, as Sphinx does for itself."""
    from sphinx.ext.autodoc.mock import mock as absent

    missing = [package for package in _OPTIONAL if importlib.util.find_spec(package) is None]
    with absent(missing):
        return importlib.import_module(name)


def _keep(path: Path, text: str) -> None:
    """Write a file if it would change, since Sphinx reads again what is newer."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
