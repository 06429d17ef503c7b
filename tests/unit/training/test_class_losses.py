"""Class weights and ignored targets in one process: accumulation, ``dp`` and evaluation equal one large batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kit import reference
from kit.class_losses import CASES, CLASS_WEIGHTS, Classifier, samples, trained
from kit.loops import cpu_loop
from kit.sharded_models import needs_fsdp_on_cpu
from kit.warned import warnings_of
from torch import nn, optim
from torch.nn import functional
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Sampler, TensorDataset

from trainloop import AbstractCallback, MultiLoss, TrainLoop, TTModel
from trainloop._support import reduction
from trainloop._support.reduction import class_criteria, divisor_of


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_step_as_one_batch(case: str) -> None:
    whole = trained(case, "single", batch_size=12)
    torch.testing.assert_close(trained(case, "single", batch_size=3, accumulation=4), whole, rtol=0, atol=1e-9)


@pytest.mark.long(every=2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_replicas_step_as_one_process(case: str, accumulation: int) -> None:
    whole = trained(case, "single", batch_size=12)
    size = 12 // accumulation
    replicas = trained(case, "dp", batch_size=size, accumulation=accumulation, devices=3)
    torch.testing.assert_close(replicas, whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_the_loss_of_an_evaluation_does_not_depend_on_its_batches(case: str) -> None:
    kind, criterion, data = CASES[case]
    model = Classifier(kind).double()
    loop: TrainLoop[Any] = TrainLoop(model, None, criterion=criterion, progress_bar=False)
    whole = loop.evaluate_model_loss(DataLoader(data, 100))
    assert loop.evaluate_model_loss(DataLoader(data, 4)) == pytest.approx(whole, rel=1e-12)
    with torch.no_grad():
        expected = model.get_loss(data[:], criterion, torch.device("cpu"))
    assert whole == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("mode", ["single", "dp"])
@pytest.mark.parametrize("loader", ["one batch", "a list of one batch", "a sampler with a wrong length"])
@pytest.mark.parametrize("case", ["weights, ignored", "smoothed function", "MultiLoss, own weights, sums"])
def test_the_loss_of_one_batch_is_that_of_an_evaluation(case: str, loader: str, mode: str) -> None:
    kind, criterion, data = CASES[case]
    model = Classifier(kind).double()
    devices = 3 if mode == "dp" else 1
    loop: TrainLoop[Any] = cpu_loop(model, None, criterion=criterion, gpu_mode=mode, devices=devices)
    batches: dict[str, Any] = {
        "one batch": DataLoader(data, 100),
        "a list of one batch": [data[:]],
        "a sampler with a wrong length": DataLoader(data, 5, sampler=FewerThanItSays(len(data))),
    }
    with torch.no_grad():
        expected = model.get_loss(data[:], criterion, torch.device("cpu"))
    assert loop.evaluate_model_loss(batches[loader]) == pytest.approx(expected.item(), rel=1e-12)


class FewerThanItSays(Sampler[int]):
    """Yields all indices, but has a length of one."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.number))

    def __len__(self) -> int:
        return 1


def test_one_process_is_bit_identical_to_a_hand_written_loop() -> None:
    data, criterion = samples(37), nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)
    ours = Classifier().double()
    theirs = copy.deepcopy(ours)
    loader = DataLoader(data, 7)
    optimizer = optim.SGD(ours.parameters(), lr=0.2)
    TrainLoop(ours, loader, optimizer=optimizer, criterion=criterion, progress_bar=False).fit(num_epochs=2)
    sgd = optim.SGD(theirs.parameters(), lr=0.2)
    reference.train(theirs, loader, sgd, reference.by_get_loss(criterion), num_epochs=2)
    assert reference.identical(ours, theirs)
    assert not criterion._forward_hooks


