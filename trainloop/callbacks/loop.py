"""A protocol, without code: all that callbacks may read, change and call of a loop, and when a change takes effect."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    import torch

    from trainloop.history import History

__all__ = ["ASSIGNABLE", "Loop", "refusal"]


class Loop(Protocol):
    """All that a callback may read, assign and call on its ``train_loop_obj``; :class:`trainloop.TrainLoop` has it all.

    The guide "Change things while training" has a table of all changes: of the model, the data and the optimizer, too.

    Everything else of the loop is internal. Assigning it while the loop runs raises a ``ConfigurationError``, and so
    does a name that is nearly one of these. Other new attributes are your own.

    All ranks must assign alike, at the same step. Ranks compare their settings when an epoch begins, and an error names
    the difference. Checkpoints contain no loader, no callback's own code and no optimizer object, only their state; a
    callback that replaces one of these assigns it again in :meth:`~.AbstractCallback.on_resume`, but an optimizer in
    :meth:`~.AbstractCallback.on_train_begin`, before its state is loaded. What callbacks assign in ranks comes back to
    the calling process, except for loaders, for which a warning is issued.
    """

    # -- may be assigned; each line says when the new value takes effect ---------------------------------------------

    train_loader: Any
    """Training batches. At the next epoch."""
    validation_loader: Any
    """Batches of validation. At the next evaluation."""
    test_loader: Any
    """Batches of the test. At the next evaluation."""
    optimizer: Any
    """Optimizer, or :class:`trainloop.MultiOptimizer`. At the next step, which must be of the same kind."""
    criterion: Any
    """Passed to ``get_loss``. At the next batch, with its own rule for sums and means."""
    gradient_clip_norm: float | None
    """Maximum norm of the gradient. At the next step."""
    grad_accumulation: int
    """Micro-batches per step. At the next epoch."""
    end_auto_eval: bool | int
    """Epochs between evaluations. At the end of this epoch."""
    num_epochs: int
    """Length of this ``fit`` in epochs; 0 if it is given in iterations. At the end of this epoch."""
    num_iterations: int
    """Length of this ``fit`` in batches; 0 if it is given in epochs. After this step."""
    callbacks: list[Any]
    """Callbacks of this ``fit``; you may also change the list. At the next epoch, before its first hook."""
    collate_batch_pred_fn: Any
    """Called with each batch of predictions. At the next prediction."""
    pred_transform_fn: Any
    """Converts the collected predictions. At the next prediction."""

    @property
    def early_stop(self) -> bool:
        """True if training ends after this step, or in ``on_epoch_end`` after this epoch. Any rank may set it.

        A callback's :meth:`~.AbstractCallback.end_training` also says who ends the training, and why.
        """

    @early_stop.setter
    def early_stop(self, stop: bool) -> None: ...

    # -- to read -----------------------------------------------------------------------------------------------------

    model: Any
    """Model, as passed to the loop. Change it in place: parameters, modules, hooks, ``requires_grad``. Values at once,
    modules and ``requires_grad`` at the next step; in ``fsdp``, only whole modules may be added or replaced."""
    history: History
    """Values of each metric, one per epoch."""
    seed: int | None
    timeout: float
    """Seconds after which the run ends if a rank hangs."""
    progress_bar: bool
    sync_batchnorm: bool
    run_config: Any
    """Mode, devices and nodes of the loop's runs."""
    options: Any
    """Arguments of the loop that never change."""

    @property
    def gpu_mode(self) -> str:
        """``'single'``, ``'dp'``, ``'ddp'`` or ``'fsdp'``."""

    @property
    def device(self) -> torch.device:
        """Device on which this process trains."""

    @property
    def rank(self) -> int:
        """Global rank of this process."""

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""

    @property
    def num_nodes(self) -> int:
        """Number of hosts that train together."""

    @property
    def is_global_zero(self) -> bool:
        """True in the one process that prints and writes files."""

    @property
    def epoch(self) -> int:
        """Index of the running epoch, counted from 0 over all calls of ``fit``."""

    @property
    def global_step(self) -> int:
        """Number of optimizer steps, over all calls of ``fit``."""

    @property
    def total_iteration_idx(self) -> int:
        """Index of the current or last batch, counted from 0 over all epochs; -1 before the first."""

    @property
    def history_epoch(self) -> int:
        """Index of the epoch for which new values are logged; between epochs, the last epoch."""

    @property
    def last_loss(self) -> Tensor | None:
        """Loss of this process's last batch, on its device; reading it waits for the device."""

    @property
    def resumed(self) -> bool:
        """True from ``on_train_begin`` on in a run that resumes from a checkpoint, also after a restart."""

    cut: Any
    """In hooks at the end: position in the last epoch, if ``num_iterations`` ends ``fit`` in the middle of it; else
    ``None``. The next ``fit`` may continue that epoch."""

    @property
    def effective_batch_size(self) -> int | None:
        """Number of samples in a global batch; ``None`` if unknown."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The ``GradScaler`` during training (disabled unless fp16 is used), otherwise ``None``."""

    @property
    def step_skipped(self) -> bool:
        """True if AMP skipped the last optimizer step. Reading it waits for the device if there is a scaler."""

    # -- to call -----------------------------------------------------------------------------------------------------

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
        """Record a metric, with the arguments of :meth:`.TTModel.log`."""

    def end_epoch(self) -> None:
        """End the current epoch after this step, on all ranks; the next epoch begins as usual."""

    def end_training(self, callback: Any, reason: str = "") -> None:
        """End training at a callback's request; see :meth:`.AbstractCallback.end_training`."""

    def watch(self, observer: Any = None) -> Any:
        """Return the current run, and let an observer (if given) be called around each forward and backward of it."""

    def is_main_process(self) -> bool:
        """Return :attr:`is_global_zero`."""

    def insert_metric_result_into_history(self, name: str, value: float) -> None:
        """Append a value to the history of a metric, for the current epoch."""

    def num_optimizer_steps(
        self, num_epochs: int | None = None, num_iterations: int | None = None, grad_accumulation: int | None = None
    ) -> int | None:
        """Return the number of optimizer steps of a training run."""

    def flush_logs(self) -> None:
        """Add the values of the steps so far to the history and pass them to ``on_log``. Collective; waits."""

    def predict_on_train_set(self) -> Any:
        """Return ``(y_pred, y_true, metadata)``. Collective, like all evaluations and predictions."""

    def predict_on_validation_set(self) -> Any:
        """Return ``(y_pred, y_true, metadata)``."""

    def predict_on_test_set(self) -> Any:
        """Return ``(y_pred, y_true, metadata)``."""

    def predict_with_model(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Return ``(y_pred, y_true, metadata)`` for a whole loader."""

    def evaluate_loss_on_train_set(self) -> float | dict[str, float]:
        """Return the mean loss over the training set."""

    def evaluate_loss_on_validation_set(self) -> float | dict[str, float]:
        """Return the mean loss over the validation set."""

    def evaluate_loss_on_test_set(self) -> float | dict[str, float]:
        """Return the mean loss over the test set."""

    def evaluate_model_loss(self, data_loader: Any) -> float | dict[str, float]:
        """Return the mean loss over a loader."""

    def evaluate(self, data_loader: Any) -> dict[str, float]:
        """Return the mean loss over a loader, and everything that is logged meanwhile, by name."""

    def report(self, text: str, level: int = logging.INFO) -> None:
        """Report an event: print a line above the progress bar on rank 0, or log it if there is no bar."""

    def checkpoint_state(self, *, keep_shards: bool = False) -> dict[str, Any] | None:
        """Return everything that a resumed run needs, on rank 0. Collective."""


ASSIGNABLE = frozenset(
    "train_loader validation_loader test_loader optimizer criterion gradient_clip_norm grad_accumulation end_auto_eval "
    "num_epochs num_iterations callbacks collate_batch_pred_fn pred_transform_fn early_stop".split()
)
"""Attributes that may be assigned while the loop runs."""

_COUNTS = "The loop counts it. tl.end_epoch() ends an epoch, and tl.early_stop = True ends training"
_DEVICES = "Pass TrainLoop(accelerator=..., devices=...)"
_WAYS = {
    "model": "Change the model in place (tl.model.head = ...), or create another TrainLoop for another model",
    "history": "Use tl.log(name, value) or tl.insert_metric_result_into_history(name, value)",
    "gpu_mode": "Create another TrainLoop(gpu_mode=...)",
    "num_nodes": "Pass fit(num_nodes=...)",
    **dict.fromkeys(("epoch", "global_step", "total_iteration_idx", "last_loss"), _COUNTS),
    **dict.fromkeys(("device", "rank", "world_size", "is_global_zero", "run_config"), _DEVICES),
}


def refusal(name: str, *, running: bool) -> str:
    """Return the error message for an attribute that can't be assigned, now or ever."""
    when = "while the loop runs" if running else "at any time"
    other = f"Set it before fit, such as TrainLoop({name}=...)" if running else "Create another TrainLoop"
    way = _WAYS.get(name, other)
    return f"tl.{name} can't be assigned {when}. {way}."
