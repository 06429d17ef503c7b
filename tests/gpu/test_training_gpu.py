"""Training on GPUs: the numbers of a hand-written loop, waits, leftovers, random numbers, and ranks that die."""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from conftest import make_data
from trainloop import AbstractCallback, TrainLoop, TTModel
from trainloop.errors import WorkerFailedError

pytestmark = pytest.mark.gpu

GPUS = min(2, torch.cuda.device_count()) or 1
needs_two = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


def wide_data() -> TensorDataset:
    x, y = make_data().tensors
    return TensorDataset(x.double(), y)


class Net(TTModel):
    def __init__(self, dropout: float = 0.0, *, batchnorm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(16) if batchnorm else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        assert x.device == device
        y_pred = self(x)
        self.log("accuracy", (y_pred.argmax(1) == y).float().mean())
        return criterion(y_pred, y)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, y = batch_data
        return self(x.to(device)).argmax(1), y, {}


class Weighted(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return super().get_loss(batch_data, criterion, device), (batch_data[1] + 1).sum()


def by_hand(model: nn.Module, optimizer: optim.Optimizer, *, accumulation: int, norm: float | None) -> list[Tensor]:
    """On the CPU, in global batches of 16; the criterion's mean over all samples of a step."""
    batches = list(DataLoader(wide_data(), 16))
    for _ in range(2):
        for i in range(0, len(batches), accumulation):
            step = batches[i : i + accumulation]
            samples = sum(len(y) for _, y in step)
            for x, y in step:
                (nn.functional.cross_entropy(model(x), y) * (len(y) / samples)).backward()
            if norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def adam(model: nn.Module, **kwargs: Any) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=1e-2, **kwargs)


MODES = ["single", pytest.param("dp", id="dp"), pytest.param("ddp", id="ddp")]


@pytest.mark.parametrize("accumulation, norm", [(1, None), (3, 0.5)])
@pytest.mark.parametrize("mode", MODES)
def test_weights_are_those_of_a_loop_by_hand(mode: str, accumulation: int, norm: float | None) -> None:
    """Two fits of an epoch, so that state comes back and goes on; the optimizer's kernel reads its counter on a GPU."""
    expected = by_hand(model := Net(batchnorm=mode != "dp").double(), adam(model), accumulation=accumulation, norm=norm)
    model = Net(batchnorm=mode != "dp").double()
    devices = 1 if mode == "single" else GPUS
    loop = TrainLoop(
        model,
        DataLoader(wide_data(), 16 // (GPUS if mode == "ddp" else 1)),
        DataLoader(wide_data(), 7),
        optimizer=adam(model, fused=True),
        criterion=nn.CrossEntropyLoss(),
        gpu_mode=mode,
        accelerator="cuda",
        devices=devices,
        gradient_clip_norm=norm,
        sync_batchnorm=mode != "dp",
        progress_bar=False,
    )
    loop.fit(num_epochs=1, grad_accumulation=accumulation)
    loop.fit(num_epochs=1, grad_accumulation=accumulation)
    for own, reference in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(own.cpu(), reference, rtol=0, atol=1e-9)
    assert len(loop.history["val_loss"]) == 2
    assert loop.predict_on_validation_set()[0].shape == (101,)


class WatchesForWaits(AbstractCallback):
    """From the fourth batch on, whatever makes the host wait for the device raises; stops before logs are read."""

    def __init__(self, batches: int) -> None:
        super().__init__("waits")
        self.batches, self.seen = batches, 0
        self.allocated = 0

    def on_batch_begin(self) -> None:
        self.seen += 1
        if self.seen == 4:
            with warnings.catch_warnings(action="ignore"):  # 'a prototype feature'
                torch.cuda.set_sync_debug_mode("error")

    def on_batch_end(self) -> None:
        if self.seen == self.batches:
            torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, exception: BaseException) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("amp", [False, "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("model_class", [Net, Weighted])
def test_a_step_waits_for_nothing(model_class: type[Net], accumulation: int, amp: Any) -> None:
    """With logs, clipping, mixed precision, accumulation and weights that are on the GPU."""
    model = model_class(0.1)
    batches = DataLoader(make_data(), 16)
    watch = WatchesForWaits(len(batches))
    loop = TrainLoop(
        model,
        batches,
        optimizer=adam(model),
        criterion=nn.CrossEntropyLoss(),
        accelerator="cuda",
        use_amp=amp,
        gradient_clip_norm=1.0,
        progress_bar=False,
    )
    loop.fit(num_epochs=1, grad_accumulation=accumulation, callbacks=[watch])
    assert watch.seen == len(batches)
    assert len(loop.history.steps("accuracy")) == -(-len(batches) // accumulation)


def make_loop(model: TTModel, **kwargs: Any) -> TrainLoop:
    return TrainLoop(
        model,
        DataLoader(make_data(), 16, shuffle=True),
        optimizer=optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        criterion=nn.CrossEntropyLoss(),
        **{"accelerator": "cuda", "progress_bar": False, **kwargs},
    )


def test_fp16_skips_a_step_and_goes_on() -> None:
    model = Net()
    loop = make_loop(model, use_amp={"init_scale": 2.0**40, "growth_interval": 1000})
    before = model.layers[0].weight.detach().clone()
    loop.fit(num_iterations=1)
    assert torch.equal(model.layers[0].weight.cpu(), before)  # the gradients were infinite
    loop.fit(num_epochs=8)
    assert not torch.equal(model.layers[0].weight.cpu(), before)
    assert all(p.isfinite().all() for p in model.parameters())


def test_memory_is_given_back() -> None:
    make_loop(Net()).fit(num_epochs=1)  # cuBLAS allocates a workspace for each stream and thread, once
    model = Net().cuda()
    gc.collect()  # what other tests left
    before = torch.cuda.memory_allocated()
    loop = make_loop(model)
    loop.fit(num_epochs=1)
    momentum = sum(p.numel() * 4 for p in model.parameters())
    # The loss that was recorded last stands in a block of 2 KiB; an allocation is a multiple of 512 bytes.
    assert torch.cuda.memory_allocated() - before <= momentum + 512 * 8 + 2048
    del loop
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_a_seeded_run_leaves_the_callers_random_numbers() -> None:
    loop = make_loop(Net(0.5), seed=1)
    torch.cuda.manual_seed(3)
    expected = torch.randn(4, device="cuda").tolist()
    torch.cuda.manual_seed(3)
    loop.fit(num_epochs=1)
    assert torch.randn(4, device="cuda").tolist() == expected


class Ends(AbstractCallback):
    def on_epoch_end(self) -> None:
        self.train_loop_obj.early_stop = True


@pytest.mark.parametrize("index", [0, pytest.param(1, marks=needs_two)])
def test_dropout_goes_on_where_a_checkpoint_left_it(index: int, tmp_path: Path) -> None:
    """Also on another GPU than that of the run that was interrupted."""
    from trainloop.callbacks import ModelCheckpoint

    def run(device: int, epochs: int, **kwargs: Any) -> list[float]:
        torch.manual_seed(7)
        model = Net(0.5)
        loop = make_loop(model, cuda_device_idx=device, accelerator="auto")
        saves = ModelCheckpoint(tmp_path / "checkpoints")
        loop.fit(num_epochs=epochs, callbacks=[saves], **kwargs)
        return list(loop.history["loss"])

    whole = run(0, 3)
    for path in (tmp_path / "checkpoints").rglob("*"):
        if path.is_file():
            path.unlink()
    run(index, 1)
    torch.cuda.manual_seed_all(99)  # what a new process would begin with
    last = max((tmp_path / "checkpoints").rglob("*.pt"), key=lambda path: path.stat().st_mtime)
    assert run(0, 3, resume_from=last) == whole


class StrikesRank(AbstractCallback):
    """One rank is killed, or raises, while the others are in a collective on the GPU."""

    def __init__(self, how: str) -> None:
        super().__init__("strikes", device_idx_execution=1)
        self.how = how

    def on_batch_begin(self) -> None:
        if self.train_loop_obj.total_iteration_idx == 3:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise LookupError("struck")


@needs_two
@pytest.mark.parametrize(
    "how, message",
    [("killed", "rank 1 of 2 was killed by signal SIGKILL"), ("raises", "rank 1 of 2 raised LookupError: struck")],
)
def test_a_rank_that_dies_ends_the_run(how: str, message: str) -> None:
    loop = make_loop(Net(), gpu_mode="ddp", devices=2)
    began = time.monotonic()
    with pytest.raises(WorkerFailedError, match=message):
        loop.fit(num_epochs=5, callbacks=[StrikesRank(how)])
    assert time.monotonic() - began < 120  # long before a collective's time-out
    loop = make_loop(Net(), gpu_mode="ddp", devices=2)
    loop.fit(num_epochs=1)
    assert len(loop.history["loss"]) == 1
