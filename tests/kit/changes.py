"""What callbacks may change while training: each change as it is made on a loop, trainloop's or a hand-written one."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.utils import parametrize, prune
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset, WeightedRandomSampler

from kit.small_loop import Raises
from trainloop import AbstractCallback, MultiOptimizer, TrainLoop, TTBasicModel
from trainloop.callbacks import ModelCheckpoint

D = torch.float64
MOMENTS = ("on_train_begin", "on_epoch_begin", "on_batch_begin", "on_batch_end", "on_epoch_end", "between fits")
EPOCHS = 2  # of each of the two calls of fit
ROWS, BATCH = 16, 4


def rows(n: int = ROWS, seed: int = 0, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=D)
    return x, x.sum(1, keepdim=True) + shift


class Rows(Dataset[Any]):
    """A dataset of one's own, which may grow, and whose rows may change."""

    def __init__(self, n: int = ROWS) -> None:
        self.x, self.y = rows(n)
        self.shift = 0.0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index] + self.shift


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(2, 3, dtype=D)
        self.body = nn.Linear(3, 4, dtype=D)
        self.head = nn.Linear(4, 1, dtype=D)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x + self.emb(torch.zeros(len(x), dtype=torch.long))))
        out = self.head(hidden) * self.gain
        extra = getattr(self.head, "extra", None)
        return out if extra is None else out * extra


def sgd(model: nn.Module, lr: float = 0.05) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def shifted(batch: list[Any]) -> list[Tensor]:
    return [torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch]) + 2]


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 1.5


class Scaled(nn.Module):
    """A criterion with a tensor of its own."""

    def __init__(self, scale: float | list[float]) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale, dtype=D))

    def forward(self, y_pred: Tensor, y: Tensor) -> Tensor:
        return (self.scale * (y_pred - y).abs()).mean()


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


# -- the changes: each takes the loop ----------------------------------------------------------------------------------


def new_loader(loop: Any) -> None:
    loop.train_loader = DataLoader(TensorDataset(*rows(12, 1, 0.5)), batch_size=loop.train_loader.batch_size)


def new_validation(loop: Any) -> None:
    loop.validation_loader = DataLoader(TensorDataset(*rows(6, 2)), batch_size=3)


def longer(loop: Any) -> None:
    data = loop.train_loader.dataset
    data.x, data.y = rows(20, 3)


def attribute_of_dataset(loop: Any) -> None:
    loop.train_loader.dataset.shift = 1.0


def tensors(loop: Any) -> None:
    data = loop.train_loader.dataset
    data.tensors = (data.tensors[0], data.tensors[1] + 1)


def in_place(loop: Any) -> None:
    loop.train_loader.dataset.tensors[1].add_(1)


def indices(loop: Any) -> None:
    loop.train_loader.dataset.indices = list(range(3, 11))


def indices_in_place(loop: Any) -> None:
    loop.train_loader.dataset.indices[:] = list(range(15, -1, -1))


def batch_size(loop: Any) -> None:
    loop.train_loader.batch_sampler.batch_size //= 2


def collate(loop: Any) -> None:
    loop.train_loader.collate_fn = shifted


def weights(loop: Any) -> None:
    loop.train_loader.sampler.weights = torch.tensor([0.0] * (ROWS - 1) + [1.0], dtype=D)


def num_samples(loop: Any) -> None:
    loop.train_loader.sampler.num_samples = 8


def optimizer(loop: Any) -> None:
    loop.optimizer = optim.Adam(loop.model.parameters(), lr=0.01)


def optimizer_in_list(loop: Any) -> None:
    loop.optimizer.optimizer_list[0] = optim.Adam(loop.model.parameters(), lr=0.01)


def rate(loop: Any) -> None:
    for group in loop.optimizer.param_groups:
        group["lr"] = 0.02


def criterion(loop: Any) -> None:
    loop.criterion = nn.L1Loss()


def criterion_of_sums(loop: Any) -> None:
    loop.criterion = nn.MSELoss(reduction="sum")


def criterion_with_tensors(loop: Any) -> None:
    loop.criterion = Scaled(0.5)


def reduction(loop: Any) -> None:
    loop.criterion.reduction = "sum"


def data_of_parameter(loop: Any) -> None:
    loop.model.head.weight.data = loop.model.head.weight.data * 0.5


def scaled_data(loop: Any) -> None:
    loop.model.head.weight.data *= 0.5


def from_vector(loop: Any) -> None:
    vector = nn.utils.parameters_to_vector(loop.model.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, loop.model.parameters())


def copied(loop: Any) -> None:
    with torch.no_grad():
        loop.model.head.weight.copy_(torch.full((1, 4), 0.25, dtype=D))


