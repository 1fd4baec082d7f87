"""A training step of PyTorch between machines: with and without overlap, and DDP.

    python benchmarks/overlap.py [--json FILE] [--rounds 3] [--mbit 1000] [--width 1024]

Needs root, iproute2, Open MPI and PyTorch. The machines are network namespaces on this one
(`tests/netns/namespaces.py`), a rank on each, their links shaped. A perceptron trains on batches of
random numbers. `alone` is the step of one rank without any exchange, `line` the time in which the
link carries the gradients: a step takes at least the longer of both, and their sum where nothing
overlaps. While it goes forward a model has no gradients: `forward + line` is the least where the
line is the longer one. `plain MPI` is what can be had on these cores: a thread sends as many bytes
as an all-reduce does, a layer's as soon as its gradients are there, to the other machine, which
does the same, in slices of 256 KiB by mpi4py; nothing is compared, nor added up. `4 MiB` is DDP
with `bucket_cap_mb=4`; as it comes, it waits for 25 MiB, three quarters of these gradients. Within
a job the ways take turns; figures are medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "netns")]

MACHINES = 2
LAYERS = 8
BATCH = 512
STEPS = 6  # of each way in a job, after two that are not counted
JOB_SECONDS = 180.0
SLICE_BYTES = 256 << 10  # of plain MPI; as one message each, gradients took 601 ms a step
PORT = 29511


def main() -> int:
    """Measure, and print a line per way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=int, default=1000, help="rate of the links, Mbit/s")
    parser.add_argument("--width", type=int, default=1024, help="of the layers")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank_main(options.width)

    from namespaces import NamespaceCluster, why_not

    reason = why_not()
    if reason is not None:
        print(f"benchmarks/overlap.py: {reason}", file=sys.stderr)
        return 1
    times: dict[str, list[float]] = {}
    with NamespaceCluster(MACHINES) as cluster:
        for _ in range(options.rounds):
            job = cluster.run(
                1, __file__, "--rank", "--width", str(options.width),
                timeout=JOB_SECONDS, shape=f"{options.mbit}mbit", GLOO_SOCKET_IFNAME="eth0",
            )  # fmt: skip
            if job.status != 0:
                print(job.stdout + job.stderr, file=sys.stderr)
                return 1
            for way, seconds in json.loads(job.stdout.splitlines()[-1]).items():
                times.setdefault(way, []).extend(seconds)
    figures = {way: statistics.median(found) for way, found in times.items()}
    nbytes = 4 * LAYERS * options.width * (options.width + 1)
    facts = {"mbit": options.mbit, "bytes": nbytes, "machines": MACHINES}
    figures["line"] = 2 * (MACHINES - 1) / MACHINES * nbytes / (options.mbit * 1e6 / 8)
    figures["forward + line"] = figures.pop("forward") + figures["line"]
    print(f"{MACHINES} machines, {nbytes / 1e6:.1f} MB of gradients, {options.mbit} Mbit/s")
    for way, seconds in sorted(figures.items(), key=lambda item: item[1]):
        print(f"{way:20} {1e3 * seconds:8.1f} ms  {seconds / figures['overlap']:5.2f} x overlap")
    if options.json:
        options.json.write_text(json.dumps(facts | {"seconds": figures}, indent=1) + "\n")
    return 0


def rank_main(width: int) -> int:
    """Train in each of the ways, in turns; rank 0 prints the slowest ranks' times."""
    import torch

    import collectives as cc

    comm = cc.init()
    address = f"tcp://10.77.0.1:{PORT}"
    torch.distributed.init_process_group("gloo", address, rank=comm.rank, world_size=comm.size)
    torch.set_num_threads(1)
    bytes_alone = BytesAlone(comm.to_mpi())
    ways = trained_in(width, bytes_alone)
    x = torch.randn(BATCH, width)
    times: dict[str, list[float]] = {way: [] for way in [*ways, "forward"]}
    for step in range(STEPS + 2):
        for way, (model, optimizer) in ways.items():
            optimizer.zero_grad()
            comm.barrier()
            began = time.perf_counter()
            loss = model(x).square().mean()
            forward = time.perf_counter() - began
            loss.backward()
            if way == "plain MPI":
                bytes_alone.wait()
            optimizer.step()
            took = float(comm.allreduce(time.perf_counter() - began, op=cc.MAX))
            if step >= 2:
                times[way].append(took)
                if way == "alone":
                    times["forward"].append(forward)
    if comm.rank == 0:
        print(json.dumps(times), flush=True)
    torch.distributed.destroy_process_group()
    return 0


def trained_in(width, bytes_alone):
    """Return by their names the ways to train: a model and its optimizer for each; *collective*."""
    import torch

    import collectives as cc
    import strategies

    def made(wrap):
        torch.manual_seed(0)
        layers = [
            m for _ in range(LAYERS) for m in (torch.nn.Linear(width, width), torch.nn.Tanh())
        ]
        model = torch.nn.Sequential(*layers)
        return wrap(model, torch.optim.SGD(model.parameters(), 0.01))

    def distributed(**options):
        return lambda model, optimizer: (
            model, strategies.DistributedOptimizer(optimizer, **options)
        )  # fmt: skip

    def ddp(group, **options):
        parallel = torch.nn.parallel.DistributedDataParallel
        return lambda model, optimizer: (
            parallel(model, process_group=group, **options), optimizer
        )  # fmt: skip

    ours, gloo = torch.distributed.new_group(backend="unisono"), torch.distributed.group.WORLD
    small = {"bucket_cap_mb": 4}
    return {
        "alone": made(lambda model, optimizer: (model, optimizer)),
        "plain MPI": made(bytes_alone.beside),
        "in the step": made(distributed(overlap=False)),
        "overlap": made(distributed()),
        "overlap, FP16": made(distributed(compression=cc.FP16)),
        "DDP, unisono": made(ddp(ours)),
        "DDP, unisono, 4 MiB": made(ddp(ours, **small)),
        "DDP, Gloo": made(ddp(gloo)),
        "DDP, Gloo, 4 MiB": made(ddp(gloo, **small)),
    }


def cut(array):
    """Cut an array into slices of 256 KiB."""
    flat, length = array.reshape(-1), SLICE_BYTES // array.itemsize
    return [flat[at : at + length] for at in range(0, flat.size, length)]


class BytesAlone:
    """Sends gradients to the other machine, and takes as many, while a backward pass goes on.

    Args:
        comm: the two ranks, of mpi4py.
    """

    def __init__(self, comm) -> None:
        self._comm = comm
        self._ready: queue.Queue = queue.Queue()
        self._landing: dict[int, object] = {}
        threading.Thread(target=self._work, daemon=True).start()

    def beside(self, model, optimizer):
        """Let the backward passes of a model do so."""
        for parameter in model.parameters():
            self._landing[id(parameter)] = parameter.detach().numpy().copy()
            parameter.register_post_accumulate_grad_hook(self._ready.put)
        return model, optimizer

    def wait(self) -> None:
        """Return when all that became ready has gone, and as much has come."""
        self._ready.join()

    def _work(self) -> None:
        from mpi4py import MPI

        other, under_way = 1 - self._comm.Get_rank(), []
        while True:
            parameter = self._ready.get()
            landing = self._landing[id(parameter)]
            slices = zip(cut(parameter.grad.numpy()), cut(landing), strict=True)
            for away, into in slices:
                requests = self._comm.Irecv(into, other), self._comm.Isend(away, other)
                under_way.append(requests)
            while under_way:
                MPI.Request.Waitall(list(under_way.pop(0)))
            self._ready.task_done()


if __name__ == "__main__":
    sys.exit(main())
