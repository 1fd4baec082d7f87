"""Type checkers know that what goes into an operation comes out of it."""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from pathlib import Path

import pytest

import programs
from collectives.calls import overloads
from collectives.communicator import Communicator
from collectives.fusion import allreduce as fused
from collectives.operations import scan
from collectives.p2p import send_recv
from launcher import ROOT, run
from requirements import needs
from strategies import distributed_optimizer

# As much of these libraries as the signatures look at, for a machine that has none of them.
STUBS = {
    "torch/__init__.pyi": """
        from typing import Any
        from . import nn as nn, optim as optim
        class Tensor:
            def detach(self) -> Tensor: ...
    """,
    "torch/nn.pyi": """
        from collections.abc import Iterator
        from torch import Tensor
        class Parameter(Tensor): ...
        class Linear:
            def __init__(self, rows: int, columns: int) -> None: ...
            def parameters(self) -> Iterator[Parameter]: ...
            def named_parameters(self) -> Iterator[tuple[str, Parameter]]: ...
            def state_dict(self) -> dict[str, Tensor]: ...
    """,
    "torch/optim.pyi": """
        from collections.abc import Callable, Iterator
        from typing import Any
        from torch.nn import Parameter
        class Optimizer:
            param_groups: list[dict[str, Any]]
            def add_param_group(self, param_group: dict[str, Any]) -> None: ...
            def step(self, closure: Callable[[], float] | None = None) -> float | None: ...
        class SGD(Optimizer):
            def __init__(self, params: Iterator[Parameter], lr: float) -> None: ...
    """,
    "jax.pyi": "class Array: ...",
    "optax.pyi": """
        from typing import Any, NamedTuple, Protocol
        class Init(Protocol):
            def __call__(self, params: Any) -> Any: ...
        class Update(Protocol):
            def __call__(self, updates: Any, state: Any, params: Any = None) -> Any: ...
        class UpdateExtraArgs(Protocol):
            def __call__(
                self, updates: Any, state: Any, params: Any = None, **extra_args: Any
            ) -> Any: ...
        class GradientTransformation(NamedTuple):
            init: Init
            update: Update
        class GradientTransformationExtraArgs(GradientTransformation):
            update: UpdateExtraArgs
        def sgd(learning_rate: float) -> GradientTransformation: ...
    """,
}

NUMPY = """
    from typing import Any

    import numpy as np
    import numpy.typing as npt
    from typing_extensions import assert_type

    import collectives as cc
    import strategies
    from strategies.averaging.optimizer import AveragingOptimizer

    comm = cc.init()
    Floats = npt.NDArray[np.float32]

    def arrays(x: Floats, text: list[list[float]]) -> None:
        assert_type(comm.allreduce(x), Floats)
        assert_type(cc.allreduce(x, op=cc.SUM, compression=cc.FP16, timeout=3.0), Floats)
        assert_type(comm.reduce_scatter(x), Floats)
        assert_type(comm.broadcast(x, 0), Floats)
        assert_type(comm.allgather(x, algorithm="ring"), Floats)
        assert_type(cc.alltoall(x, counts=[1, 2]), Floats)
        assert_type(comm.plan_allreduce(x)(), Floats)
        assert_type(cc.plan_broadcast(x, 1)(), Floats)
        assert_type(comm.plan_reduce_scatter(x, counts=[1, 2])(), Floats)
        assert_type(comm.reduce(x), Floats | None)
        assert_type(cc.gather(x), Floats | None)
        assert_type(cc.grouped_allreduce([x, x]), list[Floats])
        assert_type(comm.allreduce(text, out=x), Floats)
        assert_type(comm.allgather(text, out=x), Floats)
        assert_type(comm.reduce_scatter(x, counts=[1, 2], out=x), Floats)
        assert_type(cc.scatter(None, out=x), Floats)
        assert_type(cc.alltoall(x, return_counts=True), tuple[Any, npt.NDArray[Any]])
        assert_type(cc.grouped_allreduce([text, x], out=[x, x]), list[Floats])
        assert_type(cc.grouped_allgather([x, x]), list[Floats])
        assert_type(cc.grouped_broadcast_async([x, x], 1).wait(), list[Floats])
        assert_type(comm.grouped_reduce_scatter([x], op=cc.SUM), list[Floats])
        assert_type(comm.allreduce(x, out=None), Floats)
        assert_type(comm.recv(1, out=x), Floats)
        assert_type(comm.allreduce_async(x), cc.Request[Floats])
        assert_type(cc.allreduce_async(x, op=cc.SUM).wait(), Floats)
        assert_type(cc.gather_async(x).wait(), Floats | None)
        assert_type(comm.allreduce(1.0), npt.NDArray[Any])
        assert_type(comm.broadcast(text), npt.NDArray[Any])
        comm.allreduce(x, opp=cc.SUM)  # WRONG
        comm.allreduce(x, op="sum")  # WRONG
        assert_type(strategies.broadcast_parameters({"w": x}), dict[str, Floats])

    def optimizers(momentum: strategies.Momentum) -> None:
        optimizer = strategies.DistributedOptimizer(momentum, clip_global_norm=1.0)
        assert_type(optimizer, AveragingOptimizer)
        strategies.DistributedOptimizer(3)  # WRONG
        strategies.experiment.train_and_evaluate()  # WRONG
        strategies.model_parallel.allgather(1.0, comm=comm)
        strategies.modle_parallel  # WRONG
        strategies.DistributedOptimizer(momentum, clip=1.0)  # WRONG

    def length(x: Floats) -> tuple[int, str]:
        return len(x), "rows"

    def runs(strategy: strategies.Strategy, x: Floats) -> None:
        assert_type(strategy.run(length, args=(x,)), tuple[int, str])
        assert_type(strategy.run(lambda: x), Floats)
"""

