"""Summarize the layers of a model, and the memory and FLOPs of its training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from trainloop._support.nested import parts_of
from trainloop.data import count_samples, move_to
from trainloop.errors import ConfigurationError
from trainloop.optim import MultiLoss, optimizers_of
from trainloop.resources.quota import format_bytes
from trainloop.train_loop.loop import TrainLoop
from trainloop.train_loop.losses import run_through, split_loss
from trainloop.train_loop.trained import not_optimized
from trainloop.train_loop.trial import copies, first_batch, untouched

__all__ = ["Layer", "Summary", "summary"]


@dataclass(frozen=True)
class Layer:
    """A module of the model."""

    name: str
    """Path of the module, such as ``encoder.0``; empty for the model itself."""
    kind: str
    """Class of the module."""
    output: str
    """Shape of the module's output; ``?`` if it wasn't called."""
    parameters: int
    """Number of parameters of the module and all modules inside it; tied ones count once."""
    trainable: int
    """Number of these parameters that require gradients."""
    bytes: int
    """Size of these parameters and of buffers in bytes."""
    flops: int
    """FLOPs of the forward pass; a multiplication with an addition counts as two."""
    counted: bool = True
    """True if ``flops`` is complete: ``torch.utils.flop_counter`` doesn't count recurrent layers."""


@dataclass(frozen=True)
class Summary:
    """Result of :func:`summary`; prints as a table."""

    layers: tuple[Layer, ...]
    """The model, then its modules in order."""
    samples: int
    """Number of samples in the batch."""
    forward_flops: int
    """FLOPs of the batch's forward pass."""
    step_flops: int | None
    """FLOPs of the batch's forward and backward pass; ``None`` if no loss was computed."""
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    """State of the optimizer after a step, in bytes."""
    activation_bytes: int
    """Bytes of tensors that autograd keeps from forward to backward, each once, without the weights."""
    batch_bytes: int
    not_optimized: int = 0
    """Number of parameters that require gradients but are in no optimizer."""

    @property
    def step_bytes(self) -> int:
        """Memory of a training step of one process in bytes: the sum of these, without workspaces of kernels."""
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
    """Run one batch through copies of the model and the optimizer; count layers, parameters, FLOPs and memory.

    Parameters
    ----------
    loop : TrainLoop
        Loop to summarize; neither it nor random generators are changed.
    batch : optional
        A batch of the loader, for which ``get_loss`` is called; or a single tensor, the model's input, for which
        ``forward`` is called. Default: the first batch of ``train_loader``.
    depth : int
        Depth of the listed modules; deeper ones are counted in the module that contains them.

    Returns
    -------
    Summary
        ``print`` it. Counts are for one process and one (micro-)batch, with the loop's own precision. Without a loss
        (``batch`` is a single tensor) the size of gradients is computed, and ``step_flops`` is ``None``.

    Raises
    ------
    ConfigurationError
        If there is no batch, and no ``train_loader`` to take one from; or while the loop runs.

    Notes
    -----
    Activations are counted as if ``checkpoint_modules`` were not set. FLOPs are those of ``torch.utils.flop_counter``:
    matrix products, convolutions and attention; all other operations count as 0.

    Examples
    --------
    >>> print(tl.summary())                                                                   # doctest: +SKIP
    """
    if loop.running is not None:
        raise ConfigurationError("summary was called in a callback of a running loop. Call it before or after fit.")
    if batch is None and loop.train_loader is None:
        raise ConfigurationError("summary needs a batch, since the loop has no train_loader. Pass one: summary(batch).")
    device = loop.site.devices[0]
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
    with _shapes_of(model) as shapes, counter, _saved_bytes(model) as activations:
        with precision:
            output = model(batch) if is_input else run_through(model.get_loss(batch, criterion, device))
        counts: Mapping[str, Any] = {key: sum(by.values()) for key, by in counter.get_flop_counts().items()}
        forward, step = counter.get_total_flops(), None
        if not is_input:
            loss = split_loss(output)[0]
            total = loss.total() if isinstance(loss, MultiLoss) else loss
            if total.requires_grad:
                # Inside the counter, so that it counts the backward pass, too.
                total.backward()
                step = counter.get_total_flops()
    # Gradients for all parameters, so that a step creates the optimizer's state for all.
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return Summary(
        layers=tuple(_layers(model, shapes, counts, forward, depth)),
        samples=count_samples(batch) or 0,
        forward_flops=forward,
        step_flops=step,
        weight_bytes=_bytes([*model.parameters(), *model.buffers()]),
        gradient_bytes=_bytes(trained),
        optimizer_bytes=_optimizer_bytes(optimizer),
        activation_bytes=activations(),
        batch_bytes=_bytes(_tensors(batch)),
        # From the loop's own optimizer: a copy has only the parameters of the model's copy.
        not_optimized=0 if loop.optimizer is None else _not_optimized(loop),
    )


def _not_optimized(loop: TrainLoop[Any]) -> int:
    named = dict(loop.model.named_parameters())
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
        # get_loss may call submodules outside of the model's forward: count everything.
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
    """Return the shape of each module's last output, by its path."""
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
    """Return the bytes that autograd keeps for the backward pass, without storages of weights."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = max(kept.get(storage.data_ptr(), 0), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(kept.values())


def _optimizer_bytes(optimizer: Any) -> int:
    """Return the bytes of the optimizer's state after a step with the copies' gradients."""
    found = 0
    for single in optimizers_of(optimizer) if optimizer is not None else ():
        try:
            single.step()
        except TypeError:  # needs a closure: its state depends on how often it calls that
            pass
        found += _bytes(_tensors(list(single.state.values())))
    return found


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in parts_of(value) or () for tensor in _tensors(part)]


def _bytes(tensors: list[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.numel() * t.element_size() for t in tensors}
    return sum(storages.values())
