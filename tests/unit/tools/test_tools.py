"""find_lr, find_batch_size and summary: against loops and counts by hand, and that they leave no trace."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from kit.small_loop import Net, make_loop
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from conftest import make_data
from trainloop import AbstractCallback, MultiLoss, MultiOptimizer, TrainLoop, TTBasicModel, TTModel
from trainloop.errors import ConfigurationError
from trainloop.tools import LearningRates


def state_of(loop: TrainLoop[Any]) -> Any:
    return copy.deepcopy(
        (
            loop.model.state_dict(),
            loop.optimizer.state_dict(),
            loop.history.to_dict(),
            (loop.epoch, loop.global_step, loop.total_iteration_idx, loop.callbacks, repr(loop.run_config)),
            torch.get_rng_state(),
            loop.train_loader.generator.get_state(),
            [module.training for module in loop.model.modules()],
        )
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def shuffled_loop(**arguments: Any) -> TrainLoop[Any]:
    loop = make_loop(**arguments)
    loop.train_loader = DataLoader(make_data(), 16, shuffle=True, generator=torch.Generator().manual_seed(4))
    return loop


@pytest.mark.parametrize("tool", ["find_lr", "find_batch_size", "summary"])
@pytest.mark.parametrize("trained", [False, True])
def test_no_tool_leaves_a_trace(tool: str, trained: bool) -> None:
    loop = shuffled_loop(gpu_mode="dp", devices=1)
    if trained:
        loop.fit(num_epochs=1)
    loop.model.fc.eval()
    before = state_of(loop)
    getattr(loop, tool)()
    assert same(state_of(loop), before)


def test_find_lr_is_the_sweep_by_hand() -> None:
    loop = make_loop()
    found = loop.find_lr(smallest=1e-4, largest=0.5, steps=20)
    assert not found.diverged
    assert found.rates[0] == pytest.approx(1e-4)
    assert found.rates[-1] == pytest.approx(0.5)
    model, losses = copy.deepcopy(loop.model), []
    optimizer = optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    batches = [batch for _ in range(3) for batch in loop.train_loader][:20]
    for rate, (x, y) in zip(found.rates, batches):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model.fc(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert list(found.losses) == pytest.approx(losses, rel=1e-6)
    assert found.suggestion in found.rates
    assert "suggestion" in str(found)


class Normed(TTBasicModel):
    """Its first layer is frozen by ``eval()``, as users freeze BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.modes: list[bool] = []

    def forward(self, x: Any) -> Any:
        self.modes.append(self.norm.training)
        return self.fc(self.norm(x))


def test_modules_in_eval_stay_so_in_the_tools_as_in_fit() -> None:
    torch.manual_seed(0)
    model = Normed()
    model.norm.eval()
    loader = DataLoader(make_data(), 16)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    loop = TrainLoop(model, loader, None, None, optimizer, nn.CrossEntropyLoss(), progress_bar=False)
    hand_written = copy.deepcopy(model)
    found = loop.find_lr(smallest=1e-4, largest=0.5, steps=10)
    stepping = optim.SGD(hand_written.parameters(), lr=0.1)
    losses = []
    for rate, (x, y) in zip(found.rates, [batch for _ in range(3) for batch in loader]):
        stepping.param_groups[0]["lr"] = rate
        stepping.zero_grad()
        loss = nn.functional.cross_entropy(hand_written(x), y)
        loss.backward()
        stepping.step()
        losses.append(loss.item())
    assert list(found.losses) == pytest.approx(losses, rel=1e-6)


def test_find_lr_ends_where_the_loss_runs_away_and_draws_it(tmp_path: Any, may_leave: Any) -> None:
    may_leave("matplotlib")  # keeps its fonts open
    found = make_loop(optimizer=None).find_lr(smallest=1e-3, largest=1e9, steps=60)
    assert found.diverged
    assert len(found.losses) < 60
    found.plot(str(tmp_path / "lr.png"))
    assert (tmp_path / "lr.png").stat().st_size > 1000
    html = LearningRates((0.1, 0.2), (2.0, 1.0), False)._repr_html_()
    assert "<tr><td>0.2</td><td>1</td><td>1.4737</td></tr>" in html
    assert html.endswith("no suggestion")
    rising = LearningRates(tuple(range(1, 31)), tuple(map(float, range(30))), False)
    assert rising.suggestion is None  # rather than the least bad


def test_find_lr_ends_where_a_negative_loss_is_not_finite() -> None:
    loop = make_loop(optimizer=None)
    loop.criterion = lambda y_pred, target: -y_pred.square().mean()
    found = loop.find_lr(smallest=1e-3, largest=1e9, steps=60)
    assert found.diverged
    assert len(found.losses) < 60


