"""Random changes of a graph of objects in a rank: afterwards, the caller's own objects are as if changed by itself.

A failing test names its seed; ``draw`` shows the changes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kit.graphs import described
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from unit.training.test_what_comes_back import Named, Packed, counting, through_a_rank

from trainloop import AbstractCallback, TrainLoop, TTBasicModel


class Kind(enum.Enum):
    A = "a"
    B = "b"


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    a: Any
    b: Any


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.count = nn.Parameter(torch.ones(2)), 0
        self.register_buffer("mean", torch.zeros(2))


class Holds(TTBasicModel):
    """Has an attribute of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.register_buffer("mean", torch.zeros(3))
        self.plain, self.array, self.bytes = torch.zeros(4), np.zeros(4), bytearray(b"ab")
        self.config = SimpleNamespace(x=1, items=[1, 2], by_name={"a": 1})
        self.queue, self.set, self.counts = deque([1, 2, 3], maxlen=5), {1, 2}, Counter("aab")
        self.ordered, self.lists = OrderedDict(a=1, b=2), defaultdict(list, {"q": [1]})
        self.frozen, self.slotted, self.named, self.packed = Frozen(3), Slotted(1, [2]), Named([1]), Packed()
        self.torchs, self.pythons = torch.Generator(), random.Random(1)
        self.hidden, self.pair, self.kind = [Hidden()], (1, [2]), Kind.A
        self.add, self.read = counting()


class Shares(AbstractCallback):
    """Refers to parts of the model and the optimizer."""

    def __init__(self, model: Any, optimizer: optim.Optimizer) -> None:
        super().__init__("shares")
        self.config, self.items, self.block, self.weight = (
            model.config,
            model.config.items,
            model.blocks[0],
            model.fc.weight,
        )
        self.optimizer, self.view, self.both = optimizer, model.plain[:2], [model.hidden[0], model.array]
        self.add, self.own, self.store = model.add, SimpleNamespace(v=0), dict[Any, Any]()

    def hook(self, *_: Any) -> None:
        self.store["calls"] = self.store.get("calls", 0) + 1


def exchange(model: Any) -> None:
    model.blocks = nn.ModuleList([model.blocks[1], model.blocks[0]])


