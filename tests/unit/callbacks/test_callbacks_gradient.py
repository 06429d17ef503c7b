"""Callbacks over gradients."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kit.small_loop import Net, make_loop
from torch import Tensor, nn, optim

from trainloop import AbstractCallback, MultiLoss, MultiOptimizer, TTBasicModel, TTModel
from trainloop.callbacks import (
    GradientClipping,
    GradientStats,
)
from trainloop.errors import ConfigurationError


def by_hand(model: Net, loop: Any, change_gradients: Any) -> nn.Module:
    """One epoch of a plain loop over the same batches."""
    model = copy.deepcopy(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in loop.train_loader:
        loop.criterion(model(x), y).backward()
        change_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize(
    "callback, change",
    [
        (GradientClipping(max_norm=0.1), lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1)),
        (
            GradientClipping(max_norm=0.1, norm_type="inf"),  # type: ignore[arg-type]  # as torch's function has it
            lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1, math.inf),
        ),
        (GradientClipping(max_value=0.01), lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01)),
        (
            GradientClipping(max_norm=0.02, max_value=0.01),
            lambda m: (
                nn.utils.clip_grad_value_(m.parameters(), 0.01),
                nn.utils.clip_grad_norm_(m.parameters(), 0.02),
            ),
        ),
    ],
    ids=["norm", "inf norm", "value", "both"],
)
def test_clipping_is_torch_s_own(callback: AbstractCallback, change: Any) -> None:
    loop = make_loop()
    expected = by_hand(loop.model, loop, change)
    untouched = by_hand(loop.model, loop, lambda m: None)
    loop.fit(num_epochs=1, callbacks=[callback])
    for own, hand, free in zip(loop.model.parameters(), expected.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(own, hand)
        assert not torch.equal(own, free)


class Pair(TTBasicModel):
    """Two models with losses of their own, one a hundred times the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 3)
        self.b = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> MultiLoss:
        x, y = batch_data
        return MultiLoss({"a": criterion(self.a(x), y), "b": 100 * criterion(self.b(x), y)}, {"a": 0, "b": 1})


def make_pair() -> tuple[Pair, MultiOptimizer]:
    torch.manual_seed(0)
    model = Pair()
    return model, MultiOptimizer([optim.SGD(model.a.parameters(), lr=1.0), optim.SGD(model.b.parameters(), lr=1.0)])


def test_each_of_several_optimizers_is_clipped_by_itself() -> None:
    model, optimizer = make_pair()
    before = copy.deepcopy(model)
    loop = make_loop(model, optimizer=optimizer, validation=False)
    stats = GradientStats()
    loop.fit(num_iterations=1, callbacks=[stats, GradientClipping(max_norm=0.1)])
    for name in ("a", "b"):
        new, old = getattr(model, name), getattr(before, name)
        moved = [p - q for p, q in zip(new.parameters(), old.parameters(), strict=True)]
        assert torch.linalg.vector_norm(torch.cat([m.reshape(-1) for m in moved])).item() == pytest.approx(
            0.1, rel=1e-3
        )
    # Statistics are of gradients as they came: before clipping, whatever the order of the callbacks.
    assert loop.history["grad_norm/optimizer0"][0] > 0.1
    assert loop.history["grad_norm/optimizer1"][0] > 10.0


@pytest.mark.parametrize("make", [GradientClipping, lambda: GradientClipping(norm_type=1.0)])
def test_clipping_needs_a_limit(make: Any) -> None:
    with pytest.raises(ConfigurationError, match="GradientClipping: pass max_norm, max_value or both"):
        make()


class KeepsGradients(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("keeps")
        self.steps: list[dict[str, Tensor]] = []

    def on_after_gradient_update(self) -> None:
        self.steps.append({name: p.grad.clone() for name, p in self.train_loop_obj.model.named_parameters()})


def test_gradient_stats() -> None:
    loop = make_loop()
    kept = KeepsGradients()
    loop.fit(num_epochs=2, callbacks=[GradientStats(every_n_steps=3, per_parameter=True), kept])
    steps = [1, 3, 6, 9, 12]
    assert loop.history.step_indices("grad_norm") == steps
    for step, norm, largest, weight in zip(
        steps,
        loop.history.steps("grad_norm"),
        loop.history.steps("grad_max"),
        loop.history.steps("grad_norm/fc.weight"),
        strict=True,
    ):
        gradients = kept.steps[step - 1]
        flat = torch.cat([g.reshape(-1) for g in gradients.values()])
        assert norm == pytest.approx(flat.norm().item(), rel=1e-5)
        assert largest == pytest.approx(flat.abs().max().item(), rel=1e-6)
        assert weight == pytest.approx(gradients["fc.weight"].norm().item(), rel=1e-5)


def test_looking_changes_nothing() -> None:
    loops = [make_loop(), make_loop()]
    loops[0].fit(num_epochs=2)
    loops[1].fit(num_epochs=2, callbacks=[GradientStats(1, per_parameter=True)])
    for plain, watched in zip(loops[0].model.parameters(), loops[1].model.parameters(), strict=True):
        assert torch.equal(plain, watched)


@pytest.mark.parametrize("how", ["argument", "callback"])
def test_a_sparse_gradient_that_can_not_be_clipped_is_named(how: str) -> None:
    class Words(TTModel):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(5, 3, sparse=True)

        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            return criterion(self.words(batch_data[1]), batch_data[1])

        def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
            raise NotImplementedError

    model = Words()
    limit: dict[str, Any] = {"gradient_clip_norm": 1.0} if how == "argument" else {}
    loop = make_loop(model, validation=False, optimizer=optim.SGD(model.parameters(), lr=0.1), **limit)
    clipped = nn.Embedding(5, 3, sparse=True)
    clipped(torch.tensor([1, 1])).square().sum().backward()
    try:
        nn.utils.clip_grad_norm_(clipped.parameters(), 1.0)
        refused: Any = nullcontext()  # torch 2.15 or newer
    except (RuntimeError, NotImplementedError):
        refused = pytest.raises(ConfigurationError, match=r"words\.weight is sparse")
    theirs = copy.deepcopy(model)
    with refused:
        loop.fit(1, callbacks=[] if limit else [GradientClipping(1.0)])
        optimizer = optim.SGD(theirs.parameters(), lr=0.1)
        for batch in loop.train_loader:
            theirs.get_loss(batch, loop.criterion, torch.device("cpu")).backward()
            nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(model.words.weight, theirs.words.weight)


def test_several_stats_count_each_step_once() -> None:
    def logged(*callbacks: AbstractCallback) -> Any:
        loop = make_loop(seed=0)
        loop.fit(num_epochs=1, callbacks=list(callbacks))
        return {name: values for name, values in loop.history.items() if name.startswith("grad_")}

    every, seldom = logged(GradientStats(1)), logged(GradientStats(3, per_parameter=True))
    assert logged(GradientStats(1), GradientStats(3, per_parameter=True)) == {**seldom, **every}
    assert logged(GradientStats(3, per_parameter=True), GradientStats(3, per_parameter=True)) == seldom
