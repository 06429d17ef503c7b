"""``gpu_mode='fsdp'`` against ``single`` and ``ddp``, in float64: weights, history, optimizers, predictions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from kit.sharded_models import Hollow, Normed, Tower, TwoLosses, Weighted, Yielding, needs_fsdp_on_cpu, words
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, MultiOptimizer, TrainLoop
from trainloop.callbacks import ExponentialMovingAverage, GradientStats, LRScheduler, TerminateOnNaN
from trainloop.errors import ConfigurationError, WorkerFailedError


def adam(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), 0.01)


def momentum(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def two(model: nn.Module) -> MultiOptimizer:
    first = {id(p) for p in model.words.parameters()}
    rest = [p for p in model.parameters() if id(p) not in first]
    return MultiOptimizer([torch.optim.SGD(model.words.parameters(), 0.1, momentum=0.9), torch.optim.AdamW(rest, 0.01)])


def muon(model: nn.Module) -> MultiOptimizer:
    """Muon of torch makes matrices orthogonal in bfloat16, so another order of its sums would change many digits."""
    flat = [p for p in model.parameters() if p.ndim != 2]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return MultiOptimizer([torch.optim.Muon(matrices, 0.02), torch.optim.SGD(flat, 0.1)])


class Factored(torch.optim.Optimizer):
    """State of other shapes than parameters: means of rows and columns as in Adafactor, and lists as in Shampoo."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            state, square = self.state[p], p.grad.square() + 1e-30
            state["count"] = state.get("count", 0) + 1
            state["sizes"] = {"norm": 0.5 * state.get("sizes", {}).get("norm", 0) + square.sum()}
            update = p.grad / (1 + state["sizes"]["norm"].sqrt())
            if p.ndim == 2:
                rows, columns = square.mean(-1), square.mean(-2)
                state["rows"] = 0.9 * state.get("rows", 0) + rows
                state["columns"] = 0.9 * state.get("columns", 0) + columns
                products = [p.grad @ p.grad.T, p.grad.T @ p.grad]
                before = state.get("products", [0, 0])
                left, right = state["products"] = [0.9 * a + b for a, b in zip(before, products)]
                scale = (state["rows"][:, None] * state["columns"] / state["rows"].mean()).sqrt()
                update = update / (1 + scale) + left @ update @ right / (1 + left.norm() * right.norm())
            p.sub_(update, alpha=self.param_groups[0]["lr"])


def factored(model: nn.Module) -> Factored:
    return Factored(model.parameters())


class Freezing(AbstractCallback):
    """Freezes one part and unfreezes another after the first epoch, on every rank."""

    def __init__(self) -> None:
        super().__init__("Freezing")

    def on_epoch_begin(self) -> None:
        if self.train_loop_obj.epoch == 1:
            model = self.train_loop_obj.model
            model.blocks[0].requires_grad_(False)
            model.blocks[1].up.weight.requires_grad_(True)


def scheduler() -> LRScheduler:
    return LRScheduler(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), interval="step")


# Model, optimizer, samples, batch of a process, accumulation, clipping, callbacks.
CASES: dict[str, tuple[Any, ...]] = {
    "accumulated and clipped, uneven tail": (Tower, adam, 23, 4, 2, 0.1, lambda: [ExponentialMovingAverage(0.8)]),
    "token weights, a rank without samples": (Weighted, momentum, 9, 4, 1, None, lambda: [GradientStats(1, True)]),
    "fewer samples than ranks": (Tower, adam, 1, 1, 1, 0.1, lambda: [TerminateOnNaN()]),
    "losses of two optimizers": (TwoLosses, two, 13, 3, 2, None, list),
    "losses yielded": (Yielding, two, 13, 3, 2, 0.5, list),
    "frozen on the way": (Tower, adam, 16, 4, 1, None, lambda: [Freezing()]),
    "without elements": (Hollow, adam, 13, 4, 1, 0.1, lambda: [GradientStats(1, True)]),
    "schedule": (Tower, momentum, 16, 4, 1, 0.1, lambda: [scheduler()]),
    "batchnorm": (Normed, adam, 20, 4, 1, None, list),
    "state of other shapes": (Tower, factored, 13, 4, 1, None, list),
}
if hasattr(torch.optim, "Muon"):  # torch 2.9 and later
    CASES["muon"] = (Tower, muon, 13, 4, 2, 0.1, list)


@contextmanager
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def data(samples: int, batch_size: int, *, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*words(0, samples)), batch_size=batch_size, shuffle=shuffle)


def trained(case: str, mode: str, ranks: int, **fit: Any) -> dict[str, Any]:
    cls, optimizer_of, samples, batch_size, accumulation, clip, callbacks_of = CASES[case]
    model, callbacks = cls(), callbacks_of()
    optimizer = optimizer_of(model)
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    whole = mode == "single"
    loop = TrainLoop(
        model,
        data(samples, batch_size * (ranks if whole else 1), shuffle=True),
        data(9, 2),
        data(3, 3),
        optimizer,
        nn.CrossEntropyLoss(),
        gpu_mode=mode,
        **({} if whole else {"accelerator": "cpu", "devices": ranks}),
        seed=3,
        progress_bar=False,
        gradient_clip_norm=clip,
    )
    for _ in range(2):  # the second goes on with the optimizer's state
        assert loop.fit(num_epochs=1, grad_accumulation=accumulation, callbacks=callbacks, **fit) is model
    optimizers = list(optimizer) if isinstance(optimizer, MultiOptimizer) else [optimizer]
    own = {id(p) for p in model.parameters()}
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "flags": [p.requires_grad for p in model.parameters()],
        "history": loop.history.to_dict(),
        "optimizers": [state for one in optimizers for _, state in sorted(one.state_dict()["state"].items())],
        "steps its own": all(id(p) in own for one in optimizers for g in one.param_groups for p in g["params"]),
        "in place": before == {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()},
        "plain": all(type(t) in (Tensor, nn.Parameter) for t in model.state_dict(keep_vars=True).values()),
        "tied": model.head.weight is model.words.weight,
        "predictions": loop.predict_on_validation_set()[0],
        "averages": [callback.average for callback in callbacks if hasattr(callback, "average")],
    }


