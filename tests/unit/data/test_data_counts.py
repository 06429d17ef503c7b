"""The number of samples in a batch: by the sampler, or by the batch where collate_fn may change it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from torch import nn, optim
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from trainloop import TTModel
from trainloop.data import EvalFeed, TrainFeed
from trainloop.data.batch.batches import SampleCounter, count_collated, count_samples, samples_of_batch

ITEMS = [(torch.full((3, 2, 2), float(i)), {"y": torch.tensor(float(i) ** 2)}) for i in range(7)]


def as_lists(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


def as_targets(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples]), [y for _, y in samples]


class Weighted(TTModel):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        return sum((self.w * a.mean() - t["y"]) ** 2 for a, t in zip(x, y, strict=True)) / len(x)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        raise NotImplementedError


def by_hand(parts: list[list[Any]]) -> tuple[float, float]:
    """Gradient and loss of one step over all samples."""
    w = torch.zeros((), requires_grad=True)
    samples = [sample for part in parts for sample in part]
    loss: Any = sum((w * a.mean() - t["y"]) ** 2 for a, t in samples) / len(samples)
    loss.backward()
    assert w.grad is not None
    return w.grad.item(), loss.item()


def test_inputs_and_labels_of_two_loaders_are_no_samples() -> None:
    def pair(n: int) -> list[torch.Tensor]:
        return [torch.zeros(n, 2), torch.zeros(n)]  # as a DataLoader makes it

    assert count_collated({"a": pair(8), "b": pair(8)}) == 8
    assert count_collated({"a": pair(8), "b": pair(5)}) is None  # and not 2, the length of the lists
    assert count_samples({"a": pair(8), "b": pair(5)}) == 8
    assert samples_of_batch((pair(8), pair(8))) == samples_of_batch((pair(8), pair(5))) == 8  # of zip(loader, other)
    assert samples_of_batch([tuple(pair(8)), tuple(pair(5))]) == 2
    assert count_collated({"images": [torch.zeros(3, 4), torch.zeros(3, 5)], "labels": torch.zeros(2)}) == 2


class Items(Dataset[Any]):
    def __len__(self) -> int:
        return len(ITEMS)

    def __getitem__(self, index: int) -> Any:
        return ITEMS[index]


class ItemStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from ITEMS


class DrawnBatches:
    """A batch sampler of one's own: it starts again at each iter() and returns itself."""

    def __iter__(self) -> DrawnBatches:
        self.left = [[0, 1, 2, 3], [4, 5, 6]]
        return self

    def __next__(self) -> list[int]:
        if not self.left:
            raise StopIteration
        return self.left.pop(0)

    def __len__(self) -> int:
        raise ValueError("unknown")


class DrawnIndices(DrawnBatches):
    def __iter__(self) -> DrawnBatches:
        self.left = list(range(7))  # type: ignore[arg-type]
        return self


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "batch_size": lambda: {"batch_size": 4},
    "BatchSampler": lambda: {"batch_sampler": BatchSampler(SequentialSampler(ITEMS), 4, False)},
    "list": lambda: {"batch_sampler": [[0, 1, 2, 3], [4, 5, 6]]},
    "own indices": lambda: {"batch_size": 4, "sampler": DrawnIndices()},
    "own": lambda: {"batch_sampler": DrawnBatches()},
    "stream": lambda: {"batch_size": 4},
}


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("collate", [as_lists, as_targets])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samples_are_counted_by_the_sampler(sampler: str, collate: Any, seed: int | None) -> None:
    def loader() -> DataLoader[Any]:
        dataset: Any = ItemStream() if sampler == "stream" else Items()
        return DataLoader(dataset, collate_fn=collate, **SAMPLERS[sampler]())

    model = Weighted()
    sgd = optim.SGD(model.parameters(), lr=1.0)
    loop = cpu_loop(model, loader(), sgd, None, validation_loader=loader(), seed=seed)
    assert loop.evaluate_loss_on_validation_set() == pytest.approx(by_hand([ITEMS])[1], rel=1e-5)
    loop.fit(1, grad_accumulation=2)
    gradient, loss = by_hand([ITEMS[:4], ITEMS[4:]])
    assert -model.w.item() == pytest.approx(gradient, rel=1e-5)
    assert loop.history["loss"] == [pytest.approx(loss, rel=1e-5)]


