"""Experiment tracking with Weights & Biases (extra ``wandb``) and MLflow (extra ``mlflow``)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from trainloop._support.distribution import import_extra
from trainloop._support.user_line import warn_or_print
from trainloop.callbacks.arguments import check_flags, count_of, dict_of, path_of, texts_of
from trainloop.callbacks.base import AbstractCallback, logs_nothing
from trainloop.devices import has_ranks
from trainloop.errors import ConfigurationError

__all__ = ["MLflowTracking", "WandBTracking"]


class EpochValues:
    """Values of the history that have not been sent yet."""

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}  # number of values of each metric that have been sent
        self._steps: dict[int, int] = {}  # the step at which each epoch ended
        # The epoch that fit has cut, its step, and the lengths before its values: another call of fit may replace them.
        self._cut: tuple[int, int, dict[str, int]] | None = None

    def take(self, loop: Any) -> Iterator[tuple[int, int, dict[str, float]]]:
        """Yield ``(epoch, step, values)`` for each epoch that has new values. Called at ends of epochs and of training.

        An earlier epoch can have new values, because callbacks that run after the tracker may log values for that
        epoch. Values of epochs before the first one that the tracker sees are not sent, since their steps are unknown.
        """
        current = loop.history_epoch
        if not self._lengths and not self._steps:
            earlier = {name: sum(epoch < current for epoch in loop.history.epochs(name)) for name in loop.history}
            self._lengths.update(earlier)
        if self._cut is not None and self._cut[0] == current and loop.global_step > self._cut[1]:
            self._lengths.update(self._cut[2])  # the epoch was continued
        if loop.cut is None:
            self._cut = None
        elif self._cut is None or self._cut[:2] != (current, loop.global_step):
            self._cut = current, loop.global_step, {name: self._lengths.get(name, 0) for name in loop.history}
        self._steps[loop.epoch] = loop.global_step
        found: dict[int, dict[str, float]] = {}
        for name in loop.history:
            values, epochs, sent = loop.history[name], loop.history.epochs(name), self._lengths.get(name, 0)
            for value, epoch in zip(values[sent:], epochs[sent:], strict=True):
                found.setdefault(epoch, {})[name] = value
        self._lengths = loop.history.lengths()
        for epoch in sorted(found):
            yield epoch, self._steps.get(epoch, loop.global_step), found[epoch]

    def state_dict(self) -> dict[str, Any]:
        return {"lengths": dict(self._lengths), "cut": None if self._cut is None else list(self._cut)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        cut = state.get("cut")  # older checkpoints lack it
        self._lengths, self._steps, self._cut = dict(state["lengths"]), {}, None if cut is None else tuple(cut)


def _with_names(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a mapping whose keys are strings, as services and TensorBoard require."""
    return {as_text(key): value for key, value in values.items()}


def as_text(value: Any) -> str:
    """Return ``str(value)`` as UTF-8 can encode it: a file's name may have other bytes, as surrogates."""
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")