class Hooked(Classifier):
    """Its loss is computed where autograd's saved tensors have hooks: in a checkpoint, or with those that free them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.where, self.norm, self.calls = kind, nn.BatchNorm1d(6), 0

    def loss(self, x: Any, y: Any) -> Any:
        self.calls += 1
        scores = self(self.norm(x))
        if self.where == "smoothed":
            return functional.cross_entropy(scores, y, CLASS_WEIGHTS, label_smoothing=0.1) / 2
        return functional.cross_entropy(scores, y, CLASS_WEIGHTS) * torch.tensor(0.7)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        if self.where != "freed":
            return checkpoint(self.loss, *batch_data, use_reentrant=False)

        def unpack(held: list[torch.Tensor]) -> torch.Tensor:
            return held.pop()  # as a library that brings activations back to the GPU: once

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: [tensor], unpack):
            return self.loss(*batch_data)


@pytest.mark.parametrize("kind", ["product", "smoothed", "freed"])
def test_saved_tensors_with_hooks_are_not_read(kind: str) -> None:
    """A checkpoint would run its forward again, and change BatchNorm's statistics once more than without the loop."""
    torch.manual_seed(0)
    ours, loader = Hooked(kind).double(), DataLoader(samples(37), 7)
    theirs = copy.deepcopy(ours)
    optimizer = optim.SGD(ours.parameters(), lr=0.2)
    tl = TrainLoop(ours, loader, optimizer=optimizer, progress_bar=False)
    tl.fit(num_epochs=2)
    weighed: list[float] = []

    def loss_of(model: Any, batch: Any) -> Any:
        loss = model.get_loss(batch, None, torch.device("cpu"))
        weighed.append(float(loss.detach() * CLASS_WEIGHTS[batch[1][batch[1] >= 0]].sum()))
        return loss

    reference.train(theirs, loader, optim.SGD(theirs.parameters(), lr=0.2), loss_of, num_epochs=2)
    total = sum(weighed[len(loader) :])
    assert reference.identical(ours, theirs)
    assert ours.calls == theirs.calls
    targets = loader.dataset[:][1]  # type: ignore[index]
    assert tl.history["loss"][1] == pytest.approx(total / float(CLASS_WEIGHTS[targets[targets >= 0]].sum()), rel=1e-12)


def test_the_divisor_is_known_only_of_what_the_criterion_returned() -> None:
    scores, targets = torch.randn(8, 4, requires_grad=True), torch.tensor([0, 1, 2, 3, 0, 1, 2, -100])
    weight = CLASS_WEIGHTS.float()
    criterion = nn.CrossEntropyLoss(weight=weight)
    loss = criterion(scores, targets)
    assert divisor_of(loss) == pytest.approx(float(weight[targets[:-1]].sum()))
    assert divisor_of(loss * 0.5) == divisor_of(-loss / 2) == divisor_of(3 * loss) == divisor_of(loss)
    assert divisor_of(loss + 1.0) is None
    assert divisor_of(loss * 0.9 + scores.mean() * 0.1) is None
    for weights in (None, weight):
        plain = functional.cross_entropy(scores, targets, weights)
        smoothed = functional.cross_entropy(scores, targets, weights, label_smoothing=0.1)
        assert divisor_of(smoothed) == divisor_of(2 * smoothed) == divisor_of(plain) is not None
        assert divisor_of(smoothed + 2 * smoothed) is None
    assert divisor_of(loss * scores.mean()) is None  # a learned factor
    assert divisor_of(functional.cross_entropy(scores, scores.softmax(1))) is None  # over samples
    assert divisor_of(functional.mse_loss(scores, scores)) is None
    summed = nn.CrossEntropyLoss(reduction="sum")
    assert divisor_of(summed(scores, targets)) is None
    many = torch.randn(300, 4, requires_grad=True, dtype=torch.bfloat16)
    assert divisor_of(functional.cross_entropy(many, torch.zeros(300, dtype=torch.int64))) == 300  # bfloat16 has no 299
    with torch.no_grad():
        assert divisor_of(criterion(scores, targets)) is None
        with class_criteria(None, {"classes": [criterion]}):
            assert divisor_of(criterion(input=scores, target=targets)) == pytest.approx(divisor_of(loss))


