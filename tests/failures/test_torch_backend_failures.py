"""The backend of torch.distributed where a rank is killed, and where launchers are wrong."""

import json
import sys

import pytest
from victims import FAULT_TOLERANT

from launcher import mpirun, run
from requirements import needs

needs("torch")

KILLED = """
import os, signal, sys, time
import torch, torch.distributed as dist
import strategies.torch
dist.init_process_group("unisono")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 50))
for step in range(1000):
    if step == 5 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        model(torch.ones(2, 50)).sum().backward()
    except dist.DistBackendError as error:
        print("found:", dist.get_rank(), type(error).__name__, error, flush=True)
        open(f"found-{dist.get_rank()}", "w").close()
        # The launcher ends the other one as soon as one has ended by an error.
        while not (os.path.exists("found-0") and os.path.exists("found-2")):
            time.sleep(0.01)
        os._exit(3)
"""


def test_a_rank_that_is_killed_under_ddp_is_named_on_the_others(tmp_path):
    options = FAULT_TOLERANT  # so that the launcher does not end the others first
    result = mpirun(
        3, "-c", KILLED, options=options, timeout=110, cwd=tmp_path, UNISONO_TIMEOUT="20"
    )
    found = [line for line in result.stdout.splitlines() if line.startswith("found:")]
    assert {line.split()[1] for line in found} == {"0", "2"}, result.stdout + result.stderr
    assert all("PeerFailure allreduce" in line and "rank 1" in line for line in found)


UNCAUGHT = """
import os, signal
import torch, torch.distributed as dist
import strategies.torch
dist.init_process_group("unisono")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 50))
for step in range(10):
    loss = model(torch.ones(2, 50)).sum()
    if step == 5 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
"""


