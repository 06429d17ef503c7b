"""Arguments of ``TrainLoop`` and ``fit``, checked where they enter; inside they are trusted."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from trainloop._support.keywords import WRAPPERS, keywords_of, meant
from trainloop.callbacks.base import AbstractCallback
from trainloop.data.libraries import loads
from trainloop.devices import whole_number
from trainloop.errors import ConfigurationError
from trainloop.model import TTModel, check_signatures, yields_losses
from trainloop.optim import MultiOptimizer, needs_closure, optimizers_of, parameters_of
from trainloop.resources.quota import ResourceQuota
from trainloop.train_loop.options import AmpOptions, RestartOptions

# -- the loop's arguments ----------------------------------------------------------------------------------------------


def check_model(model: Any) -> Any:
    """Return the model; refuse a wrapped or incomplete one."""
    if isinstance(model, type):
        raise ConfigurationError(f"model={model.__name__}: this is a class. Pass an instance, {model.__name__}(...).")
    # Its gradients would be exchanged twice, and its checkpoints have a prefix on each key.
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ConfigurationError(
            f"model is a {type(model).__name__} already. Pass the model itself; gpu_mode='dp', 'ddp' or 'fsdp' "
            "wraps it."
        )
    if not isinstance(model, nn.Module):
        if isinstance(model, (DataLoader, Dataset, torch.optim.Optimizer, MultiOptimizer)):
            raise ConfigurationError(f"model is {_described(model)}. {_ORDER}")
        raise ConfigurationError(f"model={short(model)}: must be a TTModel.")
    missing = [name for name in ("get_loss", "get_predictions") if not callable(getattr(model, name, None))]
    if missing:
        raise ConfigurationError(
            f"model is a {type(model).__name__} without {' and '.join(missing)}. Subclass TTModel and write "
            f"{'them' if len(missing) > 1 else 'it'}, or pass ModelWrap(model, feed)."
        )
    if not isinstance(model, TTModel) and not callable(getattr(model, "get_loss_eval", None)):
        raise ConfigurationError(f"model is a {type(model).__name__} without get_loss_eval. Subclass TTModel.")
    check_signatures(model)
    reduction = getattr(model, "loss_reduction", None)
    if reduction not in (None, "mean", "sum"):
        raise ConfigurationError(
            f"{type(model).__name__}.loss_reduction={short(reduction)}: must be 'mean' or 'sum', what get_loss makes "
            "of a batch's samples, or None to leave it to the criterion."
        )
    return model


def check_loader(loader: Any, name: str, *, optional: bool = True) -> Any:
    """Return the loader; refuse one that can be iterated only once."""
    if loader is None and optional:
        return None
    if _belongs_elsewhere(loader):
        way_out = "Pass a torch DataLoader." if name == "data_loader" else _ORDER
        raise ConfigurationError(f"{name} is {_described(loader)}. {way_out}")
    if (isinstance(loader, Dataset) and not loads(loader)) or torch.is_tensor(loader):
        raise ConfigurationError(
            f"{name} is a {type(loader).__name__}, which has no batches. Pass DataLoader(dataset, batch_size=32)."
        )
    # It would train the first epoch and find the second empty.
    if isinstance(loader, Iterator):
        raise ConfigurationError(
            f"{name} is a {type(loader).__name__}, which ends after one epoch. "
            "Pass a DataLoader, or an object whose __iter__ begins anew each time."
        )
    if loader is None and name != "data_loader":
        raise ConfigurationError(f"{name}=None: the loop was made without one. Pass it to TrainLoop({name}=...).")
    if isinstance(loader, (str, bytes, dict, type)) or not isinstance(loader, Iterable):
        kinds = "a torch DataLoader or None" if optional else "a torch DataLoader"
        raise ConfigurationError(f"{name}={short(loader)}: must be {kinds}.")
    if isinstance(loader, (list, tuple)) and not all(isinstance(b, (list, tuple, dict, torch.Tensor)) for b in loader):
        raise ConfigurationError(f"{name} is a {type(loader).__name__} of no batches: pass a torch DataLoader.")
    return loader


_ORDER = (
    "The order is TrainLoop(model, train_loader, validation_loader, test_loader): the fourth is test_loader. "
    "Pass optimizer=..., criterion=... by name."
)


def _belongs_elsewhere(loader: Any) -> bool:
    """Whether it is an optimizer, a model or a loss; some of them can be iterated, but over no batches."""
    if isinstance(loader, (torch.optim.Optimizer, MultiOptimizer, TTModel, nn.Sequential, nn.ModuleList)):
        return True
    return not isinstance(loader, (Iterable, type, Dataset)) and callable(loader)


def check_criterion(criterion: Any) -> Any:
    """Accept anything, as it only goes to ``get_loss``; but refuse a loss's class in place of a loss."""
    if isinstance(criterion, type) and issubclass(criterion, nn.Module):
        raise ConfigurationError(f"criterion={criterion.__name__}: this is a class. Pass {criterion.__name__}().")
    return criterion


