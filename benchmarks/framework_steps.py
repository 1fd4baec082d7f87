"""A training step of Accelerate, Lightning and Transformers' Trainer over Gloo and over Unisono.

    python benchmarks/framework_steps.py [--ranks 2] [--rounds 5] [--json FILE]

Each turn is a job under mpirun with a program that asks for Gloo, with and without `--replace
gloo`. The model has 25 million parameters in five layers of 2,240, and each rank trains with
batches of 8 rows. Prints medians of a step in milliseconds, from one forward pass to the next, and
how many times as long it takes over Gloo: the median of the rounds' ratios, with its quartiles. The
rate at which 512 KiB pass from core to core is printed, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from torch_start import ROOT, VARIABLES, free_port
from turns import machine

STEPS, FIRST = 30, 5

MODEL = """
import json, statistics, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
STEPS, FIRST = map(int, sys.argv[1:3])
WIDTH, ROWS = 2240, 8
net = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(5)])
rows = torch.randn(STEPS * ROWS * int(os.environ["WORLD_SIZE"]), WIDTH)
data = TensorDataset(rows, rows.flip(1))
begins = []
net.register_forward_pre_hook(lambda *_: begins.append(time.perf_counter()))
loss_of = torch.nn.functional.mse_loss
"""

PROGRAMS = {
    "Accelerate": """
import accelerate
accelerator = accelerate.Accelerator(cpu=True)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data, batch_size=ROWS))
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(loss_of(model(x), y))
    optimizer.step()
""",
    "Lightning": """
import lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net

    def training_step(self, batch, number):
        return loss_of(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

trainer = lightning.Trainer(
    accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_epochs=1,
    logger=False, enable_progress_bar=False, enable_checkpointing=False,
    enable_model_summary=False,
)
trainer.fit(Model(), DataLoader(data, batch_size=ROWS))
""",
    "Trainer": """
import tempfile
import transformers

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net

    def forward(self, rows, labels):
        return {"loss": loss_of(self.net(rows), labels)}

arguments = transformers.TrainingArguments(
    tempfile.mkdtemp(), use_cpu=True, num_train_epochs=1, per_device_train_batch_size=ROWS,
    optim="sgd", ddp_find_unused_parameters=False, report_to=[], save_strategy="no",
    logging_strategy="no", disable_tqdm=True, max_grad_norm=0,
)
examples = [{"rows": x, "labels": y} for x, y in data]
transformers.Trainer(Model(), arguments, train_dataset=examples).train()
""",
}

END = """
assert torch.distributed.get_world_size() == int(os.environ["WORLD_SIZE"])
if os.environ["RANK"] == "0":
    steps = [b - a for a, b in zip(begins[FIRST:], begins[FIRST + 1:])]
    print("\\nstep", 1e3 * statistics.median(steps), flush=True)
"""

HANDOVER = """
from mpi4py import MPI
from turns import Handover
rate = Handover(MPI.COMM_WORLD).rate()
if MPI.COMM_WORLD.rank == 0:
    print("\\nrate", rate)
"""


def main() -> None:
    """Measure, and print a line for each framework."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=PROGRAMS)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: expected >= 2")
    facts = {"machine": machine(), "ranks": options.ranks, "rounds": options.rounds}
    with tempfile.TemporaryDirectory() as folder:
        rates = [run(HANDOVER, "rate", 2, folder)]
        for framework in [options.only] if options.only else PROGRAMS:
            program = VARIABLES + MODEL + PROGRAMS[framework] + END
            ways: dict[str, list[float]] = {"gloo": [], "unisono": []}
            for turn in range(options.rounds):
                for way in sorted(ways, reverse=bool(turn % 2)):
                    ways[way].append(run(program, "step", options.ranks, folder, way))
                rates.append(run(HANDOVER, "rate", 2, folder))
            ratios = [gloo / ours for gloo, ours in zip(*ways.values(), strict=True)]
            quartiles = statistics.quantiles(ratios)
            medians = {way: statistics.median(found) for way, found in ways.items()}
            print(
                f"{framework:10} gloo {medians['gloo']:.1f}, unisono {medians['unisono']:.1f}, "
                "quartiles of the ratio: " + " ".join(f"{ratio:.2f}" for ratio in quartiles)
            )
            facts[framework] = {"ms": medians, "quartiles of gloo / unisono": quartiles}
    print("GB/s from core to core: " + " ".join(f"{rate:.1f}" for rate in rates))
    facts["GB/s from core to core"] = rates
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


def run(program: str, word: str, ranks: int, folder: str, way: str = "") -> float:
    """Run a job, and return the number that rank 0 prints after a word."""
    script = Path(folder, "program.py")
    script.write_text(program)
    replaced = ["-m", "strategies.torch", "--replace", "gloo"] if way == "unisono" else []
    mpirun = Path(sys.executable).parent / "mpirun"
    command = [str(mpirun), "-np", str(ranks), sys.executable, *replaced, str(script)]
    environment = dict(os.environ, MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    arguments = [str(STEPS), str(FIRST)]
    done = subprocess.run(
        [*command, *arguments], env=environment, text=True, capture_output=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    (found,) = [line for line in done.stdout.splitlines() if line.startswith(f"{word} ")]
    return float(found.split()[1])


if __name__ == "__main__":
    main()