def distance(one: Any, other: Any) -> float:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), (one.keys(), other.keys())
        return max((distance(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        return max((distance(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    kind = torch.complex128 if torch.is_tensor(one) and one.is_complex() else torch.float64
    difference = (torch.as_tensor(one, dtype=kind) - torch.as_tensor(other, dtype=kind)).abs()
    return float(difference.max()) if difference.numel() else 0.0


def compare(case: str, ranks: int, reference: str, **fit: Any) -> None:
    others = {"ddp_model_args": {"find_unused_parameters": True}} if reference == "ddp" else {}
    ours, theirs = trained(case, "fsdp", ranks, **fit), trained(case, reference, ranks, **others)
    assert ours["in place"], case
    assert ours["plain"], case
    assert ours["tied"], case
    assert ours["steps its own"], case
    assert ours["flags"] == theirs["flags"], case
    for part in ("weights", "history", "optimizers", "predictions", "averages"):
        assert distance(ours[part], theirs[part]) < 1e-9, (case, part)


@pytest.mark.long
def test_two_ranks_equal_one_process() -> None:
    with float64(), TrainLoop(Tower(), None, gpu_mode="fsdp", accelerator="cpu", devices=2).ranks():
        compare("accumulated and clipped, uneven tail", 2, "single")
        compare("without elements", 2, "single")
        compare("state of other shapes", 2, "single")
        if "muon" in CASES:
            compare("muon", 2, "single")
        # Units that a forward leaves whole are not stale in the steps after an evaluation.
        kept = {"shard": [nn.Linear], "reshard_after_forward": False}
        compare("fewer samples than ranks", 2, "single", fsdp_model_args=kept)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:devices=3 on 2 CPU cores")
def test_all_cases(case: str, ranks: int) -> None:
    with float64(), TrainLoop(Tower(), None, gpu_mode="fsdp", accelerator="cpu", devices=ranks).ranks():
        if case != "batchnorm":  # there one process normalises a batch as a whole
            compare(case, ranks, "single")
        compare(case, ranks, "ddp")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:devices=4 on 2 CPU cores")
def test_two_replicas_of_two_shards_equal_ddp() -> None:
    with float64(), TrainLoop(Tower(), None, gpu_mode="fsdp", accelerator="cpu", devices=4).ranks():
        compare("accumulated and clipped, uneven tail", 4, "ddp", fsdp_model_args={"replicas": 2})


class Contains(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "LBFGS": (lambda: fitted(optimizer=torch.optim.LBFGS), r"LBFGS with gpu_mode='fsdp'.*Use gpu_mode='ddp'"),
    "Adafactor": (lambda: fitted(optimizer=torch.optim.Adafactor), r"Adafactor with gpu_mode='fsdp'.*such as AdamW"),
    "an optimizer within another one": (
        lambda: fitted(optimizer=lambda parameters, lr: Contains(torch.optim.Rprop(parameters, lr))),
        r"Rprop with gpu_mode='fsdp'.*such as AdamW",
    ),
    "Rprop": (lambda: fitted(optimizer=torch.optim.Rprop), r"Rprop with gpu_mode='fsdp'.*such as AdamW"),
    "two low precisions": (
        lambda: fitted(use_amp="fp16", fit={"fsdp_model_args": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}}),
        r"use_amp runs operations in torch.float16, .* blocks in torch.bfloat16. Use only one ",
    ),
    "compile": (lambda: fitted(compile=True), r"compile=True with gpu_mode='fsdp'.*block.compile"),
    "a compiled step": (lambda: fitted(compile="step"), r"compile='step' with gpu_mode='fsdp'"),
    "an argument": (
        lambda: fitted(fit={"fsdp_model_args": {"shards": 2}}),
        "FullyShardedDataParallel has no argument 'shards'",
    ),
}


def fitted(optimizer: Any = torch.optim.SGD, fit: dict[str, Any] | None = None, **given: Any) -> None:
    model = Tower()
    loop = cpu_loop(model, data(4, 2), optimizer(model.parameters(), lr=0.1), gpu_mode="fsdp", devices=2, **given)
    loop.fit(num_epochs=1, **(fit or {}))


@needs_fsdp_on_cpu
@pytest.mark.parametrize("case", BAD)
def test_what_cannot_work_is_said_before_ranks_start(case: str) -> None:
    make, message = BAD[case]
    with pytest.raises(ConfigurationError, match=message):
        make()


class Copies(torch.optim.SGD):
    """Keeps the first gradients, as torch_optimizer's A2Grad: torch can't copy those that lie in FSDP's buffer."""

    __module__ = "own"

    def step(self, closure: Any = None) -> Any:
        self.first = [copy.deepcopy(p.grad) for group in self.param_groups for p in group["params"]]
        return super().step(closure)


@needs_fsdp_on_cpu
def test_an_own_optimizer_that_needs_whole_tensors_is_named() -> None:
    with pytest.raises(WorkerFailedError, match=r"Copies with gpu_mode='fsdp'.*AdamW\. torch says: Attempted to"):
        fitted(optimizer=Copies)