T = torch.zeros
COLLATED = {
    "rows": ((T(3, 2), T(3)), 3),
    "one tensor": (T(3, 2), 3),
    "multiplied": ({"x": T(9, 2), "y": T(9)}, 9),
    "time first, lengths": ((T(7, 4, 2), T(7, 4), torch.tensor([7, 6, 5, 4])), 4),
    "time first": ((T(7, 4, 2), T(7, 4)), None),
    "lists": (([T(3, 2, 2)] * 2, [{"boxes": T(1, 4)}] * 2), 2),
    "samples": ([(T(3, 2, 2), 1), (T(3, 2, 2), 0), (T(3, 2, 2), 0)], 3),
    "samples as dicts": ([{"x": T(3, 2), "y": 1}, {"x": T(3, 2), "y": 0}], 2),
    "columns, two of two": ([T(1, 4), T(1)], 1),
    "packed": (pack_sequence([T(5, 1), T(3, 1)]), 2),
    "no samples": ((T(0, 2), T(0)), 0),
    "None": (None, 0),
    "unlike": ((T(3, 2), T(5)), None),
    "unlike, with the plan": ((T(4, 2), T(9, 3)), 4),
    "texts": ((["a", "b", "c"], T(3)), 3),
}


@pytest.mark.parametrize("name", COLLATED)
def test_collated_batches_are_counted(name: str) -> None:
    batch, size = COLLATED[name]
    assert count_collated(batch, 2 if name == "columns, two of two" else 4) == size


OF_ONE = {
    "bag, label": ((T(3, 2), torch.tensor(1)), 1),
    "bag, number": ({"bag": T(3, 2), "label": 0.5}, 1),
    "list of instances, label": ([[T(4, 2), T(5, 2), T(4, 2)], torch.tensor(1)], 1),
    "bag, list of one label": ((T(3, 2), [0]), 1),
    "windows": (T(3, 2), 3),
    "windows, labels": ((T(3, 2), T(3)), 3),
    "windows or instances, name": ((T(3, 2), "a.wav"), None),
    "windows, labels or coordinates, number": ((T(3, 2), T(3), 7), None),
}


@pytest.mark.parametrize("name", OF_ONE)
def test_a_batch_of_one_sample_is_one_if_it_has_a_single_label(name: str) -> None:
    batch, size = OF_ONE[name]
    assert count_collated(batch, 1) == size
    if name != "bag, list of one label":
        # Without a plan, one label may belong to one sample or to all.
        assert count_collated(batch) == (None if size == 1 else size or 3)


@pytest.mark.parametrize(
    "batch, guess", [((T(3, 2), torch.tensor(1)), 1), ([T(3, 2), 0.5], 1), ({"x": T(3, 2), "domain": 0}, 3)]
)
def test_a_batch_that_may_be_one_sample_is_warned_of_without_a_plan(batch: Any, guess: int) -> None:
    with pytest.warns(UserWarning, match=rf"may be one sample with a number.* taken to be {guess}\."):
        assert SampleCounter("train_loader").count(batch) == guess


def itself(samples: list[Any]) -> Any:
    (sample,) = samples
    return sample


class OfBags(TTModel):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        bag, label = batch_data
        self.log("error", (self.w * bag.mean() - label).abs())
        return (self.w * bag.mean() - label) ** 2

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return (self.w * batch_data[0].mean())[None], batch_data[1][None], {}


class BagStream(IterableDataset[Any]):
    def __init__(self, bags: list[Any]) -> None:
        self.bags = bags

    def __iter__(self) -> Iterator[Any]:
        yield from self.bags


