"""Tools for a loop, which are methods of the loop, too. They don't change the loop, its model or random generators.

* :func:`find_lr`: losses for increasing learning rates, and a suggestion
* :func:`find_batch_size`: the largest batch that fits into memory in a training step
* :func:`summary`: layers, parameters, FLOPs, and the memory that a training step needs
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.flop_counter import FlopCounterMode

from trainloop._launch.failures import is_about_memory
from trainloop._support.distribution import import_extra
from trainloop._support.nested import parts_of
from trainloop.callbacks.base import AbstractCallback
from trainloop.data import count_samples, move_to
from trainloop.data.loader_copies import copy_loader
from trainloop.data.loaders import is_stream, plain_batches
from trainloop.data.samplers import length_of
from trainloop.devices import has_ranks
from trainloop.errors import ConfigurationError
from trainloop.history import html_table
from trainloop.optim import MultiLoss, MultiOptimizer, optimizers_of
from trainloop.resources.quota import format_bytes
from trainloop.train_loop.evaluating import evaluating
from trainloop.train_loop.execute import untouched
from trainloop.train_loop.loop import TrainLoop
from trainloop.train_loop.losses import loss_of
from trainloop.train_loop.trained import not_optimized
from trainloop.train_loop.trial import copies, first_batch, require_training_parts, trial_of

__all__ = ["BatchSizes", "Layer", "LearningRates", "Summary", "find_batch_size", "find_lr", "summary"]

SMOOTHING = 0.9
"""Weight of the previous mean in the smoothed loss. The mean covers about ten steps."""
SKIPPED = 5
"""Number of initial losses to skip, because a mean of so few values gives no reliable slope."""


@dataclass(frozen=True)
class LearningRates:
    """Result of :func:`find_lr`."""

    rates: tuple[float, ...]
    """Learning rate of each step."""
    losses: tuple[float, ...]
    """Loss of each step, over all ranks, computed before the weights change."""
    diverged: bool
    """True if the loss diverged before the largest rate was reached."""

    @property
    def smoothed(self) -> list[float]:
        """Exponential moving average of the losses, with bias correction."""
        means, mean = [], 0.0
        for i, loss in enumerate(self.losses, start=1):
            mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
            means.append(mean / (1 - SMOOTHING**i))
        return means

    @property
    def suggestion(self) -> float | None:
        """Rate at which the smoothed loss falls most steeply; ``None`` if it never falls."""
        values = self.smoothed
        slopes = {i: values[i + 1] - values[i - 1] for i in range(SKIPPED, len(values) - 1)}
        slopes = {i: slope for i, slope in slopes.items() if math.isfinite(slope)}
        best = min(slopes, key=slopes.__getitem__, default=None)
        return None if best is None or slopes[best] >= 0 else self.rates[best]

    def _repr_html_(self) -> str:
        every = max(1, len(self.rates) // 20)
        steps = list(zip(self.rates, self.losses, self.smoothed))[::every]
        suggestion = "no suggestion" if self.suggestion is None else f"suggestion: {self.suggestion:.3g}"
        return html_table([dict(zip(("rate", "loss", "smoothed loss"), step)) for step in steps]) + suggestion

    def plot(self, path: str | None = None) -> Any:
        """Plot the losses over the rates, with the suggestion marked, and return the Matplotlib figure."""
        figure = import_extra("matplotlib.figure", "LearningRates.plot", "plot").Figure(
            figsize=(5, 3.5), layout="constrained"
        )
        axes = figure.add_subplot()
        axes.plot(self.rates, self.losses, alpha=0.3, label="loss")
        axes.plot(self.rates, self.smoothed, label="smoothed")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color="gray", linestyle="--", label=f"suggestion {self.suggestion:.2g}")
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def __str__(self) -> str:
        end = "the loss diverged there" if self.diverged else "the largest requested"
        found = "none, the loss never fell" if self.suggestion is None else f"{self.suggestion:.3g}"
        return f"learning rates {self.rates[0]:.2g} to {self.rates[-1]:.2g} ({end}); suggestion: {found}"


def find_lr(
    loop: TrainLoop[Any],
    *,
    smallest: float = 1e-7,
    largest: float = 1.0,
    steps: int = 100,
    diverges_at: float = 4.0,
) -> LearningRates:
    """Train a copy of the loop with a learning rate that increases from step to step.

    The copy uses the loop's mode, devices and batches. If there are fewer batches than steps, the batches are repeated.
    The loop itself is not changed, so set the rate yourself: ``optimizer.param_groups[0]["lr"] = found.suggestion``.

    Parameters
    ----------
    loop : TrainLoop
    smallest, largest : float
        Range of rates. Each rate is the previous rate times a constant. With several parameter groups, the range
        applies to the first group, and the other groups keep their ratio to it.
    steps : int
        Number of optimizer steps.
    diverges_at : float
        End early if a loss is not finite, or is more than this many times the smallest loss so far.

    Returns
    -------
    LearningRates
        ``.suggestion``, ``.plot("lr.png")``, ``.rates``, ``.losses``.

    Raises
    ------
    ConfigurationError
        For invalid arguments, for several optimizers, and for a loop without ``train_loader`` or ``optimizer``.

    Notes
    -----
    This needs memory for a second model and optimizer. A stream is read from its beginning, and is not rewound
    afterwards.

    Examples
    --------
    >>> found = tl.find_lr()                                                                  # doctest: +SKIP
    >>> found.plot("lr.png"), found.suggestion                                                # doctest: +SKIP
    """
    require_training_parts(loop, "find_lr")
    if not 0 < smallest < largest < math.inf:
        raise ConfigurationError(f"find_lr: smallest={smallest}, largest={largest}: must be 0 < smallest < largest.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 10:
        raise ConfigurationError(f"find_lr: steps={steps!r}: must be an int of 10 or more.")
    if not diverges_at > 1:
        raise ConfigurationError(f"find_lr: diverges_at={diverges_at!r}: must be above 1.")
    if isinstance(loop.optimizer, MultiOptimizer):
        raise ConfigurationError(
            "find_lr: the loop has several optimizers, whose rates depend on each other. Use a loop with a single "
            "optimizer."
        )
    rates = [smallest * (largest / smallest) ** (i / (steps - 1)) for i in range(steps)]
    sweep = _Sweep(rates, diverges_at)
    # Random states and loaders are restored, so that a later fit is not affected.
    with untouched(loop):
        trial = trial_of(loop)
        trial.fit(num_iterations=steps, callbacks=[sweep], **_wrapper_args(loop))
    losses = trial.history.steps("loss")
    return LearningRates(tuple(rates[: len(losses)]), tuple(losses), trial.early_stop)


def _wrapper_args(loop: TrainLoop[Any]) -> dict[str, Any]:
    """Return the arguments of the wrapper that the last ``fit`` got, as an argument of ``fit``."""
    return {f"{loop.gpu_mode}_model_args": loop.wrapper_args} if loop.wrapper_args else {}


class _Sweep(AbstractCallback):
    """Set each step's learning rate, and end when the loss diverges."""

    def __init__(self, rates: list[float], diverges_at: float) -> None:
        super().__init__("find_lr")
        self.rates = rates
        self.diverges_at = diverges_at
        self.best = math.inf
        self.ratios: list[float] = []

    def on_train_begin(self) -> None:
        groups = self.train_loop_obj.optimizer.param_groups
        # Groups keep their ratios. For example, a head keeps ten times the rate of the backbone.
        first = float(groups[0]["lr"])
        self.ratios = [float(group["lr"]) / first if first else 1.0 for group in groups]
        self._set(self.rates[0])

    def _set(self, rate: float) -> None:
        for group, ratio in zip(self.train_loop_obj.optimizer.param_groups, self.ratios, strict=True):
            if isinstance(group["lr"], torch.Tensor):  # a capturable optimizer reads its rate on the device
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio

    def on_after_optimizer_step(self) -> None:
        loop = self.train_loop_obj
        if loop.global_step < len(self.rates):
            self._set(self.rates[loop.global_step])

    def on_batch_end(self) -> None:
        last = self.train_loop_obj.last_loss
        if last is None:  # this rank had no batch in this step
            return
        # This waits for the device at each step, which is acceptable in a sweep of a few hundred steps.
        loss = float(last)
        self.best = min(self.best, loss) if math.isfinite(loss) else self.best
        if not loss < self.diverges_at * self.best and self.best > 0:
            self.end_training()


