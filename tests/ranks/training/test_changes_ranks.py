"""What callbacks change in ranks: the table of changes and moments in ``ddp`` and ``fsdp``, and resumes after them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.changes import (
    CHANGES,
    MOMENTS,
    Net,
    growing_loop,
    loop_of,
    resumed_differs,
    resumes_alike,
    trained,
    trained_on_growing,
)
from kit.sharded_models import needs_fsdp_on_cpu
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback
from trainloop.callbacks import ModelCheckpoint
from trainloop.errors import TrainLoopError

pytestmark = pytest.mark.filterwarnings("ignore:.*(was assigned|was changed) in the ranks:UserWarning")

_SHARDED = "of which this rank has a shard only"
FSDP_REFUSES = {
    "data_of_parameter": r"p\.data = \.\.\. on a parameter that is sharded",
    "from_vector": _SHARDED,
    "copied": _SHARDED,
    "enlarged": _SHARDED,
    "pruned": _SHARDED,
    "removed_parameter": r"head\.bias was removed by a callback",
    "parametrized": r"head\.weight was removed by a callback",
}
"""Changes that FSDP can't follow: an error names each of them, at each moment within a run."""
MODES = ("ddp", "fsdp")


def check(change: str, mode: str, moment: str) -> None:
    refused = FSDP_REFUSES.get(change) if mode == "fsdp" and moment != "between fits" else None
    if (change, moment) == ("accumulated", "between fits"):
        refused = "can't be assigned between calls of fit"
    if refused is not None:
        with pytest.raises(TrainLoopError, match=refused):
            trained(change, mode, moment)
        return
    weights, losses, after = trained(change, mode, moment)
    assert max(weights, losses, after) < 1e-9, (change, mode, moment, weights, losses, after)


@pytest.mark.long
@pytest.mark.parametrize(
    "change, mode, moment",
    [
        ("new_loader", "ddp", "on_epoch_end"),
        ("enlarged", "ddp", "on_batch_begin"),
        ("pruned", "ddp", "on_epoch_begin"),
        ("criterion_of_sums", "ddp", "on_batch_end"),
        ("optimizer", "fsdp", "on_epoch_end"),
        ("data_of_parameter", "fsdp", "on_batch_begin"),
        ("scaled_data", "fsdp", "on_batch_begin"),
    ],
)
def test_a_change_in_ranks_has_its_effect_and_comes_back(change: str, mode: str, moment: str) -> None:
    check(change, mode, moment)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", MODES)
def test_every_change_in_ranks_has_its_effect_at_every_moment(change: str, mode: str) -> None:
    for moment in MOMENTS:
        check(change, mode, moment)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", MODES)
def test_a_run_in_ranks_resumed_after_a_change_is_the_uninterrupted_one(change: str, mode: str, tmp_path: Path) -> None:
    if mode == "fsdp" and change in FSDP_REFUSES:
        with pytest.raises(TrainLoopError, match=FSDP_REFUSES[change]):
            resumed_differs(change, mode, "on_epoch_begin", tmp_path)
        return
    for moment in ("on_epoch_begin", "on_batch_end"):
        if resumes_alike(change, moment):
            assert resumed_differs(change, mode, moment, tmp_path / moment) == 0, moment


class Factored(torch.optim.Optimizer):
    """Has a statistic for each row of a parameter, or of a rank's shard of it; the last ones are in a list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            own, gradient = (t.to_local() if hasattr(t, "to_local") else t for t in (p, p.grad))
            squares = gradient.pow(2).flatten(1).mean(1) if gradient.ndim > 1 else gradient.pow(2)
            state = self.state[p]
            state["rows"] = squares if "rows" not in state else 0.9 * state["rows"] + 0.1 * squares
            state["last"] = [*state.get("last", [])[-1:], state["rows"].clone()]
            rows = sum(state["last"])
            own.sub_(0.05 * gradient / (rows.sqrt() + 1e-3).reshape(-1, *[1] * (gradient.ndim - 1)))


@pytest.mark.long
def test_optimizer_state_of_shards_is_saved_and_kept_for_each_rank(tmp_path: Path) -> None:
    def fit(*epochs: int, folder: str = "none", resume: str | None = None, mode: str = "fsdp") -> torch.Tensor:
        loop = loop_of("rate", mode, seed=0)
        loop.optimizer = Factored(loop.model.parameters())
        for number in epochs:
            loop.fit(num_epochs=number, callbacks=[ModelCheckpoint(tmp_path / folder)], resume_from=resume)
        return loop.model.body.weight.detach()

    whole = fit(4)
    assert torch.equal(fit(2, 2, folder="twice"), whole)
    fit(2, folder="parts")
    assert torch.equal(fit(4, folder="parts", resume="last"), whole)
    with pytest.raises(TrainLoopError, match="state of shards on 2 ranks of fsdp"):
        fit(6, folder="parts", resume="last", mode="single")


class Steps(AbstractCallback):
    """State of each rank's own; rank 1 ends the first epoch."""

    def __init__(self) -> None:
        super().__init__("steps")
        self.own = 0

    def on_train_begin(self) -> None:
        self.own = self.own or 100 * self.train_loop_obj.rank

    def on_batch_end(self) -> None:
        self.own += 1
        loop = self.train_loop_obj
        if loop.rank == 1 and loop.epoch == 0 and loop.global_step == 2:
            loop.end_epoch()

    def rank_state_dict(self) -> dict[str, Any]:
        return {"own": self.own}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        self.own = state["own"]

    def on_epoch_end(self) -> None:
        self.log("own of all ranks", float(self.own), reduce="sum")


