"""The base class of callbacks, and a table of the hooks in the order in which they are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from hashlib import sha256
from pathlib import PurePath
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakSet

from torch import Tensor, nn

from trainloop import distributed
from trainloop._support.keywords import nearest, refuse, table_of, why_not
from trainloop._support.user_line import warn
from trainloop.callbacks.arguments import count_of, number_of
from trainloop.callbacks.loop import Loop
from trainloop.distributed.ranks import on_one_rank
from trainloop.errors import ConfigurationError
from trainloop.model import TTModel

__all__ = [
    "AbstractCallback",
    "HookTable",
    "HooksOfRanks",
    "Saver",
    "identity_of",
    "keeps_state",
    "logs_nothing",
    "matched_entries",
    "overrides_of_user",
    "require_alone",
    "require_loader",
    "runs_first",
    "warn_of_misnamed_hooks",
]

Hook = Callable[..., Any]
HookT = TypeVar("HookT", bound=Hook)

# Hooks that a model may have, to reset state that it carries from batch to batch.
_STEP_HOOKS = (
    "on_batch_begin",
    "on_after_gradient_update",
    "on_after_optimizer_step",
    "on_batch_end",
    "on_log",
)
MODEL_HOOKS = ("on_epoch_begin", "on_evaluation_begin", "on_evaluation_end")


class _OwnSignature:
    """Descriptor for ``__signature__``: returns the signature of ``__init__`` although a base class has ``__new__``."""

    def __get__(self, instance: Any, kind: type) -> inspect.Signature:
        signature = inspect.signature(kind.__init__)  # type: ignore[misc]  # of a class, not of an instance
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class AbstractCallback:
    """Base of all callbacks. Override the hooks that you need; the others cost nothing.

    In ``ddp`` each rank has its own copy of each callback. When ``fit`` returns, the callback that you passed has the
    state of rank 0's copy.

    Parameters
    ----------
    callback_name : str, optional
        Name of the callback in messages, and of its state in checkpoints. Default: the class name.
    execution_order : int
        Callbacks run in ascending order of this value. Callbacks with equal values run in the order of the list.
    device_idx_execution : int, optional
        The only global rank on which the callback runs. Default: every rank. If you restrict a callback to one rank, it
        must not call functions that all ranks have to call together, such as ``predict_on_test_set``.

    Attributes
    ----------
    train_loop_obj : Loop
        The loop; available from ``on_train_loop_registration`` on.

    Examples
    --------
    >>> class StopAt(AbstractCallback):
    ...     def __init__(self, loss):
    ...         super().__init__("stop at a loss")
    ...         self.loss = loss
    ...     def on_epoch_end(self):
    ...         if self.train_loop_obj.history["loss"][-1] < self.loss:
    ...             self.end_training()
    """

    # Names of the hooks, in the order in which they are called; the loop and HookTable read them.
    HOOKS = (
        "on_train_loop_registration",
        "on_multiprocess_start",
        "on_train_begin",
        "on_resume",
        "on_restart",
        "on_epoch_begin",
        "on_batch_begin",
        "on_after_gradient_update",
        "on_after_optimizer_step",
        "on_batch_end",
        "on_evaluation_begin",
        "on_after_batch_prediction",
        "on_evaluation_end",
        "on_log",
        "on_epoch_end",
        "on_train_end",
        "on_exception",
    )

    # None only before registration. No hook runs then, so hooks need not check for None.
    train_loop_obj: Loop = None  # type: ignore[assignment]
    execution_order: int = 0
    device_idx_execution: int | None = None
    shared: tuple[str, ...] = ()
    """Names of attributes that all ranks' copies get from rank 0's copy when training ends, such as a run's ID."""
    state_key: str = ""
    """Distinguishes the saved state from those of other callbacks with the same class and name, such as a metric."""
    _arguments: str = ""  # digest of the arguments that it was made with
    writes: bool = False
    """True if hooks write files or send values to a service, so that ``preflight`` leaves the callback out."""

    if not TYPE_CHECKING:  # type checkers read the arguments of __init__
        __signature__ = _OwnSignature()

        def __new__(cls, *args: Any, **kwargs: Any) -> AbstractCallback:
            """Raise an error if an argument's name is that of another library; the error gives the name used here."""
            parameters = inspect.signature(cls.__init__).parameters if kwargs else {}
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                refuse(cls.__name__, kwargs, list(parameters)[1:])
            callback = super().__new__(cls)
            if args or kwargs:
                vars(callback)["_arguments"] = sha256(_text_of((args, kwargs)).encode()).hexdigest()[:16]
            if not hasattr(cls, "callback_name"):
                # For a class whose __init__ does not call this one, such as a dataclass. Frozen ones refuse setattr.
                vars(callback)["callback_name"] = cls.__name__
            return callback

    def __init__(
        self, callback_name: str | None = None, execution_order: int = 0, device_idx_execution: int | None = None
    ) -> None:
        self.callback_name = callback_name or type(self).__name__
        me = type(self).__name__
        self.execution_order = number_of(me, "execution_order", execution_order)
        self.device_idx_execution = count_of(me, "device_idx_execution", device_idx_execution, least=0, optional=True)

    def register_train_loop_object(self, train_loop_obj: Loop) -> AbstractCallback:
        """Store the loop that this callback works for, then call :meth:`on_train_loop_registration`."""
        HookTable([self], self.device_idx_execution or 0)  # raises errors about hooks' signatures before ranks start
        if self.train_loop_obj is not None and self.train_loop_obj is not train_loop_obj:
            if getattr(self.train_loop_obj, "running", None) is not None:
                raise ConfigurationError(
                    f"the callback {self.callback_name!r} is used by another loop, which is running. Create another "
                    "callback for the inner training."
                )
            self.reset()
        self.train_loop_obj = train_loop_obj
        self.on_train_loop_registration()
        return self

    def log(
        self,
        name: str,
        value: Tensor | float,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce: str = "mean",
        sync_dist: bool = True,
        batch_size: Tensor | float | None = None,
        prog_bar: bool = False,
        rank_zero_only: bool = False,
    ) -> None:
        """Record a metric from a hook, with the arguments of :meth:`.TTModel.log`. By default, all ranks' values count.

        The value is recorded for the hook's epoch: the first epoch in ``on_train_begin``, the last in ``on_train_end``,
        and the interrupted epoch in ``on_exception`` (where only this rank's value counts). If a hook logs at the end
        of an epoch or of the training, callbacks that run later find the value in the history, on all ranks. In the
        hooks of an evaluation, the name gets the prefix of that evaluation.

        Between two steps (for example in ``on_epoch_begin`` and ``on_epoch_end``) ``on_step`` defaults to False, and
        the weight in a mean is 1. All values with one name form one metric, whether callbacks or the model log them,
        and on any rank. In a resumed run, ``on_train_begin`` adds no value to a metric that is already in the
        checkpoint.

        Raises
        ------
        ConfigurationError
            As in :meth:`.TTModel.log`; also if called in ``on_train_loop_registration``, where no epoch runs.
        """
        if self.train_loop_obj is None:
            raise ConfigurationError(
                f"{type(self).__name__}.log({name!r}, ...): the callback has no loop yet. Call log in "
                "on_multiprocess_start or a later hook."
            )
        self.train_loop_obj.log(
            name,
            value,
            on_step=on_step,
            on_epoch=on_epoch,
            reduce=reduce,
            sync_dist=sync_dist,
            batch_size=batch_size,
            prog_bar=prog_bar,
            rank_zero_only=rank_zero_only,
        )

    def end_training(self, reason: str = "") -> None:
        """End training after this step (in ``on_epoch_end``, after this epoch), and print the reason.

        All ranks end at the same step; if only some ranks call it, this may be one or a few steps later.
        """
        self.train_loop_obj.end_training(self, reason)

    def ends_again(self, state: dict[str, Any]) -> bool:
        """Return True if the callback, with its current arguments, would end the same run again. Default: True.

        Parameters
        ----------
        state : dict
            The callback's :meth:`~.AbstractCallback.state_dict` from that run.
        """
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints, of rank 0 for all ranks: plain types and tensors. Default: empty."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` returned. Called after :meth:`~.AbstractCallback.on_train_begin`."""

    def rank_state_dict(self) -> dict[str, Any]:
        """Return this rank's own state, for checkpoints and for another ``fit``. Called on every rank.

        It consists of plain types and tensors. Use it for what differs between ranks, such as environments and
        generators. :meth:`state_dict` is called on rank 0 only, and its result is loaded on all ranks. If a run resumes
        with another number of ranks, per-rank state can't be loaded, and a warning names the callback.
        """
        return {}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that :meth:`rank_state_dict` returned on this rank."""

    def uses_hook(self, name: str) -> bool:
        """Return True if the loop must call a hook: if it is overridden, in the class or on the instance.

        Override it for a hook that only some settings need, since each call in every step costs time.
        """
        return name in self.__dict__ or getattr(type(self), name) is not getattr(AbstractCallback, name)

    def reset(self) -> None:
        """Forget everything about the loop that this callback worked for; another loop is about to use it.

        Called before :meth:`~.AbstractCallback.on_train_loop_registration` if the callback was last used by another
        loop, as in cross-validation. A second ``fit`` of the same loop does not call it. Override it in a callback that
        counts or compares over a whole training.
        """

    def on_train_loop_registration(self) -> None:
        """Called in the process that calls ``fit``, before ranks start. Check arguments here."""

    def on_multiprocess_start(self) -> None:
        """Called on each rank, before its loaders are split. Create per-rank data here.

        It is called in ``single`` and ``dp``, too, so that the same script works in all modes.
        """

    def on_train_begin(self) -> None:
        """Called on each rank once the model and the loaders are ready, and before a checkpoint is loaded.

        In a run that resumes, ``train_loop_obj.resumed`` is True, and ``epoch`` and ``global_step`` are those of the
        checkpoint. A callback that changed the model's structure in the checkpoint's run must do so again here, so that
        the checkpoint fits: it has the values, not the structure.
        """

    def on_resume(self) -> None:
        """Called on each rank once a checkpoint has been loaded, by ``resume_from`` or by a restart.

        It is called after ``load_state_dict`` and ``load_rank_state_dict``, and before ``on_restart``. Restore here
        what checkpoints do not contain: the loader of this stage of a curriculum, replaced labels, a rate.
        ``train_loop_obj.epoch`` and ``global_step`` are those of the checkpoint. If the run resumes in the middle of an
        epoch, ``on_epoch_begin`` is not called for this epoch. It is not called if the run has ended.
        """

    def on_restart(self, failure: Any) -> None:
        """Called on each rank when a run restarts after a failure, once the newest checkpoint is loaded.

        Ranks are new processes: ``on_multiprocess_start`` and ``on_train_begin`` have already been called. Attributes
        have the values from the call to ``fit``, unless :meth:`load_state_dict` has restored them.

        Parameters
        ----------
        failure : trainloop.train_loop.execution.restarts.Restart
            The restart, with attributes such as ``rank``, ``cause``, ``step`` (after which training resumes) and
            ``steps_repeated``.
        """

    def on_epoch_begin(self) -> None:
        """Called before an epoch's first batch. Not called for an epoch that is resumed in the middle."""

    def on_batch_begin(self) -> None:
        """Called before each (micro-)batch."""

    def on_after_gradient_update(self, optimizer_idx: int = 0) -> None:
        """Called before the optimizer step, with complete gradients (from all micro-batches and ranks, unscaled)."""

    def on_after_optimizer_step(self) -> None:
        """Called once all optimizers have stepped. ``train_loop_obj.step_skipped`` is True if AMP skipped the step."""

    def on_batch_end(self) -> None:
        """Called after each (micro-)batch."""

    def on_evaluation_begin(self, dataset_info: dict[str, Any]) -> None:
        """Called on all ranks before a pass over a dataset for its loss or predictions, inside or outside ``fit``.

        The model is already in evaluation mode, and gradients are disabled. Random numbers drawn here do not affect the
        training.

        Parameters
        ----------
        dataset_info : dict
            ``type`` is ``'train'``, ``'validation'``, ``'test'`` or ``'other'``; ``pass`` is ``'loss'`` or
            ``'predictions'``. If you pass ``dataset_info`` to ``predict_with_model``, its entries are added. Each pass
            has its own dict.
        """

    def on_evaluation_end(self, dataset_info: dict[str, Any]) -> None:
        """Called after the last batch of a pass, with its ``dataset_info``; values logged here are values of the pass.

        Predictions have not been gathered yet. The hook is not called if the pass ended with an exception.
        """

    def on_after_batch_prediction(
        self, y_pred_batch: Any, y_test_batch: Any, metadata_batch: Any, dataset_info: dict[str, Any]
    ) -> None:
        """Called on a rank after each of its batches in ``predict_on_*``, with the result of ``get_predictions``."""

    def on_log(self, rows: Sequence[tuple[int, dict[str, float]]]) -> None:
        """Called on rank 0 when logs are flushed. Each row is one step: ``(global_step, {name: mean over ranks})``."""

    def on_epoch_end(self) -> None:
        """Called after an epoch, when its values, including ``val_loss``, are in ``train_loop_obj.history``."""

    def on_train_end(self) -> None:
        """Called when training has ended as planned or early; not called after an exception."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when an exception ends training; the exception is raised again afterwards."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(execution_order={self.execution_order})"


class Saver(AbstractCallback):
    """Base of callbacks that write checkpoints between steps. The loop calls the methods below on all ranks.

    Their ``on_epoch_end`` is called after that of all other callbacks, whatever their ``execution_order``, since the
    values that these log must be in the checkpoint.
    """

    @property
    def dirpath(self) -> str:
        """Absolute path or URL of the folder."""
        return ""

    def save_due(self) -> None:
        """Write a checkpoint if one is due; called after the last hook of a step."""

    def save_now(self, reason: str) -> None:
        """Write a checkpoint before a signal ends training."""

    def save_finished(self) -> None:
        """Write a checkpoint at the end of training, after all other callbacks' last hooks."""

    def write_into(self, folder: str) -> None:
        """Write to another folder from now on, to try the callback out. Called before a training."""

    def save_held(self, state: dict[str, Any]) -> str | None:
        """Write the state of the last finished step after a failure; return the path. Only rank 0 calls it."""
        return None


