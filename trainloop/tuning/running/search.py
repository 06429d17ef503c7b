"""Define ``tune``: run trials and folds under one plan, until all are done or the search is stopped."""

from __future__ import annotations

import math
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainloop import checkpoint
from trainloop._launch.script.module_state import SentModules
from trainloop._launch.script.settings import SentSettings
from trainloop._support.blocks import refuse_blocks
from trainloop._support.keywords import name_of, refuses_unknown, unwrapped, why_not
from trainloop._support.output import guarded_output
from trainloop._support.scratch import remove, temporary_folder
from trainloop.errors import ConfigurationError
from trainloop.extending import check_flags, dict_of, lower_is_better, number_of, path_of, texts_of, warn
from trainloop.resources import Plan, ResourceQuota, enforce, plan
from trainloop.resources.gpus import child_mask, visible_devices
from trainloop.resources.quota import checked_count
from trainloop.train_loop.saving.script_values import script_variables, used_values
from trainloop.tuning.folds import Fold, class_targets, described_data, digest, make_folds, num_rows, own_folds
from trainloop.tuning.result import Trial, TuneResult, best_of
from trainloop.tuning.running.local import LocalBackend, lease_total, machine_total
from trainloop.tuning.running.on_ray import RayBackend
from trainloop.tuning.running.trials import Running, View
from trainloop.tuning.running.worker import Job
from trainloop.tuning.space import OptunaSearcher, Searcher, make_searcher
from trainloop.tuning.storage import Storage, make_folder, read, write

_TRAINING_SHARE = 0.9  # fraction of a model's time for training; the rest of the time is for predictions and files


