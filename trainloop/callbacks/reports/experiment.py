"""Callbacks of the tracking loops: a folder for each experiment, with its source, settings, checkpoints and results.

::

    <local_model_result_folder_path>/<project_name>/<experiment_name>_<time stamp>/
        hyperparams.json        the hyperparameters in JSON
        train.py                a copy of the script that created the loop
        source_code.zip         source_dirs, if given
        checkpoints/            ExperimentCheckpoint
        model.pt                ExperimentEndSave: the last state, a checkpoint like any other
        results/report.txt      and report.json: results, hyperparameters, history
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from trainloop import checkpoint, distributed
from trainloop._support.platform import absolute_path
from trainloop._support.user_line import user_place, warn
from trainloop.callbacks.arguments import count_of
from trainloop.callbacks.base import AbstractCallback, require_loader
from trainloop.callbacks.checkpoints.checkpoint import ModelCheckpoint
from trainloop.checkpoint import Folder
from trainloop.errors import ConfigurationError, UnpicklableError
from trainloop.history import format_table
from trainloop.result_package import evaluate_result_package

__all__ = ["Experiment", "ExperimentCheckpoint", "ExperimentEndSave", "ExperimentRecord"]

T = TypeVar("T")

_STAMP = "%Y-%m-%d_%H-%M-%S"
_LONGEST = 200  # bytes; a name of a folder has 255, with the time stamp
_RUN = re.compile(r"[^/\\]+_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(-\d+)?[/\\]")
"""Beginning of the path of a run's file, in the project's folder."""


class Experiment:
    """One experiment of a project: its folder, its hyperparameters and its source code.

    Parameters
    ----------
    project_name, experiment_name : str
        Names of folders.
    local_model_result_folder_path : str or path
        Folder of all projects, or an fsspec URL such as ``s3://bucket/results`` (extra ``cloud``).
    hyperparams : dict, optional
        Any values. Values that JSON can't represent are written as text. ``hyperparams['experiment_file_path']`` names
        the script, if it is not the file that created the loop.
    source_dirs : sequence of str or path
        Additional folders of source code, copied as a zip file.

    Attributes
    ----------
    timestamp : str
        Start time, such as ``2026-01-31_23-59-59``. A resumed run keeps the time stamp of the earlier run.
    folder : trainloop.checkpoint.Folder

    Raises
    ------
    ConfigurationError
        If a name is not valid for a folder, ``hyperparams`` is not a dict, or a source folder does not exist.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        local_model_result_folder_path: str | os.PathLike[str],
        hyperparams: Mapping[str, Any] | None = None,
        source_dirs: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        for what, name in (("project_name", project_name), ("experiment_name", experiment_name)):
            if not isinstance(name, str) or not name or {*"/\0"} & {*name} or name in (".", ".."):
                raise ConfigurationError(f"{what}={name!r}: must be the name of a folder, such as 'digits'.")
            if (size := len(name.encode(errors="replace"))) > _LONGEST:
                raise ConfigurationError(f"{what}={name[:40]!r}... has {size} bytes: use at most {_LONGEST}.")
        if hyperparams is not None and not isinstance(hyperparams, Mapping):
            raise ConfigurationError(
                f"hyperparams={hyperparams!r}: must be a dict. vars(args) converts parsed arguments to a dict."
            )
        self.project_name = project_name
        self.experiment_name = experiment_name
        self.local_model_result_folder_path = absolute_path(local_model_result_folder_path)
        self.hyperparams = dict(hyperparams or {})
        folders = [source_dirs] if isinstance(source_dirs, (str, os.PathLike)) else source_dirs
        self.source_dirs = [Path(path).expanduser().absolute() for path in folders]
        for path in self.source_dirs:
            if not path.is_dir():
                raise ConfigurationError(f"source_dirs: {path} is not a folder. Pass existing folders.")
        self._project = checkpoint.folder(local_model_result_folder_path) / project_name
        self._script = _read_script(self.hyperparams.get("experiment_file_path"))
        self.timestamp = self._new_timestamp()
        self.has_folder = False
        """True if the folder belongs to this run, or to the run that this one resumes."""

    @property
    def folder(self) -> Folder:
        return self._project / f"{self.experiment_name}_{self.timestamp}"

    def earlier_timestamps(self) -> list[str]:
        """Return the time stamps of this experiment's earlier runs, newest first."""
        prefix = f"{self.experiment_name}_"
        stamps = [name[len(prefix) :] for name in self._project.folders() if name.startswith(prefix)]
        return [stamp for stamp in reversed(stamps) if _is_timestamp(stamp)]

    def _new_timestamp(self) -> str:
        stamp, taken = time.strftime(_STAMP), set(self.earlier_timestamps())
        # If several runs start in the same second, a number is appended.
        return next(s for i in count(1) if (s := stamp if i == 1 else f"{stamp}-{i}") not in taken)

    def begin(self, loop: Any) -> None:
        """Create a folder for a training: another one if another run has created it since this object was made.

        Raises
        ------
        ConfigurationError
            If it is not writable.
        """
        self.folder.check_writable()
        if loop.is_global_zero and not self.has_folder:
            while not self.folder.claim():
                self.timestamp = self._new_timestamp()
            self.has_folder = True

    def record(self) -> None:
        """Write hyperparameters and source code. If a file with different content exists, write a numbered one."""
        hyperparams = {**self.hyperparams, **({"experiment_file_path": self._script[1]} if self._script else {})}
        self._write_beside("hyperparams.json", _json(hyperparams).encode("utf-8", "backslashreplace"))
        if self._script is not None:
            name, _, text = self._script
            self._write_beside(name, text)
        if self.source_dirs:
            self._write_beside("source_code.zip", _zipped(self.source_dirs, Path(self._project.location)))

    def _write_beside(self, name: str, content: bytes) -> None:
        folder = self.folder
        stem, dot, ending = name.rpartition(".")
        present = set(folder.names())
        for version in count(1):
            candidate = name if version == 1 else f"{stem or ending}_{version}{dot}{ending if stem else ''}"
            if candidate not in present:
                folder.write(candidate, lambda file: file.write(content))
                return
            with folder.open(candidate) as file:
                if file.read() == content:
                    return