# -- the largest batch -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchSizes:
    """Result of :func:`find_batch_size`. Sizes are batch sizes per process."""

    tried: dict[int, float | None]
    """Samples per second of one process at each size; ``None`` for sizes that ran out of memory."""
    limit: str
    """Reason why no larger batch was tried, such as ``'memory'``."""

    @property
    def suggestion(self) -> int | None:
        """Largest size that fits into memory; ``None`` if no size fits."""
        return max((size for size, speed in self.tried.items() if speed is not None), default=None)

    def __str__(self) -> str:
        lines = [
            f"batch_size {size}: " + ("out of memory" if speed is None else f"{speed:,.0f} samples/s")
            for size, speed in sorted(self.tried.items())
        ]
        return "\n".join([*lines, f"suggestion: {self.suggestion} ({self.limit})"])


def find_batch_size(
    loop: TrainLoop[Any], *, smallest: int | None = None, largest: int | None = None, steps: int = 3
) -> BatchSizes:
    """Try training steps with repeatedly doubled batch sizes, until memory or data run out.

    The steps run in the mode and on the devices of the loop, with copies of the model and the optimizer, so the loop is
    not changed. After an out-of-memory error, GPU memory is freed. On the CPU each size is tried in a separate process,
    which the kernel may kill for lack of memory. Therefore a script needs ``if __name__ == '__main__':``.

    Parameters
    ----------
    loop : TrainLoop
        Loop whose ``train_loader`` is a ``DataLoader`` with a ``batch_size``.
    smallest : int, optional
        First size. Default: the loader's batch size.
    largest : int, optional
        Last size; never more than each process's shard of the dataset.
    steps : int
        Optimizer steps at each size. The first is not timed.

    Returns
    -------
    BatchSizes
        ``.suggestion`` is the largest size. ``.tried`` has the samples per second of each size, because the largest
        size is not always the fastest.

    Raises
    ------
    ConfigurationError
        For invalid arguments, for a loader without a batch size, and for a loop without ``train_loader`` or
        ``optimizer``. Errors of the model that are not about memory are raised unchanged.

    Examples
    --------
    >>> print(tl.find_batch_size())                                                           # doctest: +SKIP
    """
    require_training_parts(loop, "find_batch_size")
    loader = loop.train_loader
    cuts_batches = is_stream(loader) or plain_batches(loader) is not None
    if not isinstance(loader, DataLoader) or not cuts_batches or not loader.batch_size:
        raise ConfigurationError(
            f"find_batch_size: train_loader is a {type(loader).__name__} without a batch_size, "
            "so there is no size to change. Pass DataLoader(dataset, batch_size=...)."
        )
    for name, value, least in (("smallest", smallest, 1), ("largest", largest, 1), ("steps", steps, 2)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ConfigurationError(f"find_batch_size: {name}={value!r}: must be an int of {least} or more.")
    processes = len(loop.run_config.devices) if has_ranks(loop.gpu_mode) else 1
    samples = None if is_stream(loader) else length_of(loader.sampler)
    most = max(1, samples // processes) if samples is not None else None
    if largest is not None:
        most = min(largest, most or largest)
    size = min(smallest or loader.batch_size, most or smallest or loader.batch_size)
    tried: dict[int, float | None] = {}
    limit = "memory"
    doubtful: list[Exception] = []
    with untouched(loop), _off_the_gpu(loop):
        while size not in tried:
            tried[size] = _samples_per_second(loop, size, steps, doubtful)
            if tried[size] is None:
                break
            if most is not None and size >= most:
                limit = "largest" if most == largest else "each process's shard of the dataset"
            size = min(2 * size, most) if most is not None else 2 * size
        if tried[min(tried)] is None:  # the first size was too large: try smaller ones
            while size > 1 and tried[size] is None:
                size //= 2
                tried[size] = _samples_per_second(loop, size, steps, doubtful)
    found = BatchSizes(tried, limit)
    if doubtful and found.suggestion is None:  # the size is not the cause
        raise doubtful[-1]
    return found


def _samples_per_second(loop: TrainLoop[Any], size: int, steps: int, doubtful: list[Exception]) -> float | None:
    """Return samples per second; ``None`` if memory ran out. ``doubtful`` gets an error that may have another cause."""
    clock = _Clock()
    loader: Any = loop.train_loader
    batches = BatchSampler(loader.batch_sampler.sampler, size, loader.batch_sampler.drop_last)
    trial = trial_of(loop, copy_loader(loader, batch_size=size, batch_sampler=batches))
    arguments = _wrapper_args(loop)
    # The kernel may kill the process that runs out of main memory.
    trial.note(runs_apart=loop.run_config.devices[0].type == "cpu" and loop.gpu_mode == "single")
    try:
        # A small dataset is repeated, because only the batch size matters.
        trial.fit(num_iterations=steps, callbacks=[clock], **arguments)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError and WorkerFailedError are RuntimeErrors
        about_memory = is_about_memory(error)
        if about_memory is False:
            raise
        if about_memory is None:
            doubtful[:] = [error.with_traceback(None)]  # whose frames refer to the tensors that didn't fit
        return None
    finally:
        del trial
        gc.collect()  # the traceback's frames refer to the tensors that didn't fit
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return size / max(clock.seconds_per_step, 1e-9)


class _Clock(AbstractCallback):
    """Time the steps after the first. If memory runs out, let the kernel kill this process first."""

    def __init__(self) -> None:
        super().__init__("find_batch_size")
        self.seconds_per_step = 0.0
        self._began = 0.0

    def on_train_begin(self) -> None:
        if has_ranks(self.train_loop_obj.gpu_mode):
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")

    def on_after_optimizer_step(self) -> None:
        loop = self.train_loop_obj
        if loop.device.type == "cuda":
            torch.cuda.synchronize(loop.device)
        if loop.global_step == 1:
            self._began = time.perf_counter()
        else:
            self.seconds_per_step = (time.perf_counter() - self._began) / (loop.global_step - 1)


@contextlib.contextmanager
def _off_the_gpu(loop: TrainLoop[Any]) -> Iterator[None]:
    """Move the loop's own model and optimizer to host memory in the block, since a real training has only one copy."""
    tensors = [*loop.model.parameters(), *loop.model.buffers()]
    for optimizer in optimizers_of(loop.optimizer):
        tensors += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    moved = [(tensor, tensor.device) for tensor in {id(t): t for t in tensors}.values() if tensor.device.type == "cuda"]
    for tensor, _ in moved:
        tensor.data = tensor.data.cpu()
    try:
        yield
    finally:
        for tensor, device in moved:
            tensor.data = tensor.data.to(device)


# -- layers, memory and FLOPs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A module of the model, with its sizes and FLOPs."""

    name: str
    """Path of the module, such as ``encoder.0``; empty for the model itself."""
    kind: str
    """Class of the module."""
    output: str
    """Shape of the module's output; ``?`` if the module wasn't called."""
    parameters: int
    """Number of parameters of the module and all modules inside it; tied parameters count once."""
    trainable: int
    """Number of these parameters that require gradients."""
    bytes: int
    """Size of these parameters and of the buffers, in bytes."""
    flops: int
    """FLOPs of the forward pass; a multiplication and an addition count as two."""
    counted: bool = True
    """True if ``flops`` is complete: ``torch.utils.flop_counter`` doesn't count recurrent layers."""


@dataclass(frozen=True)
class Summary:
    """Result of :func:`summary`. ``print`` shows it as a table."""

    layers: tuple[Layer, ...]
    """The model, followed by its modules in the order of ``named_modules()``."""
    samples: int
    """Number of samples in the batch."""
    forward_flops: int
    """FLOPs of the batch's forward pass."""
    step_flops: int | None
    """FLOPs of the batch's forward and backward pass; ``None`` if no loss was computed."""
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    """Size of the optimizer's state after a step, in bytes."""
    activation_bytes: int
    """Size in bytes of the tensors, other than weights, that autograd keeps from forward to backward. Each tensor
    counts once."""
    batch_bytes: int
    not_optimized: int = 0
    """Number of parameters that require gradients but are in no optimizer."""

    @property
    def step_bytes(self) -> int:
        """Bytes that a step needs in one process: weights, gradients, optimizer state, activations and batch.

        Workspaces of kernels are not included.
        """
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes + self.batch_bytes

    def __str__(self) -> str:
        rows = [("layer", "class", "output", "parameters", "FLOPs")]
        for layer in self.layers:
            depth = layer.name.count(".") + 1 if layer.name else 0
            name = "  " * depth + (layer.name.rpartition(".")[2] or layer.kind)
            flops = f"{layer.flops:,}" if layer.counted else f"{layer.flops:,}+" if layer.flops else "?"
            rows.append((name, layer.kind, layer.output, f"{layer.parameters:,}", flops))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [
            "  ".join(cell.ljust(w) if i < 3 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
            for row in rows
        ]
        model = self.layers[0]
        flops = f"{self.forward_flops:,} forward" + (
            "" if self.step_flops is None else f", {self.step_flops:,} with backward"
        )
        flops += "" if model.counted else "; recurrent layers are not counted"
        parts = {
            "weights": self.weight_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activation_bytes,
            "batch": self.batch_bytes,
        }
        lines += [
            f"parameters: {model.parameters:,}, of which {model.trainable - self.not_optimized:,} are trained"
            + (f"; {self.not_optimized:,} require gradients and are in no optimizer" if self.not_optimized else ""),
            f"FLOPs of a batch of {self.samples} samples: {flops}",
            f"memory of a training step: {format_bytes(self.step_bytes)} ("
            + ", ".join(f"{name} {format_bytes(value)}" for name, value in parts.items())
            + ")",
        ]
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__


def summary(loop: TrainLoop[Any], batch: Any = None, *, depth: int = 3) -> Summary:
    """Run one batch through copies of the model and the optimizer, and count layers, parameters, FLOPs and memory.

    Parameters
    ----------
    loop : TrainLoop
        Loop to summarize. Neither the loop nor random generators are changed.
    batch : optional
        A batch of the loader, to be passed to ``get_loss``; or a single tensor, to be passed to the model's
        ``forward``. Default: the first batch of ``train_loader``.
    depth : int
        Maximum depth of the listed modules. Deeper modules are counted in the listed module that contains them.

    Returns
    -------
    Summary
        Print it to see a table. Counts are for one process and one (micro-)batch, with the precision of the loop. If
        there is no loss (because ``batch`` is a single tensor), ``step_flops`` is ``None``.

    Raises
    ------
    ConfigurationError
        If there is neither a batch nor a ``train_loader``, or if the loop is running.

    Notes
    -----
    Activations are counted as if ``checkpoint_modules`` were not set. FLOPs are counted by
    ``torch.utils.flop_counter``, which includes matrix products, convolutions and attention, and counts all other
    operations as 0.

    Examples
    --------
    >>> print(tl.summary())                                                                   # doctest: +SKIP
    """
    if loop.running is not None:
        raise ConfigurationError("summary was called in a callback of a running loop. Call it before or after fit.")
    if batch is None and loop.train_loader is None:
        raise ConfigurationError("summary needs a batch, since the loop has no train_loader. Pass one: summary(batch).")
    device = loop.run_config.devices[0]
    with untouched(loop):
        if batch is None:
            batch = first_batch(loop.train_loader)
        model, optimizer, criterion = copies(loop, device)
        batch = move_to(batch, device)
        return _counted(loop, model, optimizer, criterion, batch, device, depth)


def _counted(
    loop: TrainLoop[Any], model: Any, optimizer: Any, criterion: Any, batch: Any, device: torch.device, depth: int
) -> Summary:
    amp = loop.options.amp.on(device)
    precision = nullcontext() if amp.dtype is None else torch.autocast(device.type, amp.dtype)
    counter = FlopCounterMode(display=False)
    is_input = isinstance(batch, Tensor)
    if any(map(is_lazy, model.parameters())):
        with torch.no_grad(), evaluating(model), precision:
            model(batch) if is_input else loss_of(model.get_loss(batch, criterion, device), 1)
    with _shapes_of(model) as shapes, counter, _saved_bytes(model) as activations:
        with precision:
            samples = count_samples(batch) or 0
            output = model(batch) if is_input else loss_of(model.get_loss(batch, criterion, device), samples)
        counts: Mapping[str, Any] = {key: sum(by.values()) for key, by in counter.get_flop_counts().items()}
        forward, step = counter.get_total_flops(), None
        if not is_input:
            loss = output.loss
            total = loss.total() if isinstance(loss, MultiLoss) else loss
            if total.requires_grad:
                # Called inside the counter's block, so that the backward pass is counted, too.
                total.backward()
                step = counter.get_total_flops()
    # All parameters need gradients, so that a step creates the optimizer's state for all of them.
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return Summary(
        layers=tuple(_layers(model, shapes, counts, forward, depth)),
        samples=samples,
        forward_flops=forward,
        step_flops=step,
        weight_bytes=_bytes([*model.parameters(), *model.buffers()]),
        gradient_bytes=_bytes(trained),
        optimizer_bytes=_optimizer_bytes(optimizer),
        activation_bytes=activations(),
        batch_bytes=_bytes(_tensors(batch)),
        # Counted for the loop's own optimizer, because the copy has only the parameters of the model's copy.
        not_optimized=0 if loop.optimizer is None else _not_optimized(loop, model),
    )


def _not_optimized(loop: TrainLoop[Any], model: nn.Module) -> int:
    named = dict(model.named_parameters())  # of the copy, whose lazy parameters have shapes
    return sum(named[name].numel() for name in not_optimized(loop.model, optimizers_of(loop.optimizer)))


def _layers(
    model: nn.Module, shapes: dict[str, str], flops: Mapping[str, int], forward: int, depth: int
) -> Iterator[Layer]:
    root = type(model).__name__

    def flops_of(name: str) -> int:
        return flops.get(f"{root}.{name}", flops.get(name, 0))

    modules = list(model.named_modules())
    unknown = [name for name, m in modules if isinstance(m, (nn.RNNBase, nn.RNNCellBase)) and not flops_of(name)]
    for name, module in modules:
        if name.count(".") + bool(name) > depth:
            continue
        parameters = list(module.parameters())
        # get_loss may call submodules outside of the model's forward, so the model's count is the total.
        count = flops_of(name) if name else forward
        yield Layer(
            name,
            type(module).__name__,
            shapes.get(name, "?"),
            sum(p.numel() for p in parameters),
            sum(p.numel() for p in parameters if p.requires_grad),
            _bytes([*parameters, *module.buffers()]),
            count,
            counted=not any(f"{other}.".startswith(f"{name}." if name else "") for other in unknown),
        )


@contextmanager
def _shapes_of(model: nn.Module) -> Iterator[dict[str, str]]:
    """Return a context whose value maps each module's path to the shape of its last output."""
    shapes: dict[str, str] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            found = [str(list(t.shape)) for t in _tensors(output)]
            shapes[name] = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "") or type(output).__name__

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules()]
    try:
        yield shapes
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _saved_bytes(model: nn.Module) -> Iterator[Callable[[], int]]:
    """Return a context.

    Its value is a function that returns the bytes that autograd keeps for backward, without weights.
    """
    weights = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = max(kept.get(storage.data_ptr(), 0), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(kept.values())


def _optimizer_bytes(optimizer: Any) -> int:
    """Step the copy of the optimizer, and return the size of its state in bytes."""
    found = 0
    for single in optimizers_of(optimizer) if optimizer is not None else ():
        try:
            single.step()
        except TypeError:  # the optimizer needs a closure; the size of its state depends on the number of calls
            pass
        found += _bytes(_tensors(list(single.state.values())))
    return found


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a nested value; for a sparse tensor, its indices and values."""
    if isinstance(value, Tensor):
        return [value.coalesce().indices(), value.coalesce().values()] if value.is_sparse else [value]
    return [tensor for part in parts_of(value) or () for tensor in _tensors(part)]


def _bytes(tensors: list[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.numel() * t.element_size() for t in tensors}
    return sum(storages.values())
