"""Experiment tracking with MLflow (extra ``mlflow``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainloop._support.distribution import pip_install
from trainloop.callbacks.base import AbstractCallback, logs_nothing
from trainloop.callbacks.epoch_values import EpochValues
from trainloop.errors import ConfigurationError

__all__ = ["MLflowTracking"]


class MLflowTracking(AbstractCallback):
    """Send the run to MLflow, from rank 0.

    Values are sent under their names, against the global step. If a metric has step values, its epoch values are sent
    as ``epoch/<name>``. The process that trains starts the MLflow run; a resumed ``fit`` continues that run.

    Parameters
    ----------
    experiment_name : str, optional
        Default: the loop's experiment if it has one, otherwise MLflow's own default.
    run_name : str, optional
    tracking_uri : str, optional
        Server or folder. Default: MLflow's own default (``MLFLOW_TRACKING_URI``).
    log_every_n_steps : int, optional
        Send the values of every n-th step; ``None`` sends only epoch values.
    hyperparams : mapping, optional
        Sent as parameters. Default: the hyperparameters of the loop, if it is a ``TrainLoopCheckpoint`` or similar.
    tags : mapping, optional
        Tags of the run.

    Raises
    ------
    ConfigurationError
        If mlflow is missing, or ``log_every_n_steps`` is below 1.

    Examples
    --------
    >>> tl.fit(num_epochs=10, callbacks=[MLflowTracking("digits", tracking_uri="http://localhost:5000")])
    """

    def __init__(
        self,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        log_every_n_steps: int | None = 50,
        hyperparams: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> None:
        # After callbacks that log at an epoch's end, before those that write checkpoints.
        super().__init__("MLflowTracking", execution_order=997, device_idx_execution=0)
        if log_every_n_steps is not None and log_every_n_steps < 1:
            raise ConfigurationError(
                f"MLflowTracking: log_every_n_steps={log_every_n_steps}: must be 1 or more, or None."
            )
        self.experiment_name = experiment_name
        self.run_name = run_name
        self.tracking_uri = tracking_uri
        self.log_every_n_steps = log_every_n_steps
        self.hyperparams = hyperparams
        self.tags = None if tags is None else dict(tags)
        self.run_id: str | None = None
        self._client: Any = None
        self._step_names: set[str] = set()
        self._epoch_values = EpochValues()

    def on_train_loop_registration(self) -> None:
        _import_mlflow()
        loop = self.train_loop_obj
        self.experiment_name = self.experiment_name or getattr(loop, "experiment_name", None)
        if self.hyperparams is None:
            self.hyperparams = getattr(loop, "hyperparams", None)
        if loop.global_step == 0:
            self.run_id = None  # another training, another run

    def on_train_begin(self) -> None:
        if self.train_loop_obj.global_step == 0:
            self._epoch_values.clear()

    def _active_client(self) -> Any:
        """MLflow's client; the run starts when the first value is sent: by then the resumed run is known."""
        if self._client is not None:
            return self._client
        mlflow = _import_mlflow()
        # The client instead of mlflow's global run, which may be the user's.
        self._client = client = mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        if self.run_id is None:
            name = self.experiment_name or "Default"
            found = client.get_experiment_by_name(name)
            experiment_id = client.create_experiment(name) if found is None else found.experiment_id
            run = client.create_run(experiment_id, run_name=self.run_name, tags=self.tags)
            self.run_id = run.info.run_id
            for key, value in (self.hyperparams or {}).items():
                client.log_param(self.run_id, key, value)
        else:
            client.update_run(self.run_id, status="RUNNING")
        return client

    def _send(self, rows: Sequence[tuple[int, dict[str, float]]]) -> None:
        import time

        from mlflow.entities import Metric

        client, now = self._active_client(), int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for step, scalars in rows for name, value in scalars.items()]
        for start in range(0, len(metrics), 1000):  # the maximum of one request
            client.log_batch(self.run_id, metrics=metrics[start : start + 1000])

    def on_log(self, rows: Sequence[tuple[int, dict[str, float]]]) -> None:
        every = self.log_every_n_steps
        if every is None:
            return
        for _, scalars in rows:
            self._step_names.update(scalars)
        chosen = [(step, scalars) for step, scalars in rows if step % every == 0]
        if chosen:
            self._send(chosen)

    @logs_nothing
    def on_epoch_end(self) -> None:
        for _, step, values in self._epoch_values.take(self.train_loop_obj):
            tagged = {f"epoch/{name}" if name in self._step_names else name: value for name, value in values.items()}
            self._send([(step, tagged)])

    @logs_nothing
    def on_train_end(self) -> None:
        self.on_epoch_end()
        self._finish("FINISHED")

    def on_exception(self, exception: BaseException) -> None:
        self._finish("KILLED" if isinstance(exception, (KeyboardInterrupt, SystemExit)) else "FAILED")

    def _finish(self, status: str) -> None:
        if self._client is not None:
            self._client.set_terminated(self.run_id, status=status)
        self._client = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "lengths": self._epoch_values.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run_id = state["run_id"]
        self._epoch_values.load_state_dict(state["lengths"])


def _import_mlflow() -> Any:
    try:
        import mlflow
    except ImportError as error:
        raise ConfigurationError(f"MLflowTracking needs mlflow: {pip_install('mlflow')}.") from error
    return mlflow
