"""Write scalars, learning rates, histograms, hyperparameters, figures and the graph for TensorBoard."""

from __future__ import annotations

import copy
import io
import itertools
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainloop import __version__
from trainloop._support import rng
from trainloop._support.distribution import pip_install
from trainloop._support.nested import tensors_of
from trainloop._support.user_line import warn
from trainloop.callbacks.arguments import check_flags, count_of, dict_of, path_of
from trainloop.callbacks.base import logs_nothing, runs_first
from trainloop.callbacks.reports.event_files import SUFFIX, EventFile, EventLog
from trainloop.callbacks.reports.trackers import Tracker, as_text
from trainloop.callbacks.weights.train_schedule import groups_with_rates
from trainloop.checkpoint.storage import folder, why_not_writable
from trainloop.devices import has_ranks
from trainloop.errors import ConfigurationError
from trainloop.optim.optimizers import optimizers_of

__all__ = ["TensorBoard"]


class TensorBoard(Tracker):
    """Write logged values for TensorBoard. Rank 0 writes each value once, against the global step.

    Values are written under their names. If a metric has step values, its epoch values are written as
    ``epoch/<name>``. Learning rates are written as ``lr`` (see
    :class:`~trainloop.callbacks.weights.train_schedule.LearningRateMonitor`).

    The page *Custom scalars* has a chart for each quantity, with its training, validation and test values together. The
    page *Text* describes the run, and the page *HParams* compares runs by their settings.

    Parameters
    ----------
    log_dir : str or path, optional
        Folder to write to. Default: a new folder, ``runs/<date and time>_<class of the model>``. If the folder already
        has the curves of another run, the run writes to a new folder in it: ``run-2``, ``run-3``, ...
    log_every_n_steps : int, optional
        Write the values of every n-th step. ``None`` writes only epoch values.
    learning_rate : bool
        Write learning rates with the step values.
    histograms_every_n_epochs : int, optional
        Epochs between two histograms of all parameters. Default: no histograms.
    hyperparameters : mapping, optional
        Entries for TensorBoard's table of runs, in addition to the epoch values and the loop's settings (mode,
        effective batch size, optimizer, learning rates, ...). Numbers (also numpy's, and those in 0-d tensors), strings
        and booleans keep their type; other values are written as text. Default: the hyperparameters of the loop, if it
        is a ``TrainLoopCheckpoint`` or similar.
    graph_input : Tensor or tuple, optional
        Inputs of ``model.forward`` to draw the model's graph. Default: no graph.

    Attributes
    ----------
    log_dir : str or None
        Folder that the callback writes to. If you did not pass one, it is None until ``fit``. A new folder in the one
        that you passed is chosen by ``fit``.

    Raises
    ------
    ConfigurationError
        If a number is below 1; at ``fit``, if the folder is not writable.

    Warns
    -----
    RuntimeWarning
        If writing fails later (for example, on a full disk). Training then continues without TensorBoard.

    Notes
    -----
    A second ``fit`` of a loop and a resumed run write a new file into the same folder. Values of repeated steps replace
    the earlier ones: TensorBoard shows each step once. Values are written to disk about every hundred steps, when logs
    are flushed. Ten scalars per step cost about 40 microseconds per step.

    Examples
    --------
    >>> board = TensorBoard(log_every_n_steps=10)
    >>> tl.fit(num_epochs=10, callbacks=[board])
    >>> board.log_dir
    'runs/2026-11-21_09-00-00_Net'

    .. code-block:: console

       $ tensorboard --logdir runs
    """

    shared = (*Tracker.shared, "log_dir")

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        log_every_n_steps: int | None = 50,
        *,
        learning_rate: bool = True,
        histograms_every_n_epochs: int | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        graph_input: Any = None,
    ) -> None:
        settings = dict_of("TensorBoard", "hyperparameters", hyperparameters)
        super().__init__("TensorBoard", ("log_every_n_steps", log_every_n_steps), settings)
        self.log_dir = path_of("TensorBoard", "log_dir", log_dir, optional=True)
        self.state_key = self.log_dir or ""
        self.learning_rate = learning_rate
        check_flags(type(self).__name__, learning_rate=self.learning_rate)
        self.histograms_every_n_epochs = count_of(
            "TensorBoard", "histograms_every_n_epochs", histograms_every_n_epochs, optional=True
        )
        self.graph_input = graph_input
        self._given = self.log_dir
        self._log = EventLog()
        self._failed = False
        self._rates: dict[int, dict[str, Any]] = {}
        self._once_written = False
        self._settings: dict[str, Any] = {}
        self._charted: set[str] = set()  # quantities that have a chart

    # -- the folder --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        super().reset()
        self._log = EventLog()
        self.log_dir = self._given  # another training has another folder

    def on_train_loop_registration(self) -> None:
        loop = self.train_loop_obj
        if self.histograms_every_n_epochs is not None and loop.gpu_mode == "fsdp":
            raise ConfigurationError(
                f"TensorBoard(histograms_every_n_epochs={self.histograms_every_n_epochs}) with gpu_mode='fsdp': rank 0 "
                "writes the histograms, but has only a shard of each parameter. Leave histograms out, or use "
                "GradientStats."
            )
        if self.graph_input is not None and loop.gpu_mode == "fsdp":
            raise ConfigurationError(
                "TensorBoard(graph_input=...) with gpu_mode='fsdp': rank 0 draws the graph, but has only a shard of "
                "each parameter. Leave it out, or draw the graph in a short run with gpu_mode='single'."
            )
        others = [one for one in loop.callbacks if isinstance(one, TensorBoard) and one is not self]
        if any(one._given == self._given is not None for one in others):
            raise ConfigurationError(
                f"callbacks has two TensorBoards with log_dir={self._given!r}, and one would replace the curves of the "
                "other. Pass another log_dir to one, or leave it out."
            )
        if self.log_dir is None:
            self.log_dir = _new_folder(_run_folders(type(loop.model).__name__), claim=loop.is_global_zero)
            self._once_written = False
        elif loop.global_step == 0 and self.log_dir == self._given:  # a run that resumes replaces it later
            self.log_dir = _folder_in(self.log_dir, claim=loop.is_global_zero)
        if loop.is_global_zero:
            assert self.log_dir is not None
            why = "" if "://" in self.log_dir else why_not_writable(self.log_dir)
            if why:
                raise ConfigurationError(f"TensorBoard: log_dir={self.log_dir!r}: {why}. Choose another log_dir.")
        super().on_train_loop_registration()

    def on_train_begin(self) -> None:
        super().on_train_begin()
        loop = self.train_loop_obj
        self._rates, self._failed = {}, False
        self._log.begin_run()
        self._settings, self._charted = settings_of(loop), set()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Return a context in which an OSError ends all further writing, because the file may end in half a record.

        Training continues.
        """
        try:
            yield
        except OSError as error:
            self._failed = True
            warn(
                f"TensorBoard: writing to {self.log_dir} failed ({error}). Training continues, but nothing more is "
                "written there. Before the next run, free space, or choose another log_dir.",
                RuntimeWarning,
            )

    def _open(self) -> EventFile:
        """Return the event file, created at the first write."""
        assert self.log_dir is not None, "on_train_loop_registration comes first"
        now, elsewhere = self.train_loop_obj.global_step, self._given not in (None, self.log_dir)
        if self._log.file is None and elsewhere and self._log.first_step(now) <= 1:
            text = f"{self._given} has the curves of another run, so this run writes to {self.log_dir}"
            self.train_loop_obj.report(f"TensorBoard: {text}.")
        return self._log.open_at(self.log_dir, now)

    # -- the values --------------------------------------------------------------------------------------------------

    @runs_first  # schedulers set the next step's rate in this hook
    def on_after_optimizer_step(self) -> None:
        step = self.train_loop_obj.global_step
        self._log.note_step(step)
        every = self.log_every_n_steps
        if every is None or not self.learning_rate:
            return
        if step % every == 0:
            rates = {name: group["lr"] for name, group in groups_with_rates(self.train_loop_obj.optimizer)}
            self._rates[step] = {
                name: rate.clone() if isinstance(rate, Tensor) else rate for name, rate in rates.items()
            }

    def on_log(self, rows: Sequence[tuple[int, dict[str, float]]]) -> None:
        if self.log_every_n_steps is not None and not self._failed and rows:
            with self._writing():
                super().on_log(rows)
            self._log.note(rows[-1][0])

    def _send(self, rows: Sequence[tuple[int, dict[str, float]]]) -> None:
        # If LearningRateMonitor has logged the same names, its values are used.
        rows = [(step, {**_floats(self._rates.pop(step, {})), **scalars}) for step, scalars in rows]
        self._open()
        self._log.write_scalars(rows)

    def _send_epochs(self) -> None:
        if not self._failed:
            with self._writing():
                super()._send_epochs()

    def _send_epoch(self, epoch: int, step: int, values: dict[str, float]) -> None:
        super()._send_epoch(epoch, step, values)
        self._log.note(step)

    @logs_nothing
    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        if not self._failed:
            with self._writing():
                self._write_run()

    def _write_run(self) -> None:
        every = self.histograms_every_n_epochs
        if every is not None and (self.train_loop_obj.epoch + 1) % every == 0:
            self._write_histograms()
        self._write_layout()
        if not self._once_written:
            self._once_written = True
            self._write_settings()
            self._write_graph()

    def _write_histograms(self) -> None:
        from torch.utils.tensorboard.summary import histogram

        loop = self.train_loop_obj
        for name, parameter in loop.model.named_parameters():
            values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            values = values.detach().float().cpu()
            values = values[values.isfinite()]  # numpy's histogram needs finite values
            if values.numel():
                low, high = map(float, values.aminmax())
                half = max(0.5, abs(low) * 1e-9) if low == high else 0.0  # numpy's own edges fail for large constants
                edges = np.linspace(low - half, high + half, 65)
                summary = histogram(f"parameters/{name}", values.numpy(), bins=edges)
                self._open().write(step=loop.global_step, summary=summary)

    def _write_layout(self) -> None:
        """Write the layout again if there is a new quantity. TensorBoard uses the newest layout."""
        names = [*self.train_loop_obj.history, *sorted(self._step_names)]
        if self.learning_rate and self.log_every_n_steps is not None:
            names += [name for name, _ in groups_with_rates(self.train_loop_obj.optimizer)]
        quantities = set(map(quantity_of, names))
        if not quantities <= self._charted:
            self._charted |= quantities
            self._open().write(step=self.train_loop_obj.global_step, summary=chart_layout(names))

    def _write_settings(self) -> None:
        from torch.utils.tensorboard.summary import hparams, text

        given = {**self._settings, **(self.hyperparams or {})}
        self._open().write(summary=text("run", description_of(self.train_loop_obj, given)))
        plain = {name: _plain(value) for name, value in given.items()}
        metrics = {self._epoch_name(name): 0.0 for name in self.train_loop_obj.history}
        for summary in hparams(plain, metrics):
            self._open().write(summary=summary)

    def write_figure(self, tag: str, figure: Any, close: bool = True) -> None:
        """Write a ``matplotlib.figure.Figure`` as an image at this step, on rank 0 only.

        Parameters
        ----------
        tag : str
        figure : matplotlib.figure.Figure
        close : bool
            Close the figure, on all ranks, as torch's ``add_figure`` does. Otherwise pyplot keeps it in memory.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        try:
            if self._writes:
                png = io.BytesIO()
                figure.savefig(png, format="png", dpi=100)
                width, height = (round(100 * inches) for inches in figure.get_size_inches())
                image = Summary.Image(encoded_image_string=png.getvalue(), width=width, height=height, colorspace=4)
                self.write_summary(Summary(value=[Summary.Value(tag=tag, image=image)]))
        finally:
            if close and "matplotlib.pyplot" in sys.modules:
                sys.modules["matplotlib.pyplot"].close(figure)

    def write_images(self, tag: str, images: Tensor) -> None:
        """Write a batch of images as one image at this step, on rank 0 only.

        Parameters
        ----------
        tag : str
        images : Tensor, shape (n, channels, height, width)
            Images with one or three channels, on any device: floats from 0 to 1, or ``uint8``.
        """
        shape = tuple(images.shape)
        if len(shape) != 4 or shape[1] not in (1, 3) or not images.numel():
            raise ConfigurationError(
                f"TensorBoard.write_images({tag!r}): images has shape {shape}, but must be (n, 1 or 3 channels, "
                "height, width). For a single image, pass images[None]. Without channels, pass images[:, None]."
            )
        if not self._writes:
            return
        from torch.utils.tensorboard.summary import image

        try:
            summary = image(tag, images.detach().cpu(), dataformats="NCHW")
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"TensorBoard.write_images needs Pillow: {pip_install('plot')}, or leave the images out."
            ) from error
        self.write_summary(summary)

    def write_summary(self, summary: Any) -> None:
        """Write a result of ``torch.utils.tensorboard.summary`` (text, audio, ...), on rank 0 only."""
        if self._writes:
            with self._writing():
                self._open().write(step=self.train_loop_obj.global_step, summary=summary)

    @property
    def _writes(self) -> bool:
        return not self._failed and self.train_loop_obj.is_global_zero

    def _write_graph(self) -> None:
        if self.graph_input is None:
            return
        from torch.utils.tensorboard._pytorch_graph import graph

        loop, model = self.train_loop_obj, self.train_loop_obj.model
        inputs = self.graph_input if isinstance(self.graph_input, tuple) else (self.graph_input,)
        inputs = tuple(x.to(model.device) if isinstance(x, Tensor) else x for x in inputs)
        # Drawing the graph runs the model, which may count, remember or draw random numbers: it runs a copy. torch
        # copies no tensors that an operation has computed, such as outputs that a model keeps.
        kept = (t for part in model.modules() for t in tensors_of(vars(part)) if not t.is_leaf)
        copied = {id(t): t.detach().clone() for t in kept}
        with rng.isolated(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tracing warns about code that it can't follow, which the graph may omit
            try:
                graph_def, _ = graph(copy.deepcopy(model, {id(loop): loop, **copied}).eval(), inputs)
            except Exception as error:
                raise ConfigurationError(
                    f"TensorBoard: graph_input: torch.jit.trace can't trace the model with it: {error} Pass what "
                    "forward takes, as a tensor or a tuple; leave it out if the model can't be traced."
                ) from error
        self._open().write(graph_def=graph_def.SerializeToString())

    # -- end of training, and restart ----------------------------------------------------------------------------------

    def _finish(self, exception: BaseException | None) -> None:
        # close() flushes. After a failed write, an error in close() is ignored, and the buffered values are lost.
        with suppress(OSError) if self._failed else self._writing():
            self._log.close()
        self._rates = {}

    def on_restart(self, failure: Any) -> None:
        """Make TensorBoard ignore the values that the failed process wrote after this step.

        ``load_state_dict`` does the same, but is not called if there was no checkpoint.
        """
        self._log.distrust()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rates": {}}

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "log_dir": self.log_dir,
            "folder_of_run": self._folder_of_run(),
            "once_written": self._once_written,
            "newest": list(self._log.newest),
        }

    def _folder_of_run(self) -> str:
        """Return the name of the folder in the given one that this run writes to; '' if it writes to the given one."""
        if self.log_dir is None or self._given is None or self.log_dir == self._given:
            return ""
        return os.path.relpath(self.log_dir, self._given)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        claimed = self.log_dir
        if self._given is None:
            self.log_dir = state["log_dir"]
        else:  # older checkpoints lack the entry
            own = state.get("folder_of_run", "")
            self.log_dir = os.path.join(self._given, own) if own else self._given
        loop = self.train_loop_obj
        if claimed not in (None, self.log_dir, self._given) and loop is not None and loop.is_global_zero:
            with suppress(OSError):
                os.rmdir(claimed)  # only if it is empty: created for a run that resumes another one
        self._once_written = state["once_written"] and self.log_dir == state["log_dir"]
        self._log.distrust()  # the run that wrote the checkpoint may have written later values
        step, scalars = state.get("newest", (0, {}))
        self._log.newest = step, dict(scalars)
        self._finish(None)


