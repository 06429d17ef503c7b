"""What a resumed run loses beside the checkpoint is reported; modules that create what they load."""

from __future__ import annotations

import warnings
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.small_loop import Net, make_loop
from torch import Tensor, nn, optim

from trainloop import AbstractCallback, checkpoint
from trainloop.callbacks import ModelCheckpoint
from trainloop.errors import CheckpointError


def saved(folder: Path, **arguments: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, **{"every_n_epochs": None, "every_n_steps": 1, "keep": 99, **arguments})


def path_of(folder: Path, step: int) -> str:
    return next(c.path for c in checkpoint.checkpoints(folder) if c.info is not None and c.info.step == step)


# -- on_epoch_begin ----------------------------------------------------------------------------------------------------


class Rate(AbstractCallback):
    """Sets the rate of the epoch."""

    def __init__(self) -> None:
        super().__init__("Rate")
        self.rate = 1.0

    def on_epoch_begin(self) -> None:
        self.rate = 0.5**self.train_loop_obj.epoch


class RateOnResume(Rate):
    on_resume = Rate.on_epoch_begin


class RateInState(Rate):
    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rate = state["rate"]


@pytest.mark.parametrize("kind, step, warned", [(Rate, 9, True), (Rate, 7, False), (Rate, 14, False)])
def test_a_hook_that_is_not_called_for_a_resumed_epoch_is_warned_of(
    tmp_path: Path, kind: Any, step: int, warned: bool
) -> None:
    make_loop(validation=False).fit(num_epochs=2, callbacks=[kind(), saved(tmp_path)])
    rate = kind()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_loop(validation=False).fit(
            num_epochs=3, callbacks=[rate, saved(tmp_path)], resume_from=path_of(tmp_path, step)
        )
    found = [str(one.message) for one in caught if "on_epoch_begin of Rate is not called" in str(one.message)]
    assert len(found) == warned
    assert all("epoch 2 is resumed in the middle" in one for one in found)


@pytest.mark.parametrize("kind", [RateOnResume, RateInState])
@pytest.mark.filterwarnings("error")
def test_a_hook_whose_effect_is_restored_is_not_warned_of(tmp_path: Path, kind: Any) -> None:
    make_loop(validation=False).fit(num_epochs=2, callbacks=[kind(), saved(tmp_path)])
    rate = kind()
    make_loop(validation=False).fit(num_epochs=2, callbacks=[rate, saved(tmp_path)], resume_from=path_of(tmp_path, 9))
    assert rate.rate == 0.5


# -- attributes that get_loss changes ----------------------------------------------------------------------------------


class Pool:
    def __init__(self) -> None:
        self.images: deque[Tensor] = deque(maxlen=5)