class Tracker(AbstractCallback):
    """Base of callbacks that send values to files or to a service, from rank 0.

    The file, or the service's run, is opened when the first value is sent. At that time, a resumed ``fit`` has already
    loaded the ID of the run that it continues. Epoch values have the prefix ``epoch/`` if the metric also has step
    values.
    """

    writes = True
    shared: tuple[str, ...] = ("experiment_name", "run_id")
    package = ""  # name of the service's package, and of the extra that installs it
    _run: Any = None  # the file, or the service's run or client, while it is open

    def __init__(
        self, name: str, frequency: tuple[str, int | None], hyperparams: Mapping[str, Any] | None = None
    ) -> None:
        # Runs after callbacks that log at an epoch's end, and before callbacks that write checkpoints.
        super().__init__(name, execution_order=997, device_idx_execution=0)
        self.log_every_n_steps: int | None = count_of(name, *frequency, optional=True)
        given = dict_of(name, "hyperparams", hyperparams)
        self.hyperparams = None if given is None else _with_names(given)
        self.experiment_name: str | None = None
        self.run_id: str | None = None
        self._epoch_values = EpochValues()
        self._step_names: set[str] = set()

    def on_train_loop_registration(self) -> None:
        if self.package:
            import_extra(self.package, self.callback_name, self.package)
        loop = self.train_loop_obj
        self.experiment_name = self.experiment_name or getattr(loop, "experiment_name", None)
        given = getattr(loop, "hyperparams", None)
        if self.hyperparams is None and isinstance(given, Mapping):
            self.hyperparams = _with_names(given)

    def reset(self) -> None:
        super().reset()
        self.run_id = None  # a new training starts a new run
        self._epoch_values = EpochValues()
        self._step_names.clear()

    def on_log(self, rows: Sequence[tuple[int, dict[str, float]]]) -> None:
        if self.log_every_n_steps is not None:
            self._step_names.update(*(scalars for _, scalars in rows))
            chosen = [row for row in rows if row[0] % self.log_every_n_steps == 0]
            if chosen:
                self._pass(chosen)

    @logs_nothing
    def on_epoch_end(self) -> None:
        self._send_epochs()

    @logs_nothing
    def on_train_end(self) -> None:
        self._send_epochs()
        self._finish(None)

    def on_exception(self, exception: BaseException) -> None:
        self._finish(exception)

    def _pass(self, rows: Sequence[tuple[int, dict[str, float]]]) -> None:
        self._send(rows)

    def _send(self, rows: Sequence[tuple[int, dict[str, float]]]) -> None:
        raise NotImplementedError

    def _send_epochs(self) -> None:
        for epoch, step, values in self._epoch_values.take(self.train_loop_obj):
            self._send_epoch(epoch, step, values)

    def _send_epoch(self, epoch: int, step: int, values: dict[str, float]) -> None:
        self._pass([(step, {self._epoch_name(name): value for name, value in values.items()})])

    def _epoch_name(self, name: str) -> str:
        return f"epoch/{name}" if name in self._step_names else name

    def _finish(self, exception: BaseException | None) -> None:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": None}

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "step_names": sorted(self._step_names), **self._epoch_values.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run_id = state.get("run_id")
        self._step_names |= set(state.get("step_names", ()))
        self._epoch_values.load_state_dict(state)


_MOST_PENDING = 10_000  # rows
_VALUES_ARE_KEPT = "; values are kept, and sent once the service works again"
_SHARE_OF_TIME = 10  # a failed request that took a second is followed by ten seconds without one


class ServiceTracker(Tracker):
    """Base of trackers whose service may fail: values are kept and sent later, and training continues.

    Only a new training whose run can't be opened when it begins is an error, since then the address or the login is
    wrong.
    """

    def __init__(
        self, name: str, frequency: tuple[str, int | None], hyperparams: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(name, frequency, hyperparams)
        self._pending: list[tuple[int, dict[str, float]]] = []  # rows that have not been sent
        self._lost = 0
        self._retry_at = 0.0  # time.monotonic() of the next attempt
        self._reported: set[str] = set()
        self._checked = False

    def on_train_begin(self) -> None:
        super().on_train_begin()
        if self.train_loop_obj.global_step == 0:
            self._pending, self._lost = [], 0
        self._retry_at, self._reported, self._checked = 0.0, set(), False

    def on_restart(self, failure: Any) -> None:
        """Let the run continue even if the service can't be reached now."""
        self._checked = True

    def on_epoch_begin(self) -> None:
        if self._checked:
            return
        self._checked = True
        if self.train_loop_obj.global_step > 0:  # a resumed run, which continues without the service
            self._call_service("the run could not be opened", self._open, _VALUES_ARE_KEPT)
            return
        try:
            self._open()
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"{self.callback_name}: the run can't be opened ({type(error).__name__}: {error}). Check the address, "
                "the login and the arguments of the callback, or leave the callback out."
            ) from error

    def _open(self) -> Any:
        """Return the open run, or the client; open the run, or continue the one with the ID ``run_id``."""
        if self._run is None:
            self._run = self._opened()
        return self._run

    def _opened(self) -> Any:
        raise NotImplementedError

    def _pass(self, rows: Sequence[tuple[int, dict[str, float]]]) -> None:
        self._pending += rows
        if time.monotonic() >= self._retry_at:
            self._send_pending()
        if len(self._pending) > _MOST_PENDING:
            self._lost += len(self._pending) - _MOST_PENDING
            del self._pending[:-_MOST_PENDING]

    def _send_pending(self) -> None:
        rows = self._pending
        if rows and self._call_service("values could not be sent", lambda: self._send(rows), _VALUES_ARE_KEPT):
            self._pending = []

    def _call_service(self, what: str, call: Callable[[], object], then: str = "") -> bool:
        """Call a function of the service; return False if it failed, which is reported once."""
        began = time.monotonic()
        try:
            call()
        except ConfigurationError:
            raise
        except Exception as error:  # of the service, its client, the network
            now = time.monotonic()
            self._retry_at = now + _SHARE_OF_TIME * (now - began)
            self._warn_once_of(what, f"{what} ({type(error).__name__}: {error}). Training continues{then}.")
            return False
        return True

    def _warn_once_of(self, what: str, text: str) -> None:
        if what not in self._reported:
            self._reported.add(what)
            warn_or_print(f"{self.callback_name}: {text}", RuntimeWarning)

    def _finish(self, exception: BaseException | None) -> None:
        self._send_pending()
        lost = self._lost + len(self._pending)
        if lost:
            self._warn_once_of(
                "lost", f"{lost} rows of values could not be sent until the end of the training, and are lost."
            )
        self._pending, self._lost = [], 0
        if self._run is not None:
            self._call_service("the run could not be closed", lambda: self._close(exception))
        self._run = None

    def _close(self, exception: BaseException | None) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "pending": [[step, dict(values)] for step, values in self._pending]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._pending = [(step, dict(values)) for step, values in state.get("pending", ())]