class RemovesBuffer(AbstractCallback):
    def on_train_end(self) -> None:
        del self.train_loop_obj.model.last


@pytest.mark.long
def test_the_last_buffer_may_be_removed_while_ranks_train() -> None:
    loop = loop_of("rate", "ddp")
    loop.model.register_buffer("last", torch.ones(1))
    removes = RemovesBuffer("removes")
    removes.on_epoch_begin = removes.on_train_end  # type: ignore[method-assign]
    removes.on_train_end = removes.on_train_begin  # type: ignore[method-assign]
    loop.fit(num_epochs=1, callbacks=[removes])
    assert "last" not in loop.model.state_dict()
    assert loop.global_step == 4


@pytest.mark.long
def test_ranks_own_states_the_end_of_an_epoch_and_the_last_buffer(tmp_path: Path) -> None:
    def fit(epochs: int, folder: str, resume: str | None = None) -> tuple[list[float], int, Net]:
        loop = loop_of("rate", "ddp", seed=0)
        loop.model.register_buffer("last", torch.ones(1))
        callbacks: list[AbstractCallback] = [Steps(), ModelCheckpoint(tmp_path / folder)]
        last = [RemovesBuffer("removes")] if folder == "whole" else []
        loop.fit(num_epochs=epochs, callbacks=[*callbacks, *last], resume_from=resume)
        return loop.history["own of all ranks"], loop.global_step, loop.model

    own, steps, model = fit(3, "whole")
    # All ranks end the first epoch at the same step, which may be one later than rank 1's.
    first = steps - 8
    assert first in (2, 3)
    assert own == [100 + 2 * first, 100 + 2 * (first + 4), 100 + 2 * (first + 8)]
    assert "last" not in model.state_dict()
    before, _, _ = fit(2, "parts")
    again, steps_again, _ = fit(3, "parts", "last")
    assert again == [*before, before[-1] + 8]
    assert steps_again in (10, 11)


@pytest.mark.long
def test_what_hooks_assign_in_ranks_comes_back_and_data_are_warned_of() -> None:
    class Assigns(AbstractCallback):
        def on_epoch_begin(self) -> None:
            loop = self.train_loop_obj
            loop.criterion = nn.L1Loss()
            loop.gradient_clip_norm = 0.5
            loop.end_auto_eval = 2
            loop.train_loader.dataset.tensors = loop.train_loader.dataset.tensors

    loop = loop_of("rate", "ddp")
    with pytest.warns(UserWarning, match=r"tl\.train_loader or its dataset or sampler was changed in the ranks"):
        loop.fit(num_epochs=2, callbacks=[Assigns("a"), _Longer("b")])
    assert type(loop.criterion) is nn.L1Loss
    assert (loop.gradient_clip_norm, loop.end_auto_eval) == (0.5, 2)


@pytest.mark.long
def test_plain_attributes_that_ranks_delete_or_register_hide_nothing_in_the_caller() -> None:
    class Registers(AbstractCallback):
        gone: None

        def on_train_end(self) -> None:
            model = self.train_loop_obj.model
            del model.gone, model.mean
            model.register_buffer("mean", torch.ones(2))
            model.part, model.weight = nn.Linear(1, 1), nn.Parameter(torch.ones(3))
            del self.gone

    loop = loop_of("rate", "ddp")
    model = loop.model
    model.gone = model.mean = model.part = model.weight = None
    registers = Registers("registers")
    registers.gone = None
    loop.fit(num_epochs=1, callbacks=[registers])
    assert not hasattr(model, "gone")
    assert not hasattr(registers, "gone")
    assert (model.mean.tolist(), model.weight.tolist(), type(model.part)) == ([1, 1], [1, 1, 1], nn.Linear)


