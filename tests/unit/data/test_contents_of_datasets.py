"""What a dataset holds for each sample, to compare it between ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainloop.data.loader.contents import contents_of


class Refuses:
    """An attribute that raises an error when it is looked at, as a connection may do."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_attributes_that_raise_errors_do_not_count() -> None:
    dataset: Any = TensorDataset(torch.rand(4))
    dataset.connection, dataset.sparse = Refuses(), torch.ones(4).to_sparse()
    assert contents_of(DataLoader(dataset)) == -1
    dataset.names = list("abcd")
    assert contents_of(DataLoader(dataset)) != -1
