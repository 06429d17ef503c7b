"""Parameters frozen, unfrozen and added to the optimizer while ranks train; weights that differ are an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import reference
from kit.loops import cpu_loop
from kit.ranks import run_own_ranks
from kit.sharded_models import needs_fsdp_on_cpu
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TrainLoop, TTBasicModel, distributed
from trainloop.callbacks import ModelCheckpoint
from trainloop.errors import CheckpointError, WorkerFailedError


class Centers(nn.Module):
    """A criterion that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, y_pred: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.scale * y_pred, y)


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class Acts(AbstractCallback):
    """Does ``act(loop, moment)`` in each hook that a recipe might use."""

    def __init__(self, act: Any) -> None:
        super().__init__("acts")
        self.act = act

    def on_epoch_begin(self) -> None:
        self.act(self.train_loop_obj, f"epoch {self.train_loop_obj.epoch}")

    def on_batch_begin(self) -> None:
        self.act(self.train_loop_obj, f"before step {self.train_loop_obj.global_step + 1}")

    def on_after_optimizer_step(self) -> None:
        self.act(self.train_loop_obj, f"after step {self.train_loop_obj.global_step}")


def body_trains(moment: str, trains: bool = True, rank: int | None = None, group: bool = False) -> Any:
    def act(loop: TrainLoop, now: str) -> None:
        if now == moment and rank in (None, loop.rank):
            loop.model.body.requires_grad_(trains)
            if group:
                loop.optimizer.add_param_group({"params": list(loop.model.body.parameters()), "lr": 0.003})

    return act


def both(*acts: Any) -> Any:
    def act(loop: TrainLoop, now: str) -> None:
        for one in acts:
            one(loop, now)

    return act