def test_groups_keep_their_ratio() -> None:
    model = Net()
    groups = [{"params": [model.fc.weight], "lr": 0.1}, {"params": [model.fc.bias], "lr": 0.3}]
    seen = []

    class Groups(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append([group["lr"] for group in self.param_groups])
            return super().step(closure)

    make_loop(model, optimizer=Groups(groups)).find_lr(steps=10)
    assert len(seen) == 10
    assert all(second == pytest.approx(3 * first) for first, second in seen)


class Hungry(TTBasicModel):
    """Has memory for 40 samples."""

    def __init__(self, error: type[Exception] = torch.OutOfMemoryError, most: int = 40) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)
        self.error, self.most = error, most

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise self.error(f"{len(x)} samples")
        return self.fc(x)


def test_find_batch_size_survives_memory_errors() -> None:
    found = make_loop(Hungry(), gpu_mode="dp", devices=1).find_batch_size(smallest=5)
    assert {size: speed is not None for size, speed in found.tried.items()} == {5: 1, 10: 1, 20: 1, 40: 1, 80: 0}
    assert found.suggestion == 40
    assert found.limit == "memory"
    assert "batch_size 80: out of memory" in str(found)
    down = make_loop(Hungry(most=3), gpu_mode="dp", devices=1).find_batch_size()
    assert down.suggestion == 2  # 16 is too large, and so are 8 and 4
    most = make_loop(gpu_mode="dp", devices=1).find_batch_size(largest=50)
    assert (most.suggestion, most.limit) == (50, "largest")
    assert make_loop(Hungry(most=0), gpu_mode="dp", devices=1).find_batch_size().suggestion is None
    with pytest.raises(ZeroDivisionError):  # not about memory
        make_loop(Hungry(ZeroDivisionError), gpu_mode="dp", devices=1).find_batch_size()