def check_optimizer(optimizer: Any, model: nn.Module) -> Any:
    """Return the optimizer; refuse one that steps no parameter of the model."""
    if optimizer is None:
        return None
    if isinstance(optimizer, type):
        raise ConfigurationError(
            f"optimizer={optimizer.__name__}: this is a class. Pass {optimizer.__name__}(model.parameters(), lr=...)."
        )
    if isinstance(optimizer, (list, tuple)):
        raise ConfigurationError(f"optimizer is a {type(optimizer).__name__}: pass MultiOptimizer([...]) instead.")
    if not isinstance(optimizer, (torch.optim.Optimizer, MultiOptimizer)):
        raise ConfigurationError(f"optimizer={short(optimizer)}: must be a torch optimizer or a MultiOptimizer.")
    # The commonest slip: the model is made anew (a fold, a notebook cell run twice) and the optimizer is not.
    own = {id(parameter) for parameter in model.parameters()}
    for i, single in enumerate(optimizers_of(optimizer)):
        if not any(id(parameter) in own for parameter in parameters_of(single)):
            which = f"optimizer {i} of the MultiOptimizer" if isinstance(optimizer, MultiOptimizer) else "optimizer"
            raise ConfigurationError(
                f"{which}, a {type(single).__name__}, holds none of the model's parameters: "
                "make it from model.parameters() of the very model that is passed."
            )
    return optimizer


def check_amp(use_amp: Any) -> AmpOptions:
    """``use_amp`` as options."""
    if use_amp is False:
        return AmpOptions()
    if use_amp is True:
        return AmpOptions(torch.bfloat16, chosen=False)
    if use_amp == "bf16":
        return AmpOptions(torch.bfloat16)
    if use_amp == "fp16":
        return AmpOptions(torch.float16)
    if isinstance(use_amp, dict):
        # The two that the loop decides on.
        known = [p for p in inspect.signature(torch.amp.GradScaler).parameters if p not in ("device", "enabled")]
        unknown = [key for key in use_amp if key not in known]
        if unknown:
            raise ConfigurationError(
                f"use_amp={use_amp!r}: GradScaler has no {unknown[0]!r}; it has {', '.join(known)}."
            )
        why = _why_not_scaling(use_amp)
        if why:
            raise ConfigurationError(
                f"use_amp={short(use_amp)}: a GradScaler of these takes no step ({why}). Give init_scale above 0, "
                "growth_factor above 1, backoff_factor below 1 and a growth_interval of 1 or more, or leave them out."
            )
        return AmpOptions(torch.float16, dict(use_amp))
    raise ConfigurationError(
        f"use_amp={short(use_amp)}: must be False, True, 'bf16', 'fp16' or a dict of GradScaler arguments."
    )


