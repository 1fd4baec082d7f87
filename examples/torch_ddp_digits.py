"""Train a small network on scanned digits by PyTorch's DistributedDataParallel, over Unisono.

    mpirun -np 2 python examples/torch_ddp_digits.py

The program follows PyTorch's documentation of torch.distributed. One marked line differs: the name
of the backend. Addresses, ports and ranks need no variables.
"""

from __future__ import annotations

import argparse

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import strategies.torch  # noqa: F401  (not needed where the project is installed)
from common.digits import PIXELS, table


def main() -> None:
    """Train, and say how many held-out digits are recognised."""
    options = parse_arguments()
    distributed.init_process_group("unisono")  # the line that changed; it was "gloo"
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(rank)
    torch.set_num_threads(1)  # ranks fill the cores

    training, held_out = load()
    sampler = DistributedSampler(training, size, rank, seed=options.seed)
    loader = DataLoader(training, options.batch_size // size, sampler=sampler)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10)),
        gradient_as_bucket_view=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for pixels, digits in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(pixels), digits)
            loss.backward()
            optimizer.step()
        if rank == 0 and (epoch + 1) % 8 == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)

    with torch.no_grad():
        pixels, digits = held_out.tensors
        right = (model(pixels).argmax(1) == digits).float().mean().item()
    if rank == 0:
        print(f"accuracy on the held-out digits: {right:.4f}")
    distributed.destroy_process_group()


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return pixels from 0 to 1 and digits, for training and held out."""
    rows = torch.from_numpy(table())
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    pixels, digits = rows[:, :PIXELS].float() / 16, rows[:, PIXELS].long()
    return TensorDataset(pixels[300:], digits[300:]), TensorDataset(pixels[:300], digits[:300])


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=24, help="passes over the training data")
    parser.add_argument("--batch-size", type=int, default=96, help="rows per step, of all ranks")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the rows")
    return parser.parse_args()


if __name__ == "__main__":
    main()
