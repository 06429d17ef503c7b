"""Whether lower or higher is better, where nobody says: one rule for all callbacks that monitor."""

from __future__ import annotations

import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.small_loop import Net, Scores, make_loop

from trainloop import AbstractCallback
from trainloop.callbacks import EarlyStopping, LRScheduler, ModelCheckpoint, TerminateOnNaN, ThresholdEarlyStopping
from trainloop.callbacks.monitor import Monitor
from trainloop.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:.*by its name, (lower|higher) is better")

LOWER = """loss val_loss loss_kl ema_val_loss train_error val_rmse mae MSE nll test_nll perplexity val_ppl wer log_loss
    accuracy_loss top5_error brier_score mean_absolute_error cross_entropy valLoss neg_loss""".split()
HIGHER = """accuracy val_accuracy Accuracy valAccuracy acc f1 val_f1_macro auroc val/auc mAP map50 mIoU precision
    recall@10 r2 r2_score bleu4 test_top1 score train_end_val_accuracy episode_reward
    val_neg_log_loss neg_mean_squared_error neg_mean_poisson_deviance neg_negative_likelihood_ratio
    val_neg_rmse negative_mse d2_absolute_error_score d2_log_loss_score explained_variance val_explained_variance
    val_pearson val_spearman_corr sharpe""".split()
UNKNOWN = ["grad_norm", "lr", "seconds", "weight", "mse_accuracy", "davies_bouldin_score", "x"]


@pytest.mark.parametrize("name", LOWER)
def test_lower_is_better(name: str) -> None:
    assert Monitor(name).minimize is True
    assert Monitor(name, "max").minimize is False


@pytest.mark.parametrize("name", HIGHER)
def test_higher_is_better(name: str) -> None:
    assert Monitor(name).minimize is False
    assert Monitor(name, "min").minimize is True


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize(
    "make",
    [
        EarlyStopping,
        lambda name, **more: ThresholdEarlyStopping(name, 1.0, **more),
        lambda name, **more: ModelCheckpoint("d", monitor=name, **more),
    ],
    ids=["EarlyStopping", "ThresholdEarlyStopping", "ModelCheckpoint"],
)
def test_a_name_that_does_not_tell_needs_the_mode(name: str, make: Any, folder: Path) -> None:
    message = rf"monitor='{name}': this name does not show whether lower or higher is better. Pass mode='min' or"
    with pytest.raises(ConfigurationError, match=message):
        make_loop().fit(num_epochs=1, callbacks=[make(name)])
    make_loop().fit(num_epochs=1, callbacks=[Scores([1.0], name), make(name, mode="max")])


def test_a_name_that_does_not_tell_may_be_misspelt() -> None:
    hint = "Pass mode='min' or mode='max'. Or is the name misspelt? Metrics known before training: 'loss', 'val_loss'"
    with pytest.raises(ConfigurationError, match=re.escape(hint)):
        make_loop().fit(num_epochs=1, callbacks=[EarlyStopping("val_acuracy")])


def test_a_misspelt_name_that_tells_is_told_after_an_epoch() -> None:
    loop = make_loop()
    with pytest.raises(ConfigurationError, match=r"'vall_loss' is not in the .* Did you mean 'val_loss'\? Monitor one"):
        loop.fit(num_epochs=2, callbacks=[EarlyStopping("vall_loss")])
    with pytest.raises(ConfigurationError) as error:  # nobody logs what the right word would name
        loop.fit(num_epochs=2, callbacks=[EarlyStopping("precison", mode="max")])
    assert "Did you mean" not in str(error.value)
    # Now that a name has been logged, it is known: the model logs its accuracy.
    with pytest.raises(ConfigurationError, match=r"known before training: 'loss', 'val_loss', .*'accuracy'"):
        loop.fit(num_epochs=1, callbacks=[EarlyStopping("accurcy")])


def test_what_judges_nothing_needs_no_mode() -> None:
    make_loop().fit(num_epochs=1, callbacks=[Scores([1.0], "lr"), TerminateOnNaN("lr")])


def test_the_best_checkpoint_is_kept_without_a_mode(folder: Path) -> None:
    values = [0.92, 0.99, 0.95]
    keeper = ModelCheckpoint("kept", monitor="val_accuracy_of_mine", keep=1)
    make_loop().fit(num_epochs=3, callbacks=[Scores(values, "val_accuracy_of_mine"), keeper])
    assert keeper.best_value == max(values)
    assert keeper.load_best()["history"]["values"]["val_accuracy_of_mine"] == values[:2]
    # Names count epochs as tables do, from 1.
    assert "epoch=0002" in str(keeper.best_path)


@pytest.mark.long
def test_torchmetrics_says_it(folder: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class WithMetrics(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spread = torchmetrics.MeanSquaredError()  # of the model, by its attribute's name
            self.several = torchmetrics.MetricCollection({"hit": torchmetrics.classification.MulticlassRecall(3)})

    for name, minimize in (("val_spread", True), ("test_hit", False), ("val_mean_squared_error", True)):
        stopping = EarlyStopping(name, patience=5)
        make_loop(WithMetrics()).fit(num_epochs=1, callbacks=[Scores([1.0], name), stopping])
        assert stopping._metric.minimize is minimize
    torch.manual_seed(0)
    with pytest.raises(ConfigurationError, match="this name does not show"):
        make_loop(WithMetrics()).fit(num_epochs=1, callbacks=[EarlyStopping("val_other")])


@pytest.mark.parametrize("kind", [EarlyStopping, partial(ModelCheckpoint, "folder", monitor="")])
@pytest.mark.parametrize("name, mode", [("val_loss", "max"), ("val_accuracy", "min")])
def test_a_mode_against_the_name_is_warned_of(kind: Any, name: str, mode: Any) -> None:
    with pytest.warns(UserWarning, match=rf"monitor='{name}', mode='{mode}': by its name, .* is better"):
        kind(monitor=name, mode=mode)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name, mode", [("val_loss", "min"), ("val_accuracy", "max"), ("mine", "max"), ("mine", "min")])
def test_a_mode_that_fits_the_name_is_not(name: str, mode: Any) -> None:
    assert Monitor(name, mode).mode == mode


def test_a_plateau_with_the_wrong_mode_is_warned_of() -> None:
    plateau = LRScheduler(torch.optim.lr_scheduler.ReduceLROnPlateau, monitor="val_accuracy")
    with pytest.warns(UserWarning, match="LRScheduler: monitor='val_accuracy', mode='min'"):
        make_loop().fit(num_epochs=1, callbacks=[plateau])


@pytest.mark.parametrize(
    ("name", "meant"),
    [("val_acuracy", "val_accuracy"), ("vall_loss", "val_loss"), ("val_auc", None), ("val_loss", None)],
)
def test_a_misspelt_name_is_reported_after_the_first_step(name: str, meant: str | None) -> None:
    steps = []

    class Ends(AbstractCallback):
        def on_batch_end(self) -> None:
            steps.append(self.train_loop_obj.global_step)
            if steps[-1] == 2:
                raise KeyError("enough")

    stop = EarlyStopping(name, mode="max" if "loss" not in name else "min")
    loop = make_loop()
    with warnings.catch_warnings(record=True) as caught, pytest.raises(KeyError, match="enough"):
        warnings.simplefilter("always")
        loop.fit(num_epochs=1, callbacks=[stop, Ends("ends")])
    found = [str(one.message) for one in caught if "first step" in str(one.message)]
    assert len(found) == (meant is not None)
    assert all(f"monitor={name!r}" in text and f"Did you mean {meant!r}?" in text for text in found)
