"""What callbacks change while training: the table of changes in one process, and assignments to the loop."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import weakref
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from kit.changes import (
    CHANGES,
    MOMENTS,
    Change,
    Growing,
    Net,
    Scaled,
    distance,
    growing_loop,
    loop_of,
    resumed_differs,
    resumes_alike,
    rows,
    sgd,
    trained,
    trained_on_growing,
    values_of,
)
from kit.loops import cpu_loop
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from trainloop import AbstractCallback, TrainLoop
from trainloop.callbacks import ModelCheckpoint
from trainloop.callbacks.loop import ASSIGNABLE, Loop
from trainloop.data.loader.loader_copies import end_workers
from trainloop.errors import CheckpointError, ConfigurationError
from trainloop.train_loop.progress.loop_state import LoopState

# fit has its own argument, which would hide what is assigned before it.
ERRORS = {("accumulated", "between fits"): r"tl\.grad_accumulation can't be assigned between calls of fit"}


def check(change: str, mode: str, moment: str, seed: int | None = None) -> None:
    if (change, moment) in ERRORS:
        with pytest.raises(ConfigurationError, match=ERRORS[change, moment]):
            trained(change, mode, moment, seed)
        return
    weights, losses, after = trained(change, mode, moment, seed)
    assert max(weights, losses, after) < 1e-9, (change, mode, moment, weights, losses, after)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_has_the_effect_of_the_hand_written_loop(change: str) -> None:
    for moment in ("on_batch_begin", "on_epoch_end"):
        check(change, "single", moment)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode, seed", [("single", None), ("single", 0), ("dp", None)])
def test_a_change_has_its_effect_at_every_moment_with_a_seed_and_in_replicas(
    change: str, mode: str, seed: int | None
) -> None:
    for moment in MOMENTS:
        check(change, mode, moment, seed)


@pytest.mark.parametrize("change", ["new_loader", "optimizer", "criterion_of_sums", "frozen", "enlarged", "pruned"])
def test_a_run_resumed_after_a_change_is_the_uninterrupted_one(change: str, tmp_path: Path) -> None:
    assert resumed_differs(change, "single", "on_epoch_begin", tmp_path) == 0


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_resumed_anywhere_is_the_uninterrupted_one(change: str, tmp_path: Path) -> None:
    for moment in MOMENTS[:-1]:
        for step in (7, 10) if resumes_alike(change, moment) else ():
            assert resumed_differs(change, "single", moment, tmp_path / f"{moment}{step}", step) == 0, (moment, step)


# -- assignments -------------------------------------------------------------------------------------------------------


class Assign(AbstractCallback):
    def __init__(self, name: str, value: Any) -> None:
        super().__init__("assign")
        self.name, self.value = name, value

    def on_epoch_begin(self) -> None:
        setattr(self.train_loop_obj, self.name, self.value)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("seed", 3, r"tl\.seed can't be assigned while the loop runs"),
        ("epoch", 3, r"tl\.epoch .* tl\.end_epoch\(\) ends an epoch"),
        ("global_step", 3, r"tl\.global_step can't be assigned"),
        ("device", "cpu", r"tl\.device can't be assigned at any time"),
        ("model", None, r"tl\.model .* Change the model in place"),
        ("history", {}, r"tl\.history .* tl\.log"),
        ("timeout", 1, r"tl\.timeout .* TrainLoop\(timeout=\.\.\.\)"),
        ("train_laoder", None, r"tl\.train_laoder .* Did you mean tl\.train_loader\?"),
        ("val_loader", None, r"tl\.val_loader .* validation_loader"),
        ("optimizer", None, r"tl\.optimizer = None"),
        ("gradient_clip_norm", -1, r"gradient_clip_norm=-1"),
        ("train_loader", "x", r"train_loader='x'"),
        ("num_iterations", 5, r"the length of this fit is given by num_epochs"),
        ("num_epochs", 0, r"num_epochs=0"),
    ],
)
def test_an_assignment_without_effect_is_an_error(name: str, value: Any, message: str) -> None:
    loop = loop_of("rate", "single")
    with pytest.raises(ConfigurationError, match=message):
        loop.fit(num_epochs=1, callbacks=[Assign(name, value)])


def test_names_of_ones_own_may_be_assigned_and_near_misses_not_even_before_fit() -> None:
    loop: Any = loop_of("rate", "single")
    loop.fit(num_epochs=1, callbacks=[Assign("stage", 2)])
    assert loop.stage == 2
    with pytest.raises(ConfigurationError, match=r"Did you mean tl\.train_loader"):
        loop.train_laoder = None
    with pytest.raises(ConfigurationError, match=r"Pass fit\(num_epochs=\.\.\.\)"):
        loop.num_epochs = 3
    loop.gradient_clip_norm = 1
    assert loop.gradient_clip_norm == 1


def test_the_protocol_names_what_the_loop_has() -> None:
    members = {name for name in (*Loop.__annotations__, *vars(Loop)) if name[0] != "_"}
    loop = loop_of("rate", "single")
    assert members - {"is_protocol"} <= set(dir(loop)) | set(LoopState.__annotations__)
    assert members >= ASSIGNABLE


# -- lengths, callbacks, ends ------------------------------------------------------------------------------------------


class Does(AbstractCallback):
    """Call a function at a hook, and count the epochs that this callback has seen."""

    def __init__(self, hook: str, function: Any) -> None:
        super().__init__("does")
        self.hook, self.function, self.epochs, self.began = hook, function, 0, 0

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name.startswith("on_") and name == super().__getattribute__("hook"):
            function = super().__getattribute__("function")
            return lambda *args: (method(*args), function(self.train_loop_obj))[0]
        return method

    def on_train_begin(self) -> None:
        self.began += 1

    def on_epoch_begin(self) -> None:
        self.epochs += 1

    def on_batch_end(self) -> None:
        pass

    def on_epoch_end(self) -> None:
        pass


def test_the_length_of_a_fit_may_change() -> None:
    loop = loop_of("rate", "single")
    loop.fit(num_epochs=2, callbacks=[Does("on_epoch_begin", lambda loop: setattr(loop, "num_epochs", 3))])
    assert (loop.epoch, loop.global_step) == (3, 12)
    loop = loop_of("rate", "single")
    loop.fit(num_iterations=3, callbacks=[Does("on_batch_end", lambda loop: setattr(loop, "num_iterations", 6))])
    assert loop.global_step == 6


def test_a_callback_that_a_hook_adds_or_removes_counts_from_the_next_epoch_on() -> None:
    added = Does("", None)

    def add(loop: Any) -> None:
        if loop.epoch == 0:
            loop.callbacks.append(added)

    loop = loop_of("rate", "single")
    loop.fit(num_epochs=3, callbacks=[Does("on_epoch_end", add)])
    assert (added.began, added.epochs) == (1, 2)

    leaves = Does("", None)
    loop = loop_of("rate", "single")
    remove = Does("on_epoch_end", lambda loop: setattr(loop, "callbacks", [remove]))
    loop.fit(num_epochs=3, callbacks=[remove, leaves])
    assert leaves.epochs == 1


@pytest.mark.parametrize("draws", [False, True], ids=["in order", "from a generator"])
def test_end_epoch_ends_this_epoch_only_and_a_resume_in_that_step_too(draws: bool, tmp_path: Path) -> None:
    def end(loop: Any) -> None:
        if loop.epoch == 1 and loop.global_step == 6:
            loop.end_epoch()

    def make() -> TrainLoop:
        loop = loop_of("rate", "single", seed=0)
        if draws:
            old: Any = loop.train_loader
            generator = torch.Generator().manual_seed(1)
            loop.train_loader = DataLoader(old.dataset, old.batch_size, shuffle=True, generator=generator)
        return loop

    results = []
    for kill in (None, 6):
        loop = make()
        keeper = ModelCheckpoint(tmp_path / str(kill), every_n_epochs=None, every_n_steps=1)
        ends: list[AbstractCallback] = [Does("on_batch_end", end), keeper]
        if kill is not None:
            stop = Does("on_epoch_end", lambda loop: 1 / (loop.epoch != 1))
            with pytest.raises(ZeroDivisionError):
                loop.fit(num_epochs=3, callbacks=[*ends, stop])
            loop = make()
        loop.fit(num_epochs=3, callbacks=ends, resume_from="last" if kill else None)
        assert (loop.epoch, loop.global_step) == (3, 10)
        assert len(loop.history["val_loss"]) == 3
        results.append((loop.history.to_dict(), loop.model.state_dict()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1].values(), results[1][1].values(), strict=True))
    with pytest.raises(ConfigurationError, match="needs a running fit"):
        loop.end_epoch()


def test_a_hook_that_is_assigned_to_a_callback_or_the_model_is_called_from_the_next_epoch_on() -> None:
    calls: list[tuple[str, int]] = []
    loop = loop_of("rate", "single")

    def assign(_: Any) -> None:
        if loop.epoch == 1:
            watcher.on_after_optimizer_step = lambda: calls.append(("step", loop.epoch))  # type: ignore[method-assign]
            loop.model.on_epoch_begin = lambda: calls.append(("begin", loop.epoch))

    watcher = Does("on_epoch_end", assign)
    loop.fit(num_epochs=3, callbacks=[watcher])
    assert calls[0] == ("begin", 2)
    assert set(calls[1:]) == {("step", 2)}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch's compiler
@pytest.mark.parametrize("gpu_mode", ["single", "dp"])
@pytest.mark.parametrize("compiles", ["no", "fit", "hook"])
def test_hooks_that_a_compiled_model_gets_in_a_later_epoch_are_called(compiles: str, gpu_mode: str) -> None:
    """By default, the graphs of torch.compile don't notice such hooks."""
    compile_args: Any = {"backend": "aot_eager"} if compiles == "fit" else False

    class Compiles(AbstractCallback):
        def on_train_begin(self) -> None:
            if compiles == "hook":
                self.train_loop_obj.model.compile(backend="aot_eager")

    class Hooks(AbstractCallback):
        def on_epoch_begin(self) -> None:
            body, head = self.train_loop_obj.model.body, self.train_loop_obj.model.head
            if self.train_loop_obj.epoch == 1:
                head.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
            if self.train_loop_obj.epoch == 2:
                body.register_full_backward_pre_hook(lambda _, gradients: (3 * gradients[0],))
                head.register_full_backward_hook(lambda _, inputs, __: (2 * inputs[0],))

    expected = loop_of("rate", gpu_mode)
    expected.fit(num_epochs=4, callbacks=[Hooks("hooks")])
    loop = loop_of("rate", gpu_mode, compile=compile_args)
    torch._dynamo.reset()
    loop.fit(num_epochs=4, callbacks=[Compiles("compiles"), Hooks("hooks")])
    torch._dynamo.reset()
    assert loop.history["loss"] == pytest.approx(expected.history["loss"], abs=1e-12)
    torch.testing.assert_close(loop.model.state_dict(), expected.model.state_dict(), rtol=0, atol=1e-12)


