"""Objects of torch that pickle refuses, sent as ranks get them: each does there what it does here."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.torch_version import TorchVersion

from trainloop._transfer import pack
from trainloop.errors import UnpicklableError

_sent = contextlib.ExitStack()


@pytest.fixture(autouse=True)
def give_back() -> Iterator[None]:
    yield
    _sent.close()


def there_and_back(obj: Any) -> Any:
    """``obj`` as a rank would get it, read in this process; valid to the test's end."""
    return _sent.enter_context(pack(obj)).handle.open()


# -- by name -----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("tests_of_transfer::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


NAMED: dict[str, Callable[[], Any]] = {
    "operator of a module": lambda: twice,
    "torch.backends": lambda: torch.backends,
    "cudnn": lambda: torch.backends.cudnn,
    "mkldnn": lambda: torch.backends.mkldnn,
    "quantized": lambda: torch.backends.quantized,
    "opt_einsum": lambda: torch.backends.opt_einsum,
    "torch.ops": lambda: torch.ops,
    "class with another qualified name": lambda: torch.nn.attention.SDPBackend,
    "namespace of operators": lambda: torch.ops.aten,
    "operator": lambda: torch.ops.aten.add,
    "overload": lambda: torch.ops.aten.add.Tensor,
    "torch.classes": lambda: torch.classes,
    "inductor's configuration": lambda: __import__("torch._inductor.config")._inductor.config,
    "the process's generator": lambda: torch.default_generator,
}


if not hasattr(torch.backends, "opt_einsum"):  # before 2.7 until something imports it
    import torch.backends.opt_einsum


@pytest.mark.parametrize("name", NAMED)
def test_module_like_objects_are_found_by_name_there(name: str) -> None:
    thing = NAMED[name]()
    assert there_and_back([lambda: thing])[0]() is thing  # in a closure, as functions of a script have them


def test_a_function_of_the_script_may_switch_backends() -> None:
    scope: dict[str, Any] = {"__name__": "__main__", "torch": torch, "cudnn": torch.backends.cudnn}
    exec("def seed_everything(worker):\n    cudnn.benchmark = worker\n    return cudnn, torch.backends.mkldnn", scope)
    before = torch.backends.cudnn.benchmark
    try:
        cudnn, mkldnn = there_and_back(scope["seed_everything"])(not before)
        assert cudnn is torch.backends.cudnn
        assert mkldnn is torch.backends.mkldnn
        assert torch.backends.cudnn.benchmark is not before
    finally:
        torch.backends.cudnn.benchmark = before


