"""``FailureRecorder`` and ``tl.replay``: each kind of step, its record, and the replay's bits."""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import random
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.loops import cpu_loop
from kit.recorded_models import Augmented, Broken, CarriesHidden, HasCritic, Noisy
from torch import Tensor, nn, optim
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainloop import AbstractCallback, MultiLoss, MultiOptimizer, TrainLoop, TTModel
from trainloop._support.rng import seed_all
from trainloop.callbacks import FailureRecorder, ModelCheckpoint, TerminateOnNaN
from trainloop.callbacks.watch.failure_recorder import not_finite
from trainloop.checkpoint import load
from trainloop.errors import CheckpointError, ConfigurationError, DeviceError
from trainloop.train_loop.training.whole_step import WholeStepTraining

BAD = 28  # the sample whose first value is 0: the last epoch's eighth batch of four


class Net(Noisy):
    """Raises for the bad sample, with the loss's bits in the text."""

    raises = True

    def checked(self, x: Tensor, loss: Tensor) -> Tensor:
        if self.raises and bool((x[:, 0] == 0).any()):
            raise Broken(loss.detach().double().item().hex())
        return loss


class Spectral(Net):
    """Its forward changes buffers on which its weights depend."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.layers[0])


class Counters(Net):
    """Its forward changes buffers of one form in place and replaces one; its output depends on them."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b", "c", "replaced"):
            self.register_buffer(name, torch.ones(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        for factor, buffer in enumerate((self.a, self.b, self.c), start=2):
            buffer *= 1 + factor / 100
        self.replaced = self.replaced * 1.01
        self.steps += 1
        scale = sum(part.sum() for part in (self.a, self.b, self.c, self.replaced)) / 100 + self.steps / 100
        return super().forward(x * scale)


class Carries(CarriesHidden, Net):
    pass


class Two(Net):
    """Two losses, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 3)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        loss = MultiLoss({"a": criterion(self(x), y), "b": criterion(self.other(x), y)}, {"a": 0, "b": 1})
        self.checked(x, loss["a"] + loss["b"])
        return loss


class Beside(Net):
    """A scale of the inputs that only the optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = [nn.Parameter(torch.rand(6))]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.beside[0])


class Yields(HasCritic, Net):
    pass


def of_net(model: Any) -> optim.Optimizer:
    return optim.Adam(model.parameters(), lr=0.01)


def of_beside(model: Any) -> optim.Optimizer:
    return optim.Adam([*model.parameters(), *model.beside], lr=0.01)


def of_two(model: Any) -> MultiOptimizer:
    return MultiOptimizer([optim.Adam(model.layers.parameters()), optim.SGD(model.other.parameters(), lr=0.1)])


def of_yields(model: Any) -> MultiOptimizer:
    critic, net = optim.SGD(model.critic.parameters(), lr=0.1), optim.Adam(model.layers.parameters(), lr=0.01)
    return MultiOptimizer({"critic": critic, "net": net})


def searching(model: Any) -> optim.Optimizer:
    return optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)


def samples(n: int = 40, bad: int = BAD) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)
    x[bad, 0] = 0.0
    return x, y


@dataclass
class Kind:
    model: type[Any] = Net
    optimizer: Callable[[Any], Any] = of_net
    dataset: type[Any] = TensorDataset
    accumulation: int = 1
    batch_size: int = 4
    loop: dict[str, Any] | None = None
    criterion: Callable[[], Any] = nn.CrossEntropyLoss

    def made(self, seed: int = 0, **kwargs: Any) -> TrainLoop:
        torch.manual_seed(seed)
        model = self.model()
        return TrainLoop(
            model,
            DataLoader(self.dataset(*samples()), self.batch_size),
            optimizer=self.optimizer(model),
            criterion=self.criterion(),
            **{"accelerator": "cpu", "progress_bar": False, **(self.loop or {}), **kwargs},
        )