def _why_not_scaling(scaler_args: dict[str, Any]) -> str:
    """What a ``GradScaler`` of these arguments says to a step; empty if it takes it.

    It reads most of them only then, so it is tried, on one number and on the CPU.
    """
    p = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)
    try:
        scaler = torch.amp.GradScaler("cpu", **scaler_args)
        optimizer = torch.optim.SGD([p], lr=1.0)
        p.grad = scaler.scale(torch.ones(1, dtype=torch.float32, device="cpu"))
        scaler.step(optimizer)
        scaler.update()
    except Exception as error:  # assertions and whatever else torch raises for what it can't use
        return " ".join(str(error).split()) or type(error).__name__
    # Not exactly: scales that are no powers of two round.
    return "" if math.isclose(p.item(), -1.0, rel_tol=1e-3) else "the scaled gradient is not finite"


def check_auto_eval(end_auto_eval: Any) -> int:
    """Every how many epochs to evaluate; 0: never."""
    if isinstance(end_auto_eval, bool):
        return int(end_auto_eval)
    epochs = whole_number(end_auto_eval)
    if epochs is not None and epochs >= 1:
        return epochs
    raise ConfigurationError(
        f"end_auto_eval={short(end_auto_eval)}: must be True, False, or after how many epochs, an int of 1 or more."
    )


def check_positive(value: Any, name: str, *, optional: bool = True) -> Any:
    """A finite number above 0."""
    if value is None and optional:
        return None
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not value > 0 or not math.isfinite(value):
        raise ConfigurationError(f"{name}={short(value)}: must be a number above 0{' or None' if optional else ''}.")
    return float(value)


def check_seed(seed: Any) -> int | None:
    """An int from 0 to 2**63 - 1, or None."""
    if seed is None:
        return None
    number = whole_number(seed)
    if number is None or not 0 <= number < 2**63:
        raise ConfigurationError(f"seed={short(seed)}: must be an int from 0 to 2**63 - 1, or None.")
    return number


