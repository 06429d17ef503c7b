"""Names from other libraries, and their equivalents here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from trainloop._support.keywords import refuse, table_of

__all__ = ["attribute_hint", "hides_unknown", "refuse_unknown"]

Function = TypeVar("Function", bound=Callable[..., Any])

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
    "num_devices": "run_config.devices",
    "logger add_callback": "fit(callbacks=[...])",
    "lr_find lr_finder": "find_lr()",
    "scale_batch_size": "find_batch_size()",
    "state_dict": "checkpoint_state() in a callback, or a ModelCheckpoint",
}

_ATTRIBUTE = table_of(ATTRIBUTES)


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
    names = {key: [p for p in inspect.signature(function).parameters if p != "self"] for key, function in doors.items()}
    refuse(doors[door].__qualname__, unknown, names.pop(door), names)


def hides_unknown(function: Function) -> Function:
    """Hide a function's ``**unknown`` from its signature; it exists only to raise errors."""
    signature = inspect.signature(function)
    kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return function


def attribute_hint(name: str) -> str:
    """Return a sentence that names the replacement of another library's attribute; empty if unknown."""
    here = _ATTRIBUTE.get(name)
    return "" if here is None else f". The equivalent here is {here}"
