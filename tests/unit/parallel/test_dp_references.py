"""What refers to a model's layers beside their registration refers to a replica's layers in its replicas."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainloop.parallel import TTDataParallel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x)

    def own(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.norm(self.first(x)))


def in_turn(layers: Any) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in layers(self):
            x = layer(x)
        return x

    return forward


class InAList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [self.first, (self.norm, self.last)]

    forward = in_turn(lambda self: [self.layers[0], *self.layers[1]])


class InADict(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = OrderedDict(a={"first": self.first}, b={"norm": self.norm, "last": self.last})

    forward = in_turn(lambda self: [layer for layers in self.layers.values() for layer in layers.values()])


class InFunctions(Net):
    def __init__(self) -> None:
        super().__init__()
        unset = lambda x: later(x)  # noqa: E731  # a variable that never gets a value
        self.layers = [lambda x: self.first(x), functools.partial(nn.Module.__call__, self.norm), self.last, unset]
        if not self.layers:
            later = None

    forward = in_turn(lambda self: self.layers[:3])


class InAMethod(Net):
    def __init__(self) -> None:
        super().__init__()
        self.run = self.own

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class InAHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda module, inputs, output: self.norm(output))

    forward = in_turn(lambda self: [self.first, self.last])


class Hidden(Net):
    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "hidden", self.norm)

    forward = in_turn(lambda self: [self.first, self.hidden, self.last])


def patched() -> nn.Module:
    net = Net()
    net.forward = types.MethodType(Net.own, net)  # type: ignore[method-assign]
    return net


def partially() -> nn.Module:
    net = Net()
    net.forward = functools.partial(Net.own, net)  # type: ignore[method-assign]
    return net


def state_after(model: Any) -> list[Tensor]:
    out = TTDataParallel(model, devices=2)(torch.linspace(-1, 1, 24).reshape(8, 3))
    out.square().sum().backward()
    state = [*model.state_dict().values(), *(p.grad for p in model.parameters()), torch.tensor(model.calls)]
    return [tensor.detach().clone() for tensor in state]


@pytest.mark.parametrize("make", [InAList, InADict, InFunctions, InAMethod, InAHook, Hidden, patched, partially])
def test_each_way_to_refer_to_layers_gives_the_numbers_of_their_names(make: Callable[[], Any]) -> None:
    assert all(map(torch.equal, state_after(make()), state_after(Net())))


def test_the_models_own_references_stay() -> None:
    model = InFunctions()
    kept = [*model.layers]
    state_after(model)
    assert all(now is before for now, before in zip(model.layers, kept, strict=True))
    assert model.layers[1].args == (model.norm,)