class Epochs(Dataset[Any]):
    """Each epoch has other data."""

    epoch = 0

    def __len__(self) -> int:
        return 8

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return torch.ones(3, dtype=torch.float64), torch.full((1,), float(self.epoch), dtype=torch.float64)


class Seen(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        self.log("seen", batch_data[1].mean())
        return super().get_loss(batch_data, criterion, device)


@pytest.mark.long
def test_set_epoch_of_a_dataset_reaches_persistent_workers_and_a_resumed_run(tmp_path: Path) -> None:
    def fit(epochs: int, folder: str, resume: str | None = None) -> tuple[list[float], torch.Tensor]:
        model = Seen()
        loader = DataLoader(Epochs(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
        loop = cpu_loop(model, loader, sgd(model), nn.MSELoss())
        loop.fit(num_epochs=epochs, callbacks=[ModelCheckpoint(tmp_path / folder)], resume_from=resume)
        end_workers(loader)
        return loop.history["seen"], model.head.weight.detach()

    seen, weight = fit(4, "whole")
    assert seen == [0, 1, 2, 3]
    fit(2, "parts")
    again, resumed = fit(4, "parts", "last")
    assert again == seen
    assert torch.equal(resumed, weight)


@pytest.mark.filterwarnings("ignore:the checkpoint has state of callbacks not in this fit")
@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("part", ["dataset", "sampler"])
def test_set_epoch_may_change_the_length_of_an_epoch(part: str, seed: int | None, tmp_path: Path) -> None:
    def fit(**kwargs: Any) -> tuple[TrainLoop, Growing]:
        loop, growing = growing_loop(part, seed=seed, accelerator="cpu")
        loop.fit(num_epochs=4, **kwargs)
        return loop, growing

    keeper = ModelCheckpoint(tmp_path, every_n_epochs=None, every_n_steps=1, keep=99)
    whole, growing = fit(callbacks=[keeper])
    assert growing.told == [-1, 0, 1, 2, 3]
    torch.testing.assert_close(whole.model.state_dict(), trained_on_growing(4), rtol=0, atol=1e-12)
    for path in sorted(tmp_path.glob("*.pt")):
        resumed, growing = fit(resume_from=path)
        assert len(set(growing.told)) == len(growing.told)
        torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


class Steps:
    """An epoch is the next two batches of a loader that begins again when it has ended."""

    def __init__(self) -> None:
        x = torch.ones(10, 3, dtype=torch.float64)
        self.loader = DataLoader(TensorDataset(x, x[:, :1]), 2)
        self.left: Any = None

    def __iter__(self) -> Any:
        for _ in range(2):
            batch = next(self.left, None) if self.left is not None else None
            if batch is None:
                self.left = iter(self.loader)
                batch = next(self.left)
            yield batch


def test_a_loader_that_continues_in_each_epoch_is_named_if_the_run_writes_checkpoints(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    def fit(**kwargs: Any) -> None:
        model = Net()
        loop = cpu_loop(model, Steps(), sgd(model), nn.MSELoss())
        loop.fit(num_epochs=6, **kwargs)

    fit()
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"train_loader.left is the same iterator in each epoch.* in Steps") as caught:
        fit(callbacks=[ModelCheckpoint(tmp_path)])
    assert len(caught) == 1


class TwoBatches(DataLoader):  # type: ignore[type-arg]
    """A loader whose epoch is the next two batches."""

    left: Any = None

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        if self.left is None:
            self.left = super().__iter__()
        for _ in range(2):
            yield next(self.left)


class WholePasses(DataLoader):  # type: ignore[type-arg]
    """A loader that keeps one iterator over its endless batch sampler, as timm's does."""

    left: Any = None

    def __len__(self) -> int:
        return len(cast("Any", self.batch_sampler))

    def __iter__(self) -> Any:
        if self.left is None:
            self.left = super().__iter__()
        for _ in range(len(self)):
            yield next(self.left)


class Endless:
    """Batches of indices that never end; the length is that of a pass."""

    def __iter__(self) -> Any:
        while True:
            yield from ([i, i + 1] for i in range(0, 12, 2))

    def __len__(self) -> int:
        return 6


class Within:
    """A loader that reads another one."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return iter(self.loader)


@pytest.mark.parametrize("place", ["a copy of the loader", "within another", "whole passes"])
def test_a_kept_iterator_is_found_where_it_is_read(
    place: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    x = torch.ones(12, 3, dtype=torch.float64)
    data = TensorDataset(x, x[:, :1])
    loader: Any = TwoBatches(data, 2)
    if place == "within another":
        loader = Within(loader)
    elif place == "whole passes":
        loader = WholePasses(data, batch_sampler=Endless())
    model = Net()
    loop = TrainLoop(
        *(model, loader, None, None, sgd(model), nn.MSELoss()), accelerator="cpu", progress_bar=False, seed=0
    )
    loop.fit(num_epochs=3, callbacks=[ModelCheckpoint(tmp_path)] if place == "within another" else [])
    told = [str(w.message) for w in recwarn.list if "is the same iterator in each epoch" in str(w.message)]
    assert len(told) == (0 if place == "whole passes" else 1)


class FreshLoaders(AbstractCallback):
    """Makes a loader at each epoch's end, and counts how many of its loaders are still alive, with their workers."""

    def __init__(self, use: str) -> None:
        super().__init__("fresh loaders")
        self.use = use
        self.loaders: list[weakref.ref[Any]] = []
        self.alive: list[int] = []
        self.processes: list[int] = []

    def on_epoch_end(self) -> None:
        loop, x = self.train_loop_obj, torch.ones(8, 3, dtype=torch.float64)
        workers = {"num_workers": 1, "persistent_workers": True} if self.use == "train with workers" else {}
        loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=4, **workers)
        self.loaders.append(weakref.ref(loader))
        if self.use == "evaluate":
            loop.evaluate(loader)
        elif self.use == "evaluate many":
            for _ in range(20):
                loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=4)
                self.loaders.append(weakref.ref(loader))
                loop.evaluate(loader)
        elif self.use == "validate":
            loop.validation_loader = loader
        else:
            loop.train_loader = loader
        del loader
        gc.collect()
        self.alive.append(sum(loader() is not None for loader in self.loaders))
        self.processes.append(len(multiprocessing.active_children()))


@pytest.mark.parametrize(
    "use, most", [("evaluate", 2), ("evaluate many", 11), ("validate", 3), ("train", 2), ("train with workers", 2)]
)
def test_loaders_that_are_made_anew_in_each_epoch_are_not_kept_alive(use: str, most: int) -> None:
    loop, fresh = loop_of("none", "single"), FreshLoaders(use)
    loop.fit(num_epochs=5, callbacks=[fresh])
    assert sum(loader() is not None for loader in fresh.loaders) <= 1  # without the garbage collector: the loop's own
    assert max(fresh.alive) <= most
    assert max(fresh.processes) - min(fresh.processes) <= 1


# -- states, resumes ---------------------------------------------------------------------------------------------------


def test_on_resume_comes_after_the_states_and_on_train_begin_knows_where(tmp_path: Path) -> None:
    found: list[Any] = []

    class Looks(AbstractCallback):
        count = 0

        def state_dict(self) -> dict[str, Any]:
            return {"count": 5}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

        def rank_state_dict(self) -> dict[str, Any]:
            return {"rank": 7}

        def load_rank_state_dict(self, state: dict[str, Any]) -> None:
            self.count += state["rank"]

        def on_train_begin(self) -> None:
            loop = self.train_loop_obj
            found.append(("begin", loop.resumed, loop.epoch, loop.global_step, self.count))

        def on_resume(self) -> None:
            loop = self.train_loop_obj
            found.append(("resume", loop.resumed, loop.epoch, loop.global_step, self.count))

    for epochs, resume in ((2, None), (3, "last")):
        loop_of("rate", "single").fit(
            num_epochs=epochs, callbacks=[Looks("looks"), ModelCheckpoint(tmp_path)], resume_from=resume
        )
    assert found == [("begin", False, 0, 0, 0), ("begin", True, 2, 8, 0), ("resume", True, 2, 8, 12)]


class Assigns(AbstractCallback):
    """Assign the attributes of a loop in the third epoch, and where a run resumes in or after it."""

    def __init__(self, **values: Any) -> None:
        super().__init__("assigns")
        self.values = values

    def on_epoch_begin(self) -> None:
        if self.train_loop_obj.epoch >= 2:
            for name, value in self.values.items():
                setattr(self.train_loop_obj, name, value)

    on_resume = on_epoch_begin


def test_an_epoch_that_is_resumed_is_finished_whatever_on_resume_assigns(tmp_path: Path) -> None:
    losses = []
    for resume in (None, tmp_path / "checkpoint-epoch=0003-step=00000010.pt"):
        loop = loop_of("rate", "single")
        keeper = ModelCheckpoint(tmp_path, every_n_steps=1, keep=None)
        loop.fit(num_epochs=5, callbacks=[Assigns(num_epochs=2), keeper], resume_from=resume)
        losses.append(list(loop.history["val_loss"]))
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]