class ExperimentRecord(AbstractCallback):
    """Write the experiment's hyperparameters and source when training begins.

    Parameters
    ----------
    experiment : Experiment
    """

    writes = True

    def __init__(self, experiment: Experiment) -> None:
        super().__init__("ExperimentRecord", execution_order=-100)
        self.experiment = experiment

    def on_train_loop_registration(self) -> None:
        self.experiment.begin(self.train_loop_obj)

    def on_train_begin(self) -> None:
        # Ranks started by a launcher may have different time stamps.
        self.experiment.timestamp = distributed.broadcast_object(self.experiment.timestamp)
        if self.train_loop_obj.is_global_zero:
            self.experiment.record()


class ExperimentCheckpoint(ModelCheckpoint):
    """Write checkpoints into the experiment's folder.

    ``fit(resume_from='last')`` continues in the folder of the experiment's newest earlier run that has a checkpoint.

    Parameters
    ----------
    experiment : Experiment
    rm_subopt_local_models : bool or str
        ``True`` keeps only the best checkpoints by ``loss``. The name of a metric keeps the best checkpoints by that
        metric; the name must show whether lower or higher is better. Default: keep all.
    num_best_checkpoints_kept : int
        Number of best checkpoints to keep.
    iteration_save_freq : int
        Optimizer steps between two checkpoints; 0 to write one after each epoch instead.
    **more
        Other arguments of :class:`ModelCheckpoint`, which take precedence.
    """

    writes = True

    def __init__(
        self,
        experiment: Experiment,
        rm_subopt_local_models: bool | str = False,
        num_best_checkpoints_kept: int = 2,
        iteration_save_freq: int = 0,
        **more: Any,
    ) -> None:
        count_of(type(self).__name__, "iteration_save_freq", iteration_save_freq, least=0)
        arguments: dict[str, Any] = {"keep": None}
        if rm_subopt_local_models is not False:
            monitor = "loss" if rm_subopt_local_models is True else rm_subopt_local_models
            arguments = {"monitor": monitor, "mode": "auto", "keep": num_best_checkpoints_kept}
        if iteration_save_freq:
            arguments.update(every_n_epochs=None, every_n_steps=iteration_save_freq)
        self.experiment = experiment
        super().__init__((experiment.folder / "checkpoints").location, **{**arguments, **more})

    def last_state(self, *, whole: bool = True) -> dict[str, Any] | None:
        return self._in_earlier_places(partial(super().last_state, whole=whole))

    def last_stamp(self) -> int:
        return self._in_earlier_places(super().last_stamp) or 0

    def _in_earlier_places(self, find: Callable[[], T]) -> T | None:
        """Use the folder of the newest earlier run in which a function finds anything, and return this."""
        for stamp in self.experiment.earlier_timestamps():
            self.place = stamp
            if found := find():
                self.experiment.has_folder = True
                return found
        self.place, self.experiment.has_folder = self.experiment._new_timestamp(), False
        return None

    @property
    def place(self) -> str:
        """Time stamp of the run whose folder the checkpoints are in."""
        return self.experiment.timestamp

    @place.setter
    def place(self, timestamp: str) -> None:
        self.experiment.timestamp = timestamp
        self._checkpoints.folder = self.experiment.folder / "checkpoints"

    def on_train_loop_registration(self) -> None:
        self.experiment.begin(self.train_loop_obj)
        self.place = self.experiment.timestamp
        super().on_train_loop_registration()

    def on_train_begin(self) -> None:
        self.place = distributed.broadcast_object(self.place)
        super().on_train_begin()