class HookTable:
    """The hooks that callbacks override. Each attribute is a hook with its functions, as a tuple in execution order.

    The table is built before the first step, and again when an epoch begins if it is :meth:`outdated`. A hook that no
    callback overrides is an empty tuple and costs nothing.

    Parameters
    ----------
    callbacks : sequence of AbstractCallback
    rank : int
        Rank of this process; callbacks restricted to other ranks are left out.
    model : nn.Module, optional
        Model whose own hooks are called before the hooks of callbacks; see :class:`trainloop.TTModel`.
    guarded : callable, optional
        Takes a hook, and returns the function to call in its place.

    Raises
    ------
    ConfigurationError
        If a hook can't be called with the loop's arguments.
    """

    def __init__(
        self,
        callbacks: Sequence[AbstractCallback],
        rank: int = 0,
        model: nn.Module | None = None,
        guarded: Callable[[Hook], Hook] = lambda hook: hook,
    ) -> None:
        self._read_from = callbacks, model
        self._own = _own_hooks(*self._read_from)
        # The sort is stable: callbacks with equal values stay in the order in which they were passed.
        ordered = sorted(callbacks, key=lambda cb: cb.execution_order)
        local = [cb for cb in ordered if cb.device_idx_execution in (None, rank)]
        for name in AbstractCallback.HOOKS:
            model_hooks = [_hook(model, name)] if name in MODEL_HOOKS and _model_overrides(model, name) else []
            called = sorted(local, key=lambda cb: not hasattr(getattr(cb, name), "runs_first"))
            hooks = (_on_its_ranks(cb, name) for cb in called if cb.uses_hook(name))
            setattr(self, name, tuple(map(guarded, (*model_hooks, *hooks))))

        self.in_steps = any(getattr(self, name) for name in _STEP_HOOKS)  # callbacks may change something then
        # This includes callbacks of other ranks: all ranks go through the same list, and exchange logs after each hook.
        savers_last = sorted(ordered, key=lambda cb: isinstance(cb, Saver))
        self._in_turn = {
            name: tuple(
                (
                    guarded(_on_its_ranks(cb, name)) if cb in local else None,
                    not hasattr(getattr(cb, name), "logs_nothing"),
                )
                for cb in callbacks_in_turn
                if cb.uses_hook(name)
            )
            for name, callbacks_in_turn in (("on_epoch_end", savers_last), ("on_train_end", ordered))
        }

    def outdated(self) -> bool:
        """Return True if hooks have been assigned to a callback or the model, or its order or rank has changed."""
        return _own_hooks(*self._read_from) != self._own

    def in_turn(self, name: str) -> tuple[tuple[Hook | None, bool], ...]:
        """Return a pair for each callback: its hook, and True if the hook may log.

        The hook is ``None`` if the callback is restricted to another rank.
        """
        return self._in_turn[name]

    def __getattr__(self, name: str) -> tuple[Hook, ...]:
        # Only for type checkers and misspelled names: __init__ sets every real hook.
        raise AttributeError(f"there is no hook {name!r}; hooks are {', '.join(AbstractCallback.HOOKS)}")


