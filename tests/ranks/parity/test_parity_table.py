"""One table of parity: kinds of models and losses x data, with the modes as columns, against one hand-written step.

The reference takes each optimizer step on all samples of the step at once, in one process, without trainloop. Weights,
the mean loss over other data, and the rows of predictions must be the same in each mode.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from kit import reference
from kit.loops import cpu_loop
from kit.ranks import run_own_ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from trainloop import MultiLoss, MultiOptimizer, TrainLoop, TTBasicModel
from trainloop.callbacks import ModelCheckpoint

CLASSES, FEATURES, BATCH, EPOCHS = 4, 6, 4, 2
IGNORED = 1
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5], dtype=torch.float64)
CPU = torch.device("cpu")


class Net(TTBasicModel):
    """A classifier in float64; the kinds below change its loss or its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh())
        self.head = nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, y = batch_data
        return self(x.to(device)).argmax(1), y, {}


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(8, CLASSES, bias=False).double()
        self.back.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.head(hidden) + 0.5 * self.back(hidden.square())


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)


class OwnWeight(Net):
    """The loss is a mean over the features above a threshold, whose number differs between batches."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        each = functional.cross_entropy(self(x), y, reduction="none")
        weight = (x > 0).sum(1)
        return (each * weight).sum() / weight.sum(), weight.sum()


class TwoLosses(Net):
    """Two losses, of which one is a mean over the targets that are not ignored."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        return MultiLoss({"class": criterion(self(x), y), "size": self.body(x).square().mean()})


