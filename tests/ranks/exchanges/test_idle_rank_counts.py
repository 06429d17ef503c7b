"""Ranks with fewer batches than others: counts in attributes of modules, as torchmetrics has, and evaluations."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from kit.loops import cpu_loop
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainloop import TrainLoop, TTBasicModel
from trainloop import distributed as ranks
from trainloop.errors import ConfigurationError, WorkerFailedError

ROWS, BATCH = 21, 8
KINDS = (
    *("in_place", "number", "each", "by_name", "nested", "array", "own array", "own tuple"),
    *("meter", "values of a meter", "draws"),
)
# A model here keeps an alias of a weight, for the dummy forward of an idle rank.
pytestmark = pytest.mark.filterwarnings("ignore:.*shares the memory of fc.weight, which is gathered:UserWarning")


class Meter:
    """As in many training scripts."""

    def __init__(self) -> None:
        self.sum, self.values = torch.zeros(()), [[0]]

    def update(self, n: int) -> None:
        self.sum += n
        self.values[-1].append(n)
        self.last = n


class Array(np.ndarray):
    """As libraries of physical units derive one."""


class Irreps(tuple[Any, ...]):
    """As e3nn's: what the length would count is ambiguous."""

    def __len__(self) -> int:
        raise NotImplementedError


class Counts(nn.Module):
    """Counts samples in a tensor, in numbers, in containers and in objects, none of which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.in_place, self.number = torch.zeros(()), 0
        self.each: list[int] = []
        self.by_name = {"samples": 0}
        self.nested: dict[str, Any] = {"of": collections.defaultdict(list), "last": collections.deque(maxlen=2)}
        self.array, self.meters = np.zeros(1), ({"samples": Meter()},)
        self.own_array, self.own_tuple = np.zeros(1).view(Array), Irreps(([0],))
        self.expanded = torch.ones(1, 1).expand(3, 3)  # can't be written in place
        self.sparse = torch.eye(3).to_sparse()
        self.output: Tensor | None = None
        self.generator = torch.Generator().manual_seed(0)

    def draws(self) -> int:
        other, number = torch.Generator().manual_seed(0), 0
        while not torch.equal(other.get_state(), self.generator.get_state()):
            torch.rand(1, generator=other)
            number += 1
        return number

    def forward(self, x: Tensor) -> Tensor:
        for _ in x:
            torch.rand(1, generator=self.generator)
        self.in_place += len(x)
        self.number += len(x)
        self.each.append(len(x))
        self.by_name["samples"] += len(x)
        self.nested["of"]["samples"].append(len(x))
        self.nested["last"].append(len(x))
        self.array += len(x)
        self.own_array += len(x)
        self.own_tuple[0][0] += len(x)
        self.meters[0]["samples"].update(len(x))
        self.output = x.detach()
        return x


class Counted(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.training_counts, self.evaluation_counts = Counts(), Counts()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        counts = self.training_counts if self.training else self.evaluation_counts
        self.weight_of_forward = self.fc.weight.detach()
        return self.fc(counts(x))

    def on_evaluation_end(self, dataset_info: dict[str, Any]) -> None:
        for counts in (self.training_counts, self.evaluation_counts):
            found = [counts.in_place.item(), counts.number, sum(counts.each), counts.by_name["samples"]]
            meter = counts.meters[0]["samples"]
            found += [sum(counts.nested["of"]["samples"]), counts.array.item(), counts.own_array.item()]
            found += [counts.own_tuple[0][0], meter.sum.item(), sum(meter.values[0]), counts.draws()]
            everywhere = ranks.all_reduce(torch.tensor(found), reduce="sum")
            name = "trained" if counts is self.training_counts else "evaluated"
            for kind, total in zip(KINDS, everywhere.tolist(), strict=True):
                self.log(f"{name}_{kind}", total)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("mode", ["single", "ddp", "fsdp"])
def test_each_sample_is_counted_once(mode: str) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(ROWS, 4), torch.arange(ROWS) % 3)
    few = TensorDataset(*data[:5])  # one batch: of two ranks, one has none
    model = Counted()
    loop = cpu_loop(
        model, DataLoader(data, BATCH), validation_loader=DataLoader(few, BATCH), gpu_mode=mode, devices=2, seed=1
    )
    loop.fit(num_epochs=1)
    for kind in KINDS:
        assert loop.history[f"val_trained_{kind}"] == [ROWS]
        assert loop.history[f"val_evaluated_{kind}"] == [5]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_an_order_that_ranks_compare_is_compared_after_the_last_batch_of_all_ranks(mode: str) -> None:
    """Three batches in an order of the user's generator: the rank with one batch less reads its end earlier."""
    data = TensorDataset(torch.randn(ROWS, 4), torch.arange(ROWS) % 3)

    def evaluated(mode: str, devices: int) -> tuple[Any, Any]:
        torch.manual_seed(0)
        loader = DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
        loop = cpu_loop(
            Counted(), None, validation_loader=loader, test_loader=loader, gpu_mode=mode, devices=devices, seed=1
        )
        return loop.evaluate_loss_on_validation_set(), loop.predict_on_test_set()[0]

    (loss, rows), (expected, expected_rows) = evaluated(mode, 2), evaluated("single", 1)
    assert loss == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(rows, expected_rows)


