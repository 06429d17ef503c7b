"""TTFullyShardedDataParallel between real ranks, against torch's own fully_shard and against one process."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.ranks import run_ranks
from kit.reference import largest_difference
from kit.sharded_models import CPU, Normed, Tower, TwoLosses, Weighted, Yielding, words
from torch import Tensor, nn

from trainloop.errors import ConfigurationError
from trainloop.parallel import TTFullyShardedDataParallel
from trainloop.train_loop.run.fsdp_placement import sharded as sharded_while

CRITERION = nn.CrossEntropyLoss()


def whole(module: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, tensor in module.state_dict().items():
        found[name] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
    return found


def total(output: Any) -> Tensor:
    output = output[0] if isinstance(output, tuple) else output
    return output.total() if hasattr(output, "total") else output


def train(model: nn.Module, get_loss: Callable[..., Any], shares: list[int], steps: int = 4) -> dict[str, Any]:
    """Steps with accumulation, clipping and AdamW; the mean over the batches of all shares."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
    norms = []
    for step in range(steps):
        for i in range(2):
            for share in shares:
                loss = total(get_loss(words(100 * step + 10 * i + share), CRITERION, CPU))
                (loss / 2 / len(shares)).backward()
        norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.ndim], 0.1)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": whole(model), "norms": norms}


def by_hand(model: nn.Module, method: str) -> None:
    """As torch's documentation has it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.temperature})
    model.temperature.requires_grad_(False)
    register_fsdp_forward_method(model, method)


def given_back(values_to: str) -> dict[str, Any]:
    """Where the optimizer's state is after a run, and how many whole tensors there were beside the one just gathered.

    Where each rank gathers, the caller's parameters are on another device than the shards: one without memory, so that
    the values are lost.
    """
    from torch.distributed.tensor import DTensor

    with torch.device("meta" if values_to == "all" else "cpu"):
        model = Tower()
    del model.temperature
    model.temperature = 1.0
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    gather, found, beside = DTensor.full_tensor, [], []

    def watched(self: Any) -> Tensor:
        beside.append(sum(ref() is not None for ref in found))
        result = gather(self)
        found.append(weakref.ref(result))
        return result

    with sharded_while(model, [optimizer], {}, values_to=values_to) as wrapper:
        wrapper.get_loss(words(1), CRITERION, CPU).backward()
        optimizer.step()
        DTensor.full_tensor = watched
    DTensor.full_tensor = gather
    state = [own[key] for own in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return {"devices": {t.device.type for t in state}, "beside": max(beside, default=0), "states": len(state)}


def as_it_came(values_to: str, *, fails: bool) -> bool:
    """Whether scalars, buffers and all the rest have their first values, and memory, after a run given back nowhere."""
    model = Normed()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    before = {name: (t.clone(), t.data_ptr(), id(t)) for name, t in model.state_dict(keep_vars=True).items()}
    with suppress(ZeroDivisionError), sharded_while(model, [optimizer], {}, values_to=values_to) as wrapper:
        wrapper.get_loss(words(1), CRITERION, CPU).backward()
        optimizer.step()
        assert not torch.equal(model.norm.running_mean, before["norm.running_mean"][0])
        assert not torch.equal(model.temperature, before["temperature"][0])
        if fails:
            raise ZeroDivisionError
    after = model.state_dict(keep_vars=True)
    alike = [
        torch.equal(after[name], t) and (after[name].data_ptr(), id(after[name])) == (pointer, identity)
        for name, (t, pointer, identity) in before.items()
    ]
    return all(alike) and not optimizer.state


def cleared_late(how: str, rank: int, world_size: int) -> float:
    """How far weights are from those of one process if gradients are cleared between forward and backward.

    The optimizer was created before the model was sharded, so that its parameters stand for shards.
    """
    sharded, plain = Tower(), Tower()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (sharded, plain)]
    wrapper = TTFullyShardedDataParallel(sharded, reshard_after_forward=False)
    for step in range(3):
        loss = wrapper.get_loss(words(10 * step + rank), CRITERION, CPU)
        optimizers[0].zero_grad() if how == "optimizer" else wrapper.zero_grad()
        loss.backward()
        optimizers[1].zero_grad()
        for share in range(world_size):
            (plain.get_loss(words(10 * step + share), CRITERION, CPU) / world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
    return largest_difference(whole(sharded), whole(plain))


def made_on(device: str, make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device(device):
        return make()


def from_meta(rank: int) -> dict[str, float]:
    """How far values are from those of rank 0, or of one process, if some ranks' models have no memory at first."""
    found = {}
    first = Normed(seed=0)
    late = made_on("meta" if rank else "cpu", lambda: Normed(seed=rank))
    TTFullyShardedDataParallel(late)
    found["the first has values"] = largest_difference(whole(late), whole(first))
    drawn = made_on("meta", lambda: nn.Sequential(nn.Linear(4, 4), Scalars(0)))
    part = nn.Linear(4, 2)
    nn.init.constant_(part.weight, rank)
    drawn.append(part)
    TTFullyShardedDataParallel(drawn)
    own = whole(drawn)
    sent = {name: value.clone() for name, value in own.items()}
    for value in sent.values():
        dist.broadcast(value, 0)
    found["equal on all ranks"] = largest_difference(own, sent)
    found["scalars"] = sum(abs(own[f"1.all.{i}"].item() - i) for i in range(8))
    found["a part with values"] = own["2.weight"].abs().max().item()
    return found