class Labels(AbstractCallback):
    """Adds rows to the training set after each epoch, and keeps in its state which ones it has."""

    def on_epoch_end(self) -> None:
        part = self.train_loop_obj.train_loader.dataset
        part.indices = [*part.indices, len(part), len(part) + 1]

    def rows(self) -> dict[str, Any]:
        return {"indices": list(self.train_loop_obj.train_loader.dataset.indices)}

    def put_back(self, state: dict[str, Any]) -> None:
        self.train_loop_obj.train_loader.dataset.indices = state["indices"]


class CommonLabels(Labels):
    state_dict, load_state_dict = Labels.rows, Labels.put_back


class LabelsOfRank(Labels):
    rank_state_dict, load_rank_state_dict = Labels.rows, Labels.put_back


@pytest.mark.filterwarnings("ignore:the training changes train_loader")
@pytest.mark.parametrize("labels", [CommonLabels, LabelsOfRank])
@pytest.mark.parametrize("step", [4, 5, 7])
def test_an_epoch_resumes_with_the_dataset_that_the_state_of_a_callback_restores(
    labels: type[Labels], step: int, tmp_path: Path
) -> None:
    weights = []
    for resume in (None, step):
        loop = loop_of("rate", "single")
        loop.train_loader = DataLoader(Subset(TensorDataset(*rows(20, 3)), range(9)), 3)
        keeper = ModelCheckpoint(tmp_path, every_n_steps=1, keep=None)
        path = resume and next(tmp_path.glob(f"*-step=0*{resume}.pt"))
        loop.fit(num_epochs=3, callbacks=[labels("labels"), keeper], resume_from=path)
        weights.append(values_of(loop.model))
    assert distance(*weights) == 0


