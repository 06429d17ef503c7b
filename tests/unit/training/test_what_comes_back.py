"""Changes made by ranks come back into the caller's own objects: optimizers of every kind, modules anywhere.

The rank is this process: what it gets is a copy by the same way as in ``fit``, and its end state goes back likewise.
"""

from __future__ import annotations

import copy
import functools
import pickle
import random
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kit.loops import cpu_loop
from torch import Tensor, nn, optim
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TrainLoop, TTBasicModel
from trainloop._transfer import pack
from trainloop.train_loop.execution.handover import CallerSide, RankSide


class Net(TTBasicModel):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Lookahead(optim.Optimizer):
    """As timm and others write it: shares the groups of the one inside, and calls no ``__init__`` of torch's."""

    def __init__(self, inner: optim.Optimizer, alpha: float = 0.5, k: int = 2) -> None:
        self._base_optimizer = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self._optimizer_step_pre_hooks: dict[int, Any] = {}
        self._optimizer_step_post_hooks: dict[int, Any] = {}
        self.alpha, self.k, self.calls = alpha, k, 0
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}
        self.on_sync: Callable[[], Any] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self._base_optimizer.step()
        self.calls += 1
        if self.calls % self.k == 0:
            for p, slow in self.slow.items():
                slow.lerp_(p, self.alpha)
                p.copy_(slow)


class Bare(Lookahead):
    """As its first author wrote it: without ``defaults``, and with a state from which torch can't build it again."""

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__(inner)
        del self.defaults

    def __getstate__(self) -> dict[str, Any]:
        return {"state": self.state, "alpha": self.alpha, "k": self.k}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._base_optimizer.zero_grad(set_to_none)


class Keeps(AbstractCallback):
    """Holds what callbacks hold."""

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        super().__init__("keeps")
        self.average = AveragedModel(model, use_buffers=True)
        self.deep = {"others": [AveragedModel(nn.LSTM(4, 4)), nn.BatchNorm1d(4)]}
        self.scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        self.numbers: list[float] = []
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock = threading.Lock()


def lookahead(model: nn.Module) -> optim.Optimizer:
    return Lookahead(optim.Adam(model.parameters(), lr=0.1))


OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "LBFGS": lambda model: optim.LBFGS(model.parameters(), lr=0.1, max_iter=2),
    "Lookahead": lookahead,
    "Lookahead without defaults": lambda model: Bare(optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
    "SGD with momentum": lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "AdamW": lambda model: optim.AdamW(model.parameters(), lr=0.1, amsgrad=True),
}


def loop_of(make: Callable[[nn.Module], optim.Optimizer], criterion: Any = F.mse_loss) -> TrainLoop:
    torch.manual_seed(0)
    model = Net()
    loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 2)), 4)
    loop = cpu_loop(model, loader, make(model), criterion)
    loop.note(callbacks=[Keeps(model, loop.optimizer)])
    return loop


def train(loop: TrainLoop, steps: int = 3) -> None:
    """The work of a rank, by hand."""
    keeps: Any = loop.callbacks[0] if loop.callbacks else None
    x, y = loop.train_loader.dataset.tensors

    def closure() -> Tensor:
        loop.optimizer.zero_grad()
        loss = loop.criterion(loop.model(x), y)
        loss.backward()
        return loss

    for step in range(steps):
        if not isinstance(loop.optimizer, optim.LBFGS):
            closure()
        loop.optimizer.step(closure)
        loop.model.seen += 1
        if keeps is not None:
            keeps.average.update_parameters(loop.model)
            keeps.deep["others"][0].module(torch.ones(1, 4))
            keeps.deep["others"][1](torch.full((2, 4), float(step)))
            keeps.numbers.append(step)
            keeps.scheduler.step()


