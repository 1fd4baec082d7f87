"""TorchMetrics: metrics that ranks with uneven data update, and compute together."""

from __future__ import annotations

import torch
import torchmetrics
from shown import show
from torch import distributed


def main() -> None:
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    metrics = torchmetrics.MetricCollection({
        "accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=5),
        "confusion": torchmetrics.ConfusionMatrix(task="multiclass", num_classes=5),
        "auroc": torchmetrics.AUROC(task="multiclass", num_classes=5),  # keeps all rows
    })  # fmt: skip
    rows = torchmetrics.CatMetric()
    mean = torchmetrics.MeanMetric()
    scores, labels = torch.randn(60, 5), torch.randint(5, (60,))
    own = slice(rank, None, size) if rank else slice(0, 11)
    metrics.update(scores[own].softmax(1), labels[own])
    rows.update(labels[own].float())
    mean.update(scores[own])
    found = metrics.compute()
    assert found["confusion"].sum() == 11 + sum(len(range(r, 60, size)) for r in range(1, size))
    show([*found.values(), rows.compute(), mean.compute()])
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
