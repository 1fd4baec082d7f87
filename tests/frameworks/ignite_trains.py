"""Ignite: `idist.Parallel`, models, optimizers and loaders by `auto_`, and metrics of all ranks."""

from __future__ import annotations

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import EpochMetric, MeanSquaredError
from shown import rows, show
from torch.utils.data import TensorDataset


def training(local_rank: int) -> None:
    torch.manual_seed(idist.get_rank())  # DDP broadcasts the parameters of rank 0
    model = idist.auto_model(torch.nn.Linear(4, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), 0.1))
    loader = idist.auto_dataloader(TensorDataset(*rows()), batch_size=8, shuffle=True)
    assert loader.batch_size == 4
    trainer = create_supervised_trainer(
        model, optimizer, torch.nn.functional.mse_loss, device=idist.device()
    )
    metrics = {
        "mse": MeanSquaredError(),
        "largest": EpochMetric(lambda made, y: (made - y).abs().max().item()),
    }
    evaluator = create_supervised_evaluator(model, metrics, device=idist.device())

    @trainer.on(Events.EPOCH_STARTED)
    def shuffle() -> None:
        loader.sampler.set_epoch(trainer.state.epoch)

    trainer.run(loader, max_epochs=8)
    found = evaluator.run(loader).metrics
    assert found["mse"] < 0.05, found
    rank, size = idist.get_rank(), idist.get_world_size()
    assert idist.all_reduce(rank, "SUM") == size * (size - 1) / 2
    assert idist.all_gather(torch.tensor([rank])).tolist() == list(range(size))
    assert idist.all_gather(f"rank {rank}") == [f"rank {r}" for r in range(size)]
    assert idist.broadcast(torch.tensor([rank]), size - 1).item() == size - 1
    idist.barrier()
    show([*model.parameters(), torch.tensor([found["mse"], found["largest"]])])


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training)
