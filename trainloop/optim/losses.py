"""Several losses in one step: ``MultiLoss``, the weights of losses, and the optimizer that a loss is for."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainloop._support.reduction import attach_divisor, attached_divisor
from trainloop.devices import whole_number
from trainloop.errors import ConfigurationError
from trainloop.optim.optimizers import MultiOptimizer, listed


class MultiLoss(Mapping[str, Tensor]):
    """Named losses of one batch, each for one optimizer of a :class:`MultiOptimizer`.

    A loss gives gradients only to the parameters of its own optimizer. For example, a generator's loss leaves no
    gradient in the discriminator that it passes through. With a single optimizer, the losses are added up.

    Parameters
    ----------
    loss_dict : mapping of str to 0-d Tensor or tuple
        A loss, or ``(loss, weight)`` for a loss that is a mean over ``weight`` units, such as boxes or tokens.
    loss_optimizer_map : mapping of str to int or str, optional
        Index or name of the optimizer of each loss; several losses may share an optimizer. Default: a loss is for the
        optimizer with the same name. In that case, several optimizers must have names (see :class:`MultiOptimizer`).
    retain_graph_until_last : bool
        Keep the autograd graph until the last loss, because losses often share parts of it.

    Raises
    ------
    ConfigurationError
        If there are no losses, if a value is not a loss, or if the names in the map are not those of the losses; in the
        first step, if there are several optimizers and it isn't clear which of them a loss is for.

    Examples
    --------
    >>> w = torch.ones(2, requires_grad=True)
    >>> losses = MultiLoss({"a": w.sum(), "b": 3 * w.sum()}, {"a": 0, "b": 1})
    >>> losses.item()
    {'a': 2.0, 'b': 6.0}
    """

    def __init__(
        self,
        loss_dict: Mapping[str, Tensor | tuple[Tensor, Any]],
        loss_optimizer_map: Mapping[str, int | str] | None = None,
        retain_graph_until_last: bool = True,
    ) -> None:
        if not isinstance(loss_dict, Mapping) or not loss_dict:
            raise ConfigurationError(f"loss_dict={loss_dict!r}: must be a dict with at least one named loss.")
        losses = {name: _with_weight(name, loss) for name, loss in loss_dict.items()}
        if loss_optimizer_map is not None and not isinstance(loss_optimizer_map, Mapping):
            raise ConfigurationError(f"loss_optimizer_map={loss_optimizer_map!r}: must be a dict, or None.")
        if loss_optimizer_map is not None and loss_optimizer_map.keys() != loss_dict.keys():
            raise ConfigurationError(
                f"loss_optimizer_map names {list(loss_optimizer_map)}, but the losses are {list(loss_dict)}. In the "
                "map, give each loss the index or the name of its optimizer."
            )
        self.loss_dict = losses
        self.weighted = tuple(name for name, loss in loss_dict.items() if isinstance(loss, tuple))
        self.loss_optimizer_map = None if loss_optimizer_map is None else dict(loss_optimizer_map)
        self.retain_graph_until_last = retain_graph_until_last

    def __getitem__(self, name: str) -> Tensor:
        return self.loss_dict[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.loss_dict)

    def __len__(self) -> int:
        return len(self.loss_dict)

    def assigned_to(self, optimizer: MultiOptimizer) -> MultiLoss:
        """Return the same losses, each with the index of its optimizer.

        Raises
        ------
        ConfigurationError
            If a loss is for no optimizer, or could be for several.
        """
        named = self.loss_optimizer_map
        if named is None:
            if optimizer.names is None:
                raise ConfigurationError(
                    f"get_loss returned the losses {listed(self)} for {len(optimizer)} optimizers, but not which "
                    "loss belongs to which optimizer. Give MultiLoss a map, "
                    f"loss_optimizer_map={ {name: i for i, name in enumerate(self)} }, or name the optimizers after "
                    f"the losses: MultiOptimizer({{{', '.join(f'{name!r}: ...' for name in self)}}})."
                )
            named = {name: name for name in self}
        indices: dict[str, int | str] = {
            name: optimizer.index(which, f"loss {name!r}", _BY_MAP) for name, which in named.items()
        }
        return self if indices == self.loss_optimizer_map else self._with_losses(self.loss_dict, indices)

    def map(self, function: Callable[[Tensor], Tensor], names: Container[str] | None = None) -> MultiLoss:
        """Return the same losses, with ``function`` applied to each, or to those in ``names``."""
        losses = {
            name: attach_divisor(function(loss), attached_divisor(loss)) if names is None or name in names else loss
            for name, loss in self.loss_dict.items()
        }
        return self._with_losses(losses, self.loss_optimizer_map)

    def _with_losses(self, losses: dict[str, Tensor], loss_optimizer_map: Mapping[str, int | str] | None) -> MultiLoss:
        alike = MultiLoss(losses, loss_optimizer_map, self.retain_graph_until_last)
        alike.weighted = self.weighted
        return alike

    def __truediv__(self, divisor: Any) -> MultiLoss:
        return self.map(lambda loss: loss / divisor)

    def __mul__(self, factor: Any) -> MultiLoss:
        return self.map(lambda loss: loss * factor)

    __rmul__ = __mul__

    def detach(self) -> MultiLoss:
        """Return the losses, detached from their graphs."""
        return self.map(Tensor.detach)

    def item(self) -> dict[str, float]:
        """Return the values as Python floats. This waits for the device."""
        return {name: loss.item() for name, loss in self.loss_dict.items()}

    def total(self) -> Tensor:
        """Sum of all losses."""
        first, *others = self.values()
        return sum(others, first)

    def for_optimizer(self, optimizer_idx: int) -> Tensor | None:
        """Return the sum of one optimizer's losses, or ``None`` if there are no losses for this optimizer."""
        indices = self._indices()
        losses = [loss for name, loss in self.loss_dict.items() if indices[name] == optimizer_idx]
        return sum(losses[1:], losses[0]) if losses else None

    def backward(self, optimizer_idx: int | None = None, inputs: Sequence[Tensor] | None = None) -> None:
        """Compute the gradients of one optimizer's losses, or of the sum of all losses.

        Parameters
        ----------
        optimizer_idx : int, optional
            Optimizer whose losses are differentiated. Default: the sum of all losses.
        inputs : sequence of Tensor, optional
            Tensors that get gradients. Default: every leaf of the graph.
        """
        loss = self.total() if optimizer_idx is None else self.for_optimizer(optimizer_idx)
        if loss is None or (inputs is not None and not inputs):  # torch refuses an empty list of inputs
            return
        last = optimizer_idx is None or optimizer_idx == max(self._indices().values())
        loss.backward(
            retain_graph=self.retain_graph_until_last and not last, inputs=None if inputs is None else list(inputs)
        )

    def _indices(self) -> dict[str, int]:
        numbers = {name: whole_number(which) for name, which in (self.loss_optimizer_map or {}).items()}
        indices = {name: number for name, number in numbers.items() if number is not None}
        if len(indices) < len(self):
            raise ConfigurationError(
                f"the losses {listed(self)} have loss_optimizer_map={self.loss_optimizer_map}. To select one "
                "optimizer's losses, pass a map with the index of each loss's optimizer, or call "
                "assigned_to(optimizer) first."
            )
        return indices

    def __repr__(self) -> str:
        whose = self.loss_optimizer_map
        return (
            f"MultiLoss({', '.join(name if whose is None else f'{name} -> optimizer {whose[name]}' for name in self)})"
        )