class HooksOfRanks(NamedTuple):
    """What callbacks of any rank do for which all ranks exchange something: under a launcher, ranks may have others."""

    alike: bool
    """True if all ranks have as many callbacks that may log at an epoch's end, in the same order."""
    on_log: bool
    on_train_end: bool
    shared: bool

    @classmethod
    def of(cls, callbacks: Sequence[AbstractCallback]) -> HooksOfRanks:
        """Return what a rank's callbacks do, if all ranks have them."""
        ends = any(callback.uses_hook("on_train_end") and not isinstance(callback, Saver) for callback in callbacks)
        logs = any(callback.uses_hook("on_log") for callback in callbacks)
        return cls(alike=True, on_log=logs, on_train_end=ends, shared=any(callback.shared for callback in callbacks))


def overrides_of_user(callback: AbstractCallback, name: str) -> bool:
    """Return True if a hook is overridden outside of this package."""
    owner = next((cls for cls in type(callback).__mro__ if name in vars(cls)), AbstractCallback)
    return name in callback.__dict__ or owner.__module__.partition(".")[0] != "trainloop"


def identity_of(callback: AbstractCallback) -> dict[str, str]:
    """Return the part of a callback's saved entry by which :func:`matched_entries` finds the callback again."""
    return {
        "type": type(callback).__name__,
        "name": callback.callback_name,
        "key": callback.state_key,
        "arguments": callback._arguments,
    }


