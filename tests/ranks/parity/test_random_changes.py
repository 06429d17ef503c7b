"""Random changes by hooks at random moments: each mode has a hand-written loop's weights; a resume changes no bit.

A failing test names its seed; ``draw`` shows the combination.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from ranks.parity.test_random_configurations import check, numbers
from trainloop import AbstractCallback, TTBasicModel
from trainloop.callbacks import ModelCheckpoint

D = torch.float64


def rows(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 5, generator=generator, dtype=D), torch.randint(0, 3, (n,), generator=generator)


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 7, dtype=D), nn.Tanh(), nn.Linear(7, 6, dtype=D))
        self.head = nn.Linear(6, 3, dtype=D)
        self.gain = 1.0
        self.register_buffer("shift", torch.zeros(3, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) * self.gain + self.shift


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}
CRITERIA: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "classes": {"weight": torch.tensor([1.0, 3.0, 0.5], dtype=D)},
    "smoothed": {"label_smoothing": 0.1},
}


def make_loader(spec: tuple[Any, ...], factor: int) -> DataLoader[Any]:
    """Return a loader in order; ``factor`` is the number of batches of a rank that make a batch."""
    kind, n, batch, seed = spec
    data: Any = TensorDataset(*rows(n, seed))
    return DataLoader(Subset(data, range(n - 1, n // 4, -1)) if kind == "subset" else data, batch * factor)


def own_data(loop: Any) -> TensorDataset:
    data = loop.train_loader.dataset
    return data.dataset if isinstance(data, Subset) else data


# -- the changes -------------------------------------------------------------------------------------------------------


def groups(loop: Any, name: str, value: float) -> None:
    for group in loop.optimizer.param_groups:
        group[name] = value


@torch.no_grad()
def scale_weights(loop: Any, value: float) -> None:
    for p in loop.model.head.parameters():
        p.mul_(value)


def scale_gradients(loop: Any, value: float) -> None:
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad.mul_(value)


def clear_momentum(loop: Any, value: Any) -> None:
    for state in loop.optimizer.state.values():
        for part in state.values():
            if torch.is_tensor(part) and part.ndim:
                part.zero_()


def set_tensors(loop: Any, value: int) -> None:
    data = own_data(loop)
    data.tensors = rows(len(data), value)


def shorten(loop: Any, value: int) -> None:
    if isinstance(loop.train_loader.dataset, Subset):
        loop.train_loader.dataset.indices = list(loop.train_loader.dataset.indices)[: -value or None]


def set_criterion(loop: Any, value: str) -> None:
    loop.criterion = nn.CrossEntropyLoss(**CRITERIA[value])


def log(loop: Any, value: float) -> None:
    loop.log("logged", value * (loop.global_step + 1))


VALUES: dict[str, tuple[Callable[[Any, Any], Any], tuple[Any, ...]]] = {
    "rate": (lambda loop, value: groups(loop, "lr", value), (0.05, 0.2)),
    "decay": (lambda loop, value: groups(loop, "weight_decay", value), (0.1,)),
    "freeze": (lambda loop, value: loop.model.body.requires_grad_(value), (False, True)),
    "weights": (scale_weights, (0.9, 1.1)),
    "gradients": (scale_gradients, (0.5,)),
    "momentum": (clear_momentum, (0,)),
    "state": (lambda loop, value: loop.optimizer.state.clear(), (0,)),
    "criterion": (set_criterion, tuple(CRITERIA)),
    "reduction": (lambda loop, value: setattr(loop.criterion, "reduction", value), ("sum", "mean")),
    "buffer": (lambda loop, value: loop.model.shift.add_(value), (0.1,)),
    "attribute": (lambda loop, value: setattr(loop.model, "gain", value), (0.8, 1.3)),
    "hook": (lambda loop, value: loop.model.head.register_forward_hook(lambda m, i, out: out * value), (1.2,)),
    "clip": (lambda loop, value: setattr(loop, "gradient_clip_norm", value), (None, 0.2)),
    "log": (log, (1.0, 2.0)),
    "evaluate": (lambda loop, value: loop.log("seen", loop.evaluate_loss_on_validation_set()), (0,)),
    "end": (lambda loop, value: loop.end_epoch(), (0,)),
    # data: at the next epoch
    "loader": (lambda loop, value: setattr(loop, "train_loader", make_loader(value, loop.factor)), ()),
    "tensors": (set_tensors, (7, 8)),
    "in place": (lambda loop, value: own_data(loop).tensors[0].mul_(value), (0.9,)),
    "indices": (shorten, (2, 5)),
    "batch size": (lambda loop, value: setattr(loop.train_loader.batch_sampler, "batch_size", value), (6, 12)),
    "accumulation": (lambda loop, value: setattr(loop, "grad_accumulation", value), (1, 2, 3)),
    "epochs": (lambda loop, value: setattr(loop, "num_epochs", value), (2,)),  # fit knows of no more
}
DATA = ("loader", "tensors", "in place", "indices", "batch size", "accumulation", "epochs")
NOT_SAVED = (*DATA, "criterion", "reduction", "attribute", "hook", "clip")
HOOKS = ("on_epoch_begin", "on_batch_begin", "on_batch_end", "on_after_optimizer_step", "on_epoch_end")


def draw(seed: int) -> dict[str, Any]:
    """The combination of a seed."""
    r = random.Random(seed)

    def spec() -> tuple[Any, ...]:
        return r.choice(["tensors", "subset"]), r.randint(9, 30), r.randint(1, 4), r.randint(0, 99)

    changes = []
    for _ in range(r.randint(1, 5)):
        what, hook = r.choice(list(VALUES)), r.choice(HOOKS)
        if what in DATA:
            hook = "on_epoch_begin"
        elif what in ("gradients", "end"):
            hook = {"gradients": "on_after_gradient_update", "end": "on_batch_end"}[what]
        elif what in ("criterion", "reduction"):  # within a step, sums and means would be mixed
            hook = r.choice(["on_epoch_begin", "on_after_optimizer_step", "on_epoch_end"])
        at = r.randint(0, 2) if "epoch" in hook else r.randint(0, 9)
        changes.append((what, spec() if what == "loader" else r.choice(VALUES[what][1]), hook, at))
    return {
        "changes": changes,
        "mode": r.choice(["ddp", "ddp", "fsdp", "dp"]),
        "ranks": r.choice([2, 3]),
        "train": spec(),
        "val": spec(),
        "optimizer": r.choice(["SGD", "SGD", "AdamW"]),
        "criterion": r.choice(list(CRITERIA)),
        "accumulation": r.choice([1, 1, 2, 3]),
        "clip": r.choice([None, None, 0.3]),  # hides wrong factors of gradients, as AdamW does
        "checkpoint": r.random(),
    }


class Changes(AbstractCallback):
    """Make the changes of a combination; where a run resumes, make those again that a checkpoint does not contain."""

    def __init__(self, config: dict[str, Any], factor: int) -> None:
        super().__init__("changes")
        self.changes, self.factor, self.made = config["changes"], factor, []

    def make(self, i: int) -> None:
        what, value, _, _ = self.changes[i]
        loop = self.train_loop_obj
        loop.factor = self.factor
        ranks = loop.world_size if what == "batch size" else 1
        VALUES[what][0](loop, value // ranks if what == "batch size" else value)

    def at(self, hook: str) -> None:
        now = self.train_loop_obj.epoch if "epoch" in hook else self.train_loop_obj.global_step
        for i, (_, _, where, when) in enumerate(self.changes):
            if (where, when) == (hook, now) and i not in self.made:
                self.made.append(i)
                self.make(i)

    def on_epoch_begin(self) -> None:
        self.at("on_epoch_begin")

    def on_batch_begin(self) -> None:
        self.at("on_batch_begin")

    def on_batch_end(self) -> None:
        self.at("on_batch_end")

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        self.at("on_after_gradient_update")

    def on_after_optimizer_step(self) -> None:
        self.at("on_after_optimizer_step")

    def on_epoch_end(self) -> None:
        self.at("on_epoch_end")

    def state_dict(self) -> dict[str, Any]:
        return {"made": list(self.made)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.made = list(state["made"])

    def on_resume(self) -> None:
        for i in self.made:
            if self.changes[i][0] in NOT_SAVED:
                self.make(i)


class ByHand:
    """A hand-written loop over global batches, on whose attributes the changes are made."""

    world_size = 1

    def __init__(self, config: dict[str, Any]) -> None:
        self.model = Net()
        self.train_loader: Any = make_loader(config["train"], config["ranks"])
        self.optimizer = OPTIMIZERS[config["optimizer"]](self.model.parameters())
        self.criterion: Any = nn.CrossEntropyLoss(**CRITERIA[config["criterion"]])
        self.gradient_clip_norm, self.grad_accumulation = config["clip"], config["accumulation"]
        self.epoch, self.global_step, self.num_epochs, self.ends = 0, 0, 3, False

    def log(self, name: str, value: float) -> None:
        pass

    def evaluate_loss_on_validation_set(self) -> float:
        return 0.0

    def end_epoch(self) -> None:
        self.ends = True

    def fit(self, hooks: Any) -> None:
        hooks.train_loop_obj = self
        while self.epoch < self.num_epochs:
            hooks.on_epoch_begin()
            # What replaces tensors or the loader later is for the next epoch.
            batches, size, self.ends = list(self.train_loader), self.grad_accumulation, False
            for start in range(0, len(batches), size):
                self.step(batches[start : start + size], hooks)
                if self.ends:
                    break
            hooks.on_epoch_end()
            self.epoch += 1

    def step(self, batches: list[Any], hooks: Any) -> None:
        units = 0.0
        for i, (x, y) in enumerate(batches):
            if i:
                hooks.on_batch_end()
            hooks.on_batch_begin()
            if not i:
                self.optimizer.zero_grad()
            own = len(y) if self.criterion.weight is None else float(self.criterion.weight[y].sum())
            own = 1.0 if self.criterion.reduction == "sum" else own
            units += own
            (self.criterion(self.model(x), y) * own).backward()
        for p in self.model.parameters():
            if p.grad is not None and self.criterion.reduction == "mean":
                p.grad /= units
        hooks.on_after_gradient_update()
        if self.gradient_clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.gradient_clip_norm)
        self.optimizer.step()
        self.global_step += 1
        hooks.on_after_optimizer_step()
        hooks.on_batch_end()


def trained(config: dict[str, Any], mode: str, *callbacks: AbstractCallback, **arguments: Any) -> dict[str, Any]:
    in_ranks, model = mode in ("ddp", "fsdp"), Net()
    factor = 1 if in_ranks else config["ranks"]  # the other modes read whole global batches
    loop = cpu_loop(
        model,
        make_loader(config["train"], factor),
        OPTIMIZERS[config["optimizer"]](model.parameters()),
        nn.CrossEntropyLoss(**CRITERIA[config["criterion"]]),
        validation_loader=make_loader(config["val"], 1),
        end_auto_eval=True,
        gpu_mode=mode,
        devices=config["ranks"],
        gradient_clip_norm=config["clip"],
    )
    changes = [Changes(config, factor), *callbacks]
    loop.fit(num_epochs=3, callbacks=changes, grad_accumulation=config["accumulation"], **arguments)
    return numbers(loop)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:devices=3 on 2 CPU cores", "ignore:.*in the ranks:UserWarning")
@pytest.mark.filterwarnings("ignore:the checkpoint has state of callbacks not in this fit")
@pytest.mark.parametrize("seed", range(200))
def test_changes_at_random_moments_are_those_of_a_hand_written_loop(seed: int, tmp_path: Path) -> None:
    """Also bit by bit in a run that is resumed."""
    config = draw(seed)
    by_hand = ByHand(config)
    by_hand.fit(Changes(config, config["ranks"]))
    alone = trained(config, "single")
    check({name: alone[name] for name in by_hand.model.state_dict()}, numbers_of(by_hand.model), 1e-9)
    first = trained(config, config["mode"], ModelCheckpoint(tmp_path, every_n_steps=1, keep=None))
    check(first, alone, 1e-7)
    written = sorted(path for path in tmp_path.iterdir() if path.name.startswith("checkpoint"))
    resumed = trained(config, config["mode"], resume_from=written[int(config["checkpoint"] * len(written))])
    check(resumed, first, 0)


def numbers_of(model: nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.long
def test_a_mean_over_class_weights_may_become_a_sum_in_ranks() -> None:
    """The weight that ranks exchange along with gradients was the last one of a mean."""
    config = {**draw(0), "changes": [("reduction", "sum", "on_epoch_end", 0)], "optimizer": "SGD", "clip": None}
    config |= {"criterion": "classes", "accumulation": 1, "ranks": 2}
    check(trained(config, "ddp"), trained(config, "single"), 1e-9)