def test_find_batch_size_times_whole_batches() -> None:
    sizes = []

    class Sees(Hungry):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            return super().forward(x)

    found = make_loop(Sees(most=1000), gpu_mode="dp", devices=1).find_batch_size(smallest=len(make_data()) // 2 + 1)
    assert {*sizes} == {*found.tried}


class Deep(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 3)
        self.head_again = self.head  # tied: counted once

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_summary_counts_what_there_is() -> None:
    model = Deep()
    found = make_loop(model, optimizer=optim.Adam(model.parameters())).summary()
    weights = [8 * 16 + 16, 16 * 16 + 16, 16 * 3 + 3]
    by_name = {layer.name: layer for layer in found.layers}
    assert [by_name[name].parameters for name in ("body.0", "body.2", "head")] == weights
    assert found.layers[0].parameters == sum(weights)
    assert by_name["body"].output == "[16, 16]"
    # Two for a multiplication with an addition, for each sample; the backward pass takes two such products but for the
    # first layer, whose input needs no gradient.
    products = [16 * 2 * n for n in (8 * 16, 16 * 16, 16 * 3)]
    assert found.forward_flops == by_name[""].flops == sum(products)
    assert [by_name[name].flops for name in ("body.0", "body", "head")] == [products[0], sum(products[:2]), products[2]]
    assert found.step_flops == 3 * sum(products) - products[0]
    assert found.weight_bytes == found.gradient_bytes == 4 * sum(weights)
    assert found.optimizer_bytes == pytest.approx(2 * 4 * sum(weights), abs=64)  # Adam's two means, and its counters
    # Kept for backward: one output that relu and the next layer share, the last layer's input, the loss's. The first
    # layer's input is counted with the batch.
    assert found.batch_bytes == 16 * 8 * 4 + 16 * 8
    assert 4 * 16 * (16 + 16 + 3) <= found.activation_bytes < 4 * 16 * (16 + 16 + 3) + 4 * 16 * 8
    assert "memory of a training step" in str(found)
    assert make_loop(model).summary(torch.randn(4, 8)).samples == 4
    assert len(make_loop(model).summary(depth=1).layers) == 3
    flat = torch.zeros(30)
    model.parts = nn.ParameterList([nn.Parameter(flat[:10]), nn.Parameter(flat[10:])])
    assert make_loop(model).summary().weight_bytes == 4 * sum(weights) + 4 * 30  # parts of one storage


class KeepsOutput(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class OfLazyLayers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.LazyLinear(3)


class SparseEmbedding(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.embedding(x[:, 0].long().clamp(0, 3))


@pytest.mark.parametrize("kind", [KeepsOutput, OfLazyLayers, SparseEmbedding, Net])
def test_tools_take_what_training_takes(kind: type[Net]) -> None:
    """Outputs that the model keeps, lazy and sparse layers; and an optimizer whose copy lacks attributes."""
    model = kind()
    optimizer = optim.LBFGS(model.parameters()) if kind is Net else optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loop = make_loop(model, optimizer=optimizer)
    if kind is KeepsOutput:
        loop.model(torch.zeros(2, 8))
    found = loop.summary()
    trained = {Net: 8 * 3 + 3, SparseEmbedding: 8 * 3 + 3 + 4 * 3}.get(kind, 8 * 3 + 3)
    assert found.layers[0].parameters == trained
    assert found.optimizer_bytes == 0 if kind is Net else found.optimizer_bytes > 0
    assert len(loop.find_lr(steps=10).losses) == 10


class Library(RuntimeError):
    """An error of a library that allocates without torch."""

    text = ""

    def __str__(self) -> str:
        return self.text


@pytest.mark.parametrize(
    "text", ["CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"]
)
def test_find_batch_size_knows_the_errors_of_libraries(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "text", text)
    found = make_loop(Hungry(Library), gpu_mode="dp", devices=1).find_batch_size(smallest=20, steps=2)
    assert found.suggestion == 40


def test_an_error_with_other_causes_at_every_size_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "text", "GET was unable to find an engine to execute this computation")
    with pytest.raises(Library, match="unable to find an engine"):
        make_loop(Hungry(Library, most=0), gpu_mode="dp", devices=1).find_batch_size(steps=2)


@pytest.mark.long
def test_find_batch_size_takes_several_optimizers_and_a_batch_larger_than_the_data() -> None:
    class TwoParts(Deep):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> MultiLoss:
            x, y = batch_data
            hidden = self.body(x)
            return MultiLoss({"body": hidden.square().mean(), "head": criterion(self.head(hidden.detach()), y)})

    model = TwoParts()
    parts = {"body": model.body, "head": model.head}
    optimizers = {name: optim.SGD(part.parameters(), 0.1) for name, part in parts.items()}
    loop = make_loop(model, optimizer=MultiOptimizer(optimizers))
    loop.train_loader = DataLoader(make_data(), 1000, drop_last=True)
    assert loop.find_batch_size(steps=np.int64(2)).suggestion == len(make_data())  # type: ignore[arg-type]


def test_the_first_batch_leaves_no_workers_behind() -> None:
    loop = make_loop()
    loop.train_loader = DataLoader(make_data(), 16, num_workers=1, persistent_workers=True)
    loop.summary()
    assert loop.train_loader._iterator is None


class Autoencoder(TTModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        return criterion(self.layer(batch_data), batch_data)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return self.layer(batch_data), batch_data, {}


def test_summary_of_a_loader_whose_batches_are_single_tensors_has_a_step() -> None:
    model, loader = Autoencoder(), DataLoader(torch.ones(8, 3), 4)  # type: ignore[arg-type]
    loop = TrainLoop(model, loader, None, None, optim.Adam(model.parameters()), nn.MSELoss())
    found = loop.summary()
    assert found.samples == 4
    assert found.step_flops == 2 * found.forward_flops == 2 * 2 * 4 * 3 * 3  # the inputs need no gradients
    assert found.optimizer_bytes > 0


def test_summary_says_what_was_not_counted() -> None:
    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.rnn(x[:, None])[0][:, 0])

    found = make_loop(Recurrent()).summary()
    assert {layer.kind: layer.counted for layer in found.layers} == {"Recurrent": False, "Linear": True, "LSTM": False}
    for summary in (found, make_loop(Recurrent()).summary(depth=0)):
        assert f" {found.forward_flops:,}+\n" in str(summary)
        assert "recurrent layers are not counted" in str(summary)
    assert next(line for line in str(found).splitlines() if "LSTM" in line).endswith(" ?")
    assert "recurrent" not in str(make_loop().summary())


class Calls(AbstractCallback):
    def on_epoch_begin(self) -> None:
        self.train_loop_obj.find_lr()


WRONG = {
    "no data": (lambda: TrainLoop(Net(), None).find_lr(), "train_loader is None"),
    "no batch": (lambda: TrainLoop(Net(), None).summary(), r"summary\(batch\)"),
    "in a run": (lambda: make_loop().fit(num_epochs=1, callbacks=[Calls()]), "Call it before fit"),
    "few steps": (lambda: make_loop().find_lr(steps=3), "steps=3"),
    "rates": (lambda: make_loop().find_lr(smallest=1.0, largest=0.1), "smallest < largest"),
    "size": (lambda: make_loop().find_batch_size(smallest=0), "smallest=0"),
    "batches": (
        lambda: TrainLoop(m := Net(), [(torch.ones(2, 8), torch.ones(2))], optimizer=optim.SGD(m.parameters()))
        .find_batch_size(),
        "without a batch_size, so there is no size to change",
    ),
    "several optimizers": (
        lambda: make_loop(m := Net(), optimizer=MultiOptimizer([optim.SGD([m.fc.weight]), optim.SGD([m.fc.bias])]))
        .find_lr(),
        "several optimizers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_no_tool_can_do_is_said(case: str) -> None:
    call, words = WRONG[case]
    with pytest.raises(ConfigurationError, match=words):
        call()


@pytest.mark.parametrize("depth", [-1, "2", 1.5])
def test_a_depth_that_is_no_count_is_refused(depth: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"summary: depth=.*must be an int of 0 or more"):
        make_loop().summary(depth=depth)
