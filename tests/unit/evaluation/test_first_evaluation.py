"""What only an evaluation would find: checked at the start, found by preflight, and explained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.small_loop import Net, make_loop

from trainloop.callbacks import ModelPerformanceEvaluation
from trainloop.errors import ConfigurationError
from trainloop.tools import preflight


class ReturnsDict(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        loss = super().get_loss(batch_data, criterion, device)
        return loss if self.training else {"boxes": loss}


class NeedsGradients(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        loss = super().get_loss(batch_data, criterion, device)
        return loss + sum(
            g.square().sum() for g in torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        )


class OnePrediction(Net):
    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self(batch_data[0])[:1], batch_data[1], {}


class Numpy(Net):
    """Right without gradients, as in an evaluation."""

    loss_reduction: str | None = None

    def get_loss_eval(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        self(batch_data[0]).numpy()
        return super().get_loss_eval(batch_data, criterion, device)


def test_the_error_of_a_batch_with_a_graph_says_how_to_do_without() -> None:
    criterion = torch.nn.CrossEntropyLoss(reduction="sum")
    loop = make_loop(Numpy())
    loop.fit(1)
    loop.criterion = criterion
    with pytest.raises(RuntimeError, match=r"numpy\(\).*loss_reduction = 'sum'"):
        loop.evaluate(loop.validation_loader)
    loop.model.loss_reduction = "sum"
    assert loop.evaluate(loop.validation_loader)["loss"] > 0


@pytest.mark.parametrize(
    "kind, message",
    [
        (ReturnsDict, r"returned a dict.*eval\(\) mode.*get_loss_eval that returns a loss.*preflight"),
        (NeedsGradients, r"torch\.enable_grad\(\).*preflight"),
    ],
)
def test_the_error_of_an_evaluation_says_what_to_do(kind: Any, message: str) -> None:
    loop = make_loop(kind())
    with pytest.raises((ConfigurationError, RuntimeError), match=f"(?s){message}"):
        loop.fit(1)


@pytest.mark.parametrize("kind", [ReturnsDict, NeedsGradients, OnePrediction])
def test_preflight_evaluates_a_batch(kind: Any) -> None:
    with pytest.raises((preflight._Found, ConfigurationError, RuntimeError)):
        preflight._one_evaluation_batch(make_loop(kind()))
    assert preflight._one_evaluation_batch(make_loop(Net())).endswith("16 predictions")


def two_arguments(y_pred: Any, y_true: Any) -> float:
    return 0.0


@pytest.mark.parametrize("package", [two_arguments, {"score": two_arguments}, [lambda a, b, c, d: 0.0]])
def test_metric_functions_are_checked_before_training(package: Any) -> None:
    loop = make_loop()
    with pytest.raises(ConfigurationError, match=r"called with \(y_pred, y_true, metadata\)"):
        loop.fit(1, callbacks=[ModelPerformanceEvaluation(package)])
    assert loop.global_step == 0
