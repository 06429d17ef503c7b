"""A failure in an evaluation or in a callback at the end of an epoch does not lose the epoch's steps."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.small_loop import Net, make_loop
from torch.optim.lr_scheduler import StepLR

from trainloop import AbstractCallback, TrainLoop
from trainloop.callbacks import ExponentialMovingAverage, LRScheduler, ModelCheckpoint
from trainloop.errors import WorkerFailedError


class Evaluates(Net):
    """Its evaluation fails in the second epoch, if it is broken."""

    def __init__(self, *, broken: bool) -> None:
        super().__init__()
        self.broken = broken
        self.epoch = 0

    def on_epoch_begin(self) -> None:
        self.epoch += 1

    def get_loss_eval(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        if self.broken and self.epoch == 2:
            raise ValueError("broken evaluation")
        return super().get_loss_eval(batch_data, criterion, device)


class Fails(AbstractCallback):
    def __init__(self, rank: int = 0, hook: str = "on_epoch_end", first: int = 1) -> None:
        super().__init__("fails", execution_order=200)  # after the schedule
        self.failing, self.hook, self.first = rank, hook, first

    def on_epoch_end(self) -> None:
        if self.hook == "on_epoch_end":
            self.fail()

    def on_train_end(self) -> None:
        self.fail()

    def fail(self) -> None:
        loop = self.train_loop_obj
        if loop.epoch >= self.first and loop.rank == self.failing:
            raise ValueError("broken callback")


class Inserts(AbstractCallback):
    """Adds values to the history within an epoch, and before the failure at its end."""

    def on_batch_end(self) -> None:
        if self.train_loop_obj.total_iteration_idx % 5 == 1:
            self.insert("within")

    def on_epoch_end(self) -> None:
        self.insert("at_end")

    def insert(self, name: str) -> None:
        loop = self.train_loop_obj
        loop.insert_metric_result_into_history(name, float(loop.global_step + loop.rank))


def loop_of(*, broken: bool = False, **kwargs: Any) -> TrainLoop:
    torch.manual_seed(0)
    return make_loop(Evaluates(broken=broken), seed=2, shuffle=True, **kwargs)


def weights_of(tl: TrainLoop) -> list[Any]:
    return [p.tolist() for p in tl.model.parameters()]


def state_of(tl: TrainLoop) -> Any:
    return weights_of(tl), tl.history.to_dict(), tl.epoch, tl.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("fails", [None, Fails(), Fails(hook="on_train_end")], ids=["evaluation", "callback", "end"])
def test_the_checkpoint_has_the_last_step(fails: AbstractCallback | None, tmp_path: Path) -> None:
    def callbacks() -> list[AbstractCallback]:
        average = ExponentialMovingAverage(0.5, evaluate=True, apply_on_train_end=False)
        return [LRScheduler(StepLR, step_size=1, gamma=0.5), Inserts("inserts"), average, ModelCheckpoint(tmp_path)]

    whole, failed, resumed = loop_of(), loop_of(broken=fails is None), loop_of()
    whole.fit(num_epochs=2, callbacks=callbacks()[:-1])
    with pytest.raises(ValueError, match="broken") as caught:
        failed.fit(num_epochs=2, callbacks=[*callbacks(), *([fails] if fails else [])])
    assert weights_of(failed) == weights_of(whole)
    if fails is None or fails.hook == "on_epoch_end":  # type: ignore[attr-defined]
        assert "step=00000014" in " ".join(getattr(caught.value, "__notes__", ["step=00000014"]))
    resumed.fit(num_epochs=2, callbacks=callbacks(), resume_from="last")
    assert state_of(resumed) == state_of(whole)


class Swaps(AbstractCallback):
    """Evaluates other weights; with ``.data``, which a tensor's version does not count."""

    def on_evaluation_begin(self, dataset_info: dict[str, Any]) -> None:
        self.swap(0.5)

    def on_evaluation_end(self, dataset_info: dict[str, Any]) -> None:
        self.swap(2.0)

    def swap(self, factor: float) -> None:
        for p in self.train_loop_obj.model.parameters():
            p.data *= factor


class Shrinks(AbstractCallback):
    def on_epoch_end(self) -> None:
        with torch.no_grad():
            self.train_loop_obj.model.fc.weight *= 0.5


class ShrinksCriterion(AbstractCallback):
    def on_epoch_end(self) -> None:
        self.train_loop_obj.criterion.weight *= torch.tensor([0.5, 1.0, 1.0])


class Slows(AbstractCallback):
    """Changes the optimizer's state."""

    def on_epoch_end(self) -> None:
        for own in self.train_loop_obj.optimizer.state.values():
            own["momentum_buffer"] *= 0.5