class Scalars(nn.Module):
    """Eight scalars, each in another place in memory on each rank, so that sets of them have other orders."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        made = {i: nn.Parameter(torch.tensor(float(100 * rank + i))) for i in random.Random(rank).sample(range(8), 8)}
        self.all = nn.ParameterList(made[i] for i in range(8))
        self.all.reset_parameters = self.reset_parameters  # the list has the tensors

    def reset_parameters(self) -> None:
        for i, p in enumerate(self.all):
            nn.init.constant_(p, i)


def beside_torch() -> dict[str, Any]:
    """Ours, torch's own, and one process, in float64; what attributes do, and what is left when it is taken off."""
    torch.set_default_dtype(torch.float64)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    facts: dict[str, Any] = {}
    theirs = Tower()
    by_hand(theirs, "get_loss")
    reference = Tower()
    reference.temperature.requires_grad_(False)
    facts["theirs"] = train(theirs, theirs.get_loss, [rank])
    ours = Tower()
    ours.temperature.requires_grad_(False)
    wrapper = TTFullyShardedDataParallel(ours)
    facts["ours"] = train(ours, wrapper.get_loss, [rank])
    facts["single"] = train(reference, reference.get_loss, list(range(world_size)))
    facts["units"] = [type(part).__name__ for part in ours.modules() if type(part).__name__.startswith("FSDP")]

    for cls in (Tower, Weighted, TwoLosses, Normed):  # scalar parameters train as well
        sharded, plain = cls(), cls()
        wrapper = TTFullyShardedDataParallel(sharded, reshard_after_forward=cls is not Weighted)
        a = train(sharded, wrapper.get_loss, [rank])
        if cls is Normed:
            wrapper.share_buffers()
            a["weights"] = whole(sharded)
        b = train(plain, plain.get_loss, list(range(world_size)))
        if cls is Normed:  # running statistics are rank 0's
            a["weights"] = {name: t for name, t in a["weights"].items() if "running" not in name and "num_" not in name}
            b["weights"] = {name: b["weights"][name] for name in a["weights"]}
        facts[cls.__name__] = largest_difference(a["weights"], b["weights"])

    own, first = Normed(seed=rank), Normed(seed=0)
    own.norm.running_mean += rank
    made, gone = own.words.weight, weakref.ref(own.blocks[0].up.weight)
    optimizer = torch.optim.SGD([made], 0.1)
    TTFullyShardedDataParallel(own)
    facts["rank 0's weights"] = largest_difference(whole(own), whole(first))
    facts["memory is free"] = gone() is None
    facts["from meta"] = from_meta(rank)
    facts["rank 0's scalars"] = [p.item() for p in TTFullyShardedDataParallel(Scalars(rank)).module.parameters()]
    own.words.weight.grad = torch.ones_like(own.words.weight)
    optimizer.step()  # created before
    stepped = whole(own)["words.weight"]
    facts["a former parameter"] = [made.grad.sum().item() == made.numel(), made.full_tensor().equal(stepped)]
    facts["a former parameter"].append(float((stepped - whole(first)["words.weight"] + 0.1).abs().max()))

    facts["cleared before backward"] = [cleared_late(how, rank, world_size) for how in ("optimizer", "wrapper")]

    sharded, plain = Yielding(), Yielding()
    wrapper = TTFullyShardedDataParallel(sharded)
    for model, get_loss, shares in ((sharded, wrapper.get_loss, [rank]), (plain, plain.get_loss, range(world_size))):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            for losses in zip(*(get_loss(words(10 * step + share), CRITERION, CPU) for share in shares), strict=True):
                (sum(loss for _, loss in losses) / len(losses)).backward()
                optimizer.step()
                optimizer.zero_grad()
    facts["yielded"] = largest_difference(whole(sharded), whole(plain))

    wrapper.calls = 7
    wrapper.new_attribute = "the model's"
    with torch.no_grad():
        predicted, _, meta = wrapper.get_predictions(words(1), CPU)
        expected = plain.get_predictions(words(1), CPU)[0]
    facts["attributes"] = (sharded.calls, sharded.new_attribute, wrapper.words is sharded.words)
    facts["predictions"] = (float((predicted - expected).abs().max()), meta["row"][0][:3])
    facts["resharded"] = all(hasattr(p, "device_mesh") for p in sharded.parameters() if p.ndim)
    held = sum(p.to_local().numel() for p in sharded.parameters() if p.ndim)
    facts["held"] = held / sum(p.numel() for p in sharded.parameters())

    facts["given back"] = {to: given_back(to) for to in ("all", "host")}
    facts["as they came"] = [as_it_came("none", fails=False), as_it_came("all", fails=True)]

    kept = copy.deepcopy(plain)
    before = {part: set(vars(part)) for part in kept.modules()}
    shared = TTFullyShardedDataParallel(kept)
    back = dict(plain.named_parameters())
    shared.get_loss  # noqa: B018
    restored = shared.take_off(back)
    facts["taken off"] = {
        "the module": restored is kept,
        "classes": [type(part) for part in kept.modules()] == [type(part) for part in plain.modules()],
        "parameters": all(p is back[name] for name, p in kept.named_parameters()),
        "tied": kept.head.weight is kept.words.weight,
        "left over": [sorted(set(vars(part)) - names) for part, names in before.items() if set(vars(part)) - names],
        "hooks": sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in kept.modules()),
        "again": bool(TTFullyShardedDataParallel(kept).get_predictions(words(1), CPU)[0].shape),
    }
    return facts


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_sharded_loop_equals_torch_and_one_process(world_size: int, tmp_path: Path) -> None:
    everyone = run_ranks(beside_torch, world_size, folder=tmp_path)
    for facts in everyone:
        assert facts["rank 0's weights"] == 0
        assert facts["memory is free"]
        assert not any(facts["from meta"].values()), facts["from meta"]
        assert facts["rank 0's scalars"] == [*range(8)]
        assert facts["a former parameter"] == [True, True, pytest.approx(0, abs=1e-6)]
        assert facts["cleared before backward"] == pytest.approx([0, 0], abs=1e-12)
        assert facts["as they came"] == [True, True]
        for to, back in facts["given back"].items():
            assert back["beside"] == 0
            assert back["states"] > 20
            assert back["devices"] == ({"meta"} if to == "all" else {"cpu"})  # from the file they go to the caller's
        assert largest_difference(facts["ours"]["weights"], facts["theirs"]["weights"]) == 0
        assert facts["ours"]["norms"] == facts["theirs"]["norms"]
        assert largest_difference(facts["ours"]["weights"], facts["single"]["weights"]) < 1e-12
        assert facts["units"] == ["FSDPBlock"] * 3
        for name in ("Tower", "Weighted", "TwoLosses", "yielded"):
            assert facts[name] < 1e-12, name
        assert facts["attributes"] == (7, "the model's", True)
        assert facts["predictions"] == (pytest.approx(0, abs=1e-12), "row")
        assert facts["resharded"]
        off = facts["taken off"]
        assert off.pop("left over") == []
        assert off.pop("hooks") == 0
        assert all(off.values()), off
    assert everyone[0]["Normed"] < 1e-12
    assert sum(facts["held"] for facts in everyone) == pytest.approx(1, abs=0.05)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a module": lambda tower: setattr(tower, "norm", nn.LayerNorm(5)),
    "a module of a block": lambda tower: setattr(tower.blocks[0], "norm", nn.LayerNorm(5)),
    "a parameter": lambda tower: setattr(tower.blocks[2].up, "bias", nn.Parameter(torch.zeros(8))),
    "a scalar": lambda tower: setattr(tower, "temperature", nn.Parameter(torch.ones(()))),
    "frozen": lambda tower: setattr(tower, "extra", nn.Parameter(torch.ones(2), requires_grad=False)),
    "of another model": lambda tower: Tower(),
}