def test_a_checkpoint_of_a_criterion_with_other_tensors_is_refused_unless_on_resume_assigns_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half, twice, keeper = Scaled(0.5), Scaled(2.0), functools.partial(ModelCheckpoint, tmp_path)
    loop_of("rate", "single").fit(num_epochs=3, callbacks=[Assigns(criterion=half), keeper()])
    for callbacks in ([], [Assigns()]):
        with pytest.raises(CheckpointError, match=r"scale is not in tl\.criterion\. If a callback assigned"):
            loop_of("rate", "single").fit(num_epochs=4, callbacks=[*callbacks, keeper()], resume_from=tmp_path)
    loop = loop_of("rate", "single")
    with pytest.warns(UserWarning, match="with which the training ended: the checkpoint belongs to another criterion"):
        loop.fit(num_epochs=3, callbacks=[keeper()], resume_from=tmp_path)
    assert loop.global_step == 12
    loop.fit(num_epochs=4, callbacks=[Assigns(criterion=twice), keeper()], resume_from=tmp_path)
    assert "a criterion with other values than in the checkpoint: scale. If the training" in capsys.readouterr().err
    assert loop.criterion.scale == 2


def test_load_best_leaves_a_criterion_with_other_tensors_unchanged_and_warns(tmp_path: Path) -> None:
    loop, keeper = loop_of("rate", "single"), ModelCheckpoint(tmp_path, monitor="loss")
    loop.criterion = Scaled(0.5)
    loop.fit(num_epochs=1, callbacks=[keeper])
    loop.criterion = nn.MSELoss()
    with pytest.warns(UserWarning, match=r"other tensors \(scale\) than MSELoss, so tl\.criterion is unchanged"):
        assert keeper.load_best()["place"]["epoch"] == 1
    loop.criterion = Scaled(2.0)
    keeper.load_best()
    assert loop.criterion.scale == 0.5
    loop.criterion = Scaled([2.0, 3.0])
    with pytest.warns(UserWarning, match=r"other tensors \(scale\) than Scaled, so tl\.criterion is unchanged"):
        keeper.load_best()
    assert loop.criterion.scale.tolist() == [2.0, 3.0]