class SumAndMeans(Net):
    """The criterion's sum, a mean over samples, and a mean over units of its own."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        units = (x > 0).sum()
        signs = self.body(x).square().sum() / units
        return MultiLoss(
            {"size": 0.1 * self.body(x).square().mean(), "class": criterion(self(x), y), "signs": (signs, units)}
        )


class TwoOptimizers(TwoLosses):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        losses = super().get_loss(batch_data, criterion, device)
        return MultiLoss(dict(losses), {"class": 0, "size": 1})


class Margin(nn.Module):
    """A criterion with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(CLASSES, dtype=torch.float64))

    def forward(self, found: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(found * self.scale, target)


class Direct(Net):
    """``get_loss`` calls parts of the model, and ``forward`` twice."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        return criterion(self(x), y) + 0.5 * criterion(self(0.5 * x), y) + 0.1 * self.body(x).abs().mean()


def plain(model: nn.Module, criterion: Any, x: Tensor, y: Tensor) -> Tensor:
    return criterion(model(x), y)


def direct(model: Any, criterion: Any, x: Tensor, y: Tensor) -> Tensor:
    return criterion(model(x), y) + 0.5 * criterion(model(0.5 * x), y) + 0.1 * model.body(x).abs().mean()


def weighted(model: nn.Module, criterion: Any, x: Tensor, y: Tensor) -> Tensor:
    weight = (x > 0).sum(1)
    return (functional.cross_entropy(model(x), y, reduction="none") * weight).sum() / weight.sum()


def two_losses(model: Any, criterion: Any, x: Tensor, y: Tensor) -> Tensor:
    return criterion(model(x), y) + model.body(x).square().mean()


def sum_and_means(model: Any, criterion: Any, x: Tensor, y: Tensor) -> Tensor:
    squares = model.body(x).square()
    return criterion(model(x), y) + 0.1 * squares.mean() + squares.sum() / (x > 0).sum()


def mean_of_sum(model: Any, criterion: Any, x: Tensor, y: Tensor) -> Tensor:
    return criterion(model(x), y) / len(x)


def mean_of_sum_and_means(model: Any, criterion: Any, x: Tensor, y: Tensor) -> Tensor:
    return sum_and_means(model, nn.CrossEntropyLoss(), x, y)


def sgd(model: nn.Module, criterion: Any) -> Any:
    trained = [p for module in (model, criterion) for p in module.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=1e-3)


def adam(model: nn.Module, criterion: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def by_part(model: Any, criterion: Any) -> Any:
    return MultiOptimizer(
        [torch.optim.SGD(model.head.parameters(), lr=0.1), torch.optim.Adam(model.body.parameters(), lr=0.02)]
    )


class Kind(NamedTuple):
    """A row of the table: the model, its criterion and optimizer, and the same loss as a plain function."""

    model: Callable[[], Net]
    loss: Callable[[Any, Any, Tensor, Tensor], Any] = plain
    criterion: Callable[[], nn.Module] = nn.CrossEntropyLoss
    optimizer: Callable[[nn.Module, Any], Any] = sgd
    max_norm: float | None = None
    mean: Callable[[Any, Any, Tensor, Tensor], Any] | None = None  # what an evaluation shows, if it is not the loss


def ignoring() -> nn.Module:
    return nn.CrossEntropyLoss(ignore_index=IGNORED)


def class_weighted() -> nn.Module:
    return nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)


def smoothed() -> nn.Module:
    return nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1)


def summed() -> nn.Module:
    return nn.CrossEntropyLoss(reduction="sum")


KINDS = {
    "plain": Kind(Net),
    "Adam, clipped": Kind(Net, optimizer=adam, max_norm=0.3),
    "tied weights": Kind(Tied),
    "a frozen part": Kind(Frozen),
    "parts called by get_loss": Kind(Direct, direct),
    "a weight of its own": Kind(OwnWeight, weighted),
    "class weights": Kind(Net, criterion=class_weighted),
    "class weights, smoothed": Kind(Net, criterion=smoothed),
    "ignored targets": Kind(Net, criterion=ignoring),
    "a sum": Kind(Net, criterion=summed, optimizer=adam, mean=mean_of_sum),
    "a sum and means": Kind(SumAndMeans, sum_and_means, summed, adam, mean=mean_of_sum_and_means),
    "a criterion with a parameter": Kind(Net, criterion=Margin),
    "two losses": Kind(TwoLosses, two_losses, ignoring),
    "two optimizers": Kind(TwoOptimizers, two_losses, ignoring, by_part),
}
# Number of samples, grad_accumulation, and calls of fit. With three ranks, the last step of 26 samples leaves a rank
# without samples.
DATA = {
    "whole batches": (24, 1, 1),
    "a short tail, two fits": (26, 1, EPOCHS),
    "accumulation, a short tail": (38, 2, 1),
}
ROWS = [(name, data) for name in KINDS for data in DATA]
COLUMNS = {"single": 1, "dp 2": 2, "ddp 2": 2, "ddp 3": 3, "fsdp 2": 2}


def made(name: str) -> tuple[Net, nn.Module]:
    torch.manual_seed(1)
    return KINDS[name].model(), KINDS[name].criterion()


def data_of(n: int) -> TensorDataset:
    draws = torch.Generator().manual_seed(n)
    x = torch.randn(n, FEATURES, dtype=torch.float64, generator=draws)
    return TensorDataset(x, torch.randint(CLASSES, (n,), generator=draws))


def parts_of_two_optimizers(model: Any, criterion: Any, x: Tensor, y: Tensor) -> None:
    """Run backward of each loss for the parameters of its own optimizer."""
    class_loss, size_loss = criterion(model(x), y), model.body(x).square().mean()
    for loss, part in ((class_loss, model.head), (size_loss, model.body)):
        own = list(part.parameters())
        for p, gradient in zip(own, torch.autograd.grad(loss, own)):
            p.grad = gradient


def expected(name: str, data: str, ranks: int) -> tuple[dict[str, Tensor], float, Tensor]:
    """Weights, mean loss and predictions of the hand-written training with the same steps."""
    kind, (n, accumulation, _) = KINDS[name], DATA[data]
    model, criterion = made(name)
    optimizer = kind.optimizer(model, criterion)
    optimizers = optimizer.optimizer_list if isinstance(optimizer, MultiOptimizer) else [optimizer]
    x, y = data_of(n).tensors
    for _ in range(EPOCHS):
        for rows in torch.arange(n).split(BATCH * ranks * accumulation):
            if len(optimizers) > 1:
                parts_of_two_optimizers(model, criterion, x[rows], y[rows])
            else:
                kind.loss(model, criterion, x[rows], y[rows]).backward()
            if kind.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), kind.max_norm)
            for one in optimizers:
                one.step()
                one.zero_grad()
    x, y = data_of(21).tensors
    with torch.no_grad():
        loss = (kind.mean or kind.loss)(model, criterion, x, y)
        return {**model.state_dict(), **criterion.state_dict()}, loss.item(), model(x).argmax(1)


def state_of(model: nn.Module, criterion: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy({**model.state_dict(), **criterion.state_dict()})


def loop_of(
    name: str, data: str, mode: str, ranks: int, *, shuffle: bool = False
) -> tuple[TrainLoop[Any], tuple[Net, nn.Module]]:
    kind, (n, *_) = KINDS[name], DATA[data]
    model, criterion = made(name)
    loop = cpu_loop(
        model,
        DataLoader(data_of(n), batch_size=BATCH, shuffle=shuffle),
        kind.optimizer(model, criterion),
        criterion,
        gpu_mode=mode,
        gradient_clip_norm=kind.max_norm,
        seed=3 if shuffle else None,
        **{} if mode == "single" else {"devices": ranks},
    )
    return loop, (model, criterion)


def trained(name: str, data: str, mode: str, ranks: int) -> tuple[dict[str, Tensor], float, Tensor]:
    _, accumulation, fits = DATA[data]
    loop, modules = loop_of(name, data, mode, ranks)
    for _ in range(fits):
        loop.fit(num_epochs=EPOCHS // fits, grad_accumulation=accumulation)
    others = DataLoader(data_of(21), batch_size=BATCH)
    loss, found = loop.evaluate_model_loss(others), loop.predict_with_model(others)[0]
    return state_of(*modules), sum(loss.values()) if isinstance(loss, dict) else loss, found


def train_all(mode: str, ranks: int) -> tuple[dict[tuple[str, str], Any], list[str]]:
    """Train each row; return what was found, and the warnings. In ranks, the loops join the group that is up."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "devices=3 on")
        return {row: trained(*row, mode, ranks) for row in ROWS}, [str(one.message) for one in caught]


@pytest.mark.long
@pytest.mark.parametrize("column", COLUMNS)
def test_every_mode_trains_evaluates_and_predicts_as_one_hand_written_step(column: str, tmp_path: Path) -> None:
    mode, ranks = column.partition(" ")[0], COLUMNS[column]
    if mode in ("single", "dp"):
        everyone = [train_all(mode, ranks)]
    else:
        everyone = run_own_ranks(train_all, ranks, mode, ranks, folder=tmp_path)
    for row in ROWS:
        state, loss, found = expected(*row, 1 if mode == "dp" else ranks)
        for facts, _ in everyone:
            assert reference.largest_difference(state, facts[row][0]) < 1e-12, row
            assert facts[row][1] == pytest.approx(loss, rel=1e-12), row
            assert torch.equal(facts[row][2], found), row
    for _, warned in everyone:
        assert not warned


def resumed(mode: str, ranks: int, folder: str) -> dict[str, tuple[Any, Any]]:
    """Weights and history of each kind's whole training, and of one that is resumed from a step in its middle."""

    def run(name: str, into: str, resume_from: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        loop, modules = loop_of(name, "accumulation, a short tail", mode, ranks, shuffle=True)
        every_step = ModelCheckpoint(f"{folder}/{name}/{into}", every_n_epochs=None, every_n_steps=1, keep=100)
        loop.fit(num_epochs=EPOCHS, grad_accumulation=2, callbacks=[every_step], resume_from=resume_from)
        return state_of(*modules), loop.history.to_dict()

    found = {}
    for name in KINDS:
        whole = run(name, "whole")
        checkpoints = sorted(Path(folder, name, "whole").glob("checkpoint-*"))
        assert len(checkpoints) > 3
        found[name] = whole, run(name, "resumed", str(checkpoints[len(checkpoints) // 2]))
    return found


@pytest.mark.long
@pytest.mark.parametrize("column", [column for column in COLUMNS if column != "ddp 3"])
def test_a_run_resumed_from_its_middle_ends_with_the_same_bits(column: str, tmp_path: Path) -> None:
    mode, ranks = column.partition(" ")[0], COLUMNS[column]
    if mode in ("single", "dp"):
        found = resumed(mode, ranks, str(tmp_path))
    else:
        found, *_ = run_own_ranks(resumed, ranks, mode, ranks, str(tmp_path / "checkpoints"), folder=tmp_path)
    for name, ((state, history), (again, history_again)) in found.items():
        assert reference.identical(state, again), name
        assert history == history_again, name
