"""Callbacks that measure steps with torch's profiler, or count samples, tokens and FLOPs per second."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainloop._support.user_line import warn
from trainloop.callbacks.arguments import check_counts, check_flags, number_of, path_of
from trainloop.callbacks.base import AbstractCallback, logs_nothing, require_alone
from trainloop.callbacks.files import warning_if_not_written
from trainloop.devices import has_replicas
from trainloop.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

__all__ = ["Profiler", "ThroughputMonitor"]


@dataclass(eq=False, repr=False)
class Profiler(AbstractCallback):
    """Profile some steps of the training with ``torch.profiler``, and write a Chrome trace on every rank.

    After ``skip`` steps, ``warmup`` steps are traced and discarded. The next ``active`` steps are written to
    ``<dirpath>/rank<r>_step<last step>.pt.trace.json``, for ``chrome://tracing``, https://ui.perfetto.dev and
    TensorBoard's profiler plugin. Steps before and after the traced ones are not slowed down. A run that is resumed or
    restarted is profiled again, counting from its own first step.

    Parameters
    ----------
    dirpath : str or path
        Folder to write to.
    skip, warmup, active : int
        Numbers of optimizer steps.
    record_shapes, profile_memory, with_stack, with_flops : bool
        Arguments of ``torch.profiler.profile``; each costs time.
    device_idx_execution : int, optional
        The only rank to profile. Default: every rank.

    Attributes
    ----------
    traces : list of str
        Files that this rank has written (after ``fit`` in ``ddp``, the files of rank 0).
    table : str
        Table of the most expensive operators, formatted by ``key_averages().table()``.

    Examples
    --------
    >>> profiler = Profiler("profile", active=3)
    >>> tl.fit(num_epochs=1, callbacks=[profiler])
    >>> print(profiler.table)
    """

    writes = True

    dirpath: str | os.PathLike[str] = "profile"
    _: KW_ONLY
    skip: int = 10
    warmup: int = 2
    active: int = 5
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    device_idx_execution: int | None = None
    # Not pickled: an unpickled copy has no running profiler.
    _running: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        # Runs last, because a step ends after all hooks.
        super().__init__("Profiler", execution_order=1000, device_idx_execution=self.device_idx_execution)
        self.dirpath = str(path_of("Profiler", "dirpath", self.dirpath))
        check_counts(self, "skip", least=0)
        check_counts(self, "warmup", "active")
        check_flags(
            type(self).__name__,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
        )
        self.traces: list[str] = []
        self.table = ""
        self._steps = 0

    def on_train_loop_registration(self) -> None:
        end = self.skip + self.warmup + self.active
        for other in self.train_loop_obj.callbacks:
            if not isinstance(other, Profiler) or other is self or not self.skip <= other.skip <= end:
                continue
            if None in (ranks := {self.device_idx_execution, other.device_idx_execution}) or len(ranks) == 1:
                raise ConfigurationError(
                    f"callbacks has two Profilers of overlapping steps, with skip={self.skip} and skip={other.skip}, "
                    f"but torch profiles only once at a time. Pass skip={end + 1} or more to the second, or leave one "
                    "out."
                )
        try:
            os.makedirs(self.dirpath, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"Profiler: dirpath={self.dirpath!r} can't be created ({error}).") from error

    def on_train_begin(self) -> None:
        loop = self.train_loop_obj
        if has_replicas(loop.gpu_mode, loop.run_config.devices):
            warn(
                "Profiler with gpu_mode='dp': torch does not profile the threads of several replicas, so that the "
                "forward passes are missing on the CPU. Profile gpu_mode='single' or 'ddp'."
            )
        self._steps = 0
        self._begin_if_due()

    def _begin_if_due(self) -> None:
        if self._running is None and self._steps == self.skip:
            profiler = torch.profiler
            activities = [profiler.ProfilerActivity.CPU]
            if self.train_loop_obj.device.type == "cuda":
                activities.append(profiler.ProfilerActivity.CUDA)
            schedule = profiler.schedule(wait=0, warmup=self.warmup, active=self.active, repeat=1)
            self._running = profiler.profile(
                activities=activities,
                schedule=schedule,
                on_trace_ready=self._write_trace,
                record_shapes=self.record_shapes,
                profile_memory=self.profile_memory,
                with_stack=self.with_stack,
                with_flops=self.with_flops,
                acc_events=True,
            )
            self._running.start()

    @logs_nothing
    def on_after_optimizer_step(self) -> None:
        self._steps += 1
        if self._running is None:
            self._begin_if_due()
            return
        self._running.step()
        if self._steps == self.skip + self.warmup + self.active:
            self._stop_profiler()

    def _write_trace(self, running: Any) -> None:
        loop = self.train_loop_obj
        path = os.path.join(self.dirpath, f"rank{loop.rank}_step{loop.global_step}.pt.trace.json")
        with warning_if_not_written("Profiler", path):
            running.export_chrome_trace(path)
            self.traces.append(path)
        by = "self_cuda_time_total" if loop.device.type == "cuda" else "self_cpu_time_total"
        self.table = running.key_averages().table(sort_by=by, row_limit=15)

    def _stop_profiler(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            running.stop()  # this writes a trace if active steps were traced

    @logs_nothing
    def on_train_end(self) -> None:
        self._stop_profiler()

    def on_exception(self, exception: BaseException) -> None:
        self._stop_profiler()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_running"}


# Peak 16-bit FLOPs per second without sparsity, from NVIDIA's data sheets. The first key that a GPU's name contains
# applies.
_PEAKS = {
    "GB200": 2.5e15, "B200": 2.25e15, "H200 NVL": 835e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H100": 989e12, "GH200": 989e12, "A100": 312e12, "A30": 165e12, "A10G": 70e12, "A10": 125e12, "L40S": 362e12,
    "L40": 181e12, "L4": 121e12, "V100": 125e12, "V100S": 130e12, "T4": 65e12,
}  # fmt: skip


def _peak_of(name: str) -> float | None:
    """Return the peak FLOPs of a GPU; None if its name is unknown, or is that of a MIG instance, a part of a GPU."""
    if "MIG" in name:
        return None
    # Whole words: an RTX A1000 is no A100.
    return next((peak for words, peak in _PEAKS.items() if re.search(rf"\b{words}\b", name)), None)


class _Reading(NamedTuple):
    """Totals of the loop's clock since the start of the epoch."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    data: float = 0.0


