"""Random parts of models, losses, optimizers and hooks: each mode equals ``single``, and a resume changes no bit.

A failing test names its seed; ``draw`` shows the combination.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ranks.parity.test_random_configurations import check, loop_in_mode, numbers
from trainloop import AbstractCallback, MultiLoss, MultiOptimizer, TrainLoop, TTModel
from trainloop.callbacks import ExponentialMovingAverage, GradientStats, LRScheduler, ModelCheckpoint
from trainloop.optim.optimizers import optimizers_of

D = torch.float64


# -- models ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8, dtype=D), nn.LayerNorm(8, dtype=D)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(self.norm(hidden)))


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(0.1 * torch.randn(3, 2, dtype=D))
        self.b = nn.Parameter(0.1 * torch.randn(2, 8, dtype=D))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -0.5 * gradient


PARTS = (
    *("tied", "low rank", "weight norm", "spectral norm", "unused", "gate", "scalar", "dict", "recomputed", "lstm"),
    *("attention", "embedding", "frozen", "unfrozen", "reversed", "teacher", "counter", "twice", "backward hook"),
    *("tensor hook", "detached", "mixture"),
)


class Net(TTModel):
    """Each of the ``parts`` acts on single samples, so that it is the same for any division of a batch."""

    counter: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.parts = config, set(config["parts"])
        self.first, self.head = nn.Linear(6, 8, dtype=D), nn.Linear(8, 3, dtype=D)
        self.blocks: Any = nn.ModuleList([Block(), Block()])
        extra: dict[str, Callable[[], nn.Module]] = {
            "unused": lambda: nn.Linear(8, 8),
            "gate": lambda: nn.Linear(8, 8),
            "lstm": lambda: nn.LSTM(8, 8, batch_first=True),
            "attention": lambda: nn.MultiheadAttention(2, 1, batch_first=True),
            "embedding": lambda: nn.Embedding(4, 8, padding_idx=0),
            "mixture": lambda: nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]),
            "dict": lambda: nn.ParameterDict({"scale": torch.ones(8), "shift": torch.zeros(8)}),
        }
        self.extra: Any = nn.ModuleDict({name: make().to(D) for name, make in extra.items() if name in self.parts})
        if "tied" in self.parts:
            self.blocks[1].linear.weight = self.blocks[0].linear.weight
        if "low rank" in self.parts:
            parametrize.register_parametrization(self.head, "weight", LowRank())
        if "weight norm" in self.parts:
            parametrizations.weight_norm(self.first)
        if "spectral norm" in self.parts:
            parametrizations.spectral_norm(self.blocks[1].linear)
        if "scalar" in self.parts:
            self.scale = nn.Parameter(torch.ones((), dtype=D))
        if "frozen" in self.parts:
            self.blocks[0].requires_grad_(False)
        if "unfrozen" in self.parts:
            self.first.requires_grad_(False)
        if "teacher" in self.parts:
            self.teacher = nn.Linear(6, 8, dtype=D).requires_grad_(False)
        if "backward hook" in self.parts:
            self.blocks[1].register_full_backward_hook(
                lambda module, given, _: (0.5 * given[0],) if given[0] is not None else None
            )
        self.register_buffer("counter", torch.zeros((), dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if "counter" in self.parts and self.training and torch.is_grad_enabled():
            self.counter += 1
            hidden = hidden * (self.counter / 5).clamp(max=1)
        for i, block in enumerate(self.blocks):
            hidden = checkpoint(block, hidden, use_reentrant=False) if "recomputed" in self.parts else block(hidden)
            if i == 0:
                hidden = self.between(block, hidden)
        for name, module in self.extra.items():
            if name != "unused":
                hidden = self.through(name, module, x, hidden)
        if "scalar" in self.parts:
            hidden = hidden * self.scale
        return self.head(hidden)

    def between(self, block: Any, hidden: Tensor) -> Tensor:
        if "tensor hook" in self.parts and hidden.requires_grad:
            hidden.register_hook(lambda gradient: 0.5 * gradient)
        if "reversed" in self.parts:
            hidden = Reversed.apply(hidden)  # type: ignore[no-untyped-call]
        if "twice" in self.parts:
            hidden = block(hidden)
        return torch.cat([hidden[:, :4].detach(), hidden[:, 4:]], 1) if "detached" in self.parts else hidden

    def through(self, name: str, module: Any, x: Tensor, hidden: Tensor) -> Tensor:
        if name == "gate":  # for some samples only: for none of some ranks
            rows = (x[:, 0] > 0.4).nonzero()[:, 0]
            return hidden.index_add(0, rows, module(hidden[rows])) if len(rows) else hidden
        if name == "lstm":
            return module(hidden.unsqueeze(1).expand(-1, 2, -1))[0][:, -1]
        if name == "attention":
            pairs = hidden.view(-1, 4, 2)
            return hidden + module(pairs, pairs, pairs)[0].reshape(-1, 8)
        if name == "embedding":
            return hidden + module((x[:, 1] > 0).long() + (x[:, 2] > 0).long())
        if name == "mixture":
            return hidden + torch.sigmoid(x[:, :1]) * module[0](hidden) - torch.sigmoid(x[:, 1:2]) * module[1](hidden)
        return hidden * module["scale"] + module["shift"]

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data["x"], batch_data["y"]
        loss = LOSSES[self.config["loss"]](self, x, y, criterion)
        if "teacher" in self.parts and isinstance(loss, Tensor) and self.config["loss"] == "mean":
            loss = loss + (self.first(x) - self.teacher(x)).square().mean()
        return loss

    def get_loss_eval(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        self.log("rows", float(len(batch_data["y"])), reduce="sum")
        if self.config["loss"] == "in turn":
            return criterion(self(batch_data["x"]), batch_data["y"])
        return self.get_loss(batch_data, criterion, device)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self(batch_data["x"]), batch_data["y"], {}


class Yields(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        yield criterion(self(batch_data["x"]), batch_data["y"])
        yield 0.3 * entropy(self(batch_data["x"])).mean()


# -- losses ------------------------------------------------------------------------------------------------------------


def entropy(scores: Tensor) -> Tensor:
    return -(scores.softmax(1) * scores.log_softmax(1)).sum(1)


def tokens(model: Any, x: Tensor, y: Tensor, criterion: Any) -> Any:
    weights = (y + 1).to(D)
    return (functional.cross_entropy(model(x), y, reduction="none") * weights).sum() / weights.sum(), weights.sum()


def ignored(model: Any, x: Tensor, y: Tensor, criterion: Any) -> Any:
    scores = model(x)
    return functional.cross_entropy(scores, torch.where(y == 2, -100, y)) if (y != 2).any() else 0 * scores.sum()


def some_rows(model: Any, x: Tensor, y: Tensor, criterion: Any) -> Any:
    scores, rows = model(x), y == 1
    return (functional.cross_entropy(scores[rows], y[rows]), int(rows.sum())) if rows.any() else (0 * scores.sum(), 0)


def some_losses(model: Any, x: Tensor, y: Tensor, criterion: Any) -> Any:
    scores, rows = model(x), y == 1
    other = {"other": (entropy(scores)[rows].mean(), rows.sum())} if rows.any() else {}
    return MultiLoss({"main": criterion(scores, y), **other})


def two_losses(model: Any, x: Tensor, y: Tensor, criterion: Any) -> Any:
    scores = model(x)
    weight = torch.tensor([1.0, 3.0, 0.5], dtype=D)
    return MultiLoss({"main": functional.cross_entropy(scores, y, weight), "other": 0.3 * entropy(scores).mean()})


def penalized(model: Any, x: Tensor, y: Tensor, criterion: Any) -> Any:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        scores = model(x)
        (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return criterion(scores, y) + 0.1 * gradient.square().sum(1).mean()


def by_criterion(model: Any, x: Tensor, y: Tensor, criterion: Any) -> Any:
    return criterion(model(x), y)


LOSSES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(["mean", "sum", "classes"], by_criterion),
    "tokens": tokens,
    "ignored": ignored,
    "some rows": some_rows,
    "some losses": some_losses,
    "two losses": two_losses,
    "penalized": penalized,
    "in turn": by_criterion,
}
CRITERIA: dict[str, dict[str, Any]] = {
    "sum": {"reduction": "sum"},
    "classes": {"weight": torch.tensor([1.0, 3.0, 0.5], dtype=D)},
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, eps=1e-3),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.005, centered=True, momentum=0.5, eps=1e-2),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01, eps=1e-3),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.02, eps=1e-3),
    "ASGD": lambda p: optim.ASGD(p, lr=0.02),
}


# -- data, hooks and the run -------------------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    def __init__(self, rows: TensorDataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        return {"x": x, "y": y, "name": f"row {index}"}


class Hooks(AbstractCallback):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__("hooks")
        self.config = config

    def on_epoch_begin(self) -> None:
        if "unfrozen" in self.config["parts"] and self.train_loop_obj.epoch == 1:
            self.train_loop_obj.model.first.requires_grad_(True)

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        if "gradients" in self.config["hooks"]:
            for p in self.train_loop_obj.model.head.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.3)

    def on_after_optimizer_step(self) -> None:
        loop = self.train_loop_obj
        if "teacher" in self.config["parts"]:
            with torch.no_grad():
                for theirs, own in zip(loop.model.teacher.parameters(), loop.model.first.parameters(), strict=False):
                    theirs.lerp_(own, 0.1) if theirs.shape == own.shape else None
        if "end" in self.config["hooks"] and loop.global_step % 4 == 3:
            loop.end_epoch()
        if "state" in self.config["hooks"] and loop.global_step == 3:
            for optimizer in optimizers_of(loop.optimizer):
                optimizer.state.clear()

    def on_batch_end(self) -> None:
        if "evaluate" in self.config["hooks"] and self.train_loop_obj.global_step == 2:
            self.log("seen", self.train_loop_obj.evaluate(self.train_loop_obj.test_loader)["loss"])


class Size(NamedTuple):
    rows: int
    batch: int


def draw(seed: int) -> dict[str, Any]:
    """The combination of a seed."""
    r = random.Random(seed)
    return {
        "parts": r.sample(PARTS, r.randint(1, 3)),
        "loss": r.choice(list(LOSSES)),
        "optimizer": r.choice([*OPTIMIZERS, "two"]),
        "schedule": r.choice([None, "step", "epoch"]),
        "hooks": r.sample(["gradients", "end", "state", "evaluate", "average", "statistics"], r.randint(0, 3)),
        "mode": r.choice(["ddp", "ddp", "fsdp", "fsdp", "dp"]),
        "ranks": r.choice([2, 2, 3]),
        "size": Size(r.randint(7, 45), r.randint(1, 4)),
        "shuffle": r.random() < 0.5,
        "accumulation": r.choice([1, 1, 2, 3]),
        "clip": r.choice([None, None, 0.5]),  # hides wrong factors of gradients
        "evaluated": r.choice([True, True, 2]),
        "length": r.choice([{"num_epochs": 2}, {"num_epochs": 3}, {"num_iterations": r.randint(2, 9)}]),
        "checkpoint": r.random(),
    }


def make_loader(rows: int, batch: int, seed: int, shuffle: bool = False) -> DataLoader[Any]:
    draws = torch.Generator().manual_seed(seed)
    data = TensorDataset(torch.randn(rows, 6, generator=draws, dtype=D), torch.randint(3, (rows,), generator=draws))
    return DataLoader(Rows(data), batch, shuffle=shuffle)


def make_loop(config: dict[str, Any], mode: Any) -> TrainLoop:
    torch.manual_seed(0)
    model: Any = (Yields if config["loss"] == "in turn" else Net)(config)
    ranks = config["ranks"]
    if config["optimizer"] == "two" and config["loss"] not in ("some losses", "two losses", "in turn"):
        body = [p for name, p in model.named_parameters() if not name.startswith("head.")]
        optimizer: Any = MultiOptimizer(
            {"body": OPTIMIZERS["SGD"](body), "head": OPTIMIZERS["AdamW"](list(model.head.parameters()))}
        )
    else:
        optimizer = OPTIMIZERS.get(config["optimizer"], OPTIMIZERS["SGD"])(list(model.parameters()))
    factor = 1 if mode in ("ddp", "fsdp") else ranks  # the other modes read whole global batches
    loaders = [
        make_loader(config["size"].rows, config["size"].batch * factor, 1, config["shuffle"]),
        make_loader(11, 4, 2),
        make_loader(7, 3, 3),
    ]
    criterion = nn.CrossEntropyLoss(**CRITERIA.get(config["loss"], {}))
    return loop_in_mode(config, mode, model, *loaders, optimizer, criterion, seed=5)


def fit(loop: TrainLoop, config: dict[str, Any], *more: AbstractCallback, **arguments: Any) -> dict[str, Any]:
    first = optimizers_of(loop.optimizer)[0]
    callbacks: list[AbstractCallback] = [Hooks(config), *more]
    if config["schedule"]:
        schedule = lr_scheduler.LambdaLR(first, lambda count: 1 / (1 + count))
        callbacks.append(LRScheduler(schedule, interval=config["schedule"]))
    if "average" in config["hooks"]:
        callbacks.append(ExponentialMovingAverage(0.8, evaluate=True))
    if "statistics" in config["hooks"]:
        callbacks.append(GradientStats())
    if loop.gpu_mode == "ddp" and {"unused", "gate", "unfrozen", "mixture"} & set(config["parts"]):
        arguments["ddp_model_args"] = {"find_unused_parameters": True}
    loop.fit(callbacks=callbacks, grad_accumulation=config["accumulation"], **config["length"], **arguments)
    steps = {f"{name} of steps": list(loop.history.steps(name)) for name in ("loss",)}
    return {**numbers(loop), **{name: values for name, values in steps.items() if values}}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:devices=3 on 2 CPU cores", "ignore:the checkpoint has state of callbacks not in")
@pytest.mark.filterwarnings("ignore:.*in no optimizer", "ignore:.*got no gradient")
@pytest.mark.parametrize("seed", range(120))
def test_parts_losses_and_hooks_are_the_same_in_each_mode(seed: int, tmp_path: Path) -> None:
    """Also in a second fit, and bit by bit in a run that is resumed."""
    config = draw(seed)
    alone, loop = make_loop(config, "single"), make_loop(config, config["mode"])
    first = fit(loop, config, ModelCheckpoint(tmp_path, every_n_steps=1, keep=None))
    check(first, fit(alone, config), 1e-7)
    check(fit(loop, config), fit(alone, config), 1e-7)
    written = sorted(path for path in tmp_path.iterdir() if path.name.startswith("checkpoint"))
    resumed = fit(
        make_loop(config, config["mode"]),
        copy.copy(config),
        resume_from=written[int(config["checkpoint"] * len(written))],
    )
    check(resumed, first, 0)
