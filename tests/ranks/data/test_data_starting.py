"""A loader whose workers are new processes, and parts that can't be sent to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.small_loop import make_loop
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from trainloop.errors import UnpicklableError

ROWS = TensorDataset(torch.zeros(8, 8), torch.zeros(8, dtype=torch.long))


def nested() -> tuple[Dataset[Any], IterableDataset[Any]]:
    class Local(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> Any:
            return ROWS[i]

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from ROWS

    return Local(), Stream()


@pytest.mark.parametrize(
    ("name", "part", "method"),
    [
        ("train_loader", "collate_fn", "spawn"),
        ("validation_loader", "worker_init_fn", "spawn"),
        ("train_loader", "dataset", "forkserver"),
        ("train_loader", "stream", "spawn"),
    ],
)
def test_the_error_names_loader_part_and_workers(name: str, part: str, method: str) -> None:
    local, stream = nested()
    data = {"dataset": local, "stream": stream}.get(part, ROWS)
    functions: dict[str, Any] = {
        "collate_fn": {"collate_fn": lambda rows: default_collate(rows)},
        "worker_init_fn": {"worker_init_fn": lambda i: None},
    }.get(part, {})
    loader = DataLoader(data, 4, num_workers=1, multiprocessing_context=method, **functions)
    tl = make_loop()
    setattr(tl, name, loader)
    with pytest.raises(UnpicklableError) as caught:
        tl.fit(num_epochs=1)
    named = "dataset" if part == "stream" else part
    assert str(caught.value).startswith(f"{name}: its {named} can't be pickled (")
    assert f"by {method!r} (num_workers=1)" in str(caught.value)
    assert "multiprocessing_context" in str(caught.value)