def _floats(rates: dict[str, Any]) -> dict[str, float]:
    return {name: float(rate) for name, rate in rates.items()}


def _plain(value: Any) -> bool | int | float | str:
    """Return a number of numpy, or in a 0-d array or tensor, as Python's, and an object that is no number as text."""
    if isinstance(value, (np.generic, np.ndarray, Tensor)) and value.ndim == 0:
        value = value.item()
    # TensorBoard's numbers are floats.
    number = isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)
    return value if number else as_text(value)


def _new_folder(candidates: Iterable[str], *, claim: bool) -> str:
    """Return the first folder that this process can create; without ``claim``, the first one, for a rank without it."""
    return next(path for path in candidates if not claim or folder(path).claim())


def _run_folders(name: str) -> Iterator[str]:
    stem = os.path.abspath(os.path.join("runs", f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{name}"))
    yield stem
    yield from (f"{stem}_{n}" for n in itertools.count(2))


def _folder_in(given: str, *, claim: bool) -> str:
    """Return the folder for a new run: ``given``, or a new folder in it if it has the curves of another run."""
    if "://" in given or not any(Path(given).glob(f"events.out.tfevents.*{SUFFIX}")):
        return given
    return _new_folder((os.path.join(given, f"run-{n}") for n in itertools.count(2)), claim=claim)


_DATASETS = "train|val|test"
# Words in a quantity's name, and the sections for them, which are shown first. The other sections are named by the part
# of a name before a slash.
_SECTIONS = {"loss": "loss", "acc": "accuracy"}


def quantity_of(name: str) -> str:
    """Return the metric's name without the prefix of its dataset."""
    return re.sub(f"^({_DATASETS})_", "", name)


def chart_layout(names: Iterable[str]) -> Any:
    """Return a ``Summary`` with the layout of TensorBoard's page of custom scalars.

    The layout has one chart for each quantity, with its step values and epoch values of all datasets. The sections are
    ``loss``, ``accuracy``, one for each name before a slash (``lr`` for ``lr/group0``), and ``metrics``.

    Parameters
    ----------
    names : iterable of str
        Names of metrics in the history, without ``epoch/``.
    """
    from torch.utils.tensorboard.summary import custom_scalars

    sections: dict[str, dict[str, list[Any]]] = {section: {} for section in _SECTIONS.values()}
    for quantity in dict.fromkeys(map(quantity_of, names)):
        tags = f"^(epoch/)?(({_DATASETS})_)?{re.escape(quantity)}$"
        sections.setdefault(_section(quantity), {})[quantity] = ["Multiline", [tags]]
    sections["lr"] = sections.pop("lr", {})  # moves it to the end
    return custom_scalars({section: charts for section, charts in sections.items() if charts})


def _section(quantity: str) -> str:
    for word, section in _SECTIONS.items():
        if word in quantity.lower():
            return section
    first, slash, _ = quantity.partition("/")
    return first if slash or first == "lr" else "metrics"


def settings_of(loop: Any) -> dict[str, Any]:
    """Return the known settings for tables that compare runs: mode, batch size, optimizer, rates."""
    optimizers = optimizers_of(loop.optimizer)
    config = loop.run_config
    device = config.devices[0]
    settings = {
        "gpu_mode": loop.gpu_mode,
        "devices": f"{config.num_ranks if has_ranks(config.mode) else len(config.devices)} x {device.type}",
        "effective_batch_size": loop.effective_batch_size,
        "grad_accumulation": loop.grad_accumulation,
        "amp": loop.options.amp.described(device).removeprefix(", AMP ") or "off",
        "seed": loop.seed,
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in optimizers),
    }
    for name, group in groups_with_rates(loop.optimizer):
        settings[name] = float(group.get("initial_lr", group["lr"]))
    first = optimizers[0].param_groups[0]
    if "weight_decay" in first:
        settings["weight_decay"] = float(first["weight_decay"])
    return {name: value for name, value in settings.items() if value is not None}


def description_of(loop: Any, settings: Mapping[str, Any]) -> str:
    """Return a Markdown table that describes the run: devices, settings, versions."""
    devices = [str(device) for device in loop.run_config.devices]
    if loop.device.type == "cuda":
        devices.append(torch.cuda.get_device_name(loop.device))
    rows = {
        "loop": repr(loop),
        "devices": ", ".join(devices),
        "host": platform.node(),
        "versions": f"trainloop {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "script": os.path.basename(sys.argv[0]),  # without arguments, since they may contain a token
        **settings,
    }
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])


def _cell(value: Any) -> str:
    return as_text(value).replace("|", "\\|").replace("\n", " ")