def test_a_loader_without_batches_that_a_hook_assigns_is_refused() -> None:
    empty = DataLoader(TensorDataset(torch.ones(3, 3), torch.ones(3, 1)), batch_size=4, drop_last=True)
    with pytest.raises(ConfigurationError, match="so no batch would be left"):
        loop_of("rate", "single").fit(num_epochs=4, callbacks=[Assigns(train_loader=empty)])


class Shrinks(nn.Module):
    """As modules of quantization-aware training do: a buffer takes the shape of what is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(self.scale) == 1:
            self.scale = torch.full((4,), 0.5, dtype=torch.float64)
        return x * self.scale[-1]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.scale = torch.empty_like(state_dict[f"{prefix}scale"])
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_a_buffer_may_change_its_shape_while_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    def fit(epochs: int, folder: str, resume: str | None = None, *, kind: Any = Shrinks) -> torch.Tensor:
        loop = loop_of("rate", "single", seed=0)
        loop.model.head = nn.Sequential(loop.model.head, kind())
        loop.fit(num_epochs=epochs, callbacks=[ModelCheckpoint(tmp_path / folder)], resume_from=resume)
        return loop.model.body.weight.detach()

    whole = fit(4, "whole")
    fit(2, "parts")
    assert torch.equal(fit(4, "parts", "last"), whole)

    class Fixed(Shrinks):
        _load_from_state_dict = nn.Module._load_from_state_dict

    with pytest.raises(CheckpointError, match=r"head\.1\.scale"):
        fit(6, "parts", "last", kind=Fixed)


class Reshapes(Shrinks):
    """A criterion whose buffer takes the shape of what is loaded."""

    def forward(self, y_pred: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(y_pred - y).square().mean()


def test_a_buffer_of_a_criterion_may_change_its_shape_while_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    found = []
    for epochs, resume in ((2, None), (4, "last"), (4, None)):
        loop = loop_of("rate", "single")
        loop.criterion = Reshapes()
        keeper = ModelCheckpoint(tmp_path / ("whole" if epochs == 4 and resume is None else "parts"))
        loop.fit(num_epochs=epochs, callbacks=[keeper], resume_from=resume)
        found.append([p.tolist() for p in loop.model.parameters()])
    assert found[1] == found[2]

    class Fixed(Reshapes):
        _load_from_state_dict = nn.Module._load_from_state_dict

    loop = loop_of("rate", "single")
    loop.criterion = Fixed()
    with pytest.raises(CheckpointError, match=r"scale has shape \(1,\) in tl\.criterion, but \(4,\)"):
        loop.fit(num_epochs=6, callbacks=[ModelCheckpoint(tmp_path / "parts")], resume_from="last")


class Sharpness(torch.optim.Optimizer):
    """SAM as its public implementations write it: it holds another optimizer, and shares that one's groups."""

    needs_closure = True

    def __init__(self, params: Any, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho, "lr": 0.05})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        loss = torch.enable_grad()(closure)()
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / norm))
        torch.enable_grad()(closure)()
        for p in parameters:
            p.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        return loss