CHANGES: dict[str, Callable[[Any, Any, Any], Any]] = {  # of the model, the callback and the loop
    "attribute": lambda m, c, tl: setattr(m.config, "x", 5),
    "new object": lambda m, c, tl: setattr(m.config, "child", SimpleNamespace(deep=[1])),
    "another object": lambda m, c, tl: setattr(m, "config", SimpleNamespace(items=c.items)),
    "list": lambda m, c, tl: c.items.append(7),
    "another list": lambda m, c, tl: setattr(m.config, "items", [4]),
    "shared object": lambda m, c, tl: setattr(m, "alias", c.own),
    "shared parts": lambda m, c, tl: c.store.update(config=m.config, weight=m.head.weight, blocks=m.blocks),
    "cycle": lambda m, c, tl: (setattr(c.own, "itself", c.own), setattr(m.config, "back", c.own)),
    "deque": lambda m, c, tl: (m.queue.rotate(1), m.queue.extend([8, 9])),
    "set": lambda m, c, tl: m.set.add(9),
    "order of keys": lambda m, c, tl: m.ordered.move_to_end("a"),
    "default": lambda m, c, tl: m.lists["new"].append(3),
    "counter": lambda m, c, tl: m.counts.update("bbc"),
    "bytes": lambda m, c, tl: m.bytes.extend(b"zz"),
    "frozen": lambda m, c, tl: setattr(m, "frozen", Frozen([1])),
    "slots": lambda m, c, tl: setattr(m.slotted, "a", m.slotted.b),
    "attribute of a list": lambda m, c, tl: (m.named.append(3), setattr(m.named, "name", "u")),
    "own state": lambda m, c, tl: (m.packed.items.append(1), setattr(m.packed, "_position", 4)),
    "array": lambda m, c, tl: operator.setitem(m.array, 1, 3.0),
    "another array": lambda m, c, tl: setattr(m, "array", np.ones((2, 2))),
    "generator of torch": lambda m, c, tl: m.torchs.manual_seed(77),
    "generator of Python": lambda m, c, tl: m.pythons.random(),
    "buffer": lambda m, c, tl: m.mean.add_(2),
    "another buffer": lambda m, c, tl: setattr(m, "mean", torch.ones(5)),
    "new buffer": lambda m, c, tl: m.blocks[0].register_buffer("last", torch.ones(2)),
    "tensor": lambda m, c, tl: m.plain.add_(1),
    "another tensor": lambda m, c, tl: setattr(m, "plain", torch.full((4,), 3.0)),
    "view": lambda m, c, tl: c.view.fill_(6),
    "hidden module": lambda m, c, tl: (m.hidden[0].weight.data.add_(1), setattr(m.hidden[0], "count", 5)),
    "hidden module twice": lambda m, c, tl: m.hidden.append(m.hidden[0]),
    "closure": lambda m, c, tl: (m.add(), c.add()),
    "partial": lambda m, c, tl: setattr(c, "add", functools.partial(max, c.items)),
    "pair": lambda m, c, tl: m.pair[1].append(5),
    "another pair": lambda m, c, tl: setattr(m, "pair", (m.pair[1], m.pair[1])),
    "enum": lambda m, c, tl: setattr(m, "kind", Kind.B),
    "path": lambda m, c, tl: setattr(m, "path", str(Path("a") / "b")),
    "deleted": lambda m, c, tl: delattr(m, "set"),
    "deleted within": lambda m, c, tl: vars(m.config).pop("by_name", None),
    "new attribute": lambda m, c, tl: setattr(m, "fresh", [m.counts, m.counts]),
    "attribute of a parameter": lambda m, c, tl: setattr(m.head.weight, "tag", [1, 2]),
    "copy of weights": lambda m, c, tl: setattr(c, "best", {k: v.clone() for k, v in m.state_dict().items()}),
    "order of blocks": lambda m, c, tl: exchange(m),
    "mode of a block": lambda m, c, tl: m.blocks[0].eval(),
    "new module": lambda m, c, tl: m.add_module("extra", Hidden()),
    "frozen module": lambda m, c, tl: m.fc.requires_grad_(False),
    "no part": lambda m, c, tl: setattr(c, "block", None),
    "parameter as key": lambda m, c, tl: c.store.update({m.head.weight: 3}),
    "itself": lambda m, c, tl: c.store.update(me=c),
    "long": lambda m, c, tl: setattr(c, "long", list(range(3000))),
    "attribute of an optimizer": lambda m, c, tl: setattr(c.optimizer, "note", [1, m.config]),
    "state of an optimizer": lambda m, c, tl: c.optimizer.state[m.head.weight].update(extra=torch.ones(2)),
    "group": lambda m, c, tl: c.optimizer.param_groups[0].update(lr=0.3, mine="x"),
    "criterion": lambda m, c, tl: tl.note(criterion=nn.CrossEntropyLoss(label_smoothing=0.2)),
    "attribute of the loop": lambda m, c, tl: tl.note(mine=c.own),
}
_OF_LOOPS = {"train_loop_obj", "_log_sink", "_log_batch_size", "_compiled_call_impl", "_zero_grad_profile_name"}


def draw(seed: int) -> list[str]:
    """The changes of a seed, in order."""
    r = random.Random(seed)
    return r.sample(list(CHANGES), r.randint(3, 10))


def changed(seed: int, through: Callable[[TrainLoop, Callable[[Any], None]], None]) -> list[str]:
    torch.manual_seed(0)
    model = Holds()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64)), 4)
    loop = TrainLoop(model, loader, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), accelerator="cpu")
    callback = Shares(model, optimizer)
    loop.note(callbacks=[callback])

    def work(loop: Any) -> None:
        for name in draw(seed):
            CHANGES[name](loop.model, loop.callbacks[0], loop)

    through(loop, work)
    roots = {"model": model, "callback": callback, "optimizer": loop.optimizer, "criterion": loop.criterion}
    return described({**roots, "mine": getattr(loop, "mine", None)}, _OF_LOOPS)


@pytest.mark.long(every=2)
@pytest.mark.parametrize("seed", range(40))
def test_any_change_comes_back(seed: int) -> None:
    assert changed(seed, through_a_rank) == changed(seed, lambda loop, work: work(loop)), draw(seed)