def make(mode: str, frozen: bool = True, ranks: int = 2, in_group: bool = True, **options: Any) -> TrainLoop:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(60, 8, generator=generator, dtype=torch.float64)
    model, criterion = Net(), Centers()
    model.body.requires_grad_(not frozen)
    model.body[2].register_buffer("seen", torch.zeros(1))
    parts = [model, criterion] if in_group else [model.head, criterion]
    return cpu_loop(
        model,
        DataLoader(TensorDataset(x, (x @ torch.randn(8, 3, generator=generator).double()).argmax(1)), 12 // ranks),
        torch.optim.Adam([p for part in parts for p in part.parameters()], 0.01),
        criterion,
        gpu_mode=mode,
        seed=1,
        **options,
    )


def trained(tl: TrainLoop, act: Any, **options: Any) -> dict[str, Tensor]:
    tl.fit(num_epochs=3, callbacks=[Acts(act), *options.pop("more", [])], **options)
    return {**tl.model.state_dict(), "scale": tl.criterion.scale.detach().clone()}


def half_and_back(moment: str) -> Any:
    """As for a copy in float16 that is saved: the weights are the same afterwards. At an epoch's begin, of a part."""

    def act(loop: TrainLoop, now: str) -> None:
        if now == moment:
            converted = [*loop.model.children()][-1] if "epoch" in moment else loop.model
            weights = {name: value.clone() for name, value in converted.state_dict().items()}
            converted.half().double().load_state_dict(weights)

    return act


RECIPES: dict[str, tuple[bool, bool, Any]] = {  # frozen at first, in the optimizer from the start, what happens
    "nothing": (False, True, lambda loop, now: None),
    "unfrozen at an epoch's begin": (True, True, body_trains("epoch 1")),
    "unfrozen after a step": (True, True, body_trains("after step 3")),
    "unfrozen before a forward": (True, True, body_trains("before step 3")),
    "frozen before a forward": (False, True, body_trains("before step 3", False)),
    "frozen and unfrozen": (False, True, both(body_trains("after step 2", False), body_trains("epoch 2"))),
    "in another dtype and back": (False, True, both(half_and_back("after step 2"), half_and_back("epoch 2"))),
    "a group of its own": (True, False, body_trains("epoch 1", group=True)),
}


def all_recipes() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (frozen, in_group, act) in RECIPES.items():
        for accumulation in (1, 2):
            tl = make("ddp", frozen, distributed.get_world_size(), in_group)
            weights = trained(tl, act, grad_accumulation=accumulation)
            groups = [len(group["params"]) for group in tl.optimizer.param_groups]
            found[f"{name}, {accumulation}"] = weights, groups
    return found


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_trains_may_change_at_any_moment(tmp_path: Path, world_size: int) -> None:
    """As in one process; the criterion's own parameter too."""
    everyone = run_own_ranks(all_recipes, world_size, folder=tmp_path)
    for name, (frozen, in_group, act) in RECIPES.items():
        for accumulation in (1, 2):
            tl = make("single", frozen, 1, in_group)
            expected = trained(tl, act, grad_accumulation=accumulation)
            groups = [len(group["params"]) for group in tl.optimizer.param_groups]
            for facts in everyone:
                weights, their_groups = facts[f"{name}, {accumulation}"]
                assert reference.largest_difference(weights, expected) < 1e-9, (name, accumulation)
                assert their_groups == groups


@pytest.mark.filterwarnings("ignore:the checkpoint has state of callbacks")
@pytest.mark.parametrize("mode", ["single", pytest.param("ddp", marks=pytest.mark.slow)])
def test_an_added_group_comes_back_and_is_resumed(tmp_path: Path, mode: str) -> None:
    """Interrupted after the group was added: the checkpoint holds it, and that the parameters train."""
    options: dict[str, Any] = {"ranks": 1} if mode == "single" else {"devices": 2}
    keeper = ModelCheckpoint(str(tmp_path), every_n_epochs=None, every_n_steps=1, keep=99)
    whole = make(mode, in_group=False, **options)
    undisturbed = trained(whole, RECIPES["a group of its own"][2], more=[keeper])
    assert [len(group["params"]) for group in whole.optimizer.param_groups] == [3, 4]
    assert whole.optimizer.param_groups[1]["lr"] == 0.003
    assert all(p.requires_grad and p in whole.optimizer.state for p in whole.model.parameters())

    resumed = make(mode, in_group=False, **options)
    saved = str(next(tmp_path.glob("*step=00000007.pt")))
    assert reference.identical(trained(resumed, RECIPES["nothing"][2], resume_from=saved), undisturbed)
    assert [len(group["params"]) for group in resumed.optimizer.param_groups] == [3, 4]

    other = make(mode, **options)
    other.optimizer = torch.optim.Adam(list(other.model.body.parameters()))
    with pytest.raises(CheckpointError, match="parameter groups"):
        other.fit(num_epochs=1, resume_from=saved)


class OfDict(Net):
    """Its loss is computed by a module in a dict of criteria."""

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        return super().get_loss(batch_data, criterion["centers"][0], device)


@pytest.mark.filterwarnings("ignore:the checkpoint has state of callbacks", "ignore:.*are in no optimizer")
def test_an_added_group_of_a_criterion_in_a_dict_is_resumed(tmp_path: Path) -> None:
    def made() -> TrainLoop:
        tl = make("single", ranks=1)
        tl.criterion = {"centers": [tl.criterion], "other": len}
        tl.optimizer = torch.optim.Adam(tl.model.parameters(), 0.01)
        tl.model.__class__ = OfDict
        return tl

    def adds(loop: TrainLoop, now: str) -> None:
        if now == "epoch 1":
            loop.optimizer.add_param_group({"params": loop.criterion["centers"][0].parameters(), "lr": 0.1})

    keeper = ModelCheckpoint(str(tmp_path), every_n_epochs=None, every_n_steps=1, keep=99)
    whole, resumed = made(), made()
    whole.fit(num_epochs=3, callbacks=[Acts(adds), keeper])
    resumed.fit(num_epochs=3, callbacks=[Acts(adds)], resume_from=next(tmp_path.glob("*step=00000007.pt")))
    assert [len(group["params"]) for group in resumed.optimizer.param_groups] == [6, 1]
    assert whole.criterion["centers"][0].scale != 1
    assert torch.equal(resumed.criterion["centers"][0].scale, whole.criterion["centers"][0].scale)


class Drifts(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("drifts")

    def on_epoch_end(self) -> None:
        if self.train_loop_obj.rank == 1:
            with torch.no_grad():
                self.train_loop_obj.model.head.bias[1] += 0.25


def other_criterion_on_rank_1(loop: TrainLoop, now: str) -> None:
    if now == "epoch 1" and loop.rank == 1:
        loop.criterion = nn.GaussianNLLLoss()


def other_head_on_rank_1(loop: TrainLoop, now: str) -> None:
    if now == "epoch 1" and loop.rank == 1:
        loop.model.head = nn.Linear(8, 3).double()


@pytest.mark.parametrize(
    "callback, words",
    [
        pytest.param(
            Acts(other_criterion_on_rank_1),
            "a criterion of class GaussianNLLLoss, with means of losses on rank 1, but a criterion of class Centers",
            id="a criterion without its parameters",
            marks=pytest.mark.long,
        ),
        pytest.param(
            Acts(other_head_on_rank_1),
            "rank 1 has replaced, added or removed parameters",
            id="another module",
            marks=pytest.mark.long,
        ),
        pytest.param(
            Acts(body_trains("epoch 1", rank=1)),
            "body.2.weight, body.2.bias: trained on rank 1 (requires_grad), but frozen on rank 0",
            id="at an epoch's begin",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Acts(body_trains("after step 3", rank=1)),
            "rank 1 changed requires_grad of body.0.bias, body.0.weight, body.2.bias, body.2.weight, but rank 0",
            id="after a step",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Drifts(), "weights differ: head.bias differs by up to 0.25 between rank 0 and rank 1", id="weights"
        ),
    ],
)
def test_ranks_that_differ_are_named(callback: Any, words: str) -> None:
    tl = make("ddp", devices=2, timeout=8)
    with pytest.raises(WorkerFailedError) as caught:
        tl.fit(num_epochs=3, callbacks=[callback])
    assert words in str(caught.value)


class OwnRate(AbstractCallback):
    """Sets the rate from the loss of this rank's batch, or from the mean of all ranks."""

    def __init__(self, tensor: bool = False, averaged: bool = False) -> None:
        super().__init__("own rate")
        self.tensor, self.averaged = tensor, averaged

    def on_batch_end(self) -> None:
        loop = self.train_loop_obj
        loss = float(loop.last_loss)  # type: ignore[arg-type]
        rate = 0.01 * (distributed.all_reduce(loss, "mean") if self.averaged else loss)
        loop.optimizer.param_groups[0]["lr"] = torch.tensor(rate) if self.tensor else rate


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_rates_that_differ_between_ranks_are_an_error_even_if_ranks_have_different_shards(mode: str) -> None:
    for own in (OwnRate(), OwnRate(tensor=True)):
        with pytest.raises(WorkerFailedError, match=r"the ranks' optimizers differ: rank 0 has lr=.* group 0\), but"):
            make(mode, devices=2).fit(num_epochs=1, callbacks=[own])
    loop = make(mode, devices=2)
    loop.fit(num_epochs=1, callbacks=[OwnRate(averaged=True)])
    assert loop.global_step > 1


class HeadOnly(Net):
    """Returns what the optimizer should train from ``parameters``, as some libraries' models do."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.head.parameters(recurse)


@needs_fsdp_on_cpu
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*require gradients, but are in no optimizer:UserWarning")
def test_a_model_may_return_a_part_of_its_parameters() -> None:
    found = {}
    for mode in ("single", "dp", "ddp", "fsdp"):
        model = HeadOnly()
        x, y = torch.randn(22, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(22) % 3
        loader = DataLoader(TensorDataset(x, y), 6 if mode in ("single", "dp") else 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        devices = 1 if mode == "single" else 2
        loop = cpu_loop(model, loader, optimizer, gpu_mode=mode, devices=devices)
        loop.fit(num_epochs=2, grad_accumulation=2)
        found[mode] = model.state_dict()
        assert torch.equal(found[mode]["body.0.weight"], Net().body[0].weight)
        torch.testing.assert_close(found[mode], found["single"], rtol=0, atol=1e-12)


class StepsRarely(AbstractCallback):
    """A hand-made second optimizer: the body steps at the end of an epoch, by the gradients of all its batches."""

    def on_train_begin(self) -> None:
        for p in self.train_loop_obj.model.body.parameters():
            p.grad = torch.zeros_like(p)

    def on_epoch_end(self) -> None:
        with torch.no_grad():
            for p in self.train_loop_obj.model.body.parameters():
                p.sub_(0.1 * p.grad)
                p.grad.zero_()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*require gradients, but are in no optimizer:UserWarning")
def test_gradients_that_a_callback_set_add_up_over_the_steps_of_an_epoch() -> None:
    x = torch.randn(36, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    models = []
    for mode, ranks in [("single", 1), ("ddp", 2)]:
        model = Net()
        loop = cpu_loop(
            model,
            DataLoader(TensorDataset(x, x.argmax(1) % 3), batch_size=12 // ranks),
            torch.optim.SGD(model.head.parameters(), lr=0.1),
            gpu_mode=mode,
            devices=ranks,
        )
        loop.fit(num_epochs=2, callbacks=[StepsRarely("steps rarely")])
        models.append(model)
    assert reference.largest_difference(*models) < 1e-12
