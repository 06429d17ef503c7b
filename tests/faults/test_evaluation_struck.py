"""A signal during an evaluation outside of ``fit`` ends it where it strikes, as it ends a hand-written loop."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest
import torch
from kit.small_loop import Net, make_loop

from trainloop import TrainLoop


class Struck(Net):
    """Sends a signal in its second batch, and fails if it gets any further."""

    blow = ""
    """The signal and whom it is for."""

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        if self.blow and len(batch_data[0]) == 1:  # the last batch, so that others are done or on their way
            number, whom = self.blow.split()
            caller = multiprocessing.parent_process()
            os.kill(caller.pid if caller and whom == "caller" else os.getpid(), getattr(signal, number))
            time.sleep(20)
            raise AssertionError("the evaluation went on")
        return super().get_predictions(batch_data, device)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        if self.blow:
            self.get_predictions((batch_data[0][:1], None), device)
        return super().get_loss(batch_data, criterion, device)


def struck(tl: TrainLoop, blow: str, ends_with: type[BaseException], evaluate: str) -> None:
    assert isinstance(tl.model, Struck)
    tl.model.blow = blow
    with pytest.raises(ends_with) as caught:
        getattr(tl, evaluate)()
    assert caught.type is ends_with
    if ends_with is SystemExit:
        assert caught.value.code == 143
    tl.model.blow = ""


@pytest.mark.long
def test_an_evaluation_in_this_process_ends_where_the_signal_strikes(capfd: pytest.CaptureFixture[str]) -> None:
    tl = make_loop(Struck())
    mean = tl.evaluate_loss_on_validation_set()
    struck(tl, "SIGINT self", KeyboardInterrupt, "predict_on_validation_set")
    struck(tl, "SIGINT self", KeyboardInterrupt, "evaluate_loss_on_validation_set")
    struck(tl, "SIGTERM self", SystemExit, "evaluate_loss_on_validation_set")
    assert "training stops" not in capfd.readouterr().err
    assert all(module.training for module in tl.model.modules())
    assert tl.evaluate_loss_on_validation_set() == mean
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.long
def test_an_evaluation_over_ranks_ends_where_the_signal_strikes() -> None:
    tl = make_loop(Struck(), gpu_mode="ddp", accelerator="cpu", devices=2)
    struck(tl, "SIGINT caller", KeyboardInterrupt, "predict_on_validation_set")
    with tl.ranks():
        mean = tl.evaluate_loss_on_validation_set()
        struck(tl, "SIGTERM self", SystemExit, "evaluate_loss_on_validation_set")
        assert tl.evaluate_loss_on_validation_set() == mean