def test_an_operator_of_the_script_is_named_with_what_to_do() -> None:
    @torch.library.custom_op("tests_of_transfer::twice_here", mutates_args=())
    def twice_here(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    with pytest.raises(UnpicklableError, match=r"An operator \(torch\.library\.custom_op\) .* define it in a module"):
        there_and_back(lambda: twice_here)


SCRIPTED = """
import torch

def double(x: torch.Tensor, times: int = 2) -> torch.Tensor:
    return times * x

double = torch.jit.script(double)
"""


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_a_scripted_function_is_its_modules_own_there_and_one_of_the_script_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scripted_of_a_user.py").write_text(SCRIPTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    double = importlib.import_module("scripted_of_a_user").double
    assert there_and_back([lambda: double])[0]() is double
    monkeypatch.delitem(sys.modules, "scripted_of_a_user")
    with pytest.raises(UnpicklableError, match="TorchScript can't be copied: define it in a module"):
        there_and_back(torch.jit.trace(lambda x: x + 1, torch.ones(1)))


def test_number_limits_travel() -> None:
    info, ints = there_and_back((torch.finfo(torch.bfloat16), torch.iinfo(torch.int16)))
    assert (info.eps, ints.max) == (torch.finfo(torch.bfloat16).eps, torch.iinfo(torch.int16).max)


# -- compiled ----------------------------------------------------------------------------------------------------------


class CountingBackend:
    """A backend of the user's, which says how it was called."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def test_a_compiled_submodule_is_compiled_there_in_the_same_way() -> None:
    backend = CountingBackend()
    model = nn.Module()
    model.layers = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend=backend, fullgraph=True)
    there = there_and_back(model)
    x = torch.ones(2, 4)
    assert torch.equal(there.layers(x), model.layers._orig_mod(x))
    context = there.layers.dynamo_ctx
    from torch._dynamo import eval_frame

    innermost_backend = getattr(eval_frame, "innermost_backend", eval_frame.innermost_fn)  # the name before 2.7
    other = innermost_backend(context.callback)
    other = getattr(other, "compiler_fn", other)
    assert (other.graphs, backend.graphs) == (1, 0)
    assert list(there.state_dict()) == list(model.state_dict())
    assert there.layers.training
    there.eval()
    assert not there.layers._orig_mod.training

    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    refuses = there_and_back(torch.compile(breaks, backend="eager", fullgraph=True))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        refuses(x)
    assert torch.equal(there_and_back(torch.compile(breaks, backend="eager"))(x), x + 1)


@pytest.mark.parametrize("parametrized", [False, True])
def test_a_module_that_is_compiled_in_place_is_compiled_there_too(parametrized: bool) -> None:
    backend = CountingBackend()

    class Layer(nn.Linear):  # torch compiles no frame of its own layers
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).tanh()

    layer: nn.Module = parametrizations.weight_norm(Layer(4, 4)) if parametrized else Layer(4, 4)
    layer.compile(backend=backend, fullgraph=True)
    there, same = there_and_back([layer, backend])
    x = torch.ones(2, 4)
    assert torch.equal(there(x), layer._call_impl(x))
    assert (same.graphs, backend.graphs) == (1, 0)
    with torch.no_grad():
        there.bias.add_(1)
    assert not torch.equal(there(x), layer._call_impl(x))


def test_compiled_layers_read_globals_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    script = types.ModuleType("__main__")
    source = """
class Block(nn.Module):
    def forward(self, x):
        return SCALE * x

def scaled(value):
    global SCALE
    SCALE = value
"""
    vars(script).update(nn=nn, SCALE=2.0)
    exec(source, vars(script))
    monkeypatch.setitem(sys.modules, "__main__", script)
    # The compiler begins in torch's Sequential, so that the block's globals are those of another module.
    with pack([torch.compile(nn.Sequential(script.Block()), backend="eager"), script.scaled]) as payload:
        monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))  # a rank does not run the script
        there, scaled = payload.handle.open()
        x = torch.ones(2, 4)
        assert torch.equal(there(x), 2 * x)
        scaled(3.0)
        assert torch.equal(there(x), 3 * x)


def test_compiled_functions_and_methods_travel() -> None:
    @torch.compile(backend="aot_eager", dynamic=False)
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def of_script(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x - y) ** 2).mean()

    # PyTorch 2.6 can't compile a function of its own.
    squared = F.mse_loss if torch.__version__ >= TorchVersion("2.7") else of_script

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.criterion = torch.compile(squared, backend="eager")
            self.bound = torch.compile(self.scaled, backend="eager")

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return twice(self.fc(x))

        @torch.compiler.disable
        def plain(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x)

    net, x = Net(), torch.ones(2, 4)
    there = there_and_back(net)
    with torch.no_grad():
        there.fc.weight.zero_()
        there.fc.bias.fill_(3)
    assert torch.equal(there.bound(x), torch.full((2, 4), 6.0))  # its own weights, not a copy's
    assert torch.equal(there.plain(x), torch.full((2, 4), 3.0))
    assert there.plain._torchdynamo_disable
    assert torch.equal(there.criterion(x, x + 1), torch.ones(()))


# -- modules -----------------------------------------------------------------------------------------------------------


def parametrized() -> nn.Module:
    made = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        parametrizations.orthogonal(nn.Linear(4, 4)),
    )
    return made.eval()  # spectral_norm's power iteration stands still


def old_style() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.utils.spectral_norm(nn.Linear(4, 4))).eval()


def pruned() -> nn.Module:
    made = nn.Linear(4, 4)
    prune.l1_unstructured(made, "weight", 0.5)
    return made


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).eval()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "parametrized": parametrized,
    "weight and spectral norm by hooks": old_style,
    "pruned": pruned,
    "scripted": scripted,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", MODULES)
def test_modules_that_torch_does_not_pickle(name: str) -> None:
    module = MODULES[name]()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    x = torch.randn(3, 4)
    there, optimizer_there = there_and_back((module, optimizer))
    assert torch.equal(there(x), module(x))
    assert list(there.state_dict()) == list(module.state_dict())
    # The optimizer's are the module's own, and what it steps is what computes.
    assert {id(p) for p in there.parameters()} == {id(p) for p in optimizer_there.param_groups[0]["params"]}
    for m, o in ((module, optimizer), (there, optimizer_there)):
        m(x).square().sum().backward()
        o.step()
    assert torch.equal(there(x), module(x))


def test_parametrizations_stay_what_they_are() -> None:
    module = parametrizations.weight_norm(nn.LSTM(4, 4), "weight_hh_l0")
    there = there_and_back(module)
    x = torch.randn(3, 2, 4)
    assert torch.equal(there(x)[0], module(x)[0])
    with parametrize.cached():
        assert there.weight_hh_l0 is there.weight_hh_l0
    parametrize.remove_parametrizations(there, "weight_hh_l0")
    assert type(there) is nn.LSTM
    assert parametrize.is_parametrized(module)


def test_hooks_and_tied_weights_travel_together() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0
            self.out.weight = self.fc.weight
            self.handle = self.fc.register_forward_hook(self.count)
            self.fc.register_forward_hook(lambda module, inputs, output: output + 1)

        def count(self, *args: Any) -> None:
            self.calls += 1

    net = Net()
    criterion = nn.Module()
    criterion.weight = net.fc.weight
    there, criterion_there = there_and_back((net, criterion))
    assert there.out.weight is there.fc.weight is criterion_there.weight
    there.fc(torch.ones(1, 4))
    assert (there.calls, net.calls) == (1, 0)
    there.handle.remove()
    there.fc(torch.ones(1, 4))
    assert there.calls == 1


class Refers(nn.Module):
    """Keeps things of this process and leaves them out of its state, as the guide says."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.lock = threading.Lock()
        self.ref = weakref.ref(self.fc)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["lock"], state["ref"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = threading.Lock()
        self.ref = weakref.ref(self.fc)


def test_what_is_no_module_of_a_name_is_refused_as_before() -> None:
    class Odd(type(sys)):  # type: ignore[misc]
        def __reduce__(self) -> Any:
            raise TypeError("not me")

    with pytest.raises(UnpicklableError, match="not me"):
        there_and_back([Odd("odd")])
    assert there_and_back(Refers()).ref()(torch.ones(1, 4)).shape == (1, 4)


# -- hooks -------------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Lets no gradient into its first row, by a hook that refers to the module itself; the bias is frozen later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.mask = torch.tensor([[0.0], [1.0], [1.0]])
        self.linear.weight.register_hook(lambda gradient: gradient * self.mask)
        self.linear.bias.register_post_accumulate_grad_hook(self.halve)
        self.linear.bias.requires_grad_(False)

    @staticmethod
    def halve(parameter: torch.Tensor) -> None:
        parameter.grad = parameter.grad / 2


class Scaled(nn.Parameter):
    def scaled(self) -> float:
        return float(self.detach().sum() * self.scale)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_subclass_of_parameter_stays_one(hooked: bool) -> None:
    weight: Any = Scaled(torch.ones(2))
    weight.scale = 3
    if hooked:
        weight.register_hook(lambda grad: grad + 1)
    model = nn.Module()
    model.weight = weight
    there, again = there_and_back([model, weight])
    assert type(there.weight) is Scaled
    assert there.weight is again
    assert (again.scaled(), again.requires_grad, next(there.parameters()) is again) == (6.0, True, True)
    again.sum().backward()
    assert again.grad.tolist() == [1.0 + hooked] * 2


def test_hooks_of_parameters_travel_with_them() -> None:
    here = Masked()
    there = there_and_back(here)
    assert there.linear.weight is dict(there.named_parameters())["linear.weight"]
    assert not there.linear.bias.requires_grad
    for model in (here, there):
        model.linear.bias.requires_grad_(True)
        model.linear(torch.ones(4, 2)).sum().backward()
    assert torch.equal(there.linear.weight.grad, here.linear.weight.grad)
    assert torch.equal(there.linear.bias.grad, here.linear.bias.grad)
    assert here.linear.weight.grad[0].abs().max() == 0
    assert there.linear.bias.grad[0] == 2