def test_the_state_of_an_optimizer_within_an_optimizer_is_resumed(tmp_path: Path) -> None:
    def fit(epochs: int, folder: str, resume: str | None = None) -> torch.Tensor:
        loop: Any = loop_of("rate", "single", seed=0)
        loop.optimizer = Sharpness(loop.model.parameters())
        loop.fit(num_epochs=epochs, callbacks=[ModelCheckpoint(tmp_path / folder)], resume_from=resume)
        inner = loop.optimizer.base_optimizer
        assert inner.param_groups is loop.optimizer.param_groups
        return loop.model.body.weight.detach()

    whole = fit(4, "whole")
    fit(2, "parts")
    assert torch.equal(fit(4, "parts", "last"), whole)


class Replaces(AbstractCallback):
    """Replaces the optimizer after the first epoch, and again in one hook where a run resumes."""

    def __init__(self, again_in: str = "on_train_begin") -> None:
        super().__init__("replaces")
        if again_in:
            setattr(self, again_in, self.replace_again)

    def on_epoch_end(self) -> None:
        if self.train_loop_obj.epoch == 0:
            self.replace()

    def replace_again(self) -> None:
        if self.train_loop_obj.resumed and self.train_loop_obj.epoch >= 1:
            self.replace()

    def replace(self) -> None:
        loop = self.train_loop_obj
        loop.optimizer = torch.optim.Adam(loop.model.parameters(), lr=0.01)