def matched_entries(
    callbacks: list[Any], saved: list[dict[str, Any]]
) -> tuple[list[tuple[Any, dict[str, Any]]], list[dict[str, Any]]]:
    """Return the callbacks with their saved entries, found by type and name, and the entries that are left.

    Positions change when a callback is added to the list, so those with equal names are matched by ``state_key`` and
    the arguments that they were made with, and only equal ones are matched in order.
    """
    left, found = list(saved), {}
    # The arguments or the key may have changed, and older checkpoints have none.
    for parts in (("type", "name", "key", "arguments"), ("type", "name", "key"), ("type", "name")):
        for number, callback in enumerate(callbacks):
            own = identity_of(callback)
            same = (entry for entry in left if all(entry.get(part, "") == own[part] for part in parts))
            if number not in found and (entry := next(same, None)) is not None:
                left = [other for other in left if other is not entry]
                found[number] = entry
    return [(callbacks[number], found[number]) for number in sorted(found)], left


def require_alone(callback: AbstractCallback, kind: type[AbstractCallback]) -> None:
    """Raise ConfigurationError if the loop of a callback has several callbacks of a class."""
    if sum(isinstance(one, kind) for one in callback.train_loop_obj.callbacks) > 1:
        raise ConfigurationError(f"callbacks has several {kind.__name__}s: pass only one.")