def changed_after_wrapping() -> dict[str, list[str]]:
    """What the next two forwards say after a change; what was added frozen is unfrozen between them.

    The forward before the change keeps the root unit gathered. The next one, an evaluation, would put back parameters.
    """
    facts = {}
    for name, change in CHANGES.items():
        tower = Tower()
        wrapper = TTFullyShardedDataParallel(tower, shard=[type(tower.blocks[0])])
        wrapper.get_loss(words(1), CRITERION, CPU)
        change(tower)
        said = []
        for trains in (False, True):
            try:
                with torch.set_grad_enabled(trains):
                    wrapper.get_loss(words(1), CRITERION, CPU)
                said.append("runs")
            except ConfigurationError as error:
                said.append(str(error).partition(" wrapped it")[0])
            if hasattr(tower, "extra"):
                tower.extra.requires_grad_(True)
        facts[name] = said
    return facts


def test_a_parameter_that_was_added_after_wrapping_is_refused(tmp_path: Path) -> None:
    """FSDP would train it with each rank's own gradients, or put its own parameter back."""
    added = "{}: added to the model after TTFullyShardedDataParallel"
    expected = {
        "a module": "norm.weight, norm.bias",
        "a module of a block": "blocks.0.norm.weight, blocks.0.norm.bias",
        "a parameter": "blocks.2.up.bias",
        "a scalar": "temperature",
    }
    for facts in run_ranks(changed_after_wrapping, 2, folder=tmp_path):
        assert facts == {
            **{name: [added.format(names)] * 2 for name, names in expected.items()},
            "frozen": ["runs", added.format("extra")],
            "of another model": ["runs", "runs"],
        }


