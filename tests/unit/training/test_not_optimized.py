"""Parameters that require gradients and are in no optimizer: one warning a fit, and a line in the summary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.small_loop import Net, make_loop
from kit.warned import warnings_of
from torch import Tensor, nn, optim

from trainloop import AbstractCallback


class TwoLayers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x))


def loop_with_a_swapped_layer() -> Any:
    """A layer is exchanged after the optimizer was made."""
    model = TwoLayers()
    optimizer = optim.Adam(model.parameters())
    model.fc = nn.Linear(8, 3)
    return make_loop(model, optimizer=optimizer)


def test_a_layer_that_was_swapped_after_the_optimizer_was_made_is_named_once_a_fit() -> None:
    loop = loop_with_a_swapped_layer()
    words = r"fc\.weight, fc\.bias require gradients, but are in no optimizer.*Create the optimizer after"
    with pytest.warns(UserWarning, match=words) as caught:
        loop.fit(num_epochs=2)
    assert len(caught) == 1


def test_the_warning_says_that_their_gradients_are_clipped_with_the_others() -> None:
    loop = loop_with_a_swapped_layer()
    loop.gradient_clip_norm = 1.0
    with pytest.warns(UserWarning, match="in no optimizer.*add up from step to step, and count in the norm"):
        loop.fit(num_epochs=1)


class Weighted(nn.CrossEntropyLoss):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return self.scale * super().forward(input, target)


def test_a_weight_of_the_criterion_that_nobody_trains_is_named() -> None:
    loop = make_loop()
    loop.criterion = Weighted()
    with pytest.warns(UserWarning, match=r"criterion\.scale requires gradients, but is in no optimizer"):
        loop.fit(num_epochs=1)
    loop = make_loop()
    loop.criterion = Weighted()
    loop.optimizer.add_param_group({"params": loop.criterion.parameters()})
    loop.fit(num_epochs=1)
    assert loop.criterion.scale != 1


def test_gradients_of_a_weight_of_the_criterion_that_nobody_trains_are_not_clipped() -> None:
    """Nor a teacher's, as by ``clip_grad_norm_(model.parameters())``; the warning does not say that they are."""
    weights = []
    for trains in (True, False):
        loop = make_loop()
        loop.criterion, loop.gradient_clip_norm = Weighted(), 1e-3
        loop.criterion.scale.requires_grad_(trains)
        assert [" count in the norm" in text for text in warnings_of(lambda loop=loop: loop.fit(num_epochs=1))] == [
            False
        ] * trains
        weights.append(loop.model.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_the_summary_counts_what_is_not_trained() -> None:
    text = str(loop_with_a_swapped_layer().summary())
    assert "parameters: 99, of which 72 are trained; 27 require gradients and are in no optimizer" in text
    assert "parameters: 27, of which 27 are trained\n" in str(make_loop().summary())


class Freeze(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("freeze")

    def on_epoch_begin(self) -> None:
        self.train_loop_obj.model.side.requires_grad_(False)


def test_what_is_frozen_on_purpose_is_not_warned_of() -> None:
    class WithSide(Net):
        def __init__(self) -> None:
            super().__init__()
            self.side = nn.Linear(2, 2)

    model = WithSide()
    make_loop(model, optimizer=optim.Adam(model.fc.parameters())).fit(num_epochs=1, callbacks=[Freeze()])
    frozen = WithSide()
    frozen.side.requires_grad_(False)
    make_loop(frozen, optimizer=optim.Adam(frozen.fc.parameters())).fit(num_epochs=1)
