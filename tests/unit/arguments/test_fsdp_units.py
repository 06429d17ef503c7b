"""Modules that are sharded as one unit, and arguments of the wrapper that can't work; no process is started."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter

import numpy as np
import pytest
import torch
from kit.sharded_models import Block, Tower, needs_fsdp_on_cpu
from torch import nn

from trainloop import TrainLoop
from trainloop.errors import ConfigurationError
from trainloop.parallel import TTFullyShardedDataParallel
from trainloop.parallel.sharded.shards import free
from trainloop.parallel.sharded.undoing import can_undo
from trainloop.parallel.sharded.units import units_of
from trainloop.resources.quota import format_bytes
from trainloop.tools.preflight import preflight_shards

pytestmark = needs_fsdp_on_cpu


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)) for _ in range(2)])
        self.lists = nn.ModuleList([nn.ModuleList([Block(2), Block(2)]), nn.ModuleList([Block(2)])])
        same = Block(2)
        self.repeated = nn.ModuleList([same, same])
        self.alone = nn.ModuleList([nn.Linear(2, 2), nn.Bilinear(2, 2, 2), nn.ReLU(), nn.ReLU()])


def names(module: nn.Module, shard: object = None) -> list[str]:
    return [name for name, _ in units_of(module, shard)]


def test_memory_that_torch_cannot_resize_stays_when_a_shard_is_freed() -> None:
    of_others, own = torch.from_numpy(np.ones(3)), torch.ones(3)
    free(of_others)  # pinned memory, of a shard that is offloaded, is such, too
    free(own)
    assert of_others.sum() == 3
    assert own.untyped_storage().nbytes() == 0


def test_repeated_blocks_are_units_and_nothing_in_them() -> None:
    assert names(Nested()) == ["lists.0.0", "lists.0.1", "encoder.0", "encoder.1"]
    assert names(Tower()) == ["blocks.0", "blocks.1", "blocks.2"]
    assert names(nn.Linear(2, 2)) == []


def test_units_by_class_and_by_predicate() -> None:
    model = Nested()
    # Inner ones first: fully_shard goes from the leaves to the root.
    assert names(model, Block) == ["lists.0.0", "lists.0.1", "lists.1.0", "repeated.0"]
    assert names(model, [nn.Sequential, nn.Bilinear]) == ["encoder.0", "encoder.1", "alone.1", "encoder"]
    assert names(model, lambda module: isinstance(module, nn.Bilinear)) == ["alone.1"]
    assert names(model, lambda name, module: name == "encoder") == ["encoder"]


def test_a_block_that_shares_a_parameter_goes_to_the_unit_that_holds_both() -> None:
    model = Tower()
    model.blocks[2].norm.weight = model.blocks[1].norm.weight
    assert names(model) == ["blocks.0"]
    outer = nn.Module()
    outer.towers = nn.ModuleList([Tower(), Tower()])
    assert names(outer) == ["towers.0", "towers.1"]  # tied inside of each


def test_a_block_that_shares_a_submodule_goes_to_the_unit_that_holds_both() -> None:
    model = Tower()
    model.blocks[2].norm = model.blocks[1].norm
    assert names(model) == ["blocks.0"]
    activation = nn.ReLU()
    for block in model.blocks:
        block.activation = activation
    assert names(model) == ["blocks.0"]


def test_what_matches_nothing_or_has_no_forward_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"shard=Conv2d matches no module of Tower. The classes of its submodules are Embed"
    ):
        units_of(Tower(), nn.Conv2d)
    with pytest.raises(ConfigurationError, match="matches lists, a ModuleList, which has no forward"):
        units_of(Nested(), [nn.ModuleList])
    with pytest.raises(ConfigurationError, match=r"shard='Block': must be a module class"):
        units_of(Tower(), "Block")


def test_no_process_group_and_lazy_modules_are_errors() -> None:
    with pytest.raises(ConfigurationError, match=r"no process group.*gpu_mode='fsdp'"):
        TTFullyShardedDataParallel(Tower())
    with pytest.raises(ConfigurationError, match="lazy"):
        TTFullyShardedDataParallel(nn.Sequential(nn.LazyLinear(2), torch.nn.ReLU()))


def test_preflight_lists_units_and_bytes_of_a_rank() -> None:
    def shards_of(model: nn.Module, arguments: dict[str, object] | None = None) -> str:
        loop = TrainLoop(model, None, gpu_mode="fsdp", accelerator="cpu", devices=2)
        return preflight_shards(loop, arguments or {})

    model = Tower()
    held = sum(p.numel() * 4 for p in model.parameters()) // 2
    assert f"blocks.0, blocks.1, blocks.2, the root. Each of 2 ranks holds {held} B of parameters" in shards_of(model)
    linears = shards_of(model, {"shard": [nn.Linear], "replicas": 2})
    assert "blocks.0.up, blocks.0.down" in linears
    assert f"Each of 2 ranks holds {format_bytes(2 * held)} of parameters" in linears
    del model.blocks[1:]
    with pytest.raises(Exception, match=r"no repeated blocks.*Pass the class of its blocks"):
        shards_of(model)


@pytest.mark.parametrize(
    ("module", "holder", "name"),
    [
        ("torch.distributed._composable.contract", "", "STATE_KEY"),
        ("torch.distributed.tensor", "DTensor._op_dispatcher", "_custom_op_handlers"),
    ],
)
def test_a_torch_that_has_other_names_is_said_before_anything_is_sharded(
    monkeypatch: pytest.MonkeyPatch, module: str, holder: str, name: str
) -> None:
    found = import_module(module)
    can_undo.cache_clear()
    try:
        can_undo()
        can_undo.cache_clear()
        monkeypatch.delattr(attrgetter(holder)(found) if holder else found, name)
        path = f"{holder}.{name}".lstrip(".")
        what = rf"{module.rpartition('.')[2]} has no {path}.*torch 2\.6 to 2\.15.*gpu_mode='ddp'"
        with pytest.raises(ConfigurationError, match=what):
            can_undo()
    finally:
        can_undo.cache_clear()