class ExperimentEndSave(AbstractCallback):
    """Evaluate result packages at the end of training, and save the model and a report.

    If evaluating or writing fails, a warning is issued and the report mentions the error, so that the trained model is
    not lost.

    Parameters
    ----------
    experiment : Experiment
    val_result_package, test_result_package
        Package for :func:`trainloop.result_package.evaluate_result_package`, evaluated on that dataset's predictions.

    Attributes
    ----------
    results : dict
        ``{'validation': {metric: value}, 'test': ...}``, after training.

    Raises
    ------
    ConfigurationError
        At ``fit``, if there is a package for a dataset that the loop does not have.
    """

    writes = True

    def __init__(self, experiment: Experiment, val_result_package: Any = None, test_result_package: Any = None) -> None:
        # Runs after ModelCheckpoint, so that the checkpoint file is already on disk.
        super().__init__("ExperimentEndSave", execution_order=1001)
        self.experiment = experiment
        self.val_result_package = val_result_package
        self.test_result_package = test_result_package
        self.results: dict[str, dict[str, float]] = {}

    def on_train_loop_registration(self) -> None:
        self.experiment.begin(self.train_loop_obj)
        for name, package, loader in (
            ("val_result_package", self.val_result_package, "validation_loader"),
            ("test_result_package", self.test_result_package, "test_loader"),
        ):
            if package is not None:
                require_loader(self.train_loop_obj, loader, name)

    def state_dict(self) -> dict[str, Any]:
        return {"results": {part: dict(values) for part, values in self.results.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.results = state.get("results", {})

    def on_train_end(self) -> None:
        loop = self.train_loop_obj
        self.results, problems = {}, []
        for part, package, loader, loss in (
            ("validation", self.val_result_package, loop.validation_loader, loop.evaluate_loss_on_validation_set),
            ("test", self.test_result_package, loop.test_loader, loop.evaluate_loss_on_test_set),
        ):
            if package is None:
                continue
            # All ranks predict together. Rank 0 receives the rows and evaluates them.
            y_pred, y_true, metadata = loop.predict_with_model(loader, dataset_info={"type": part}, rows_to="main")
            if getattr(package, "requires_loss", False):
                metadata = {**(metadata or {}), "loss": loss()}
            if loop.is_global_zero:
                score = partial(self._score, part, package, y_pred, y_true, metadata)
                problems += self._guarded(f"scoring with the {part} result package", score)
        try:
            self.results = distributed.broadcast_object(self.results)
        except UnpicklableError as error:  # without a key, ranks exchange only plain values
            warn(f"only rank 0 has the results: {error}", RuntimeWarning)
        state = loop.checkpoint_state()
        if state is not None:
            where = self.experiment.folder
            info = checkpoint.CheckpointInfo(loop.epoch, loop.global_step, reason="end")
            problems += self._guarded("saving the model", lambda: checkpoint.save(where.path("model.pt"), state, info))
            self._guarded("writing the report", lambda: self._write_report(problems))

    def _score(self, part: str, package: Any, y_pred: Any, y_true: Any, metadata: Any) -> None:
        if hasattr(package, "hyperparameters"):
            package.hyperparameters = self.experiment.hyperparams
        self.results[part] = evaluate_result_package(package, y_pred, y_true, metadata)

    def _guarded(self, what: str, work: Callable[[], None]) -> list[str]:
        try:
            work()
        except Exception as error:
            problem = f"{what} failed: {type(error).__name__}: {error}"
            warn(f"{problem}. The trained model is not affected.", RuntimeWarning)
            return [problem]
        return []

    def _write_report(self, problems: list[str]) -> None:
        loop, it = self.train_loop_obj, self.experiment
        where = it.folder / "results"
        report = {
            "project": it.project_name,
            "experiment": it.experiment_name,
            "timestamp": it.timestamp,
            "epochs": loop.epoch,
            "steps": loop.global_step,
            "results": self.results,
            "problems": problems,
            "hyperparams": it.hyperparams,
            "history": loop.history.to_dict(),
        }
        where.write_text("report.json", _json(report))
        title = f"{it.project_name}: {it.experiment_name} ({it.timestamp})"
        lines = [title, "=" * len(title), f"{loop.epoch} epochs, {loop.global_step} steps", ""]
        for heading, values in (*self.results.items(), ("hyperparameters", it.hyperparams)):
            if values:
                width = max(len(str(name)) for name in values)
                lines += [heading.capitalize(), "-" * len(heading)]
                lines += [f"{name!s:<{width}}  {_shown_value(value)}" for name, value in values.items()]
                lines += [""]
        if problems:
            lines += ["Problems", "--------", *problems, ""]
        lines += ["History", "-------", format_table(loop.history.rows()) if len(loop.history) else "empty", ""]
        where.write_text("report.txt", "\n".join(lines))


# -- source and JSON ---------------------------------------------------------------------------------------------------


def _read_script(path: Any) -> tuple[str, str, bytes] | None:
    """Return name, path and content of the script at ``path``; if ``path`` is None, of the file that called trainloop.

    In a notebook without a file, the content is the cells that have been run. None if there is no script.
    """
    path = user_place().file if path is None else path
    try:
        return os.path.basename(path), os.path.abspath(path), Path(path).expanduser().read_bytes()
    except OSError:
        cells = _notebook_cells()
        if cells is not None:
            return "notebook.py", str(path), cells.encode("utf-8")
        return None


def _notebook_cells() -> str | None:
    """Return the cells that have been run so far in this notebook; None outside of notebooks."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return None
    return "\n\n".join(f"# In [{i}]\n{cell}" for i, cell in enumerate(shell.user_ns.get("In", [])) if cell)


def _zipped(folders: Sequence[Path], project: Path) -> bytes:
    """Return a zip archive of the folders' files without ``__pycache__`` and the project's runs.

    Equal files give equal bytes.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for folder in folders:
            for path in sorted(folder.rglob("*")):
                of_run = path.is_relative_to(project) and _RUN.match(f"{path.relative_to(project)}/")
                if path.is_file() and "__pycache__" not in path.parts and not of_run:
                    name = str(Path(folder.name) / path.relative_to(folder))
                    entry = zipfile.ZipInfo(name.encode("utf-8", "backslashreplace").decode("utf-8"))
                    archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _is_timestamp(text: str) -> bool:
    try:
        time.strptime(text[:19], _STAMP)
    except ValueError:
        return False
    return True


def _json(values: Mapping[str, Any]) -> str:
    try:
        plain = _jsonable(values)
    except RecursionError:  # a value contains itself
        plain = {str(name): repr(value) for name, value in values.items()}
    return json.dumps(plain, indent=2, ensure_ascii=False) + "\n"


def _jsonable(value: Any) -> Any:
    """Convert a value to JSON types: arrays become lists; NaN, infinity and other objects become text."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_jsonable(item) for item in value]
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        try:
            return _jsonable(value.tolist())
        except RuntimeError:  # a sparse tensor, or one on the meta device
            return repr(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    names = [getattr(value, name, None) for name in ("__module__", "__qualname__")]  # a generator has no module
    return ".".join(filter(None, names)) if names[1] else repr(value)


def _shown_value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
