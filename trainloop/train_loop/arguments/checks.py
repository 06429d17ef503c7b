"""Check the arguments of ``TrainLoop`` and ``fit``; all other code relies on these checks."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainloop._support.keywords import hint, keywords_of
from trainloop.callbacks.base import AbstractCallback
from trainloop.data.batch.batches import samples_of_batch
from trainloop.data.loader.libraries import loads
from trainloop.data.order.orders import length_of
from trainloop.devices import whole_number
from trainloop.errors import ConfigurationError
from trainloop.model import TTModel, check_names, check_signatures, yields_losses
from trainloop.optim import MultiOptimizer
from trainloop.optim.optimizers import needs_closure, optimizers_of, parameters_of
from trainloop.optim.parameters import named_trained_parameters, own_parameters
from trainloop.parallel.sharded.shards import resolved
from trainloop.resources.quota import ResourceQuota
from trainloop.train_loop.arguments.options import AmpOptions, RestartOptions

# -- the loop's arguments ----------------------------------------------------------------------------------------------


def check_model(model: Any) -> Any:
    """Return the model; raise an error if it is wrapped or incomplete."""
    if isinstance(model, type):
        raise ConfigurationError(f"model={model.__name__}: this is a class. Pass an instance, {model.__name__}(...).")
    # Gradients of a wrapped model would be exchanged twice, and its checkpoint keys would have a prefix.
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ConfigurationError(
            f"model is already a {type(model).__name__}. Pass the model itself; gpu_mode='dp', 'ddp' or 'fsdp' "
            "wraps it."
        )
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model={short(model)}: must be a TTModel. {_ORDER}")
    missing = [name for name in ("get_loss", "get_predictions") if not callable(getattr(model, name, None))]
    if missing:
        raise ConfigurationError(
            f"model is a {type(model).__name__} without {' and '.join(missing)}. Subclass TTModel and write "
            f"{'them' if len(missing) > 1 else 'it'}, or pass ModelWrap(model, feed)."
        )
    if not isinstance(model, TTModel) and not callable(getattr(model, "get_loss_eval", None)):
        raise ConfigurationError(f"model is a {type(model).__name__} without get_loss_eval. Subclass TTModel.")
    check_signatures(model)
    check_names(model)
    reduction = getattr(model, "loss_reduction", None)
    if reduction not in (None, "mean", "sum"):
        raise ConfigurationError(
            f"{type(model).__name__}.loss_reduction={short(reduction)}: must be 'mean', 'sum' or None. It says how "
            "get_loss reduces the losses of a batch's samples. With None, the criterion decides."
        )
    return model


def check_loader(loader: Any, name: str, *, optional: bool = True) -> Any:
    """Return the loader; raise an error if it can be iterated only once."""
    if loader is None and optional:
        return None
    if (isinstance(loader, Dataset) and not loads(loader)) or torch.is_tensor(loader):
        raise ConfigurationError(
            f"{name} is a {type(loader).__name__}, which has no batches. Pass DataLoader(dataset, batch_size=32)."
        )
    # Each row of an array or table, or the name of each column, would count as a batch. A set has no order.
    if isinstance(loader, (set, frozenset)) or hasattr(loader, "__array__"):
        raise ConfigurationError(
            f"{name} is a {type(loader).__name__}, which has no batches. Pass DataLoader(dataset, batch_size=32), for "
            "example with the dataset TensorDataset(torch.as_tensor(x), torch.as_tensor(y))."
        )
    # The first epoch would exhaust an iterator, and the second epoch would be empty.
    if isinstance(loader, Iterator) and not _restarts(loader):
        raise ConfigurationError(
            f"{name} is a {type(loader).__name__}, an iterator, which can't start again. Pass a DataLoader, or an "
            "object whose __iter__ starts from the beginning each time; it may be endless, for fit(num_iterations=...)."
        )
    if loader is None and name != "data_loader":
        raise ConfigurationError(f"{name}=None: the loop has no {name}. Pass one to TrainLoop({name}=...).")
    several = list(loader.values()) if isinstance(loader, dict) else loader if isinstance(loader, (list, tuple)) else ()
    if any(isinstance(part, DataLoader) for part in several):
        remedy = (
            "To train on several data sets, join them (torch.utils.data.ConcatDataset), or pass an object whose "
            "__iter__ yields batches of all loaders."
            if name == "train_loader"
            else "To evaluate on several sets, call tl.evaluate(loader) for each of them in a callback's on_epoch_end."
        )
        raise ConfigurationError(f"{name} is a {type(loader).__name__} of loaders. Pass one DataLoader. {remedy}")
    if isinstance(loader, (str, bytes, dict, type, nn.Module, MultiOptimizer)) or not isinstance(loader, Iterable):
        kinds = "a torch DataLoader or None" if optional else "a torch DataLoader"
        order = "" if name == "data_loader" else f" {_ORDER}"
        raise ConfigurationError(f"{name}={short(loader)}: must be {kinds}.{order}")
    for batch in loader if isinstance(loader, (list, tuple)) else ():
        if not (isinstance(batch, (list, tuple, Mapping, torch.Tensor)) or is_dataclass(batch) or hasattr(batch, "to")):
            raise ConfigurationError(
                f"{name} is a {type(loader).__name__} with {short(batch)}, which is no batch. Pass a torch DataLoader. "
                "Batches in a list are tensors, tuples, lists, dicts, dataclasses or objects with a method to(device)."
            )
    return loader


def _restarts(iterator: Iterator[Any]) -> bool:
    """Return True if the ``__iter__`` of an iterator's class does more than return the iterator."""
    method = type(iterator).__iter__
    return isinstance(method, FunctionType) and method.__code__.co_code != _RETURNS_SELF


