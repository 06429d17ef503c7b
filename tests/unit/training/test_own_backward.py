"""Backward in the user's code: a step has no gradients of hooks or evaluations, and none of ``get_loss`` unweighted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from kit import reference
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, MultiOptimizer, TrainLoop, TTBasicModel, TTModel
from trainloop.errors import ConfigurationError

X, Y = torch.randn(14, 4, generator=torch.Generator().manual_seed(0)), torch.arange(14) % 3


class Heads(TTBasicModel):
    """Runs the backward of each head at once, so that only one head's activations are in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 3) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.trunk(x))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        hidden = self(x)
        own = hidden.detach().requires_grad_()
        for head in self.heads:
            criterion(head(own), y).backward()
        return (hidden * own.grad).sum()


class Yields(Heads):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        yield super().get_loss(batch_data, criterion, device)


class Attacked(Heads):
    """Moves the inputs along their gradient, and clears the gradients of parameters."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        moved = x.clone().requires_grad_()
        criterion(self.heads[0](self(moved)), y).backward()
        assert moved.grad is not None
        self.zero_grad()
        return criterion(self.heads[0](self(x + 0.1 * moved.grad.sign())), y) + 0 * self.heads[1].weight.sum()


def loop_of(model: TTModel, **given: Any) -> TrainLoop[Any]:
    optimizer = optim.SGD(model.parameters(), 0.1)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(X, Y), 4)
    return TrainLoop(model, loader, optimizer=optimizer, criterion=criterion, progress_bar=False, **given)


@pytest.mark.parametrize("kind", [Heads, Attacked])
def test_in_one_process_it_is_a_hand_written_loop(kind: type[Heads]) -> None:
    ours = kind()
    theirs = copy.deepcopy(ours)
    loop_of(ours).fit(num_epochs=2)
    loader, sgd = DataLoader(TensorDataset(X, Y), 4), optim.SGD(theirs.parameters(), 0.1)
    reference.train(theirs, loader, sgd, reference.by_get_loss(nn.CrossEntropyLoss()), num_epochs=2)
    assert reference.identical(ours, theirs)


@pytest.mark.parametrize("kind", [Heads, Yields, Attacked])
def test_with_accumulation_it_is_an_error(kind: type[Heads]) -> None:
    loop = loop_of(kind())
    if kind is Yields:
        loop.optimizer = MultiOptimizer([loop.optimizer])
    with pytest.raises(ConfigurationError, match=r"get_loss changes the gradients .*call torch.autograd.grad"):
        loop.fit(num_epochs=1, grad_accumulation=2)


def test_in_replicas_it_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="get_loss changes the gradients"):
        loop_of(Heads(), gpu_mode="dp", accelerator="cpu", devices=2).fit(num_epochs=1)


# -- gradients that the user's code leaves -----------------------------------------------------------------------------


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))

    def get_loss_eval(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        with torch.enable_grad():
            self.get_loss(batch_data, criterion, device).backward()  # for adversarial inputs, for example
        return self.get_loss(batch_data, criterion, device)


class InTurn(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        for name in ("a", "b"):
            yield name, criterion(self(batch_data[0]), batch_data[1])

    get_loss_eval = TTModel.get_loss_eval


def leave_gradients(model: nn.Module) -> None:
    """The Fisher information, or a saliency map."""
    nn.functional.cross_entropy(model(X[:5]), Y[:5]).backward()


class Leaves(AbstractCallback):
    """Computes gradients in every hook between two steps."""

    def leave(self, *_: Any) -> None:
        if self.train_loop_obj.total_iteration_idx % 2 == 0 or self.train_loop_obj.grad_accumulation == 1:
            leave_gradients(self.train_loop_obj.model)

    on_train_begin = on_epoch_begin = on_batch_begin = on_after_optimizer_step = on_epoch_end = on_train_end = leave


KINDS: dict[str, tuple[type[Net], Any, int]] = {
    "plain": (Net, lambda model: optim.SGD(model.parameters(), 0.1, momentum=0.9), 1),
    "accumulated": (Net, lambda model: optim.SGD(model.parameters(), 0.1, momentum=0.9), 2),
    "closure": (Net, lambda model: optim.LBFGS(model.parameters(), 0.1, max_iter=3), 1),
    "in turn": (
        InTurn,
        lambda model: MultiOptimizer({n: optim.SGD(getattr(model, n).parameters(), 0.1) for n in ("a", "b")}),
        1,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_hooks_and_evaluations_leave_are_not_in_the_next_step(kind: str) -> None:
    cls, optimizer, accumulation = KINDS[kind]

    def fit(*callbacks: AbstractCallback, validates: bool, leaves: bool = False) -> dict[str, Tensor]:
        model = cls()
        loader = DataLoader(TensorDataset(X, Y), 4)
        criterion = nn.CrossEntropyLoss()
        validation = loader if validates else None
        loop = TrainLoop(model, loader, validation, None, optimizer(model), criterion, progress_bar=False)
        for _ in range(2):
            if leaves:
                leave_gradients(model)
            loop.fit(num_epochs=1, callbacks=list(callbacks), grad_accumulation=accumulation)
        return model.state_dict()

    undisturbed, disturbed = fit(validates=False), fit(Leaves(), validates=True, leaves=True)
    assert all(torch.equal(disturbed[name], value) for name, value in undisturbed.items())
