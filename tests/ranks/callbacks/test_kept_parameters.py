"""Callbacks and criteria that keep, read and save parameters: in all modes as in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.loops import cpu_loop
from kit.sharded_models import FSDP, needs_fsdp_on_cpu
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TrainLoop, TTBasicModel
from trainloop.callbacks import ModelCheckpoint
from trainloop.errors import WorkerFailedError

pytestmark = pytest.mark.long


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 6).double(), nn.Linear(6, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class Keeps(AbstractCallback):
    """Keeps parameters of the model from before ``fit``, also within tuples and dicts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__("keeps")
        self.parameters = list(model.parameters())
        self.named = [(name, p) for name, p in model.named_parameters()]


class Averages(Keeps):
    average: Any = None

    def on_after_optimizer_step(self) -> None:
        with torch.no_grad():
            self.average = self.average or [p.detach().clone() for p in self.parameters]
            for average, p in zip(self.average, self.parameters, strict=True):
                average.lerp_(p, 0.5)

    def on_train_end(self) -> None:
        self.train_loop_obj.log("average", sum(a.norm().item() for a in self.average))


class Scales(Keeps):
    def on_after_gradient_update(self) -> None:
        for name, p in self.named:
            p.grad.mul_(0.5 if "weight" in name else 2.0)
        self.train_loop_obj.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters, 0.1))


class Clamps(Keeps):
    def on_after_optimizer_step(self) -> None:
        with torch.no_grad():
            for p in self.parameters[:2]:
                p.clamp_(-0.3, 0.3)


class Freezes(Keeps):
    def on_epoch_begin(self) -> None:
        self.parameters[0].requires_grad_(self.train_loop_obj.epoch % 2 == 0)


class Steps(Keeps):
    """Trains the head by an optimizer of its own."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.adam = optim.Adam(model.head.parameters(), 0.01)

    def on_after_gradient_update(self) -> None:
        self.adam.step()


class Adds(Keeps):
    """Gives the optimizer a group of kept parameters, and later replaces it by another one."""

    def on_epoch_begin(self) -> None:
        loop = self.train_loop_obj
        if loop.epoch == 1:
            loop.optimizer.add_param_group({"params": self.parameters[:2], "lr": 0.05})
        if loop.epoch == 2:
            loop.optimizer = optim.Adam(self.parameters, 0.01)


class Decays(nn.Module):
    """A criterion with a penalty of one weight, which is no parameter of the criterion."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.kept = (model.head.weight,)

    def forward(self, y_pred: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(y_pred, y) + self.kept[0].square().sum()


def run(
    kind: Callable[[Any], Any], mode: str, ranks: int, folder: Path | None = None, **fit: Any
) -> tuple[Net, Any, TrainLoop]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(26, 4, generator=generator, dtype=torch.float64)
    model = Net()
    kept = kind(model)
    trained = {Steps: model.body, Adds: model.head}.get(kind, model).parameters()
    loop = cpu_loop(
        model,
        DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 6 if mode == "dp" else 6 // ranks),
        optim.SGD(trained, 0.1, momentum=0.9),
        kept if kind is Decays else nn.CrossEntropyLoss(),
        gpu_mode=mode,
        devices=ranks,
    )
    callbacks = [kept] if kind is not Decays else []
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, every_n_steps=2, keep=None))
    loop.fit(num_epochs=3, callbacks=callbacks, **fit)
    return model, kept, loop


def numbers(model: Net, loop: TrainLoop) -> dict[str, Tensor]:
    found = {name: p.detach() for name, p in model.named_parameters()}
    logged = {name: torch.as_tensor(loop.history[name]) for name in ("loss", "norm") if name in loop.history}
    return {**found, **logged}


