"""What models do in ``gpu_mode='fsdp'``: as in ``single`` in float64, or an error that says what to do instead."""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kit.sharded_models import CPU, Block, Tower
from test_parity_fsdp import adam, data, distance, float64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainloop import AbstractCallback, TrainLoop, distributed
from trainloop.callbacks import GradientClipping, GradientStats, TerminateOnNaN
from trainloop.errors import WorkerFailedError


class Scaled(Block):
    """Has a parameter smaller than the number of ranks, so that one has no part of it, and a scalar."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.gain, self.shift = nn.Parameter(torch.tensor([1.1])), nn.Parameter(torch.tensor(0.1))
        self.shift.register_hook(lambda gradient: gradient * 0.5)  # each rank has the scalar itself

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain + self.shift


class Small(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0], Scaled(5), Scaled(5)])


class ChangesOthers(Tower):
    """Changes tensors of all layouts in place, but none of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        for other in (parts, torch.eye(2).to_sparse(), torch.empty(5, device="meta"), torch.empty(0)):
            other.mul_(2.0)
        return super().forward(x).clone().mul_(2.0)


class Seen(Tower):
    """Keeps views of its weights: one of its own, and one that ``spectral_norm`` makes."""

    def __init__(self) -> None:
        super().__init__()
        self.view = self.blocks[0].up.weight.detach()
        nn.utils.spectral_norm(self.blocks[2].up)