def require_loader(loop: Any, loader: str, owner: str) -> None:
    """Raise ConfigurationError if the loop does not have this loader.

    The error names ``owner`` as the part that needs it.
    """
    if getattr(loop, loader) is None:
        raise ConfigurationError(f"{owner}: the loop has no {loader}. Pass one to TrainLoop.")


def logs_nothing(hook: HookT) -> HookT:
    """Mark a hook that logs nothing, so that ranks need no exchange after it."""
    hook.logs_nothing = True  # type: ignore[attr-defined]
    return hook


def keeps_state(hook: HookT) -> HookT:
    """Mark an ``on_epoch_end`` that does not change its callback's state, so that no copy of it is made before."""
    hook.keeps_state = True  # type: ignore[attr-defined]
    return hook


def runs_first(hook: HookT) -> HookT:
    """Mark a hook that is called before those of all other callbacks, whatever its callback's ``execution_order``."""
    hook.runs_first = True  # type: ignore[attr-defined]
    return hook


def _text_of(value: Any, depth: int = 0) -> str:
    """Return a text that is equal for equal arguments, also in other processes; of most objects, only the class."""
    if type(value) in (type(None), bool, int, float, complex, str, bytes):
        return repr(value)
    if isinstance(value, PurePath):
        return repr(str(value))
    if type(value) is dict:
        value = sorted(value.items(), key=lambda item: str(item[0]))
    if type(value) in (tuple, list) and depth < 8:  # a list may contain itself
        return f"({', '.join(_text_of(one, depth + 1) for one in value)})"
    return value.__qualname__ if isinstance(value, (type, FunctionType)) else type(value).__qualname__


