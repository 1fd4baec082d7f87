"""All-reduces of a PyTorch tensor: this project beside DeepSpeed's shared memory, in turns.

    mpirun -np 2 python benchmarks/deepspeed_calls.py [--json FILE]

DeepSpeed is a package of its own, whose operation `inference_all_reduce_` g++ and ninja compile at
the first run. `plain` is `comm.allreduce(x, op=cc.SUM, out=x)`, `plan` is `comm.plan_allreduce` of
the same tensor, and `torch` is `torch.distributed.all_reduce` on the backend. Prints microseconds
of the slowest rank, a median of the rounds, and how many times as long DeepSpeed takes as each:
the median of the rounds' ratios. The rate at which 512 KiB pass from core to core is printed, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from torch import distributed
from turns import Handover, machine

import collectives as cc

ROUNDS, FIRST = 31, 3
CALLS = {8: 500, 4 << 10: 500, 64 << 10: 200, 256 << 10: 50, 1 << 20: 20}


def main() -> None:
    """Measure; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    comm = cc.init()
    handover = Handover(comm.to_mpi())
    distributed.init_process_group("unisono")
    for rank in range(comm.size):  # the first compiles it
        if rank == comm.rank:
            built = ShareMemCommBuilder().load()
        comm.barrier()
    os.environ["LOCAL_SIZE"] = str(comm.local_size)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    built.initialize(comm.size, comm.rank)
    facts = {"machine": machine(), "ranks": comm.size, "rates": [handover.rate()]}
    for nbytes, count in CALLS.items():
        x = torch.zeros(nbytes // 4)
        plan = comm.plan_allreduce(x, op=cc.SUM)
        ways = {
            "DeepSpeed": lambda x=x: torch.ops.deepspeed.inference_all_reduce_(x),
            "torch": lambda x=x: distributed.all_reduce(x),
            "plain": lambda x=x: comm.allreduce(x, op=cc.SUM, out=x),
            "plan": plan,
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(FIRST + ROUNDS):
            for way in list(ways)[:: -1 if number % 2 else 1]:
                call = ways[way]
                comm.barrier()
                began = time.perf_counter()
                for _ in range(count):
                    call()
                took = comm.allreduce(time.perf_counter() - began, op=cc.MAX)
                if number >= FIRST:
                    times[way].append(1e6 * float(took) / count)
        medians = {way: statistics.median(found) for way, found in times.items()}
        ratios = {
            way: statistics.median(a / b for a, b in zip(times["DeepSpeed"], found, strict=True))
            for way, found in times.items()
        }
        facts[f"{nbytes} bytes"] = {"us": medians, "DeepSpeed's time over it": ratios}
        if comm.rank == 0:
            shown = [f"{way} {medians[way]:.2f} ({ratios[way]:.2f}x)" for way in ways]
            print(f"{nbytes:>8} bytes: {', '.join(shown)}", flush=True)
    facts["rates"].append(handover.rate())
    if comm.rank == 0:
        print("GB/s from core to core: " + " ".join(f"{rate:.1f}" for rate in facts["rates"]))
        if options.json:
            options.json.write_text(json.dumps(facts, indent=1) + "\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