KINDS = {
    "plain": Kind(),
    "seeded": Kind(loop={"seed": 3}),
    "augmented": Kind(dataset=Augmented),
    "augmented, seeded": Kind(dataset=Augmented, loop={"seed": 3}),
    "bf16": Kind(loop={"use_amp": "bf16"}),
    "fp16": Kind(loop={"use_amp": "fp16"}),
    "accumulated": Kind(accumulation=3),
    "accumulated, short last step": Kind(accumulation=6),
    "clipped": Kind(loop={"gradient_clip_norm": 0.1}),
    "closure": Kind(optimizer=searching),
    "closure, accumulated": Kind(optimizer=searching, accumulation=2),
    "several losses": Kind(Two, of_two),
    "several losses, accumulated": Kind(Two, of_two, accumulation=3),
    "alternating": Kind(Yields, of_yields),
    "alternating, accumulated": Kind(Yields, of_yields, accumulation=3),
    "beside": Kind(Beside, of_beside, accumulation=2),
    "carried": Kind(Carries),
    "carried, accumulated": Kind(Carries, accumulation=3),
    "spectral": Kind(Spectral),
    "spectral, accumulated": Kind(Spectral, accumulation=3),
    "counters": Kind(Counters),
    "counters, accumulated": Kind(Counters, accumulation=3),
    "summed": Kind(criterion=lambda: nn.CrossEntropyLoss(reduction="sum"), accumulation=2),
    "weighted": Kind(criterion=lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0])), accumulation=3),
    "ignored": Kind(criterion=lambda: nn.CrossEntropyLoss(ignore_index=0), accumulation=3),
    "recomputed": Kind(loop={"checkpoint_modules": nn.Sequential}),
}


def failed(loop: TrainLoop, recorder: FailureRecorder, error: type[BaseException] = Broken, **kwargs: Any) -> Any:
    with pytest.raises(error) as caught:
        loop.fit(num_epochs=1, callbacks=[recorder, *kwargs.pop("callbacks", ())], **kwargs)
    return caught.value


def state_of(loop: TrainLoop) -> list[Any]:
    """What a replay must leave as it was."""
    optimizers = loop.optimizer if isinstance(loop.optimizer, MultiOptimizer) else [loop.optimizer]
    model: Any = loop.model
    return [
        {name: (id(t), t.data_ptr(), t.clone()) for name, t in model.state_dict(keep_vars=True).items()},
        [one.state_dict() for one in optimizers],
        [(p.grad, p.requires_grad) for p in model.parameters()],
        [module.training for module in model.modules()],
        (torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False), torch.get_num_threads()),
        (loop.epoch, loop.global_step, loop.total_iteration_idx, loop.run_config, loop.options, loop.callbacks),
        loop.history.to_dict(),
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (Tensor, np.ndarray)):
        return bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.long(every=2)