class Anneals(AbstractCallback):
    """Changes the criterion in place, at the second epoch or within the first one."""

    def __init__(self, setting: str, value: Any, step: int) -> None:
        super().__init__("anneals")
        self.setting, self.value, self.step = setting, value, step

    def change(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step == self.step:
            setattr(loop.criterion, self.setting, self.value)

    on_epoch_begin = on_batch_begin = change


class SmoothsMore(Classifier):
    """The criterion's smoothing as the argument of a function."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        smoothing = criterion.label_smoothing
        return functional.cross_entropy(self(batch_data[0]), batch_data[1], criterion.weight, label_smoothing=smoothing)


@pytest.mark.parametrize(("setting", "value"), [("label_smoothing", 0.2), ("weight", CLASS_WEIGHTS)])
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("kind", [Classifier, SmoothsMore])
def test_a_setting_of_the_criterion_that_changes_in_training_weighs_micro_batches(
    kind: type[Classifier], setting: str, value: Any, step: int
) -> None:
    found = []
    for size, accumulation in ((12, 1), (4, 3)):
        torch.manual_seed(0)
        model, data = kind().double(), samples(36, ignored=-100)
        loop = TrainLoop(
            model, DataLoader(data, size), optimizer=optim.SGD(model.parameters(), lr=0.5),
            criterion=nn.CrossEntropyLoss(), progress_bar=False,
        )  # fmt: skip
        loop.fit(2, grad_accumulation=accumulation, callbacks=[Anneals(setting, value, step)])
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_an_entry_of_the_criteria_that_is_replaced_in_training_weighs_the_batches_of_an_evaluation() -> None:
    class OfDict(Classifier):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            return super().get_loss(batch_data, criterion["classes"], device)

    class Replaces(AbstractCallback):
        def on_epoch_begin(self) -> None:
            if self.train_loop_obj.epoch:
                self.train_loop_obj.criterion["classes"] = nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.1)

    model, data = OfDict().double(), samples(30, ignored=-100)
    loop = TrainLoop(
        model, DataLoader(data, 10), DataLoader(data, 4), None, optim.SGD(model.parameters(), lr=0.5),
        {"classes": nn.CrossEntropyLoss()}, progress_bar=False,
    )  # fmt: skip
    loop.fit(2, callbacks=[Replaces("replaces")])
    expected = nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.1)(model(data.tensors[0]), data.tensors[1])
    assert loop.history["val_loss"][-1] == pytest.approx(expected.item(), rel=1e-12)


def test_a_sum_of_losses_with_class_weights_is_warned_of_once() -> None:
    class Combined(Classifier):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            loss = super().get_loss(batch_data, criterion, device)
            penalty = 0.1 * (self.head.weight**2).sum()
            if self.kind == "one of two":  # the other keeps its divisor
                return MultiLoss({"sum": loss + penalty, "out": super().get_loss(batch_data, criterion, device)})
            return loss + penalty

    model = Combined().double()

    def loop(criterion: nn.Module, ignored: int = -100) -> TrainLoop[Any]:
        loader = DataLoader(samples(30, ignored=ignored), 15)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        return TrainLoop(model, loader, loader, optimizer=optimizer, criterion=criterion, progress_bar=False)

    with pytest.warns(UserWarning, match=r"does not show their sum.*\(loss, weight\)") as caught:
        loop(nn.CrossEntropyLoss()).fit(num_epochs=2, grad_accumulation=2)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="does not show their sum"):
        loop(nn.CrossEntropyLoss(ignore_index=1), ignored=1).fit(num_epochs=1)
    model.kind = "one of two"
    with pytest.warns(UserWarning, match="does not show their sum"):
        loop(nn.CrossEntropyLoss(ignore_index=1), ignored=1).fit(num_epochs=1)
    model.kind = "plain"
    # In one process, step by step and without evaluation, nothing is averaged: no warning, as warnings are errors here.
    alone = loop(nn.CrossEntropyLoss())
    alone.validation_loader = None
    alone.fit(num_epochs=1)
    # In dp, the losses of replicas are averaged.
    for devices in (1, 2):
        copies = {"gpu_mode": "dp", "accelerator": "cpu", "devices": devices}
        loader = DataLoader(samples(30, ignored=-100), 15)
        optimizer, criterion = optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()
        in_dp = TrainLoop(model, loader, optimizer=optimizer, criterion=criterion, progress_bar=False, **copies)
        with pytest.warns(UserWarning, match="and replicas") if devices > 1 else nullcontext():
            in_dp.fit(num_epochs=1)


class Functions(Classifier):
    """Adds up the results of two functions, or returns one of them; notes in which batches calls were looked for."""

    looked: list[bool]

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        self.looked.append(reduction._found.get() is not None)
        smoothing = 0.1 if self.kind == "smoothed" else 0.0
        loss = functional.cross_entropy(self(x), y, label_smoothing=smoothing)
        return loss + functional.nll_loss(self(x).log_softmax(1), y) if self.kind == "sum" else loss


@pytest.mark.parametrize("kind", ["plain", "smoothed", "sum"])
def test_calls_of_functions_are_looked_for_in_an_epochs_first_step(kind: str) -> None:
    model = Functions(kind).double()
    model.looked = []
    optimizer = optim.SGD(model.parameters(), lr=0.2)
    loop = TrainLoop(model, DataLoader(samples(64), 2), optimizer=optimizer, progress_bar=False)
    warned = warnings_of(lambda: loop.fit(num_epochs=2, grad_accumulation=2), "averages over the targets' weights")
    assert model.looked == [True, True, *[False] * 30] * 2
    assert len(warned) == (kind == "sum")


class Sparsemax(nn.Module):
    """A criterion that is not torch's, as in a library."""

    def __init__(self, ignore_index: int) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, scores: Any, target: Any) -> Any:
        counts = target != self.ignore_index
        return (scores.logsumexp(1) - scores.gather(1, target[:, None])[:, 0])[counts].sum() / counts.sum()