def check_bool(value: Any, name: str) -> bool:
    """True or False, and nothing that merely counts as one."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={short(value)}: must be True or False.")
    return value


def check_compile(value: Any) -> dict[str, Any] | None:
    """Arguments of ``torch.compile``, or None for no compiling of the model."""
    if value == "step":
        return None
    if isinstance(value, bool):
        return {} if value else None
    if isinstance(value, dict):
        return dict(value)
    raise ConfigurationError(
        f"compile={short(value)}: must be True, False, 'step' or a dict of torch.compile arguments."
    )


def check_start_method(value: Any) -> str:
    """One of the names."""
    if not isinstance(value, str) or value not in ("auto", "forkserver", "spawn"):
        raise ConfigurationError(f"start_method={short(value)}: must be 'auto', 'forkserver' or 'spawn'.")
    return value


def check_callable(value: Any, name: str) -> Any:
    """A function."""
    if not callable(value):
        raise ConfigurationError(f"{name}={short(value)}: must be a function.")
    return value


def check_callbacks(callbacks: Any, name: str = "callbacks") -> list[AbstractCallback]:
    """The callbacks as a list."""
    if callbacks is None:
        return []
    if not isinstance(callbacks, (list, tuple)):
        raise ConfigurationError(f"{name}={short(callbacks)}: must be a list of callbacks or None.")
    for i, callback in enumerate(callbacks):
        if not isinstance(callback, AbstractCallback):
            raise ConfigurationError(
                f"{name}[{i}]={short(callback)}: must be an AbstractCallback.{_callback_hint(callback)}"
            )
        if any(callback is other for other in callbacks[:i]):
            raise ConfigurationError(f"{name}[{i}]={short(callback)} stands in the list twice. Remove one.")
    return list(callbacks)


def _callback_hint(given: Any) -> str:
    """What to do with what is no callback; empty if unknown."""
    kind = given if isinstance(given, type) else type(given)
    if issubclass(kind, (LRScheduler, ReduceLROnPlateau)):  # of old versions of torch the second is none of the first
        rest = ", ..." if isinstance(given, type) else "(...)"
        return f" A scheduler is stepped by trainloop.callbacks.LRScheduler({kind.__name__}{rest})."
    return " It is a class: call it." if isinstance(given, type) else ""


def check_quota(resources: Any) -> Any:
    """A ResourceQuota or None."""
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
    """Accelerator and devices, with ``cuda_device_idx`` translated into them."""
    if cuda_device_idx is not None:
        cuda_device_idx = check_count(cuda_device_idx, "cuda_device_idx", 0)
        if gpu_mode != "single" or devices != "auto":
            raise ConfigurationError(
                f"cuda_device_idx={cuda_device_idx} is for gpu_mode='single' without devices. "
                f"Use devices=[{cuda_device_idx}] instead."
            )
        return "cuda", [cuda_device_idx]
    if auto_select_gpus and devices == 0:
        raise ConfigurationError("auto_select_gpus=True with devices=0: no GPU to select. Use devices=1 or more.")
    number = whole_number(devices)
    return accelerator, devices if number is None else number


# -- fit's arguments ---------------------------------------------------------------------------------------------------


def check_count(value: Any, name: str, least: int) -> int:
    """An int of at least ``least``."""
    number = whole_number(value)
    if number is None or number < least:
        raise ConfigurationError(f"{name}={short(value)}: must be an int of {least} or more.")
    return number


def check_restarts(
    max_restarts: Any, restart_every_steps: Any, num_nodes: int, init_method: str | None, gpu_mode: str
) -> RestartOptions | None:
    """Return the checked options of restarts; ``None`` if the first failure ends the run."""
    most = whole_number(max_restarts)
    if most is None or most < -1:
        raise ConfigurationError(
            f"max_restarts={short(max_restarts)}: must be an int of 0 or more, or -1 for as many as it takes."
        )
    if restart_every_steps is not None:
        restart_every_steps = check_count(restart_every_steps, "restart_every_steps", 1)
    if not most:
        return None
    if num_nodes > 1 and (gpu_mode == "fsdp" or (init_method or "").startswith("file:")):
        why = "gpu_mode='fsdp', where no host has all of the state" if gpu_mode == "fsdp" else f"{init_method=}"
        raise ConfigurationError(
            f"max_restarts={max_restarts} with num_nodes={num_nodes} and {why}: the ranks can't be started again from "
            "here. Use torchrun --max-restarts, Slurm or Kubernetes, with a ModelCheckpoint in callbacks on storage "
            "that all hosts share, and fit(resume_from='last')."
        )
    return RestartOptions(most, restart_every_steps)


def check_length(num_epochs: Any, num_iterations: Any) -> tuple[int, int]:
    """The two as ints, of which exactly one says how long to train."""
    for name, value in (("num_epochs", num_epochs), ("num_iterations", num_iterations)):
        held = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, AbstractCallback) for item in held):
            raise ConfigurationError(
                f"{name}={short(value)}: must be an int. Callbacks are given by name: fit(..., callbacks=[...])."
            )
        if (number := whole_number(value)) is None or number < 0:
            raise ConfigurationError(
                f"{name}={short(value)}: must be an int, positive in one of num_epochs and num_iterations and 0 in the "
                "other."
            )
    num_epochs, num_iterations = int(num_epochs), int(num_iterations)
    if (num_epochs > 0) == (num_iterations > 0):
        raise ConfigurationError(
            f"num_epochs={num_epochs}, num_iterations={num_iterations}: exactly one must be positive."
        )
    return num_epochs, num_iterations


def check_fit_parts(
    train_loader: Any, optimizer: Any, validation_loader: Any, test_loader: Any, *, made_in_ranks: bool
) -> None:
    """Refuse to train without the parts that only training needs."""
    if train_loader is None and not made_in_ranks:
        raise ConfigurationError("fit needs a train_loader, but the loop was made with train_loader=None. Pass one.")
    if optimizer is None:
        raise ConfigurationError(
            "fit needs an optimizer, but the loop was made with optimizer=None. "
            "Pass one, for instance torch.optim.Adam(model.parameters())."
        )
    loaders = {"train_loader": train_loader, "validation_loader": validation_loader, "test_loader": test_loader}
    for name, loader in loaders.items():
        if loader is not None and loader_length(loader) == 0:
            raise ConfigurationError(
                f"{name} has no batches: its dataset is empty, or smaller than batch_size with drop_last=True. "
                "Give it data."
            )


def check_step(model: Any, optimizer: Any, amp: AmpOptions, device: torch.device) -> None:
    """Refuse a combination of optimizer, model and AMP that can't take steps."""
    optimizers = optimizers_of(optimizer)
    asking = next((type(single).__name__ for single in optimizers if needs_closure(single)), None)
    if asking is None:
        return
    if len(optimizers) > 1:
        raise ConfigurationError(
            f"{asking} evaluates the loss again and again in a step (step(closure)), but it is one of "
            f"{len(optimizers)} optimizers, whose weights would change meanwhile. Give it all parameters, or choose "
            "others that need no closure, such as Adam."
        )
    if yields_losses(model):
        raise ConfigurationError(
            f"{asking} evaluates the loss again and again in a step (step(closure)), but get_loss yields its losses, "
            "and what came before a loss can't be run again. Return the loss, or choose an optimizer that needs no "
            "closure, such as Adam."
        )
    if amp.on(device).scales:
        raise ConfigurationError(
            f"{asking} evaluates the loss again and again in a step (step(closure)), which torch's GradScaler does not "
            "support: fp16 needs one. Use use_amp='bf16' or use_amp=False."
        )


