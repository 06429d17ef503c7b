"""Summarize a model: layers, parameters, FLOPs, and the memory that a training step needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode

from trainloop._support.nested import tensors_of
from trainloop.callbacks.arguments import count_of
from trainloop.data import count_samples, move_to
from trainloop.errors import ConfigurationError
from trainloop.optim import MultiLoss
from trainloop.optim.optimizers import optimizers_of
from trainloop.optim.parameters import own_parameters
from trainloop.parallel.sharded.shards import dense_parts
from trainloop.resources.quota import format_bytes
from trainloop.tools.trial import copies, first_batch
from trainloop.train_loop.execution.execute import untouched
from trainloop.train_loop.loop import TrainLoop
from trainloop.train_loop.run.evaluating import evaluating
from trainloop.train_loop.run.losses import loss_of
from trainloop.train_loop.training.trained import not_optimized


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
    """Size in bytes of the tensors, other than weights and the batch, that autograd keeps from forward to backward.
    Each tensor counts once."""
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
    count_of("summary", "depth", depth, least=0)
    device = loop.run_config.devices[0]
    is_input = isinstance(batch, Tensor)  # not of the loader, whose batches may be single tensors, too
    with untouched(loop):
        if batch is None:
            batch = first_batch(loop.train_loader)
        model, optimizer, criterion = copies(loop, device)
        batch = move_to(batch, device)
        return _summary_of(loop, model, optimizer, criterion, batch, device, depth, is_input=is_input)


def _summary_of(
    loop: TrainLoop[Any],
    model: Any,
    optimizer: Any,
    criterion: Any,
    batch: Any,
    device: torch.device,
    depth: int,
    *,
    is_input: bool,
) -> Summary:
    amp = loop.options.amp.on(device)
    precision = nullcontext() if amp.dtype is None else torch.autocast(device.type, amp.dtype)
    counter = FlopCounterMode(display=False)
    if any(map(is_lazy, own_parameters(model))):
        with torch.no_grad(), evaluating(model), precision:
            model(batch) if is_input else loss_of(model.get_loss(batch, criterion, device), 1)
    with _shapes_of(model) as shapes, counter, _saved_bytes(model, batch) as activations:
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
    trained = [p for p in own_parameters(model) if p.requires_grad]
    for p in trained:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return Summary(
        layers=tuple(_layers(model, shapes, counts, forward, depth)),
        samples=samples,
        forward_flops=forward,
        step_flops=step,
        weight_bytes=_bytes([*own_parameters(model), *model.buffers()]),
        gradient_bytes=_bytes(trained),
        optimizer_bytes=_optimizer_bytes(optimizer),
        activation_bytes=activations(),
        batch_bytes=_bytes(tensors_of(batch)),
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
        parameters = own_parameters(module)
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
            found = [str(list(t.shape)) for t in tensors_of(output)]
            shapes[name] = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "") or type(output).__name__

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules()]
    try:
        yield shapes
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _saved_bytes(model: nn.Module, batch: Any) -> Iterator[Callable[[], int]]:
    """Return a context.

    Its value is a function that returns the bytes that autograd keeps for backward, without weights and the batch.
    """
    own = [part for t in (*own_parameters(model), *model.buffers(), *tensors_of(batch)) for part in dense_parts(t)]
    counted = {part.untyped_storage().data_ptr() for part in own}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        for part in dense_parts(tensor):
            storage = part.untyped_storage()
            if storage.data_ptr() not in counted:
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
        found += _bytes(tensors_of(list(single.state.values())))
    return found


def _bytes(tensors: Iterable[Tensor]) -> int:
    # By their own addresses: several tensors may be parts of one storage, such as the weights of an LSTM on a GPU.
    sizes: dict[int, int] = {}
    for part in (part for tensor in tensors for part in dense_parts(tensor)):
        sizes[part.data_ptr()] = max(sizes.get(part.data_ptr(), 0), part.numel() * part.element_size())
    return sum(sizes.values())