@pytest.mark.parametrize("name", KINDS)
def test_the_replay_raises_the_same_exception(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    recorder = FailureRecorder(tmp_path)
    error = failed(kind.made(), recorder, grad_accumulation=kind.accumulation)
    assert recorder.recorded is not None
    other = kind.made(seed=7)  # other weights; and, after a step, an optimizer with a state
    other.model.raises = False
    other.fit(num_iterations=2)
    other.model.raises = True
    before = state_of(other)
    with pytest.raises(Broken) as again:
        other.replay(recorder.recorded)
    assert str(again.value) == str(error)  # the bits of the loss
    frames = [(frame.name, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)][-2:]
    assert [(frame.name, frame.lineno) for frame in traceback.extract_tb(again.value.__traceback__)][-2:] == frames
    assert same(before, state_of(other))


@pytest.mark.parametrize("name", [name for name in KINDS if name != "fp16"])
def test_a_replay_that_does_not_fail_has_the_recorded_bits(name: str, tmp_path: Path) -> None:
    """The loss and gradients of a step in which the gradient is not finite: recorded before the optimizer's step."""
    kind = KINDS[name]
    recorder = FailureRecorder(tmp_path, check_every_n_steps=1)
    loop = kind.made()
    loop.model.raises = False
    step = loop.model.checked
    loop.model.checked = lambda x, loss: turns_nan(loop.model, x, loss)
    loop.fit(num_epochs=1, callbacks=[recorder, TerminateOnNaN()], grad_accumulation=kind.accumulation)
    del loop.model.checked
    assert loop.model.checked == step
    assert recorder.recorded is not None
    other = kind.made(seed=7)
    other.model.raises = False
    other.model.checked = lambda x, loss: turns_nan(other.model, x, loss)
    before = state_of(other)
    replay = other.replay(recorder.recorded)
    assert replay.loss_difference == 0
    assert replay.gradient_difference == 0
    assert "not finite" in replay.error
    assert any(math.isnan(norm) for norm in replay.gradient_norms.values())
    record = load(recorder.recorded)
    assert not record["stepped"]
    assert any(not p.isfinite().all() for p in record["gradients"].values())
    assert all(p.isfinite().all() for p in record["parameters"].values())
    assert same(before, state_of(other))


def turns_nan(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    """A gradient that is not finite, of a loss that is: by a hook, as a backward of one's own might."""
    if bool((x[:, 0] == 0).any()):
        handles: list[Any] = []
        weight = model.layers[-1].bias

        def spoil(gradient: Tensor) -> Tensor:
            handles.pop().remove()
            return gradient * math.nan

        handles.append(weight.register_hook(spoil))
    return loss


class Raises(AbstractCallback):
    """A hook that fails in the eighth step."""

    def __init__(self, hook: str) -> None:
        super().__init__(f"raises in {hook}")
        setattr(self, hook, self.fail)

    def fail(self, *_: Any) -> None:
        if self.train_loop_obj.total_iteration_idx == 7:
            raise Broken("hook")


@pytest.mark.parametrize(
    ("hook", "accumulation", "compared", "stepped"),
    [
        ("on_batch_begin", 1, False, False),
        ("on_after_gradient_update", 1, True, False),
        ("on_after_gradient_update", 4, True, False),
        ("on_after_optimizer_step", 1, False, True),
        ("on_batch_end", 1, False, True),
        ("on_batch_end", 10, True, False),
    ],
)
def test_a_hook_that_raises(hook: str, accumulation: int, compared: bool, stepped: bool, tmp_path: Path) -> None:
    kind = Kind(loop={"gradient_clip_norm": 0.1})
    recorder, loop = FailureRecorder(tmp_path), kind.made()
    loop.model.raises = False
    failed(loop, recorder, callbacks=[Raises(hook)], grad_accumulation=accumulation)
    assert recorder.recorded is not None
    other = kind.made(seed=7)
    other.model.raises = False
    if stepped:
        with pytest.warns(UserWarning, match="an optimizer had stepped"):
            replay = other.replay(recorder.recorded)
        assert replay.loss_difference > 0
    else:
        replay = other.replay(recorder.recorded)
        assert replay.loss_difference == (None if hook == "on_batch_begin" else 0)
    assert replay.gradient_difference == (0 if compared else None)
    assert replay.loss.keys() == {"loss"}
    assert set(replay.gradient_norms) == {name for name, _ in other.model.named_parameters()}
    assert "Broken: hook" in str(replay)


class FailsToStep(optim.SGD):
    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 3:
            raise Broken("optimizer")
        return super().step(closure)


def test_an_optimizer_that_raises(tmp_path: Path) -> None:
    """It may have stepped some parameters; the gradients are compared clipped, as it found them."""
    kind = Kind(optimizer=lambda model: FailsToStep(model.parameters(), lr=0.1), loop={"gradient_clip_norm": 1e-3})
    recorder = FailureRecorder(tmp_path)
    failed(kind.made(), recorder)
    other = kind.made(seed=7)
    with pytest.warns(UserWarning, match="an optimizer had stepped, or was stepping"):
        replay = other.replay(str(recorder.recorded))
    assert (replay.loss_difference, replay.gradient_difference) == (0, 0)
    assert sum(norm**2 for norm in replay.gradient_norms.values()) < 1.01e-6


class FailsBackward(Net):
    def checked(self, x: Tensor, loss: Tensor) -> Tensor:
        if bool((x[:, 0] == 0).any()):
            loss.register_hook(self.fail)
        return loss

    @staticmethod
    def fail(gradient: Tensor) -> None:
        raise Broken("backward")


def test_a_backward_that_raises(tmp_path: Path) -> None:
    recorder = FailureRecorder(tmp_path)
    failed(Kind(FailsBackward).made(), recorder, grad_accumulation=3)
    with pytest.raises(Broken, match="backward"):
        Kind(FailsBackward).made(seed=7).replay(str(recorder.recorded))


# -- values that are not finite ----------------------------------------------------------------------------------------


class Root(Net):
    """The square root of a zero: finite in the forward, infinity times zero in the backward."""

    raises = False

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        loss = super().get_loss(batch_data, criterion, device)
        bad = (batch_data[0][:, 0] == 0).any()
        return loss + (self.scale * (0.0 if bad else 1.0)).sqrt().sum()


class Explodes(Net):
    raises = False

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x / torch.where((x[:, :1] == 0).any(), 0.0, 1.0))
        return result


@pytest.mark.usefixtures("events_on_stdout")
def test_a_gradient_that_is_not_finite_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder, kind = FailureRecorder(tmp_path, check_every_n_steps=1), Kind(Root)
    kind.made().fit(num_epochs=1, callbacks=[recorder])
    said = capsys.readouterr().out
    path = tmp_path / "failure-step=00000008-rank=0.pt"
    assert f'tl.replay("{path}", detect="nan")' in said
    assert said.count("not finite") == 1  # the first of a fit, though weights are NaN from then on
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    replay = kind.made(seed=7).replay(path, detect="nan")
    assert (replay.module, replay.function, replay.not_finite_before) == (None, "SqrtBackward0", [])
    assert replay.line is not None
    assert ".sqrt().sum()" in replay.line
    assert __file__ in replay.line
    assert replay.gradient_difference == 0
    assert "first backward function with a gradient that is not finite: SqrtBackward0" in str(replay)


@pytest.mark.usefixtures("events_on_stdout")
def test_a_loss_that_is_not_finite_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder, kind = FailureRecorder(tmp_path), Kind(Explodes)  # the loss is looked at in each step
    loop = kind.made()
    loop.fit(num_epochs=1, callbacks=[recorder, TerminateOnNaN()])
    assert loop.global_step == 8
    assert "the loss is not finite" in capsys.readouterr().out
    replay = kind.made(seed=7).replay(str(recorder.recorded), detect="nan")
    assert replay.module == "layers.0 (Linear)"
    assert replay.loss_difference == 0


class RootOfDistance(nn.Module):
    """Its loss is finite, but the gradient of its own parameter is not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out, y) + (self.scale - self.scale.detach()).square().sqrt()


@pytest.mark.usefixtures("events_on_stdout")
def test_a_gradient_of_the_criterion_that_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Kind(criterion=RootOfDistance).made()
    loop.model.raises = False
    loop.fit(num_iterations=1, callbacks=[FailureRecorder(tmp_path, check_every_n_steps=1)])
    assert "the gradient of 'criterion.scale' is not finite in step 1" in capsys.readouterr().out


@pytest.mark.usefixtures("events_on_stdout")
def test_weights_that_were_not_finite_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder, kind = FailureRecorder(tmp_path, check_every_n_steps=3), Kind(Root)
    kind.made().fit(num_epochs=1, callbacks=[recorder])
    assert "parameters that were not finite before this step: 1 (such as 'scale')" in capsys.readouterr().out
    assert str(recorder.recorded).endswith("step=00000009-rank=0.pt")
    replay = kind.made(seed=7).replay(str(recorder.recorded), detect="nan")
    assert replay.not_finite_before == ["model.scale"]


def test_values_that_are_not_finite_are_found_in_any_container() -> None:
    nan, inf = math.nan, math.inf
    found = not_finite(
        {
            "large": torch.full((3,), 1e300, dtype=torch.float64),
            "nested": [torch.ones(2).bfloat16(), {"x": torch.tensor([1, nan]).half()}],
            "complex": torch.tensor([1 + 1j, complex(nan, 0)]),
            "finite complex": torch.ones(2, dtype=torch.complex64),
            "integers, text, nothing": (torch.arange(3), "nan", None, torch.empty(0)),
            "sparse": torch.eye(3).mul(inf).nan_to_num(nan=0.0, posinf=inf).to_sparse(),
            "eight bits": torch.ones(3).to(torch.float8_e5m2),
            "infinite eight bits": torch.tensor([inf]).to(torch.float8_e5m2),
            "scalar": torch.tensor(-inf),
        }
    )
    assert found == ["nested", "complex", "sparse", "infinite eight bits", "scalar"]
    assert not not_finite({"": 1.0})


def test_gradients_that_amp_found_infinite_are_no_failure(tmp_path: Path) -> None:
    kind = Kind(loop={"use_amp": {"init_scale": 2.0**40}})
    loop, recorder = kind.made(), FailureRecorder(tmp_path, check_every_n_steps=1)
    loop.model.raises = False
    loop.fit(num_epochs=1, callbacks=[recorder])
    assert recorder.recorded is None


# -- loaders -----------------------------------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    def __init__(self, collates: bool = False) -> None:
        self.x, self.y = samples()
        self.collates = collates

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        if index == BAD and not self.collates:
            raise Broken("row")
        return self.x[index], self.y[index]


def collate(rows: list[Any]) -> Any:
    if any(x[0] == 0 for x, _ in rows):
        raise Broken("collate")
    return torch.utils.data.default_collate(rows)


@pytest.mark.parametrize(
    ("workers", "seed", "collates"),
    [
        (0, None, False),
        (0, 3, True),
        pytest.param(2, None, True, marks=pytest.mark.long),  # torch waits 5 s for each worker
        pytest.param(2, 3, False, marks=pytest.mark.long),
    ],
)
def test_the_indices_of_a_batch_that_can_t_be_loaded(
    workers: int, seed: int | None, collates: bool, tmp_path: Path
) -> None:
    recorder, model = FailureRecorder(tmp_path), Net()
    made: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": workers}
    made["collate_fn"] = collate if collates else None
    loader = DataLoader(Rows(collates), **made)
    loop = cpu_loop(model, loader, of_net(model), seed=seed)
    with contextlib.suppress(Broken):  # no traceback, whose frames would keep the loader's workers
        loop.fit(num_epochs=1, callbacks=[recorder])
    gc.collect()  # torch's own reraise() keeps them in a cycle
    if torch.__version__ < TorchVersion("2.7"):  # which does not end them then, in a hand-written loop neither
        for worker in multiprocessing.active_children():
            worker.kill()
            worker.join()
    assert recorder.recorded is not None
    record = load(recorder.recorded)
    assert record["kind"] == "loader"
    assert len(record["indices"]) == 4
    assert BAD in record["indices"]
    with pytest.raises(Broken, match="collate" if collates else "row"):
        loop.replay(recorder.recorded)


class Lists(Rows):
    """Each index is a list of rows, or a slice of them as a tuple."""

    def __getitem__(self, index: Any) -> Any:
        rows = list(index) if isinstance(index, list) else list(range(*index))
        if BAD in rows:
            raise Broken(str(rows))
        return self.x[rows], self.y[rows]


@pytest.mark.parametrize("kind", [list, lambda rows: (rows[0], rows[-1] + 1)], ids=["lists", "tuples"])
def test_an_index_of_several_rows_is_one_index(kind: Any, tmp_path: Path) -> None:
    recorder, model = FailureRecorder(tmp_path), Net()
    sampler: Any = [kind([*range(i, i + 4)]) for i in range(0, 40, 4)]
    loader = DataLoader(Lists(), batch_size=None, sampler=sampler)
    loop = cpu_loop(model, loader, of_net(model), seed=3)
    with pytest.raises(Broken) as first:
        loop.fit(num_epochs=1, callbacks=[recorder])
    assert len(load(recorder.recorded)["indices"]) == 1  # type: ignore[arg-type]
    with pytest.raises(Broken) as again:
        loop.replay(str(recorder.recorded))
    assert str(again.value) == str(first.value)


def test_the_recorder_changes_no_order_of_workers(tmp_path: Path) -> None:
    """The loader's indices are noted where the loader is read as in a hand-written loop."""
    states = []
    for callbacks in ([], [FailureRecorder(tmp_path)]):
        seed_all(0)
        model = Net()
        model.raises = False
        loader = DataLoader(Rows(True), 4, shuffle=True, num_workers=1)
        loop = TrainLoop(model, loader, None, None, of_net(model), nn.CrossEntropyLoss(), accelerator="cpu")
        loop.fit(num_epochs=2, callbacks=callbacks)
        states.append([model.state_dict(), torch.get_rng_state()])
    assert same(*states)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from Rows()


def batches() -> Iterator[Any]:
    x, y = samples()
    for begin in range(0, 40, 4):
        yield x[begin : begin + 4], y[begin : begin + 4]


class Each:
    """An iterable of batches, which begins again each time."""

    def __init__(self, made: Callable[[], Any]) -> None:
        self.made = made

    def __iter__(self) -> Iterator[Any]:
        return iter(self.made())


@pytest.mark.parametrize("loader", [list(batches()), Each(batches)], ids=["list", "generator"])
def test_a_step_with_any_iterable_as_loader(loader: Any, tmp_path: Path) -> None:
    model, recorder = Net(), FailureRecorder(tmp_path)
    loop = TrainLoop(model, loader, None, None, of_net(model), nn.CrossEntropyLoss(), accelerator="cpu")
    error = failed(loop, recorder)
    with pytest.raises(Broken, match=re.escape(str(error))):
        loop.replay(str(recorder.recorded))


def test_a_stream_that_fails_has_no_indices(tmp_path: Path) -> None:
    model, recorder = Net(), FailureRecorder(tmp_path)
    loop = TrainLoop(model, DataLoader(Stream(), 4), None, None, of_net(model), nn.CrossEntropyLoss())
    error = failed(loop, recorder)
    assert recorder.recorded is None
    assert not hasattr(error, "__notes__")


# -- batches -----------------------------------------------------------------------------------------------------------


class Record:
    """No plain data."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)


class OfRecords(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return super().get_loss((batch_data.x, batch_data.y), criterion, device)


def test_a_batch_that_is_no_plain_data_is_read_when_trusted(tmp_path: Path) -> None:
    model, recorder = OfRecords(), FailureRecorder(tmp_path)
    records = [Record(*batch) for batch in batches()]
    loop = TrainLoop(model, Each(lambda: records), None, None, of_net(model), nn.CrossEntropyLoss(), accelerator="cpu")
    error = failed(loop, recorder)
    path = str(recorder.recorded)
    torch.load(path, weights_only=True)  # all but the batch
    with pytest.raises(CheckpointError, match="trusted=True"):
        loop.replay(path)
    with pytest.raises(Broken, match=re.escape(str(error))):
        loop.replay(path, trusted=True)


def test_a_batch_that_can_t_be_pickled(tmp_path: Path) -> None:
    model, recorder = OfRecords(), FailureRecorder(tmp_path)
    records = [Record(*batch) for batch in batches()]
    for record in records:
        record.opens = lambda: None  # type: ignore[attr-defined]
    loop = TrainLoop(model, Each(lambda: records), None, None, of_net(model), nn.CrossEntropyLoss(), accelerator="cpu")
    failed(loop, recorder)
    with pytest.raises(CheckpointError, match=r"has no batch: list can't be pickled \("):
        loop.replay(str(recorder.recorded), trusted=True)


class Pops(Net):
    """Takes the labels out of the batch, as models of transformers do."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return super().get_loss((batch_data["inputs"][0], batch_data.pop("labels")), criterion, device)


class Writes(Net):
    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        loss = super().get_loss(batch_data, criterion, device)
        batch_data[0].square_()
        return loss


def test_what_a_model_takes_out_of_a_batch_is_recorded(tmp_path: Path) -> None:
    model, recorder = Pops(), FailureRecorder(tmp_path)
    made = [{"inputs": [x], "labels": y} for x, y in batches()]
    loop = TrainLoop(model, made, None, None, of_net(model), nn.CrossEntropyLoss(), accelerator="cpu")
    error = failed(loop, recorder)
    with pytest.raises(Broken, match=re.escape(str(error))):
        loop.replay(str(recorder.recorded))


def test_a_batch_that_is_written_to_is_said(tmp_path: Path) -> None:
    kind, recorder = Kind(Writes), FailureRecorder(tmp_path)
    loop = kind.made()
    loop.model.raises = False
    failed(loop, recorder, callbacks=[Raises("on_after_gradient_update")])
    with pytest.warns(UserWarning, match="get_loss changed a tensor of the batch in place"):
        replay = loop.replay(str(recorder.recorded))
    assert replay.loss_difference


class Grows(Net):
    """A buffer that forwards change, larger than what is copied in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1 << 19))
        self.register_buffer("still", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1.0  # type: ignore[operator]
        return super().forward(x)


def test_buffers_that_are_not_put_back_are_named(tmp_path: Path) -> None:
    kind, recorder = Kind(Grows), FailureRecorder(tmp_path)
    failed(kind.made(), recorder)
    with pytest.warns(UserWarning, match=r"after the failing forward: model\.seen"), pytest.raises(Broken):
        kind.made().replay(str(recorder.recorded))


class DrawsLate(Net):
    """Does not use Python's and numpy's generators before ``first_draw``, as a branch that is taken rarely."""

    first_draw = 0

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(x) if self.forwards >= self.first_draw else self.layers(x)


@pytest.mark.parametrize(("first_draw", "sure"), [(130, False), (129, False), (101, False), (100, True), (50, True)])
def test_generators_that_are_used_for_the_first_time_late(first_draw: int, sure: bool, tmp_path: Path) -> None:
    """The sample of batch 130 is bad; a branch that draws for the first time in this step gets its random numbers."""
    recorder, model = FailureRecorder(tmp_path), DrawsLate()
    model.first_draw = first_draw
    x, y = samples(130 * 4, bad=130 * 4 - 1)
    made = [(x[i : i + 4], y[i : i + 4]) for i in range(0, len(x), 4)]
    loop = TrainLoop(model, made, None, None, of_net(model), nn.CrossEntropyLoss(), accelerator="cpu")
    error = failed(loop, recorder)
    model.forwards = first_draw
    with contextlib.ExitStack() as stack:
        if not sure:
            stack.enter_context(pytest.warns(UserWarning, match="generator was used for the first time"))
        again = stack.enter_context(pytest.raises(Broken))
        loop.replay(str(recorder.recorded))
    assert (str(again.value) == str(error)) == (sure or first_draw == 130)


# -- what is refused, and what must not hide the error -----------------------------------------------------------------


def test_arguments_are_checked(tmp_path: Path) -> None:
    loop = Kind().made()
    with pytest.raises(ConfigurationError, match="several FailureRecorders"):
        loop.fit(num_epochs=1, callbacks=[FailureRecorder(tmp_path), FailureRecorder(tmp_path)])
    with pytest.raises(ConfigurationError, match="can't be written to"):
        loop.fit(num_epochs=1, callbacks=[FailureRecorder("/proc/nowhere")])
    with pytest.raises(ConfigurationError, match="detect='inf'"):
        loop.replay(tmp_path, detect="inf")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="no such file"):
        loop.replay(tmp_path / "none.pt")


def test_records_of_something_else_are_refused(tmp_path: Path) -> None:
    recorder = FailureRecorder(tmp_path / "failures")
    failed(Kind().made(), recorder)
    for wrong in ("cuda:99", "gpu", 0.5):
        with pytest.raises(DeviceError, match=f"replay: device={wrong!r}: .* such as 'cpu'"):
            Kind().made().replay(str(recorder.recorded), device=wrong)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"the record belongs to another model: .*other\.weight"):
        Kind(Two, of_two).made().replay(str(recorder.recorded))
    loop = Kind().made()
    loop.model.raises = False
    keeper = ModelCheckpoint(tmp_path / "checkpoints")
    loop.fit(num_epochs=1, callbacks=[keeper])
    with pytest.raises(CheckpointError, match="is not a record"):
        loop.replay(str(keeper.last_path))

    class Calls(AbstractCallback):
        def on_epoch_end(self) -> None:
            self.train_loop_obj.replay(str(recorder.recorded))

    with pytest.raises(ConfigurationError, match="outside of fit"):
        loop.fit(num_epochs=1, callbacks=[Calls()])


def test_a_record_that_can_t_be_written_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    recorder = FailureRecorder(tmp_path)
    monkeypatch.setattr("trainloop.checkpoint.save", full)
    error = failed(Kind().made(), recorder)
    assert recorder.recorded is None
    assert "could not write" in "".join(getattr(error, "__notes__", ["could not write"]))
    recorder = FailureRecorder(tmp_path, check_every_n_steps=1)
    loop = Kind(Root).made()
    loop.fit(num_epochs=1, callbacks=[recorder])
    assert loop.global_step == 10


def test_failures_outside_of_a_step_are_not_recorded(tmp_path: Path) -> None:
    kind, recorder = Kind(), FailureRecorder(tmp_path)
    for hook in ("on_epoch_begin", "on_epoch_end", "on_train_begin", "on_evaluation_begin"):
        loop = kind.made(validation_loader=DataLoader(TensorDataset(*samples()), 8))
        loop.model.raises = False
        raises = Raises(hook)
        raises.fail = raises_always  # type: ignore[method-assign]
        setattr(raises, hook, raises_always)
        failed(loop, recorder, callbacks=[raises])
    loop = kind.made(validation_loader=DataLoader(TensorDataset(*samples()), 8))
    loop.model.get_loss_eval = raises_always
    loop.model.raises = False
    failed(loop, recorder)
    assert list(tmp_path.iterdir()) == []


def raises_always(*_: Any, **__: Any) -> None:
    raise Broken("always")


def test_a_signal_is_no_failure(tmp_path: Path) -> None:
    loop = Kind().made()
    loop.model.checked = raises_interrupt
    failed(loop, FailureRecorder(tmp_path), KeyboardInterrupt)
    assert list(tmp_path.iterdir()) == []


def raises_interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_two_fits_write_two_records(tmp_path: Path) -> None:
    recorder, loop = FailureRecorder(tmp_path), Kind().made()
    paths = []
    for _ in range(2):
        loop.global_step = 0
        failed(loop, recorder)
        paths.append(recorder.recorded)
    assert [Path(str(path)).name for path in paths] == [
        "failure-step=00000008-rank=0.pt",
        "failure-step=00000008-rank=0_2.pt",
    ]


@pytest.mark.long
def test_training_has_the_same_bits_with_a_recorder(tmp_path: Path) -> None:
    for name, kind in KINDS.items():
        states = []
        for callbacks in ([], [FailureRecorder(tmp_path, check_every_n_steps=1)]):
            loop = kind.made()
            loop.model.raises = False
            seed_all(0)
            loop.fit(num_epochs=1, callbacks=callbacks, grad_accumulation=kind.accumulation)
            states.append([loop.model.state_dict(), torch.get_rng_state(), random.getstate(), loop.history.to_dict()])
        assert same(*states), name


def test_dp_is_recorded(tmp_path: Path) -> None:
    kind, recorder = Kind(loop={"gpu_mode": "dp", "devices": 2}), FailureRecorder(tmp_path)
    failed(kind.made(), recorder)
    with pytest.raises(Broken):
        Kind().made().replay(str(recorder.recorded))


class Logarithm(TTModel):
    """Of a negative number in the eighth batch, in a step that is one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = batch_data
        return criterion(self.fc(x), y) + 0.0 * ((x[:, 0] != 0).float().min() - 0.5).log()

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self.fc(batch_data[0]), batch_data[1], {}


@pytest.mark.skipif(torch.__version__ < TorchVersion("2.13"), reason="this torch can't trace a backward pass")
@pytest.mark.long
def test_a_whole_step_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph has stepped when its loss is known; the replay is not compiled."""
    monkeypatch.setattr(WholeStepTraining, "backend", "eager")
    kind, recorder = Kind(Logarithm), FailureRecorder(tmp_path)
    loop = kind.made(compile="step")
    loop.fit(num_epochs=1, callbacks=[recorder])
    assert str(recorder.recorded).endswith("failure-step=00000008-rank=0.pt")
    with pytest.warns(UserWarning, match="an optimizer had stepped"):
        replay = loop.replay(str(recorder.recorded), detect="nan")
    assert replay.module == "get_loss, outside of all modules"
    assert "fc.weight" in replay.gradient_norms
