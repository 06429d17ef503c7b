"""Snapshots of a model on CUDA wait for no copy, where the simulated device makes these late."""

from __future__ import annotations

import fakegpu
import pytest
import torch

from trainloop.transfer.device_copies import DeviceCopies
from trainloop.transfer.slots import SnapshotMemory, Snapshotter

pytestmark = pytest.mark.gpu


def test_copies_are_there_after_the_wait_that_the_host_chooses() -> None:
    memory, copies = SnapshotMemory(parts=1, statuses=1), DeviceCopies(torch.device("cuda", 0))
    snapshotter = Snapshotter((), {}, copies)
    weight, count = torch.zeros(5000, device="cuda"), torch.zeros((), device="cuda")
    copies.begin()
    snapshotter.pack({"it": {"is": [weight, count]}})
    assert copies.wait() == 0, "the first set waits for each"
    copies.reserve()
    # On a side stream, since the simulated device does everything at once on its default stream.
    with torch.cuda.stream(torch.cuda.Stream()), fakegpu.lag(0.3):
        for number in (1, 2):
            weight.fill_(number)
            count.fill_(number)
            torch.cuda.synchronize()
            waits = fakegpu.count("synchronisations")
            copies.begin()
            packed = snapshotter.pack({"it": {"is": [weight, count]}})
            assert fakegpu.count("synchronisations") == waits
            assert packed.buffers[0].cast("f")[0] == number - 1, "it was waited for, or has no lag"
            assert copies.wait() > 0
            memory.write(number, 0, number, packed)
            weights, counted = memory.read(number, 0, ())["it"]["is"]
            assert weights.eq(number).all()
            assert counted == number
    del packed
    copies.close()
    memory.close()
