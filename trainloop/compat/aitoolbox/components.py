"""Parts of AIToolbox's loop: the callbacks handler, the message board, the prediction store, and collate functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from trainloop.callbacks import messages as core
from trainloop.callbacks.base import AbstractCallback, overrides
from trainloop.errors import ConfigurationError

# -- callbacks --------------------------------------------------------------------------------------------------------

# Hooks, in AIToolbox's order.
_HOOKS = (
    *("on_epoch_begin", "on_epoch_end", "on_train_begin", "on_train_end", "on_batch_begin", "on_batch_end"),
    *("on_after_gradient_update", "on_after_optimizer_step", "on_multiprocess_start", "on_after_batch_prediction"),
)


class CallbacksHandler:
    """Register callbacks before ``fit``. They run before the callbacks that are passed to ``fit``.

    ``execute_train_begin()``, ``execute_epoch_end()`` and so on call the callbacks' hooks outside of a training.

    Parameters
    ----------
    train_loop_obj : TrainLoop
    """

    def __init__(self, train_loop_obj: Any) -> None:
        self.train_loop_obj = train_loop_obj
        self.callbacks_cache: list[AbstractCallback] = []

    def register_callbacks(
        self,
        callbacks: Iterable[AbstractCallback] | None,
        cache_callbacks: bool = False,
        print_callbacks: bool = False,
    ) -> None:
        """Add callbacks to the loop.

        With ``cache_callbacks``, they are added only by the next call without it, or by ``fit``.
        """
        new = list(callbacks or ())
        for callback in new:
            if not isinstance(callback, AbstractCallback):
                raise TypeError(f"callback {callback!r} does not inherit from AbstractCallback.")
        if cache_callbacks:
            self.callbacks_cache += new
        else:
            loop = self.train_loop_obj
            new, self.callbacks_cache = self.callbacks_cache + new, []
            known = {id(callback) for callback in loop.callbacks}
            added = [callback.register_train_loop_object(loop) for callback in new if id(callback) not in known]
            loop.note(callbacks=sorted([*loop.callbacks, *added], key=lambda callback: callback.execution_order))
        if print_callbacks:
            self.print_registered_callback_names()

    def all_for_fit(self, callbacks: Iterable[AbstractCallback] | None) -> list[Any]:
        """Return all callbacks of the next ``fit``, each once."""
        cached, self.callbacks_cache = self.callbacks_cache, []
        found = {id(callback): callback for callback in [*self.registered, *cached, *(callbacks or ())]}
        return list(found.values())

    @property
    def registered(self) -> list[AbstractCallback]:
        """Callbacks of the loop, except the internal ones that implement AIToolbox's behaviour."""
        internal = {id(callback) for callback in self.train_loop_obj.own_callbacks()}
        return [callback for callback in self.train_loop_obj.callbacks if id(callback) not in internal]

    @property
    def registered_cbs(self) -> list[list[AbstractCallback]]:
        """Lists of callbacks, one for each hook in AIToolbox's order."""
        return [getattr(self, f"cbs_{hook}") for hook in _HOOKS]

    def print_registered_callback_names(self) -> None:
        """Print the names of the callbacks of each hook."""
        print(self)

    def __getattr__(self, name: str) -> Any:
        prefix, _, what = name.partition("_")
        if prefix == "cbs" and what in AbstractCallback.HOOKS:
            return [callback for callback in self.registered if overrides(callback, what)]
        hook = f"on_{what}" if f"on_{what}" in _HOOKS else f"on_after_{what}"
        if prefix != "execute" or hook not in _HOOKS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def execute(*args: Any) -> None:
            for callback in getattr(self, f"cbs_{hook}"):
                getattr(callback, hook)(*args)

        return execute

    def __str__(self) -> str:
        lines = ["CALLBACKS"]
        for hook in _HOOKS:
            lines.append(f"At {hook}:")
            lines += [
                f"\t{callback.callback_name}: {type(callback)}, execution_order: {callback.execution_order}"
                for callback in getattr(self, f"cbs_{hook}")
            ]
        return "\n".join(lines)

    def __len__(self) -> int:
        return len(self.registered)

    def __add__(self, other: Iterable[AbstractCallback]) -> CallbacksHandler:
        self.register_callbacks(other)
        return self

    __iadd__ = __add__

    def __contains__(self, item: object) -> bool:
        return any(callback.callback_name == item or type(callback) is item for callback in self.registered)


# -- messages ----------------------------------------------------------------------------------------------------------


class MessageHandling(str, Enum):
    """Lifetime of a message."""

    KEEP_FOREVER = core.KEEP_FOREVER
    UNTIL_END_OF_EPOCH = core.UNTIL_END_OF_EPOCH
    UNTIL_READ = core.UNTIL_READ
    OVERWRITE = core.OVERWRITE


