"""TTDistributedDataParallel between two real ranks, against torch's own and against one process."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.parallel_models import (
    CPU,
    Net,
    TwoLosses,
    Weighted,
    WithBatchNorm,
    WithUnused,
    batch_of,
    furthest,
    gradients,
    total_of,
)
from kit.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainloop.errors import ConfigurationError
from trainloop.optim import MultiLoss
from trainloop.parallel import TTDistributedDataParallel, reduce_gradients

# -- DDP: two ranks ----------------------------------------------------------------------------------------------------


class LossAsForward(nn.Module):
    """How one trains a ``get_loss`` by torch's DDP alone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, *args: Any) -> Any:
        return self.inner.get_loss(*args)


VARIANTS: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "plain": (Net, {}),
    "views": (Net, {"gradient_as_bucket_view": True}),
    "static graph": (WithUnused, {"static_graph": True}),
    "unused": (WithUnused, {"find_unused_parameters": True}),
    "batchnorm": (WithBatchNorm, {}),
    "weighted": (Weighted, {"find_unused_parameters": True}),
    "weighted static": (Weighted, {"static_graph": True}),
    "two losses": (TwoLosses, {"find_unused_parameters": True}),
    "two losses static": (TwoLosses, {"static_graph": True}),
    "small buckets": (Net, {"bucket_cap_mb": 0.0001}),
}


def train(get_loss: Callable[..., Any], ddp: Any, model: nn.Module, accumulate: int = 1) -> dict[str, Tensor | None]:
    """Four steps of SGD with momentum; the gradients of the last."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        for i in range(accumulate):
            with contextlib.nullcontext() if i == accumulate - 1 else ddp.no_sync():
                batch = batch_of(100 * step + 10 * i + dist.get_rank())
                (total_of(get_loss(batch, nn.CrossEntropyLoss(), CPU)) / accumulate).backward()
        last = gradients(model)
        optimizer.step()
    return last


def trained_by_both(variant: str, accumulate: int) -> dict[str, Any]:
    cls, arguments = VARIANTS[variant]
    model, reference = cls(), cls()
    wrapper = TTDistributedDataParallel(model, **arguments)
    ours = train(wrapper.get_loss, wrapper, model, accumulate)
    facts = {"gradients": ours, "weights": {name: t.clone() for name, t in model.state_dict().items()}}
    if accumulate > 1 and "static_graph" in arguments:
        return facts  # torch's own fails an internal assertion: see TTDistributedDataParallel._first_of_static_graph
    # A MultiLoss is opaque to torch's DDP, so its reference gives the sum.
    as_forward = LossAsForward(reference)
    if cls is TwoLosses:
        as_forward.forward = lambda *args: total_of(reference.get_loss(*args))  # type: ignore[method-assign]
    ddp = DistributedDataParallel(as_forward, **arguments)
    theirs = train(ddp, ddp, reference, accumulate)
    distances = furthest(ours, theirs), furthest(facts["weights"], dict(reference.state_dict()))
    return {**facts, "furthest": max(distances)}


def hooks_fire() -> dict[str, Any]:
    """Which hooks of the user's fire in one step, and with what."""
    model = Net()
    fired: collections.Counter[str] = collections.Counter()

    def count(name: str, result: Any = None) -> Callable[..., Any]:
        def hook(*_: Any) -> Any:
            fired[name] += 1
            return result

        return hook

    model.head.weight.register_hook(lambda grad: (count("tensor hook")(), grad * 2)[1])
    model.head.weight.register_post_accumulate_grad_hook(count("after accumulation"))
    model.head.register_forward_pre_hook(count("forward pre"))
    model.head.register_forward_hook(count("forward"))
    model.head.register_full_backward_hook(count("full backward"))
    model.head.register_full_backward_pre_hook(count("full backward pre"))
    model.register_forward_hook(count("model forward"))
    wrapper = TTDistributedDataParallel(model)
    wrapper.register_forward_hook(count("wrapper forward"))
    wrapper.get_loss(batch_of(dist.get_rank()), nn.CrossEntropyLoss(), CPU).backward()
    reference = Net()
    reference.head.weight.register_hook(lambda grad: grad * 2)
    for rank in range(dist.get_world_size()):
        (reference.get_loss(batch_of(rank), nn.CrossEntropyLoss(), CPU) / dist.get_world_size()).backward()
    return {"fired": dict(fired), "furthest": furthest(gradients(model), gradients(reference))}