def frozen(loop: Any) -> None:
    loop.model.body.requires_grad_(False)


def added_parameter(loop: Any) -> None:
    loop.model.head.extra = nn.Parameter(torch.full((1,), 1.2, dtype=D))
    loop.optimizer.add_param_group({"params": [loop.model.head.extra]})


def removed_parameter(loop: Any) -> None:
    loop.optimizer.param_groups[0]["params"] = [
        p for p in loop.optimizer.param_groups[0]["params"] if p is not loop.model.head.bias
    ]
    loop.optimizer.state.pop(loop.model.head.bias, None)  # as torch's state_dict requires
    loop.model.head.bias = None


def enlarged(loop: Any) -> None:
    emb = loop.model.emb
    old, emb.num_embeddings = emb.weight, 4
    emb.weight = nn.Parameter(torch.cat([old.detach(), torch.zeros(2, 3, dtype=D)]))
    group = loop.optimizer.param_groups[0]
    group["params"] = [emb.weight if p is old else p for p in group["params"]]
    loop.optimizer.state.pop(old, None)


def replaced_module(loop: Any) -> None:
    torch.manual_seed(7)
    loop.model.head = nn.Linear(4, 1, dtype=D)
    loop.optimizer.add_param_group({"params": list(loop.model.head.parameters())})


def pruned(loop: Any) -> None:
    prune.l1_unstructured(loop.model.body, "weight", amount=5)


def parametrized(loop: Any) -> None:
    parametrize.register_parametrization(loop.model.head, "weight", Halved())


def hooked(loop: Any) -> None:
    loop.model.body.register_forward_hook(doubled)


def attribute_of_model(loop: Any) -> None:
    loop.model.gain = 0.5


def clipped(loop: Any) -> None:
    loop.gradient_clip_norm = 0.1


def accumulated(loop: Any) -> None:
    loop.grad_accumulation = 2


CHANGES: dict[str, Callable[[Any], None]] = {
    function.__name__: function
    for function in (
        *(new_loader, new_validation, longer, attribute_of_dataset, tensors, in_place, indices, indices_in_place),
        *(batch_size, collate, weights, num_samples, optimizer, rate, criterion, criterion_of_sums, reduction),
        *(criterion_with_tensors, optimizer_in_list),
        *(data_of_parameter, scaled_data, from_vector, copied, frozen, added_parameter, removed_parameter, enlarged),
        *(replaced_module, pruned, parametrized, hooked, attribute_of_model, clipped, accumulated),
    )
}
OF_DATA = {"new_loader", "longer", "tensors", "indices", "indices_in_place", "batch_size", "collate", "num_samples"}
"""Changes that take effect at the next epoch: within an epoch, the rest of it is read as it began."""
STAYS_IN_RANKS = {*OF_DATA, "new_validation", "attribute_of_dataset", "in_place", "weights"}
"""Changes of data, which do not come back from ranks."""


def loader_of(change: str, batch: int) -> DataLoader[Any]:
    if change in ("longer", "attribute_of_dataset", "collate"):
        return DataLoader(Rows(), batch_size=batch)
    if change in ("weights", "num_samples"):
        # All weight on one row, so that the order that is drawn does not matter.
        weights = torch.tensor([1.0] + [0.0] * (ROWS - 1), dtype=D)
        return DataLoader(TensorDataset(*rows()), batch_size=batch, sampler=WeightedRandomSampler(weights, ROWS))
    if change.startswith("indices"):
        return DataLoader(Subset(TensorDataset(*rows()), list(range(ROWS))), batch_size=batch)
    return DataLoader(TensorDataset(*rows()), batch_size=batch)


def optimizer_of(change: str, model: nn.Module) -> Any:
    return MultiOptimizer([sgd(model)]) if change == "optimizer_in_list" else sgd(model)


class Change(AbstractCallback):
    """Make a change once: at a moment of the second epoch (or of the first, if that is when training begins)."""

    def __init__(self, change: str, moment: str) -> None:
        super().__init__("change")
        self.change, self.moment, self.done = change, moment, False

    def _at(self, moment: str, epoch: int = 1) -> None:
        if moment == self.moment and not self.done and self.train_loop_obj.epoch >= epoch:
            self.done = True
            CHANGES[self.change](self.train_loop_obj)

    def on_train_begin(self) -> None:
        self._at("on_train_begin", 0)

    def on_epoch_begin(self) -> None:
        self._at("on_epoch_begin")

    def on_batch_begin(self) -> None:
        self._at("on_batch_begin")

    def on_batch_end(self) -> None:
        self._at("on_batch_end")

    def on_epoch_end(self) -> None:
        self._at("on_epoch_end")

    def on_train_end(self) -> None:
        pass


