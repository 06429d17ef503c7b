"""A step that fails on the last of three ranks, repeated in one process: the rank's own bits."""

from __future__ import annotations

import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.recorded_models import Augmented, Broken, CarriesHidden, HasCritic, Noisy
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, MultiOptimizer, TrainLoop
from trainloop.callbacks import FailureRecorder, TerminateOnNaN
from trainloop.checkpoint import load
from trainloop.errors import WorkerFailedError

RANKS, BATCH = 3, 4
BAD = 23  # of the second global batch of twelve, on the last rank


class Net(Noisy):
    """Keeps the gradients of the bad sample's batch as backward gave them, before any average over ranks."""

    raises = False
    spoils = False

    def __init__(self) -> None:
        super().__init__()
        self.own: dict[str, Tensor] = {}
        self.loss: Tensor | None = None
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.centre.lerp_(x.detach().mean(0), 0.5)  # differs between ranks; rank 0's comes to all
        return super().forward(x - self.centre)

    def checked(self, x: Tensor, loss: Tensor) -> Tensor:
        if not bool((x[:, 0] == 0).any()):
            return loss
        if self.raises:
            raise Broken(loss.detach().double().item().hex())
        handles = []

        def keep(name: str, gradient: Tensor) -> Tensor | None:
            if name not in self.own:
                self.own[name] = gradient.clone()
            return gradient * math.nan if self.spoils and name == "layers.3.bias" else None

        for name, p in self.named_parameters():
            handles.append(p.register_hook(lambda g, name=name: keep(name, g)))
        self.loss = loss.detach().clone()
        return loss


class Carries(CarriesHidden, Net):
    pass


class Yields(HasCritic, Net):
    pass


class Unloadable(Augmented):
    def __getitem__(self, index: int) -> Any:
        if self.tensors[0][index][0] == 0:
            raise Broken("row")
        return super().__getitem__(index)


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(48, 6, generator=generator), torch.randint(3, (48,), generator=generator)
    x[BAD, 0] = 0.0
    return x, y


def adam(model: Any) -> optim.Optimizer:
    return optim.Adam(model.parameters(), lr=0.01)


def of_yields(model: Any) -> MultiOptimizer:
    critic, net = optim.SGD(model.critic.parameters(), lr=0.1), optim.Adam(model.layers.parameters(), lr=0.01)
    return MultiOptimizer({"critic": critic, "net": net})


def searching(model: Any) -> optim.Optimizer:
    return optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)


# Model, optimizer, dataset, micro-batches of a step, arguments of the loop.
KINDS: dict[str, tuple[Any, Any, Any, int, dict[str, Any]]] = {
    "plain": (Net, adam, TensorDataset, 1, {}),
    "augmented": (Net, adam, Augmented, 1, {"seed": 3}),
    "bf16": (Net, adam, TensorDataset, 1, {"use_amp": "bf16"}),
    "accumulated": (Net, adam, TensorDataset, 2, {}),
    "accumulated, in the middle": (Net, adam, TensorDataset, 3, {}),
    "alternating": (Yields, of_yields, TensorDataset, 1, {}),
    "alternating, accumulated": (Yields, of_yields, TensorDataset, 2, {}),
    "closure": (Net, searching, TensorDataset, 1, {}),
    "carried": (Carries, adam, TensorDataset, 2, {}),
    "weighted": (Net, adam, TensorDataset, 2, {"criterion": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]))}),
    "summed": (Net, adam, TensorDataset, 2, {"criterion": nn.CrossEntropyLoss(reduction="sum")}),
}


def made(name: str, seed: int = 0, **kwargs: Any) -> TrainLoop:
    kind, optimizer, dataset, _, arguments = KINDS[name]
    torch.manual_seed(seed)
    model = kind()
    arguments = {"criterion": nn.CrossEntropyLoss(), "accelerator": "cpu", "progress_bar": False, **arguments}
    loader = DataLoader(dataset(*samples()), BATCH)
    return TrainLoop(model, loader, optimizer=optimizer(model), **{**arguments, **kwargs})


class Ends(AbstractCallback):
    """Raises on the last rank once the bad sample's backward is done, and leaves what the rank had."""

    def __init__(self, folder: Path) -> None:
        super().__init__("ends")
        self.folder = folder

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        model = self.train_loop_obj.model
        if model.loss is not None:
            torch.save([model.loss, model.own], self.folder / f"own-{self.train_loop_obj.rank}")
            raise Broken("a hook")


PARTS = [pytest.param(name, marks=[] if name == "plain" else pytest.mark.long) for name in KINDS]