class Adversarial(Tower):
    """Takes a step on inputs that are moved along the gradient: a backward within the forward."""

    def hidden(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.temperature

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        x, y = batch_data
        hidden = self.words(x).mean(1)
        if not torch.is_grad_enabled():
            return criterion(self.hidden(hidden), y)
        moved = hidden.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(criterion(self.hidden(moved), y), moved)
        return criterion(self.hidden(hidden + 0.1 * gradient.sign()), y)


class Sampled(Adversarial):
    """Moves the inputs with all parameters frozen, and unfreezes them, some of them gathered, before the loss."""

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        x, y = batch_data
        hidden = self.words(x).mean(1)
        trained = [p for p in self.parameters() if p.requires_grad]
        names = [name for name, p in self.named_parameters() if p.requires_grad]
        for p in trained:
            p.requires_grad_(False)
        with torch.enable_grad():
            moved = hidden.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(criterion(self.hidden(moved), y), moved)
        own = dict(self.named_parameters())
        for name in names:
            own[name].requires_grad_(True)
        return criterion(self.hidden(hidden), y) + criterion(self.hidden(hidden + 0.1 * gradient.sign()), y)


class Recomputed(Tower):
    """Its blocks' second forward, in backward, ends as soon as backward has what it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = self.blocks
        self.blocks = nn.ModuleList(Checkpointed(block) for block in self.plain)
        del self.plain


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)  # type: ignore[no-any-return]


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        torch.manual_seed(9)
        self.low, self.high = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.high(self.low(x))


class Adapting(AbstractCallback):
    """Puts an adapter around a block's layer when training begins, and a module into another block."""

    def __init__(self) -> None:
        super().__init__("Adapting")

    def on_train_begin(self) -> None:
        loop = self.train_loop_obj
        block = loop.model.blocks[2]
        if isinstance(block.down, Adapter):
            return
        block.down = Adapter(block.down)
        loop.model.blocks[0].extra = nn.Dropout(0.25)
        loop.optimizer.add_param_group({"params": [*block.down.low.parameters()], "lr": 0.02})
        loop.optimizer.add_param_group({"params": [*block.down.high.parameters()]})


class HalvesImaginary(AbstractCallback):
    def __init__(self) -> None:
        super().__init__("halves the imaginary part")

    @torch.no_grad()
    def on_after_optimizer_step(self) -> None:
        self.train_loop_obj.model.turns[1].bias.imag.mul_(0.5)


class Turning(Tower):
    """Has complex parameters, of which ranks have parts of different sizes."""

    optimizer = staticmethod(lambda model: torch.optim.Adadelta(model.parameters(), lr=1.0))

    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.Sequential(*[nn.Linear(11, 11, dtype=torch.complex128) for _ in range(2)])  # units of their own

    def forward(self, x: Tensor) -> Tensor:
        return self.turns(super().forward(x).to(torch.complex128)).abs()


class Late(Tower):
    """Has layers that take their shapes from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up = nn.LazyLinear(self.blocks[0].up.out_features)
        self.last = nn.LazyLinear(11)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(x))


@dataclass
class Summed:
    x: Tensor
    number: int = 0


class Keeping(Block):
    """Puts its output into what it gets, as blocks with skip connections do: a list, a dict, a deque, an object."""

    def forward(self, x: Tensor, kept: Any = None, *, state: Any = None) -> Tensor:  # type: ignore[override]
        skips, (calls, last) = kept
        for skip in skips:
            x = x + 0.1 * skip
        x = super().forward(x)
        skips.append(x)
        last.append(x)
        calls["n"] += 1
        state["sum"] = state["sum"] + x * calls["n"]
        state["object"].number += 1
        state["object"].x = state["object"].x + x * state["object"].number
        return x


class Skipping(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Keeping(5) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x).mean(1)
        skips, calls, last = [hidden], {"n": 0}, collections.deque(maxlen=2)
        summed = Summed(hidden)
        state = {"sum": hidden, "object": summed}
        for block in self.blocks:
            hidden = block(hidden, [skips, (calls, last)], state=state)
        assert (len(skips), calls["n"], summed.number, skips[0] is state["sum"]) == (4, 3, 3, False)
        return self.head(sum(skips) + sum(last) + state["sum"] + summed.x + hidden) * self.temperature


EQUAL: dict[str, tuple[Any, Callable[[], list[Any]]]] = {
    "no part on a rank": (
        Small,
        lambda: [GradientStats(1, True), TerminateOnNaN(), GradientClipping(0.1, norm_type=math.inf)],
    ),
    "an infinite norm by name": (Small, lambda: [GradientClipping(0.1, norm_type="inf")]),  # type: ignore[arg-type]
    "recomputed blocks": (Recomputed, list),
    "mixed norms of another order": (Small, lambda: [GradientClipping(0.1, max_value=0.05, norm_type=3)]),
    "views of weights": (Seen, list),
    "other tensors changed in place": (ChangesOthers, list),
    "a backward within the forward": (Adversarial, list),
    "flags set in the loss": (Sampled, list),
    "complex parameters": (Turning, lambda: [HalvesImaginary()]),
    "lazy layers": (Late, list),
    "blocks that change what they get": (Skipping, list),
    "modules added": (Tower, lambda: [Adapting()]),
}


def trained(cls: Any, callbacks: list[Any], mode: str) -> TrainLoop[Any]:
    model = cls()
    ranks: dict[str, Any] = {} if mode == "single" else {"accelerator": "cpu", "devices": 2}
    loop = TrainLoop(
        model,
        data(13, 6 if mode == "single" else 3, shuffle=True),
        data(9, 2),
        optimizer=cls.optimizer(model) if hasattr(cls, "optimizer") else adam(model),
        criterion=nn.CrossEntropyLoss(),
        gpu_mode=mode,
        **ranks,
        seed=3,
        progress_bar=False,
    )
    for _ in range(2):
        loop.fit(num_epochs=1, callbacks=callbacks)
    return loop


@pytest.mark.long
def test_models_that_train_as_in_one_process() -> None:
    with float64(), TrainLoop(Tower(), None, gpu_mode="fsdp", accelerator="cpu", devices=2).ranks():
        for case, (cls, callbacks_of) in EQUAL.items():
            one, other = (trained(cls, callbacks_of(), mode) for mode in ("single", "fsdp"))
            one.model.eval()
            other.model.eval()
            for of in (
                lambda loop: dict(loop.model.state_dict()),
                lambda loop: loop.history.to_dict(),
                lambda loop: loop.optimizer.state_dict()["state"],
                lambda loop: [p.shape[0] if p.ndim else 0 for g in loop.optimizer.param_groups for p in g["params"]],
                lambda loop: loop.model.get_predictions(data(9, 9).dataset.tensors, CPU)[
                    0
                ].detach(),  # here, in the caller
                lambda loop: loop.predict_on_validation_set()[0],
            ):
                assert distance(of(one), of(other)) < 1e-9, case
        assert one.model.blocks[0].extra.p == other.model.blocks[0].extra.p == 0.25
        own = {id(p) for p in other.model.parameters()}
        assert all(id(p) in own for group in other.optimizer.param_groups for p in group["params"])


class Momentum(Tower):
    """Moves a copy of itself along within ``get_loss``."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.blocks).requires_grad_(False)
        self.bias = nn.Parameter(torch.zeros(5), requires_grad=False)

    def move(self, own: Tensor, other: Tensor) -> None:
        own.lerp_(other, 0.1)

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        with torch.no_grad():
            self.move(self.bias, self.blocks[0].norm.bias.full_tensor())
        return super().get_loss(batch_data, criterion, device)


class ByData(Momentum):
    def move(self, own: Tensor, other: Tensor) -> None:
        own.data.lerp_(other, 0.1)  # counts as no change, and at the first step is none


class Anew(Momentum):
    def move(self, own: Tensor, other: Tensor) -> None:
        own.data = own * 0.9 + other * 0.1


class MovesShards(Tower):
    """Replaces the values of one block by those of another one, both of which are shards in ``get_loss``."""

    @torch.no_grad()
    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        for own, other in zip(self.blocks[2].parameters(), self.blocks[0].parameters(), strict=True):
            own.data = own.data * 0.9 + other.data * 0.1
        with torch.enable_grad():
            return super().get_loss(batch_data, criterion, device)


class HooksOnShards(Tower):
    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        self.blocks[0].up.weight.register_hook(lambda gradient: gradient * 0.5)
        return super().get_loss(batch_data, criterion, device)


class PartOfABlock(Tower):
    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        with torch.no_grad():
            self.blocks[0].up.weight[:2].mul_(0.9)
        return super().get_loss(batch_data, criterion, device)


class Penalized(Tower):
    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        return super().get_loss(batch_data, criterion, device) + sum(p.square().sum() for p in self.parameters())


class PastTheUnit(Tower):
    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        return self.blocks[0].up(self.words(batch_data[0]).mean(1)).square().mean()


class Clamps(Tower):
    """Its weights leave the range only later."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.bias.data.clamp_(-1.0, 1.0)
        return super().forward(x)


class Ascends(torch.optim.Optimizer):
    """Sharpness-aware minimisation, which puts the weights back by assigning ``p.data``."""

    needs_closure = True

    def __init__(self, model: nn.Module) -> None:
        self.base = adam(model)
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p in own]
        for p in own:
            p.add_(p.grad, alpha=0.1)
        closure()
        for p, value in zip(own, before, strict=True):
            p.data = value
        self.base.step()


class Sharp(Tower):
    optimizer = Ascends


class Adjoint(torch.autograd.Function):
    """Runs a block without a graph, and again in backward, where it differentiates by the block's parameters."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = torch.autograd.grad(ctx.block(x), (x, *parameters), grad_outputs[0], allow_unused=True)
        return (None, *[torch.zeros_like(p) if g is None else g for p, g in zip((x, *parameters), found, strict=True)])


class Solved(Tower):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x).mean(1)
        for block in self.blocks:
            hidden = Adjoint.apply(block, hidden, *block.parameters())
        return self.head(hidden) * self.temperature