class SaysZero:
    """Packs samples, and estimates its length badly."""

    def __iter__(self) -> Any:
        yield [0, 1, 2]

    def __len__(self) -> int:
        return 0


def test_a_batch_sampler_that_says_it_has_no_batches_is_named() -> None:
    rows = TensorDataset(torch.zeros(3, 4), torch.zeros(3).long())
    loader = DataLoader(rows, batch_sampler=SaysZero())  # type: ignore[arg-type]
    loop = TrainLoop(Counted(), None, loader, criterion=nn.CrossEntropyLoss(), progress_bar=False)
    with pytest.raises(ConfigurationError, match=r"the length of its SaysZero is 0, although the dataset has data"):
        loop.evaluate_loss_on_validation_set()


@pytest.mark.parametrize("mode", ["single", "ddp"])
def test_a_loader_without_batches_is_an_error_before_ranks_start(mode: str) -> None:
    loader = DataLoader(TensorDataset(torch.zeros(3, 4), torch.zeros(3).long()), BATCH, drop_last=True)
    loop = cpu_loop(Counted(), None, validation_loader=loader, gpu_mode=mode, devices=2)
    with pytest.raises(
        ConfigurationError, match=r"^validation_loader has no batches: its dataset is empty, or smaller"
    ):
        loop.evaluate_loss_on_validation_set()


class CountingLoss(nn.CrossEntropyLoss):
    """A criterion that counts the samples of training."""

    number = 0

    def forward(self, scores: Tensor, y: Tensor) -> Tensor:
        if self.training:
            self.number += len(y)
        return super().forward(scores, y)


class SeenByCriterion(Counted):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        self.criterion_of_last_batch = [criterion]
        return super().get_loss(batch_data, criterion, device)

    def on_evaluation_end(self, dataset_info: dict[str, Any]) -> None:
        (criterion,) = self.criterion_of_last_batch
        self.log("counted", ranks.all_reduce(criterion.number, reduce="sum"))


def test_a_criterion_counts_each_sample_once() -> None:
    data = TensorDataset(torch.randn(17, 4), torch.randint(3, (17,)))
    model = SeenByCriterion()
    loop = cpu_loop(
        model,
        DataLoader(data, 8),
        criterion=CountingLoss(),
        validation_loader=DataLoader(data, 8),
        gpu_mode="fsdp",
        devices=2,
    )
    loop.fit(1)
    assert loop.history["val_counted"] == [17]


class CountsSteps(Counted):
    steps = 0

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        self.steps += 1
        return super().get_loss(batch_data, criterion, device)