class Message(core.Message):
    """A value with its key and its lifetime."""

    def __init__(self, key: str, value: Any, msg_handling_settings: MessageHandling | list[MessageHandling]) -> None:
        super().__init__(key, value, MessageService.validate_msg_handling_settings(msg_handling_settings))


class MessageService(core.MessageService):
    """A message board with keys."""

    def read_messages(self, key: str) -> list[Any] | None:  # type: ignore[override]  # None for no messages
        """Return the values of a key; ``None`` if there is no such key."""
        return super().read_messages(key) if key in self.message_store else None

    def write_message(  # type: ignore[override]  # AIToolbox's keyword name
        self,
        key: str,
        value: Any,
        msg_handling_settings: MessageHandling | list[MessageHandling] = MessageHandling.UNTIL_END_OF_EPOCH,
    ) -> None:
        """Store a value under a key."""
        self.store(Message(key, value, msg_handling_settings))

    @staticmethod
    def validate_msg_handling_settings(msg_handling_settings: Any) -> list[MessageHandling]:
        """Return the settings as a list.

        Raises
        ------
        TypeError
            If a setting is not a :class:`MessageHandling`.
        ConfigurationError
            If two settings exclude each other.
        """
        settings = msg_handling_settings if isinstance(msg_handling_settings, list) else [msg_handling_settings]
        for setting in settings:
            if not isinstance(setting, MessageHandling):
                raise TypeError(f"msg_handling_settings={setting!r}: must be a MessageHandling, or a list of them.")
        if len(settings) > 1 and MessageHandling.OVERWRITE not in settings:
            raise ConfigurationError(
                f"msg_handling_settings={settings}: these exclude each other. Only MessageHandling.OVERWRITE can be "
                "combined with another."
            )
        return settings


# -- predictions -------------------------------------------------------------------------------------------------------


class ModelPredictionStore:
    """A store of results with the training iteration of each result. Results of an earlier iteration count as missing.

    It has ``insert_x(result, iteration_idx, force_prediction=False)``, ``get_x(iteration_idx)`` and
    ``has_x(iteration_idx)`` for each ``x`` of ``train``, ``val`` and ``test``, with ``_predictions`` or ``_loss``.

    Parameters
    ----------
    auto_purge : bool
        When a result of a later iteration is inserted, drop the results of earlier iterations.
    """

    def __init__(self, auto_purge: bool = False) -> None:
        self.do_auto_purge = auto_purge
        self.prediction_store: dict[str, Any] = {"iteration_idx": -1}

    def insert(self, name: str, data: Any, iteration_idx: int, force_prediction: bool = False) -> None:
        """Store a result.

        If this iteration already has the result, raise an error unless ``force_prediction`` is True.
        """
        self.auto_purge(iteration_idx)
        if self.has(name, iteration_idx) and not force_prediction:
            raise ConfigurationError(
                f"the store has {name!r} for iteration {iteration_idx}. Pass force_prediction=True to replace it."
            )
        self.prediction_store[name] = data

    def get(self, name: str, iteration_idx: int) -> Any:
        """Return a result of this iteration, or raise an error if it is missing."""
        if not self.has(name, iteration_idx):
            raise ConfigurationError(f"the store has no {name!r} for iteration {iteration_idx}. Insert it first.")
        return self.prediction_store[name]

    def has(self, name: str, iteration_idx: int) -> bool:
        """Return True if the store has the result of this iteration."""
        return name in self.prediction_store and self.prediction_store["iteration_idx"] == iteration_idx

    def auto_purge(self, iteration_idx: int) -> None:
        """Remove results of earlier iterations, if ``auto_purge`` was requested."""
        if self.do_auto_purge and iteration_idx > self.prediction_store["iteration_idx"]:
            self.prediction_store = {"iteration_idx": iteration_idx}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        verb, _, what = name.partition("_")
        part, _, kind = what.partition("_")
        if verb not in ("insert", "get", "has") or part not in ("train", "val", "test") or kind not in _KINDS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        function = getattr(self, verb)
        return lambda *args, **kwargs: function(f"{part}_{_KINDS[kind]}", *args, **kwargs)


# Kinds of results: keys are parts of method names, values are names in the store.
_KINDS = {"predictions": "pred", "loss": "loss"}


def append_predictions(y_batch: Any, predictions: list[Any]) -> list[Any]:
    """Append the batch's predictions as one item."""
    predictions.append(y_batch)
    return predictions


def append_concat_predictions(y_batch: Any, predictions: list[Any]) -> list[Any]:
    """Append the batch's predictions; if they are a list, append the items of the list."""
    if isinstance(y_batch, list):
        predictions += y_batch
    else:
        predictions.append(y_batch)
    return predictions


def torch_cat_transf(predictions: list[Tensor]) -> Tensor:
    """Return the predictions of all batches as one tensor."""
    return torch.cat(predictions)


def keep_list_transf(predictions: list[Any]) -> list[Any]:
    """Return the predictions of all batches unchanged."""
    return predictions
