"""The arguments about devices of the loop and of ``fit``, together, on a machine with four GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.small_loop import make_loop

from trainloop import devices
from trainloop.errors import ConfigurationError, ResourceError
from trainloop.resources import ResourceQuota as Q
from trainloop.train_loop.arguments import devices as requests
from trainloop.train_loop.arguments.devices import requested
from trainloop.train_loop.arguments.options import AmpOptions, Options


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine on which the GPUs 1 and 3 are free; return what was searched for."""
    searched: list[int] = []

    def find(number: int) -> list[int]:
        searched.append(number)
        return [1, 3][: number if number > 0 else None]

    monkeypatch.setattr(devices, "_cuda_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(requests, "find_usable_cuda_devices", find)
    return searched


def found(
    mode: str = "ddp",
    accelerator: str = "auto",
    devices: Any = "auto",
    quota: Any = None,
    free: bool = False,
    **fit: Any,
) -> list[str]:
    options = Options(mode, accelerator, devices, free, AmpOptions(), None, quota)
    return [str(device) for device in requested(options, **fit, select=True).resolved(quota)]


def gpus(*indices: int) -> list[str]:
    return [f"cuda:{i}" for i in indices]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, gpus(0, 1, 2, 3)),
        ({"devices": " AUTO "}, gpus(0, 1, 2, 3)),
        ({"mode": "single"}, gpus(0)),
        ({"mode": "single", "num_gpus": 4}, gpus(0)),
        ({"mode": "single", "accelerator": "CPU"}, ["cpu"]),
        ({"mode": "single", "on_gpu": False}, ["cpu"]),
        ({"num_gpus": 2}, gpus(0, 1)),
        ({"num_gpus": 2, "devices": "Auto"}, gpus(0, 1)),
        ({"num_gpus": 4, "devices": [2, 0]}, gpus(2, 0)),  # the loop's own devices take precedence
        ({"accelerator": "GPU", "devices": 3}, gpus(0, 1, 2)),
        ({"accelerator": " Cpu", "devices": 3}, ["cpu"] * 3),
        ({"on_gpu": False, "devices": 2}, ["cpu"] * 2),
        ({"quota": Q(num_gpus=2)}, gpus(0, 1)),
        ({"quota": Q(num_gpus=2), "num_gpus": 2}, gpus(0, 1)),
        ({"free": True}, gpus(1, 3)),
        ({"free": True, "devices": 1}, gpus(1)),
        ({"free": True, "devices": "1"}, gpus(1)),
        ({"free": True, "mode": "single"}, gpus(1)),
        ({"free": True, "num_gpus": 1}, gpus(1)),
    ],
    ids=str,
)
def test_the_request_is_resolved(arguments: dict[str, Any], expected: list[str]) -> None:
    assert found(**arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "number"),
    [({}, -1), ({"devices": -1}, -1), ({"devices": 2}, 2), ({"num_gpus": 2}, 2), ({"mode": "single"}, 1)],
    ids=str,
)
def test_as_many_free_gpus_are_searched_for_as_requested(
    arguments: dict[str, Any], number: int, four_gpus: list[int]
) -> None:
    found(free=True, **arguments)
    assert four_gpus == [number]


@pytest.mark.parametrize("indices", [[2, 0], "2,0"])
def test_indices_are_the_users_own_selection(indices: Any, four_gpus: list[int]) -> None:
    assert found(free=True, devices=indices) == gpus(2, 0)
    assert not four_gpus


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"num_gpus": 4}, "num_gpus=4 requests 4 GPUs"), ({"devices": 3}, "devices=3 requests 3 GPUs")],
)
def test_a_request_above_the_quota_is_an_error_that_names_its_argument(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ResourceError, match=rf"{named}, but the quota has num_gpus=2. Use devices='auto'"):
        found(quota=Q(num_gpus=2), **arguments)


@pytest.mark.parametrize(
    ("arguments", "fit"),
    [
        ({}, {"num_gpus": 2, "on_gpu": False}),
        ({"accelerator": "CPU"}, {"on_gpu": True}),
        ({"accelerator": "CPU"}, {"num_gpus": 2}),
        ({}, {"num_gpus": 0, "on_gpu": True}),
    ],
    ids=str,
)
def test_contradictions_are_errors(arguments: dict[str, Any], fit: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="contradict each other"):
        found(**arguments, **fit)


def test_single_needs_one_device() -> None:
    with pytest.raises(ConfigurationError, match="devices=2: gpu_mode='single' uses only one device"):
        make_loop(devices=2)