def test_an_uncaught_error_under_ddp_shows_the_line_of_the_program(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(UNCAUGHT)
    options, records = FAULT_TOLERANT, {"UNISONO_RECORDER_DIR": str(tmp_path)}
    result = mpirun(2, "-m", "strategies.torch", program, options=options, **records)
    printed = [x.removeprefix("[0/2] ") for x in result.stderr.splitlines() if "[0/2] " in x]
    *_, line, error, command = printed
    assert line == "    loss.backward()", result.stderr
    assert error.startswith("strategies.torch.work.PeerFailure: allreduce: rank 1 died")
    assert sum(line.startswith("  File ") for line in printed) == 1
    assert len(printed) <= 7
    record = json.loads((tmp_path / "rank-0.json").read_text())
    calls = [call for group in record["communicators"] for call in group["operations"]]
    assert {call["site"] for call in calls if "PeerFailure" in call["state"]} == {f"{program}:11"}


WRONG = """
import os, signal, sys, traceback
import torch, torch.distributed as dist

def step(number):
    if dist.get_rank() == 1 and number == 2:
        if wrong == "mismatch":
            dist.all_reduce(torch.zeros(3))  # on rank 1 alone
        else:
            os.kill(os.getpid(), signal.SIGKILL)

rows = [{"x": torch.ones(4), "labels": torch.ones(1)} for _ in range(16)]
"""

LIGHTNING = """
import lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        step(number)
        return self.layer(batch["x"]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def train():
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(rows))  # the line of the program
"""

TRAINER = """
import transformers

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.calls = -1

    def forward(self, x, labels):
        self.calls += 1
        step(self.calls)
        return {"loss": self.layer(x).sum()}

def train():
    arguments = transformers.TrainingArguments(
        sys.argv[1], use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=1,
    )
    trainer = transformers.Trainer(Model(), arguments, train_dataset=rows)
    trainer.train()  # the line of the program
"""

WRONG_END = """
for wrong in ("mismatch", "kill"):
    try:
        train()
    except dist.DistBackendError as error:
        print("found", wrong, dist.get_rank(), type(error).__name__, error, flush=True)
        dist.destroy_process_group() if wrong == "mismatch" else None
os._exit(0)  # the other rank is dead
"""


@pytest.mark.parametrize(
    ("framework", "script"),
    [("lightning", LIGHTNING), ("transformers", TRAINER)],
    ids=["lightning", "trainer"],
)
def test_errors_in_a_framework_for_gloo_name_lines_of_the_program(tmp_path, framework, script):
    needs(framework)
    program = tmp_path / "train.py"
    program.write_text(WRONG + script + WRONG_END)
    runner = ("-m", "strategies.torch", "--replace", "gloo")
    # Imports take up to 80 s on a busy machine.
    limits = {"timeout": 280, "options": FAULT_TOLERANT, "UNISONO_TIMEOUT": "60"}
    result = mpirun(2, *runner, program, tmp_path, **limits)
    found = sorted(line for line in result.stdout.splitlines() if line.startswith("found"))
    text = program.read_text().splitlines()
    lines = [
        1 + number
        for number, line in enumerate(text)
        if line.endswith(("alone", "line of the program"))
    ]
    assert [line.split()[1:4] for line in found] == [
        ["kill", "0", "PeerFailure"],
        ["mismatch", "0", "MismatchError"],
        ["mismatch", "1", "MismatchError"],
    ], result.stdout + result.stderr
    assert all(f"train.py:{number}" in line for number in lines for line in found[1:]), found
    assert "rank 1" in found[0]


def test_torchrun_is_told_what_to_run_instead():
    program = 'import torch.distributed as d, strategies.torch; d.init_process_group("unisono")'
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    # As the first of two processes; the store of PyTorch would wait for the other one.
    told = {**variables, "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}
    program = program.replace('"unisono")', '"unisono", store=d.HashStore(), rank=0, world_size=2)')
    result = run([sys.executable, "-c", program], timeout=60, **told)
    assert result.status != 0
    assert "start with `mpirun -np N python train.py`" in result.stderr


REPLACED = """
import datetime
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
backend = sys.argv[1]
dist.init_process_group(None if backend == "none" else backend)
size = dist.get_world_size()
groups = [
    dist.group.WORLD, dist.new_group(backend="gloo"), dist.new_group(list(range(size))),
    dist.init_device_mesh("cpu", (1, size)).get_group(1), dist.new_subgroups(size)[0],
]
for group in groups:
    dist.all_reduce(x := torch.ones(2), group=group)
    assert x[0] == size
    assert "gloo" in dist.get_backend(group) or backend == "none"
    assert type(group).__name__ == "UnisonoGroup", group
dist.all_gather_object(everyones := [None] * size, dist.get_rank())
if backend == "gloo":  # by this name PyTorch has it
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=20), wait_all_ranks=True)
try:
    dist.split_group(None, [[rank] for rank in range(size)])
except RuntimeError as error:  # as on Gloo
    assert "No device associated" in str(error)
kinds = [type(dist.group.WORLD._get_backend(device)).__name__ for device in groups[0]._device_types]
print("groups of", dist.get_backend(), *kinds, dist.get_pg_count(), everyones)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("gloo", "groups of gloo UnisonoGroup 6 [0, 1]"),
        ("none", "groups of undefined UnisonoGroup 6 [0, 1]"),
        (
            "cpu:gloo,cuda:fake",
            "groups of cpu:gloo,cuda:fake UnisonoGroup FakeProcessGroup 6 [0, 1]",
        ),
    ],
)
@pytest.mark.parametrize("how", ["--replace", "variable"])
def test_programs_that_ask_for_gloo_get_groups_of_this_library(tmp_path, backend, said, how):
    program = tmp_path / "train.py"
    program.write_text("import sys\nimport strategies.torch\n" + REPLACED)
    runner = ("-m", "strategies.torch", "--replace", "gloo") if how == "--replace" else ()
    variables = {} if runner else {"UNISONO_TORCH_REPLACE": "gloo"}
    result = mpirun(2, *runner, program, backend, timeout=60, **variables).checked()
    assert result.stdout.count(said) == 2, result
    assert result.stderr.count("unisono: replaces Gloo") == 1


def test_only_gloo_is_replaced(tmp_path):
    program = 'import torch.distributed as d, strategies.torch; d.init_process_group("gloo")'
    result = mpirun(2, "-c", program, timeout=60, UNISONO_TORCH_REPLACE="nccl")
    assert result.stderr.count("UNISONO_TORCH_REPLACE: expected gloo, got 'nccl'") >= 1


def test_torchrun_of_this_package_is_told_what_to_run_instead(tmp_path):
    program = tmp_path / "train.py"
    program.write_text("")
    told = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0"}
    result = run([sys.executable, "-m", "strategies.torch", str(program)], timeout=60, **told)
    assert result.status != 0
    assert "torchrun starts no MPI: start with `mpirun -np N python train.py`" in result.stderr


STARTED = """
import sys
import torch.distributed as dist, strategies.torch
dist.init_process_group(sys.argv[1])
print("rank", dist.get_rank(), "of", dist.get_world_size())
dist.destroy_process_group()
"""
STALE = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}


@pytest.mark.parametrize(
    ("ranks", "backend", "variables", "said"),
    [
        (1, "unisono", {}, "rank 0 of 1"),
        (1, "cpu:unisono", {**STALE, "WORLD_SIZE": "1"}, "rank 0 of 1"),
        (1, "unisono", STALE, "expected rank 0 of 1, got rank 0 of 3"),
        (2, "unisono", {**STALE, "WORLD_SIZE": "1"}, "expected rank 0 of 2, got rank 0 of 1"),
        (2, "unisono", {"RANK": "0"}, "expected rank 1 of 2, got rank 0 of 2"),
        (1, "gloo", {}, "environment variable RANK expected"),
    ],
)
def test_ranks_are_those_of_mpi(ranks, backend, variables, said, tmp_path):
    program = tmp_path / "started.py"
    program.write_text(STARTED)
    if ranks == 1:  # without a launcher
        result = run([sys.executable, str(program), backend], timeout=60, **variables)
    else:
        result = mpirun(ranks, program, backend, timeout=60, **variables)
    assert (result.status == 0) == said.startswith("rank"), result
    assert (result.stdout + result.stderr).count(said) >= ranks, result


def test_pytorch_finds_the_backend_by_itself(tmp_path):
    """As it does where the project is installed, whose metadata name an entry point."""
    metadata = tmp_path / "unisono-0.dist-info"
    metadata.mkdir()
    metadata.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: unisono\nVersion: 0\n")
    metadata.joinpath("entry_points.txt").write_text(
        "[torch.backends]\nunisono = unisono_torch:register\n"
    )
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
assert not {"collectives", "strategies", "mpi4py"} & set(sys.modules), "something heavy"
from torch import distributed
distributed.init_process_group("UNISONO")
distributed.all_reduce(x := torch.ones(1))
print("sum", x.item(), distributed.get_backend())
"""
    result = mpirun(2, "-c", program, tmp_path, timeout=60)
    assert result.stdout.count("sum 2.0 unisono") == 2, result.stdout + result.stderr