def one_optimizer_a_loss() -> float:
    """A MultiLoss with a backward for each loss, as MultiOptimizer has it; the distance from one process."""

    def losses_of(model: Net, batch: Any) -> MultiLoss:
        x, y = batch
        hidden = model.encoder(x)
        return MultiLoss(
            {"encoder": hidden.square().mean(), "head": nn.functional.cross_entropy(model.head(hidden), y)},
            {"encoder": 0, "head": 1},
        )

    class Adversarial(Net):
        def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
            return losses_of(self, batch_data)

    model, reference = Adversarial(), Adversarial()
    inputs = ["encoder", "head"]
    wrapper = TTDistributedDataParallel(model, find_unused_parameters=True)
    for _ in range(2):
        losses = wrapper.get_loss(batch_of(dist.get_rank()), None, CPU)
        for i, part in enumerate(inputs):
            losses.backward(i, inputs=list(getattr(model, part).parameters()))
    for rank in range(dist.get_world_size()):
        losses = losses_of(reference, batch_of(rank)).map(lambda loss: loss * 2 / dist.get_world_size())
        for i, part in enumerate(inputs):
            losses.backward(i, inputs=list(getattr(reference, part).parameters()))
    return furthest(gradients(model), gradients(reference))


def ragged_steps() -> dict[str, Any]:
    """Steps in which rank 1 has no batch, between whole ones; the distances from one process."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    facts: dict[str, Any] = {}
    for name, arguments in {
        "plain": {},
        "views": {"gradient_as_bucket_view": True},
        "unused": {"find_unused_parameters": True},
        "static": {"static_graph": True},
    }.items():
        model, reference = WithBatchNorm(), WithBatchNorm()
        for net in (model, reference):
            net.spare = nn.Linear(2, 2)
            net.spare.requires_grad_(name in ("unused", "static"))
        wrapper = TTDistributedDataParallel(model, **arguments)
        distances = []
        for step, ranks in enumerate([[0, 1], [0], [0, 1], [0, 0], [0, 1]]):
            model.zero_grad()
            reference.zero_grad()
            for net in (model, reference):
                net.eval()  # the reference has no BatchNorm of one rank
            if ranks == [0, 1]:
                wrapper.get_loss(batch_of(step * 10 + rank), nn.CrossEntropyLoss(), CPU).backward()
            else:
                with wrapper.no_exchange():
                    for _ in range(ranks.count(rank)):
                        wrapper.get_loss(batch_of(step * 10 + rank), nn.CrossEntropyLoss(), CPU).backward()
                reduce_gradients(model.parameters())
            for r in ranks:
                loss = reference.get_loss(batch_of(step * 10 + r), nn.CrossEntropyLoss(), CPU)
                (loss / world_size).backward()
            distances.append(furthest(gradients(model), gradients(reference)))
        facts[name] = max(distances)
    return facts


def gradients_reduced_by_hand() -> dict[str, Any]:
    rank = dist.get_rank()
    on_both, on_one, on_none = (torch.zeros(3, requires_grad=True) for _ in range(3))
    frozen = torch.zeros(3)
    half = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    image = torch.zeros(1, 2, 3, 3, requires_grad=True)
    rows, rows_on_one = nn.Embedding(5, 2, sparse=True), nn.Embedding(5, 2, sparse=True)
    rows_kinds = torch.zeros(4, 2, requires_grad=True)
    on_both.grad = torch.full((3,), 1.0 + rank)
    half.grad = torch.full((2,), 2.0 * rank, dtype=torch.bfloat16)
    image.grad = torch.arange(18.0).reshape(1, 2, 3, 3).to(memory_format=torch.channels_last) * (rank + 1)
    rows(torch.tensor([0, 3 + rank])).sum().backward()
    rows_kinds.grad = torch.eye(4, 2) if rank else torch.eye(4, 2).to_sparse(1)
    if rank:
        on_one.grad = torch.full((3,), 5.0)
        rows_on_one(torch.tensor([2])).sum().backward()
    views = on_both.grad
    tensors = [on_both, on_one, on_none, frozen, half, image, rows.weight, rows_on_one.weight, rows_kinds]
    reduce_gradients(tensors)
    reduce_gradients([])
    return {
        "in place": on_both.grad is views,
        "gradients": [None if t.grad is None else t.grad.to_dense().tolist() for t in tensors],
        "sparse": [t.grad is not None and t.grad.is_sparse for t in tensors],
    }


def unused_is_explained() -> dict[str, str]:
    facts = {}
    wrapper = TTDistributedDataParallel(WithUnused())
    wrapper.check_reduced()  # nothing to check yet
    wrapper.get_loss(batch_of(0), nn.CrossEntropyLoss(), CPU).backward()
    calls: dict[str, Callable[[], Any]] = {
        "check": wrapper.check_reduced,
        "get_loss": lambda: wrapper.get_loss(batch_of(0), nn.CrossEntropyLoss(), CPU),
        "forward": lambda: wrapper(batch_of(0)[0]),
    }
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as e:
            facts[name] = str(e)
    whole = TTDistributedDataParallel(Net())
    whole.get_loss(batch_of(0), nn.CrossEntropyLoss(), CPU).backward()
    whole.check_reduced()
    return facts


def changed_after_wrapping() -> dict[str, str]:
    """Changes of parameters after which torch's DDP names others, or averages no gradients without a word."""

    def frozen() -> None:
        wrapper = TTDistributedDataParallel(Net())
        wrapper.head.requires_grad_(False)
        for _ in range(2):
            wrapper.get_loss(batch_of(0), nn.CrossEntropyLoss(), CPU).backward()

    def converted(convert: Callable[[Any], Any]) -> Callable[[], Any]:
        def call() -> None:
            wrapper = TTDistributedDataParallel(Net())
            convert(wrapper)
            wrapper(batch_of(0)[0].to(wrapper.scale.dtype)).sum().backward()

        return call

    def evaluated() -> None:
        wrapper = TTDistributedDataParallel(Net()).bfloat16()
        with torch.no_grad():
            wrapper(batch_of(0)[0].bfloat16())

    def as_mixed_precision(wrapper: Any) -> None:  # of DDP, which needs a GPU, in each step
        for parameter in wrapper.module.parameters():
            parameter._mp_param = parameter.detach().half()
        wrapper.half().float()

    calls = {
        "frozen": frozen,
        "mixed precision": converted(as_mixed_precision),
        "wrapper": converted(lambda wrapper: wrapper.bfloat16()),
        "part": converted(lambda wrapper: wrapper.module.head.half()),
        "and back": converted(lambda wrapper: wrapper.half().float()),
        "unchanged": converted(lambda wrapper: wrapper.cpu().to("cpu")),
        "evaluated": evaluated,
    }
    facts = {}
    for name, call in calls.items():
        try:
            call()
            facts[name] = "no error"
        except (RuntimeError, ConfigurationError) as e:
            facts[name] = str(e)
    return facts