LIBRARIES = """
    from typing import Any

    import jax
    import numpy.typing as npt
    import optax
    import torch
    from typing_extensions import assert_type

    import collectives as cc
    import strategies
    from strategies.torch.optimizer import TorchOptimizer

    def arrays(t: torch.Tensor, p: torch.nn.Parameter, j: jax.Array) -> None:
        assert_type(cc.allreduce(t), torch.Tensor)
        assert_type(cc.allreduce(p), torch.Tensor)
        assert_type(cc.broadcast(p, out=p), torch.nn.Parameter)
        assert_type(cc.allreduce(j), jax.Array)
        assert_type(cc.allgather(t), torch.Tensor)
        assert_type(cc.gather(t), torch.Tensor | None)
        assert_type(cc.scatter(t if cc.rank() == 0 else None), torch.Tensor | npt.NDArray[Any])
        assert_type(cc.grouped_allreduce([t, p]), list[torch.Tensor])
        assert_type(cc.sparse_allreduce([1], t)[1], torch.Tensor)
        assert_type(cc.recv(1, out=t), torch.Tensor)
        assert_type(cc.allreduce_async(t).wait(), torch.Tensor)

    def torch_optimizer(model: torch.nn.Linear) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        named = model.named_parameters()
        optimizer = strategies.DistributedOptimizer(optimizer, named_parameters=named)
        assert_type(optimizer, TorchOptimizer)
        optimizer.step(examples=3)
        optimizer.synchronize()
        kept: torch.optim.SGD = strategies.broadcast_optimizer_state(optimizer)
        assert_type(strategies.broadcast_parameters(model.named_parameters()),
                    list[tuple[str, torch.nn.Parameter]])
        optimizer.step(row=3)  # WRONG
        strategies.torch.keep_memory()
        strategies.torch.keep_memory(3)  # WRONG

    def transformation() -> None:
        made = strategies.DistributedOptimizer(optax.sgd(0.1))
        assert_type(made, optax.GradientTransformationExtraArgs)
        again: optax.GradientTransformation = made
        sharded = strategies.DistributedOptimizer(optax.sgd(0.1), shard_state=True)
        state = sharded.from_slices(sharded.to_slices(sharded.init({}), {}))
"""


# It reads all of NumPy and PyTorch, seconds on an idle machine.
pytestmark = pytest.mark.timeout(600)


