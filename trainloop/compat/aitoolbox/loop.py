"""AIToolbox's ``TrainLoop``, with AIToolbox's arguments, attributes, history and epoch numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainloop import train_loop as core
from trainloop._support.user_line import warn
from trainloop.callbacks.base import AbstractCallback, require_loader
from trainloop.callbacks.train_schedule import AbstractScheduler
from trainloop.compat.aitoolbox.components import (
    CallbacksHandler,
    MessageService,
    ModelPredictionStore,
    append_predictions,
    torch_cat_transf,
)
from trainloop.compat.aitoolbox.history import TrainingHistory
from trainloop.compat.aitoolbox.models import as_loader
from trainloop.compat.aitoolbox.optim import MultiLoss, MultiOptimizer, as_optimizer
from trainloop.errors import ConfigurationError
from trainloop.model import ModelWrap
from trainloop.train_loop.argument_types import Amp, GpuMode

_FIRST, _LAST = -(10**9), 10**9  # execution orders before and after all callbacks of a script


class TrainLoop(core.TrainLoop):
    """A loop with AIToolbox's arguments in AIToolbox's order. Further arguments are passed by keyword.

    Parameters
    ----------
    model, train_loader, validation_loader, test_loader, optimizer, criterion
        As in :class:`trainloop.TrainLoop`. The model may already be wrapped in a ``TTDataParallel``.
    collate_batch_pred_fn, pred_transform_fn : callable
    end_auto_eval : bool or int
        If True, evaluate the losses of the training and the validation set after each epoch (``train_history['loss']``,
        ``['val_loss']``), and of the test set at the end (``['train_end_test_loss']``). If False, don't evaluate. For
        an int n, evaluate after every n-th epoch, beginning with the first.
    lazy_experiment_save : bool
        Create an experiment's folder only when the first file is written.
    print_callbacks : bool
        Print the callbacks when training begins.
    gpu_mode, cuda_device_idx, use_amp
        As in :class:`trainloop.TrainLoop`.
    **options
        Other arguments of :class:`trainloop.TrainLoop`, such as ``accelerator``, ``devices`` and ``seed``.
    """

    def __init__(
        self,
        model: Any,
        train_loader: Any,
        validation_loader: Any,
        test_loader: Any,
        optimizer: Any,
        criterion: Any,
        collate_batch_pred_fn: Any = append_predictions,
        pred_transform_fn: Any = torch_cat_transf,
        end_auto_eval: bool | int = True,
        lazy_experiment_save: bool = False,
        print_callbacks: bool = False,
        gpu_mode: GpuMode = "single",
        cuda_device_idx: int | None = None,
        use_amp: Amp = False,
        **options: Any,
    ) -> None:
        if isinstance(model, nn.DataParallel):  # a script may wrap the model itself
            model, gpu_mode = model.module, "dp" if gpu_mode == "single" else gpu_mode
        # For tensors, AIToolbox's default functions do the same as trainloop's own, which can join other values, too.
        if collate_batch_pred_fn is not append_predictions:
            options["collate_batch_pred_fn"] = collate_batch_pred_fn
        if pred_transform_fn is not torch_cat_transf:
            options["pred_transform_fn"] = pred_transform_fn
        super().__init__(
            model,
            as_loader(train_loader),
            as_loader(validation_loader),
            as_loader(test_loader),
            as_optimizer(optimizer, model.parameters() if isinstance(model, nn.Module) else ()),
            criterion,
            end_auto_eval=False,  # _Bookkeeping evaluates, in AIToolbox's order and with its names
            gpu_mode=gpu_mode,
            cuda_device_idx=cuda_device_idx,
            use_amp=use_amp,
            **options,
        )
        if not isinstance(end_auto_eval, (bool, int)) or end_auto_eval < 0:
            raise ConfigurationError(f"end_auto_eval={end_auto_eval!r}: must be True, False or a number of epochs.")
        self.auto_eval = end_auto_eval
        self.lazy_experiment_save = lazy_experiment_save
        self.print_callbacks = print_callbacks
        self.use_amp = use_amp is not False
        self.amp_scaler_init = use_amp if isinstance(use_amp, dict) else {}
        self.batch_model_feed_def = model.batch_model_feed_def if isinstance(model, ModelWrap) else None
        self.num_optimizers = len(optimizer) if isinstance(optimizer, MultiOptimizer) else 1
        self.experiment_timestamp = time.strftime("%Y-%m-%d_%H-%M-%S")
        self.message_service = MessageService()
        self.prediction_store = ModelPredictionStore(auto_purge=True)
        self.grad_cb_used = False
        self.ddp_handler = None
        self._book = _Bookkeeping(TrainingHistory(has_validation=validation_loader is not None))
        self._end_of_batch = _EndOfBatch(self._book)
        self.callbacks_handler = CallbacksHandler(self)

    # -- fit -----------------------------------------------------------------------------------------------------------

    def fit(
        self,
        num_epochs: int = 0,
        num_iterations: int = 0,
        callbacks: Sequence[AbstractCallback] | None = None,
        grad_accumulation: int = 1,
        **kwargs: Any,
    ) -> Any:
        """Train up to epoch ``num_epochs``, and return the model, or the module in a ``ModelWrap``.

        As in AIToolbox, a later ``fit`` begins with the number of the last epoch.
        """
        if kwargs.get("on_gpu") is False and kwargs.get("num_gpus"):
            ranks = kwargs.pop("num_gpus")  # used on the CPU, ignored in other modes
            if self.gpu_mode == "ddp":
                self.options = replace(self.options, devices=ranks)
        if kwargs.get("init_method") == "env://":  # MASTER_ADDR and MASTER_PORT, which is the default
            kwargs["init_method"] = None
        if kwargs.get("on_gpu") is False and kwargs.get("backend") == "nccl":
            kwargs["backend"] = None
        self._book.num_epochs, self._book.print_callbacks = num_epochs, self.print_callbacks
        given = self.callbacks_handler.all_for_fit(callbacks)
        model = super().fit(num_epochs, num_iterations, given, grad_accumulation, **kwargs)
        return model.model if isinstance(model, ModelWrap) else model

    def register_callback(self, callback: AbstractCallback) -> None:
        """Register a callback once instead of in every ``fit``, because its registration may load a checkpoint."""
        if getattr(callback, "train_loop_obj", None) is not self:
            super().register_callback(callback)

    def place_criterion(self) -> None:
        """Move the criterion to the device, even if it is another object that has ``to``."""
        if not isinstance(self.criterion, nn.Module) and callable(getattr(self.criterion, "to", None)):
            self.criterion = self.criterion.to(self.device)

    def own_callbacks(self) -> list[AbstractCallback]:
        """Internal callbacks that implement AIToolbox's behaviour. They run before and after all other callbacks."""
        return [self._book, self._end_of_batch]

    # -- attributes for callbacks --------------------------------------------------------------------------------------

    @property
    def train_history(self) -> TrainingHistory:
        """Results under AIToolbox's names. ``history`` has trainloop's own names."""
        return self._book.train_history

    @train_history.setter
    def train_history(self, history: TrainingHistory) -> None:
        self._book.train_history = history

    @property
    def iteration(self) -> int:
        """Index of the current batch in its epoch."""
        return max(self.total_iteration_idx - self._book.epoch_start, 0)

    @iteration.setter
    def iteration(self, index: int) -> None:
        self._book.epoch_start = self.total_iteration_idx - index

    @property
    def loss_batch_accum(self) -> list[Any]:
        """Losses of the epoch's batches so far, on the device."""
        return self._book.losses

    @property
    def amp_scaler(self) -> _Scaler:
        """The ``GradScaler``. Its ``unscale_`` does nothing, because callbacks get unscaled gradients."""
        return _Scaler(self)

    @amp_scaler.setter
    def amp_scaler(self, scaler: Any) -> None:
        if type(scaler) is not _Scaler:
            raise ConfigurationError("the loop creates amp_scaler. To change its arguments, pass use_amp={...}.")

    @property
    def ddp_training_mode(self) -> bool:
        """True if this is a rank of ``ddp``."""
        return self.gpu_mode == "ddp"

    @property
    def ddp_rank(self) -> int | None:
        """Global rank in ``ddp``."""
        return self.rank if self.gpu_mode == "ddp" else None

    def should_execute_optimizer_update(self) -> bool:
        """Return True if this batch is the last one of an optimizer step."""
        if (self.iteration + 1) % self.grad_accumulation == 0:
            return True
        try:
            batches = math.ceil(len(self.train_loader) / self.world_size)
        except TypeError:  # a stream has no length
            return False
        return self.iteration == batches - 1

    def get_schedulers(self) -> list[AbstractScheduler]:
        """Return the callbacks that are learning rate schedulers."""
        return [callback for callback in self.callbacks if isinstance(callback, AbstractScheduler)]

    def get_num_training_steps(self) -> int:
        """Return the number of optimizer steps of the whole training."""
        if self.num_iterations:
            return self.num_iterations // self.grad_accumulation
        return len(self.train_loader) // self.grad_accumulation * (self._book.num_epochs or self.num_epochs)

    def insert_metric_result_into_history(self, metric_name: str, metric_result: Any) -> None:
        """Append a value of any type to a metric's results."""
        self.train_history.insert_single_result_into_history(metric_name, metric_result)
        # trainloop's own callbacks read `history`, which contains only numbers. The loop itself records `loss` there.
        if metric_name not in ("loss", "accumulated_loss") and not isinstance(metric_result, (Mapping, str, Sequence)):
            value = torch.as_tensor(metric_result)
            if value.numel() == 1:
                super().insert_metric_result_into_history(metric_name, float(value))

    def parse_loss(self, loss_record: list[Any]) -> Any:
        """Return the mean of the loss over batches; if there are several losses, return a separate mean for each."""
        if isinstance(loss_record[0], Mapping):
            names = sorted(loss_record[0])
            return MultiLoss({n: torch.stack([loss[n] for loss in loss_record]).double().mean() for n in names})
        return torch.stack(loss_record).double().mean()

    @staticmethod
    def convert_loss_to_float_dict_format(loss: Any) -> Any:
        """Return the loss as a float, or several losses as a dict of floats."""
        loss = loss.item()
        return loss.get_loss_dict() if isinstance(loss, MultiLoss) else loss

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def evaluate_loss_on_train_set(self, force_prediction: bool = False, float_dict_format: bool = False) -> Any:
        """Return the mean loss as a tensor or :class:`MultiLoss`.

        The result is cached until the next step, unless forced.
        """
        return self._loss_of("train", super().evaluate_loss_on_train_set, force_prediction, float_dict_format)

    def evaluate_loss_on_validation_set(self, force_prediction: bool = False, float_dict_format: bool = False) -> Any:
        """Return the mean loss, as in :meth:`evaluate_loss_on_train_set`."""
        return self._loss_of("val", super().evaluate_loss_on_validation_set, force_prediction, float_dict_format)

    def evaluate_loss_on_test_set(self, force_prediction: bool = False, float_dict_format: bool = False) -> Any:
        """Return the mean loss, as in :meth:`evaluate_loss_on_train_set`."""
        return self._loss_of("test", super().evaluate_loss_on_test_set, force_prediction, float_dict_format)

    def evaluate_model_loss(
        self, data_loader: Any, move_to_cpu: bool = False, dataset_info: dict[str, Any] | None = None
    ) -> Any:
        """Return the mean loss over any loader, as a tensor or :class:`MultiLoss` on the CPU."""
        self.place_criterion()
        return _as_loss(super().evaluate_model_loss(as_loader(data_loader)))

    def _loss_of(self, part: str, evaluate: Any, force: bool, as_floats: bool) -> Any:
        self.place_criterion()
        loss = self._stored(f"{part}_loss", lambda: _as_loss(evaluate()), force)
        return self.convert_loss_to_float_dict_format(loss) if as_floats else loss

    def predict_on_train_set(self, force_prediction: bool = False, execute_callbacks: bool = False) -> Any:
        """Return ``(y_pred, y_true, metadata)``. The result is cached until the next step, unless forced."""
        return self._predictions_of("train", "train", self.train_loader, force_prediction, execute_callbacks)

    def predict_on_validation_set(self, force_prediction: bool = False, execute_callbacks: bool = False) -> Any:
        """Return predictions, as in :meth:`predict_on_train_set`."""
        return self._predictions_of("val", "validation", self.validation_loader, force_prediction, execute_callbacks)

    def predict_on_test_set(self, force_prediction: bool = False, execute_callbacks: bool = False) -> Any:
        """Return predictions, as in :meth:`predict_on_train_set`."""
        return self._predictions_of("test", "test", self.test_loader, force_prediction, execute_callbacks)

    def predict_with_model(  # type: ignore[override]  # AIToolbox's order and default
        self,
        data_loader: Any,
        execute_callbacks: bool = False,
        move_to_cpu: bool = False,
        dataset_info: dict[str, Any] | None = None,
    ) -> Any:
        """Return ``(y_pred, y_true, metadata)`` for any loader, on the CPU."""
        y_pred, y_true, metadata = super().predict_with_model(as_loader(data_loader), execute_callbacks, dataset_info)
        return y_pred, y_true, {} if metadata is None else metadata

    def _predictions_of(self, part: str, kind: str, loader: Any, force: bool, execute_callbacks: bool) -> Any:
        require_loader(self, f"{kind}_loader", f"predictions on the {kind} set")
        predict = self.predict_with_model
        return self._stored(
            f"{part}_pred",
            lambda: predict(loader, execute_callbacks, move_to_cpu=True, dataset_info={"type": kind}),
            force,
        )

    def _stored(self, name: str, compute: Any, force: bool) -> Any:
        store, now = self.prediction_store, self.total_iteration_idx
        if force or not store.has(name, now):
            store.insert(name, compute(), now, force_prediction=True)
        return store.get(name, now)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["prediction_store"] = ModelPredictionStore(auto_purge=True)  # the store may be large; ranks predict again
        return state


