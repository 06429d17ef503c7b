"""What refers to a model's layers beside their registration refers to a replica's layers in its replicas."""

from __future__ import annotations

import functools
import inspect
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Pair(NamedTuple):
    first: nn.Module
    second: nn.Module


def unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def decorated(*args: Any) -> Any:
        return function(*args)

    return decorated


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


class InDefaults(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [lambda x, layer=layer: layer(x) for layer in (self.first, self.norm, self.last)]

    forward = in_turn(lambda self: self.layers)


class InAFunctionThatCallsItself(Net):
    def __init__(self) -> None:
        super().__init__()

        def after(x: Tensor, steps: int) -> Tensor:
            return after(x, steps - 1) if steps else self.own(x)

        self.run = functools.partial(after, steps=5)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class InTheVariableOfTwoFunctions(Net):
    def __init__(self) -> None:
        super().__init__()
        norm = self.last

        def choose(layer: nn.Module) -> None:
            nonlocal norm
            norm = layer

        self.choose, self.norm_of = choose, lambda x: norm(x)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.choose(self.norm)
        return self.last(self.norm_of(self.first(x)))


class InAListOfItself(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers: list[Any] = [self.first, self.norm, self.last]
        self.layers.append(self.layers)

    forward = in_turn(lambda self: self.layers[3][3][3][3][:3])


class InOtherContainers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(self.first, self.norm)
        self.found = defaultdict(list, last=[self.last])

    forward = in_turn(lambda self: [self.pair.first, self.pair.second, *self.found["last"]])


class InAMethod(Net):
    def __init__(self) -> None:
        super().__init__()
        self.run = self.own

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class InADecoratedMethod(Net):
    def __init__(self) -> None:
        super().__init__()
        for _ in range(5):
            self.own = unchanged(self.own)  # type: ignore[method-assign]


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


MADE = [InAList, InADict, InFunctions, InAMethod, InAHook, Hidden, patched, partially, InDefaults, InADecoratedMethod]
MADE += [InAFunctionThatCallsItself, InTheVariableOfTwoFunctions, InAListOfItself, InOtherContainers]


@pytest.mark.parametrize("make", MADE)
def test_each_way_to_refer_to_layers_gives_the_numbers_of_their_names(make: Callable[[], Any]) -> None:
    assert all(map(torch.equal, state_after(make()), state_after(Net())))


def test_the_models_own_references_stay() -> None:
    model = InFunctions()
    kept = [*model.layers]
    state_after(model)
    assert all(now is before for now, before in zip(model.layers, kept, strict=True))
    assert model.layers[1].args == (model.norm,)


@pytest.mark.parametrize(
    "criterion",
    [
        lambda net: net.own,
        lambda net: lambda x: net.own(x),
        lambda net: functools.partial(Net.own, net),
        lambda net: {"a": [net.own]},
    ],
)
def test_criteria_that_call_the_model_call_the_replica(criterion: Callable[[Net], Any]) -> None:
    class WithLoss(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: Any = None) -> Tensor:
            criterion = criterion["a"][0] if isinstance(criterion, dict) else criterion
            return (criterion or self.own)(batch_data).square().mean()

    def state_with(criterion: Callable[[Net], Any]) -> list[Tensor]:
        model = WithLoss()
        TTDataParallel(model, devices=2).get_loss(torch.linspace(-1, 1, 24).reshape(8, 3), criterion(model)).backward()
        assert model.calls == 1
        return [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]

    assert all(map(torch.equal, state_with(criterion), state_with(lambda net: None)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_a_model_with_a_torchscript_module_refers_to_its_replicas_other_layers() -> None:
    class WithScript(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.jit.script(nn.Sequential(self.first))
            self.layers = [self.norm, self.last]

        def get_loss(self, batch_data: Any, criterion: Any, device: Any = None) -> Tensor:
            norm, last = self.layers
            return criterion(last(norm(self.first(batch_data))), batch_data[:, :1])

    model = WithScript()
    batch = torch.linspace(-1, 1, 24).reshape(8, 3)
    TTDataParallel(model, devices=2).get_loss(batch, nn.functional.mse_loss).backward()
    assert model.norm.num_batches_tracked == 1


def test_what_all_replicas_change_beside_their_layers_is_kept() -> None:
    class Changes(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers: list[Any] = [self.first]
            self.state: dict[str, Any] = {"norm": self.norm, "calls": 0}
            self.found: dict[str, Any] = {"last": self.last}

        def forward(self, x: Tensor) -> Tensor:
            self.state["calls"] += 1
            x = self.state["norm"](self.layers[0](x))
            self.layers.append(x.detach())
            self.found["input"] = x
            return self.found["last"](x)

    model = Changes()
    with pytest.warns(UserWarning, match=r"__call__ changes found, .* so the change is lost"):
        state_after(model)
    assert model.layers[0] is model.first
    assert torch.cat(model.layers[1:]).shape == (8, 4)
    assert model.state == {"norm": model.norm, "calls": 1}
    assert model.found == {"last": model.last}


def test_functions_of_replicas_keep_what_describes_them() -> None:
    class Described(Net):
        def __init__(self) -> None:
            super().__init__()

            def layers(x: Tensor, *, last: bool = True) -> Tensor:
                """Return the output."""
                return self.own(x)

            self.run = functools.update_wrapper(functools.partial(unchanged(layers)), layers)

        def forward(self, x: Tensor) -> Tensor:
            assert [*inspect.signature(self.run).parameters] == ["x", "last"]
            assert inspect.get_annotations(self.run.func, eval_str=True)["last"] is bool
            assert self.run.func.__doc__ == self.run.__doc__ == "Return the output."
            return self.run(x)

    state_after(Described())


class Holder:
    """An object that is no module, and refers to a layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


def test_the_models_own_layers_in_a_replica_are_warned_of_once() -> None:
    class ByAVariable(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(holder.layer(self.first(x)))

    model = ByAVariable()
    holder = Holder(model.norm)
    wrapper = TTDataParallel(model, devices=2)
    with pytest.warns(UserWarning, match="a replica calls BatchNorm1d of the model itself"):
        wrapper(torch.linspace(-1, 1, 24).reshape(8, 3))
    wrapper(torch.linspace(-1, 1, 24).reshape(8, 3))