def evaluation_exchanges_nothing() -> dict[str, Any]:
    """Rank 1 evaluates one batch, rank 0 three: any exchange would hang or mix up."""
    wrapper = TTDistributedDataParallel(WithBatchNorm())
    wrapper.get_loss(batch_of(0), nn.CrossEntropyLoss(), CPU).backward()
    wrapper.eval()
    with torch.no_grad():
        for i in range(1 if dist.get_rank() else 3):
            wrapper.get_loss_eval(batch_of(i), nn.CrossEntropyLoss(), CPU)
            predictions = wrapper.get_predictions(batch_of(i), CPU)
    return {"rows": len(predictions[0]), "metadata": predictions[2]["fixed"]}


def forward_as_ddp() -> float:
    model, reference = WithBatchNorm(), WithBatchNorm()
    ours, theirs = TTDistributedDataParallel(model), DistributedDataParallel(reference)
    for step in range(3):
        x, y = batch_of(10 * step + dist.get_rank())
        for ddp in (ours, theirs):
            nn.functional.cross_entropy(ddp(x), y).backward()
    return max(
        furthest(gradients(model), gradients(reference)),
        furthest(dict(model.state_dict()), dict(reference.state_dict())),
    )


@dataclasses.dataclass
class Output:
    logits: Tensor
    more: dict[str, list[Tensor]]


