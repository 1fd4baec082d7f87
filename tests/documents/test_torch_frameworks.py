"""Scripts of Accelerate, Lightning and Trainer run over the backend, unchanged or with a line."""

from __future__ import annotations

import re

import pytest

from launcher import ROOT, mpirun
from requirements import needs

needs("torch")

DATA = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True)
data = TensorDataset(x, y)
"""

ACCELERATE = """
torch.distributed.init_process_group("unisono")  # the line that is new
import accelerate
accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
assert accelerator.num_processes == 2
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(8):
    for rows, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(rows), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
loss = accelerator.reduce(loss.detach(), "mean").item()
weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
accelerator.wait_for_everyone()
"""

LIGHTNING = """
import lightning
from lightning.pytorch.strategies import DDPStrategy

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        rows, targets = batch
        loss = torch.nn.functional.mse_loss(self.layer(rows), targets)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, number):
        rows, targets = batch
        loss = torch.nn.functional.mse_loss(self.layer(rows), targets)
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_rows", len(rows), sync_dist=True)  # the mean of an integer

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

model = Model()
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, max_epochs=4, enable_progress_bar=False, logger=False,
    strategy=DDPStrategy(process_group_backend="unisono"),  # the line that changed
    enable_checkpointing=False, enable_model_summary=False, check_val_every_n_epoch=4,
)
loader = DataLoader(data, batch_size=4)
trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True), loader)
assert trainer.world_size == 2
assert trainer.callback_metrics["val_loss"] < 0.05
assert trainer.callback_metrics["val_rows"] == 4
loss = trainer.callback_metrics["loss"].item()
weights = trainer.strategy.all_gather(model.layer.weight.detach())
"""

# Trainer keeps the process group that there is, as Accelerate does, on which it is built.
TRAINER = """
torch.distributed.init_process_group("unisono")  # the line that is new
import transformers

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, rows, labels):
        predicted = self.layer(rows)
        return {"loss": torch.nn.functional.mse_loss(predicted, labels), "logits": predicted}

model = Model()
arguments = transformers.TrainingArguments(
    sys.argv[1], use_cpu=True, num_train_epochs=4, per_device_train_batch_size=4, optim="sgd",
    learning_rate=0.1, lr_scheduler_type="constant", ddp_find_unused_parameters=False,
    report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
)
examples = [{"rows": rows, "labels": target} for rows, target in data]
trainer = transformers.Trainer(model, arguments, train_dataset=examples, eval_dataset=examples)
assert arguments.world_size == 2
trainer.train()
assert trainer.state.global_step == 4 * 64 // (2 * 4)  # each rank trains with half of the rows
loss = trainer.evaluate()["eval_loss"]
weights = trainer.accelerator.gather(model.layer.weight.detach())
"""

# The line that a script needs, and what programs for Gloo have instead.
INIT = 'torch.distributed.init_process_group("unisono")  # the line that is new\n', ""
STRATEGY = 'DDPStrategy(process_group_backend="unisono"),  # the line that changed', '"ddp",'

SCRIPTS = pytest.mark.parametrize(
    ("framework", "script", "line"),
    [
        ("accelerate", ACCELERATE, INIT),
        ("lightning", LIGHTNING, STRATEGY),
        ("transformers", TRAINER, INIT),
    ],
    ids=["accelerate", "lightning", "trainer"],
)

END = """
rank = torch.distributed.get_rank()
weights = weights.reshape(2, 4)
assert torch.equal(weights[0], weights[1]), weights
assert loss < 0.05, loss
bits = weights[rank].view(torch.int32).tolist()
print("learnt", torch.distributed.get_backend(), rank, *bits, flush=True)
torch.distributed.destroy_process_group()
"""

LOADERS = """
import strategies.torch
from torch.utils.data.distributed import DistributedSampler

class Asked(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        return x[number], torch.tensor(torch.distributed.is_initialized())

def main():
    torch.distributed.init_process_group("unisono")
    assert torch.distributed.get_debug_level() == torch.distributed.DebugLevel.DETAIL
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    for kind in ("fork", "spawn"):
        sampler = DistributedSampler(range(64), shuffle=False)
        loader = DataLoader(
            Asked(), batch_size=8, sampler=sampler, num_workers=1, multiprocessing_context=kind
        )
        seen = torch.zeros(())
        for rows, initialized in loader:
            assert initialized.all() == (kind == "fork")
            model.zero_grad()
            model(rows).sum().backward()
            seen += rows.sum()
        torch.distributed.all_reduce(seen)
        assert torch.allclose(seen, x.sum(), atol=1e-4)
    print("loaded", torch.distributed.get_rank(), flush=True)
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def metadata(tmp_path):
    """By which PyTorch finds the backend, as where the project is installed."""
    folder = tmp_path / "unisono-0.dist-info"
    folder.mkdir()
    folder.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: unisono\nVersion: 0\n")
    folder.joinpath("entry_points.txt").write_text(
        "[torch.backends]\nunisono = unisono_torch:register\n"
    )
    return tmp_path


def run(folder, text, *before, **variables):
    program = folder / "script.py"
    program.write_text(text)
    variables["PYTHONPATH"] = str(ROOT)
    # Imports of Lightning or Trainer take 10 s of a core for each rank, on a busy machine 80 s.
    return mpirun(2, *before, program, folder, timeout=280, **variables)


@SCRIPTS
def test_a_script_of_a_framework(metadata, framework, script, line):
    needs(framework)
    assert line[0] in script
    result = run(metadata, DATA + script + END).checked()
    assert result.stdout.count("learnt unisono") == 2


@SCRIPTS
def test_a_script_for_gloo_is_run_unchanged(tmp_path, framework, script, line):
    """With the same parameters to the last bit: two ranks have one order of summation."""
    needs(framework)
    text = DATA + script.replace(*line) + END
    runner = ("-m", "strategies.torch")
    gloo = run(tmp_path, text, *runner).checked()
    ours = run(tmp_path, text, *runner, "--replace", "gloo").checked()
    learnt = [sorted(re.findall("learnt gloo .*", result.stdout)) for result in (gloo, ours)]
    assert learnt[0] == learnt[1]
    assert len(learnt[0]) == 2
    assert (gloo.stderr + ours.stderr).count("unisono: replaces Gloo") == 1


def test_workers_of_loaders_are_no_ranks(tmp_path):
    """Also those that import the program anew, and with all checks of PyTorch."""
    result = run(tmp_path, DATA + LOADERS, TORCH_DISTRIBUTED_DEBUG="DETAIL").checked()
    assert result.stdout.count("loaded") == 2