@refuses_unknown
def tune(
    make_loop: Callable[[dict[str, Any], Fold | None], Any],
    space: Mapping[str, Any],
    *,
    num_trials: int,
    searcher: Any = "random",
    num_bag_folds: int = 1,
    total: ResourceQuota | None = None,
    per_bag: ResourceQuota | None = None,
    per_model: ResourceQuota | None = None,
    metric: str | Callable[[Any, Any], float] = "val_loss",
    mode: Literal["auto", "min", "max"] = "auto",
    backend: Literal["local", "ray"] = "local",
    seed: int | None = None,
    storage: str | os.PathLike[str] | None = None,
    fit_args: Mapping[str, Any] | None = None,
    data: tuple[Any, Any] | None = None,
    targets: Any = None,
    parallel_folds: bool = True,
    progress: bool = True,
    lease_timeout_s: float | None = None,
    time_limit_s: float | None = None,
    keep: Literal["best", "all"] = "best",
    preload: Sequence[str] = ("torch", "trainloop"),
    trusted: bool = False,
    folds: Any = None,
) -> TuneResult:
    """Search for the best parameters. Each trial trains one model, or a bag of models, under quotas that are enforced.

    Every model trains in its own process, on its own CPUs and GPUs (:func:`trainloop.resources.plan`). If a model fails
    or is killed, its traceback is recorded and the others continue. Ctrl-C ends the search and returns the results so
    far. With ``storage``, the same call resumes the search later.

    Parameters
    ----------
    make_loop : callable
        ``make_loop(params, fold)`` returns a :class:`~trainloop.TrainLoop` (trained or not), an :class:`EstimatorLoop`,
        or any object with ``fit`` and ``predict``. The function runs in the model's process, and may be defined
        anywhere. ``fold.train`` and ``fold.validation`` are arrays of row numbers; without bagging, ``fold`` is None.
    space : mapping of str to list, range or distribution
        See ``trainloop.tuning.space.parse_space``. If the space is empty, a single setting is cross-validated over the
        folds; if there are no folds either, one model is trained, with a warning.
    num_trials : int
        Number of settings to try. If the space has fewer settings, the search ends sooner.
    searcher : {'random', 'grid', 'optuna'} or an Optuna sampler
        How parameters are proposed.
    num_bag_folds : int
        If it is 2 or more, each trial is a bag of that many models, and each model is scored on the rows that it did
        not train on. If targets are classes, the folds are stratified.
    total : ResourceQuota, optional
        Resources of the search. They are leased, so other runs of this package on the machine don't use them. Default:
        all resources that this process may use (with Ray, the whole cluster).
    per_bag, per_model : ResourceQuota, optional
        Quota of one trial, and of one model.
    metric : str or callable
        Name of a metric in the loop's history (its last value counts), or a function ``metric(y_true, y_pred)`` that
        scores the validation rows. For estimators, ``val_loss`` is log loss or mean squared error, and other names are
        those of scikit-learn's scorers.
    mode : {'auto', 'min', 'max'}
        ``'min'`` if lower scores are better, ``'max'`` if higher scores are better; ``'auto'`` decides by words in the
        metric's name, such as ``loss`` or ``accuracy``, and takes ``'min'`` for other names. A callable metric's
        attribute ``greater_is_better`` decides first; a :func:`~trainloop.tuning.scoring.scorer` has it.
    backend : {'local', 'ray'}
        This machine, or a Ray cluster (``pip install 'tt-trainloop[ray]'``).
    seed : int, optional
        Seed for parameters, folds and models.
    storage : path, optional
        Folder of the search. If it contains an earlier search, that search is resumed, and finished folds are not
        trained again. The folder contains pickles, which can execute arbitrary code when they are read. Therefore you
        or root must own it, and other users must not be able to write to it.
    fit_args : mapping, optional
        Arguments of ``fit``, such as ``{'num_epochs': 5}``, if ``make_loop`` returns an untrained loop. Without
        ``num_epochs`` and ``num_iterations``, ``num_epochs`` is the search parameter with that name or, if there is
        none, 10.
    data : (x, y), optional
        Data for objects with ``fit`` and ``predict``. Each fold trains on its own rows.
    targets : sequence, optional
        A target for each row of the data. The folds are made from the targets. Default: ``y`` of ``data``. If there is
        no ``data`` either, ``make_loop`` is called once with a fold of two rows, in a separate process that trains
        nothing, and the targets are read from the dataset of the ``Subset`` in the loop's ``train_loader``.
    parallel_folds : bool
        If False, the folds of a trial train one after the other.
    progress : bool
        Print, to stderr, how many trials are done, running or failed, which resources are in use, and each failure.
    lease_timeout_s : float, optional
        Seconds to wait for CPUs and GPUs that other runs have leased. Default: one day.
    time_limit_s : float, optional
        After this many seconds, no further fold starts, and running folds are stopped, as with Ctrl-C. A model can call
        :func:`~trainloop.tuning.seconds_left` to end earlier and keep its result.
    keep : {'best', 'all'}
        Keep the models of the best trial, or of all trials (:meth:`TuneResult.predictor_of`).
    preload : sequence of str
        Modules that the models need. The fork server imports them when it starts, and the processes of the models are
        forked from it. If an earlier search or multi-process ``fit`` has already started the server, that server is
        used unchanged. The modules must not start threads or use a GPU when they are imported. With ``()``, each model
        gets a fresh interpreter. Has no effect with Ray.
    trusted : bool
        Skip the check of the owner and mode of ``storage``, for a folder that you trust.
    folds : splitter, or list of (train, validation), optional
        Your own folds, instead of ``num_bag_folds``: an object with ``split(x, y)``, such as scikit-learn's
        ``TimeSeriesSplit``, which splits the rows of ``data`` or ``targets``; or pairs of arrays of row numbers, such
        as ``list(GroupKFold(5).split(x, y, groups))``.

    Returns
    -------
    TuneResult
        If all trials fail, its ``best_trial`` raises an error with the first traceback.

    Raises
    ------
    ConfigurationError
        If arguments are invalid; raised before any process starts.
    ResourceError
        If the machine does not have the requested resources, or they do not become free in time.
    """
    _check_arguments(make_loop, mode, backend, keep, data, metric)
    mode = _direction(metric, mode)
    fit_args = dict_of("tune", "fit_args", fit_args)
    check_flags("tune", parallel_folds=parallel_folds, progress=progress, trusted=trusted)
    number_of("tune", "time_limit_s", time_limit_s, above=0, optional=True)
    number_of("tune", "lease_timeout_s", lease_timeout_s, least=0, optional=True)
    preload = texts_of("tune", "preload", preload)
    storage = path_of("tune", "storage", storage, optional=True)
    if total is not None and not isinstance(total, ResourceQuota):
        raise ConfigurationError(f"tune: total={total!r}: must be a ResourceQuota, or None for the whole machine.")
    if storage is not None:
        checkpoint.folder(storage).check_writable()
    checked_count("num_trials", num_trials, 1)
    seed = None if seed is None else checked_count("seed", seed, 0)
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    x, y = data or (None, None)
    length = num_rows(x, y, targets)
    targets = y if targets is None else targets
    users_folds = None
    if folds is not None:
        if num_bag_folds != 1:
            raise ConfigurationError(
                f"num_bag_folds={num_bag_folds} with folds: folds already sets the number of folds. Remove "
                "num_bag_folds."
            )
        users_folds = own_folds(folds, x, targets)
    num_bag_folds = num_bag_folds if users_folds is None else len(users_folds)
    proposals = make_searcher(searcher, space, seed=0 if seed is None else seed, mode=mode)  # finds errors early
    num_trials = min(num_trials, getattr(proposals, "num_settings", num_trials))
    if not space and num_trials == num_bag_folds == 1:
        warn(
            "space is empty, so one model is trained and nothing is searched. Name parameters, e.g. space={'lr': "
            "[0.1, 0.01]}, or cross-validate this one setting with num_bag_folds=5."
        )
    with ExitStack() as undo:
        if backend == "ray":
            ray_backend = undo.enter_context(RayBackend.connected(total))
            total = ray_backend.total
        else:
            total = machine_total(total)
        # The plan is made before anything is written, so that an impossible plan leaves no folder behind.
        division = plan(
            total,
            num_trials=num_trials,
            num_bag_folds=num_bag_folds,
            per_bag=per_bag,
            per_model=per_model,
            parallel_folds=parallel_folds,
        )
        unless_returned = undo.enter_context(ExitStack())
        scratch, folder = None, storage
        if folder is None:
            scratch = temporary_folder()
            folder = scratch.path
            unless_returned.callback(remove, scratch)
        store = Storage(
            Path(folder),
            {
                "version": 1,
                "space": {name: _described(values) for name, values in space.items()},
                "searcher": searcher if isinstance(searcher, str) else type(searcher).__name__,
                "num_bag_folds": division.num_folds,
                "folds": None if users_folds is None else digest(users_folds),
                "data": None if storage is None else described_data(x, y, targets),
                "metric": _name_of(metric),
                "mode": mode,
                "fit_args": {k: v for k, v in (fit_args or {}).items() if isinstance(v, (int, float, str))},
                "seed": seed,
            },
            trusted=trusted,
        )
        undo.callback(store.close)
        chosen_seed = int(store.identity["seed"])
        if chosen_seed != seed:
            proposals = make_searcher(searcher, space, seed=chosen_seed, mode=mode)
        runner: LocalBackend | RayBackend
        held: tuple[list[int], list[int]] | None = None
        if backend == "ray":
            ray_backend.begin(division)
            runner = ray_backend
        else:
            held = lease_total(division.total, lease_timeout_s, undo)
            runner = LocalBackend(preload if sys.platform == "linux" else ())
        undo.callback(runner.close)
        work = {"make_loop": make_loop, "fit_args": fit_args, "data": data, "metric": metric, "rows": length}
        search = _Search(
            *(store, division, proposals, runner, held, work, chosen_seed, mode, deadline, keep == "all"),
            View(division, mode, progress),
        )
        search.set_folds(num_bag_folds, length, targets, users_folds)
        search.run()
        result = TuneResult(
            [running.trial for running in search.begun],
            metric=_name_of(metric),
            mode=mode,
            plan=division,
            folder=store.folder,
            folds=search.folds,
            interrupted=search.interrupted,
            trusted=trusted,
            num_rows=length,
        )
        if scratch is not None:
            unless_returned.pop_all()
            weakref.finalize(result, remove, scratch)  # the folder contains the result's models
        return result


