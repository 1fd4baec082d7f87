"""PyTorch Geometric: graphs in batches, each rank with its own, and batch norm of all ranks."""

from __future__ import annotations

import torch
from shown import show
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(3, 16), GCNConv(16, 16)
        self.last = torch.nn.Linear(16, 1)

    def forward(self, data: Data) -> torch.Tensor:
        x = self.first(data.x, data.edge_index).relu()
        x = self.second(x, data.edge_index).relu()
        return self.last(global_mean_pool(x, data.batch))


def main() -> None:
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    graphs = []
    for nodes in torch.randint(4, 12, (32,)).tolist():
        x = torch.randn(nodes, 3)
        ring = torch.arange(nodes)
        edges = torch.stack([ring, (ring + 1) % nodes])
        graphs.append(Data(x=x, edge_index=edges, y=x.mean().reshape(1, 1)))
    model = DistributedDataParallel(Network())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(3):
        for batch in DataLoader(graphs[rank::size], batch_size=4):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(batch), batch.y).backward()
            optimizer.step()
    show(model.parameters())
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
