"""Ranks that somebody else started make their own loaders: where these differ, all ranks say so before any waits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import run_own_ranks
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from trainloop import AbstractCallback, TrainLoop, TTBasicModel, distributed
from trainloop.callbacks import EarlyStopping, ModelCheckpoint
from trainloop.data import TrainFeed
from trainloop.data.loader.loaders import Shared, check_shared
from trainloop.errors import ConfigurationError

CPU: Any = {"accelerator": "cpu", "devices": 2}
ROWS, BATCH = 66_001, 6_000


def loader(sampler: Sampler[Any] | None = None, rows: int = ROWS, batch: int = BATCH, **arguments: Any) -> Any:
    return DataLoader(TensorDataset(torch.arange(float(rows))), batch, sampler=sampler, **arguments)


def weighted(weights: Any = None, number: int = ROWS, seed: int | None = None) -> WeightedRandomSampler:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return WeightedRandomSampler(torch.ones(ROWS) if weights is None else weights, number, generator=generator)


# By what differs: a loader, the feed's arguments, and what the error says.
UNLIKE: dict[str, tuple[Callable[[int], Any], Callable[[int], dict[str, Any]], str]] = {
    "weights": (
        lambda rank: loader(weighted(torch.arange(1.0, ROWS + 1) + rank)),
        lambda rank: {},
        "WeightedRandomSampler yields a different order on each rank",
    ),
    "the state of a generator": (
        lambda rank: loader(weighted(seed=rank)),
        lambda rank: {},
        "WeightedRandomSampler yields a different order on each rank",
    ),
    "a shuffle's generator": (
        lambda rank: loader(RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(rank))),
        lambda rank: {},
        "RandomSampler yields a different order on each rank",
    ),
    "draws, of which only some are shared": (
        lambda rank: loader(weighted(number=65_000 + 1000 * rank)),
        lambda rank: {},
        "train_loader has 65000 samples in 6 global batches of 12000 on rank 0, but 66000 samples in 6 global batches",
    ),
    "draws of a short order": (
        lambda rank: loader(weighted(number=100 + rank), batch=10),
        lambda rank: {},
        "100 samples in 5 global batches of 20 on rank 0, but 101 samples in 6 global batches",
    ),
    "rows in order": (lambda rank: loader(rows=100 + 50 * rank), lambda rank: {}, "100 samples in 1 global batch of"),
    "batch_size": (lambda rank: loader(batch=10 + rank), lambda rank: {}, "of 22 on rank 1"),
    "samplers": (
        lambda rank: loader(weighted() if rank else RandomSampler(range(ROWS))),
        lambda rank: {},
        "has a different kind of sampler, on rank 1 than on rank 0",
    ),
    "seeds": (
        lambda rank: loader(shuffle=True),
        lambda rank: {"seed": rank},
        "rank 1 has a different seed than rank 0",
    ),
}


def errors_of(rank: int) -> dict[str, str]:
    """What each case raises; an exchange after it shows that no rank is left behind in one."""
    found = {}
    for name, (make, arguments, _) in UNLIKE.items():
        feed = feed_of(make(rank), rank, **arguments(rank))
        try:
            everyone = distributed.exchange_ints(feed.shared)
            check_shared([Shared(*theirs) for theirs in everyone], "train_loader")
            found[name] = f"{sum(1 for _ in feed.steps(1))} steps"
        except ConfigurationError as error:
            found[name] = str(error)
        assert distributed.exchange_ints([rank]) == [[0], [1]]
    return found


def feed_of(of_rank: Any, rank: int, **arguments: Any) -> Any:
    options = {"rank": rank, "world_size": 2, "seed": 3, "exchange_ints": distributed.exchange_ints, **arguments}
    return TrainFeed(of_rank, **options)


def samples_of_given(rank: int) -> int:
    """Ranks that read what they were given: another seed is theirs to choose."""
    own = DistributedSampler(range(100), num_replicas=2, rank=rank, seed=5)  # type: ignore[arg-type]
    return sum(step.total for step in feed_of(loader(own, 100, 10), rank, seed=rank).steps(1))


def of_rank() -> tuple[dict[str, str], int]:
    rank = distributed.get_rank()
    return errors_of(rank), samples_of_given(rank)


def test_all_ranks_say_what_differs(tmp_path: Path) -> None:
    everyone = run_own_ranks(of_rank, 2, folder=tmp_path)
    for errors, given in everyone:
        for name, (_, _, message) in UNLIKE.items():
            assert message in errors[name], name
        assert given == 100
    assert everyone[0] == everyone[1]


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def rows(number: int = 40, batch: int = 10, **arguments: Any) -> DataLoader[Any]:
    x = torch.randn(number, 4)
    return DataLoader(TensorDataset(x, x[:, :1]), batch, **arguments)


def split(rank: int) -> list[Subset[Any]]:
    return random_split(rows().dataset, [30, 10], torch.Generator().manual_seed(rank))


class Files(Dataset[Any]):
    def __init__(self, names: list[str]) -> None:
        self.names = [(f"/of_rank_{distributed.get_rank()}/{name}", 0) for name in names]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> Any:
        return torch.ones(4), torch.ones(1)


def loop_of(
    train: Any, validation: Any = None, test: Any = None, reduction: str = "mean", **arguments: Any
) -> TrainLoop[Any]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {**CPU, "gpu_mode": "ddp", "progress_bar": False, **arguments}
    return TrainLoop(model, train, validation, test, optimizer, torch.nn.MSELoss(reduction=reduction), **options)


class AtEpoch(AbstractCallback):
    """A loop that has trained for as many epochs as this rank's number."""

    def on_train_loop_registration(self) -> None:
        self.train_loop_obj.epoch = distributed.get_rank()


