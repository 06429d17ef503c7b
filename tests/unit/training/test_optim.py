"""Several losses for several optimizers."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from kit.loops import cpu_loop
from kit.small_loop import make_loop
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from conftest import make_data
from trainloop import MultiLoss, MultiOptimizer, TrainLoop, TTModel
from trainloop._support.reduction import divisor_of
from trainloop.errors import ConfigurationError
from trainloop.optim.losses import split_yielded
from trainloop.optim.optimizers import drop_gradients, optimizers_of, parameters_of
from trainloop.optim.parameters import modules_beside
from trainloop.train_loop.run.losses import read_loss


def losses(**values: float) -> MultiLoss:
    return MultiLoss({name: torch.tensor(value) for name, value in values.items()})


# -- MultiLoss ---------------------------------------------------------------------------------------------------------


def test_is_a_mapping() -> None:
    both = losses(a=1.0, b=3.0)
    assert list(both) == ["a", "b"]
    assert len(both) == 2
    assert both["b"].item() == 3.0
    assert both.item() == {"a": 1.0, "b": 3.0}
    assert repr(both) == "MultiLoss(a, b)"
    mapped = MultiLoss(dict(both), {"a": "first", "b": 1})
    assert repr(mapped) == "MultiLoss(a -> optimizer first, b -> optimizer 1)"


def test_arithmetic_keeps_names_and_optimizers() -> None:
    both = MultiLoss({"a": torch.tensor(1.0), "b": torch.tensor(3.0)}, {"a": 1, "b": 0}, retain_graph_until_last=False)
    for changed, factor in ((both / 2, 0.5), (both * 3, 3.0), (3 * both, 3.0), (both.detach(), 1.0)):
        assert changed.item() == {"a": factor, "b": 3 * factor}
        assert changed.loss_optimizer_map == {"a": 1, "b": 0}
        assert changed.retain_graph_until_last is False
    assert both.total().item() == 4.0
    assert losses(a=1.0).total().item() == 1.0


def test_arithmetic_keeps_weights() -> None:
    both = MultiLoss({"a": (torch.tensor(2.0), 3), "b": torch.tensor(1.0)})
    assert both.item() == {"a": 2.0, "b": 1.0}
    for changed in (both, both / 2, 2 * both, both.detach()):
        assert {name: divisor_of(loss) for name, loss in changed.items()} == {"a": 3, "b": None}


def test_losses_of_an_optimizer() -> None:
    three = MultiLoss({name: torch.tensor(v) for name, v in zip("abc", (1.0, 2.0, 4.0))}, {"a": 0, "b": 1, "c": 0})
    assert three.for_optimizer(0).item() == 5.0  # type: ignore[union-attr]
    assert three.for_optimizer(1).item() == 2.0  # type: ignore[union-attr]
    assert three.for_optimizer(2) is None


def graph() -> tuple[Tensor, Tensor, MultiLoss]:
    """Two parameters, and losses that reach both of them through a shared part."""
    g, d = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    fake = g * g
    return g, d, MultiLoss({"g": d * fake, "d": -(d * fake)}, {"g": 0, "d": 1})


def test_backward_reaches_what_it_should() -> None:
    g, d, both = graph()
    both.backward(0, inputs=[g])
    both.backward(1, inputs=[d])
    assert (g.grad.item(), d.grad.item()) == (12.0, -4.0)  # type: ignore[union-attr]
    g, d, both = graph()
    both.backward()
    assert (g.grad.item(), d.grad.item()) == (0.0, 0.0)  # type: ignore[union-attr]


def test_backward_of_nothing_does_nothing() -> None:
    g, d, both = graph()
    both.backward(7)
    both.backward(0, inputs=[])  # all of its parameters frozen
    assert g.grad is None
    assert d.grad is None


def test_without_retaining_a_shared_graph_is_gone() -> None:
    g, d, both = graph()
    both.backward(0, inputs=[g, d])
    both.backward(1, inputs=[g, d])
    g, d, both = graph()
    both.retain_graph_until_last = False
    both.backward(0, inputs=[g, d])
    with pytest.raises(RuntimeError, match=r"second time"):
        both.backward(1, inputs=[g, d])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (({},), r"loss_dict=\{\}: must be a dict with at least one named loss."),
        (([1.0],), r"loss_dict=\[1.0\]: must be a dict"),
        (({"": torch.tensor(0.0)},), r"has a loss with the name ''. Give it a name"),
        (({"a": (torch.tensor(1.0), torch.tensor(2.0, requires_grad=True))},), r"a weight that requires gradients"),
        (({"a": 0.5},), r"loss_dict\['a'\]=0.5: must be a 0-d tensor, like the result of a criterion, or \(loss, w"),
        (({"a": (0.5, 3)},), r"loss_dict\['a'\]=\(0.5, 3\): must be a 0-d tensor"),
        (({"a": (torch.tensor(0.0), torch.ones(2))},), r"where weight is a number or a 0-d tensor"),
        (({"a": (torch.tensor(0.0), -2)},), r"a loss with the weight -2. A weight is the number of units"),
        (
            ({"a": (torch.tensor(0.0), "3")},),
            r"loss_dict\['a'\]=\(tensor\(0.\), '3'\): .*where weight is a number",
        ),
        (
            ({"a": torch.tensor(0.0)}, {"b": 0}),
            r"loss_optimizer_map names \['b'\], but the losses are \['a'\]. In the map, give each loss the index",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_losses(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MultiLoss(*arguments)


def test_indices_of_optimizers_may_be_numbers_of_numpy() -> None:
    _, _, both = two()
    mapped = MultiLoss(dict(losses(x=1.0, y=3.0)), {"x": np.int64(1), "y": np.int64(0)})  # type: ignore[dict-item]
    assert mapped.for_optimizer(0).item() == 3.0  # type: ignore[union-attr]
    assert both.index(np.int64(1)) == 1  # type: ignore[arg-type]
    assert split_yielded((np.int64(1), mapped["y"])) == (1, mapped["y"])


def test_a_loss_finds_its_optimizer() -> None:
    _, _, unnamed = two()
    named = MultiOptimizer(dict(zip("ab", unnamed)))
    by_index = MultiLoss(dict(losses(x=1.0, y=3.0)), {"x": 1, "y": 0})
    assert by_index.assigned_to(unnamed) is by_index
    by_name = MultiLoss(dict(losses(x=1.0, y=3.0)), {"x": "b", "y": "a"})
    for given in (by_name, losses(b=1.0, a=3.0)):
        assert given.assigned_to(named).for_optimizer(1).item() == 1.0  # type: ignore[union-attr]
        with pytest.raises(ConfigurationError, match=r"pass a map with the index of each loss's optimizer"):
            given.for_optimizer(1)


@pytest.mark.parametrize(
    "given, names, message",
    [
        (
            {},
            False,
            r"losses 'a', 'c' for 2 optimizers, but not which loss .* loss_optimizer_map=\{'a': 0, 'c': 1\}",
        ),
        ({}, False, r"or name the optimizers after the losses: MultiOptimizer\(\{'a': ..., 'c': ...\}\)"),
        ({}, True, r"loss 'c' is for optimizer 'c', but there are 2 optimizers \(counted from 0, named 'a', 'b'\)."),
        ({"a": 0, "c": 2}, True, r"loss 'c' is for optimizer 2, but there are 2"),
        ({"a": 0, "c": -1}, True, r"loss 'c' is for optimizer -1"),
        (
            {"a": 0, "c": "b"},
            False,
            r"loss 'c' is for optimizer 'b', but there are 2 optimizers \(counted from 0, without names\).",
        ),
    ],
)
def test_a_loss_without_an_optimizer_is_refused(given: Any, names: bool, message: str) -> None:
    _, _, optimizer = two()
    if names:
        optimizer = MultiOptimizer(dict(zip("ab", optimizer)))
    with pytest.raises(ConfigurationError, match=message):
        MultiLoss(dict(losses(a=1.0, c=3.0)), given or None).assigned_to(optimizer)


# -- MultiOptimizer ----------------------------------------------------------------------------------------------------


def two() -> tuple[nn.Linear, nn.Linear, MultiOptimizer]:
    torch.manual_seed(0)
    a, b = nn.Linear(2, 1), nn.Linear(2, 1)
    return a, b, MultiOptimizer([optim.SGD(a.parameters(), lr=0.1), optim.Adam(b.parameters(), lr=0.2)])


def test_is_a_sequence_of_optimizers() -> None:
    _, b, both = two()
    assert len(both) == 2
    assert list(both) == [both[0], both[1]]
    assert [group["lr"] for group in both.param_groups] == [0.1, 0.2]
    assert repr(both).startswith("MultiOptimizer([SGD (")
    named = MultiOptimizer({"first": both[0], "second": both[1]})
    assert named["second"] is both[1]
    assert repr(named).startswith("MultiOptimizer({'first': SGD (")
    assert (both.names, named.names) == (None, ("first", "second"))
    with pytest.raises(ConfigurationError, match=r"\['third'\] is for optimizer 'third', but there are 2"):
        named["third"]
    assert optimizers_of(both) == [both[0], both[1]]
    assert optimizers_of(both[0]) == [both[0]]
    assert optimizers_of(None) == []
    assert [p is q for p, q in zip(parameters_of(both[1]), b.parameters())] == [True, True]


def test_steps_all_or_one() -> None:
    a, b, both = two()
    for chosen, moved in ((None, [True, True]), (0, [True, False]), (1, [False, True])):
        (a(torch.ones(2)) + b(torch.ones(2))).sum().backward()
        before = [a.weight.clone(), b.weight.clone()]
        both.step(chosen)
        assert [not torch.equal(layer.weight, w) for layer, w in zip((a, b), before)] == moved
        both.zero_grad(chosen)
        assert [layer.weight.grad is None for layer in (a, b)] == moved
        both.zero_grad()


def test_state_goes_into_another() -> None:
    a, b, both = two()
    (a(torch.ones(2)) + b(torch.ones(2))).sum().backward()
    both.step()
    _, _, other = two()
    other.load_state_dict(pickle.loads(pickle.dumps(both.state_dict())))
    assert other[1].state_dict()["state"][0]["step"] == 1
    with pytest.raises(ConfigurationError, match=r"got 1 state dicts for 2 optimizers: pass one for each."):
        both.load_state_dict(both.state_dict()[:1])


def test_refused_optimizers() -> None:
    layer = nn.Linear(2, 1)
    sgd = optim.SGD(layer.parameters(), lr=0.1)
    for wrong in ([], sgd, [sgd, "sgd"], (optimizer for optimizer in [sgd])):
        with pytest.raises(ConfigurationError, match=r"(?s)optimizer_list=.*: must be a list of torch optimizers."):
            MultiOptimizer(wrong)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigurationError,
        match=r"optimizers 0 and 1 share a parameter of shape \(1,\): give each parameter to one optimizer.",
    ):
        MultiOptimizer([sgd, optim.SGD([layer.bias], lr=0.1)])


# -- in the loop -------------------------------------------------------------------------------------------------------


class Pair(TTModel):
    """A generator and a discriminator, on numbers: each loss passes through both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.g, self.d = nn.Linear(8, 8), nn.Linear(8, 1)

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> MultiLoss:
        x = batch_data[0]
        return MultiLoss({"g": self.d(self.g(x)).mean(), "d": self.d(x).mean() - self.d(self.g(x)).mean()})

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        return batch_data[0], batch_data[1], {}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_loss_moves_its_own_parameters(accumulation: int) -> None:
    model, reference = Pair(), Pair()
    loader = DataLoader(make_data(32), 8)
    own = [optim.SGD(part.parameters(), lr=0.1) for part in (reference.g, reference.d)]
    batches = list(loader)
    for i in range(0, len(batches), accumulation):
        gradients: dict[nn.Parameter, Tensor] = {}
        for batch in batches[i : i + accumulation]:
            given = reference.get_loss(batch, None, torch.device("cpu"))
            for loss, part in ((given["g"], reference.g), (given["d"], reference.d)):
                parameters = list(part.parameters())
                for p, grad in zip(parameters, torch.autograd.grad(loss, parameters, retain_graph=True)):
                    gradients[p] = gradients.get(p, torch.zeros_like(p)) + grad / accumulation
        for p, grad in gradients.items():
            p.grad = grad
        for optimizer in own:
            optimizer.step()
    tl = TrainLoop(
        model,
        loader,
        # In the other order: it is the name that tells.
        optimizer=MultiOptimizer({name: optim.SGD(getattr(model, name).parameters(), lr=0.1) for name in "dg"}),
        progress_bar=False,
        accelerator="cpu",
    )
    tl.fit(num_epochs=1, grad_accumulation=accumulation)
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()))
    assert set(tl.history) == {"loss", "loss_g", "loss_d"}