class Target(nn.Module):
    """A criterion with a running value for each class, which is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.target = torch.zeros(3)

    def forward(self, y_pred: Tensor, y: Tensor) -> Tensor:
        self.target[:] = 0.9 * self.target + 0.1 * y_pred.detach().mean(0)
        return nn.functional.cross_entropy(y_pred, y) - (self.target * y_pred).mean()


class Keeps(Net):
    """Keeps state in attributes: some is for the training, some only a cache."""

    num_iter = 0
    kinds: tuple[str, ...] = ()

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds = kinds
        self.pool = Pool()
        self.losses: list[float] = []
        self.features = torch.zeros(3)
        self.mean = torch.zeros(3)
        self.sparse = torch.eye(2).to_sparse()
        self.kept = torch.zeros(2, device="meta")
        self.register_buffer("bank", torch.zeros(3), persistent=False)
        self.register_buffer("saved_bank", torch.zeros(3))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        y_pred = self(batch_data[0])
        if "count" in self.kinds:
            self.num_iter += 1
        if "pool" in self.kinds:
            self.pool.images.append(y_pred.detach())
        if "mean" in self.kinds:
            self.mean.mul_(0.9).add_(y_pred.detach().mean(0))
        if "bank" in self.kinds:
            self.bank += 1
        self.saved_bank += 1
        if "caches" in self.kinds:
            self.features = y_pred.detach()
            self.losses.append(1.0)
            self.sparse.mul_(2)
            self.kept = torch.zeros(3, device="meta")
            self.last = y_pred
        return criterion(y_pred, batch_data[1])


class KeepsWithState(Keeps):
    def get_extra_state(self) -> Any:
        return {"mean": self.mean}

    def set_extra_state(self, state: Any) -> None:
        self.mean = state["mean"]


@pytest.mark.parametrize(
    "model, name",
    [
        (lambda: Keeps("count"), "num_iter"),
        (lambda: Keeps("pool"), "pool.images"),
        (lambda: Keeps("bank"), "bank"),
        (lambda: Keeps("mean", "count"), "num_iter, mean"),
    ],
    ids=["count", "pool", "not persistent", "two"],
)
def test_state_that_get_loss_keeps_beside_checkpoints_is_warned_of_once(tmp_path: Path, model: Any, name: str) -> None:
    with pytest.warns(UserWarning, match=f"get_loss changes {name}, which checkpoints do not contain") as caught:
        make_loop(model(), validation=False).fit(num_epochs=2, callbacks=[saved(tmp_path)])
    assert sum("checkpoints do not contain" in str(one.message) for one in caught) == 1


def test_state_of_a_criterion_beside_checkpoints_is_warned_of(tmp_path: Path) -> None:
    loop = make_loop(validation=False)
    loop.criterion = Target()
    with pytest.warns(UserWarning, match="get_loss changes criterion.target, which checkpoints do not contain"):
        loop.fit(num_epochs=1, callbacks=[saved(tmp_path)])


@pytest.mark.filterwarnings("error")
def test_caches_and_state_in_checkpoints_are_not_warned_of(tmp_path: Path) -> None:
    make_loop(Keeps("caches"), validation=False).fit(num_epochs=1, callbacks=[saved(tmp_path / "a")])
    make_loop(KeepsWithState("mean"), validation=False).fit(num_epochs=1, callbacks=[saved(tmp_path / "b")])
    make_loop(Keeps("count", "mean", "pool"), validation=False).fit(num_epochs=1)  # no checkpoint


# -- modules that create what they load --------------------------------------------------------------------------------


class Normalizer(nn.Module):
    """Its tensors are created when it sees data, or when it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterDict()

    def see(self, mean: float) -> Normalizer:
        self.values["mean"] = nn.Parameter(torch.full((8,), mean), requires_grad=False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x - self.values["mean"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name in [name for name in state_dict if name.startswith(f"{prefix}values.")]:
            self.values[name.rpartition(".")[2]] = nn.Parameter(state_dict[name].clone(), requires_grad=False)


class Normalizes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.normalizer = Normalizer()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.normalizer(x))


def normalizes(mean: float | None) -> Normalizes:
    torch.manual_seed(0)
    model = Normalizes()
    if mean is not None:
        model.normalizer.see(mean)
    return model


@pytest.mark.parametrize("mean", [0.5, None], ids=["other values", "nothing"])
def test_a_module_that_creates_what_it_loads_resumes(tmp_path: Path, mean: float | None) -> None:
    whole, resumed = normalizes(2.0), normalizes(mean)
    first, second = (
        make_loop(model, validation=False, optimizer=optim.SGD(model.fc.parameters(), 0.1, 0.9))
        for model in (whole, resumed)
    )
    first.fit(num_epochs=2, callbacks=[saved(tmp_path)])
    kept = dict(resumed.named_parameters())
    second.fit(num_epochs=2, callbacks=[saved(tmp_path)], resume_from=path_of(tmp_path, 9))
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in resumed.state_dict().items())
    assert len(resumed.state_dict()) == 3
    # Optimizers and wrappers hold these objects.
    assert all(p is kept[name] for name, p in resumed.named_parameters() if name in kept)


class LoadsAnything(Net):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False)


def test_a_model_that_ignores_what_it_lacks_is_still_refused(tmp_path: Path) -> None:
    make_loop(normalizes(2.0), validation=False).fit(num_epochs=1, callbacks=[saved(tmp_path)])
    with pytest.raises(CheckpointError, match=r"normalizer.values.mean is not in the model"):
        make_loop(LoadsAnything()).fit(num_epochs=2, callbacks=[saved(tmp_path)], resume_from="last")