@pytest.mark.parametrize("epochs", [2, 3], ids=["finished", "not finished"])
def test_an_optimizer_that_a_callback_has_replaced_is_assigned_before_its_state_is_loaded(
    epochs: int, tmp_path: Path
) -> None:
    def fit(epochs: int, folder: str, callback: Replaces, resume: str | None = None) -> Any:
        loop: Any = loop_of("rate", "single", seed=0)
        loop.fit(num_epochs=epochs, callbacks=[callback, ModelCheckpoint(tmp_path / folder)], resume_from=resume)
        return loop.model.body.weight.tolist(), loop.optimizer.state_dict()["state"][0]["step"], loop.epoch

    whole = fit(epochs, "whole", Replaces())
    fit(2, "parts", Replaces())
    for late in ("", "on_resume"):
        with pytest.raises(CheckpointError, match=r"made with Adam, but the loop has .*so again in on_train_begin"):
            fit(epochs, "parts", Replaces(late), "last")
    assert fit(epochs, "parts", Replaces(), "last") == whole


def test_what_a_late_callback_logs_at_the_end_of_an_epoch_is_in_the_checkpoint(tmp_path: Path) -> None:
    class Late(AbstractCallback):
        def on_epoch_end(self) -> None:
            self.log("late", float(self.train_loop_obj.epoch))

    def fit(epochs: int, resume: str | None) -> list[float]:
        loop = loop_of("rate", "single")
        late = Late("late", execution_order=5000)
        loop.fit(num_epochs=epochs, callbacks=[ModelCheckpoint(tmp_path), late], resume_from=resume)
        return loop.history["late"]

    assert fit(2, None) == [0, 1]
    assert fit(3, "last") == [0, 1, 2]


def test_a_callback_is_reset_for_another_loop_and_not_for_a_second_fit() -> None:
    class Counts(AbstractCallback):
        resets = 0

        def reset(self) -> None:
            self.resets += 1

    counts = Counts("counts")
    loop = loop_of("rate", "single")
    for _ in range(2):
        loop.fit(num_epochs=1, callbacks=[counts])
    assert counts.resets == 0
    loop_of("rate", "single").fit(num_epochs=1, callbacks=[counts])
    assert counts.resets == 1


def test_at_an_epochs_end_a_run_resumes_with_a_longer_dataset(tmp_path: Path) -> None:
    loop_of("longer", "single").fit(num_epochs=1, callbacks=[ModelCheckpoint(tmp_path)])
    loop = loop_of("longer", "single")
    CHANGES["longer"](loop)
    loop.fit(num_epochs=2, callbacks=[ModelCheckpoint(tmp_path)], resume_from="last")
    assert loop.global_step == 4 + 5


def test_a_change_of_the_table_is_made_once() -> None:
    change = Change("rate", "on_batch_begin")
    loop = loop_of("rate", "single")
    loop.fit(num_epochs=2, callbacks=[change])
    assert change.done
    assert [group["lr"] for group in loop.optimizer.param_groups] == [0.02]
