"""Buffers that are sparse, quantized or of odd dtypes, such as the matrix of a graph: trained, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.sharded_models import FSDP
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TrainLoop, TTBasicModel
from trainloop.callbacks import ExponentialMovingAverage, FailureRecorder
from trainloop.errors import ConfigurationError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]

KINDS: dict[str, Any] = {
    "coo": lambda: (torch.eye(4) * 2).to_sparse(),
    "csr": lambda: (torch.eye(4) * 2).to_sparse_csr(),
    "csc": lambda: (torch.eye(4) * 2).to_sparse_csc(),
}


class Graph(TTBasicModel):
    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 3)
        self.register_buffer("adjacency", buffer)

    def forward(self, x: Tensor) -> Tensor:
        matrix: Any = self.adjacency
        return self.fc(x @ matrix.to_dense())


def make_loop(buffer: Tensor, **options: Any) -> TrainLoop[Graph]:
    torch.manual_seed(1)
    model = Graph(buffer)
    loader = DataLoader(TensorDataset(torch.randn(10, 4), torch.randint(3, (10,))), batch_size=4)
    options = {"accelerator": "cpu", "progress_bar": False, **options}
    return TrainLoop(
        model, loader, loader, None, torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss(), **options
    )


@pytest.mark.parametrize("mode", [{}, {"gpu_mode": "dp", "devices": 2}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sparse_buffers_in_one_process(kind: str, mode: dict[str, Any], tmp_path: Path) -> None:
    dense, loop = make_loop(KINDS[kind]().to_dense()), make_loop(KINDS[kind](), **mode)
    dense.fit(num_epochs=2)
    loop.fit(num_epochs=2, callbacks=[FailureRecorder(tmp_path), ExponentialMovingAverage(0.5)])
    assert torch.allclose(dense.model.fc.weight, loop.model.fc.weight, atol=1e-2)
    assert loop.history["loss"] == pytest.approx(dense.history["loss"])
    assert str(loop.summary())
    loop.find_lr()


@pytest.mark.parametrize("mode", ["ddp", FSDP])
@pytest.mark.parametrize("kind", ["coo", "csr", "quantized", "int16", "float8_e5m2"])
def test_ranks_refuse_a_buffer_that_they_can_not_exchange(kind: str, mode: str) -> None:
    if kind == "quantized":
        buffer = torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8)
    else:
        buffer = KINDS[kind]() if kind in KINDS else torch.eye(4).to(getattr(torch, kind))
    loop = make_loop(buffer, gpu_mode=mode, devices=2)
    word = "sparse" if kind in KINDS else kind
    for call in (lambda: loop.fit(num_epochs=1), loop.predict_on_validation_set):
        with pytest.raises(ConfigurationError, match=rf"the buffer adjacency of Graph is a {word} tensor, which ranks"):
            call()