def through_a_rank(loop: TrainLoop, work: Callable[[TrainLoop], Any]) -> None:
    caller_side = CallerSide(loop)
    with pack(loop) as payload:
        there = payload.handle.open()
        rank_side = RankSide(there, caller_side.paths)
        work(there)
        data = rank_side.end_state(None)
    caller_side.receive(data)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_it_had_never_left(name: str) -> None:
    here, away = loop_of(OPTIMIZERS[name]), loop_of(OPTIMIZERS[name])
    keeps: Any = away.callbacks[0]
    kept = (away.optimizer, keeps.average, keeps.deep, keeps.deep["others"][0], keeps.scheduler)
    lists, groups = keeps.numbers, away.optimizer.param_groups
    for _ in range(2):  # a second fit goes on from the first
        train(here)
        through_a_rank(away, train)
    assert kept == (away.optimizer, keeps.average, keeps.deep, keeps.deep["others"][0], keeps.scheduler)
    assert keeps.numbers is lists and lists == [0, 1, 2, 0, 1, 2]  # noqa: PT018
    assert away.optimizer.param_groups is groups
    there: Any = here.callbacks[0]
    for mine, theirs in (
        (keeps.average, there.average),
        (keeps.deep["others"][0], there.deep["others"][0]),
        (keeps.deep["others"][1], there.deep["others"][1]),
        (away.model, here.model),
    ):
        for key, value in theirs.state_dict().items():
            assert torch.equal(mine.state_dict()[key], value), key
    assert torch.equal(keeps.average.module.seen, there.average.module.seen)  # in no state dict
    assert keeps.scheduler.get_last_lr() == there.scheduler.get_last_lr() == [groups[0]["lr"]]
    assert keeps.scheduler.optimizer is away.optimizer
    # And here it still is an optimizer of this very model.
    train(here)
    train(away)
    torch.testing.assert_close(list(away.model.parameters()), list(here.model.parameters()), rtol=0, atol=0)


def test_what_optimizers_share_stays_shared() -> None:
    loop = loop_of(lookahead)
    optimizer: Any = loop.optimizer
    inner, slow = optimizer._base_optimizer, optimizer.slow
    through_a_rank(loop, train)
    assert optimizer._base_optimizer is inner
    assert (optimizer.param_groups is inner.param_groups, optimizer.state is inner.state) == (True, True)
    assert optimizer.slow is slow
    assert set(slow) == set(loop.model.parameters())
    assert optimizer.calls == 3


def test_hooks_of_an_optimizer_go_along_and_schedulers_marks_do_not() -> None:
    loop = loop_of(OPTIMIZERS["AdamW"])
    calls: list[int] = []
    loop.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: optimizer.calls.append(1))
    loop.optimizer.calls = calls
    through_a_rank(loop, train)
    assert calls == [1, 1, 1]
    loop.optimizer.step()
    assert len(calls) == 4


def test_a_group_added_there_is_there_afterwards() -> None:
    def unfreeze(loop: TrainLoop) -> None:
        loop.optimizer.add_param_group({"params": [loop.model.fc.bias], "lr": 0.01})
        train(loop)

    def make(model: nn.Module) -> optim.Optimizer:
        return optim.Adam([model.fc.weight], lr=0.1)  # type: ignore[list-item, union-attr]

    here, away = loop_of(make), loop_of(make)
    unfreeze(here)
    through_a_rank(away, unfreeze)
    groups = away.optimizer.param_groups
    assert [group["lr"] for group in groups] == [group["lr"] for group in here.optimizer.param_groups]
    assert groups[1]["params"][0] is away.model.fc.bias
    train(here)
    train(away)
    assert torch.equal(away.model.fc.bias, here.model.fc.bias)


def test_a_module_that_moves_keeps_what_it_is_given_there() -> None:
    """As a block that is wrapped, or blocks in another order: what is found by its path would be another module."""

    def move(loop: Any) -> None:
        model = loop.model
        model.blocks = nn.ModuleList([model.blocks[1], model.blocks[0]])
        model.blocks[0].eval()
        model.blocks[0].alpha, model.blocks[0].adapter = 1.0, nn.Linear(2, 2)
        del model.blocks[1].alpha
        model.fc = nn.Sequential(model.fc, nn.Tanh())
        model.fc[0].rank = 3
        model.tied = model.blocks[1]

    def shown(model: nn.Module) -> list[Any]:
        return [
            (path, type(module), {name: value for name, value in vars(module).items() if name[0] != "_"})
            for path, module in model.named_modules(remove_duplicate=False)
        ]

    loops = []
    for _ in range(2):
        loop: Any = loop_of(OPTIMIZERS["AdamW"])
        loop.model.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        for i, block in enumerate(loop.model.blocks):
            block.alpha = float(i)
        loop.model.blocks[0].alpha = 1.0
        loops.append(loop)
    here, away = loops
    second = away.model.blocks[1]
    move(here)
    through_a_rank(away, move)
    assert shown(away.model) == shown(here.model)
    assert away.model.blocks[0] is second
    assert away.model.tied is away.model.blocks[1]