def _check_arguments(make_loop: Any, mode: Any, backend: Any, keep: Any, data: Any, metric: Any) -> None:
    refuse_blocks()
    if not callable(make_loop):
        raise ConfigurationError(f"make_loop={make_loop!r}: must be callable as make_loop(params, fold).")
    if why := why_not(make_loop, {}, None):
        raise ConfigurationError(
            f"make_loop can't be called as make_loop(params, fold): {why}. Without folds, ``fold`` is None."
        )
    for name, value, known in (
        ("mode", mode, ("auto", "min", "max")),
        ("backend", backend, ("local", "ray")),
        ("keep", keep, ("best", "all")),
    ):
        if value not in known:
            raise ConfigurationError(f"{name}={value!r}: must be {', '.join(map(repr, known[:-1]))} or {known[-1]!r}.")
    if not isinstance(metric, str) and not callable(metric):
        raise ConfigurationError(f"tune: metric={metric!r}: must be a name, or a function of targets and predictions.")
    if data is not None and (not isinstance(data, (tuple, list)) or len(data) != 2 or any(x is None for x in data)):
        raise ConfigurationError("data must be (x, y): arrays, tables or lists.")


def _direction(metric: str | Callable[..., float], mode: Literal["auto", "min", "max"]) -> Literal["min", "max"]:
    """Return the mode; ``'auto'`` is decided by the metric's name. Warn if it does not say, or contradicts the mode."""
    name = _name_of(metric)
    greater = getattr(unwrapped(metric), "greater_is_better", None)
    lower = not greater if isinstance(greater, bool) else lower_is_better(name)
    if mode == "auto":
        if lower is None and isinstance(metric, str):
            warn(
                f"tune: metric={name!r}: its name does not show which direction is better, so the lowest score counts "
                "as the best. Pass mode='min' (without this warning) or mode='max'."
            )
        return "max" if lower is False else "min"
    if lower is not None and lower != (mode == "min"):
        warn(
            f"tune: metric={name!r}, mode={mode!r}: by its name, {'lower' if lower else 'higher'} is better, so the "
            f"worst trial would count as the best. Leave mode out, or ignore this if {mode!r} is right."
        )
    return mode


