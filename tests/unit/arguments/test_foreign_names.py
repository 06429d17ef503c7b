"""Keywords of other libraries, given to what is not the loop or a callback: an error says what they are called here."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.small_loop import make_loop
from torch import nn

import trainloop
from trainloop import TTDataParallel, TTDistributedDataParallel, TTFullyShardedDataParallel
from trainloop.errors import ConfigurationError
from trainloop.resources import ResourceQuota, plan
from trainloop.tuning import tune


def never(*_: Any) -> None:
    raise AssertionError("called with an argument that does not exist")


@pytest.mark.parametrize(
    "function, arguments, words",
    [
        (tune, {"num_rows": 5}, "tune() got an unexpected keyword argument 'num_rows'. Did you mean targets=, a"),
        (tune, {"n_trials": 5}, "Did you mean num_trials=?"),
        (tune, {"direction": "maximize"}, "Did you mean mode='min' or 'max'?"),
        (tune, {"num_epochs": 5}, "Did you mean fit_args={...}, which fit gets?"),
        (tune, {"num_trails": 5}, "Did you mean num_trials=?"),
        (tune, {"pruner": None}, "'pruner': a trial trains to its end; fit_args="),
        (plan, {"per_trial": ResourceQuota()}, "plan() got an unexpected keyword argument 'per_trial'. Did you mean "
         "per_bag=, or per_model= without bagging?"),
        (ResourceQuota, {"gpus": 1}, "ResourceQuota() got an unexpected keyword argument 'gpus'. Did you mean num_"),
        (ResourceQuota, {"memory_limit": 16}, "Did you mean memory='16GB'?"),
        (TTDataParallel, {"default_model_methods": []}, "'default_model_methods': every attribute and method of the"),
        (TTDataParallel, {"gpu_ids": [0]}, "Did you mean device_ids=, a list?"),
        (TTDistributedDataParallel, {"find_unused": True}, "Did you mean find_unused_parameters=?"),
        (TTDistributedDataParallel, {"local_rank": 0}, "Did you mean device_ids=, a list?"),
        (TTFullyShardedDataParallel, {"auto_wrap_policy": never}, "Did you mean shard=[Block], the classes of blocks?"),
        (TTFullyShardedDataParallel, {"mixed_precision": None}, "Did you mean mp_policy="),
        (TTFullyShardedDataParallel, {"frobnicate": 1}, "'frobnicate'. Its arguments: module, shard, mesh, replicas, "),
    ],
)  # fmt: skip
def test_names_of_other_libraries(function: Callable[..., Any], arguments: dict[str, Any], words: str) -> None:
    needed: tuple[Any, ...] = {tune: (never, {"lr": [0.1]}), plan: (ResourceQuota(4),), ResourceQuota: ()}.get(
        function, (nn.Linear(2, 2),)
    )
    with pytest.raises(ConfigurationError) as error:
        function(*needed, **arguments)
    assert isinstance(error.value, TypeError)
    assert words in str(error.value)


def test_arguments_of_wrappers_in_fit() -> None:
    for arguments, words in [
        (
            {"ddp_model_args": {"find_unused": True}},
            "has no argument 'find_unused'. Did you mean find_unused_parameters=?",
        ),
        ({"fsdp_model_args": {"cpu_offload": True}}, "Did you mean offload_policy="),
        (
            {"dp_model_args": {"xyz": True}},
            "TTDataParallel has no argument 'xyz'. Its arguments: device_ids, output_device, dim, devices.",
        ),
    ]:
        with pytest.raises(ConfigurationError) as error:
            make_loop().fit(1, **arguments)
        assert words in str(error.value)


@pytest.mark.parametrize(
    "name, home", [("EarlyStopping", "callbacks"), ("ModelCheckpoint", "callbacks"), ("ResourceQuota", "resources")]
)
def test_a_class_of_another_module_is_found(name: str, home: str) -> None:
    said = f"Use: from trainloop.{home} import {name}"
    with pytest.raises(ImportError, match=said):
        exec(f"from trainloop import {name}", {})
    with pytest.raises(AttributeError, match=said):
        getattr(trainloop, name)
    assert not hasattr(trainloop, name)
    with pytest.raises(ImportError, match="cannot import name 'Unknown'"):
        exec("from trainloop import Unknown", {})


def test_loaders_do_not_belong_to_fit() -> None:
    loop = make_loop()
    with pytest.raises(ConfigurationError, match="loaders belong to the loop, not to fit"):
        loop.fit(loop.train_loader, loop.validation_loader)  # type: ignore[arg-type]


def test_a_list_of_batches_has_a_batch_size() -> None:
    loop = make_loop()
    loop.train_loader = [(torch.zeros(6, 8), torch.zeros(6, dtype=torch.long))] * 2
    assert "effective batch 6" in repr(loop)


def test_what_is_checked_is_still_what_it_was() -> None:
    """Signature, name, the error for a missing argument; a quota is copied, sent and compared."""
    assert list(inspect.signature(plan).parameters)[:2] == ["total", "num_trials"]
    assert tune.__name__ == "tune"
    assert list(inspect.signature(ResourceQuota).parameters) == ["num_cpus", "num_gpus", "memory"]
    quota = ResourceQuota(num_cpus=2, memory="1GB")
    assert copy.copy(quota) == pickle.loads(pickle.dumps(quota)) == quota
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'total'"):
        plan(num_trials=2)  # type: ignore[call-arg]
    assert not dist.is_initialized()
    with pytest.raises(ConfigurationError, match="there is no process group"):
        TTDistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True)