class ByHand:
    """A hand-written loop with the same moments, in which the change is made on plain attributes."""

    def __init__(self, change: str) -> None:
        self.change = change
        self.model = Net()
        self.train_loader: Any = loader_of(change, BATCH)
        self.validation_loader: Any = DataLoader(TensorDataset(*rows(8, 5)), batch_size=4)
        self.optimizer = optimizer_of(change, self.model)
        self.criterion: Any = nn.MSELoss()
        self.gradient_clip_norm: float | None = None
        self.grad_accumulation = 1
        self.epoch = 0
        self.val_losses: list[float] = []

    def fit(self, call: Callable[[str], None]) -> None:
        self.grad_accumulation = 1
        call("on_train_begin")
        for _ in range(EPOCHS):
            call("on_epoch_begin")
            loader, accumulation = self.train_loader, self.grad_accumulation
            # A replaced tensor is read from the next epoch on, not in the middle of this one.
            iterator = iter(list(loader) if self.change in OF_DATA - {"longer"} else loader)
            pending: list[Any] = []
            for batch in iterator:
                call("on_batch_begin")
                pending.append(batch)
                self.model.get_loss(batch, self.criterion, torch.device("cpu")).backward()
                if len(pending) == accumulation:
                    self._step(accumulation)
                    pending = []
                call("on_batch_end")
            if pending:
                self._step(len(pending))
            self.val_losses.append(self.evaluate())
            call("on_epoch_end")
            self.epoch += 1

    def _step(self, count: int) -> None:
        divides = getattr(self.criterion, "reduction", "mean") != "sum"
        for p in self.model.parameters():
            if p.grad is not None and divides and count > 1:
                p.grad /= count
        if self.gradient_clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.gradient_clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        total = number = 0.0
        for batch in self.validation_loader:
            loss = float(self.model.get_loss(batch, self.criterion, torch.device("cpu")))
            sums = getattr(self.criterion, "reduction", "mean") == "sum"
            total += loss if sums else loss * len(batch[0])
            number += len(batch[0])
        self.model.train()
        return total / number


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@functools.cache
def expected(change: str, moment: str) -> tuple[dict[str, Tensor], tuple[float, ...]]:
    """Weights and validation losses of the hand-written loop with two calls of fit."""
    loop: Any = ByHand(change)
    hooks = Change(change, moment)
    hooks.train_loop_obj = loop
    for number in range(2):
        if number and moment == "between fits":
            CHANGES[change](loop)
        loop.fit(lambda name: getattr(hooks, name)())
    return values_of(loop.model), tuple(loop.val_losses)