@pytest.mark.parametrize("name", PARTS)
def test_the_replay_has_the_loss_and_gradients_of_the_rank(name: str, tmp_path: Path) -> None:
    loop = made(name, gpu_mode="ddp", devices=RANKS)
    with pytest.raises(WorkerFailedError) as caught:
        loop.fit(
            num_epochs=1,
            callbacks=[FailureRecorder(tmp_path / "failures"), Ends(tmp_path)],
            grad_accumulation=KINDS[name][3],
        )
    error = caught.value
    assert error.rank == RANKS - 1
    assert error.recorded is not None
    assert f'tl.replay("{error.recorded}")' in error.message
    assert [path.name for path in (tmp_path / "failures").iterdir()] == [Path(error.recorded).name]
    loss, own = torch.load(tmp_path / f"own-{RANKS - 1}")
    other = made(name, seed=7)
    replay = other.replay(error.recorded)
    assert not replay.notes
    assert replay.loss_difference == 0
    assert torch.equal(other.model.loss, loss)
    assert own.keys() == other.model.own.keys() != set()
    assert all(torch.equal(gradient, other.model.own[key]) for key, gradient in own.items())


@pytest.mark.parametrize("name", ["plain", pytest.param("alternating, accumulated", marks=pytest.mark.long)])
def test_the_replay_raises_the_same_exception(name: str, tmp_path: Path) -> None:
    loop = made(name, gpu_mode="ddp", devices=RANKS)
    loop.model.raises = True
    with pytest.raises(WorkerFailedError) as caught:
        loop.fit(num_epochs=1, callbacks=[FailureRecorder(tmp_path)], grad_accumulation=KINDS[name][3])
    assert caught.value.rank == RANKS - 1
    bits = re.search(r"Broken: (0x\S+)", caught.value.message)
    assert bits is not None
    other = made(name, seed=7)
    other.model.raises = True
    with pytest.raises(Broken, match=re.escape(bits[1])):
        other.replay(str(caught.value.recorded))


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "accumulated, in the middle", "alternating, accumulated"])
def test_gradients_that_are_not_finite_on_one_rank(name: str, tmp_path: Path) -> None:
    """All ranks have the average; the replay of each record tells whose it is."""
    loop = made(name, gpu_mode="ddp", devices=RANKS)
    loop.model.spoils = True
    recorder = FailureRecorder(tmp_path, check_every_n_steps=1)
    loop.fit(num_epochs=1, callbacks=[recorder, TerminateOnNaN()], grad_accumulation=KINDS[name][3])
    own = name.startswith("alternating")  # reduced after the look
    guilty = {}
    for path in sorted(tmp_path.iterdir()):
        other = made(name, seed=7)
        other.model.spoils = True
        replay = other.replay(path)
        assert replay.loss_difference == 0
        assert replay.gradient_difference == (0 if own else None)
        guilty[load(path)["place"]["rank"]] = any(math.isnan(norm) for norm in replay.gradient_norms.values())
    assert guilty == ({2: True} if own else {0: False, 1: False, 2: True})


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_the_indices_of_a_batch_that_a_rank_can_t_load(workers: int, tmp_path: Path) -> None:
    loader = DataLoader(Unloadable(*samples()), BATCH, num_workers=workers)
    loop = made("plain", gpu_mode="ddp", devices=RANKS)
    loop.train_loader = loader
    with pytest.raises(WorkerFailedError) as caught:
        loop.fit(num_epochs=1, callbacks=[FailureRecorder(tmp_path)])
    record = load(str(caught.value.recorded))
    assert BAD in record["indices"]
    assert len(record["indices"]) == BATCH
    single = made("plain")
    single.train_loader = loader
    with pytest.raises(Broken, match="row"):
        single.replay(str(caught.value.recorded))


@pytest.mark.long
def test_the_first_of_equal_failures_is_recorded(tmp_path: Path) -> None:
    loop = made("plain", gpu_mode="ddp", devices=RANKS)
    loop.model.raises = True
    with pytest.raises(WorkerFailedError, match="The same failure occurred again") as caught:
        loop.fit(num_epochs=1, callbacks=[FailureRecorder(tmp_path)], max_restarts=3, restart_every_steps=1)
    assert len(loop.restarts) == 1
    assert [str(path) for path in tmp_path.iterdir()] == [caught.value.recorded]


@pytest.mark.long
def test_sharded_weights_are_not_recorded(tmp_path: Path) -> None:
    loop = made("plain", gpu_mode="fsdp", devices=2)
    loop.model.raises = True
    with pytest.raises(WorkerFailedError) as caught:
        loop.fit(num_epochs=1, callbacks=[FailureRecorder(tmp_path)])
    assert caught.value.recorded is None
    assert "some were sharded when the step failed (for example 'layers." in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_rank_that_is_killed_leaves_no_record(tmp_path: Path) -> None:
    loop = made("plain", gpu_mode="ddp", devices=2)
    with pytest.raises(WorkerFailedError) as caught:
        loop.fit(num_epochs=1, callbacks=[FailureRecorder(tmp_path), Kills()])
    assert caught.value.recorded is None
    assert list(tmp_path.iterdir()) == []


class Kills(AbstractCallback):
    def on_batch_end(self) -> None:
        if self.train_loop_obj.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