def test_a_loss_without_an_optimizer_ends_the_run() -> None:
    model = Pair()
    parts = list(model.g.children()) or [model.g]
    halves = [optim.SGD([p], lr=0.1) for p in parts[0].parameters()]
    tl = cpu_loop(model, DataLoader(make_data(8), 4), MultiOptimizer(halves), None)

    def three(batch_data: Any, criterion: Any, device: torch.device) -> MultiLoss:
        loss = model.g(batch_data[0]).mean()
        return MultiLoss({"a": loss, "b": loss, "c": loss}, {"a": 0, "b": 1, "c": 2})

    model.get_loss = three  # type: ignore[method-assign]
    with pytest.raises(
        ConfigurationError, match=r"loss 'c' is for optimizer 2, but there are 2 optimizers \(counted from 0, with"
    ):
        tl.fit(num_epochs=1)


def test_gradients_are_dropped_as_by_zero_grad() -> None:
    """By the optimizer's own ``zero_grad``, if its class or somebody else has given it one."""

    class Counting(torch.optim.SGD):
        calls = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.calls += 1
            super().zero_grad(set_to_none=set_to_none)

    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    for optimizer in (torch.optim.SGD([{"params": weights[:2]}, {"params": weights[2:]}]), Counting(weights)):
        for weight in weights:
            weight.grad = torch.ones(2)
        drop_gradients(optimizer)
        assert [weight.grad for weight in weights] == [None] * 3
    assert optimizer.calls == 1
    patched = torch.optim.SGD(weights)
    called: list[bool] = []
    patched.zero_grad = lambda set_to_none=True: called.append(set_to_none)  # type: ignore[method-assign,misc]
    drop_gradients(patched)
    assert called == [True]