def check(folder: Path, programs: dict[str, str], stubs: dict[str, str]) -> None:
    """Check programs beside the packages as pip lays them; expected errors are marked WRONG."""
    (folder / "site").mkdir()
    for package in ("collectives", "strategies"):
        (folder / "site" / package).symlink_to(ROOT / package)
    for name, text in {**programs, **stubs}.items():
        file = folder / ("stubs" if name in stubs else "") / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    result = run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", *programs],
        cwd=folder, timeout=500, PYTHONPATH="site", MYPYPATH="stubs",
    )  # fmt: skip
    found = set(re.findall(r"^(\w+\.py):(\d+): error: ", result.stdout, re.MULTILINE))
    wrong = {
        (name, str(number))
        for name, text in programs.items()
        for number, line in enumerate(textwrap.dedent(text).splitlines(), 1)
        if line.endswith("# WRONG")
    }
    assert found == wrong, result.stdout + result.stderr


def test_what_goes_in_comes_out(tmp_path):
    check(tmp_path, {"of_numpy.py": NUMPY, "of_others.py": LIBRARIES}, STUBS)


def test_the_same_with_pytorch_itself(tmp_path):
    needs("torch")
    others = {name: text for name, text in STUBS.items() if not name.startswith("torch")}
    check(tmp_path, {"of_others.py": LIBRARIES}, others)


# An editor completes `optimizer.` only if it infers the type.
COMPLETED = """
    import torch
    from typing_extensions import assert_type

    import strategies
    from strategies.averaging.optimizer import AveragingOptimizer
    from strategies.torch.optimizer import TorchOptimizer

    model = torch.nn.Linear(2, 1)
    of_torch = strategies.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert_type(of_torch, TorchOptimizer)
    of_class: torch.optim.Optimizer = of_torch
    of_torch.param_groups[0]["lr"] = 0.2
    of_torch.zero_grad()
    of_torch.synchronize(row=3)  # WRONG
    of_arrays = strategies.DistributedOptimizer(strategies.Adam(1e-3))
    assert_type(of_arrays, AveragingOptimizer)
    of_arrays.optimizer.load_state_dict(of_arrays.state_dict())
"""


def test_pyright_accepts_the_programs_of_the_pages(tmp_path):
    needs("basedpyright", "torch")
    pages = [ROOT / "README.md", ROOT / "docs" / "start.md", *ROOT.glob("docs/tutorials/*.md")]
    texts = {"completed.py": textwrap.dedent(COMPLETED)}
    for page in pages:
        for name, text in programs.read(page).files.items():
            texts[f"{page.stem}-{name}"] = text
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    # Without this rule, because a checker takes any loop over a range for possibly empty.
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT)],
                "reportPossiblyUnboundVariable": False}  # fmt: skip
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    result = run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable],
        cwd=tmp_path, timeout=500,
    )  # fmt: skip
    report = json.loads(result.stdout)
    assert report["summary"]["filesAnalyzed"] == len(texts) >= 12
    found = [
        (Path(entry["file"]).name, entry["range"]["start"]["line"], entry["message"])
        for entry in report["generalDiagnostics"]
        if entry["severity"] == "error"
    ]
    wrong = [i for i, line in enumerate(texts["completed.py"].splitlines()) if "# WRONG" in line]
    assert [error[:2] for error in found] == [("completed.py", line) for line in wrong], found


def keywords(function) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    of_overloads = {"out", "return_counts", "shard_state"}  # which their types depend on
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - of_overloads


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (Communicator.allreduce, overloads.CompressionOptions),
        (Communicator.reduce, overloads.ReduceOptions),
        (Communicator.reduce_scatter, overloads.ReduceScatterOptions),
        (Communicator.broadcast, overloads.CommonOptions),
        (Communicator.gather, overloads.CommonOptions),
        (Communicator.allgather, overloads.CommonOptions),
        (Communicator.scatter, overloads.ScatterOptions),
        (Communicator.alltoall, overloads.ScatterOptions),
        (Communicator.scan, scan.ScanOptions),
        (Communicator.exscan, scan.ScanOptions),
        (Communicator.recv, send_recv.ReceiveOptions),
        (Communicator.irecv, send_recv.ReceiveOptions),
        (Communicator.grouped_allreduce, fused.FusedOptions),
        (Communicator.grouped_reduce_scatter, overloads.ReduceOptions),
        (distributed_optimizer.DistributedOptimizer, distributed_optimizer.OptimizerOptions),
    ],
    ids=lambda thing: thing.__name__,
)
def test_checkers_are_told_of_every_option(function, options):
    assert keywords(function) == set(options.__annotations__)