class _Draws(TensorDataset):
    """Draws noise from a generator of its own."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.noise = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        x, *others = super().__getitem__(index)
        return x + self.noise.random(), *others


@pytest.mark.long
def test_state_of_a_dataset_that_does_not_come_back_from_ranks_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    loop = loop_of("rate", "ddp")
    loop.train_loader = DataLoader(_Draws(*loop.train_loader.dataset.tensors), 4)
    loop.fit(num_epochs=2)
    text = "the training changes train_loader.dataset.noise. Checkpoints do not contain this, and it does not come back"
    assert " ".join(capfd.readouterr().err.split()).count(text) == 1


class _Shuffles(AbstractCallback):
    def __init__(self, same: bool) -> None:
        super().__init__("shuffles")
        self.same = same

    def on_epoch_begin(self) -> None:
        loop = self.train_loop_obj
        data, draws = loop.train_loader.dataset, np.random.default_rng(loop.epoch) if self.same else np.random
        order = draws.permutation(len(data))
        data.tensors = tuple(tensor[order] for tensor in data.tensors)


@pytest.mark.long
@pytest.mark.parametrize("same", [True, False])
def test_a_hook_that_shuffles_data_by_numbers_that_differ_between_ranks_is_named(
    same: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "on_epoch_begin of _Shuffles draws random numbers, which differ between ranks"
    loop_of("rate", "ddp").fit(num_epochs=2, callbacks=[_Shuffles(same)])
    assert " ".join(capfd.readouterr().err.split()).count(text) == (not same)
    loop_of("rate", "single").fit(num_epochs=2, callbacks=[_Shuffles(same)])
    assert text not in " ".join(capfd.readouterr().err.split())


class _Reads(AbstractCallback):
    """Reads a loader, and may shuffle data by torch's numbers."""

    def __init__(self, shuffles: bool) -> None:
        super().__init__("reads")
        self.shuffles = shuffles

    def on_epoch_begin(self) -> None:
        dataset = self.train_loop_obj.train_loader.dataset
        next(iter(DataLoader(dataset, 2, shuffle=True)))
        if self.shuffles:
            order = torch.randperm(len(dataset))
            dataset.tensors = tuple(tensor[order] for tensor in dataset.tensors)


@pytest.mark.long
@pytest.mark.parametrize("shuffles", [True, False])
def test_a_hook_that_only_reads_a_loader_is_not_said_to_draw(shuffles: bool, capfd: pytest.CaptureFixture[str]) -> None:
    loop_of("rate", "ddp").fit(num_epochs=2, callbacks=[_Reads(shuffles)])
    text = "on_epoch_begin of _Reads draws random numbers"
    assert " ".join(capfd.readouterr().err.split()).count(text) == shuffles


class _Longer(AbstractCallback):
    def on_epoch_end(self) -> None:
        data = self.train_loop_obj.train_loader.dataset
        data.tensors = tuple(torch.cat([tensor, tensor]) for tensor in data.tensors)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:the checkpoint has state of callbacks not in this fit")
