"""A quota given to a loop: in force while it runs, gone afterwards."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from kit.loops import Layers, cpu_loop
from kit.sharded_models import FSDP
from kit.small_loop import Raises
from torch import nn
from torch.utils.data import DataLoader

from conftest import make_data
from trainloop import AbstractCallback, TrainLoop
from trainloop.errors import ConfigurationError, ResourceError
from trainloop.resources import ResourceQuota, available


class Look(AbstractCallback):
    """Writes down what this rank may use."""

    def __init__(self) -> None:
        super().__init__("look")
        self.seen: dict[int, Any] = {}

    def on_epoch_end(self) -> None:
        from trainloop.distributed import gather_object

        loop = self.train_loop_obj
        feed = loop.running.feed
        mine = (sorted(os.sched_getaffinity(0)), torch.get_num_threads(), getattr(feed.loader, "num_workers", None))
        self.seen = dict(enumerate(gather_object(mine)))


def make(
    num_cpus: int, mode: str = "single", devices: Any = "auto", num_workers: int = 0, **arguments: Any
) -> TrainLoop:
    model = Layers(nn.Linear(8, 3))
    return cpu_loop(
        model,
        DataLoader(make_data(), batch_size=32, num_workers=num_workers),
        gpu_mode=mode,
        devices=devices,
        resources=ResourceQuota(num_cpus=num_cpus),
        **arguments,
    )


needs_two = pytest.mark.skipif(available().num_cpus < 2, reason="needs 2 CPUs")


def test_one_cpu_means_one_thread_and_no_workers() -> None:
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    look = Look()
    with pytest.warns(UserWarning, match="num_workers=2 is lowered to 0"):
        make(1, num_workers=2).fit(num_epochs=1, callbacks=[look])
    cpus, inside, workers = look.seen[0]
    assert (len(cpus), inside, workers) == (1, 1, 0)
    assert os.sched_getaffinity(0) == before
    assert torch.get_num_threads() == threads


@pytest.mark.long
@needs_two
@pytest.mark.parametrize("mode", ["ddp", FSDP])
def test_ranks_divide_the_quota(mode: str) -> None:
    before = os.sched_getaffinity(0)
    look = Look()
    make(2, mode, 2).fit(num_epochs=1, callbacks=[look])
    (first, threads_0, _), (second, threads_1, _) = look.seen[0], look.seen[1]
    assert len(first) == len(second) == threads_0 == threads_1 == 1
    assert not set(first) & set(second)
    assert os.sched_getaffinity(0) == before


def test_the_quota_ends_when_training_fails() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match="broken"):
        make(1).fit(num_epochs=1, callbacks=[Raises(ValueError("broken"))])
    assert os.sched_getaffinity(0) == before


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(ResourceError, match="num_cpus=100000"):
        make(100_000).fit(num_epochs=1)


def test_gpus_can_be_selected_only_where_there_are_some() -> None:
    with pytest.raises(ConfigurationError, match=r"no GPU\. Leave"):
        make(1, auto_select_gpus=True).fit(num_epochs=1)


def test_the_loop_tells_its_quota() -> None:
    assert "num_cpus=1" in repr(make(1))