def check_wrapper_args(given: Any, name: str, wrapper: type) -> dict[str, Any]:
    """Keyword arguments of a wrapper's constructor."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ConfigurationError(f"{name}={short(given)} is a {type(given).__name__}: must be a dict or None.")
    known = [key for key in keywords_of(wrapper) if key != "module"]
    unknown = [key for key in given if key not in known]
    if unknown:
        hint = meant(unknown[0], known, WRAPPERS)
        raise ConfigurationError(f"{name}={given!r}: {wrapper.__name__} has no {unknown[0]!r}{hint}")
    if issubclass(wrapper, nn.parallel.DistributedDataParallel):
        _check_ddp_args(given, name)
    return dict(given)


# Of DistributedDataParallel, whose ranks would fail at 'x', and take 'False' for true.
_DDP_FLAGS = frozenset(
    """broadcast_buffers init_sync find_unused_parameters check_reduction gradient_as_bucket_view static_graph
    skip_all_reduce_unused_params""".split()
)


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
    """``repr`` cut to a line, for messages."""
    text = repr(value)
    if len(text) <= 80 and "\n" not in text:
        return text
    # These print a line for each group or module.
    if isinstance(value, (nn.Module, torch.optim.Optimizer, MultiOptimizer)):
        return f"{type(value).__name__}(...)"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _described(value: Any) -> str:
    """What stands in the place of something else, by its kind and class, or a function by its name."""
    name = getattr(value, "__name__", type(value).__name__)
    if isinstance(value, (torch.optim.Optimizer, MultiOptimizer)):
        return f"an optimizer ({name})"
    if isinstance(value, nn.Module):
        return f"a module ({name})"
    return f"a {name}" if isinstance(value, (DataLoader, Dataset)) else f"a function ({name})"


def loader_length(loader: Any) -> int | None:
    """Batches in an epoch, or ``None`` where it can't be known."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def loader_batch_size(loader: Any) -> int | None:
    """Samples in a full batch of one process, or ``None`` where the loader doesn't say."""
    if not isinstance(loader, DataLoader):
        return None
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None