@pytest.mark.parametrize(("ignored", "batch", "warns"), [(1, 2, True), (-100, 2, False), (1, 64, False)])
def test_a_criterion_of_another_library_that_ignores_targets_is_named(ignored: int, batch: int, warns: bool) -> None:
    model = Classifier().double()
    sgd = optim.SGD(model.parameters(), lr=0.2)
    data = TensorDataset(samples(64).tensors[0], torch.arange(64) % 4)
    loop = TrainLoop(model, DataLoader(data, batch), None, None, sgd, Sparsemax(ignored), progress_bar=False)
    fit = {"num_epochs": 2, "grad_accumulation": 2 if batch < 64 else 1}
    assert len(warnings_of(lambda: loop.fit(**fit), "averages over the targets' weights")) == warns


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo reads it
def test_a_compiled_criterion_that_ignores_targets_trains() -> None:
    losses = []
    data = TensorDataset(samples(64).tensors[0], torch.arange(64) % 4)
    for compiles in (False, True):
        torch.manual_seed(1)
        model, criterion = Classifier().double(), Sparsemax(1)
        if compiles:
            criterion.compile(backend="eager")
        sgd = optim.SGD(model.parameters(), lr=0.2)
        loop = TrainLoop(model, DataLoader(data, 16), None, None, sgd, criterion, progress_bar=False)
        loop.fit(num_epochs=2)
        losses.append(loop.history["loss"])
    assert losses[0] == losses[1]


def test_calls_of_functions_are_looked_for_in_every_sixteenth_of_epochs_of_one_step() -> None:
    model = Functions("plain").double()
    model.looked = []
    optimizer = optim.SGD(model.parameters(), lr=0.2)
    TrainLoop(model, DataLoader(samples(12), 12), optimizer=optimizer, progress_bar=False).fit(num_epochs=20)
    assert [step for step, looked in enumerate(model.looked) if looked] == [0, 16]


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(CLASS_WEIGHTS)])
def test_gradients_of_single_samples_can_be_computed_in_the_loss(criterion: nn.Module) -> None:
    class Private(Classifier):
        """Trains on the mean of per-sample gradients, each clipped to a norm."""

        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            values = {name: p.detach() for name, p in self.named_parameters()}

            def of_one(values: Any, x: Any, y: Any) -> Any:
                scores = torch.func.functional_call(self, values, (x[None],))
                return criterion(scores, y[None]) + functional.cross_entropy(scores, y[None])

            each = torch.func.vmap(torch.func.grad(of_one), (None, 0, 0))(values, *batch_data)
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
            scales = (0.5 / norms).clamp(max=1) / len(norms)
            clipped = {name: torch.einsum("b...,b->...", g, scales) for name, g in each.items()}
            return sum((p * clipped[name]).sum() for name, p in self.named_parameters())

    data = samples(20)
    ours = Private().double()
    theirs = copy.deepcopy(ours)
    loader = DataLoader(data, 5)
    sgd = optim.SGD(ours.parameters(), lr=0.2)
    TrainLoop(ours, loader, loader, optimizer=sgd, criterion=criterion, progress_bar=False).fit(num_epochs=1)
    sgd = optim.SGD(theirs.parameters(), lr=0.2)
    reference.train(theirs, loader, sgd, reference.by_get_loss(criterion), num_epochs=1)
    assert reference.identical(ours, theirs)


