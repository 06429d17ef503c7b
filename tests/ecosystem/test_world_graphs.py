"""torch_geometric: its Batch and its loader. A file of its own, since every rank imports the file of its model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as GraphLoader
from torch_geometric.nn import GCNConv, global_mean_pool
from world import Entry, Parts, in_all_modes, plain, randint, randn

from trainloop import TTModel

TRAIN, HELD_OUT = 37, 11


class GraphClassifier(TTModel):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = GCNConv(4, 8), GCNConv(8, 8)
        self.lin = nn.Linear(8, 3)

    def forward(self, data: Any) -> Tensor:
        x = self.conv2(self.conv1(data.x, data.edge_index).relu(), data.edge_index).relu()
        return self.lin(global_mean_pool(x, data.batch))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        return criterion(self(batch_data), batch_data.y)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self(batch_data), batch_data.y, {}


def make_graphs(batch: int, shuffle: bool) -> Parts:
    model = GraphClassifier().double()
    train, held_out = (
        [
            Data(x=randn(3 + i % 4, 4, seed=i), edge_index=randint(3 + i % 4, 2, 6, seed=i), y=torch.tensor([i % 3]))
            for i in range(n)
        ]
        for n in (TRAIN, HELD_OUT)
    )
    return Parts(
        model,
        GraphLoader(train, batch_size=batch, shuffle=shuffle),
        optim.Adam(model.parameters(), lr=0.01),
        GraphLoader(held_out, batch_size=3),
        nn.CrossEntropyLoss(),
    )


test_single, test_ddp = in_all_modes(
    Entry("torch_geometric", make_graphs, plain(lambda model, batch: F.cross_entropy(model(batch), batch.y))),
)
