"""Models and optimizers that ``gpu_mode='fsdp'`` can't train: said by ``fit`` before any process starts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.loops import cpu_loop
from kit.sharded_models import Tower, needs_fsdp_on_cpu, words
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainloop import AbstractCallback, TrainLoop
from trainloop.errors import ConfigurationError
from trainloop.train_loop.execution.fsdp_checks import _check_overlaps, _check_views, check_shardable

pytestmark = needs_fsdp_on_cpu


def hooked(model: Tower) -> None:
    model.blocks[0].up.weight.register_hook(lambda gradient: gradient * 2)


def stepped_in_backward(model: Tower) -> None:
    model.blocks[0].up.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def of_two_dtypes(model: Tower) -> None:
    model.blocks[0].up.to(torch.bfloat16)


class Manifold(nn.Parameter):
    """As geoopt's ManifoldParameter, whose optimizers project its steps onto the manifold."""


def of_own_class(model: Tower) -> None:
    model.blocks[0].up.weight = Manifold(model.blocks[0].up.weight.detach())


def bounded(model: Tower) -> None:
    model.words.max_norm = 1.0


def sparse(model: Tower) -> None:
    model.words.sparse = True


def scripted(model: Tower) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script.* is deprecated")
        model.blocks[0] = torch.jit.script(nn.Linear(4, 4))


def fused(kind: Any) -> Callable[[Tower], Any]:
    return lambda model: kind(model.parameters(), lr=0.1, fused=True)


CASES: dict[str, tuple[Callable[[Tower], Any], str]] = {
    "hook": (hooked, r"blocks\.0\.up\.weight has a hook .*\(register_hook\).*on_after_gradient_update"),
    "step in backward": (stepped_in_backward, r"\(register_post_accumulate_grad_hook\), which would not be called"),
    "dtypes": (
        of_two_dtypes,
        r"blocks\.0 is sharded as one.*up\.weight: torch.bfloat16 and .*: torch.float32.*shard=",
    ),
    "class": (of_own_class, r"up\.weight of blocks\.0 is a Manifold, a subclass of nn\.Parameter.*Use 'ddp'"),
    "max_norm": (bounded, r"words is an Embedding with max_norm=1\.0.*change would be lost"),
    "sparse gradients": (sparse, r"words is an Embedding with sparse=True.*Use sparse=False"),
    "TorchScript": (scripted, r"blocks\.0 is a TorchScript module, which can't be sharded"),
    "fused SGD": (fused(torch.optim.SGD), r"SGD\(fused=True\) with gpu_mode='fsdp'.*Leave fused out"),
    "fused Adagrad": (fused(torch.optim.Adagrad), r"Adagrad\(fused=True\)"),
}


def loop_of(model: Tower, optimizer: Any, criterion: Any = None) -> TrainLoop[Any]:
    return cpu_loop(
        model,
        DataLoader(TensorDataset(*words(0, 4)), batch_size=2),
        optimizer,
        criterion or nn.CrossEntropyLoss(),
        gpu_mode="fsdp",
        devices=2,
    )


@pytest.mark.parametrize("case", CASES)
def test_what_would_be_lost_or_fail_in_ranks(case: str) -> None:
    change, message = CASES[case]
    model = Tower()
    optimizer = change(model) or torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=message):
        loop_of(model, optimizer).fit(num_epochs=1)


class Keeps(AbstractCallback):
    def __init__(self, kept: Any) -> None:
        super().__init__("keeps")
        self.kept = kept


@pytest.mark.parametrize(
    "of_model",
    [lambda model: model.state_dict(), lambda model: [model.blocks[0].up.weight.data[:2]]],
    ids=["state_dict()", "p.data"],
)
def test_a_view_that_a_callback_keeps(of_model: Callable[[Tower], Any]) -> None:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"Keeps\.kept has a view of .*Keep the parameter itself or.*clone"):
        loop_of(model, optimizer).fit(num_epochs=1, callbacks=[Keeps(of_model(model))])


class Wrapper(Tensor):
    """A tensor without a storage, like one in 8 bits of torchao."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def test_a_kept_tensor_without_a_storage_is_no_view() -> None:
    kept: Any = Tensor._make_wrapper_subclass(Wrapper, (3, 2))  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="invalid python storage"):
        kept.untyped_storage().data_ptr()
    _check_views(Tower(), [Keeps([kept])])


def test_a_model_with_lazy_layers() -> None:
    """The first batch, which ``fit`` reads after these checks, gives them shapes."""
    model = Tower()
    model.blocks[0].add_module("late", nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()))
    loop = loop_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    check_shardable(loop, gather=True, wrapper_args={})


def test_a_view_that_a_criterion_keeps() -> None:
    class Anchored(nn.CrossEntropyLoss):
        def __init__(self, model: Tower) -> None:
            super().__init__()
            self.kept = {name: p.data for name, p in model.named_parameters()}

    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"Anchored\.kept has a view of "):
        loop_of(model, optimizer, Anchored(model)).fit(num_epochs=1)


def _transposed(model: Tower) -> None:
    model.blocks[0].down.weight.data = model.blocks[0].up.weight.data.t()


def _buffered(model: Tower) -> None:
    model.register_buffer("first", model.blocks[0].up.weight.data)


def _flattened(model: Tower) -> None:
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(flat, model.parameters())
    model.blocks[0].flat = [flat]


@pytest.mark.parametrize(
    "share, message",
    [
        (_flattened, r"Block\.flat has a view of head\.bias"),
        (_transposed, r"blocks\.0\.(up|down)\.weight and blocks\.0\.(up|down)\.weight share memory"),
        (_buffered, r"first has a view of blocks\.0\.up\.weight"),
    ],
)
def test_memory_that_a_model_shares_within_itself(share: Callable[[Tower], None], message: str) -> None:
    model = Tower()
    share(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=message):
        loop_of(model, optimizer).fit(num_epochs=1)


def test_parts_of_one_flat_tensor_are_parameters_like_others() -> None:
    model = Tower()
    flat, begin = nn.utils.parameters_to_vector(model.parameters()).detach(), 0
    for p in model.parameters():
        p.data = flat[begin : begin + p.numel()].view_as(p)
        begin += p.numel()
    check_shardable(loop_of(model, torch.optim.SGD(model.parameters(), lr=0.1)), gather=True, wrapper_args={})
    columns = torch.zeros(2, 4)
    pair = nn.ParameterList([columns[:, :2], columns[:, 2:]])
    pair[0].data, pair[1].data = columns[:, :2], columns[:, 2:]  # elements of one take turns with those of the other
    _check_overlaps(dict(pair.named_parameters()))
