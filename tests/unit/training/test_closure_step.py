"""Optimizers whose step evaluates the loss again and again: LBFGS, and others that ask for a closure."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import reference
from kit.loops import cpu_loop
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from conftest import make_data
from trainloop import AbstractCallback, MultiLoss, MultiOptimizer, TrainLoop, TTBasicModel
from trainloop.callbacks import GradientClipping, LRScheduler
from trainloop.errors import ConfigurationError
from trainloop.optim.optimizers import needs_closure


class Sequence(TTBasicModel):
    """The model of pytorch/examples, time_sequence_prediction/train.py, with fewer units."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm1, self.lstm2 = nn.LSTMCell(1, 7), nn.LSTMCell(7, 7)
        self.linear = nn.Linear(7, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log("calls", float(self.calls))
        h_t, c_t, h_t2, c_t2 = (torch.zeros(x.size(0), 7, dtype=x.dtype) for _ in range(4))
        outputs = []
        for input_t in x.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            outputs.append(self.linear(h_t2))
        return torch.cat(outputs, dim=1)


class Net(TTBasicModel):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Sharp(optim.SGD):
    """Sharpness-aware minimisation in two lines: gradients of a point uphill. Its closure has a default, as usual."""

    needs_closure = True

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is not None
        parameters = [p for group in self.param_groups for p in group["params"]]
        uphill = [0.05 * p.grad for p in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, uphill)
        closure()
        with torch.no_grad():
            torch._foreach_sub_(parameters, uphill)
        super().step()


def waves() -> TensorDataset:
    phases = torch.arange(6, dtype=torch.float64)[:, None]
    data = torch.sin((torch.arange(21) + 4 * phases) / 3)
    return TensorDataset(data[:, :-1], data[:, 1:])


def by_hand(
    model: nn.Module,
    loader: Any,
    optimizer: optim.Optimizer,
    criterion: Any,
    epochs: int,
    accumulation: int = 1,
    max_norm: float | None = None,
) -> None:
    for _ in range(epochs):
        for batches in reference.groups(loader, accumulation):

            def closure(batches: list[Any] = batches) -> Any:
                optimizer.zero_grad()
                total: Any = 0
                for x, y in batches:
                    loss = criterion(model(x), y)
                    if len(batches) > 1:
                        loss = loss / len(batches)
                    loss.backward()
                    total = total + loss
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                return total

            if getattr(optimizer, "needs_closure", False):
                closure()
            optimizer.step(closure)


def fit(model: Any, loader: Any, optimizer: Any, criterion: Any = None, epochs: int = 2, **arguments: Any) -> TrainLoop:
    of_fit = {name: arguments.pop(name) for name in ("callbacks", "grad_accumulation") if name in arguments}
    loop = TrainLoop(
        model,
        loader,
        optimizer=optimizer,
        criterion=criterion or nn.CrossEntropyLoss(),
        progress_bar=False,
        **{"accelerator": "cpu", **arguments},
    )
    loop.fit(num_epochs=epochs, **of_fit)
    return loop


class Counted(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("counted")
        self.calls: list[str] = []

    def on_batch_begin(self) -> None:
        self.calls.append("begin")

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        self.calls.append("gradients")

    def on_after_optimizer_step(self) -> None:
        self.calls.append("step")

    def on_batch_end(self) -> None:
        self.calls.append("end")


@pytest.mark.long
def test_time_sequence_prediction_of_pytorchs_examples() -> None:
    torch.manual_seed(0)
    ours = Sequence().double()
    theirs = copy.deepcopy(ours)
    loader = DataLoader(waves(), batch_size=6)
    seen = Counted()
    tl = fit(ours, loader, optim.LBFGS(ours.parameters(), lr=0.8), nn.MSELoss(), epochs=3, callbacks=[seen])
    by_hand(theirs, loader, optim.LBFGS(theirs.parameters(), lr=0.8), nn.MSELoss(), epochs=3)
    assert reference.identical(ours, theirs)
    assert ours.calls == theirs.calls > 30  # evaluations in 3 steps
    # All but gradients, which a callback may change, once a step.
    assert [call for call in seen.calls if call != "gradients"] == 3 * ["begin", "step", "end"]
    assert seen.calls.count("gradients") == ours.calls
    assert tl.global_step == 3
    # What a step logs and records is of its first evaluation.
    assert tl.history["loss"][0] > tl.history["loss"][1] > tl.history["loss"][2]
    assert tl.history["calls"][0] == 1
    assert len(tl.history.steps("calls")) == 3


@pytest.mark.parametrize(
    ("options", "of_loop"),
    [
        ({}, {"dropout": 0.3}),  # each evaluation draws anew, as by hand
        ({"line_search_fn": "strong_wolfe"}, {}),
        ({"line_search_fn": "strong_wolfe"}, {"accumulation": 5}),
        ({"line_search_fn": "strong_wolfe"}, {"max_norm": 0.2}),
        ({"line_search_fn": "strong_wolfe"}, {"max_norm": 0.2, "by_callback": True}),
    ],
    ids=["dropout", "line search", "accumulated", "clipped", "clipped by a callback"],
)
def test_batches_and_their_settings(options: Any, of_loop: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours = Net(of_loop.get("dropout", 0.0))
    theirs = copy.deepcopy(ours)
    loader = DataLoader(make_data(100), batch_size=10)
    accumulation, max_norm = of_loop.get("accumulation", 1), of_loop.get("max_norm")
    clipping: dict[str, Any] = {"gradient_clip_norm": max_norm}
    if of_loop.get("by_callback"):
        clipping = {"callbacks": [GradientClipping(max_norm=max_norm)]}
    torch.manual_seed(1)
    sgd = optim.LBFGS(theirs.parameters(), lr=0.1, max_iter=4, **options)
    by_hand(theirs, loader, sgd, nn.CrossEntropyLoss(), 2, accumulation, max_norm)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    own = optim.LBFGS(ours.parameters(), lr=0.1, max_iter=4, **options)
    fit(ours, loader, own, grad_accumulation=accumulation, **clipping)
    assert reference.identical(ours, theirs)
    assert torch.equal(torch.get_rng_state(), after)


def test_weights_and_several_losses() -> None:
    class Tokens(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            x, y = batch_data
            counted = y > 0
            return criterion(self(x)[counted], y[counted]), counted.sum()

    class Two(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
            loss = super().get_loss(batch_data, criterion, device)
            return MultiLoss({"most": 0.75 * loss, "rest": 0.25 * loss})

    whole = DataLoader(make_data(100), batch_size=100)
    for kind in (Tokens, Two):
        torch.manual_seed(0)
        at_once = kind().double()
        in_parts = copy.deepcopy(at_once)
        double = [(x.double(), y) for x, y in whole]
        parts = [(double[0][0][i : i + 9], double[0][1][i : i + 9]) for i in range(0, 100, 9)]
        losses = []
        for model, loader, accumulation in ((at_once, double, 1), (in_parts, parts, len(parts))):
            optimizer = optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
            losses.append(fit(model, loader, optimizer, grad_accumulation=accumulation).history["loss"])
        assert reference.largest_difference(at_once, in_parts) < 1e-9
        assert losses[0] == pytest.approx(losses[1], abs=1e-9)


def test_one_that_begins_with_gradients_says_so() -> None:
    torch.manual_seed(0)
    ours = Net()
    theirs = copy.deepcopy(ours)
    loader = DataLoader(make_data(), batch_size=10)
    optimizer = Sharp(ours.parameters(), lr=0.1)
    schedule = LRScheduler(optim.lr_scheduler.StepLR(optimizer, 5), interval="step")
    fit(ours, loader, optimizer, epochs=1, callbacks=[schedule])
    sharp = Sharp(theirs.parameters(), lr=0.1)
    theirs_schedule = optim.lr_scheduler.StepLR(sharp, 5)
    for batch in loader:
        by_hand(theirs, [batch], sharp, nn.CrossEntropyLoss(), 1)
        theirs_schedule.step()
    assert reference.identical(ours, theirs)


def test_who_needs_a_closure() -> None:
    parameter = nn.Parameter(torch.zeros(2))

    class Asking(optim.SGD):
        def step(self, closure: Any, scale: float = 1.0) -> Any:  # type: ignore[override]
            return closure()

    class Unwrapped:
        step = print  # a builtin that tells nothing

    assert needs_closure(optim.LBFGS([parameter]))
    assert needs_closure(Asking([parameter]))
    assert needs_closure(Sharp([parameter]))
    for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.SparseAdam, optim.Rprop):
        optimizer = kind([parameter])
        optim.lr_scheduler.StepLR(optimizer, 1)  # sets a step of its own
        assert not needs_closure(optimizer)
    assert not needs_closure(Unwrapped())  # type: ignore[arg-type]


def test_where_it_can_not_be() -> None:
    model = Net()
    first, last = model.layers[0], model.layers[3]
    loader = DataLoader(make_data(20), batch_size=10)
    both = MultiOptimizer([optim.LBFGS(first.parameters()), optim.Adam(last.parameters())])
    with pytest.raises(ConfigurationError, match=r"LBFGS evaluates .* one of 2 optimizers.* Give LBFGS all parameters"):
        fit(model, loader, both)
    for amp in ("fp16", {"init_scale": 4.0}):
        with pytest.raises(ConfigurationError, match=r"LBFGS evaluates .* GradScaler.* Use use_amp='bf16'"):
            fit(model, loader, optim.LBFGS(model.parameters()), use_amp=amp)
    fit(model, loader, optim.LBFGS(model.parameters(), max_iter=2), use_amp="bf16", epochs=1)


@pytest.mark.parametrize("fails", ["call", "assert", "raise"])
def test_an_optimizer_that_fails_without_a_closure_names_the_way_to_get_one(fails: str) -> None:
    class Asks(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if fails == "assert" and closure is None:
                raise AssertionError  # as ``assert closure is not None`` does; pytest would give it a text
            if fails == "raise":
                raise ValueError("a Closure is needed")
            return closure()

    model = Net()
    with pytest.raises(ConfigurationError, match=r"Asks\.step failed without a closure.* needs_closure = True"):
        fit(model, DataLoader(make_data(20), batch_size=10), Asks(model.parameters(), lr=0.1))


def test_an_optimizer_with_a_closure_in_place_of_one_of_several_is_named_also_beside_a_new_module() -> None:
    class Replaces(AbstractCallback):
        def on_batch_end(self) -> None:
            loop = self.train_loop_obj
            loop.model.further = nn.Linear(2, 2)
            loop.optimizer.optimizer_list[1] = optim.LBFGS(loop.model.last.parameters())

    class Both(TTBasicModel):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    model = Both()
    several = MultiOptimizer([optim.SGD(part.parameters(), lr=0.1) for part in (model.first, model.last)])
    loop = TrainLoop(model, DataLoader(make_data(), 10), None, None, several, nn.CrossEntropyLoss(), progress_bar=False)
    with pytest.raises(ConfigurationError, match=r"LBFGS.*another kind than those of SGD, as one .* needs a closure"):
        loop.fit(num_epochs=1, callbacks=[Replaces("replaces")])


@pytest.mark.parametrize("assigned", [False, True], ids=["a setting", "an optimizer"])
def test_what_a_hook_changes_at_a_batch_holds_for_its_step(assigned: bool) -> None:
    """LBFGS reads its settings before it calls the closure."""

    def change(net: nn.Module, optimizer: Any) -> Any:
        if assigned:
            return optim.LBFGS(net.parameters(), lr=0.5, max_iter=3)
        optimizer.param_groups[0]["lr"] = 0.5
        return optimizer

    class Changes(AbstractCallback):
        def on_batch_begin(self) -> None:
            loop = self.train_loop_obj
            if loop.global_step == 2:
                loop.optimizer = change(loop.model, loop.optimizer)

    torch.manual_seed(0)
    ours = Net()
    theirs = copy.deepcopy(ours)
    loader = DataLoader(make_data(40), batch_size=8)
    optimizer: Any = optim.LBFGS(theirs.parameters(), lr=0.1, max_iter=2)
    for step, batch in enumerate(loader):
        if step == 2:
            optimizer = change(theirs, optimizer)
        by_hand(theirs, [batch], optimizer, nn.CrossEntropyLoss(), epochs=1)
    loop = cpu_loop(ours, loader, optim.LBFGS(ours.parameters(), lr=0.1, max_iter=2))
    loop.fit(num_epochs=1, callbacks=[Changes()])
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=0, atol=0)