@pytest.mark.filterwarnings("ignore:.*are in no optimizer")
@pytest.mark.parametrize(("mode", "ranks"), [("dp", 2), ("ddp", 2), (*FSDP.values, 2), (*FSDP.values, 3)])
@pytest.mark.parametrize("kind", [Averages, Scales, Clamps, Freezes, Steps, Adds, Decays])
def test_parameters_kept_from_before_fit_are_the_model_s(kind: Any, mode: str, ranks: int, tmp_path: Path) -> None:
    model, kept, loop = run(kind, mode, ranks, tmp_path)
    expected, expected_kept, single = run(kind, "single", 1)
    torch.testing.assert_close(numbers(model, loop), numbers(expected, single), rtol=1e-12, atol=1e-12)
    own = kept.kept if kind is Decays else kept.parameters
    assert {id(p) for p in own} <= {id(p) for p in model.parameters()}
    stepped = [p for group in loop.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in stepped} <= {id(p) for p in model.parameters()}
    assert {type(p) for p in (*own, *stepped)} == {nn.Parameter}
    if kind is Averages:
        torch.testing.assert_close(kept.average, expected_kept.average, rtol=1e-12, atol=1e-12)
    if kind in (Scales, Clamps, Freezes):
        middle = sorted(path for path in tmp_path.iterdir() if path.name.startswith("checkpoint"))[3]
        resumed, _, again = run(kind, mode, ranks, tmp_path / "again", resume_from=middle)
        torch.testing.assert_close(numbers(resumed, again), numbers(model, loop), rtol=0, atol=0)


NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda p: p.norm().item(),
    "float": lambda p: float(p.detach().abs().max()),
    "bool": lambda p: bool(p.sum() > -10),
    "mean": lambda p: p.data.mean().item(),
    "count": lambda p: int((p > 0).sum()),
    "of the gradient": lambda p: p.grad.norm().item(),
    "tolist": lambda p: sum(map(sum, p.tolist())),
    "numpy": lambda p: float(np.abs(p.detach().cpu().numpy()).std()),
    "asarray": lambda p: float(np.asarray(p.detach()).max()),
    "text": lambda p: float(f"{p.norm():.6f}"),
}


class Reads(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("reads")
        self.found: dict[str, Any] = {}

    def on_after_gradient_update(self) -> None:
        weight = self.train_loop_obj.model.body.weight
        self.found = {name: read(weight) for name, read in NUMBERS.items()}
        self.train_loop_obj.log("norm", weight.norm())
        self.train_loop_obj.log("gradient", weight.grad.abs().max())
        if hasattr(weight, "device_mesh"):
            with pytest.raises(ValueError, match="read-only"):
                weight.detach().numpy()[0] = 0


@pytest.mark.parametrize(("mode", "ranks"), [("ddp", 2), (*FSDP.values, 2), (*FSDP.values, 3)])
def test_numbers_of_a_parameter_are_those_of_the_whole_one(mode: str, ranks: int) -> None:
    _, reads, loop = run(lambda _: Reads(), mode, ranks)
    _, expected, single = run(lambda _: Reads(), "single", 1)
    assert reads.found == pytest.approx(expected.found, rel=1e-12)
    for name in ("norm", "gradient"):
        assert loop.history[name] == pytest.approx(single.history[name], rel=1e-12)


class Saves(AbstractCallback):
    def __init__(self, path: Path, whole: bool) -> None:
        super().__init__("saves")
        self.path, self.whole = path, whole

    def on_epoch_end(self) -> None:
        state = self.train_loop_obj.model.state_dict()
        if self.whole:
            state = {name: p.full_tensor() for name, p in state.items()}
        if self.train_loop_obj.is_main_process():
            torch.save(state, self.path)


@needs_fsdp_on_cpu
@pytest.mark.parametrize("whole", [False, True])
def test_a_file_of_a_hook_contains_whole_tensors_or_is_refused(whole: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    if not whole:
        with pytest.raises(WorkerFailedError, match=r"one rank's shard\. In fsdp, ModelCheckpoint .*full_tensor"):
            run(lambda _: Saves(path, whole), "fsdp", 2)
        return
    model, _, _ = run(lambda _: Saves(path, whole), "fsdp", 2)
    torch.testing.assert_close(torch.load(path), model.state_dict(), rtol=0, atol=0)