@dataclass(eq=False, repr=False)
class ThroughputMonitor(AbstractCallback):
    """Log samples per second over all ranks, the wait for data and, if known, tokens, FLOPs and MFU.

    These values are logged every ``every_n_steps`` steps and for each epoch, without waiting for the device within an
    epoch:

    * ``throughput/samples_per_s``, and ``throughput/units_per_s`` if ``units`` is given
    * ``throughput/step_s``, the seconds per step, and ``throughput/waiting``, the fraction of this time spent waiting
      for the loader
    * ``throughput/flops_per_s``, and ``throughput/mfu``, the fraction of the devices' peak FLOPs that is used

    Parameters
    ----------
    every_n_steps : int
        Number of steps that a value covers.
    units : callable, optional
        ``units(batch_size) -> number``: the number of units in a batch of that size, such as tokens of equally long
        texts.
    flops : bool
        Count the FLOPs of the first step, forward and backward, with ``torch.utils.flop_counter``, and assume the same
        number for every step. Can't be used with ``compile``, nor in ``dp`` with several devices.
    peak_flops : float, optional
        Peak FLOPs per second of one device. Default: NVIDIA's value for 16-bit floats, if the GPU is known
        and is no MIG instance.

    Examples
    --------
    >>> tl.fit(num_epochs=3, callbacks=[ThroughputMonitor(units=lambda samples: samples * 512)])
    >>> tl.history["throughput/samples_per_s"]
    """

    every_n_steps: int = 50
    _: KW_ONLY
    units: Callable[[int], float] | None = None
    flops: bool = False
    peak_flops: float | None = None

    def __post_init__(self) -> None:
        super().__init__("ThroughputMonitor", execution_order=-90)
        if self.units is not None and not callable(self.units):
            raise ConfigurationError(
                f"ThroughputMonitor: units={self.units!r}: must be a function that takes a number of samples."
            )
        number_of("ThroughputMonitor", "peak_flops", self.peak_flops, optional=True, above=0, most=sys.float_info.max)
        check_flags(type(self).__name__, flops=self.flops)
        check_counts(self, "every_n_steps")
        self.flops_per_step: float | None = None
        """FLOPs of this rank's first step; None if they are not counted."""
        self._counter: FlopCounterMode | None = None
        self._windows, self._last_step = 0, 0
        self._begin_window(_Reading())

    def _begin_window(self, now: _Reading) -> None:
        self._begin, self._units = now, 0.0

    def on_train_loop_registration(self) -> None:
        require_alone(self, ThroughputMonitor)

    def on_train_begin(self) -> None:
        loop = self.train_loop_obj
        if self.flops and loop.options.compile_args is not None:
            raise ConfigurationError(
                "ThroughputMonitor(flops=True) with compile: FLOPs can't be counted in compiled code. Leave flops out."
            )
        if self.flops and has_replicas(loop.gpu_mode, loop.run_config.devices):
            raise ConfigurationError(
                "ThroughputMonitor(flops=True) with gpu_mode='dp': FLOPs can't be counted in the threads of several "
                "replicas. Leave flops out, or use gpu_mode='ddp'."
            )
        if self.peak_flops is None and loop.device.type == "cuda":
            self.peak_flops = _peak_of(torch.cuda.get_device_name(loop.device))

    def on_epoch_begin(self) -> None:
        self._windows = 0
        self._last_step = self.train_loop_obj.global_step
        self._begin_window(_Reading())  # the loop's clock is reset at each epoch

    def on_resume(self) -> None:
        self.on_epoch_begin()  # not called for an epoch that is resumed in the middle

    def on_batch_begin(self) -> None:
        if self.flops and self.flops_per_step is None and self._counter is None:
            from torch.utils.flop_counter import FlopCounterMode

            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_batch_end(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step == self._last_step:  # the step has more micro-batches
            return
        self._last_step = loop.global_step
        run = loop.watch()
        step = run.step_in_work
        if self.units is not None:
            self._units += sum(map(self.units, step.sizes))
        full = run.clock.steps + 1 - self._begin.steps >= self.every_n_steps
        if self._counter is None and not full:
            return
        clock = run.clock.read()
        now = _Reading(clock.steps + 1, clock.samples + step.total, clock.seconds, clock.data)
        if self._counter is not None:
            self.flops_per_step = float(self._counter.get_total_flops())
            self._stop_counting()
            self._begin_window(now)  # the time so far includes the time spent counting FLOPs
        else:
            self._log(now)
            self._windows += 1
            self._begin_window(now)

    def on_epoch_end(self) -> None:
        run = self.train_loop_obj.watch()
        epoch = run.clock.epochs[-1]
        if not self._windows and epoch.steps > self._begin.steps:  # the epoch was shorter than a window
            self._log(_Reading(epoch.steps, epoch.samples, epoch.seconds, epoch.data))

    def _stop_counting(self) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter = None

    def _log(self, now: _Reading) -> None:
        steps, samples, seconds, waited = (end - begin for begin, end in zip(self._begin, now))
        seconds, ranks = max(seconds, 1e-9), self.train_loop_obj.world_size
        values = {"samples_per_s": samples / seconds}
        if self.units is not None:
            values["units_per_s"] = ranks * self._units / seconds
        values["step_s"] = seconds / steps
        values["waiting"] = min(1.0, waited / seconds)
        if self.flops_per_step is not None:
            speed = self.flops_per_step * steps / seconds
            values["flops_per_s"] = ranks * speed
            if self.peak_flops is not None:
                values["mfu"] = speed / self.peak_flops
        for name, value in values.items():
            # An epoch's value is the mean over its windows and over ranks, with equal weights.
            self.log(f"throughput/{name}", value, batch_size=1)

    def on_exception(self, exception: BaseException) -> None:
        self._stop_counting()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_counter": None}