BAG_LOADERS: dict[str, Callable[[list[Any]], Any]] = {
    "own collate_fn": lambda bags: DataLoader(bags, batch_size=1, collate_fn=itself),
    "no batches": lambda bags: DataLoader(bags, batch_size=None),
    "stream": lambda bags: DataLoader(BagStream(bags), batch_size=None),
    "list": list,
}


@pytest.mark.filterwarnings("ignore:.*can't be counted, because it may be one sample with a number")
@pytest.mark.parametrize("mode", ["single", "dp"])
@pytest.mark.parametrize("kind", BAG_LOADERS)
def test_bags_of_any_size_count_once_each(mode: str, kind: str) -> None:
    bags = [(torch.full((2 + i, 3), 1.0 + i), torch.tensor(float(i % 3))) for i in range(5)]
    model, by_hand = OfBags(), torch.zeros((), requires_grad=True)
    two = {"gpu_mode": "dp", "devices": 2} if mode == "dp" else {}
    loader = BAG_LOADERS[kind](bags)
    sgd = optim.SGD(model.parameters(), lr=0.1)
    loop = cpu_loop(model, loader, sgd, None, validation_loader=loader, **two)
    loop.fit(1, grad_accumulation=5)
    losses = [(by_hand * bag.mean() - label) ** 2 for bag, label in bags]
    torch.stack(losses).mean().backward()
    assert by_hand.grad is not None
    w = -0.1 * by_hand.grad.item()
    assert model.w.item() == pytest.approx(w)
    assert loop.history["loss"] == [pytest.approx(1.2)]
    errors = [abs(w * bag.mean().item() - label.item()) for bag, label in bags]
    assert loop.history["val_error"] == [pytest.approx(sum(errors) / 5)]
    assert loop.history["val_loss"] == [pytest.approx(sum(e**2 for e in errors) / 5)]
    assert len(loop.predict_on_validation_set()[0]) == 5


