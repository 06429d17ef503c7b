"""Names of arguments in other libraries' callbacks, and their names here."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from trainloop._support.keywords import refuse, suggested, table_of

__all__ = ["OwnSignature", "refuse_unknown_keywords"]

# Arguments of Lightning, Keras, Ignite or Transformers, and their names here; the first that the callback has.
_SAME = {
    "metric metric_name quantity metric_to_monitor score_name key": "monitor metric_name metric_names",
    "save_top_k max_to_keep n_saved save_total_limit keep_last top_k": "keep",
    "filepath path dirname dir directory folder checkpoint_dir save_dir output_dir save_path root_dir":
        "dirpath log_dir path",
    "logdir tensorboard_dir": "log_dir",
    "every_n_train_steps save_steps step_interval every_n_batches": "every_n_steps",
    "period save_freq every_epoch epoch_interval check_every": "every_n_epochs",
    "train_time_interval": "every_n_minutes",
    "delta min_change threshold_delta": "min_delta",
    "wait tolerance early_stopping_patience": "patience",
    "direction goal objective": "mode",
    "log_interval log_freq update_freq logging_steps": "log_every_n_steps every_n_steps",
    "log_graph": "graph_input",
    "hparams config params": "hyperparameters",
    "beta ema_decay momentum alpha": "decay",
    "clip_norm grad_norm max_grad_norm gradient_clip_val": "max_norm",
    "clip_value gradient_clip_value": "max_value",
    "duration max_time timeout time_limit max_seconds": "seconds",
    "swa_lrs": "swa_lr",
    "swa_epoch_start swa_start": "start",
    "logging_interval": "every_n_steps",
    "step_size_up step_on": "interval",
    "labels classes display_labels": "class_names",
}  # fmt: skip

# Advice for arguments without a counterpart, for a callback that has the first argument.
_OTHERWISE = {
    ("keep", "save_last"): "the newest checkpoint is always kept.",
    ("keep", "filename"): "files are named by epoch and step; .best_path and .last_path have their paths.",
    ("keep", "save_weights_only"):
        "torch.save(model.state_dict(), path) after fit does that, and so does safetensors=True.",
    ("keep", "save_best_only"): "monitor=..., with every_n_epochs=None and keep=1, writes only the best.",
    ("patience", "restore_best_weights"):
        "ModelCheckpoint(dirpath, monitor=...) keeps the best weights, and its load_best() loads them after fit.",
    ("patience", "stopping_threshold"): "ThresholdEarlyStopping ends training at a value.",
    ("patience", "baseline"): "ThresholdEarlyStopping ends training at a value.",
    ("patience", "verbose"): "the callback that ended training is always printed.",
}  # fmt: skip

_HERE = {name: here.split() for name, here in table_of(_SAME).items()}


def refuse_unknown_keywords(kind: type, given: Iterable[str]) -> None:
    """Raise an error for keywords that a class doesn't take, with a hint at the right ones.

    Raises
    ------
    UnknownArgumentError
        If there are any, and the class's ``__init__`` has no ``**kwargs``.
    """
    known = inspect.signature(kind.__init__).parameters  # type: ignore[misc]  # of a class, not of an instance
    unknown = [name for name in given if name not in known]
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        own = list(known)[1:]
        refuse(kind.__name__, unknown, lambda name: _hint(name, own))


def _hint(name: str, own: list[str]) -> str:
    for (argument, foreign), text in _OTHERWISE.items():
        if name == foreign and argument in own:
            return f": {text}"
    here = [candidate for candidate in _HERE.get(name.lower(), ()) if candidate in own]
    return f". Did you mean {here[0]}=?" if here else suggested(name, own)


class OwnSignature:
    """For a class attribute ``__signature__``: that of the class's own ``__init__``, where a base has a ``__new__``."""

    def __get__(self, instance: Any, kind: type) -> inspect.Signature:
        signature = inspect.signature(kind.__init__)  # type: ignore[misc]  # of a class, not of an instance
        return signature.replace(parameters=list(signature.parameters.values())[1:])
