"""Small callbacks: functions at hooks, subsets of the data, loaders created in ranks, plots of the history, ..."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from torch.utils.data import DataLoader, IterableDataset

from trainloop._support.distribution import import_extra
from trainloop.callbacks.base import AbstractCallback, count_of, require_loader
from trainloop.callbacks.early_stopping import EarlyStopping, ThresholdEarlyStopping, TimeLimit
from trainloop.callbacks.nan import TerminateOnNaN
from trainloop.errors import ConfigurationError

__all__ = [
    "AllPredictionsSame",
    "DataSubsetTestRun",
    "EarlyStopping",
    "FunctionOnTrainLoop",
    "InMultiProcessDataLoad",
    "ListRegisteredCallbacks",
    "TerminateOnNaN",
    "ThresholdEarlyStopping",
    "TimeLimit",
    "TrainHistoryPlot",
]


class ListRegisteredCallbacks(AbstractCallback):
    """Print the callbacks of the run, in the order in which they are called.

    Examples
    --------
    >>> tl.fit(num_epochs=1, callbacks=[ListRegisteredCallbacks(), EarlyStopping()])
    Callbacks: ListRegisteredCallbacks, EarlyStopping
    """

    def __init__(self) -> None:
        super().__init__("ListRegisteredCallbacks", device_idx_execution=0)

    def on_train_begin(self) -> None:
        callbacks = sorted(self.train_loop_obj.callbacks, key=lambda callback: callback.execution_order)
        print(f"Callbacks: {', '.join(callback.callback_name for callback in callbacks)}")


@dataclass(eq=False, repr=False)
class AllPredictionsSame(AbstractCallback):
    """Detect that a model predicts the same value for all samples, which can happen if classes are unbalanced.

    The callback predicts the validation set after each epoch.

    Parameters
    ----------
    value : float, optional
        The value to look for. ``None`` for any value.
    stop_training : bool
        End training if all predictions are the same.
    verbose : bool
        Print a line if all predictions are the same.

    Examples
    --------
    >>> tl.fit(num_epochs=10, callbacks=[AllPredictionsSame(value=0, stop_training=True)])
    """

    value: float | None = 0.0
    stop_training: bool = False
    verbose: bool = True

    def __post_init__(self) -> None:
        super().__init__("AllPredictionsSame")

    def on_train_loop_registration(self) -> None:
        require_loader(self.train_loop_obj, "validation_loader", "AllPredictionsSame")

    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        predictions = loop.predict_on_validation_set()[0]
        if not len(predictions):
            return
        value = predictions[0] if self.value is None else self.value
        if not all(_same(prediction, value) for prediction in predictions):
            return
        if self.verbose and loop.is_main_process():
            ending = "; training ends" if self.stop_training else ""
            text = f"All {len(predictions)} predictions are {value} after epoch {loop.epoch + 1}{ending}."
            loop.report(text, logging.WARNING)
        if self.stop_training:
            loop.early_stop = True


def _same(prediction: Any, value: Any) -> bool:
    equal = prediction == value
    return bool(equal.all() if hasattr(equal, "all") else equal)


class DataSubsetTestRun(AbstractCallback):
    """Train or evaluate on only the first few batches, to test that a script runs to its end, or to validate faster.

    The loop's loaders are replaced with shorter ones, and stay replaced after ``fit``. The loaders that you passed to
    the loop are not changed. The first batches are chosen once, so every epoch has the same batches. In ``ddp`` they
    are split over the ranks.

    Parameters
    ----------
    num_train_batches, num_val_batches, num_test_batches : int
        Number of batches to keep; 0 keeps the whole set. At least one number must be positive.

    Raises
    ------
    ConfigurationError
        If a number is out of range; at ``fit``, if a loader that should be shortened is missing.

    Examples
    --------
    >>> tl.fit(num_epochs=1, callbacks=[DataSubsetTestRun(num_train_batches=2, num_val_batches=1)])
    >>> tl.fit(num_epochs=9, callbacks=[DataSubsetTestRun(num_train_batches=0, num_val_batches=50)])
    """

    def __init__(self, num_train_batches: int = 1, num_val_batches: int = 0, num_test_batches: int = 0) -> None:
        super().__init__("DataSubsetTestRun", execution_order=-100)
        me = "DataSubsetTestRun"
        self.num_batches = {
            "train_loader": count_of(me, "num_train_batches", num_train_batches, least=0),
            "validation_loader": count_of(me, "num_val_batches", num_val_batches, least=0),
            "test_loader": count_of(me, "num_test_batches", num_test_batches, least=0),
        }
        if not any(self.num_batches.values()):
            raise ConfigurationError(f"{me}: all three numbers are 0, so no loader would be shortened. Leave it out.")

    def on_train_loop_registration(self) -> None:
        loop = self.train_loop_obj
        for name, number in self.num_batches.items():
            if number:
                require_loader(loop, name, f"DataSubsetTestRun takes {number} batches of {name}")
        for name, number in self.num_batches.items():
            if number:
                setattr(loop, name, _first_batches(getattr(loop, name), number))


def _first_batches(loader: Any, number: int) -> Any:
    """Return a loader with the first batches of ``loader``."""
    indexed = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if indexed and loader.batch_sampler is not None:
        indices = [list(batch) for batch in islice(loader.batch_sampler, number)]
        # Without workers: starting them takes longer than loading a few batches.
        return DataLoader(loader.dataset, batch_sampler=indices, collate_fn=loader.collate_fn)
    return list(islice(loader, number))


# Arguments of FunctionOnTrainLoop, and the hooks that they select.
_POINTS = {
    "tl_registration": "on_train_loop_registration",
    "epoch_begin": "on_epoch_begin",
    "epoch_end": "on_epoch_end",
    "train_begin": "on_train_begin",
    "train_end": "on_train_end",
    "batch_begin": "on_batch_begin",
    "batch_end": "on_batch_end",
    "after_gradient_update": "on_after_gradient_update",
    "after_optimizer_step": "on_after_optimizer_step",
}


@dataclass(eq=False, repr=False)
class FunctionOnTrainLoop(AbstractCallback):
    """Call a function with the loop at chosen points of the training.

    Parameters
    ----------
    fn_to_execute : callable
        Function to call with the loop.
    tl_registration, epoch_begin, epoch_end, train_begin, train_end, batch_begin, batch_end : bool
        When to call it.
    after_gradient_update, after_optimizer_step : bool
        When to call it within a step.
    execution_order, device_idx_execution
        As in :class:`AbstractCallback`.

    Raises
    ------
    ConfigurationError
        If no point is chosen, or ``fn_to_execute`` is not callable.

    Examples
    --------
    >>> FunctionOnTrainLoop(lambda tl: print(tl.history), epoch_end=True, device_idx_execution=0)
    """

    fn_to_execute: Callable[[Any], Any]
    tl_registration: bool = False
    epoch_begin: bool = False
    epoch_end: bool = False
    train_begin: bool = False
    train_end: bool = False
    batch_begin: bool = False
    batch_end: bool = False
    after_gradient_update: bool = False
    after_optimizer_step: bool = False
    execution_order: int = 0
    device_idx_execution: int | None = None
    may_do_nothing: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__init__("FunctionOnTrainLoop", self.execution_order, self.device_idx_execution)
        if not callable(self.fn_to_execute):
            raise ConfigurationError(f"FunctionOnTrainLoop: fn_to_execute={self.fn_to_execute!r}: must be a function.")
        self.hooks = [hook for point, hook in _POINTS.items() if getattr(self, point)]
        if not self.hooks and not self.may_do_nothing:
            raise ConfigurationError(
                "FunctionOnTrainLoop: choose when to call the function, for example with epoch_end=True."
            )
        self._take_hooks()

    def execute_callback(self) -> None:
        """Call the function."""
        self.fn_to_execute(self.train_loop_obj)

    def _take_hooks(self) -> None:
        # Set on the instance, so that hooks that were not chosen cost nothing.
        for name in self.hooks:
            setattr(self, name, self.execute_callback)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self.hooks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take_hooks()


class InMultiProcessDataLoad(AbstractCallback):
    """Create loaders in each rank of ``ddp`` instead of sending them to the ranks.

    Pass this callback as ``fit(in_process_data_load=...)``; ``train_loader=None`` is then allowed. The loop shards
    these loaders like any others.

    Parameters
    ----------
    train_loader_build_fn, val_loader_build_fn, test_loader_build_fn : callable, optional
        Functions without arguments that return the loader. Default: the loop keeps its loader. A subclass can instead
        override :meth:`build_train_dataloader`, :meth:`build_val_dataloader` or :meth:`build_test_dataloader`; then
        pass ``True`` for that loader.

    Raises
    ------
    ConfigurationError
        If an argument is not callable, and the subclass does not override the matching ``build_*`` method.

    Examples
    --------
    >>> load = InMultiProcessDataLoad(train_loader_build_fn=make_train_loader)
    >>> tl.fit(num_epochs=10, in_process_data_load=load)
    """

    def __init__(
        self,
        train_loader_build_fn: Callable[[], Any] | bool | None = None,
        val_loader_build_fn: Callable[[], Any] | bool | None = None,
        test_loader_build_fn: Callable[[], Any] | bool | None = None,
    ) -> None:
        super().__init__("InMultiProcessDataLoad")
        self.train_loader_build_fn = train_loader_build_fn
        self.val_loader_build_fn = val_loader_build_fn
        self.test_loader_build_fn = test_loader_build_fn
        for part in ("train", "val", "test"):
            name, method = f"{part}_loader_build_fn", f"build_{part}_dataloader"
            build = getattr(self, name)
            overridden = getattr(type(self), method) is not getattr(InMultiProcessDataLoad, method)
            if not (build is None or build is False or callable(build) or (build is True and overridden)):
                raise ConfigurationError(
                    f"{type(self).__name__}: {name}={build!r}: must be a function that returns a loader, or None."
                )

    def on_multiprocess_start(self) -> None:
        loop = self.train_loop_obj
        if self.train_loader_build_fn:
            loop.train_loader = self.build_train_dataloader()
        if self.val_loader_build_fn:
            loop.validation_loader = self.build_val_dataloader()
        if self.test_loader_build_fn:
            loop.test_loader = self.build_test_dataloader()

    def build_train_dataloader(self) -> Any:
        """Create the training loader in the rank, and return it."""
        return _call(self.train_loader_build_fn)

    def build_val_dataloader(self) -> Any:
        """Create the validation loader in the rank, and return it."""
        return _call(self.val_loader_build_fn)

    def build_test_dataloader(self) -> Any:
        """Create the test loader in the rank, and return it."""
        return _call(self.test_loader_build_fn)


def _call(build: Callable[[], Any] | bool | None) -> Any:
    assert callable(build), "checked at construction"
    return build()


class TrainHistoryPlot(AbstractCallback):
    """Plot the history into a file that is replaced after each epoch.

    Parameters
    ----------
    path : str or path
        File to write; its suffix sets the format, such as ``.png``, ``.pdf`` or ``.svg``.
    every_n_epochs : int
        Epochs between two plots; the history is always plotted at the end of training.

    Raises
    ------
    ConfigurationError
        If ``every_n_epochs`` is below 1; at ``fit``, if matplotlib is missing.

    Examples
    --------
    >>> tl.fit(num_epochs=10, callbacks=[TrainHistoryPlot("history.png")])
    """

    def __init__(self, path: str | os.PathLike[str] = "train_history.png", every_n_epochs: int = 1) -> None:
        super().__init__("TrainHistoryPlot", execution_order=97, device_idx_execution=0)
        self.path = os.path.expanduser(os.fspath(path))
        self.every_n_epochs = count_of("TrainHistoryPlot", "every_n_epochs", every_n_epochs)

    def on_train_loop_registration(self) -> None:
        import_extra("matplotlib", "TrainHistoryPlot", "plot")

    def on_epoch_end(self) -> None:
        if (self.train_loop_obj.epoch + 1) % self.every_n_epochs == 0:
            self._plot()

    def on_train_end(self) -> None:
        self._plot()

    def _plot(self) -> None:
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        self.train_loop_obj.history.plot(self.path)