class Bad(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return None if index in (0, 4, 5, 6, 7) else (torch.ones(3) * index, torch.ones(1))


def keep(samples: list[Any]) -> Any:
    good = [sample for sample in samples if sample is not None]
    return tuple(map(torch.stack, zip(*good, strict=True))) if good else (torch.empty(0, 3), torch.empty(0, 1))


@pytest.mark.parametrize("workers", [None, 0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("seed", [None, 0])
def test_an_empty_batch_weighs_nothing(seed: int | None, workers: int | None) -> None:
    """Of a loader, and of a list of batches (``workers=None``)."""

    class Net(TTModel):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(3, 1)

        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            x, y = batch_data
            return criterion(self.net(x), y)

        def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
            raise NotImplementedError

    def loader() -> Any:
        made: DataLoader[Any] = DataLoader(Bad(), batch_size=4, collate_fn=keep, num_workers=workers or 0)
        return list(made) if workers is None else made

    model, hand = Net(), Net()
    loop = cpu_loop(model, loader(), criterion=nn.MSELoss(), validation_loader=loader(), seed=seed)
    loop.fit(1, grad_accumulation=2)
    sgd = optim.SGD(hand.parameters(), 0.1)
    (x, y) = keep([Bad()[i] for i in range(8)])
    loss = nn.functional.mse_loss(hand.net(x), y)
    loss.backward()
    sgd.step()
    assert loop.history["loss"] == [pytest.approx(loss.item())]
    assert loop.history["val_loss"] == [pytest.approx(nn.functional.mse_loss(hand.net(x), y).item())]
    torch.testing.assert_close(model.net.weight, hand.net.weight)


def test_a_batch_that_cannot_be_counted_is_reported_once() -> None:
    loader = DataLoader(Items(), batch_size=4, collate_fn=lambda samples: (torch.zeros(2, 1), torch.zeros(5)))
    for feed in (TrainFeed(loader), EvalFeed(loader)):
        with pytest.warns(UserWarning, match=r"can't be counted.*made of 4 samples.*return \(loss, n\)") as caught:
            list(feed.steps(1) if isinstance(feed, TrainFeed) else feed.batches())
        assert len(caught) == 1


class Numbers(IterableDataset[Any]):
    def __init__(self, divides: bool) -> None:
        self.divides = divides

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info() if self.divides else None
        first, step = (info.id, info.num_workers) if info else (0, 1)
        yield from torch.arange(8.0)[first::step]


@pytest.mark.long
def test_a_stream_that_every_worker_repeats_is_reported() -> None:
    def samples(divides: bool, **kwargs: Any) -> list[float]:
        feed = TrainFeed(DataLoader(Numbers(divides), batch_size=2, num_workers=2), **kwargs)
        return sorted(float(x) for step in feed.steps(1) for batch in step.batches for x in batch)

    with pytest.warns(UserWarning, match="does not divide its samples over the loader's 2 workers"):
        assert samples(False) == sorted([*range(8), *range(8)])  # as in a hand-written loop
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "This DataLoader will create")
        assert samples(True) == samples(False, seed=0) == list(range(8))


def test_a_sampler_that_never_ends_is_an_error_in_evaluation() -> None:
    class Endless:
        def __iter__(self) -> Iterator[list[int]]:
            while True:
                yield [0]

        def __len__(self) -> int:
            return 7

    loader: Any = DataLoader(Items(), batch_sampler=Endless(), collate_fn=as_lists)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Endless has a length of 7"):
        list(EvalFeed(loader).batches())

    class WithoutLength:
        def __iter__(self) -> Iterator[int]:
            while True:
                yield 0

    loader = DataLoader(Items(), 4, sampler=WithoutLength(), collate_fn=as_lists)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"WithoutLength has no length \(the dataset has 7\), but has yielded 1021 items"
    ):
        list(EvalFeed(loader).batches())


@pytest.mark.parametrize("seed", [None, 0])
def test_a_sampler_s_length_may_change_with_the_epoch(seed: int | None) -> None:
    class Grows:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter(range(len(self)))

        def __len__(self) -> int:
            return 3 + 2 * self.epoch

    feed = TrainFeed(DataLoader(Items(), 2, sampler=Grows(), collate_fn=as_lists), seed=seed)  # type: ignore[arg-type]
    sizes = []
    for epoch in range(3):
        feed.set_epoch(epoch)
        sizes.append([size for step in feed.steps(1) for size in step.sizes])
    assert sizes == [[2, 1], [2, 2, 1], [2, 2, 2, 1]]
    feed = TrainFeed(DataLoader(Rows(), 2, sampler=Grows()), seed=seed)  # type: ignore[arg-type]
    for epoch, expected in enumerate(sizes):
        feed.set_epoch(epoch)
        assert [size for step in feed.steps(1) for size in step.sizes] == expected


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return torch.ones(3)


def test_batches_without_a_plan() -> None:
    graph = [(torch.ones(5, 2), torch.ones(2, 9), torch.ones(5))]  # nodes, edges, labels
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [step.sizes for step in TrainFeed(graph).steps(1)] == [[5]]
    with pytest.warns(UserWarning, match="can't be counted"):
        list(TrainFeed([(torch.ones(7, 4), torch.ones(4))]).steps(1))  # time first
    with pytest.warns(UserWarning, match="because a list of parts of one shape may be columns, .* taken to be 4"):
        list(TrainFeed([[torch.ones(4, 7), torch.ones(4, 7)]]).steps(1))  # tokens, and the next ones
    with pytest.warns(UserWarning, match="because it is an iterator, .* let collate_fn return a tuple"):
        list(TrainFeed([zip(torch.ones(4, 7), torch.ones(4))]).steps(1))


def test_nested_tensors_are_counted(recwarn: pytest.WarningsRecorder) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3), torch.ones(1)])
    assert count_collated((torch.ones(3, 4), nested), 3) == 3
    assert count_samples({"x": nested}) == count_samples([nested, torch.ones(3)]) == 3