def _own_hooks(callbacks: Sequence[AbstractCallback], model: nn.Module | None) -> list[Any]:
    """Return what a table depends on and may change in training: hooks on the objects themselves, order and rank."""
    found: list[Any] = [] if model is None else [vars(model).get(name) for name in MODEL_HOOKS]
    for callback in callbacks:
        own = vars(callback)
        found.append((callback.execution_order, callback.device_idx_execution))
        found += [(name, own[name]) for name in AbstractCallback.HOOKS if name in own]
    return found


def _model_overrides(model: nn.Module | None, name: str) -> bool:
    # A model need not be a TTModel, but must have the methods of one.
    if model is None:
        return False
    assigned = name in vars(model) or getattr(type(model), name, None) is not getattr(TTModel, name)
    return assigned and callable(getattr(model, name, None))


def _on_its_ranks(callback: AbstractCallback, name: str) -> Hook:
    """Return a callback's hook; if the callback runs on one rank only, what needs all ranks is an error in it."""
    hook = _hook(callback, name)
    if callback.device_idx_execution is None:
        return hook

    @wraps(hook)
    def alone(*args: Any) -> None:
        with on_one_rank(callback.callback_name):
            hook(*args)

    return alone


def _hook(callback: Any, name: str) -> Hook:
    """Return a callback's hook. If it takes fewer arguments than the loop passes, wrap it to drop the last ones."""
    method: Hook = getattr(callback, name)
    offered = _NUM_ARGUMENTS[name]
    if not callable(method):
        raise _no_hook(callback, name, f" is {method!r}, which can't be called")
    if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
        raise _no_hook(callback, name, " is async or contains yield, so calling it would not run it")
    for count in range(offered, -1, -1):
        if not why_not(method, *[None] * count):
            return method if count == offered else wraps(method)(partial(_call_with_fewer, method, count))
    takes = inspect.signature(getattr(method, "__func__", method))
    raise _no_hook(callback, name, f"{takes} does not accept the arguments that the loop passes")


