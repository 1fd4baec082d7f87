"""What the pages tell users of torch.distributed, Horovod and mpi4py is true."""

from __future__ import annotations

import re
import sys

import pytest

import launcher
from launcher import ROOT, mpirun
from requirements import needs

PAGE = (ROOT / "docs" / "from-torch-distributed.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]


@pytest.fixture
def needs_torch():
    needs("torch")


def run(tmp_path, text: str):
    (tmp_path / "train.py").write_text(text)
    return mpirun(2, "train.py", cwd=tmp_path, timeout=110, PYTHONPATH=str(ROOT)).checked().stdout


@pytest.mark.parametrize("subject", ["torch", "horovod", "mpi4py"])
def test_every_row_of_the_tables(subject, request):
    if subject == "torch":
        request.getfixturevalue("needs_torch")
    result = mpirun(2, "tests/documents/other_libraries.py", subject, timeout=110).checked()
    assert int(result.stdout.split()[0]) > 15


def test_torchrun_is_refused():
    assert "**Do not use `torchrun`**" in " ".join(PAGE.split())
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    text = "import collectives as cc; cc.init()"
    result = launcher.run([sys.executable, "-c", text], timeout=60, **torchrun)
    assert "LaunchError: init: torchrun started 2 processes (WORLD_SIZE=2)" in result.stderr
    assert "mpirun -np N python train.py" in result.stderr


@pytest.mark.usefixtures("needs_torch")
def test_the_program_prints_what_is_shown(tmp_path):
    shown = next(text for language, text in BLOCKS if language == "")
    assert run(tmp_path, PROGRAMS[0]) == shown


@pytest.mark.usefixtures("needs_torch")
def test_uneven_data_gives_the_step_of_one_process(tmp_path):
    # 7 rows, 2 at once: the second rank has fewer of them, and no batch in the last step.
    begin = PROGRAMS[0][: PROGRAMS[0].index("for epoch")].replace("1000", "7")
    uneven = PROGRAMS[1].replace("batch_size=50", "batch_size=1")
    uneven = uneven.replace("comm=comm)\nloader", "comm=comm, shuffle=False)\nloader")
    assert "shuffle=False" in uneven
    alone = """
model.load_state_dict(first)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for at in range(0, len(data), comm.size):
    rows, targets = data[at : at + comm.size]
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(rows), targets).backward()
    optimizer.step()
for name, value in model.state_dict().items():
    assert torch.allclose(value, together[name], atol=1e-6), (name, value, together[name])
print("equal")
"""
    copied = "{name: value.clone() for name, value in model.state_dict().items()}\n"
    text = f"{begin}first = {copied}{uneven}together = {copied}{alone}"
    assert run(tmp_path, text).split() == ["equal", "equal"]


@pytest.mark.usefixtures("needs_torch")
def test_batch_normalisation_is_that_of_all_rows(tmp_path):
    text = f"""
import torch
import collectives as cc
comm = cc.init()
model = torch.nn.BatchNorm1d(3).double()
{PROGRAMS[2]}
torch.manual_seed(0)
whole = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
one = torch.nn.BatchNorm1d(3).double()
(one(whole) ** 3).sum().backward()
part = whole.detach()[comm.rank :: comm.size].clone().requires_grad_()
ours = model
(ours(part) ** 3).sum().backward()
assert torch.allclose(part.grad, whole.grad[comm.rank :: comm.size])
assert torch.allclose(ours.running_mean, one.running_mean)
assert torch.allclose(ours.running_var, one.running_var)
none = ours(torch.zeros(0 if comm.rank else 4, 3, dtype=torch.float64))
assert len(none) == (0 if comm.rank else 4) and torch.isfinite(ours.running_var).all()
ours.eval()
assert ours(part).shape == part.shape
print("equal")
"""
    assert run(tmp_path, text).split() == ["equal", "equal"]