# By what differs between ranks, what each does with a loop of its own, and what the error on all of them says.
FITS: dict[str, tuple[Callable[[int], Any], str]] = {
    "data that each has read for itself": (
        lambda rank: loop_of(rows(40 + 20 * rank)).fit(1),
        "train_loader has 40 samples in 2 global batches of 20 on rank 0, but 60 samples in 3",
    ),
    "num_epochs": (lambda rank: loop_of(rows()).fit(2 - rank), "fit(num_epochs=1) on rank 1, but fit(num_epochs=2) on"),
    "num_iterations": (
        lambda rank: loop_of(rows()).fit(num_iterations=3 + rank),
        "fit(num_iterations=4) on rank 1, but fit(num_iterations=3) on rank 0",
    ),
    "kinds of lengths": (
        lambda rank: loop_of(rows()).fit(**{"num_iterations" if rank else "num_epochs": 2}),
        "fit(num_iterations=2) on rank 1, but fit(num_epochs=2) on rank 0",
    ),
    "accumulation": (
        lambda rank: loop_of(rows()).fit(1, grad_accumulation=1 + rank),
        "fit(grad_accumulation=2) on rank 1, but fit(grad_accumulation=1) on rank 0",
    ),
    "clipping": (
        lambda rank: loop_of(rows(), gradient_clip_norm=0.5 if rank else None).fit(1),
        "TrainLoop(gradient_clip_norm=0.5) on rank 1, but TrainLoop(gradient_clip_norm=None) on rank 0",
    ),
    "sums or means": (
        lambda rank: loop_of(rows(), reduction="sum" if rank else "mean").fit(1),
        "a criterion of class MSELoss, with sums of losses on rank 1, but a criterion of class MSELoss, with means",
    ),
    "when to evaluate": (
        lambda rank: loop_of(rows(), rows(), end_auto_eval=1 + rank).fit(2),
        "TrainLoop(end_auto_eval=2) on rank 1, but TrainLoop(end_auto_eval=1) on rank 0",
    ),
    "a random split": (
        lambda rank: loop_of(rows(), DataLoader(split(rank)[1], 4)).fit(1),
        "validation_loader: the dataset on rank 1 has other names or indices than the one on rank 0",
    ),
    "a shard that each has taken": (
        lambda rank: loop_of(DataLoader(Subset(rows().dataset, range(rank, 40, 2)), 10)).fit(1),
        "train_loader: the dataset on rank 1 has other names or indices",
    ),
    "the order of files": (
        lambda rank: loop_of(DataLoader(Files(["a.png", "b.png"][:: 1 - 2 * rank]), 1)).fit(1),
        "train_loader: the dataset on rank 1 has other names or indices",
    ),
    "epochs behind them": (
        lambda rank: loop_of(rows()).fit(1, callbacks=[AtEpoch("at epoch")]),
        "rank 1 would resume after epoch 1 and step 0, but rank 0 after epoch 0 and step 0",
    ),
    "a validation_loader's length": (
        lambda rank: loop_of(rows(), rows(21 + rank, shuffle=True)).fit(1),
        "validation_loader has 21 samples in 3 global batches of 10 on rank 0, but 22 samples in 3",
    ),
    "a validation_loader on one": (
        lambda rank: loop_of(rows(), None if rank else rows()).fit(1),
        "validation_loader is None on rank 1, but not on rank 0",
    ),
    "a ModelCheckpoint on rank 0": (
        lambda rank: loop_of(rows()).fit(1, callbacks=[ModelCheckpoint("never written")][rank:]),
        "callbacks that write checkpoints: none on rank 1, but ModelCheckpoint on rank 0",
    ),
    "a test_loader on the other": (
        lambda rank: loop_of(rows(), None, rows() if rank else None).fit(1),
        "test_loader is None on rank 0, but not on rank 1",
    ),
    "a list of batches": (
        lambda rank: loop_of(rows(), list(rows(40 + 10 * rank))).fit(1),
        "validation_loader has 4 global batches on rank 0, but 5 global batches",
    ),
    "a length in predictions": (
        lambda rank: loop_of(rows()).predict_with_model(rows(40 + 20 * rank)),
        "data_loader has 40 samples in 4 global batches of 10 on rank 0, but 60 samples in 6",
    ),
    "a batch_size in an evaluation": (
        lambda rank: loop_of(rows(), None, rows(40, 10 + rank)).evaluate_loss_on_test_set(),
        "test_loader has 40 samples in 4 global batches of 10 on rank 0, but 40 samples in 4 global batches of 11",
    ),
    "a shuffle's seed in predictions": (
        lambda rank: loop_of(rows(), seed=rank).predict_with_model(rows(shuffle=True)),
        "rank 1 has a different seed than rank 0, so these ranks would read data_loader",
    ),
    "a sampler in predictions": (
        lambda rank: loop_of(rows()).predict_with_model(rows(sampler=[3, 2, 1, 0] if rank else [0, 1, 2, 3])),
        "data_loader: list yields a different order on each rank",
    ),
    "kinds of orders in predictions": (
        lambda rank: loop_of(rows()).predict_with_model(rows(40, shuffle=bool(rank))),
        "data_loader is a different kind of loader, or has a different kind of sampler, on rank 1 than on rank 0",
    ),
    "a list of texts in predictions": (
        lambda rank: loop_of(rows()).predict_with_model(DataLoader([("a", 0), ("b" * (1 + rank), 1)])),
        "data_loader: the dataset on rank 1 has other names or indices",
    ),
}