def _no_hook(callback: Any, name: str, fact: str) -> ConfigurationError:
    asked = inspect.signature(getattr(AbstractCallback, name))
    return ConfigurationError(f"{type(callback).__name__}.{name}{fact}. Define it as {name}{asked}.")


def _call_with_fewer(method: Hook, taken: int, *arguments: Any) -> Any:
    return method(*arguments[:taken])


# Number of arguments that the loop passes to each hook.
_NUM_ARGUMENTS = {
    name: len(inspect.signature(getattr(AbstractCallback, name)).parameters) - 1 for name in AbstractCallback.HOOKS
}


# -- hooks with names that fit never calls -----------------------------------------------------------------------------


# Names of hooks in Lightning, Ignite, Keras, TorchTNT and Transformers, and the name of the matching hook here.
_EQUIVALENTS = table_of(
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
# Above this similarity, a name is probably a misspelled hook ("on_epoch_ends") and not a user's method ("on_request").
_NEAR = 0.85

_warned: WeakSet[type] = WeakSet()


def warn_of_misnamed_hooks(callbacks: Iterable[AbstractCallback], model: Any) -> None:
    """Warn once per class about methods that look like hooks but are never called.

    If a base class from another library defines the method, it is a hook of that library and causes no warning.

    Parameters
    ----------
    callbacks : iterable of AbstractCallback
    model : nn.Module
        The loop's model. Models have only a few hooks; see :class:`trainloop.TTModel`.
    """
    if not distributed.is_global_zero():  # all ranks that a launcher started call this
        return
    for kind in dict.fromkeys([*(type(callback) for callback in callbacks), type(model)]):
        if kind not in _warned:
            for name, hook in _misnamed(kind):
                _warned.add(kind)
                warn(f"{kind.__name__}.{name} is not called by fit: {_remedy(kind, hook)}", UserWarning)


def _misnamed(kind: type) -> Iterator[tuple[str, str]]:
    """Yield each method of a user's class that resembles a hook but is not one, and the name of that hook."""
    base = AbstractCallback if issubclass(kind, AbstractCallback) else TTModel
    classes = [cls for cls in kind.__mro__ if issubclass(cls, base) and cls.__module__.partition(".")[0] != "trainloop"]
    seen = {name for cls in kind.__mro__ if cls not in classes for name in vars(cls)}
    for cls in classes:
        for name, value in vars(cls).items():
            if name.startswith("on_") and name not in seen and isinstance(value, (FunctionType, staticmethod)):
                seen.add(name)
                hook = _EQUIVALENTS.get(name) or nearest(name.lower(), AbstractCallback.HOOKS, _NEAR)
                if hook is not None:
                    yield name, hook


def _remedy(kind: type, hook: str) -> str:
    if issubclass(kind, AbstractCallback) or hook in MODEL_HOOKS:
        what = "hook" if hook in AbstractCallback.HOOKS else "method"
        return f"no {what} has this name. Did you mean {hook}?"
    return f"a model's hooks are {', '.join(MODEL_HOOKS)}. A callback has {hook}."