@pytest.mark.parametrize("part", ["dataset", "sampler"])
def test_set_epoch_may_change_the_length_of_an_epoch_in_ranks(part: str, tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, every_n_epochs=None, every_n_steps=1, keep=99)
    settings: dict[str, Any] = {"gpu_mode": "ddp", "accelerator": "cpu", "devices": 2}
    whole, _ = growing_loop(part, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as one about data that were changed in the ranks
        whole.fit(num_epochs=4, callbacks=[keeper])
    torch.testing.assert_close(whole.model.state_dict(), trained_on_growing(4), rtol=0, atol=1e-12)
    resumed, _ = growing_loop(part, **settings)
    resumed.fit(num_epochs=4, resume_from=sorted(tmp_path.glob("*.pt"))[7])  # in the middle of the third epoch
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


class Calls(AbstractCallback):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__("calls")
        self.function = function

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        self.function(self.train_loop_obj.model.body.weight)


def gradient_of_copy(p: Any) -> Any:
    """Request a shard's gradient after a forward of its unit, which has used a gathered copy."""
    with torch.enable_grad():
        return torch.autograd.grad(p.full_tensor().detach().requires_grad_().sum(), p)


@needs_fsdp_on_cpu
@pytest.mark.long
def test_what_hooks_cannot_do_with_shards_is_explained() -> None:
    """Torch reports each of the first operations in other words, and says nothing about lost changes of parts."""
    unknown = f"Calls.on_after_gradient_update uses .* {_SHARDED}"
    lost = (
        r"would change a copy of a part of a sharded tensor, such as p.grad\[:3\], and the tensor would stay the same"
    )
    functions: list[tuple[str, Callable[[Any], Any]]] = [
        (unknown, lambda p: p.data.renorm_(2, 0, 1.0)),
        (unknown, lambda p: torch.zeros((), dtype=p.dtype).add_(p.grad.norm())),  # an AssertionError without text
        (unknown, lambda p: p.grad.mul_(torch.ones(p.shape, dtype=p.dtype))),
        (unknown, gradient_of_copy),
        (lost, lambda p: p.grad.__setitem__(slice(1), 0)),
        (lost, lambda p: p.grad[:2].fill_(0)),
        (lost, lambda p: p.grad[0].__imul__(0)),
        (lost, lambda p: p.grad.view(-1)[:2].zero_()),
        (lost, lambda p: p.data.chunk(2)[0][:, 1].clamp_(0, 1)),
        (lost, lambda p: p.data[:2].copy_(p.data[1:3])),
    ]
    with loop_of("rate", "fsdp").ranks():
        for message, function in functions:
            with pytest.raises(TrainLoopError, match=message):
                loop_of("rate", "fsdp").fit(num_epochs=1, callbacks=[Calls(function)])


@needs_fsdp_on_cpu
@pytest.mark.long
def test_hooks_change_columns_of_shards_and_rows_by_a_mask_as_in_one_process() -> None:
    def change(p: Any) -> None:
        p.grad[:, 0].zero_()
        p.grad.select(1, 1)[...] *= 2
        mask = torch.ones(p.shape, dtype=p.dtype)
        mask[:2] = 0
        if hasattr(p, "device_mesh"):
            mask = distribute_tensor(mask, p.device_mesh, p.placements, src_data_rank=None)
        p.grad.mul_(mask)

    one, two = loop_of("rate", "single"), loop_of("rate", "fsdp")
    for loop in (one, two):
        loop.fit(num_epochs=1, callbacks=[Calls(change)])
    torch.testing.assert_close(two.model.state_dict(), one.model.state_dict(), rtol=0, atol=1e-12)


class Doubles(AbstractCallback):
    """Replaces a parameter, and not the one in the optimizer, as in some recipes for a new head."""

    def __init__(self, hook: str) -> None:
        super().__init__("doubles")
        setattr(self, hook, self.double)

    def double(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step == 2:
            loop.model.body.weight = nn.Parameter(loop.model.body.weight.detach() * 2)


@needs_fsdp_on_cpu
@pytest.mark.long
def test_a_shard_that_a_hook_replaces_by_another_is_refused() -> None:
    """FSDP would put its own parameter back at the next forward."""
    with loop_of("rate", "fsdp").ranks():
        for hook in ("on_batch_begin", "on_after_optimizer_step", "on_epoch_end"):
            loop = loop_of("rate", "fsdp")
            loop.test_loader = loop.train_loader  # evaluated after the last step
            with pytest.raises(TrainLoopError, match=r"body\.weight was replaced by a callback or in get_loss"):
                loop.fit(num_iterations=2 if hook == "on_epoch_end" else 4, callbacks=[Doubles(hook)])


@needs_fsdp_on_cpu
@pytest.mark.long
def test_a_parameter_that_get_loss_replaces_is_refused() -> None:
    """As an initialization from the first batch does."""
    loop = loop_of("rate", "fsdp")
    kind = type(loop.model)

    class Replaces(kind):  # type: ignore[misc, valid-type]
        def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
            if not self.training or not getattr(self, "begun", False):
                self.begun, self.body.weight = True, nn.Parameter(self.body.weight.detach() * 2)
            return super().get_loss(batch_data, criterion, device)

    loop.model.__class__ = Replaces
    with pytest.raises(TrainLoopError, match=r"body\.weight was replaced by a callback or in get_loss"):
        loop.fit(num_epochs=1)
