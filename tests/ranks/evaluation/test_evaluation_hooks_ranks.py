"""Evaluation hooks where several ranks evaluate together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.small_loop import Net, make_loop
from torch import Tensor, nn
from torch.utils.data import DataLoader

from conftest import make_data
from trainloop import AbstractCallback, distributed


class Carrying(Net):
    """Holds a state of each rank's own, as a buffer, which evaluation must not exchange for rank 0's."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(2))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        if self.training:
            self.state += 1 + distributed.get_rank()
        return super().get_loss(batch_data, criterion, device)


class Facts(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("facts")
        self.heard: list[str] = []
        self.before = self.within = self.after = None

    def on_evaluation_begin(self, dataset_info: dict[str, Any]) -> None:
        self.heard.append(f"begin {dataset_info['type']}")
        self.within = self.train_loop_obj.model.state.tolist()

    def on_evaluation_end(self, dataset_info: dict[str, Any]) -> None:
        self.heard.append("end")

    def on_batch_end(self) -> None:
        self.before = self.train_loop_obj.model.state.tolist()

    def on_epoch_end(self) -> None:
        mine = (self.heard, self.before, self.within, self.train_loop_obj.model.state.tolist())
        self.everyone = distributed.gather_object(mine)


# torch 2.13 has a new name for an argument that 2.6 to 2.12 know by its old one only.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
def test_all_ranks_hear_of_a_pass_and_keep_their_own_buffers() -> None:
    """One batch to evaluate for two ranks: the one without a batch hears of it as well."""
    facts = Facts()
    tl = make_loop(Carrying(), gpu_mode="ddp", devices=2)
    tl.validation_loader = DataLoader(make_data(5), 16)
    tl.fit(num_epochs=1, callbacks=[facts], ddp_model_args={"broadcast_buffers": False})
    steps = 4  # 101 samples, 2 x 16 a step
    for rank, (heard, before, within, after) in enumerate(facts.everyone):
        assert heard == ["begin validation", "end"]
        assert before == after == [steps * (1 + rank)] * 2
        assert within == [steps] * 2  # rank 0's


class Prototypes(Net):
    """A model with a buffer that a hook computes from predictions."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))


class Computes(AbstractCallback):
    """Predicts the training set when an evaluation begins, and keeps a mean over it in a buffer."""

    def __init__(self) -> None:
        super().__init__("computes")
        self.everyone: list[Any] = []

    def on_evaluation_begin(self, dataset_info: dict[str, Any]) -> None:
        tl = self.train_loop_obj
        if dataset_info["type"] == "validation":
            predicted, labels, _ = tl.predict_with_model(tl.train_loader, dataset_info={"type": "other"})
            tl.model.mean.copy_(torch.stack([(labels == k).double().mean() for k in range(3)]))
            self.rows = len(predicted)

    def on_evaluation_end(self, dataset_info: dict[str, Any]) -> None:
        if dataset_info["type"] == "validation":
            self.everyone.append(distributed.gather_object((self.rows, self.train_loop_obj.model.mean.tolist())))

    def on_epoch_end(self) -> None:
        self.everyone.append(distributed.gather_object((self.rows, self.train_loop_obj.model.mean.tolist())))


@pytest.mark.long
def test_a_hook_of_an_evaluation_predicts_on_all_ranks_and_its_buffer_stays() -> None:
    computes = Computes()
    tl = make_loop(Prototypes(), gpu_mode="ddp", devices=2)
    tl.fit(num_epochs=1, callbacks=[computes])
    tl.evaluate_loss_on_validation_set()  # outside of fit, with the same callbacks
    assert len(computes.everyone) == 3
    for first, second in computes.everyone:
        assert first == second == (len(tl.train_loader.dataset), first[1])
        assert sum(first[1]) > 0


class Teacher(AbstractCallback):
    """Evaluates another network in place of the model's: with statistics that each rank has from its own rows."""

    def __init__(self) -> None:
        super().__init__("teacher")
        self.layer = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Identity())
        self.own: list[Any] = []

    def on_train_begin(self) -> None:
        self.layer[0].running_var.fill_(1 + distributed.get_rank())  # type: ignore[operator, union-attr]

    def on_evaluation_begin(self, dataset_info: dict[str, Any]) -> None:
        model: Any = self.train_loop_obj.model
        self.before, model.fc = model.fc, nn.Sequential(model.fc, self.layer)

    def on_evaluation_end(self, dataset_info: dict[str, Any]) -> None:
        self.train_loop_obj.model.fc = self.before

    def on_epoch_end(self) -> None:
        self.own.append(distributed.gather_object(self.layer[0].running_var.tolist()))  # type: ignore[operator, union-attr]


@pytest.mark.long
def test_a_part_that_a_hook_puts_in_is_evaluated_with_the_buffers_of_rank_0() -> None:
    found = []
    for mode in ("single", "ddp"):
        torch.manual_seed(0)
        tl, teacher = make_loop(Net(), gpu_mode=mode, **({"devices": 2} if mode == "ddp" else {})), Teacher()
        for group in tl.optimizer.param_groups:  # type: ignore[union-attr]
            group["lr"] = 0.0
        tl.validation_loader = DataLoader(make_data(33), 8)
        tl.fit(num_epochs=1, callbacks=[teacher])
        found.append(tl.history["val_loss"])
    assert found[0] == pytest.approx(found[1])
    assert teacher.own == [[[1.0] * 3, [2.0] * 3]]