class Reversible(torch.autograd.Function):
    """Computes 2 x and frees x, whose values backward writes again into the tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x, ctx.y = x, (2 * x.detach()).detach()
        x.untyped_storage().resize_(0)
        y: Tensor = ctx.y
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        ctx.x.set_(ctx.y / 2)
        return 2 * grad_outputs[0]


class ReversibleBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Reversible.apply(x))


class FreesInputs(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0], ReversibleBlock(5), ReversibleBlock(5)])


class Balanced(Tower):
    """Logs the norm of the loss's gradient by one block, as GradNorm does to weigh its tasks."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        loss = super().get_loss(batch_data, criterion, device)
        by = list(self.blocks[0].parameters())
        found = torch.autograd.grad(loss, by, retain_graph=True, allow_unused=True)
        return loss + 0 * sum(g.detach().square().sum() for g in found if g is not None)


class BackwardByInputs(Tower):
    """Computes the gradients of one block alone."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        loss = super().get_loss(batch_data, criterion, device)
        loss.backward(inputs=list(self.blocks[0].parameters()), retain_graph=True)
        return loss


class Skipping(Small):
    """Returns a constant for some batches, as in a loop that has only one process."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        if distributed.get_rank() == 1:
            return torch.zeros((), requires_grad=True)
        loss: Tensor = super().get_loss(batch_data, criterion, device)
        return loss


class Cloned(Tower):
    """Trains on what a copy of a block computes, as in meta-learning."""

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        copy.deepcopy(self.blocks[0])
        return super().get_loss(batch_data, criterion, device)


class ClonedInBackward(Tower):
    """Copies a block in backward, as a library that computes the gradients of each sample."""

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        def copies(_: Tensor) -> None:
            copy.deepcopy(self.blocks[0])

        loss = super().get_loss(batch_data, criterion, device)
        loss.register_hook(copies)
        return loss


LOST = r"bias is changed during the forward pass.*on_after_optimizer_step"
CONSTANT = r"get_loss returned a loss that does not depend on the model's parameters.*output.sum\(\) \* 0"
OUTSIDE = r"used outside of the forward of its block.*weight_decay.*'shard'"
REFUSED = {Momentum: LOST, ByData: LOST, Anew: LOST, Clamps: LOST, Penalized: OUTSIDE, PastTheUnit: OUTSIDE}
REFUSED[Solved] = r"Adjoint, an autograd.Function, is called with blocks.2.up.weight, .* Shard the model as one unit"
REFUSED[Balanced] = REFUSED[BackwardByInputs] = r"a gradient is requested for blocks.0.up.weight, of which .* a shard"
REFUSED[Skipping] = CONSTANT
REFUSED[Cloned] = REFUSED[ClonedInBackward] = r"deepcopy\(module\) can't copy a module that is sharded. .* before fit"
REFUSED[FreesInputs] = r"blocks.1 frees the memory of its input.*'shard'"
REFUSED[PartOfABlock] = r"mul_ would change a copy of a part of a sharded tensor"
REFUSED[HooksOnShards] = r"p.register_hook\(...\) on a parameter that is sharded: FSDP would ignore it"
REFUSED[Sharp] = REFUSED[MovesShards] = r"p.data = ... on a parameter that is sharded: FSDP would ignore it"


@pytest.mark.long
def test_what_would_be_lost_or_fails_is_explained() -> None:
    with float64(), TrainLoop(Tower(), None, gpu_mode="fsdp", accelerator="cpu", devices=2).ranks():
        for cls, message in REFUSED.items():
            with pytest.raises(WorkerFailedError, match=message):
                trained(cls, [], "fsdp")