def loop_of(change: str, mode: str, **options: Any) -> TrainLoop[Net]:
    ranks = 2 if mode in ("ddp", "fsdp") else 1
    model = Net()
    return TrainLoop(
        model,
        loader_of(change, BATCH // ranks),
        DataLoader(TensorDataset(*rows(8, 5)), batch_size=4),
        None,
        optimizer_of(change, model),
        nn.MSELoss(),
        gpu_mode=mode,  # type: ignore[arg-type]
        accelerator="cpu",
        devices=ranks if ranks > 1 else 2 if mode == "dp" else 1,
        progress_bar=False,
        **options,
    )


def distance(got: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    if list(got) != list(right):
        return math.inf
    return max(
        (math.inf if a.shape != b.shape else float((a - b).abs().max()) for a, b in zip(got.values(), right.values())),
        default=0.0,
    )


def trained(change: str, mode: str, moment: str, seed: int | None = None) -> tuple[float, float, float]:
    """Distances from the hand-written loop: of weights, of validation losses, and of the evaluation after ``fit``."""
    loop = loop_of(change, mode, seed=seed)
    callback = Change(change, moment)
    for number in range(2):
        # Data that ranks have changed do not come back: the change is made in the caller's process, too.
        if number and (moment == "between fits" or (mode in ("ddp", "fsdp") and change in STAYS_IN_RANKS)):
            CHANGES[change](loop)
        loop.fit(num_epochs=EPOCHS, callbacks=[callback], **arguments(mode))
    if mode in ("ddp", "fsdp") and change == "new_validation":
        CHANGES[change](loop)
    after = float(loop.evaluate_loss_on_validation_set())  # type: ignore[arg-type]
    right, losses = expected(change, moment)
    got = loop.history["val_loss"]
    return (
        distance(values_of(loop.model), right),
        max(abs(a - b) for a, b in zip(got, losses, strict=True)),
        abs(after - got[-1]),
    )


def arguments(mode: str) -> dict[str, Any]:
    return {"ddp_model_args": {"find_unused_parameters": True}} if mode == "ddp" else {}


class Again(Change):
    """As users write it: what a checkpoint does not contain is changed again where the run resumes."""

    def on_train_begin(self) -> None:
        super().on_train_begin()
        # The structure of the model, before the checkpoint is loaded.
        if self.train_loop_obj.resumed and self._is_past() and self.change in STRUCTURE:
            self.done = True
            CHANGES[self.change](self.train_loop_obj)

    def on_resume(self) -> None:
        if self._is_past() and self.change in LOST:
            CHANGES[self.change](self.train_loop_obj)
        self.done = self.done or self._is_past()

    def _is_past(self) -> bool:
        loop = self.train_loop_obj
        # In on_train_begin, the change has just been made.
        return self.moment != "on_train_begin" and loop.epoch >= (2 if self.moment == "on_epoch_end" else 1)


STRUCTURE = {
    *("added_parameter", "removed_parameter", "enlarged", "replaced_module", "pruned", "parametrized", "optimizer"),
    "optimizer_in_list",
}
LOST = {
    *("new_loader", "new_validation", "longer", "attribute_of_dataset", "tensors", "in_place", "indices"),
    *("indices_in_place", "batch_size", "collate", "weights", "num_samples", "criterion", "criterion_of_sums"),
    *("criterion_with_tensors", "reduction", "hooked", "attribute_of_model", "clipped", "accumulated"),
}


def resumes_alike(change: str, moment: str) -> bool:
    """Whether a callback can make a change again in ``on_resume``, in the middle of the epoch in which it was made.

    What takes effect at the next epoch can't: the rest of this epoch is read as it began.
    """
    return moment not in ("on_batch_begin", "on_batch_end") or change not in {*OF_DATA, "weights", "accumulated"}


def resumed_differs(change: str, mode: str, moment: str, folder: Path, step: int = 7) -> float:
    """Distance between an uninterrupted run of four epochs and one that is killed after a step and resumed."""
    results = []
    for kill in (None, step):
        where = os.fspath(folder / f"{kill}")
        keeper = functools.partial(ModelCheckpoint, where, every_n_epochs=None, every_n_steps=1)
        callbacks: list[AbstractCallback] = [Again(change, moment), keeper()]
        loop = loop_of(change, mode, seed=0)
        if kill is not None:
            try:
                loop.fit(
                    num_epochs=4,
                    callbacks=[
                        *callbacks,
                        Raises(RuntimeError(f"after step {kill}"), "on_batch_begin", step=kill, order=5000),
                    ],
                    **arguments(mode),
                )
            except Exception as error:
                if "after step" not in str(error):
                    raise
            loop = loop_of(change, mode, seed=0)
            callbacks = [Again(change, moment), keeper()]
        loop.fit(num_epochs=4, callbacks=callbacks, resume_from="last" if kill is not None else None, **arguments(mode))
        results.append(values_of(loop.model))
    return distance(*results)


class Growing(Sampler[int]):
    """An epoch is longer than the one before; a sampler and a dataset."""

    def __init__(self) -> None:
        self.epoch, self.told = 0, [-1]

    def __len__(self) -> int:
        return 5 + 4 * self.epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index >= len(self):
            raise IndexError(index)
        x = torch.full((3,), index + 1.0, dtype=torch.float64)
        return x / 10, x[:1]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.told.append(epoch)


def growing_loop(part: str, **kwargs: Any) -> tuple[TrainLoop, Growing]:
    """Return a loop that reads batches of 4 samples in all, with a :class:`Growing` dataset or sampler."""
    torch.manual_seed(0)
    model, growing = Net(), Growing()
    x = torch.arange(1.0, 18, dtype=torch.float64)[:, None]
    size = 4 // kwargs.get("devices", 1)
    if part == "dataset":
        loader: Any = DataLoader(growing, size)
    else:
        loader = DataLoader(TensorDataset(x.expand(-1, 3) / 10, x), size, sampler=growing)
    return TrainLoop(model, loader, None, None, sgd(model), nn.MSELoss(), progress_bar=False, **kwargs), growing


def trained_on_growing(num_epochs: int) -> dict[str, torch.Tensor]:
    """Return the weights that a hand-written loop reaches."""
    torch.manual_seed(0)
    model, growing = Net(), Growing()
    optimizer = sgd(model)
    for epoch in range(num_epochs):
        growing.set_epoch(epoch)
        for x, y in DataLoader(growing, 4):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return model.state_dict()