def _described(values: Any) -> str:
    """Return a text that identifies a dimension of the space, also in another process."""
    if hasattr(values, "rvs") and hasattr(values, "dist"):  # the repr of scipy's distributions has no parameters
        return f"{values.dist.name}{values.args}{values.kwds}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(values))


def _name_of(metric: str | Callable[..., float]) -> str:
    return metric if isinstance(metric, str) else name_of(metric)


# -- the search ------------------------------------------------------------------------------------------------------


@dataclass
class _Search:
    """A running search: its trials, and a slot for each model that the plan allows to run at once.

    If a trial needs fewer slots than there are, folds of the next trial use the rest.
    """

    store: Storage
    division: Plan
    searcher: Searcher
    backend: LocalBackend | RayBackend
    held: tuple[list[int], list[int]] | None
    """Numbers of the leased CPUs and indices of the leased GPUs; None with Ray."""
    work: dict[str, Any]
    """Function, data and arguments that the processes of all folds need."""
    seed: int
    mode: str
    deadline: float | None
    keep_all: bool
    view: View
    next: int = 0
    """Number of the next trial."""
    begun: list[Running] = field(default_factory=list)
    folds: list[Fold] | None = None
    interrupted: bool = False

    # -- folds -------------------------------------------------------------------------------------------------------

    def set_folds(self, num_bag_folds: int, length: int | None, targets: Any, users_folds: list[Fold] | None) -> None:
        """Set the bag's folds, and write the file that all children read.

        The user has passed the folds, or they are read from the storage, or they are made from the targets.
        """
        self.folds = users_folds
        if num_bag_folds > 1 and users_folds is None:
            path = self.store.folder / "folds.pkl"
            if path.exists():
                self.folds = read(path, trusted=self.store.trusted)
            else:
                if length is None:
                    length, targets = self._describe()
                self.folds = make_folds(length, num_bag_folds, seed=self.seed, classes=class_targets(targets))
                write(path, self.folds)
        # The file is written once for all children, because the data may be large. Each job only names the file.
        self._write_work(self.folds)

    def _write_work(self, folds: list[Fold] | None) -> None:
        # The settings and the state of the user's modules are first, since objects may read them when unpickled.
        given = [*self.work.values()]
        used = used_values(given, given, lambda value: True)
        modules = SentModules([*script_variables(used, {}).values()])
        sent = {"settings": SentSettings(), "modules": modules, **self.work, "folds": folds}
        write(self.store.folder / "work.pkl", sent, "tune")

    def _params(self, number: int) -> dict[str, Any] | None:
        """Return the parameters of a trial: those of an earlier run, or new ones; None if the space is exhausted."""
        params, searcher = self.store.params(number), self.searcher
        if params is not None:
            if isinstance(searcher, OptunaSearcher):
                searcher.restore(number, self.store.choices(number))
            return params
        try:
            params = searcher.propose(number)
        except StopIteration:  # of an iterator in a searcher of the user's own
            return None
        if params is not None and isinstance(searcher, OptunaSearcher):
            self.store.write_choices(number, searcher.choices(number))
        return params

    def _describe(self) -> tuple[int, Any]:
        """Return the number of rows and their targets."""
        # Only the loop knows its data, so a child process creates a loop and inspects it.
        self._write_work(None)
        params = self._params(0) or {}
        self.store.begin_trial(0, params)
        folder = self.store.folder / "data"
        make_folder(folder)
        for name in ("result.pkl", "error.txt"):
            (folder / name).unlink(missing_ok=True)
        self.backend.start(self._job(0, 0, folder, slot=0, probe=True), 0)
        while not self.backend.wait(self._patience_s()):
            if self._patience_s() <= 0:
                raise ConfigurationError(
                    "The number of rows of the data is unknown, because make_loop did not return within time_limit_s "
                    "for a fold of two rows. Pass data=(x, y) or targets (one per row) to tune, or allow more time."
                )
        if not (folder / "result.pkl").exists():
            raise ConfigurationError(
                "The number of rows of the data is unknown, because make_loop failed with a fold of two rows. Pass "
                "data=(x, y) or targets (one per row) to tune, or fix make_loop:\n" + (folder / "error.txt").read_text()
            )
        found = read(folder / "result.pkl", trusted=self.store.trusted)
        return found["length"], found["targets"]

    def _job(self, number: int, fold: int, folder: Path, *, slot: int, probe: bool = False) -> Job:
        # The slots of one trial are adjacent, on the devices that the plan assigns to one bag.
        bag, model = divmod(slot, self.division.folds_in_parallel)
        quota = self.division.per_model
        environment, cpus = enforce.child_environment(quota), []
        if self.held is not None:
            first = bag * int(self.division.per_bag.num_cpus) + model * int(quota.num_cpus)
            cpus = self.held[0][first : first + int(quota.num_cpus)]
            devices = [self.held[1][device] for device in self.division.placement[slot]]
            environment["CUDA_VISIBLE_DEVICES"] = child_mask(devices, visible_devices())
        return Job(
            trial=number,
            fold=fold,
            folder=str(folder),
            work=str(self.store.folder / "work.pkl"),
            params=str(self.store.trial_folder(number) / "params.pkl"),
            trusted=self.store.trusted,
            seed=int(np.random.SeedSequence([self.seed, number, fold]).generate_state(1)[0]),
            quota=quota,
            cpus=cpus,
            environment=environment,
            probe=probe,
        )

    # -- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until every trial has ended, the time limit is reached, or the user presses Ctrl-C."""
        why = "the search was interrupted"
        try:
            with guarded_output(), self.view:
                while not self.interrupted and self._fill():
                    self.view.show(self.begun)
                    for job in self.backend.wait(self._patience_s()):
                        self._record(job)
                    if self._patience_s() <= 0:
                        self.interrupted, why = True, "the search's time was up"
        except KeyboardInterrupt:
            self.interrupted = True
        if self.interrupted:
            for job in self.backend.close():
                if self.store.result(job.trial, job.fold) is not None:  # the fold has finished in the meantime
                    self._record(job)
            for running in self.begun:
                running.interrupt(why)
            self.interrupted = self.next < self.division.num_trials or any(
                each.trial.state == "interrupted" for each in self.begun
            )
        self.view.last(self.begun, self.interrupted)

    def _patience_s(self) -> float:
        """Return the maximum number of seconds to wait for the end of a fold."""
        return 1.0 if self.deadline is None else min(1.0, max(0.0, self.deadline - time.monotonic()))

    def _soft_end(self, num_training: int) -> float | None:
        """Return the time (seconds since 1970) by which a fold that begins now should end. All folds get equal time."""
        if self.deadline is None:
            return None
        waiting = sum(len(running.waiting) for running in self.begun)
        waiting += (self.division.num_trials - self.next) * self.division.num_folds
        waves = math.ceil((num_training + waiting) / self.division.models_in_parallel)
        return time.time() + _TRAINING_SHARE * (self.deadline - time.monotonic()) / waves

    def _fill(self) -> bool:
        """Start a fold in every free slot, and return True if any fold is training."""
        taken = {slot for running in self.begun for slot in running.training.values()}
        for slot in range(self.division.models_in_parallel):
            if slot in taken:
                continue
            running = self._next_with_a_fold()
            if running is None:
                break
            fold = running.waiting.pop(0)
            running.training[fold] = slot
            taken.add(slot)
            folder = self.store.clean_fold(running.trial.number, fold)
            job = self._job(running.trial.number, fold, folder, slot=slot)
            job.until = self._soft_end(len(taken))
            self.backend.start(job, slot // self.division.folds_in_parallel)
        return bool(taken)

    def _next_with_a_fold(self) -> Running | None:
        """Return the first trial that may start another fold; None if there is none.

        Trials that were finished in an earlier run are skipped.
        """
        for running in self.begun:
            if running.waiting and len(running.training) < self.division.folds_in_parallel:
                return running
        while (begun := self._begin_next()) is not None:
            if begun.waiting:
                return begun
        return None

    def _begin_next(self) -> Running | None:
        number = self.next
        if number >= self.division.num_trials:
            return None
        params = self._params(number)
        if params is None:
            self.next = self.division.num_trials
            return None
        self.next += 1
        running = Running(Trial(number, params, [None] * self.division.num_folds, 0.0, "interrupted"))
        self.begun.append(running)
        self.store.begin_trial(number, params)
        for fold in range(self.division.num_folds):
            result = self.store.result(number, fold)
            if result is None:
                running.waiting.append(fold)
            else:
                running.add(fold, result)
        if running.over:
            self._end_trial(running)
        return running

    def _record(self, job: Job) -> None:
        running, fold = self.begun[job.trial], job.fold
        running.training.pop(fold, None)
        result = self.store.result(job.trial, fold)
        if result is None:
            running.trial.errors[fold] = (Path(job.folder) / "error.txt").read_text()
            self.view.print_failure(running.trial, fold)
        else:
            running.add(fold, result)
        if running.over:
            self._end_trial(running)

    def _end_trial(self, running: Running) -> None:
        running.end()
        trial = running.trial
        # Failures are reported too. Otherwise a searcher that models the space would propose the same setting again.
        self.searcher.tell(trial.number, trial.params, trial.score if trial.state == "done" else None)
        if self.keep_all:
            return
        over = [other.trial for other in self.begun if other.over]
        best = best_of(over, self.mode)
        for other in over:
            # Models of partial trials are kept: a later call may complete the trial, which may then be the best.
            if other.state == "done" and best is not None and other.number != best.number:
                self.store.forget_models(other.number)
