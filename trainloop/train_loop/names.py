"""Names from other libraries, and what they are called here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from trainloop._support.keywords import nearest, refuse, table_of

__all__ = ["attribute_hint", "hides_unknown", "refuse_unknown"]

Function = TypeVar("Function", bound=Callable[..., Any])

# Keywords of Lightning, Accelerate, Keras or hand-written loops, and their names here; for TrainLoop and for fit.
KEYWORDS = {
    "train_dataloader train_dataloaders train_dl trainloader training_loader dataloader data_loader": "train_loader=",
    "val_loader valid_loader val_dataloader val_dataloaders val_dl valloader eval_loader": "validation_loader=",
    "test_dataloader test_dataloaders test_dl testloader": "test_loader=",
    "loss loss_fn loss_func loss_function": "criterion=",
    "optim optimizers opt": "optimizer=, with a MultiOptimizer([...]) for several",
    "strategy mode distributed_backend parallel_mode": "gpu_mode='single', 'dp', 'ddp' or 'fsdp'",
    "precision amp mixed_precision autocast dtype fp16 bf16": "use_amp=True, 'bf16' or 'fp16'",
    "device": "accelerator='cpu' or 'cuda', with devices=[0] for a particular GPU",
    "gpus num_devices num_processes nproc_per_node nprocs": "devices=",
    "epochs max_epochs n_epochs nb_epoch num_train_epochs": "fit(num_epochs=)",
    "max_steps num_steps steps max_iterations iterations max_iter": "fit(num_iterations=), which counts batches",
    "accumulate_grad_batches gradient_accumulation_steps gradient_accumulation accumulation_steps grad_accum":
        "fit(grad_accumulation=)",
    "gradient_clip_val clip_grad_norm max_grad_norm grad_clip gradient_clip": "gradient_clip_norm=",
    "ckpt_path checkpoint resume resume_from_checkpoint": "fit(resume_from='last' or a path)",
    "logger loggers log_dir tensorboard": "fit(callbacks=[TensorBoard()]), or MLflowTracking, WandBTracking",
    "log_every_n_steps": "fit(callbacks=[TensorBoard(log_every_n_steps=)])",
    "default_root_dir save_dir output_dir enable_checkpointing checkpoint_dir":
        "fit(callbacks=[ModelCheckpoint(dirpath)])",
    "scheduler schedulers lr_scheduler": "fit(callbacks=[LRScheduler(...)])",
    "early_stopping patience": "fit(callbacks=[EarlyStopping(...)])",
    "check_val_every_n_epoch validation_freq eval_every": "end_auto_eval=, the epochs between evaluations",
    "enable_progress_bar verbose": "progress_bar=True or False",
    "sync_bn": "sync_batchnorm=",
    "random_seed seed_everything": "seed=",
    "torch_compile": "compile=",
    "find_unused_parameters": "fit(ddp_model_args={'find_unused_parameters': True})",
    "max_time": "fit(callbacks=[TimeLimit(...)])",
    "gradient_checkpointing activation_checkpointing": "checkpoint_modules=",
    "nnodes": "fit(num_nodes=)",
    "lr learning_rate": "an argument of the optimizer: torch.optim.Adam(model.parameters(), lr=...)",
    "batch_size shuffle num_workers": "an argument of the loader: DataLoader(data, batch_size=..., shuffle=...)",
}  # fmt: skip

ATTRIBUTES = {
    "test": "evaluate_loss_on_test_set() and predict_on_test_set()",
    "validate evaluate eval": "evaluate_loss_on_validation_set() and predict_on_validation_set()",
    "train run start": "fit(num_epochs=...)",
    "predict": "predict_with_model(loader)",
    "save save_model": "torch.save(loop.model.state_dict(), path), or fit(callbacks=[ModelCheckpoint(dir)])",
    "save_checkpoint": "fit(callbacks=[ModelCheckpoint(dir)])",
    "load load_model": "loop.model.load_state_dict(torch.load(path))",
    "load_checkpoint load_from_checkpoint resume": "fit(resume_from='last' or a path)",
    "current_epoch": "epoch",
    "total_steps steps iteration num_steps": "global_step",
    "logged_metrics callback_metrics metrics train_history": "history",
    "val_loader val_dataloader valid_loader val_dataloaders": "validation_loader",
    "train_dataloader train_dataloaders": "train_loader",
    "test_dataloader test_dataloaders": "test_loader",
    "optimizers": "optimizer",
    "should_stop stop stop_training": "early_stop = True",
    "stop_reason": "ends",
    "strategy mode": "gpu_mode",
    "global_rank": "rank",
    "num_devices": "site.devices",
    "logger add_callback": "fit(callbacks=[...])",
    "lr_find lr_finder": "find_lr()",
    "scale_batch_size": "find_batch_size()",
    "state_dict": "checkpoint_state() in a callback; ModelCheckpoint keeps it",
}

_KEYWORD, _ATTRIBUTE = table_of(KEYWORDS), table_of(ATTRIBUTES)


def refuse_unknown(unknown: Iterable[str], door: str, doors: dict[str, Callable[..., Any]]) -> None:
    """Raise an error for unknown keywords, with a hint at the right names.

    Parameters
    ----------
    unknown : iterable of str
        Names that were given.
    door : str
        The one of ``doors`` that they were passed to.
    doors : dict
        The loop's constructor and ``fit``, by the names that messages use.

    Raises
    ------
    UnknownArgumentError
        If there are unknown names.
    """
    refuse(doors[door].__qualname__, unknown, lambda name: _meant(name, door, doors))


def _meant(name: str, door: str, doors: dict[str, Callable[..., Any]]) -> str:
    names = {key: [p for p in inspect.signature(function).parameters if p != "self"] for key, function in doors.items()}
    elsewhere = [key for key in doors if key != door and name in names[key]]
    if elsewhere:
        return f": it belongs to {elsewhere[0]}({name}=...)."
    here = _KEYWORD.get(name.lower())
    if here is not None:
        # A hint without brackets names an argument of the constructor.
        if door != "TrainLoop" and here[:1].isalpha() and here.partition("=")[0].isidentifier():
            here = f"TrainLoop({here.partition(',')[0]}...)"
        return f". Did you mean {here}?"
    for key in (door, *doors):
        close = nearest(name.lower(), names[key])
        if close is not None:
            return f". Did you mean {close}=?" if key == door else f". Did you mean {key}({close}=...)?"
    return f". It has: {', '.join(names[door])}."


def hides_unknown(function: Function) -> Function:
    """Hide a function's ``**unknown`` from its signature; it exists only to be refused."""
    signature = inspect.signature(function)
    kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return function


def attribute_hint(name: str) -> str:
    """Return a sentence that names the replacement of another library's attribute; empty if unknown."""
    here = _ATTRIBUTE.get(name)
    return "" if here is None else f". Here it is {here}"