_RETURNS_SELF = (lambda self: self).__code__.co_code

_ORDER = (
    "The order is TrainLoop(model, train_loader, validation_loader, test_loader): the fourth argument is test_loader. "
    "Pass optimizer=... and criterion=... by name."
)


def check_criterion(criterion: Any) -> Any:
    """Return the criterion; raise an error if it is a class.

    Any other object is accepted: only ``get_loss`` uses it.
    """
    if isinstance(criterion, type) and issubclass(criterion, nn.Module):
        raise ConfigurationError(f"criterion={criterion.__name__}: this is a class. Pass {criterion.__name__}().")
    return criterion


def check_optimizer(optimizer: Any, model: nn.Module, criterion: Any = None) -> Any:
    """Return the optimizer; raise an error if it steps no parameter of the model.

    One of several optimizers may step the criterion only, such as the proxies of classes in metric learning.
    """
    if optimizer is None:
        return None
    if isinstance(optimizer, type):
        raise ConfigurationError(
            f"optimizer={optimizer.__name__}: this is a class. Pass {optimizer.__name__}(model.parameters(), lr=...)."
        )
    if isinstance(optimizer, (list, tuple)):
        raise ConfigurationError(f"optimizer is a {type(optimizer).__name__}. Pass MultiOptimizer([...]) instead.")
    if not isinstance(optimizer, (torch.optim.Optimizer, MultiOptimizer)):
        raise ConfigurationError(f"optimizer={short(optimizer)}: must be a torch optimizer or a MultiOptimizer.")
    # The most common mistake: a new model is created (a fold, a notebook cell run twice), but no new optimizer.
    own = {id(parameter) for parameter in own_parameters(model)}
    singles = optimizers_of(optimizer)
    if len(singles) > 1:
        own |= {id(parameter) for _, parameter in named_trained_parameters(model, criterion)}
    for i, single in enumerate(singles):
        if not any(id(resolved(parameter)) in own for parameter in parameters_of(single)):
            which = f"optimizer {i} of the MultiOptimizer" if isinstance(optimizer, MultiOptimizer) else "optimizer"
            raise ConfigurationError(
                f"{which}, a {type(single).__name__}, has none of the model's parameters. Create it from "
                "model.parameters() of the model object that you pass."
            )
    return optimizer


