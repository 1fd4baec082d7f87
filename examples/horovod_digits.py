"""A script written for Horovod, on scanned handwritten digits: only its import has changed.

    mpirun -np 2 python examples/horovod_digits.py

It used to begin with `import horovod.torch as hvd`, and to be started by `horovodrun -np 2 python`.
"""

from __future__ import annotations

import torch

import strategies.horovod.torch as hvd  # the line that has changed
from common.digits import PIXELS, table

EPOCHS, BATCH, RATE = 40, 32, 0.1


def main() -> None:
    """Train, and say how many held-out digits are recognised."""
    hvd.init()
    torch.manual_seed(hvd.rank())
    torch.set_num_threads(1)

    rows = torch.from_numpy(table())
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    pixels, digits = rows[:, :PIXELS].float() / 16, rows[:, PIXELS].long()
    data = torch.utils.data.TensorDataset(pixels[300:], digits[300:])
    sampler = torch.utils.data.distributed.DistributedSampler(
        data, num_replicas=hvd.size(), rank=hvd.rank()
    )
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)

    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=RATE * hvd.size(), momentum=0.9, weight_decay=2e-3
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none
    )

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0 and (epoch + 1) % 8 == 0:
            print(f"epoch {epoch + 1}: loss {mean.item():.4f}", flush=True)

    share = slice(hvd.rank(), 300, hvd.size())
    with torch.no_grad():
        right = (model(pixels[share]).argmax(1) == digits[share]).sum()
    right = hvd.allreduce(right, op=hvd.Sum, name="right")
    if hvd.rank() == 0:
        print(f"accuracy on the held-out digits: {right.item() / 300:.4f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