@pytest.mark.filterwarnings("ignore:the training changes epoch")
@pytest.mark.parametrize(
    ("changes", "fails", "names"),
    [
        (Swaps, None, "fc.weight, fc.bias"),
        (Shrinks, Fails(), "fc.weight"),
        (ShrinksCriterion, Fails(), "criterion.weight"),
        (Slows, Fails(), "the optimizers' state"),
    ],
    ids=["evaluation", "hook", "criterion", "optimizer"],
)
def test_no_checkpoint_has_weights_that_were_changed_after_the_step(
    changes: Any, fails: AbstractCallback | None, names: str, tmp_path: Path
) -> None:
    """The resumed run would change them again, or train on from other weights."""
    whole, failed, resumed = loop_of(), loop_of(broken=fails is None), loop_of()
    for tl in (whole, failed, resumed):
        tl.criterion = torch.nn.CrossEntropyLoss(weight=torch.ones(3))
    whole.fit(num_epochs=2, callbacks=[changes("changes")])
    callbacks = [changes("changes"), ModelCheckpoint(tmp_path), *([fails] if fails else [])]
    with pytest.raises(ValueError, match="broken"), pytest.warns(UserWarning, match=f"has changed {names}, so that"):
        failed.fit(num_epochs=2, callbacks=callbacks)
    resumed.fit(num_epochs=2, callbacks=[changes("changes"), ModelCheckpoint(tmp_path)], resume_from="last")
    assert state_of(resumed) == state_of(whole)


@pytest.mark.parametrize("mode", ["single", pytest.param("ddp", marks=pytest.mark.long)])
def test_another_fit_replaces_the_values_of_the_end_that_failed(mode: str) -> None:
    tl, inserts = loop_of(gpu_mode=mode, devices=1 + (mode == "ddp")), Inserts("inserts")
    with pytest.raises((ValueError, WorkerFailedError), match="broken"):
        tl.fit(num_epochs=2, callbacks=[inserts, Fails()])
    assert tl.history.epochs("at_end") == tl.history.epochs("val_loss") == [0, 1]
    tl.fit(num_epochs=1, callbacks=[inserts])
    assert tl.history.epochs("at_end") == tl.history.epochs("val_loss") == [0, 1]
    assert tl.history["at_end"][-1] == tl.global_step + (mode == "ddp") / 2  # the mean over ranks


class Toggles(AbstractCallback):
    def on_epoch_end(self) -> None:
        bias = self.train_loop_obj.model.fc.bias
        bias.requires_grad_(not bias.requires_grad)


def test_the_flags_of_parameters_are_those_of_the_last_step(tmp_path: Path) -> None:
    whole, failed, resumed = loop_of(), loop_of(), loop_of()
    whole.fit(num_epochs=3, callbacks=[Toggles("toggles")])
    with pytest.raises(ValueError, match="broken"):
        failed.fit(num_epochs=3, callbacks=[Toggles("toggles"), Fails(), ModelCheckpoint(tmp_path)])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the checkpoint does not contain _log_sink")
        resumed.fit(num_epochs=3, callbacks=[Toggles("toggles"), ModelCheckpoint(tmp_path)], resume_from="last")
    assert state_of(resumed) == state_of(whole)


def test_a_run_resumes_whose_first_end_of_an_epoch_failed(tmp_path: Path) -> None:
    """The metric that the callback adds there is not in the checkpoint."""
    whole, failed, resumed = loop_of(), loop_of(), loop_of()
    whole.fit(num_epochs=2, callbacks=[Inserts("inserts")])
    with pytest.raises(ValueError, match="broken"):
        failed.fit(num_epochs=2, callbacks=[Inserts("inserts"), Fails(first=0), ModelCheckpoint(tmp_path)])
    resumed.fit(num_epochs=2, callbacks=[Inserts("inserts"), ModelCheckpoint(tmp_path)], resume_from="last")
    assert state_of(resumed) == state_of(whole)


@pytest.mark.long
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_the_weights_come_back_from_ranks(rank: int | None, tmp_path: Path) -> None:
    of_mode: dict[str, Any] = {"gpu_mode": "ddp", "devices": 2}
    whole, failed, kept = loop_of(**of_mode), loop_of(broken=rank is None, **of_mode), loop_of(**of_mode)
    whole.fit(num_epochs=2, callbacks=[Inserts("inserts")])
    fails = [] if rank is None else [Fails(rank)]
    with pytest.raises(WorkerFailedError, match="broken") as caught:
        failed.fit(num_epochs=2, callbacks=[*fails, Inserts("inserts"), ModelCheckpoint(tmp_path)])
    assert weights_of(failed) == weights_of(whole)
    assert failed.global_step == whole.global_step
    assert f"the last finished step ({whole.global_step})" in str(caught.value)
    kept.fit(num_epochs=2, callbacks=[Inserts("inserts"), ModelCheckpoint(tmp_path)], resume_from="last")
    assert state_of(kept) == state_of(whole)