def check_amp(use_amp: Any) -> AmpOptions:
    """Return ``use_amp`` as options."""
    if use_amp is False:
        return AmpOptions()
    if use_amp is True:
        return AmpOptions(torch.bfloat16, chosen=False)
    if use_amp == "bf16":
        return AmpOptions(torch.bfloat16)
    if use_amp == "fp16":
        return AmpOptions(torch.float16)
    if isinstance(use_amp, dict):
        check_positive(use_amp.get("init_scale", 1), "use_amp: init_scale", optional=False)
        check_count(use_amp.get("growth_interval", 1), "use_amp: growth_interval", 1)
        try:
            torch.amp.GradScaler("cpu", enabled=True, **use_amp)
        except (AssertionError, TypeError) as error:  # raised by torch's own checks
            raise ConfigurationError(
                f"use_amp={short(use_amp)}: GradScaler can't use these arguments: {error}"
            ) from error
        return AmpOptions(torch.float16, dict(use_amp))
    raise ConfigurationError(
        f"use_amp={short(use_amp)}: must be False, True, 'bf16', 'fp16' or a dict of GradScaler arguments."
    )


def check_auto_eval(end_auto_eval: Any) -> int:
    """Return the number of epochs between evaluations; 0 for no evaluation."""
    if isinstance(end_auto_eval, bool):
        return int(end_auto_eval)
    epochs = whole_number(end_auto_eval)
    if epochs is not None and epochs >= 1:
        return epochs
    raise ConfigurationError(
        f"end_auto_eval={short(end_auto_eval)}: must be True, False, or the number of epochs between evaluations."
    )


def check_positive(value: Any, name: str, *, optional: bool = True) -> Any:
    """Return the value; raise an error unless it is a finite number above 0."""
    if value is None and optional:
        return None
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not value > 0 or not math.isfinite(value):
        raise ConfigurationError(f"{name}={short(value)}: must be a number above 0{' or None' if optional else ''}.")
    return float(value)


def check_seed(seed: Any) -> int | None:
    """Return the seed; raise an error unless it is an int from 0 to 2**63 - 1, or None."""
    if seed is None:
        return None
    number = whole_number(seed)
    if number is None or not 0 <= number < 2**63:
        raise ConfigurationError(f"seed={short(seed)}: must be an int from 0 to 2**63 - 1, or None.")
    return number


