"""checkpoint_modules: the same numbers, less kept, and no trace of what is computed twice."""

from __future__ import annotations

import copy
import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from kit.loops import cpu_loop
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from conftest import make_data
from trainloop import AbstractCallback, TrainLoop, TTBasicModel
from trainloop.errors import ConfigurationError
from trainloop.parallel.sharded.units import units_of
from trainloop.train_loop.run.idle import ModuleStates
from trainloop.train_loop.run.recompute import chosen_modules, recomputing


class Block(TTBasicModel):
    """With all that a second computation could show by: a draw, running statistics, a log."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        self.log("calls", 1.0, reduce="sum")
        return x + self.layers(x)


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Watches(AbstractCallback):
    def on_epoch_end(self) -> None:
        model = self.train_loop_obj.model
        assert isinstance(model.blocks[0], Block)
        assert type(copy.deepcopy(model.blocks[0])) is Block
        torch.save(model, io.BytesIO())


def trained(choice: Any, **arguments: Any) -> TrainLoop[Net]:
    model = Net()
    loop = cpu_loop(
        model,
        DataLoader(make_data(), 16),
        validation_loader=DataLoader(make_data(33), 16),
        seed=1,
        checkpoint_modules=choice,
        **arguments,
    )
    loop.fit(num_epochs=2, callbacks=[Watches()])
    return loop


@pytest.mark.long(every=2)
@pytest.mark.parametrize(
    "mode", [{}, {"gpu_mode": "dp", "devices": 2}, {"use_amp": "bf16"}], ids=["single", "dp", "amp"]
)
@pytest.mark.parametrize(
    "choice", [Block, "blocks.*", [nn.Linear, "blocks.1"], lambda name, module: name == "blocks.2"]
)
def test_numbers_are_the_same(choice: Any, mode: dict[str, Any]) -> None:
    plain, lean = trained(None, **mode), trained(choice, **mode)
    expected, found = plain.model.state_dict(), lean.model.state_dict()
    assert list(expected) == list(found)
    if mode.get("gpu_mode") == "dp":  # replicas draw their dropout in threads
        assert torch.equal(
            expected["blocks.0.layers.1.num_batches_tracked"], found["blocks.0.layers.1.num_batches_tracked"]
        )
    else:
        assert all(torch.equal(value, found[name]) for name, value in expected.items())
        assert plain.history["loss"] == lean.history["loss"]
    assert plain.history["calls"] == lean.history["calls"]  # computed twice, logged once
    assert {type(module) for module in lean.model.modules()} == {type(module) for module in plain.model.modules()}


class Penalised(Net):
    """Its loss has a penalty on gradients, so that two backward passes recompute a module."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        x = x.requires_grad_()
        with torch.enable_grad():
            out = self(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return criterion(out, y) + slope.square().mean()


def test_a_penalty_on_gradients_is_the_same() -> None:
    states = []
    for choice in (None, Block):
        model = Penalised().double()
        data = make_data()
        tensors = torch.utils.data.TensorDataset(data.tensors[0].double(), data.tensors[1])
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        loop = TrainLoop(
            model,
            DataLoader(tensors, 16),
            None,
            None,
            optimizer,
            nn.CrossEntropyLoss(),
            checkpoint_modules=choice,
            progress_bar=False,
        )
        torch.manual_seed(1)
        loop.fit(num_epochs=2)
        states.append((model.state_dict(), loop.history["calls"]))
    (expected, calls), (found, again) = states
    assert all(torch.allclose(value, found[name], atol=1e-12) for name, value in expected.items())
    assert calls == again


def test_less_is_kept() -> None:
    model, x, kept = Net(), make_data().tensors[0], []
    for choice in (None, Block):
        sizes: list[int] = []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with recomputing(model, choice), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(x)
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 3


def test_blocks_are_still_the_units_that_fsdp_finds() -> None:
    model = Net()
    with recomputing(model, "blocks.*"):
        assert [name for name, _ in units_of(model)] == ["blocks.0", "blocks.1", "blocks.2"]


def test_which_modules_are_meant() -> None:
    model = Net()
    blocks = list(model.blocks)
    assert chosen_modules(model, Block) == chosen_modules(model, "blocks.*") == blocks
    assert chosen_modules(model, [Block, nn.Linear]) == [*blocks, model.head]  # none inside another one
    assert chosen_modules(model, None) == []
    for wrong, words in {
        "block.*": "no module of Net matches 'block",
        nn.LSTM: "matches LSTM",
        3: "must be a module class",
    }.items():
        with pytest.raises(ConfigurationError, match=words):
            TrainLoop(model, None, checkpoint_modules=wrong)


def fitted(model: Net, choice: Any) -> TrainLoop[Net]:
    loop = cpu_loop(model, DataLoader(make_data(40), 16), checkpoint_modules=choice)
    loop.fit(num_epochs=2)
    return loop


class Mean:
    """A meter, as users write them."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.sums = {"all": torch.zeros(1)}


class Remembers(nn.Module):
    """A block whose forward reads and changes something beside its input and its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.init()

    def init(self) -> None: ...

    def factor(self, z: Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        # Not at the end: a computation that is done again ends with the last value that backward needs.
        return x + torch.tanh(self.linear(torch.tanh(z * self.factor(z.detach()))))


class Counts(Remembers):
    def init(self) -> None:
        self.calls = 0

    def factor(self, z: Tensor) -> Any:
        self.calls += 1
        return torch.tensor(1.0 + self.calls)


class HasBuffer(Remembers):
    def init(self) -> None:
        self.register_buffer("mean", torch.zeros(8))

    def factor(self, z: Tensor) -> Any:
        self.mean.lerp_(z.mean(0), 0.5)
        return 1 + self.mean.clone()


class AssignsBuffer(HasBuffer):
    def factor(self, z: Tensor) -> Any:
        self.mean = (self.mean + z.mean(0)) / 2
        return 1 + self.mean


class WritesData(HasBuffer):
    """As in many vector quantizers: autograd does not note the change."""

    def factor(self, z: Tensor) -> Any:
        self.mean.data.mul_(0.5).add_(z.mean(0))
        return 1 + self.mean.clone()


class PlainTensor(HasBuffer):
    def init(self) -> None:
        self.mean = torch.zeros(8)


class NewAttribute(Remembers):
    def factor(self, z: Tensor) -> Any:
        self.mean = (getattr(self, "mean", 0) + z.mean(0)) / 2
        return 1 + self.mean


class Meter(Remembers):
    def init(self) -> None:
        self.meter, self.lists = Mean(), [[1.0]]

    def factor(self, z: Tensor) -> Any:
        self.meter.values.append(float(z.mean()))
        self.meter.sums["all"] += 1
        self.lists[0].append(1.0)
        return self.meter.sums["all"] + len(self.meter.values) + len(self.lists[0])


class SpectralNorm(Remembers):
    def init(self) -> None:
        nn.utils.parametrizations.spectral_norm(self.linear)

    def factor(self, z: Tensor) -> Any:
        return 1.0


class OwnGenerator(Remembers):
    def init(self) -> None:
        self.generator, self.of_numpy = torch.Generator().manual_seed(0), np.random.default_rng(0)

    def factor(self, z: Tensor) -> Any:
        return torch.rand(8, generator=self.generator) + torch.from_numpy(self.of_numpy.random(8)).float()


class OtherGenerators(Remembers):
    def factor(self, z: Tensor) -> Any:
        return torch.from_numpy(np.random.rand(8)).float() + torch.tensor(random.random())


class LazyNorm(Remembers):
    def init(self) -> None:
        self.norm = nn.LazyBatchNorm1d()

    def factor(self, z: Tensor) -> Any:
        return self.norm(z)


class Scripted(LazyNorm):
    def init(self) -> None:
        self.norm = torch.jit.script(nn.BatchNorm1d(8))


def of_attributes(block: Any) -> Any:
    found = {name: value for name, value in vars(block).items() if name[0] != "_"}
    if isinstance(block, OwnGenerator):
        return [torch.rand(1, generator=found["generator"]), found["of_numpy"].random()]
    return [(value.values, value.sums) if isinstance(value, Mean) else value for value in found.values()]


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("calls", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("kind", Remembers.__subclasses__() + HasBuffer.__subclasses__() + LazyNorm.__subclasses__())
def test_what_a_forward_reads_and_changes_is_as_without_checkpointing(kind: type[Remembers], calls: int) -> None:
    class Repeats(Net):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(calls):
                for block in self.blocks:
                    x = block(x)
            return self.head(x)

    found = []
    for choice in (None, kind):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        model = Repeats()
        model.blocks = nn.ModuleList(kind() for _ in range(2))
        loop = fitted(model, choice)
        drawn = [*map(float, (torch.rand(1), np.random.rand(), random.random()))]
        found.append([model.state_dict(), loop.history["loss"], [*map(of_attributes, model.blocks)], drawn])
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=0)
    torch.testing.assert_close(found[1][1:], found[0][1:], rtol=0, atol=0)


def test_masks_are_not_kept_twice() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("mask", torch.ones(2**19))  # 2 MiB
            self.register_buffer("codes", torch.ones(2**19))

        def forward(self, x: Tensor) -> Tensor:
            self.codes.data.mul_(0.5)
            return torch.tanh(self.linear(x) * self.mask[0])

    masked = Masked()
    states = ModuleStates([masked], module=masked)
    masked(torch.ones(2, 8))
    states.drop_unchanged()
    mask, codes = masked.mask, masked.codes
    with states.in_use():
        assert masked.mask is mask
        assert masked.codes is not codes
        assert masked.codes[0] == 1
    assert masked.codes is codes
    assert codes[0] == 0.5


class Layer(nn.Module):
    def __init__(self, change: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.change = change

    def forward(self, x: Any, debug: Any = None) -> Any:
        x = x if self.change is None else self.change(self, x, debug)
        return torch.tanh(self.linear(torch.tanh(self.linear(x))))


def trained_layers(layers: list[nn.Module], call: Any, choice: Any, get_loss: Any = None) -> TrainLoop[Any]:
    class Calls(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = call(block, x)
            return self.head(x)

    if get_loss is not None:
        Calls.get_loss = get_loss
    model = Calls()
    model.blocks = nn.ModuleList(copy.deepcopy(layers))
    return fitted(model, choice)


class State:
    """An argument of a user's class."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.calls = x, 0


def changed_in_dict(layer: Layer, states: dict[str, Any], debug: Any) -> Tensor:
    states["calls"] += 1
    states["x"] = states["x"] * states["calls"]
    return states["x"]


def changed_in_object(layer: Layer, state: State, debug: Any) -> Tensor:
    state.calls += 1
    state.x = state.x * (1 + state.calls)
    return state.x


def changed_list(layer: Layer, skipped: list[Tensor], debug: Any) -> Tensor:
    skipped.append(skipped[-1] * 2)
    return sum(skipped[1:], skipped[0])


def drawn(layer: Layer, x: Tensor, generator: torch.Generator) -> Tensor:
    return x * torch.rand(8, generator=generator)


@pytest.mark.parametrize(
    ("change", "call"),
    [
        (changed_in_dict, lambda block, x: block({"x": x, "calls": 0})),
        (changed_in_object, lambda block, x: block(State(x))),
        (changed_list, lambda block, x: block([x])),
        (drawn, lambda block, x: block(x, debug=torch.Generator().manual_seed(3))),
        (lambda layer, x, debug: x * debug, lambda block, x: block(x, debug=2)),  # torch's checkpoint() has a debug
    ],
    ids=["dict", "object", "list", "generator", "keyword of torch"],
)
def test_arguments_are_read_as_they_were(change: Any, call: Any) -> None:
    layers = [Layer(change)]
    models = [trained_layers(layers, call, choice).model for choice in (None, Layer)]
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=0, atol=0)


def test_parameters_may_be_frozen_for_one_forward() -> None:
    def frozen_once(self: Any, batch_data: Any, criterion: Any, device: Any) -> Tensor:
        x, y = batch_data
        self.blocks.requires_grad_(False)
        loss = criterion(self(x * 2), y)
        self.blocks.requires_grad_(True)
        return loss + criterion(self(x), y)

    layers = [Layer()]
    models = [trained_layers(layers, nn.Module.__call__, choice, frozen_once).model for choice in (None, Layer)]
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=0, atol=0)


def test_changes_that_would_be_made_twice_are_errors() -> None:
    def clamps(layer: Layer, x: Tensor, debug: Any) -> Tensor:
        layer.linear.weight.data.clamp_(-0.1, 0.1)
        return x

    def shrinks(layer: Layer, x: Tensor, debug: Any) -> Tensor:
        layer.linear.weight.data.mul_(0.9)
        return x

    def shrinks_later(layer: Layer, x: Tensor, debug: Any) -> Tensor:
        layer.calls = getattr(layer, "calls", 0) + 1
        if layer.calls == 3:
            with torch.no_grad():
                layer.linear.weight.mul_(0.9)
        return x

    trained_layers([Layer(clamps)], nn.Module.__call__, Layer)
    for change in (shrinks, shrinks_later):
        with pytest.raises(ConfigurationError, match=r"the forward of Layer changes its parameter linear\.weight"):
            trained_layers([Layer(change)], nn.Module.__call__, Layer)
    for call in (lambda block, x: block(x), lambda block, x: block(x=x), lambda block, x: block([x])):
        in_place = Layer(lambda layer, x, debug: (x[0] if isinstance(x, list) else x).mul_(2))
        with pytest.raises(ConfigurationError, match="the forward of Layer changes an input in place"):
            trained_layers([in_place], call, Layer)
