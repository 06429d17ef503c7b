"""Add up what the losses of a step's micro-batches weigh, over all ranks.

A step's gradients are those of one mean over all its units: samples, or what ``get_loss`` or its criterion counts
(tokens, class weights). When a micro-batch's loss is scaled, only its own units are known, so its part is scaled by its
samples and the usual number of units per sample. At the end of the step, :meth:`StepWeight.factor` is what is left.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainloop import distributed
from trainloop.errors import ConfigurationError
from trainloop.optim import MultiLoss
from trainloop.parallel.ddp import WeighingDataParallel, comm_hooks_of

TINY = 1e-12
"""Least weight: if all weights are 0 (every token is padding), so are all gradients; dividing by 0 would make NaN."""


class _Numbers(NamedTuple):
    """What a step's weight consists of: of a micro-batch, their sums, or the sums' averages over ranks."""

    weight: Any = 0.0
    units: Any = 0.0
    """Above 0 if any loss has units of its own."""
    uneven: Any = 0.0
    """Above 0 if the number of units of any loss differs from the number of samples."""
    empty: Any = 0.0
    """Weight of losses of zero without units, which does not count beside losses with units."""


class StepWeight:
    """The weight of a step so far.

    Parameters
    ----------
    place : Placement
        The placed model, whose wrapper may carry the weight along with the gradients.
    ranks : int
        Number of ranks whose gradients are averaged.

    Attributes
    ----------
    given : list of bool
        For each micro-batch, True if ``get_loss`` returned a weight.
    weighted : bool
        True if the loss of a micro-batch has units other than samples.
    always_weighted : bool
        True if ranks have agreed that :attr:`weighted` is True in each step, as a loss of any rank had units.
    usual_units : dict
        Usual numbers of units per sample, which ranks have agreed on: of a loss, or by name of a ``MultiLoss``'s parts.
    ragged, reduced_later : bool
        State of the current step. ``ragged`` is True if ranks have different numbers of micro-batches.
        ``reduced_later`` is True if gradients are averaged over ranks after backward, not by DDP during it.
    """

    def __init__(self, place: Any, ranks: int) -> None:
        self._place = place
        self._ranks = ranks
        self._known_numbers: dict[_Numbers, Tensor] = {}
        self.usual_units: dict[str | None, float] = {}
        self.ragged = self.reduced_later = self.always_weighted = False
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self.given: list[bool] = []
        self.weighted = self.always_weighted
        self._sums = _Numbers()
        self._of_samples: list[tuple[Tensor, float]] = []

    def add(self, weight: Any, *, units: bool = False, uneven: bool = False, empty: Any = 0.0) -> None:
        """Add a micro-batch's weight to the step's weight.

        Parameters
        ----------
        weight : number or 0-d Tensor
        units : bool
            True if the loss has units of its own.
        uneven : bool
            True if their number differs from the number of samples.
        empty : number or 0-d Tensor
            The part of the weight that does not count if the step has units.
        """
        numbers = _Numbers(weight, float(units), float(uneven), empty)
        self._sums = _Numbers(*(mine + own for mine, own in zip(self._sums, numbers, strict=True)))
        carrier = self._carrier
        if carrier is not None:
            carrier.carry(self._stacked(numbers))

    def add_samples(self, loss: Tensor, weight: float) -> None:
        """Add the weight of a micro-batch whose loss has no units, so that its samples count.

        But if others have units, a loss of zero has none: ``get_loss`` returns it if all targets are ignored.
        """
        if self._carrier is not None and self.weighted:
            self.add(weight, empty=weight * self.is_zero(loss))
        else:
            self._of_samples.append((loss.detach(), weight))
            self.add(weight)

    def is_zero(self, loss: Tensor) -> Tensor:
        """Return 1 for a loss of zero, and otherwise 0, on its device."""
        return (loss.detach() == 0).reshape(()).to(self.zero().dtype)

    def usual(self, name: str | None, weight: Any, size: int) -> float:
        """Return the usual number of units per sample: a power of two, by which a division changes no bit.

        It keeps losses, and gradients until the end of the step, near the scale of a mean: with a sum over the pixels
        of an image, fp16 overflows (AMP, ``fp16_compress_hook``). Only then, ranks agree on it once, from their first
        batches. Collective then.
        """
        usual = self.usual_units.get(name)
        if usual is not None:
            return usual
        if self.ragged:  # some ranks may not call this
            return 1.0
        if not self._in_fp16():
            return self.usual_units.setdefault(name, 1.0)
        units = self.zero() + self.exact(weight) / max(size, 1)
        mean = float(units if self._ranks == 1 else distributed.all_reduce(units, "mean"))
        if not 0 < mean < math.inf:
            return 1.0  # without units, each factor is right; the next batch decides
        usual = self.usual_units[name] = 2.0 ** round(math.log2(mean))
        return usual

    def _in_fp16(self) -> bool:
        """Return True if gradients may be in fp16 before they are divided by the step's weight."""
        if self._place.scaler.is_enabled() or any(p.dtype == torch.float16 for p in self._place.model.parameters()):
            return True
        wrapper = self._place.wrapper
        return not self.reduced_later and isinstance(wrapper, WeighingDataParallel) and bool(comm_hooks_of(wrapper))

    def check(self) -> None:
        """Raise an error if ``get_loss`` has returned a weight for only some micro-batches.

        Raises
        ------
        ConfigurationError
        """
        if True in self.given and False in self.given:
            raise ConfigurationError(
                f"get_loss returned (loss, weight) for {sum(self.given)} of {len(self.given)} micro-batches of a step. "
                "Return a weight for all batches or for none."
            )

    def factor(self, *, weighted: bool) -> Tensor | float:
        """Return the factor that the step's gradients still need; ``weighted`` is True if any rank is. Collective."""
        sums = self._sums
        if weighted and self._of_samples:
            sums = sums._replace(empty=sums.empty + sum(of * self.is_zero(loss) for loss, of in self._of_samples))
        if self._ranks > 1:
            averages = self._over_ranks(sums, weighted=weighted)
            if averages is None:
                return 1.0
            sums = _Numbers(*(averages.tolist() if averages.is_cpu else averages))  # reading a GPU would wait
        usual = self.usual_units.get(None, 1.0) if weighted else 1.0
        if isinstance(sums.empty, Tensor) and sums.empty.is_cpu:
            sums = sums._replace(empty=sums.empty.item())
        weight: Any = sums.weight - sums.empty * (sums.units > 0)
        if isinstance(sums.uneven, Tensor):
            weight = torch.where((sums.uneven > 0) | (sums.empty * sums.units > 0), weight, 1 / usual)
        elif not sums.uneven and not (sums.units and (isinstance(sums.empty, Tensor) or sums.empty)):
            return usual  # exactly
        if isinstance(weight, Tensor) and weight.is_cpu:
            weight = weight.item()  # waits for nothing, and is often exactly 1
        return 1 / (weight.clamp(min=TINY) if isinstance(weight, Tensor) else max(weight, TINY))

    def _over_ranks(self, sums: _Numbers, *, weighted: bool) -> Tensor | None:
        """Return the averages of the step's numbers over all ranks; ``None`` if the weight is known to be 1."""
        carrier = self._carrier
        averages = None if carrier is None else carrier.averaged_numbers()
        if not weighted and (averages is None or not averages.is_cpu):
            return None
        return distributed.all_reduce(self._stacked(sums), "mean") if averages is None else averages

    @property
    def _carrier(self) -> WeighingDataParallel | None:
        """Return the wrapper that averages the step's weight along with the gradients."""
        wrapper = self._place.wrapper
        return wrapper if isinstance(wrapper, WeighingDataParallel) and not self.reduced_later else None

    def _stacked(self, numbers: _Numbers) -> Tensor:
        """Return the numbers that ranks average, on the device."""
        if any(isinstance(number, Tensor) for number in numbers):
            return torch.stack([self.zero() + number for number in numbers])
        known = self._known_numbers.get(numbers)
        if known is None:
            if len(self._known_numbers) > 64:  # limits the cache's memory if weights never repeat
                self._known_numbers.clear()
            known = torch.stack([self.zero() + number for number in numbers])
            self._known_numbers[numbers] = known
        return known

    def exact(self, weight: Any) -> Any:
        """Return the weight in float64: float32 can't represent counts of tokens above 2**24 exactly."""
        return weight.detach().reshape(()).to(self.zero().dtype) if isinstance(weight, Tensor) else weight

    def zero(self) -> Tensor:
        """Return a zero of the most exact dtype of the device."""
        device = self._place.device  # created on the device: a copy from the CPU would wait for the device
        return torch.zeros((), dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)


class Converted:
    """A number for operations with many tensors, converted once for each device and dtype: a conversion is a kernel."""

    def __init__(self, number: Tensor | float) -> None:
        self._number = number
        self._known: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor | float:
        if not isinstance(self._number, Tensor):
            return self._number
        form = tensor.device, tensor.dtype
        if form not in self._known:
            self._known[form] = self._number.to(*form)
        return self._known[form]


def as_factor(weight: Any, loss: Tensor | MultiLoss) -> Any:
    """Return a weight in the loss's precision. (Dividing an integer tensor would give float32.)"""
    if not isinstance(weight, Tensor):
        return weight
    return weight.to(loss.dtype if isinstance(loss, Tensor) else next(iter(loss.values())).dtype)