class _Scaler:
    """Proxy for the scaler of the running loop, which is looked up at each access."""

    def __init__(self, loop: TrainLoop) -> None:
        self._loop = loop

    @property  # type: ignore[misc]  # object's __class__ is settable
    def __class__(self) -> type:  # for isinstance()
        return torch.cuda.amp.GradScaler

    def unscale_(self, optimizer: Any) -> None:
        """Do nothing. The loop has already unscaled the gradients."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loop.scaler or torch.amp.GradScaler("cpu", enabled=False), name)


class _Bookkeeping(AbstractCallback):
    """Runs AIToolbox's evaluations, history and counters before all other callbacks.

    This is a callback, so that its state is sent back from the ranks of ``ddp``.
    """

    train_loop_obj: Any  # AIToolbox's loop, with more attributes

    def __init__(self, train_history: TrainingHistory) -> None:
        super().__init__("AIToolbox's bookkeeping", execution_order=_FIRST)
        self.train_history = train_history
        self.num_epochs = 0
        self.print_callbacks = False
        self.epoch_start = 0  # total_iteration_idx of the epoch's first batch
        self.losses: list[Any] = []
        self.wants_stop = False
        self.epochs_run = 0

    def on_train_begin(self) -> None:
        loop = self.train_loop_obj
        if self.num_epochs:
            # AIToolbox counts epochs from the start of the first fit, or from the epoch that a callback has loaded.
            loop.note(num_epochs=self.num_epochs - loop.epoch)
            if loop.num_epochs <= 0:
                warn(
                    f"fit(num_epochs={self.num_epochs}) trains up to epoch {self.num_epochs}, but the loop is already "
                    f"at epoch {loop.epoch}, so nothing is trained."
                )
        self.epochs_run, self.wants_stop = 0, False
        loop.place_criterion()
        if self.print_callbacks and loop.is_main_process():
            loop.callbacks_handler.print_registered_callback_names()

    def on_epoch_begin(self) -> None:
        self.epoch_start = self.train_loop_obj.total_iteration_idx + 1
        self.losses.clear()

    def on_batch_end(self) -> None:
        loop = self.train_loop_obj
        losses = loop.__dict__.pop("last_losses", None)
        if losses is not None or loop.last_loss is not None:
            self.losses.append(loop.last_loss if losses is None else losses)
        if loop.grad_accumulation == 1 or loop.should_execute_optimizer_update():
            return
        # In AIToolbox, callbacks get the gradients of every batch; in trainloop, the gradients of a step.
        for callback in loop.callbacks_handler.cbs_on_after_gradient_update:
            if callback.device_idx_execution in (None, loop.rank):
                for index in range(loop.num_optimizers):
                    callback.on_after_gradient_update(index)

    def on_epoch_end(self) -> None:
        loop = self.train_loop_obj
        self.epochs_run += 1
        loop.note(end_requested=loop.end_requested or self.wants_stop)
        several = self.losses[-1] if self.losses and isinstance(self.losses[-1], Mapping) else None
        names = ["loss"] if several is None else [f"loss_{name}" for name in sorted(several)]
        for name in names:
            self.train_history.insert_single_result_into_history(f"accumulated_{name}", loop.history[name][-1])
        every = loop.auto_eval
        if every is not False and (every is True or (every and loop.epoch % every == 0)):
            self._insert("loss", loop.evaluate_loss_on_train_set())
            if loop.validation_loader is not None:
                self._insert("val_loss", loop.evaluate_loss_on_validation_set())
        self.losses.clear()

    def on_train_end(self) -> None:
        loop = self.train_loop_obj
        if self.epochs_run:
            loop.progress.epoch -= 1  # the number of the last epoch, not of the next one
        if loop.auto_eval is not False and loop.test_loader is not None:
            self._insert("train_end_test_loss", loop.evaluate_loss_on_test_set())

    def _insert(self, name: str, loss: Any) -> None:
        value = self.train_loop_obj.convert_loss_to_float_dict_format(loss)
        values = {f"{name}_{part}": x for part, x in value.items()} if isinstance(value, Mapping) else {name: value}
        for metric, result in values.items():
            self.train_loop_obj.insert_metric_result_into_history(metric, result)


class _EndOfBatch(AbstractCallback):
    """Does AIToolbox's work between two batches, after all other callbacks."""

    def __init__(self, book: _Bookkeeping) -> None:
        super().__init__("AIToolbox's end of a batch", execution_order=_LAST)
        self.book = book

    def on_batch_end(self) -> None:
        loop: Any = self.train_loop_obj
        if loop.end_requested:  # AIToolbox stops at the end of the epoch, trainloop after the step
            self.book.wants_stop = True
            loop.note(end_requested=False)


def _as_loss(value: float | Mapping[str, float]) -> Tensor | MultiLoss:
    if isinstance(value, Mapping):
        return MultiLoss({name: torch.tensor(loss, dtype=torch.float64) for name, loss in value.items()})
    return torch.tensor(value, dtype=torch.float64)