class LossInForward(nn.Module):
    """As language models have it: ``forward`` returns the loss, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3, dtype=torch.float64)

    def forward(self, x: Any, y: Any) -> Any:
        scores = self.layer(x)
        return scores, functional.cross_entropy(scores, y, ignore_index=1) * 2


class Compiled(TTModel):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        return self.net(*batch_data)[1]

    def get_predictions(self, batch_data: Any, device: Any) -> Any:
        return self.net(*batch_data)[0], batch_data[1], {}


@pytest.mark.long
def test_a_compiled_model_that_returns_its_loss_is_evaluated_like_one_batch() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(10, 2, dtype=torch.float64), torch.arange(10) % 3
    y[:3] = 1  # the first batch has fewer targets
    net = LossInForward()
    loop: TrainLoop[Any] = TrainLoop(Compiled(torch.compile(net, backend="eager")), None, progress_bar=False)  # type: ignore[arg-type]
    loss = loop.evaluate_model_loss(DataLoader(TensorDataset(x, y), 4))
    assert loss == pytest.approx(net(x, y)[1].item(), rel=1e-12)


@pytest.mark.long
@pytest.mark.skipif(torch.__version__ < TorchVersion("2.13"), reason="its compiler can't attach a divisor")
@pytest.mark.parametrize("in_place", [True, False])
def test_a_loss_that_compiled_code_computes_weighs_micro_batches(in_place: bool) -> None:
    found = []
    x, y = samples(36).tensors
    for size, accumulation in ((12, 1), (4, 3)):
        torch.manual_seed(0)
        net = LossInForward()
        model = Compiled(net if in_place else torch.compile(net, backend="aot_eager"))  # type: ignore[arg-type]
        if in_place:
            net.compile(backend="aot_eager")
        loop = TrainLoop(
            model, DataLoader(TensorDataset(x[:, :2], y % 3), size), optimizer=optim.SGD(net.parameters(), lr=0.5),
            progress_bar=False,
        )  # fmt: skip
        loop.fit(2, grad_accumulation=accumulation)
        found.append((net.layer.weight.detach(), torch.tensor(loop.history["loss"])))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@torch.compile(backend="eager")
def compiled_loss(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores, y, ignore_index=1)


class WithCompiledLoss(Classifier):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return compiled_loss(self(batch_data[0]), batch_data[1])


def test_a_compiled_function_is_compiled_once_for_all_batches_of_evaluations() -> None:
    few, more = samples(12, ignored=1, first=2), samples(40, ignored=1, first=2)
    loop = TrainLoop(WithCompiledLoss().double(), None, criterion=None, progress_bar=False)
    loop.evaluate_model_loss(DataLoader(few, 4))
    with torch.compiler.set_stance("fail_on_recompile"):
        in_batches = loop.evaluate_model_loss(DataLoader(more, 4))
    assert in_batches == pytest.approx(loop.evaluate_model_loss(DataLoader(more, 40)), rel=1e-12)


class OverPadding(TTModel):
    """A classifier of the mean over a frozen encoder's output, also at masked positions."""

    def __init__(self, device: str | None) -> None:
        super().__init__()
        self.encode = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.encode.eval().requires_grad_(False)
        self.head = nn.Linear(8, 3)
        self.device_of_new = device

    def forward(self, x: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        with nullcontext() if self.device_of_new is None else torch.device(self.device_of_new):
            encoded = self.encode(x, src_key_padding_mask=masked)
            assert torch.empty(0).device.type == (self.device_of_new or "cpu")
        return self.head(encoded.mean(1))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> torch.Tensor:
        x, masked, y = batch_data
        return criterion(self(x, masked), y)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self(*batch_data[:2]), batch_data[2], {}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("device", [None, "meta"])  # a torch.device is a mode, in which torch computes otherwise, too
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", ["single", "dp", pytest.param("fsdp", marks=[needs_fsdp_on_cpu, pytest.mark.long])])
def test_an_encoders_output_at_masked_positions_is_that_of_a_hand_written_loop(
    mode: str, reduction: str, device: str | None
) -> None:
    torch.manual_seed(0)
    lengths, criterion = torch.randint(2, 6, (24,)), nn.CrossEntropyLoss(reduction=reduction)
    data = TensorDataset(torch.randn(24, 5, 8), torch.arange(5) >= lengths[:, None], torch.randint(3, (24,)))
    model = OverPadding(device)
    by_hand = copy.deepcopy(model)
    sgd = optim.SGD(by_hand.head.parameters(), lr=0.1)
    for batch in DataLoader(data, 6):
        by_hand.get_loss(batch, criterion, torch.device("cpu")).backward()
        sgd.step()
        sgd.zero_grad()
    loop: TrainLoop[Any] = cpu_loop(
        model,
        DataLoader(data, 6),
        optim.SGD(model.head.parameters(), lr=0.1),
        criterion,
        validation_loader=DataLoader(data, 4),
        gpu_mode=mode,
        devices=2 if mode == "dp" else 1,
    )
    loop.fit(num_epochs=1, fsdp_model_args={"shard": []})
    torch.testing.assert_close(model.state_dict(), by_hand.state_dict(), rtol=0, atol=1e-6)
    with torch.no_grad():
        expected = by_hand.eval().get_loss(data[:], criterion, torch.device("cpu"))
    assert loop.history["val_loss"] == [pytest.approx(expected.item() / (24 if reduction == "sum" else 1), abs=1e-6)]