# What one rank can't do at all: its own error, and the other's.
REFUSED: dict[str, tuple[Callable[[int], Any], str]] = {
    "less than a batch": (
        lambda rank: loop_of(rows(15 if rank else 40, drop_last=True)).fit(1),
        "train_loader has 15 samples and drop_last=True",
    ),
}


class Tracker(AbstractCallback):
    """On one rank only, as a script has it: for each of its hooks, all ranks exchange something."""

    shared = ("run_id",)
    run_id = ""
    rows = 0

    def on_log(self, rows: list[Any]) -> None:
        self.rows += len(rows)

    def on_epoch_end(self) -> None:
        self.log("tracked", 1.0)

    def on_train_end(self) -> None:
        self.run_id = "mine"


def tracked(rank: int) -> tuple[int, str, list[float]]:
    """Rows that a tracker of rank 0 gets, its ID, and what all ranks have of its logs; rank 1 has other callbacks."""
    tracker = Tracker("tracker")
    loop = loop_of(rows(600, 2))
    loop.fit(2, callbacks=[EarlyStopping("loss", patience=9)] if rank else [tracker])
    return tracker.rows, tracker.run_id, loop.history["tracked"]


def error_of(work: Callable[[int], Any]) -> str:
    """What it raises; an exchange after it shows that no rank is left behind in one."""
    rank = distributed.get_rank()
    try:
        work(rank)
        error = "none"
    except ConfigurationError as raised:
        error = str(raised)
    assert distributed.exchange_ints([rank]) == [[0], [1]]
    return error


