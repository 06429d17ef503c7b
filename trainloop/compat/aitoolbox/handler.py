"""AIToolbox's list of callbacks, as ``train_loop.callbacks_handler``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainloop.callbacks.base import AbstractCallback, overrides

__all__ = ["CallbacksHandler"]

# execute_x() and the hook that it calls, in AIToolbox's order.
_HOOKS = {
    "epoch_begin": "on_epoch_begin",
    "epoch_end": "on_epoch_end",
    "train_begin": "on_train_begin",
    "train_end": "on_train_end",
    "batch_begin": "on_batch_begin",
    "batch_end": "on_batch_end",
    "gradient_update": "on_after_gradient_update",
    "optimizer_step": "on_after_optimizer_step",
    "multiprocess_start": "on_multiprocess_start",
    "after_batch_prediction": "on_after_batch_prediction",
}


class CallbacksHandler:
    """Register callbacks before ``fit``, where they run before those that are passed to ``fit``.

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
        """Add callbacks to the loop; with ``cache_callbacks`` they wait for the next call without it, or ``fit``."""
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
            loop.callbacks = sorted([*loop.callbacks, *added], key=lambda callback: callback.execution_order)
        if print_callbacks:
            self.print_registered_callback_names()

    def all_for_fit(self, callbacks: Iterable[AbstractCallback] | None) -> list[Any]:
        """Return every callback of the next ``fit``, each once."""
        cached, self.callbacks_cache = self.callbacks_cache, []
        found = {id(callback): callback for callback in [*self.registered, *cached, *(callbacks or ())]}
        return list(found.values())

    @property
    def registered(self) -> list[AbstractCallback]:
        """The loop's callbacks, without those that implement AIToolbox's behaviour."""
        own = {id(callback) for callback in self.train_loop_obj.own_callbacks()}
        return [callback for callback in self.train_loop_obj.callbacks if id(callback) not in own]

    @property
    def registered_cbs(self) -> list[list[AbstractCallback]]:
        """The callbacks of each hook: of epochs, training, batches, gradients, steps, processes and predictions."""
        return [getattr(self, f"cbs_{hook}") for hook in _HOOKS.values()]

    def print_registered_callback_names(self) -> None:
        """Print the callbacks of each hook."""
        print(self)

    def __getattr__(self, name: str) -> Any:
        prefix, _, what = name.partition("_")
        if prefix == "cbs" and what in AbstractCallback.HOOKS:
            return [callback for callback in self.registered if overrides(callback, what)]
        if prefix != "execute" or what not in _HOOKS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        hook = _HOOKS[what]

        def execute(*args: Any) -> None:
            for callback in self.registered:
                if overrides(callback, hook):
                    getattr(callback, hook)(*args)

        return execute

    def __str__(self) -> str:
        lines = ["CALLBACKS"]
        for hook in _HOOKS.values():
            lines.append(f"At {hook}:")
            lines += [
                f"\t{callback.callback_name}: {type(callback)}, execution_order: {callback.execution_order}"
                for callback in self.registered
                if overrides(callback, hook)
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

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__
