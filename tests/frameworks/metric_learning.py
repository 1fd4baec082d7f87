"""PyTorch Metric Learning: losses and miners over the embeddings of all ranks."""

from __future__ import annotations

import torch
from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.utils import distributed as wrappers
from shown import show
from torch import distributed
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    loss = wrappers.DistributedLossWrapper(losses.ContrastiveLoss())
    miner = wrappers.DistributedMinerWrapper(miners.MultiSimilarityMiner())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1 + rank)
    centres = torch.arange(4.0)[:, None] * 3
    for _ in range(8):
        labels = torch.arange(4).repeat(4)
        x = centres[labels] + torch.randn(16, 8)
        optimizer.zero_grad()
        embedded = model(x)
        loss(embedded, labels, miner(embedded, labels)).backward()
        optimizer.step()
    show(model.parameters())
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