def train_with_other_forwards(wrap: Callable[[nn.Module], Any], case: str, shares: list[int]) -> dict[str, Tensor]:
    """Steps with forwards that no backward follows: of a frozen teacher, of predictions, of a loss that is skipped."""
    tower, teacher = Tower(), Tower(seed=1)
    model, other = wrap(tower), wrap(teacher)
    other.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for step in range(4):
        for share in shares:
            batch = words(10 * step + share)
            with torch.inference_mode(case == "inference"):
                target = (model if case == "inference" else other)(batch[0])
            output = model(batch[0])
            target = target.detach() if case == "teacher" else torch.zeros_like(output)
            loss = nn.functional.mse_loss(output, target)
            (loss / len(shares)).backward()
            if case == "predictions":
                model(batch[0])  # with a graph, and without a backward
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for average, p in zip(other.parameters(), model.parameters(), strict=True):
                average.lerp_(p.detach(), 0.2) if case == "teacher" else None
    return {**whole(tower), **{f"teacher.{name}": value for name, value in whole(teacher).items()}}


def forwards_without_backward() -> dict[str, float]:
    def one_process(module: nn.Module) -> nn.Module:
        return module

    facts = {}
    for case in ("teacher", "predictions", "inference"):
        expected = train_with_other_forwards(one_process, case, [0, 1])
        for name, arguments in {
            "default": {},
            "kept": {"reshard_after_forward": False},
            "one unit": {"shard": []},
        }.items():

            def sharded(module: nn.Module, arguments: Any = arguments) -> Any:
                return TTFullyShardedDataParallel(module, **arguments)

            found = train_with_other_forwards(sharded, case, [dist.get_rank()])
            facts[f"{case}, {name}"] = largest_difference(found, expected)
    return facts


@pytest.mark.long  # three kinds of wrappers, three programs
def test_a_forward_without_a_backward_does_not_keep_old_parameters(tmp_path: Path) -> None:
    """The root unit stays gathered after a forward, as in torch, where the next one would miss the step between."""
    for facts in run_ranks(forwards_without_backward, 2, folder=tmp_path):
        assert max(facts.values()) < 1e-6, facts
