"""Try out a loop on copies of its model and optimizer, as its last ``fit`` would, without side effects."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trainloop._transfer.shared import shared_parts
from trainloop._transfer.torch_objects import optimizer_state
from trainloop.data.batch.batches import samples_of_batch
from trainloop.data.loader.loader_copies import copy_loader
from trainloop.data.order.orders import length_of
from trainloop.errors import ConfigurationError
from trainloop.optim.optimizers import optimizers_of
from trainloop.optim.parameters import criterion_modules, move_to
from trainloop.parallel.transparent import attributes_of
from trainloop.train_loop.arguments.checks import loader_batch_size
from trainloop.train_loop.loop import TrainLoop
from trainloop.train_loop.training.trained import begin_training


def require_training_parts(loop: TrainLoop[Any], who: str) -> None:
    """Raise an error if the loop can't train, or is running.

    Raises
    ------
    ConfigurationError
        If the loop has no ``train_loader`` or no ``optimizer``, or is running.
    """
    if loop.running is not None:
        raise ConfigurationError(f"{who} was called in a callback of a running loop. Call it before fit.")
    if loop.train_loader is None or loop.optimizer is None:
        missing = "train_loader" if loop.train_loader is None else "optimizer"
        raise ConfigurationError(f"{who} tries a few training steps, but {missing} is None. Pass one to the loop.")


def copies(loop: TrainLoop[Any], device: torch.device | None = None, *also: Any) -> Any:
    """Return copies of model, optimizer, criterion and ``also`` that refer to each other; on ``device`` if it is given.

    Copies of ``also`` refer to no loop, and to the same data.
    """
    own = (loop.model, loop.optimizer, loop.criterion)
    parts = shared_parts({str(i): part for i, part in enumerate(own)}, {}).values()
    # torch refuses to copy tensors that an operation has computed, such as outputs that a model keeps, and sparse ones
    # in rows or columns.
    tensors = [part for part in parts if isinstance(part, Tensor)]
    copied: dict[int, Any] = {id(t): t.detach().clone() for t in tensors if not t.is_leaf or t.layout != torch.strided}
    data = [loader for loader in (loop.train_loader, loop.validation_loader, loop.test_loader) if loader is not None]
    copied.update((id(part), part) for loader in data for part in (loader, getattr(loader, "dataset", loader)))
    copied[id(loop)] = None
    model, optimizer, criterion, *others = copy.deepcopy((*own, *also), copied)
    for single, source in zip(optimizers_of(optimizer), optimizers_of(loop.optimizer), strict=True):
        missing = optimizer_state(source, hooks=False).keys() - vars(single)  # torch copies only three attributes
        vars(single).update({name: copy.deepcopy(vars(source)[name], copied) for name in missing})
    for tensor in (*loop.model.parameters(), *loop.model.buffers()):
        if marks := attributes_of(tensor):  # torch copies a tensor without the attributes that code has set on it
            vars(copied[id(tensor)]).update(copy.deepcopy(marks, copied))
    begin_training(model, list(model.modules()))
    if device is not None:
        move_to(model, device)
        for module in criterion_modules(criterion):
            move_to(module, device)
        for single in optimizers_of(optimizer):
            for state in single.state.values():
                if isinstance(state, dict):  # other entries belong to no parameter
                    state.update({k: v.to(device) for k, v in state.items() if isinstance(v, Tensor) and v.dim()})
    return (model, optimizer, criterion, *others)


def samples_in(batch: Any, loader: Any) -> int:
    """Return the number of samples in the loader's first batch, as training counts it."""
    planned = loader_batch_size(loader) if isinstance(loader, DataLoader) else None
    if planned is not None and (rows := length_of(loader.dataset)) is not None:
        planned = min(planned, rows)
    return samples_of_batch(batch, planned)


def first_batch(loader: Any) -> Any:
    """Return the loader's first batch.

    Raises
    ------
    ConfigurationError
        If the loader has no batches.
    """
    for batch in copy_loader(loader) if isinstance(loader, DataLoader) else loader:  # its workers don't stay
        return batch
    raise ConfigurationError(
        "train_loader has no batches: its dataset is empty, or smaller than batch_size with drop_last=True. Give it "
        "data."
    )


def trial_of(loop: TrainLoop[Any], train_loader: Any = None) -> TrainLoop[Any]:
    """Return a silent loop with copies of the model and optimizer, on the same devices, without evaluation."""
    model, optimizer, criterion = copies(loop)
    trial = TrainLoop(
        model,
        loop.train_loader if train_loader is None else train_loader,
        None,
        None,
        optimizer,
        criterion,
        end_auto_eval=False,
        seed=loop.seed or 0,
        timeout=loop.timeout,
        progress_bar=False,
        gradient_clip_norm=loop.gradient_clip_norm,
        sync_batchnorm=loop.sync_batchnorm,
        accelerator="cpu",  # replaced below
    )
    trial.options = replace(loop.options, auto_select_gpus=False)
    trial.run_config = loop.run_config
    return trial


def wrapper_args_of(loop: TrainLoop[Any]) -> dict[str, Any]:
    """Return the arguments of the wrapper that the last ``fit`` got, as an argument of ``fit``."""
    return {f"{loop.gpu_mode}_model_args": loop.wrapper_args} if loop.wrapper_args else {}
