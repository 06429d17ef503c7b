"""Experiment tracking with Weights & Biases (extra ``wandb``)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainloop._support.distribution import pip_install
from trainloop.callbacks.base import AbstractCallback, logs_nothing
from trainloop.callbacks.epoch_values import EpochValues
from trainloop.devices import has_ranks
from trainloop.errors import ConfigurationError

__all__ = ["AlertConfig", "WandBTracking"]


@dataclass(frozen=True)
class AlertConfig:
    """Condition under which Weights & Biases sends a message.

    Raises
    ------
    ConfigurationError
        If ``objective`` is invalid.

    Examples
    --------
    >>> AlertConfig("val_accuracy", 0.9).message(0.5)
    ('val_accuracy is too low', 'val_accuracy is 0.5, below the threshold of 0.9.')
    """

    metric_name: str
    """Name in ``history``."""
    threshold_value: float
    """Limit beyond which the alert is sent."""
    objective: Literal["maximize", "minimize"] = "maximize"
    """``'maximize'`` sends the alert if the metric is below the threshold, ``'minimize'`` if it is above."""
    wandb_alert_level: Any = None
    """A ``wandb.AlertLevel``."""

    def __post_init__(self) -> None:
        if self.objective not in ("maximize", "minimize"):
            raise ConfigurationError(f"AlertConfig: objective={self.objective!r}: must be 'maximize' or 'minimize'.")

    def message(self, value: float) -> tuple[str, str] | None:
        """Return a title and a text if the value is beyond the threshold, otherwise ``None``."""
        low = self.objective == "maximize" and value < self.threshold_value
        high = self.objective == "minimize" and value > self.threshold_value
        if not low and not high:
            return None
        word, side = ("low", "below") if low else ("high", "above")
        text = f"{self.metric_name} is {value:.6g}, {side} the threshold of {self.threshold_value:.6g}."
        return f"{self.metric_name} is too {word}", text


class WandBTracking(AbstractCallback):
    """Send the run to Weights & Biases, from rank 0.

    Step values are sent under their names, and epoch values as ``epoch/<name>``, against ``global_step``. The training
    process starts the W&B run when training begins, and finishes it when training ends. A resumed ``fit`` continues
    that run.

    Parameters
    ----------
    metric_names : sequence of str, optional
        Metrics of the history to send. Default: all.
    batch_log_frequency : int, optional
        Send the values of every n-th step. Default: epochs only.
    hyperparams : mapping, optional
        Configuration of the run. Default: the hyperparameters of a ``TrainLoopCheckpoint`` or similar loop.
    tags : sequence of str, optional
        Tags of the run.
    alerts : sequence of AlertConfig, optional
        Alerts, checked after each epoch.
    wandb_pre_initialized : bool
        Use the run that is already active, and leave it open. This works only if training runs in the calling process.
    source_dirs : sequence of str
        Folders whose code is stored with the run.
    log_dir : str, optional
        Folder for wandb's own files.
    project_name, experiment_name : str, optional
        Project and name of the run. Default: the names of the loop, if it is a ``TrainLoopCheckpoint`` or similar.
    **kwargs
        Further arguments of ``wandb.init``, such as ``mode='offline'``.

    Raises
    ------
    ConfigurationError
        If wandb is missing, or an alert is not an :class:`AlertConfig`.

    Examples
    --------
    >>> tl.fit(num_epochs=10, callbacks=[WandBTracking(batch_log_frequency=50, project_name="digits")])
    """

    def __init__(
        self,
        metric_names: Sequence[str] | None = None,
        batch_log_frequency: int | None = None,
        hyperparams: Mapping[str, Any] | None = None,
        tags: Sequence[str] | None = None,
        alerts: Sequence[AlertConfig] | None = None,
        wandb_pre_initialized: bool = False,
        source_dirs: Sequence[str] = (),
        log_dir: str | os.PathLike[str] | None = None,
        project_name: str | None = None,
        experiment_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        # After callbacks that log at an epoch's end, before those that write checkpoints.
        super().__init__("WandBTracking", execution_order=997, device_idx_execution=0)
        for alert in alerts or ():
            if not isinstance(alert, AlertConfig):
                raise ConfigurationError(f"WandBTracking: alerts has {alert!r}: it must be an AlertConfig.")
        if batch_log_frequency is not None and batch_log_frequency < 1:
            raise ConfigurationError(
                f"WandBTracking: batch_log_frequency={batch_log_frequency}: must be 1 or more, or None."
            )
        self.metric_names = None if metric_names is None else list(metric_names)
        self.batch_log_frequency = batch_log_frequency
        self.hyperparams = hyperparams
        self.tags = None if tags is None else list(tags)
        self.alerts = list(alerts or ())
        self.wandb_pre_initialized = wandb_pre_initialized
        self.source_dirs = list(source_dirs)
        self.log_dir = None if log_dir is None else os.path.expanduser(os.fspath(log_dir))
        self.project_name = project_name
        self.experiment_name = experiment_name
        self.init_kwargs = kwargs
        self.run_id: str | None = None
        self._run: Any = None
        self._epoch_values = EpochValues()

    def on_train_loop_registration(self) -> None:
        import_wandb()
        loop = self.train_loop_obj
        if loop.global_step == 0:
            self.run_id = None  # another training, another run
        self.project_name = self.project_name or getattr(loop, "project_name", None)
        self.experiment_name = self.experiment_name or getattr(loop, "experiment_name", None)
        if self.hyperparams is None:
            self.hyperparams = getattr(loop, "hyperparams", None)
        if self.wandb_pre_initialized and has_ranks(loop.gpu_mode):
            raise ConfigurationError(
                "WandBTracking(wandb_pre_initialized=True): the run that is active here does not exist in the ranks "
                "of ddp. Leave wandb_pre_initialized out; rank 0 then starts a run."
            )

    def _active_run(self) -> Any:
        """The run; it starts when the first value is sent: by then the resumed run is known."""
        if self._run is not None:
            return self._run
        wandb = import_wandb()
        if self.wandb_pre_initialized:
            self._run = wandb.run
            if self._run is None:
                raise ConfigurationError(
                    "WandBTracking(wandb_pre_initialized=True): no run is active. Call wandb.init(...) before fit, "
                    "or leave wandb_pre_initialized out."
                )
        else:
            known = {} if self.run_id is None else {"id": self.run_id, "resume": "allow"}
            self._run = wandb.init(
                **{
                    "project": self.project_name,
                    "name": self.experiment_name,
                    "config": None if self.hyperparams is None else dict(self.hyperparams),
                    "tags": self.tags,
                    "dir": self.log_dir,
                    **known,
                    **self.init_kwargs,
                }
            )
            self.run_id = self._run.id
        for folder in self.source_dirs:
            self._run.log_code(folder)
        # wandb's own step must increase with each call, but epoch values belong to a step that has been sent.
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")
        return self._run

    def on_train_begin(self) -> None:
        if self.train_loop_obj.global_step == 0:
            self._epoch_values.clear()

    def on_log(self, rows: Sequence[tuple[int, dict[str, float]]]) -> None:
        every = self.batch_log_frequency
        if every is None:
            return
        for step, scalars in rows:
            if step % every == 0:
                self._active_run().log({**scalars, "global_step": step})

    @logs_nothing
    def on_epoch_end(self) -> None:
        values = self._send_epoch_values()
        for alert in self.alerts:
            if alert.metric_name not in self.train_loop_obj.history:
                names = ", ".join(map(repr, self.train_loop_obj.history))
                raise ConfigurationError(
                    f"WandBTracking: an alert is set on {alert.metric_name!r}, which is not in the history. It has: "
                    f"{names}."
                )
            message = alert.message(values[alert.metric_name]) if alert.metric_name in values else None
            if message is not None:
                title, text = message
                level = {} if alert.wandb_alert_level is None else {"level": alert.wandb_alert_level}
                self._active_run().alert(title=title, text=text, **level)

    def _send_epoch_values(self) -> dict[str, float]:
        newest: dict[str, float] = {}
        for epoch, step, values in self._epoch_values.take(self.train_loop_obj):
            newest.update(values)
            chosen = {
                f"epoch/{name}": value
                for name, value in values.items()
                if self.metric_names is None or name in self.metric_names
            }
            if chosen:
                self._active_run().log({**chosen, "epoch": epoch, "global_step": step})
        return newest

    @logs_nothing
    def on_train_end(self) -> None:
        self._send_epoch_values()
        self._finish(0)

    def on_exception(self, exception: BaseException) -> None:
        self._finish(1)

    def _finish(self, exit_code: int) -> None:
        if self._run is not None and not self.wandb_pre_initialized:
            self._run.finish(exit_code=exit_code)
        self._run = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": None}

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "lengths": self._epoch_values.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run_id = state["run_id"]
        self._epoch_values.load_state_dict(state["lengths"])


def import_wandb() -> Any:
    """Import wandb; raise an error that names the extra if it is missing."""
    try:
        import wandb
    except ImportError as error:
        raise ConfigurationError(f"WandBTracking needs wandb: {pip_install('wandb')}.") from error
    return wandb