class DifferentiatesGradients(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
        (p, *_) = self.param_groups[0]["params"]
        torch.autograd.grad(p.grad.sum(), p)


class AsksForClosure(DifferentiatesGradients):
    needs_closure = True


class ChecksGradients(optim.SGD):
    """Refuses gradients without a graph, as AdaHessian does."""

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("Gradient tensor 0 does not have grad_fn. Make sure the option create_graph is set to True.")


@pytest.mark.parametrize("kind", [DifferentiatesGradients, AsksForClosure, ChecksGradients])
def test_an_optimizer_that_differentiates_gradients_is_explained(kind: Any) -> None:
    loop = make_loop()
    loop.optimizer = kind(loop.model.parameters(), lr=0.1)
    with pytest.raises(
        ConfigurationError, match=rf"^{kind.__name__}\.step\(\) differentiates .*create_graph=True.*get_loss"
    ):
        loop.fit(num_epochs=1)


def test_a_weight_for_all_losses_excludes_weights_of_losses() -> None:
    both = MultiLoss({"a": (torch.tensor(2.0), 3), "b": torch.tensor(1.0)})
    read = read_loss(both, 5)
    assert read.units == {"a": 3}
    assert read.shown(5)[1] == {"a": 3, "b": 5}
    with pytest.raises(ConfigurationError, match=r"returned \(MultiLoss, weight\), but .* weights for a\."):
        read_loss((both, 4), 5)


def test_what_a_criterion_refers_to_of_the_model_is_not_moved_with_the_criterion() -> None:
    model, loss = nn.Sequential(nn.Linear(2, 2, device="meta")), nn.MSELoss()

    def penalized(x: Any, y: Any) -> Any:
        return loss(x, y) + model[0].weight.square().sum()

    assert modules_beside(nn.Sequential(model), penalized) == [loss]
    assert modules_beside(nn.Sequential(model), {"a": penalized, "b": model[0].forward}) == [loss]