def test_a_criterion_that_is_no_module_may_hold_one() -> None:
    centers = nn.Parameter(torch.zeros(2))
    weight = nn.Linear(2, 2)

    def criterion(y_pred: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(weight(y_pred) + centers, y)

    def make(model: nn.Module) -> optim.Optimizer:
        return optim.SGD([*model.parameters(), centers, *weight.parameters()], lr=0.1)

    loop = loop_of(make, criterion)
    loop.note(callbacks=[])
    before = copy.deepcopy((loop.model.state_dict(), weight.state_dict()))
    through_a_rank(loop, train)
    moved = (centers.detach().clone(), copy.deepcopy(weight.state_dict()))
    loop.model.load_state_dict(before[0])
    weight.load_state_dict(before[1])
    with torch.no_grad():
        centers.zero_()
    train(loop)
    assert torch.equal(centers, moved[0])
    assert torch.equal(weight.weight, moved[1]["weight"])
    assert moved[0].any()


class Config:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.itself = self


def test_objects_that_a_model_shares_with_its_caller_stay_shared() -> None:
    loop = loop_of(OPTIMIZERS["AdamW"])
    config = Config()
    loop.model.config = config  # type: ignore[assignment]
    sizes = config.sizes

    def work(loop: TrainLoop) -> None:
        loop.model.config.sizes.append(3)  # type: ignore[union-attr, operator]
        loop.model.config.best = {"model": loop.model, "rate": 0.5}  # type: ignore[union-attr]

    through_a_rank(loop, work)
    assert loop.model.config is config
    assert config.sizes is sizes
    assert sizes == [3]
    assert config.best == {"model": loop.model, "rate": 0.5}  # type: ignore[attr-defined]


class Pair:
    """Its state is not a dictionary."""

    def __init__(self) -> None:
        self.one = self.two = 0

    def __getstate__(self) -> tuple[int, int]:
        return self.one, self.two

    def __setstate__(self, state: tuple[int, int]) -> None:
        self.one, self.two = state


class Slots:
    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items = 0


class SlotsAndMore(Slots):
    pass


def draw_all(generator: Any) -> Any:
    return torch.rand(1, generator=generator) if isinstance(generator, torch.Generator) else generator.random()


def set_in(name: str) -> Callable[[Any], None]:
    return lambda obj: setattr(obj, name, 5)


def state_of(obj: Any) -> Any:
    """An object's state as bytes; a pickled ``torch.Generator`` contains an address of its state's storage."""
    return obj.get_state().tolist() if isinstance(obj, torch.Generator) else pickle.dumps(obj)


def counting() -> tuple[Callable[[], None], Callable[[], int]]:
    count = 0

    def add() -> None:
        nonlocal count
        count += 1

    return add, lambda: count


def test_closures_share_their_variables_in_ranks_and_afterwards() -> None:
    loop: Any = loop_of(OPTIMIZERS["AdamW"])
    add, read = counting()
    add()
    loop.model.add, loop.callbacks[0].read, loop.callbacks[0].add = add, read, add
    seen = []

    def work(loop: Any) -> None:
        loop.model.add()
        loop.callbacks[0].add()
        seen.append(loop.callbacks[0].read())

    through_a_rank(loop, work)
    assert (seen, read()) == ([3], 3)
    assert loop.model.add is loop.callbacks[0].add is add
    assert loop.callbacks[0].read is read


class Named(list[int]):
    """A container with an attribute."""

    name = ""


class Packed:
    """Its state has other names and values than its attributes."""

    def __init__(self) -> None:
        self.items, self._position, self.rows = [1], 0, np.zeros(2)
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"items": self.items, "position": self._position, "rows": self.rows.tolist()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.items, self._position, self.rows = state["items"], state["position"], np.array(state["rows"])
        self.lock = threading.Lock()


def test_attributes_of_containers_and_states_of_their_own_come_back() -> None:
    loop: Any = loop_of(OPTIMIZERS["AdamW"])
    named, packed, unchanged = Named([1]), Packed(), Packed()
    items, lock = packed.items, unchanged.lock
    loop.model.named, loop.callbacks[0].packed, loop.callbacks[0].unchanged = named, packed, unchanged

    def work(loop: Any) -> None:
        loop.model.named.name = "changed"
        loop.model.named.append(2)
        own = loop.callbacks[0].packed
        own.items.append(2)
        own._position, own.rows = 3, np.ones(2)

    through_a_rank(loop, work)
    assert loop.model.named is named
    assert (named, named.name) == ([1, 2], "changed")
    assert loop.callbacks[0].packed is packed
    assert (packed.items, packed._position, packed.rows.tolist()) == ([1, 2], 3, [1.0, 1.0])
    assert packed.items is items
    assert loop.callbacks[0].unchanged is unchanged
    assert unchanged.lock is lock


class Writes:
    """Its state has None in place of what is local to a process, as the copy that arrives in a rank has."""

    def __init__(self) -> None:
        self.lines, self.lock, self.best = 0, threading.Lock(), 1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class Packs(Writes):
    """Its state has a value of another kind than here, and of the same kind in a rank."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "lock": str(self.lock)}


@pytest.mark.parametrize("kind", [Writes, Packs])
def test_an_object_with_a_state_that_only_the_caller_replaces_comes_back(kind: type[Writes]) -> None:
    loop: Any = loop_of(OPTIMIZERS["AdamW"])
    writes = loop.model.writes = kind()
    lock = writes.lock

    def work(loop: Any) -> None:
        loop.model.writes.lines, loop.model.writes.best = 3, None

    through_a_rank(loop, work)
    assert loop.model.writes is writes
    assert (writes.lines, writes.best) == (3, None)
    assert kind is Packs or writes.lock is lock


@pytest.mark.parametrize(
    "make, change",
    [
        (lambda: Counter("aab"), lambda counts: counts.update("ab")),
        (lambda: OrderedDict(a=1, b=2), lambda order: order.move_to_end("a")),
        (lambda: {1, 2}, lambda numbers: numbers.add(3)),
        (lambda: bytearray(b"a"), lambda text: text.extend(b"b")),
        (lambda: np.arange(6.0), lambda array: array.__iadd__(1)),
        (lambda: np.arange(6000.0)[::2], lambda array: array.__iadd__(1)),
        (lambda: np.array(["a", None]), lambda array: array.__setitem__(1, "b")),
        (lambda: torch.Generator().manual_seed(1), draw_all),
        (lambda: random.Random(1), draw_all),
        (lambda: np.random.default_rng(1), draw_all),
        (lambda: np.random.RandomState(1), lambda generator: generator.rand()),
        (Pair, set_in("two")),
        (Slots, set_in("items")),
        (SlotsAndMore, set_in("items")),
    ],
    ids="counter order set bytes array strided objects torch python numpy legacy pair slots slots-and-more".split(),
)
def test_an_object_that_model_and_callback_share_stays_the_callers_own(make: Any, change: Any) -> None:
    loop = loop_of(OPTIMIZERS["AdamW"])
    shared, expected = make(), make()
    loop.model.shared = loop.callbacks[0].shared = shared  # type: ignore[attr-defined]
    change(expected)
    through_a_rank(loop, lambda loop: change(loop.model.shared))
    assert loop.model.shared is shared
    assert loop.callbacks[0].shared is shared  # type: ignore[attr-defined]
    assert state_of(shared) == state_of(expected)


def test_arguments_of_a_partial_criterion_that_a_hook_changes_come_back() -> None:
    criterion = functools.partial(F.huber_loss, delta=1.0)
    loop = loop_of(OPTIMIZERS["AdamW"], criterion)
    through_a_rank(loop, lambda loop: loop.criterion.keywords.update(delta=0.5))
    assert loop.criterion is criterion
    assert criterion.keywords == {"delta": 0.5}


def test_what_cannot_come_back_is_named_and_the_rest_does() -> None:
    loop = loop_of(OPTIMIZERS["AdamW"])
    config = Config()
    config.old = 1  # type: ignore[attr-defined]
    config.of = {next(loop.model.parameters()): 1}  # type: ignore[attr-defined]
    loop.model.config = config  # type: ignore[assignment]
    opened: Any = None

    def open_it() -> None:
        nonlocal opened
        opened = threading.Lock()

    loop.model.open_it, loop.model.some = open_it, [1]  # type: ignore[assignment]

    def work(loop: TrainLoop) -> None:
        loop.model.open_it()  # type: ignore[operator]
        loop.model.some.append(threading.Lock())  # type: ignore[operator, union-attr]
        loop.model.config.old = threading.Lock()  # type: ignore[union-attr]
        loop.model.config.of[next(loop.model.parameters())] = threading.Lock()  # type: ignore[union-attr]
        loop.model.config.sizes = (1, 2)  # type: ignore[union-attr]
        loop.model.config.lock = threading.Lock()  # type: ignore[union-attr]
        loop.callbacks[0].open = threading.Lock()  # type: ignore[attr-defined]
        loop.callbacks[0].count = 3  # type: ignore[attr-defined]

    with pytest.warns(UserWarning, match="can no longer be pickled") as told:
        through_a_rank(loop, work)
    assert config.sizes == (1, 2)  # type: ignore[comparison-overlap]
    assert loop.callbacks[0].count == 3  # type: ignore[attr-defined]
    assert config.old == 1  # type: ignore[attr-defined]
    texts = " ".join(str(w.message) for w in told)
    assert "old, lock can no longer" in texts
    assert "open can no longer" in texts
    assert "open_it.opened can no longer" in texts
    assert "some can no longer" in texts
    assert (opened, loop.model.some) == (None, [1])
    assert "a parameter of shape (" in texts  # not its values


class TwoArguments(Exception):
    """Can be pickled, but its class can't be called with the one argument in the pickle."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Weighs:
    def __init__(self, error: Exception) -> None:
        self.error = error

    __call__ = staticmethod(F.mse_loss)


REBUILT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "model attribute 'seen_error'": (lambda loop: setattr(loop.model, "seen_error", TwoArguments(1, 2)), "attribute"),
    "config: error": (lambda loop: setattr(loop.model.config, "error", TwoArguments(1, 2)), "object"),
    "its failed": (lambda loop: setattr(loop.callbacks[0], "failed", TwoArguments(1, 2)), "callback"),
    "tl.criterion, assigned": (lambda loop: loop.note(criterion=Weighs(TwoArguments(1, 2))), "setting"),
    "module 'extra', added": (lambda loop: loop.model.add_module("extra", odd_module()), "module"),
    "in training, can't be rebuilt": (lambda loop: loop.callbacks.append(OddCallback()), "callback that was added"),
}


def odd_module() -> nn.Module:
    module = nn.Identity()
    module.error = TwoArguments(1, 2)  # type: ignore[assignment]
    return module


class OddCallback(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("odd")
        self.error = TwoArguments(1, 2)


@pytest.mark.parametrize("text", REBUILT, ids=[kind for _, kind in REBUILT.values()])
def test_what_cannot_be_rebuilt_is_named_and_the_training_comes_back(text: str) -> None:
    loop = loop_of(OPTIMIZERS["AdamW"])
    loop.model.config = Config()  # type: ignore[assignment]

    def work(loop: Any) -> None:
        loop.model.fc.weight.data.fill_(3.0)
        REBUILT[text][0](loop)

    with pytest.warns(UserWarning, match=text) as told:
        through_a_rank(loop, work)
    assert "second" in " ".join(str(w.message) for w in told)  # the missing argument
    assert bool((loop.model.fc.weight == 3.0).all())