def errors_of_fits() -> tuple[dict[str, str], dict[str, str], int, list[int], tuple[int, str, list[float]]]:
    """And, of loops that differ in what they may: the steps taken, rows of predictions, and what a tracker gets."""
    fits = {name: error_of(work) for name, (work, _) in FITS.items()}
    refused = {name: error_of(work) for name, (work, _) in REFUSED.items()}
    rank = distributed.get_rank()
    unused = loop_of(rows(), None if rank else rows(), end_auto_eval=False)
    unused.fit(1)
    given = rows(40, sampler=DistributedSampler(range(40), num_replicas=2, rank=rank, shuffle=False))  # type: ignore[arg-type]
    in_order = loop_of(rows(), seed=rank)
    predicted = [len(in_order.predict_with_model(data)[0]) for data in (rows(), given)]
    return fits, refused, unused.global_step, predicted, tracked(rank)


def test_loops_of_ranks_say_what_differs_before_the_first_step(tmp_path: Path) -> None:
    everyone = run_own_ranks(errors_of_fits, 2, folder=tmp_path)
    for rank, (fits, _, steps, predicted, of_tracker) in enumerate(everyone):
        for name, (_, message) in FITS.items():
            assert message in fits[name], name
        assert steps == 2
        assert predicted == [40, 40]
        assert of_tracker == ((0, "") if rank else (300, "mine")) + ([1.0, 1.0],)
    assert everyone[0][0] == everyone[1][0]
    for name, (_, message) in REFUSED.items():
        assert "rank 1 rejected its arguments" in everyone[0][1][name], name
        assert message in everyone[1][1][name], name


def values_of_models() -> tuple[float, float, str]:
    """Return the loss and prediction of models that each rank makes for itself, and the error of other models."""
    rank = distributed.get_rank()
    torch.manual_seed(rank)
    data = DataLoader(TensorDataset(torch.ones(40, 4), torch.ones(40, 1)), 10)
    loop = loop_of(data)
    loop.criterion = torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0 + rank]))
    loss = loop.evaluate(data)["loss"]
    predicted = loop.predict_with_model(data)[0]
    assert torch.equal(predicted, loop.model(torch.ones(40, 4)).detach())
    loop.model.layer = torch.nn.Linear(4, 1, bias=rank == 0)
    return loss, float(predicted[0]), error_of(lambda rank: loop.evaluate(data))


def test_an_evaluation_uses_the_model_of_rank_0(tmp_path: Path) -> None:
    (loss, predicted, error), other = run_own_ranks(values_of_models, 2, folder=tmp_path)
    torch.manual_seed(0)
    of_first = Net()(torch.ones(1, 4)).detach()
    assert predicted == float(of_first)
    assert loss == pytest.approx(float(torch.nn.functional.softplus(-of_first)))
    assert other == (loss, predicted, error)
    assert "other parameters or buffers on rank 1 than on rank 0" in error


class Projected(Net):
    """Has a random tensor that is no buffer, and one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.randn(4, 4)
        self.register_buffer("offset", torch.randn(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.projection + self.offset)


def warnings_of_tensors() -> list[list[str]]:
    """Return warnings of two calls of ``fit``: for a model that is the same on all ranks, and for one that is not."""
    found = []
    for seed in (0, distributed.get_rank()):
        torch.manual_seed(seed)
        loop = loop_of(DataLoader(TensorDataset(torch.ones(40, 4), torch.ones(40, 1)), 10))
        loop.model = model = Projected()
        loop.optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop.fit(1)
            loop.fit(1)
        found.append([str(one.message) for one in caught if "differ between ranks" in str(one.message)])
    return found


def test_a_tensor_that_each_rank_has_drawn_is_warned_of(tmp_path: Path) -> None:
    (same, unlike), on_rank_1 = run_own_ranks(warnings_of_tensors, 2, folder=tmp_path)
    assert on_rank_1 == [[], []]
    assert same == []
    (warning,) = unlike
    assert warning.startswith("the tensors projection differ between ranks")