class ReturnsRecord(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.encoder(x)
        return Output(self.head(hidden), {"hidden": [hidden]})


def static_graph_with_a_record() -> float:
    """The distance of the gradients of the third step from those of one process; torch's own are of one rank each."""
    model, reference = ReturnsRecord(), ReturnsRecord()
    wrapper = TTDistributedDataParallel(model, static_graph=True)
    for step in range(3):
        for forward, batches in ((wrapper, [dist.get_rank()]), (reference, range(dist.get_world_size()))):
            forward.zero_grad()
            for rank in batches:
                x, y = batch_of(10 * step + rank)
                found = forward(x)
                loss = nn.functional.cross_entropy(found.logits, y) + found.more["hidden"][0].square().mean()
                (loss / len(batches)).backward()
    return furthest(gradients(model), gradients(reference))


def ddp_scenario() -> dict[str, Any]:
    facts: dict[str, Any] = {
        variant: {accumulate: trained_by_both(variant, accumulate) for accumulate in (1, 3)} for variant in VARIANTS
    }
    facts["hooks"] = hooks_fire()
    facts["one optimizer a loss"] = one_optimizer_a_loss()
    facts["ragged"] = ragged_steps()
    facts["by hand"] = gradients_reduced_by_hand()
    facts["unused is explained"] = unused_is_explained()
    facts["changed"] = changed_after_wrapping()
    facts["evaluation"] = evaluation_exchanges_nothing()
    facts["forward"] = forward_as_ddp()
    facts["record"] = static_graph_with_a_record()
    return facts


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(ddp_scenario, 2, folder=tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_ddp_trains_as_torchs_own(variant: str, accumulate: int, two_ranks: list[dict[str, Any]]) -> None:
    first, second = (facts[variant][accumulate] for facts in two_ranks)
    if accumulate == 1 or "static_graph" not in VARIANTS[variant][1]:
        assert first["furthest"] == second["furthest"] == 0
    assert furthest(first["gradients"], second["gradients"]) == 0


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "variant", ["plain", "unused", "static graph", "two losses", "two losses static", "weighted static"]
)
def test_ddp_trains_as_one_process(variant: str, accumulate: int, two_ranks: list[dict[str, Any]]) -> None:
    model = VARIANTS[variant][0]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        for i in range(accumulate):
            for rank in range(2):
                batch = batch_of(100 * step + 10 * i + rank)
                (total_of(model.get_loss(batch, nn.CrossEntropyLoss(), CPU)) / accumulate / 2).backward()
        optimizer.step()
    assert furthest(two_ranks[0][variant][accumulate]["weights"], dict(model.state_dict())) < 1e-6


def test_user_hooks_fire_once_for_each_use(two_ranks: list[dict[str, Any]]) -> None:
    for facts in two_ranks:
        assert facts["hooks"]["fired"] == {
            "tensor hook": 1,
            "after accumulation": 1,
            "forward pre": 3,
            "forward": 3,
            "full backward": 3,
            "full backward pre": 3,
            "model forward": 2,
        }
        assert facts["hooks"]["furthest"] < 1e-6


def test_a_loss_and_a_backward_for_each_optimizer(two_ranks: list[dict[str, Any]]) -> None:
    assert max(facts["one optimizer a loss"] for facts in two_ranks) < 1e-6


@pytest.mark.parametrize("arguments", ["plain", "views", "unused", "static"])
def test_steps_in_which_a_rank_has_no_batch(arguments: str, two_ranks: list[dict[str, Any]]) -> None:
    assert max(facts["ragged"][arguments] for facts in two_ranks) < 1e-6


def test_gradients_reduced_by_hand(two_ranks: list[dict[str, Any]]) -> None:
    for facts in two_ranks:
        facts = facts["by hand"]
        assert facts["in place"]
        on_both, on_one, on_none, frozen, half, image, rows, rows_on_one, rows_kinds = facts["gradients"]
        assert on_both == [1.5] * 3
        assert on_one == [2.5] * 3
        assert on_none is None
        assert frozen is None
        assert half == [1.0] * 2
        assert image == (torch.arange(18.0).reshape(1, 2, 3, 3) * 1.5).tolist()
        assert rows == [[1, 1], [0, 0], [0, 0], [0.5, 0.5], [0.5, 0.5]]
        assert rows_on_one == [[0, 0], [0, 0], [0.5, 0.5], [0, 0], [0, 0]]
        assert rows_kinds == torch.eye(4, 2).tolist()
        assert facts["sparse"] == [False] * 6 + [True] * 3


def test_unused_parameters_are_named_with_the_mend(two_ranks: list[dict[str, Any]]) -> None:
    for rank, facts in enumerate(two_ranks):
        messages = facts["unused is explained"]
        assert sorted(messages) == ["check", "forward", "get_loss"]
        for message in messages.values():
            assert f"On rank {rank}, " in message
            assert "in the last backward: unused.weight, unused.bias." in message
            assert "fit(..., ddp_model_args={'find_unused_parameters': True})" in message
            assert "Expected to have finished reduction in the prior iteration" in message


def test_changes_after_wrapping_are_errors(two_ranks: list[dict[str, Any]]) -> None:
    for facts in two_ranks:
        said = facts["changed"]
        assert "in the last backward: head.weight, head.bias." in said["frozen"]
        for name in ("wrapper", "part", "and back"):
            assert "parameters has changed since TTDistributedDataParallel wrapped it" in said[name]
        assert said["unchanged"] == said["evaluated"] == said["mixed precision"] == "no error"


def test_evaluation_exchanges_nothing(two_ranks: list[dict[str, Any]]) -> None:
    assert [facts["evaluation"] for facts in two_ranks] == [{"rows": 5, "metadata": 3}] * 2


def test_a_static_graph_averages_gradients_of_an_output_in_a_dataclass(two_ranks: list[dict[str, Any]]) -> None:
    assert max(facts["record"] for facts in two_ranks) < 1e-6


def test_plain_forward_is_ddps(two_ranks: list[dict[str, Any]]) -> None:
    assert [facts["forward"] for facts in two_ranks] == [0, 0]
