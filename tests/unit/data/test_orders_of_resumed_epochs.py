"""An epoch that resumes in another order than it had begun in is warned of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.small_loop import make_loop
from kit.warned import warnings_of
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler

from conftest import make_data
from trainloop import AbstractCallback
from trainloop.callbacks import ModelCheckpoint

ORDER = "train_loader: the resumed run reads the samples of this epoch in another order"


class ByModel(Sampler[int]):
    """Begins with the samples that a weight of the model selects, or with those of the epoch."""

    def __init__(self, model: Any, kind: str) -> None:
        self.model, self.kind, self.epoch = model, kind, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        seed = int(self.model.fc.weight[0, 0].item() * 1e9) if self.kind == "model" else self.epoch
        return iter(torch.randperm(40, generator=torch.Generator().manual_seed(seed)).tolist())


class Stops(AbstractCallback):
    def on_batch_begin(self) -> None:
        if self.train_loop_obj.global_step == 7 and not self.train_loop_obj.resumed:
            raise RuntimeError("stopped")


class Weighs(AbstractCallback):
    """Sets the sampler's weights in the second epoch, and not when this epoch is resumed."""

    def on_epoch_begin(self) -> None:
        self.train_loop_obj.train_loader.sampler.weights = torch.arange(40.0) ** (2 * self.train_loop_obj.epoch)

    def on_resume(self) -> None:
        pass


class Stages(AbstractCallback):
    """Assigns each stage's loader at the end of the epoch before, and again where a run resumes."""

    def __init__(self, kind: str) -> None:
        super().__init__("stages")
        self.kind = kind
        self.orders: list[list[int]] = []

    def loader_of(self, epoch: int) -> Any:
        generator = torch.Generator().manual_seed(epoch // 2)
        data = self.train_loop_obj.train_loader.dataset
        if self.kind == "sampler":
            return DataLoader(data, 8, sampler=WeightedRandomSampler(torch.arange(40.0), 40, generator=generator))
        return DataLoader(data, 8, shuffle=True, generator=generator)

    def on_epoch_end(self) -> None:
        tl = self.train_loop_obj
        if tl.epoch % 2:
            tl.train_loader = self.loader_of(tl.epoch + 1)

    def on_resume(self) -> None:
        self.train_loop_obj.train_loader = self.loader_of(self.train_loop_obj.epoch)


@pytest.mark.parametrize("kind", ["shuffle", "sampler"])
@pytest.mark.parametrize("seed", [3, None])
def test_a_loader_that_was_assigned_at_an_epochs_end_keeps_its_own_generator(
    tmp_path: Path, kind: str, seed: int | None
) -> None:
    class StopsAt(AbstractCallback):
        def on_batch_begin(self) -> None:
            if self.train_loop_obj.global_step == 10 and not self.train_loop_obj.resumed:
                raise KeyError("stopped")

    def fit(folder: Path, *callbacks: Any, **arguments: Any) -> Any:
        torch.manual_seed(0)
        loop = make_loop(validation=False, seed=seed)
        stages = Stages(kind)
        stages.train_loop_obj = loop
        loop.train_loader = stages.loader_of(0)
        keeps = ModelCheckpoint(folder, every_n_steps=1, keep=50)
        loop.fit(num_epochs=4, callbacks=[stages, keeps, *callbacks], **arguments)
        return loop.model.state_dict()

    expected = fit(tmp_path / "whole")
    with pytest.raises(KeyError):
        fit(tmp_path / "cut", StopsAt("stops"))
    resumed = fit(tmp_path / "cut", resume_from="last")
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())


@pytest.mark.parametrize("kind", ["model", "epoch", "weights", "shuffle"])
def test_another_order_is_warned_of(tmp_path: Path, kind: str) -> None:
    def fit(**arguments: Any) -> None:
        loop = make_loop(validation=False, seed=3)
        sampler: Any = WeightedRandomSampler([1.0] * 40, 40) if kind == "weights" else ByModel(loop.model, kind)
        how = {"shuffle": True} if kind == "shuffle" else {"sampler": sampler}
        loop.train_loader = DataLoader(loop.train_loader.dataset, 8, **how)
        others = [Weighs("weighs")] if kind == "weights" else []
        loop.fit(3, callbacks=[ModelCheckpoint(tmp_path, every_n_steps=1), Stops("stops"), *others], **arguments)

    with pytest.raises(RuntimeError, match="stopped"):
        fit()
    assert len(warnings_of(lambda: fit(resume_from="last"), ORDER)) == (kind in ("model", "weights"))


@pytest.mark.parametrize(
    "before, now, warns",
    [("order", "shuffle", True), ("shuffle", "order", True), ("shuffle", "weights", True), ("order", "list", False)],
)
def test_another_sampler_is_warned_of(tmp_path: Path, before: str, now: str, warns: bool) -> None:
    """Torch's own orders are known without reading them; the order of a list with the same indices is the same."""
    hows: dict[str, dict[str, Any]] = {
        "order": {},
        "shuffle": {"shuffle": True},
        "weights": {"sampler": WeightedRandomSampler([1.0] * 40, 40)},
        "list": {"sampler": list(range(40))},
    }

    def fit(how: str, **arguments: Any) -> None:
        loop = make_loop(validation=False, seed=3)
        loop.train_loader = DataLoader(make_data(40), 8, **hows[how])
        loop.fit(2, callbacks=[ModelCheckpoint(tmp_path, every_n_steps=1, keep=20)], **arguments)

    fit(before)
    for step, expected in (("3", warns), ("5", False)):  # in the middle of an epoch, and after its last step
        (path,) = tmp_path.glob(f"checkpoint-epoch=0001-step=0000000{step}.pt")
        assert len(warnings_of(lambda path=path: fit(now, resume_from=path), ORDER)) == expected