_BY_MAP = "Give one of these, for example with MultiLoss(..., loss_optimizer_map={'the loss': 0})."


def _with_weight(name: str, loss: Any) -> Tensor:
    """Return a loss of a MultiLoss; a weight that came with it is attached, like the divisor of a criterion."""
    weight = None
    if name is None or name == "":
        raise ConfigurationError(f"loss_dict has a loss with the name {name!r}. Give it a name, such as 'classes'.")
    if isinstance(loss, tuple) and len(loss) == 2:
        loss, weight = loss
    number = isinstance(weight, (int, float, np.generic)) and not isinstance(weight, bool)
    if not isinstance(loss, Tensor) or not (
        weight is None or number or (isinstance(weight, Tensor) and weight.numel() == 1)
    ):
        raise ConfigurationError(
            f"loss_dict[{name!r}]={loss if weight is None else (loss, weight)!r}: must be a 0-d tensor, like the "
            "result of a criterion, or (loss, weight), where weight is a number or a 0-d tensor, such as the number of "
            "boxes that the loss is a mean over."
        )
    weight = plain_number(weight)
    if isinstance(weight, Tensor):
        check_weight(weight)
        weight = weight.item() if weight.is_cpu and not torch.compiler.is_compiling() else weight.detach().reshape(())
    return attach_divisor(loss if weight is None else weighed(loss, weight), weight)


def plain_number(weight: Any) -> Any:
    """Return a number of numpy as one of Python, whose products don't overflow; any other weight unchanged."""
    return weight.item() if isinstance(weight, np.generic) else weight


def weighed(loss: Any, weight: Any) -> Any:
    """Return a loss that counts nothing if its weight is 0, as a step of one batch doesn't divide by the weight.

    Tensors on a GPU aren't read, since this would wait.
    """
    check_weight(weight)
    if isinstance(weight, Tensor):
        return loss * (weight.detach().reshape(()) != 0)
    return loss if weight else loss * 0.0


def check_weight(weight: Any) -> None:
    """Raise ConfigurationError for a weight that is no 0-d tensor and no number from 0 on. A GPU is not read."""
    if isinstance(weight, Tensor) and weight.requires_grad:
        raise ConfigurationError(
            "get_loss returned (loss, weight) with a weight that requires gradients. A weight is the number of units "
            "that the loss is a mean over, and it isn't trained. If it is a second loss, return the sum of both, or "
            "MultiLoss({'first': ..., 'second': ...}). If it is a number of units, return weight.detach()."
        )
    number: Any = weight
    if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_complex():
        if not weight.is_cpu or torch.compiler.is_compiling():
            return
        number = weight.item()
    elif not isinstance(weight, (int, float, np.generic)):
        given = f"tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        raise ConfigurationError(
            f"get_loss returned (loss, weight) with a {given} as the weight. The weight must be a number or a 0-d "
            "tensor, for example the number of tokens. To keep a model's output, store it in an attribute."
        )
    if not 0 <= number < math.inf:
        raise ConfigurationError(
            f"get_loss returned a loss with the weight {number}. A weight is the number of units that the loss is a "
            "mean over: 0 or more. To change the sign or the size of a loss, multiply the loss."
        )


def split_yielded(item: Any) -> tuple[int | str | tuple[int | str, ...] | None, Any]:
    """Split what ``get_loss`` yields into the loss's optimizer (or several), which may be left out, and the loss."""
    if isinstance(item, tuple) and len(item) == 2:
        names = item[0] if isinstance(item[0], (tuple, list)) else item[:1]
        if names and all(isinstance(name, (str, int, np.integer)) for name in names):
            return names[0] if len(names) == 1 else tuple(names), item[1]
    return None, item