def check_bool(value: Any, name: str) -> bool:
    """Return the value; raise an error unless it is True or False, rather than just truthy."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={short(value)}: must be True or False.")
    return value


def check_compile(value: Any) -> dict[str, Any] | None:
    """Return the arguments of ``torch.compile``, or None if the model is not compiled."""
    if value == "step":
        return None
    if isinstance(value, bool):
        return {} if value else None
    if isinstance(value, dict):
        if value:
            _check_compile_args(value)
        return dict(value)
    raise ConfigurationError(
        f"compile={short(value)}: must be True, False, 'step' or a dict of torch.compile arguments."
    )


def _check_compile_args(given: dict[str, Any]) -> None:
    """Raise an error for arguments that ``torch.compile`` rejects. It checks them here; a first call compiles."""
    try:
        torch.compile(len, **given)
    except Exception as error:  # each argument has errors of its own
        why = str(error).partition("\n")[0][:200]
        raise ConfigurationError(f"compile={short(given)}: torch.compile can't use these arguments: {why}") from error


def check_start_method(value: Any) -> str:
    """Return the start method; raise an error unless it is one of the known names."""
    if not isinstance(value, str) or value not in ("auto", "forkserver", "spawn"):
        raise ConfigurationError(f"start_method={short(value)}: must be 'auto', 'forkserver' or 'spawn'.")
    return value


def check_callable(value: Any, name: str) -> Any:
    """Return the value; raise an error unless it is callable."""
    if not callable(value):
        raise ConfigurationError(f"{name}={short(value)}: must be a function.")
    return value


def check_callbacks(callbacks: Any, name: str = "callbacks") -> list[AbstractCallback]:
    """Return the callbacks as a list."""
    if callbacks is None:
        return []
    if not isinstance(callbacks, (list, tuple)):
        raise ConfigurationError(f"{name}={short(callbacks)}: must be a list of callbacks or None.")
    for i, callback in enumerate(callbacks):
        if not isinstance(callback, AbstractCallback):
            raise ConfigurationError(
                f"{name}[{i}]={short(callback)}: must be an instance of AbstractCallback. For a scheduler of torch use "
                "trainloop.callbacks.LRScheduler(scheduler)."
            )
        if any(callback is other for other in callbacks[:i]):
            raise ConfigurationError(f"{name}[{i}]={short(callback)} is in the list twice. Remove one.")
        _check_own_attributes(callback)
    return list(callbacks)


def _check_own_attributes(callback: AbstractCallback) -> None:
    """Raise an error if a callback has given an attribute that the loop reads another meaning."""
    names = callback.shared
    meant = {
        "shared": (isinstance(names, (tuple, list)) and all(isinstance(one, str) for one in names), "a tuple of names"),
        "state_key": (isinstance(callback.state_key, str), "a text"),
    }
    for name, (is_right, kind) in meant.items():
        if not is_right:
            raise ConfigurationError(
                f"{type(callback).__name__}.{name}={short(getattr(callback, name))}: the loop reads this attribute of "
                f"AbstractCallback, as {kind}. Use another name for yours."
            )


def check_quota(resources: Any) -> Any:
    """Return the quota; raise an error unless it is a ResourceQuota or None."""
    if resources is None:
        return None
    if not isinstance(resources, ResourceQuota):
        raise ConfigurationError(
            f"resources={short(resources)}: must be a trainloop.resources.ResourceQuota(num_cpus=...) or None."
        )
    return resources


def check_devices(
    gpu_mode: Any, accelerator: Any, devices: Any, cuda_device_idx: Any, auto_select_gpus: bool
) -> tuple[Any, Any]:
    """Return accelerator and devices; ``cuda_device_idx`` is translated into these two."""
    if cuda_device_idx is not None:
        cuda_device_idx = check_count(cuda_device_idx, "cuda_device_idx", 0)
        if gpu_mode != "single" or devices != "auto":
            raise ConfigurationError(
                f"cuda_device_idx={cuda_device_idx} works only with gpu_mode='single' and without devices. "
                f"Use devices=[{cuda_device_idx}] instead."
            )
        return "cuda", [cuda_device_idx]
    if auto_select_gpus and devices == 0:
        raise ConfigurationError("auto_select_gpus=True with devices=0 selects no GPU. Use devices=1 or more.")
    number = whole_number(devices)
    return accelerator, devices if number is None else number


# -- fit's arguments ---------------------------------------------------------------------------------------------------


def check_count(value: Any, name: str, least: int) -> int:
    """Return the value; raise an error unless it is an int of at least ``least``."""
    number = whole_number(value)
    if number is None or number < least:
        raise ConfigurationError(f"{name}={short(value)}: must be an int of {least} or more.")
    return number


def check_restarts(max_restarts: Any, restart_every_steps: Any, num_nodes: int) -> RestartOptions | None:
    """Return the checked restart options; ``None`` if the first failure ends the run."""
    most = whole_number(max_restarts)
    if most is None or most < -1:
        raise ConfigurationError(
            f"max_restarts={short(max_restarts)}: must be an int of 0 or more, or -1 for no limit."
        )
    if restart_every_steps is not None:
        restart_every_steps = check_count(restart_every_steps, "restart_every_steps", 1)
    if not most:
        return None
    if num_nodes > 1:
        raise ConfigurationError(
            f"max_restarts={max_restarts} with num_nodes={num_nodes}: fit restarts the ranks of one host only. Over "
            "several hosts, use torchrun --max-restarts, Slurm or Kubernetes, with fit(resume_from='last') and a "
            "ModelCheckpoint on storage that all hosts share."
        )
    return RestartOptions(most, restart_every_steps)


def check_length(num_epochs: Any, num_iterations: Any) -> tuple[int, int]:
    """Return both numbers as ints; raise an error unless exactly one is positive.

    It sets the length of the training.
    """
    for name, value in (("num_epochs", num_epochs), ("num_iterations", num_iterations)):
        if (number := whole_number(value)) is None or number < 0:
            if isinstance(value, DataLoader) or (isinstance(value, Iterable) and hasattr(value, "dataset")):
                raise ConfigurationError(
                    f"{name}={short(value)}: loaders belong to the loop, not to fit: TrainLoop(model, train_loader, "
                    "validation_loader, ...).fit(num_epochs=10)."
                )
            raise ConfigurationError(
                f"{name}={short(value)}: must be an int of 0 or more. One of num_epochs and num_iterations must be "
                "positive, and the other 0. Pass callbacks by keyword: fit(..., callbacks=[...])."
            )
    num_epochs, num_iterations = int(num_epochs), int(num_iterations)
    if (num_epochs > 0) == (num_iterations > 0):
        raise ConfigurationError(
            f"num_epochs={num_epochs}, num_iterations={num_iterations}: exactly one must be positive. Say how long to "
            "train, as in fit(num_epochs=10), or in batches: fit(num_iterations=1000)."
        )
    return num_epochs, num_iterations


def check_fit_parts(
    train_loader: Any, optimizer: Any, validation_loader: Any, test_loader: Any, *, made_in_ranks: bool
) -> None:
    """Raise an error if a part that only training needs is missing."""
    if train_loader is None and not made_in_ranks:
        raise ConfigurationError("fit needs a train_loader, but the loop has train_loader=None. Pass one to TrainLoop.")
    if optimizer is None:
        raise ConfigurationError(
            "fit needs an optimizer, but the loop has optimizer=None. Pass one to TrainLoop, for example "
            "torch.optim.Adam(model.parameters())."
        )
    loaders = {"train_loader": train_loader, "validation_loader": validation_loader, "test_loader": test_loader}
    for name, loader in loaders.items():
        check_not_empty(loader, name)


def check_not_empty(loader: Any, name: str) -> None:
    """Raise an error for a loader that is known to have no batches."""
    if loader is None or length_of(loader) != 0:
        return
    if isinstance(loader, DataLoader) and not loader.drop_last and length_of(loader.dataset):
        sampler = loader.sampler if loader.batch_size is not None else loader.batch_sampler
        raise ConfigurationError(
            f"{name} has no batches: the length of its {type(sampler).__name__} is 0, although the dataset has data. "
            "If it yields batches, let its __len__ return their number, or an estimate of at least 1."
        )
    raise ConfigurationError(
        f"{name} has no batches: its dataset is empty, or smaller than batch_size with drop_last=True. Give it data."
    )


def check_step(model: Any, optimizer: Any, amp: AmpOptions, device: torch.device) -> None:
    """Raise an error for a combination of optimizer, model and AMP that can't take steps."""
    if torch.is_autocast_enabled(device.type):
        raise ConfigurationError(
            "fit was called within torch.autocast, which would use the first step's rounded copies of the weights in "
            "all steps. Call fit outside of it, and pass use_amp='bf16' or use_amp='fp16' to TrainLoop."
        )
    if not torch.is_grad_enabled():  # inference mode, too
        raise ConfigurationError(
            "fit was called where gradients are off: within torch.no_grad() or torch.inference_mode(), or after "
            "torch.set_grad_enabled(False). Call fit outside of it, or within torch.enable_grad()."
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not nn.parameter.is_lazy(tensor) and tensor.is_inference():
            raise ConfigurationError(
                f"model.{name} was created in torch.inference_mode(), so it can't be trained. Create or load the model "
                "outside of it (torch.no_grad() is possible), or train a copy.deepcopy(model) that is made outside."
            )
    optimizers = optimizers_of(optimizer)
    asking = next((type(single).__name__ for single in optimizers if needs_closure(single)), None)
    if asking is None:
        return
    if len(optimizers) > 1:
        raise ConfigurationError(
            f"{asking} evaluates the loss several times in a step (step(closure)), but it is one of {len(optimizers)} "
            f"optimizers, and the weights of the others would change in between. Give {asking} all parameters, or use "
            "optimizers that need no closure, such as Adam."
        )
    if yields_losses(model):
        raise ConfigurationError(
            f"{asking} evaluates the loss several times in a step (step(closure)), but get_loss yields its losses, "
            "and the code before a yielded loss can't be run again. Return the loss, or use an optimizer that needs no "
            "closure, such as Adam."
        )
    if amp.on(device).scales:
        raise ConfigurationError(
            f"{asking} evaluates the loss several times in a step (step(closure)). torch's GradScaler, which fp16 "
            "needs, does not support that. Use use_amp='bf16' or use_amp=False."
        )


def check_wrapper_args(given: Any, name: str, wrapper: type) -> dict[str, Any]:
    """Return the keyword arguments of a wrapper's constructor."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ConfigurationError(f"{name}={short(given)} is a {type(given).__name__}: must be a dict or None.")
    known = [key for key in keywords_of(wrapper) if key != "module"]
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ConfigurationError(
            f"{name}={given!r}: {wrapper.__name__} has no argument {unknown[0]!r}{hint(unknown[0], known)}"
        )
    if issubclass(wrapper, nn.parallel.DistributedDataParallel):
        _check_ddp_args(given, name)
    return dict(given)


# Flags of DistributedDataParallel: without this check, 'x' would fail in the ranks, and 'False' would count as true.
_DDP_FLAGS = {"broadcast_buffers", "forward_sync_buffers"} | {
    one.name
    for one in inspect.signature(nn.parallel.DistributedDataParallel).parameters.values()
    if isinstance(one.default, bool)
}


def _check_ddp_args(given: dict[str, Any], name: str) -> None:
    for key, value in given.items():
        if key in _DDP_FLAGS:
            if value is not None and not isinstance(value, (bool, np.bool_)) and whole_number(value) not in (0, 1):
                raise ConfigurationError(f"{name}: {key}={short(value)}: must be True or False.")
        elif key == "bucket_cap_mb":
            number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if value is not None and not (number and 0 <= value < math.inf):
                raise ConfigurationError(
                    f"{name}: bucket_cap_mb={short(value)}: must be a number of MiB, 0 or more, or None for 25."
                )


def short(value: Any) -> str:
    """Return ``repr(value)`` shortened to a line, for messages."""
    text = repr(value)
    if len(text) <= 80 and "\n" not in text:
        return text
    # The repr of optimizers and modules has a line for each group or submodule.
    if isinstance(value, (nn.Module, torch.optim.Optimizer, MultiOptimizer)):
        return f"{type(value).__name__}(...)"
    return text if len(text) <= 80 else f"{text[:77]}..."


def loader_batch_size(loader: Any) -> int | None:
    """Return the number of samples in a full batch of one process, or ``None`` if it is unknown."""
    if isinstance(loader, (list, tuple)) and loader:  # a list of batches
        return samples_of_batch(loader[0])
    if not isinstance(loader, DataLoader):
        return None
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    return whole_number(size)