class CountsAndYields(CountsSteps):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        yield super().get_loss(batch_data, criterion, device)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", [CountsSteps, CountsAndYields])
@pytest.mark.long(but=1)
def test_a_count_of_steps_that_would_differ_between_ranks_is_warned_of(
    kind: Any, mode: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data = TensorDataset(torch.randn(18, 4), torch.randint(3, (18,)))
    loader = DataLoader(data, batch_sampler=[[*range(8)], [*range(8, 16)], [16, 17]])  # one batch for each rank
    model = kind()
    loop = cpu_loop(model, loader, gpu_mode=mode, devices=2)
    loop.fit(1)
    said = "get_loss changes the attribute steps, but step 2 has no samples for rank 1, where"
    assert capfd.readouterr().err.count(said) == 1


class CountsEvaluations(TTBasicModel):
    """What an evaluation changes, in a loss that is the same in training and in evaluations."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.kind, self.steps, self.by_name, self.seen = kind, 0, {"steps": 0}, 0.0
        self.register_buffer("queue", torch.zeros(3))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        scores = self.fc(x)
        self.seen = float(scores.detach().sum())  # overwritten by each batch
        if self.kind == "number" or (self.kind == "in training" and self.training):
            self.steps += 1
        elif self.kind == "in a dict":
            self.by_name["steps"] += 1
        elif self.kind == "in a vocabulary":
            self.by_name.update({"steps": self.by_name["steps"] + 1}, **{f"word {i}": i for i in range(1001)})
        elif self.kind == "buffer":
            self.queue.lerp_(self.all_gather(scores.detach(), concat=True).mean(0), 0.5)
        return criterion(scores, y)


class ResetsCounts(CountsEvaluations):
    def on_evaluation_begin(self, dataset_info: dict[str, Any]) -> None:
        self.steps = 0


@pytest.mark.parametrize(
    ("model", "kind", "name"),
    [
        (CountsEvaluations, "number", "steps"),
        (CountsEvaluations, "in a dict", "by_name['steps']"),
        (CountsEvaluations, "in a vocabulary", None),
        (CountsEvaluations, "buffer", "queue"),
        (CountsEvaluations, "in training", None),
        (ResetsCounts, "number", None),
    ],
)
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.long(but=1)
def test_a_count_or_a_buffer_that_an_evaluation_changes_is_warned_of(
    model: Any, kind: str, name: str | None, mode: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data, net = TensorDataset(torch.randn(24, 4), torch.arange(24) % 3), model(kind)
    loop = cpu_loop(net, DataLoader(data, 4), validation_loader=DataLoader(data, 7), gpu_mode=mode, devices=2)
    loop.fit(2)
    said = capfd.readouterr().err
    assert said.count("an evaluation changes") == (name is not None)
    assert name is None or f"an evaluation changes {name}, and each rank evaluates only some of the batches" in said


class Contrastive(Counted):
    """Compares the rows of all ranks, and sums a number over them."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        rows = self.all_gather(self.fc(batch_data[0]), concat=True)
        number = ranks.all_reduce(float(len(batch_data[0])))
        return (rows @ rows.T).square().sum() / number


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_loss_over_the_rows_of_all_ranks_is_an_error_on_a_rank_without_samples(mode: str) -> None:
    torch.manual_seed(0)
    data, model = TensorDataset(torch.randn(17, 4), torch.arange(17) % 3), Contrastive()

    def loop(drop_last: bool) -> TrainLoop:
        return cpu_loop(
            model,
            DataLoader(data, BATCH, drop_last=drop_last),
            torch.optim.SGD(model.parameters(), lr=0.001),
            None,
            validation_loader=DataLoader(data, BATCH),
            gpu_mode=mode,
            devices=2,
            seed=1,
        )

    with pytest.raises(WorkerFailedError, match=r"(?s)samples in (this|.* epoch's last) batch.*drop_last=True"):
        loop(drop_last=False).fit(num_epochs=1)
    loop(drop_last=True).fit(num_epochs=1)  # an evaluation gives each rank its own rows
