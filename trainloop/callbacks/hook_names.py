"""Warn about methods whose names resemble hooks (misspelt, or of another library) but are never called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any
from weakref import WeakSet

from trainloop import distributed
from trainloop._support.keywords import nearest, table_of
from trainloop._support.user_line import warn
from trainloop.callbacks.base import MODEL_HOOKS, AbstractCallback
from trainloop.model import TTModel

__all__ = ["warn_of_misnamed_hooks"]

# Names of hooks of Lightning, Ignite, Keras, TorchTNT or Transformers, and of the hook here.
_HERE = table_of(
    {
        "on_init_end on_setup": "on_train_loop_registration",
        "on_fit_start on_train_start on_started on_training_start on_experiment_start": "on_train_begin",
        "on_fit_end on_completed on_experiment_end": "on_train_end",
        "on_epoch_start on_epoch_started on_train_epoch_start on_train_epoch_begin": "on_epoch_begin",
        "on_epoch_completed on_epoch_finish on_train_epoch_end": "on_epoch_end",
        "on_batch_start on_train_batch_start on_train_batch_begin on_iteration_started on_train_step_start "
        "on_step_begin": "on_batch_begin",
        "on_train_batch_end on_iteration_completed on_train_step_end on_substep_end": "on_batch_end",
        "on_after_backward on_before_optimizer_step on_pre_optimizer_step on_grad_computed": "on_after_gradient_update",
        "on_optimizer_step on_step_end on_before_zero_grad": "on_after_optimizer_step",
        "on_validation_start on_validation_begin on_validation_epoch_start on_val_start on_val_begin "
        "on_val_epoch_start on_eval_start on_eval_begin on_eval_epoch_start on_test_start on_test_begin "
        "on_test_epoch_start on_predict_start on_predict_begin on_predict_epoch_start": "on_evaluation_begin",
        "on_validation_end on_validation_epoch_end on_val_end on_val_epoch_end on_evaluate on_eval_end "
        "on_eval_epoch_end on_test_end on_test_epoch_end on_predict on_predict_end on_predict_epoch_end":
            "on_evaluation_end",
        "on_validation_batch_end on_val_batch_end on_test_batch_end on_predict_batch_end on_eval_step_end "
        "on_predict_step_end on_prediction_step": "on_after_batch_prediction",
        "on_exception_raised on_keyboard_interrupt": "on_exception",
        "on_save_checkpoint": "state_dict",
        "on_load_checkpoint": "load_state_dict",
    }
)  # fmt: skip
# So similar that a misspelling is more likely than a user's own method: "on_epoch_ends", but not "on_request".
_NEAR = 0.85

_warned: WeakSet[type] = WeakSet()


def warn_of_misnamed_hooks(callbacks: Iterable[AbstractCallback], model: Any) -> None:
    """Warn, once for each class, of methods that were meant as hooks.

    A method that a base class of another library defines is that library's hook: there is no warning.

    Parameters
    ----------
    callbacks : iterable of AbstractCallback
    model : nn.Module
        Model, which has only a few hooks; see :class:`trainloop.TTModel`.
    """
    if not distributed.is_global_zero():  # each rank of a launcher calls this
        return
    for kind in dict.fromkeys([*(type(callback) for callback in callbacks), type(model)]):
        if kind not in _warned:
            for name, here in _misnamed(kind):
                _warned.add(kind)
                warn(f"{kind.__name__}.{name} is not called by fit: {_remedy(kind, here)}", UserWarning)


def _misnamed(kind: type) -> Iterator[tuple[str, str]]:
    """Yield methods of users' classes that are not hooks, with the hooks that were probably meant."""
    base = AbstractCallback if issubclass(kind, AbstractCallback) else TTModel
    own = [cls for cls in kind.__mro__ if issubclass(cls, base) and cls.__module__.partition(".")[0] != "trainloop"]
    seen = {name for cls in kind.__mro__ if cls not in own for name in vars(cls)}
    for cls in own:
        for name, value in vars(cls).items():
            if name.startswith("on_") and name not in seen and isinstance(value, (FunctionType, staticmethod)):
                seen.add(name)
                here = _HERE.get(name) or nearest(name.lower(), AbstractCallback.HOOKS, _NEAR)
                if here is not None:
                    yield name, here


def _remedy(kind: type, here: str) -> str:
    if issubclass(kind, AbstractCallback) or here in MODEL_HOOKS:
        what = "hook" if here in AbstractCallback.HOOKS else "method"
        return f"no {what} has this name. Did you mean {here}?"
    return f"a model's hooks are {', '.join(MODEL_HOOKS)}. A callback has {here}."
