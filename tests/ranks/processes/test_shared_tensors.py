"""Tensors that the user shares between processes: each rank has its own, and shares it with its loaders' workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from kit.small_loop import Net
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from trainloop import AbstractCallback, distributed

ROWS, LARGE = 24, 5_000_000  # the latter in floats: 20 MB


def inode(tensor: Tensor) -> int:
    """The file in which a tensor's memory lies."""
    with open("/proc/self/maps") as file:
        for line in file:
            span, _, _, _, found, *_ = line.split()
            begin, end = (int(x, 16) for x in span.split("-"))
            if begin <= tensor.data_ptr() < end:
                return int(found)
    raise AssertionError("no mapping")


class Counts(Dataset[Any]):
    def __init__(self) -> None:
        self.x, self.y = torch.randn(ROWS, 8), torch.zeros(ROWS, dtype=torch.int64)
        self.counter = torch.full((), 5.0).share_memory_()
        self.reads = torch.zeros(2).share_memory_()
        self.half = self.reads[1:]
        self.cache = torch.zeros(LARGE).share_memory_()
        self.data = torch.ones(LARGE).share_memory_()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info()
        self.reads[0 if worker is None else worker.id] += 1  # a place for each worker, which would race otherwise
        self.cache[-1 - index] = 1
        assert self.data[index] == 1
        return self.x[index], self.y[index]


class Reports(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("reports")
        self.reports: list[Any] = []
        self.own = torch.zeros(()).share_memory_()

    def on_train_end(self) -> None:
        data = self.train_loop_obj.train_loader.dataset
        data.counter += 1 + self.train_loop_obj.rank
        self.own += 1 + self.train_loop_obj.rank
        distributed.barrier()
        facts = {
            "counter": float(data.counter),
            "own": float(self.own),
            "reads": float(data.reads.sum()),
            "second": float(data.half) if self.train_loop_obj.train_loader.num_workers else None,
            "cached": float(data.cache.sum()),
            "inodes": [inode(tensor) for tensor in (data.counter, data.cache, data.data)],
        }
        self.reports = distributed.gather_object(facts)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on two cores, one for each rank
@pytest.mark.parametrize("workers", [0, 2])
def test_each_rank_has_its_own(workers: int) -> None:
    model, data, reports = Net(), Counts(), Reports()
    tl = cpu_loop(
        model,
        DataLoader(data, 4, num_workers=workers),
        criterion=torch.nn.CrossEntropyLoss(),
        gpu_mode="ddp",
        devices=2,
    )
    tl.fit(num_epochs=2, callbacks=[reports])
    for rank, facts in enumerate(reports.reports):
        assert facts["counter"] == 6 + rank  # begins with the caller's value
        assert facts["own"] == 1 + rank
        assert facts["reads"] == ROWS  # half of two epochs
        assert facts["cached"] == ROWS / 2
        if workers:
            assert facts["second"] > 0
        assert facts["inodes"][2] == inode(data.data)  # held once
        assert inode(data.counter) != facts["inodes"][0]
    assert reports.reports[0]["inodes"][:2] != reports.reports[1]["inodes"][:2]
    # The caller's data is as before; a callback's attributes come back from rank 0.
    assert [data.counter, data.reads.sum(), data.cache.sum()] == [5, 0, 0]
    assert reports.own == 1
    assert reports.own.is_shared()
