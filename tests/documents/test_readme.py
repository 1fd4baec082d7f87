"""What the README promises to a stranger: its programs run as pasted, its figures are measured."""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile

import numpy as np

from launcher import ROOT, mpirun, run
from requirements import needs

README = (ROOT / "README.md").read_text()

# Before the lines of "Your existing script", and after them, what they are to have done.
SCRIPTS = {
    "PyTorch DDP": (
        """
import torch, strategies.torch
model = torch.nn.Linear(2, 1)
""",
        """
rank = torch.distributed.get_rank()
model(torch.full((1, 2), 1.0 + rank)).sum().backward()
assert model.module.weight.grad.tolist() == [[1.5, 1.5]]
""",
    ),
    "Horovod": (
        "import torch",
        """
hvd.init()
assert hvd.allreduce(torch.tensor([1.0 + hvd.rank()])).item() == 1.5
""",
    ),
    "JAX with Optax": (
        """
import jax.numpy as jnp, optax
import collectives as cc, strategies
rank = cc.init().rank
params = {"w": jnp.full(2, 1.0 + rank)}
""",
        """
updates, state = optimizer.update({"w": jnp.array([1.0 + rank, -1.0])}, state, params)
assert params["w"].tolist() == [1.0, 1.0]
assert cc.init().allgather(updates["w"]).tolist() == 2 * updates["w"].tolist()
""",
    ),
    "mpi4py": (
        """
import numpy as np
from mpi4py import MPI
import collectives as cc, strategies
x = np.arange(2.0) + MPI.COMM_WORLD.Get_rank()
variable = strategies.Variable(np.zeros(2), name="w")
optimizer = strategies.SGD(1.0)
""",
        """
assert total.tolist() == [1.0, 3.0]
optimizer.apply_gradients([(x, variable)])
assert variable.value.tolist() == [-0.5, -1.5]
""",
    ),
    "Keras 3": (
        """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy as np
import collectives as cc, strategies
rank = cc.init().rank
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.1)
x, y = np.full((4, 2), 1.0 + rank), np.ones((4, 1))
""",
        """
assert int(optimizer.iterations) == 1
strategies.check_consistent(model.get_weights())
""",
    ),
}


def blocks_of(heading: str) -> list[tuple[str, str]]:
    """Return language and text of the code of a section."""
    section = README[README.index(f"## {heading}\n") :].split("\n## ")[0]
    return re.findall(r"^```(\w*)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def test_the_first_program_runs_as_pasted_and_prints_what_is_shown(tmp_path):
    (_, program), (_, command), (_, output) = blocks_of("A first program")
    (tmp_path / "first.py").write_text(program)
    assert command.strip() == "mpirun -np 2 python first.py"
    result = mpirun(2, "first.py", cwd=tmp_path, timeout=120, PYTHONPATH=str(ROOT)).checked()
    assert sorted(result.stdout.splitlines()) == output.splitlines()
    # As the text after it says: what one process would find with the rows of both ranks.
    draws = [np.random.default_rng(rank) for rank in range(2)]
    x = np.concatenate([rng.normal(size=(1000, 3)) for rng in draws])
    noise = np.concatenate([rng.normal(size=1000) for rng in draws])
    weights = np.linalg.lstsq(x, x @ [1.0, -2.0, 0.5] + noise, rcond=None)[0]
    assert str(weights.round(4)) in output


def test_the_lines_of_an_existing_script_do_what_is_said(tmp_path):
    needs("torch", "jax", "optax", "keras")
    shown = re.findall(r"^\*\*(.*?)(?:, FSDP2)?\*\*: .*?```python\n(.*?)```", README, re.M | re.S)
    assert [name for name, _ in shown] == list(SCRIPTS)
    for name, lines in shown:
        before, after = SCRIPTS[name]
        (tmp_path / "train.py").write_text(f"{before}\n{lines}\n{after}")
        mpirun(2, "train.py", cwd=tmp_path, timeout=120, PYTHONPATH=str(ROOT)).checked()


def test_figures_are_those_of_the_files_of_measurements():
    files = ROOT / "docs" / "benchmarks"
    text = " ".join(README.split())
    rates = json.loads((files / "allreduce-2-ranks.json").read_text())["states"].values()
    table = README[README.index("| all-reduce | 8 B |") :].split("\n\n")[0]
    head, _, *lines = (
        [cell.strip() for cell in line.split("|")[2:-1]] for line in table.splitlines()
    )
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
    sizes = [int(number) * units[unit] for number, unit in map(str.split, head)]
    for way, shown in zip(("call", "plan", "shared"), lines, strict=True):
        of_sizes = [
            {row["bytes"]: row["ratios"][way]["best"] for row in rate["rows"]} for rate in rates
        ]
        assert shown == [f"{min(ratios[n] for ratios in of_sizes):.2f}" for n in sizes]
    lines = json.loads((files / "network.json").read_text())["cases"]
    alone = [c for c in lines if c["mbit"] == 1000 and "ring" in c["seconds"]]
    filled = max(case["line_seconds"] / case["seconds"]["ring"] for case in alone)
    assert f"a 16 MiB ring uses {filled:.0%} of the line".replace("%", " %") in text
    small = [c["seconds"] for c in lines if c["machines"] == 2 and c["bytes"] <= 3000]
    times = [seconds["auto"] / seconds["MPI, our settings"] for seconds in small]
    assert f"take {min(times):.2f} to {max(times):.2f} times as long" in text


def test_no_text_names_a_package_that_no_index_has():
    advice = "pip install " + "unisono"
    places = ["collectives", "strategies", "tests", "examples", "benchmarks", "docs", "slurm"]
    files = [*ROOT.glob("*.md"), *ROOT.glob("*.py")]
    files += [file for place in places for file in (ROOT / place).rglob("*.[pm][yd]")]
    assert len(files) > 300
    assert [file for file in files if advice in file.read_text()] == []


def test_the_project_is_no_module_and_says_what_to_import():
    result = run([sys.executable, "-c", "import unisono"], timeout=60)
    assert "ImportError" in result.stderr
    assert "import collectives as cc" in result.stderr
    assert "import strategies" in result.stderr


def test_an_editable_install_is_a_path_that_type_checkers_follow(tmp_path):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    modules = ("unisono.py", "unisono_torch.py")
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE", *modules):
        shutil.copy(ROOT / name, checkout)
    for name in ("collectives", "strategies"):
        shutil.copytree(ROOT / name, checkout / name)
    code = f"import setuptools.build_meta as b; b.build_editable({str(tmp_path)!r})"
    run([sys.executable, "-c", code], cwd=checkout, timeout=120).checked()
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as built:
        (path,) = (name for name in built.namelist() if ".dist-info/" not in name)
        assert path.endswith(".pth")
        assert built.read(path).decode().strip() == str(checkout)