class WandBTracking(ServiceTracker):
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
    wandb_pre_initialized : bool
        Use the run that is already active, and leave it open. This works only if training runs in the calling process.
    source_dirs : sequence of str
        Folders whose code is stored with the run.
    log_dir : str, optional
        Folder for wandb's own files.
    project_name : str, optional
        W&B project of the run. Default: the loop's ``project_name``, if it is a ``TrainLoopCheckpoint`` or similar.
    experiment_name : str, optional
        Name of the run in W&B. Default: the loop's ``experiment_name``, if it is a ``TrainLoopCheckpoint`` or similar.
    **kwargs
        Further arguments of ``wandb.init``, such as ``mode='offline'``.

    Raises
    ------
    ConfigurationError
        If wandb is missing.

    Examples
    --------
    >>> tl.fit(num_epochs=10, callbacks=[WandBTracking(batch_log_frequency=50, project_name="digits")])
    """

    package = "wandb"

    def __init__(
        self,
        metric_names: Sequence[str] | None = None,
        batch_log_frequency: int | None = None,
        hyperparams: Mapping[str, Any] | None = None,
        tags: Sequence[str] | None = None,
        wandb_pre_initialized: bool = False,
        source_dirs: Sequence[str] = (),
        log_dir: str | os.PathLike[str] | None = None,
        project_name: str | None = None,
        experiment_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__("WandBTracking", ("batch_log_frequency", batch_log_frequency), hyperparams)
        me = "WandBTracking"
        self.metric_names = None if metric_names is None else texts_of(me, "metric_names", metric_names)
        self.tags = None if tags is None else texts_of(me, "tags", tags)
        self.wandb_pre_initialized = wandb_pre_initialized
        check_flags(type(self).__name__, wandb_pre_initialized=self.wandb_pre_initialized)
        self.source_dirs = texts_of(me, "source_dirs", source_dirs)
        self.log_dir = path_of("WandBTracking", "log_dir", log_dir, optional=True)
        self.project_name, self.experiment_name = project_name, experiment_name
        self.init_kwargs = kwargs

    def on_train_loop_registration(self) -> None:
        super().on_train_loop_registration()
        loop = self.train_loop_obj
        self.project_name = self.project_name or getattr(loop, "project_name", None)
        if self.wandb_pre_initialized and has_ranks(loop.gpu_mode):
            raise ConfigurationError(
                "WandBTracking(wandb_pre_initialized=True): the W&B run of this process does not exist in the ranks. "
                "Leave wandb_pre_initialized out, so that rank 0 starts a run."
            )

    def _opened(self) -> Any:
        import wandb

        if self.wandb_pre_initialized:
            run = wandb.run
            if run is None:
                raise ConfigurationError(
                    "WandBTracking(wandb_pre_initialized=True): no W&B run is active. Call wandb.init(...) before fit, "
                    "or leave wandb_pre_initialized out."
                )
        else:
            known = {} if self.run_id is None else {"id": self.run_id, "resume": "allow"}
            run = wandb.init(
                **{
                    "project": self.project_name,
                    "name": self.experiment_name,
                    "config": self.hyperparams,
                    "tags": self.tags,
                    "dir": self.log_dir,
                    **known,
                    **self.init_kwargs,
                }
            )
            self.run_id = run.id
        self._run = run  # it is ended, even if a call below fails
        for folder in self.source_dirs:
            self._call_service(f"the code of {folder!r} could not be stored", partial(run.log_code, folder))
        # wandb's own step must increase with each call, but epoch values have the same step as earlier step values.
        run.define_metric("global_step")
        run.define_metric("*", step_metric="global_step")
        return run

    def _send(self, rows: Sequence[tuple[int, dict[str, float]]]) -> None:
        for step, scalars in rows:
            self._open().log({**scalars, "global_step": step})

    def _send_epoch(self, epoch: int, step: int, values: dict[str, float]) -> None:
        names = values if self.metric_names is None else [name for name in values if name in self.metric_names]
        if names:
            self._pass([(step, {**{f"epoch/{name}": values[name] for name in names}, "epoch": epoch})])

    def _close(self, exception: BaseException | None) -> None:
        if not self.wandb_pre_initialized:
            self._run.finish(exit_code=int(exception is not None))


_REFUSED = re.compile(r"[^\w\-. :/]")
_INVALID = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_ALREADY_EXISTS")
"""Error codes of MLflow for a value that it will never accept."""


class MLflowTracking(ServiceTracker):
    """Send the run to MLflow, from rank 0.

    Values are sent under their names, against the global step. If a metric has step values, its epoch values are sent
    as ``epoch/<name>``. The training process starts the MLflow run. A resumed ``fit`` continues that run.

    Parameters
    ----------
    experiment_name : str, optional
        MLflow experiment of the run. Default: the loop's ``experiment_name`` if it has one, otherwise MLflow's own
        default.
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

    package = "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        log_every_n_steps: int | None = 50,
        hyperparams: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__("MLflowTracking", ("log_every_n_steps", log_every_n_steps), hyperparams)
        self.experiment_name, self.run_name, self.tracking_uri = experiment_name, run_name, tracking_uri
        self.tags = dict_of("MLflowTracking", "tags", tags)
        self._accepted_names: dict[str, str] = {}  # the names that they stand for

    def _opened(self) -> Any:
        import mlflow

        # Uses a client, not mlflow's global run, which may be the user's.
        client = mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        if self.run_id is None:
            name = self.experiment_name or "Default"
            found = client.get_experiment_by_name(name)
            experiment_id = client.create_experiment(name) if found is None else found.experiment_id
            tags = None if self.tags is None else _with_names(self.tags)
            run = client.create_run(experiment_id, run_name=self.run_name, tags=tags)
            self.run_id = run.info.run_id
            for key, value in (self.hyperparams or {}).items():
                call = partial(client.log_param, self.run_id, self._accepted(key), value)
                self._call_service(f"the hyperparameter {key!r} could not be sent", call)
        else:
            client.update_run(self.run_id, status="RUNNING")
        return client

    def _accepted(self, name: str) -> str:
        """Return a name without the characters that MLflow refuses; no two names become one."""
        accepted = _REFUSED.sub("_", name)
        while self._accepted_names.setdefault(accepted, name) != name:
            accepted += "_"
        if accepted != name:
            self._warn_once_of(name, f"MLflow does not accept the name {name!r}, so it is sent as {accepted!r}.")
        return accepted

    def _send(self, rows: Sequence[tuple[int, dict[str, float]]]) -> None:
        from mlflow.entities import Metric

        client, now = self._open(), int(time.time() * 1000)
        metrics = [
            Metric(self._accepted(name), value, now, step) for step, scalars in rows for name, value in scalars.items()
        ]
        for start in range(0, len(metrics), 1000):  # MLflow's maximum per request
            self._send_batch(client, metrics[start : start + 1000])

    def _send_batch(self, client: Any, metrics: list[Any]) -> None:
        try:
            client.log_batch(self.run_id, metrics=metrics)
        except Exception as error:
            if getattr(error, "error_code", None) not in _INVALID:
                raise
            if len(metrics) == 1:
                self._warn_once_of(
                    f"refused {metrics[0].key}",
                    f"MLflow refuses values of {metrics[0].key!r} ({error}). Training continues without them.",
                )
                return
            for half in (metrics[: len(metrics) // 2], metrics[len(metrics) // 2 :]):
                self._send_batch(client, half)

    def _close(self, exception: BaseException | None) -> None:
        failed = "KILLED" if isinstance(exception, (KeyboardInterrupt, SystemExit)) else "FAILED"
        self._run.set_terminated(self.run_id, status="FINISHED" if exception is None else failed)
