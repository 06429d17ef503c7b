"""Models made of what torch has beside plain layers, trained by two ranks and compared with a hand-written loop."""

from __future__ import annotations

import copy
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.loops import cpu_loop
from torch import Tensor, nn, optim
from torch.func import functional_call, vmap
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TTBasicModel


class Guarded(nn.Module):
    """Keeps a lock, a weak reference and a file, and leaves them out of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.calls = 0
        self._make()

    def _make(self) -> None:
        self.lock = threading.Lock()
        self.ref = weakref.ref(self.fc)
        self.noise = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.calls += 1
        return torch.tanh(self.ref()(x))  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("lock", "ref", "noise")}
        return {**state, "noise_state": self.noise.get_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        noise_state = state.pop("noise_state")
        self.__dict__.update(state)
        self._make()
        self.noise.set_state(noise_state)


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True)
        self.normed = parametrizations.weight_norm(nn.Linear(6, 6))
        self.layers = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), backend="eager")
        self.guarded = Guarded()
        self.out = nn.Linear(6, 3)
        self.scale = torch.ops.aten.mul.Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.normed(self.rnn(x.view(-1, 2, 4))[0][:, -1])
        return self.scale(self.out(self.guarded(self.layers(x))), 2.0)


def by_hand(model: nn.Module, data: TensorDataset, batch_size: int, epochs: int) -> None:
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


# torch.compile looks at what it traces, and torch hides the warning of that; pytest shows it.
def cross_entropy(*args: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(*args)  # torch 2.6 can't compile the function itself


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_recurrent_guarded_parametrized_and_compiled_parts_train_in_ranks() -> None:
    torch.manual_seed(0)
    model = Net().double()
    data = TensorDataset(torch.randn(20, 8).double(), torch.randint(3, (20,)))
    reference = copy_of(model)
    lock, ref, attached = model.guarded.lock, model.guarded.ref, model.layers
    loop = cpu_loop(
        model,
        DataLoader(data, 4, worker_init_fn=lambda worker: torch.backends.cudnn.enabled),
        optim.Adam(model.parameters(), lr=0.01),
        torch.compile(cross_entropy, backend="eager"),
        gpu_mode="ddp",
        devices=2,
    )
    loop.fit(num_epochs=2)
    by_hand(reference, data, 8, 2)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=0, atol=1e-9)
    # What the module leaves out of its state stayed the caller's own; what it keeps came back.
    assert (model.guarded.lock, model.guarded.ref, model.layers) == (lock, ref, attached)
    assert model.guarded.calls == 2 * 3
    x = data.tensors[0]
    torch.testing.assert_close(model(x), reference(x), rtol=0, atol=1e-9)


def copy_of(model: Net) -> Net:
    """Another one with the same weights; a compiled module can't be deep-copied."""
    other = Net().double()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    return other


class Hooked(TTBasicModel):
    """Hooks on its parameters, and a layer with sparse gradients whose memory is that of another layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.rows = nn.Embedding(20, 3, sparse=True)
        self.doubled = self.fc.weight.register_hook(lambda gradient: gradient * 2)
        self.fc.weight.register_hook(lambda gradient: gradient * 3)
        self.fc.bias.register_post_accumulate_grad_hook(halve)
        self.fc.register_forward_hook(lambda module, args, output: output + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.rows((x[:, 0] * 1000).long() % 20)


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 0.5


class Registers(AbstractCallback):
    """Registers hooks beside those that came, and removes one of these by its handle."""

    def __init__(self) -> None:
        super().__init__("registers")

    def on_train_begin(self) -> None:
        fc = self.train_loop_obj.model.fc
        for _ in range(4):
            fc.register_forward_hook(lambda module, args, output: None)
            fc.weight.register_hook(lambda gradient: None)
        self.train_loop_obj.model.doubled.remove()


@pytest.mark.long(but=1)
@pytest.mark.parametrize("mode, devices", [("single", 1), ("dp", 2), ("ddp", 2), ("ddp", 3)])
def test_hooks_of_parameters_and_sparse_gradients_count_in_every_mode(mode: str, devices: int) -> None:
    torch.manual_seed(0)
    model = Hooked().double()
    data = TensorDataset(torch.randn(24, 4).double(), torch.randn(24, 3).double())
    reference = copy.deepcopy(model)
    reference.fc.weight.register_hook(lambda gradient: gradient * 3)  # a copy has no hooks of parameters
    reference.fc.bias.register_post_accumulate_grad_hook(halve)
    optimizer = optim.SGD(reference.parameters(), lr=0.1)
    for x, y in DataLoader(data, 6):
        optimizer.zero_grad()
        F.mse_loss(reference(x), y).backward()
        optimizer.step()
    loop = cpu_loop(
        model,
        DataLoader(data, 6 // devices if mode == "ddp" else 6),
        criterion=nn.MSELoss(),
        gpu_mode=mode,
        devices=devices,
    )
    loop.fit(num_epochs=1, callbacks=[Registers()])
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=0, atol=1e-12)


class Stacked(TTBasicModel):
    """An ensemble with stacked weights; a model without values is the template for ``functional_call``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, 4))
        self.template = [nn.Linear(4, 2, bias=False, device="meta")]

    def forward(self, x: Tensor) -> Tensor:
        def one(weight: Tensor) -> Tensor:
            return functional_call(self.template[0], {"weight": weight}, (x,))

        return vmap(one)(self.weight).mean(0)


@pytest.mark.long
def test_tensors_without_values_beside_the_model_stay_so_after_ranks() -> None:
    torch.manual_seed(0)
    model = Stacked()
    reference = copy.deepcopy(model)
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 2))
    sgd = optim.SGD(reference.parameters(), lr=0.1)
    for x, y in DataLoader(data, 4):
        sgd.zero_grad()
        F.mse_loss(reference(x), y).backward()
        sgd.step()
    loader, own = DataLoader(data, 2), optim.SGD(model.parameters(), lr=0.1)
    cpu_loop(model, loader, own, nn.MSELoss(), gpu_mode="ddp", devices=2).fit(num_epochs=1)
    torch.testing.assert_close(model.weight, reference.weight)
    assert model.template[0].weight.is_meta
