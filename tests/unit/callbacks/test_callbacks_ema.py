"""The moving average of the weights, against torch's own AveragedModel."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.small_loop import STEPS_PER_EPOCH, Net, make_loop
from torch import Tensor, nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainloop import AbstractCallback, MultiLoss
from trainloop.callbacks import EarlyStopping, ExponentialMovingAverage, ModelCheckpoint
from trainloop.errors import CheckpointError, ConfigurationError


class TorchAverage(AbstractCallback):
    """The same as a user would write it by hand."""

    def __init__(self, decay: float, every: int = 1) -> None:
        super().__init__("torch")
        self.decay = decay
        self.every = every

    def on_train_begin(self) -> None:
        function = get_ema_multi_avg_fn(self.decay)
        self.averaged = AveragedModel(copy.deepcopy(self.train_loop_obj.model), multi_avg_fn=function)

    def on_after_optimizer_step(self) -> None:
        if self.train_loop_obj.global_step % self.every == 0:
            self.averaged.update_parameters(self.train_loop_obj.model)

    def weights(self) -> dict[str, Tensor]:
        return dict(self.averaged.module.named_parameters())


@pytest.mark.parametrize("decay, every", [(0.9, 1), (0.5, 3), (0.0, 1), (1.0, 1)])
def test_as_torch_s_averaged_model(decay: float, every: int) -> None:
    loop = make_loop()
    by_hand = TorchAverage(decay, every)
    ema = ExponentialMovingAverage(decay, every_n_steps=every)
    loop.fit(num_epochs=2, callbacks=[by_hand, ema])
    for name, parameter in loop.model.named_parameters():
        assert torch.equal(parameter, by_hand.weights()[name])
        assert torch.equal(parameter, ema.average[name])


def test_the_trained_weights_are_not_touched_before_the_end() -> None:
    plain, averaged = make_loop(), make_loop()
    plain.fit(num_epochs=2)
    averaged.fit(num_epochs=2, callbacks=[ExponentialMovingAverage(0.9, apply_on_train_end=False, evaluate=True)])
    assert torch.equal(plain.model.fc.weight, averaged.model.fc.weight)
    assert plain.history["val_loss"] == averaged.history["val_loss"]


def test_start_step() -> None:
    loop = make_loop()
    ema = ExponentialMovingAverage(0.9, start_step=STEPS_PER_EPOCH, apply_on_train_end=False)
    loop.fit(num_epochs=1, callbacks=[ema])
    assert torch.equal(ema.average["fc.weight"], loop.model.fc.weight)
    loop.fit(num_epochs=1, callbacks=[ema])
    assert not torch.equal(ema.average["fc.weight"], loop.model.fc.weight)


def test_the_average_of_several_losses_is_evaluated_with_their_sum() -> None:
    class Two(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            return MultiLoss(
                {"a": super().get_loss(batch_data, criterion, device), "b": self.fc.weight.square().mean()}
            )

    loop = make_loop(Two())
    loop.fit(2, callbacks=[ExponentialMovingAverage(0.0, evaluate=True), EarlyStopping("ema_val_loss", patience=5)])
    for name in ("", "_a", "_b"):  # with decay=0 the average is the weights
        assert loop.history[f"ema_val_loss{name}"] == pytest.approx(loop.history[f"val_loss{name}"])


def test_evaluations_of_hooks_do_not_replace_what_the_epochs_own_has_logged() -> None:
    class OfAverage(AbstractCallback):
        def on_epoch_end(self) -> None:
            with ema.applied():
                self.train_loop_obj.evaluate_loss_on_validation_set()

    ema = ExponentialMovingAverage(0.99, evaluate=True)
    alone, averaged = make_loop(), make_loop()
    alone.fit(num_epochs=2)
    averaged.fit(num_epochs=2, callbacks=[ema, OfAverage()])
    assert averaged.history["val_accuracy"] == alone.history["val_accuracy"]


def test_evaluation_of_the_average() -> None:
    class ByHand(AbstractCallback):
        def on_epoch_end(self) -> None:
            with ema.applied():
                losses.append(self.train_loop_obj.evaluate_loss_on_validation_set())

    losses: list[float] = []
    ema = ExponentialMovingAverage(0.9, evaluate=True)
    loop = make_loop()
    loop.fit(num_epochs=3, callbacks=[ema, ByHand(), EarlyStopping("ema_val_loss", patience=5)])
    assert loop.history["ema_val_loss"] == losses
    assert losses[0] != loop.history["val_loss"][0]
    # The model that comes back is the one evaluated last.
    assert loop.evaluate_loss_on_validation_set() == losses[-1]


def test_a_second_fit_trains_on_where_training_was() -> None:
    whole, parts = make_loop(), make_loop()
    ema = ExponentialMovingAverage(0.9)
    whole.fit(num_epochs=2, callbacks=[ExponentialMovingAverage(0.9)])
    parts.fit(num_epochs=1, callbacks=[ema])
    parts.fit(num_epochs=1, callbacks=[ema])
    assert torch.equal(whole.model.fc.weight, parts.model.fc.weight)


def test_a_second_fit_trains_on_weights_that_were_put_there() -> None:
    loop = make_loop()
    ema = ExponentialMovingAverage(0.9)
    loop.fit(num_epochs=1, callbacks=[ema])
    with torch.no_grad():
        loop.model.fc.weight.fill_(7.0)
    loop.optimizer.param_groups[0]["lr"] = 0.0
    loop.fit(num_epochs=1, callbacks=[ema])
    loop.fit(num_epochs=1, callbacks=[ExponentialMovingAverage(0.9, apply_on_train_end=False)])
    assert loop.model.fc.weight.min() > 3.0


def test_resumes_with_the_average(tmp_path: Path) -> None:
    class Dies(AbstractCallback):
        def on_batch_end(self) -> None:
            if self.train_loop_obj.global_step == dies_at:
                raise OSError("no more")

    def callbacks() -> list[AbstractCallback]:
        keeper = ModelCheckpoint(tmp_path / str(dies_at), every_n_steps=5)
        return [ExponentialMovingAverage(0.9), keeper]

    whole = make_loop(seed=0)
    whole.fit(num_epochs=2, callbacks=[ExponentialMovingAverage(0.9)])
    # In the middle of an epoch; and after an end, when the model's weights are the average.
    for dies_at in (6, None):
        first = make_loop(seed=0)
        if dies_at is None:
            first.fit(num_epochs=1, callbacks=callbacks())
        else:
            with pytest.raises(OSError, match="no more"):
                first.fit(num_epochs=2, callbacks=[*callbacks(), Dies()])
        resumed = make_loop(seed=0)
        resumed.fit(num_epochs=2, callbacks=callbacks(), resume_from="last")
        assert torch.equal(whole.model.fc.weight, resumed.model.fc.weight)


def test_buffers_and_integers_stay_the_model_s_own() -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.count = nn.Parameter(torch.tensor(3), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    model = Normed()
    loop = make_loop(model, optimizer=optim.SGD([model.fc.weight], lr=0.1))
    ema = ExponentialMovingAverage(0.9)
    loop.fit(num_epochs=1, callbacks=[ema])
    assert "count" not in ema.average
    assert model.norm.num_batches_tracked == STEPS_PER_EPOCH


def test_another_model_s_average() -> None:
    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(1, 1)

    loop, other = make_loop(), make_loop(Other())
    ema = ExponentialMovingAverage()
    loop.fit(num_epochs=1, callbacks=[ema])
    foreign = ExponentialMovingAverage()
    other.fit(num_epochs=1, callbacks=[foreign])
    with pytest.raises(CheckpointError, match=r"are those of another model\. Each .*: more\.bias, more\.weight"):
        foreign.load_state_dict(ema.state_dict())


def test_evaluation_needs_a_validation_loader() -> None:
    with pytest.raises(ConfigurationError, match=r"evaluate=True\): the loop has no validation_loader"):
        make_loop(validation=False).fit(num_epochs=1, callbacks=[ExponentialMovingAverage(evaluate=True)])
