"""The wrappers on GPUs: the dtype of autocast in replicas, devices of all that is given, NCCL beside Gloo."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from kit.parallel_models import Net, TwoLosses, Weighted, WithBatchNorm, batch_of, furthest, gradients, total_of

from trainloop import distributed as td
from trainloop.parallel import TTDataParallel, TTDistributedDataParallel, reduce_gradients
from trainloop.parallel.sync_batchnorm import convert, revert

pytestmark = pytest.mark.gpu

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture
def group(may_leave: Callable[..., None]) -> Iterator[None]:
    """A process group of this process alone, as the ranks of a TrainLoop have it."""
    may_leave("pipe:", "eventpoll", "socket:", "threads", "file descriptors")  # Gloo's and NCCL's
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def on(device: torch.device, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0].to(device), batch[1].to(device)


def trained(
    module: Net, get_loss: Callable[..., Any], device: torch.device, weights: tuple[float, ...] = (1.0, 1.0, 1.0)
) -> dict[str, Tensor | None]:
    """CPU copies of the gradients after one backward; with equal weights the loss is a mean over samples."""
    criterion = nn.CrossEntropyLoss(weight=torch.tensor(weights)).to(device)
    total_of(get_loss(on(device, batch_of(0, 7)), criterion, device)).backward()
    return {name: None if grad is None else grad.cpu() for name, grad in gradients(module).items()}


@pytest.mark.parametrize("cls", [Net, Weighted, TwoLosses])
def test_ddp_of_one_rank_is_single(cls: type[Net], group: None) -> None:
    device = torch.device("cuda", 0)
    model, reference = cls().to(device), cls().to(device)
    wrapper = TTDistributedDataParallel(model, find_unused_parameters=True)
    assert vars(wrapper)["device_ids"] == [0]
    weights = (1.0, 2.0, 3.0)
    own = trained(model, wrapper.get_loss, device, weights)
    assert furthest(own, trained(reference, reference.get_loss, device, weights)) < 1e-6
    # Inputs on the CPU are moved, as DDP does it; without gradients too.
    x, y = batch_of(0)
    with torch.no_grad():
        predicted, _, _ = wrapper.get_predictions((x, y), device)
    assert predicted.device == device
    assert wrapper(x).device == device


def test_exchanges_keep_devices(group: None) -> None:
    device = torch.device("cuda", 0)
    value = {"gpu": torch.arange(3, device=device), "cpu": torch.ones(2, dtype=torch.bool), "number": 0.5}
    gathered = td.all_gather(value)
    assert (gathered["gpu"].device, gathered["cpu"].device.type) == (device, "cpu")
    assert gathered["gpu"].tolist() == [[0, 1, 2]]
    assert gathered["cpu"].tolist() == [[True, True]]
    reduced = td.all_reduce(value, "mean")
    assert (reduced["gpu"].device, reduced["gpu"].tolist(), reduced["number"]) == (device, [0, 1, 2], 0.5)
    td.barrier()


def test_gloo_is_made_beside_nccl(may_leave: Callable[..., None]) -> None:
    may_leave("pipe:", "eventpoll", "socket:", "threads", "file descriptors")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert td.exchange_ints([3]) == [[3]]
        assert td.all_gather(torch.ones(2)).tolist() == [[1, 1]]
        assert td.all_reduce(torch.ones(2, device="cuda"), "sum").device.type == "cuda"
    finally:
        dist.destroy_process_group()


def test_sync_batchnorm_takes_torchs_kernels(group: None) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)).cuda()
    reference = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)).cuda()
    reference.load_state_dict(model.state_dict())
    convert(model)
    assert isinstance(model[1], nn.SyncBatchNorm)
    assert isinstance(model[1], nn.BatchNorm2d)
    wrapper = TTDistributedDataParallel(model)
    x = torch.randn(4, 1, 5, 5, device="cuda")
    torch.testing.assert_close(wrapper(x), reference(x), rtol=1e-4, atol=1e-4)
    assert type(revert(model)[1]) is nn.BatchNorm2d  # type: ignore[index]


def test_reduced_gradients_stay_where_they_are(group: None) -> None:
    model = Net().cuda()
    model.get_loss(on(torch.device("cuda"), batch_of(0)), nn.CrossEntropyLoss(), torch.device("cuda")).backward()
    before = gradients(model)
    reduce_gradients(model.parameters())
    assert furthest(gradients(model), before) == 0


def test_cpu_replicas_where_there_are_gpus() -> None:
    model, reference, cpu = Net(), Net(), torch.device("cpu")
    wrapper = TTDataParallel(model, devices=2)
    assert furthest(trained(model, wrapper.get_loss, cpu), trained(reference, reference.get_loss, cpu)) < 1e-6


def test_dp_on_one_gpu_is_single() -> None:
    device = torch.device("cuda", 0)
    model, reference = Net().to(device), Net().to(device)
    wrapper = TTDataParallel(model, device_ids=[0])
    assert furthest(trained(model, wrapper.get_loss, device), trained(reference, reference.get_loss, device)) < 1e-6
    assert wrapper(batch_of(0)[0]).device == device


class Spy(Net):
    """Tells in which dtype and on which device a replica computes."""

    seen: list[tuple[torch.device, torch.dtype, torch.device, int]] = []

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        x, _ = batch_data
        output = self(x)
        Spy.seen.append(
            (self.device, self.head(torch.tanh(self.encoder(x))).dtype, device, len(list(self.parameters())))
        )
        return output.float().mean()


@needs_two
@pytest.mark.parametrize("cls", [Net, Weighted, TwoLosses])
def test_dp_on_two_gpus_is_single(cls: type[Net]) -> None:
    device = torch.device("cuda", 0)
    model, reference = cls().to(device), cls().to(device)
    wrapper = TTDataParallel(model, device_ids=[0, 1])
    # As in nn.DataParallel, what the loss doesn't reach gets a gradient of zeros, and not None.
    one, other = trained(model, wrapper.get_loss, device), trained(reference, reference.get_loss, device)
    assert furthest(one, {name: torch.zeros_like(one[name]) if g is None else g for name, g in other.items()}) < 1e-5
    x, y = on(device, batch_of(0, 7))
    predicted, true, metadata = wrapper.get_predictions((x, y), device)
    assert predicted.tolist() == model(x).argmax(1).tolist()
    assert (predicted.device, true.tolist(), len(metadata["row"])) == (device, y.tolist(), 7)
    torch.testing.assert_close(wrapper(x), model(x))


@needs_two
def test_a_replica_has_its_device_and_the_callers_dtype() -> None:
    Spy.seen.clear()
    model = Spy().cuda()
    with torch.autocast("cuda", torch.bfloat16):
        TTDataParallel(model, device_ids=[0, 1]).get_loss(batch_of(0, 7), None, torch.device("cuda", 0)).backward()
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert sorted(Spy.seen, key=str) == [(d, torch.bfloat16, d, len(list(model.parameters()))) for d in devices]


@needs_two
def test_dp_refuses_a_module_on_another_device() -> None:
    wrapper = TTDataParallel(WithBatchNorm().to("cuda:1"), device_ids=[0, 1])
    with pytest.raises(RuntimeError, match="must be on cuda:0, its first device, but has a tensor on cuda:1"):
        wrapper(batch_of(0)[0])
