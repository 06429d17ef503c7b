"""Is a loss the mean over a batch's samples, as everywhere in this package, or their sum?

A sum of halves is not half of a sum: gradients of ranks, replicas and micro-batches that are averaged as means come out
too small by their number. So sums are recognised, as far as the model or the criterion declares them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

__all__ = ["SumRule", "sum_rule"]


@dataclass(frozen=True)
class SumRule:
    """Tells of each loss whether it is a sum over samples; made by :func:`sum_rule`."""

    certain: bool
    """Whether the model itself says so; else it is the criterion, whose sum ``get_loss`` may have divided."""

    def __call__(self, loss: Tensor | Mapping[str, Tensor]) -> bool:
        """Whether this loss is a sum. Where the criterion says so, its graph is looked at, if it has one."""
        if self.certain:
            return True
        return not any(map(_is_divided, [loss] if isinstance(loss, Tensor) else loss.values()))


def sum_rule(model: Any, criterion: Any) -> SumRule | None:
    """The rule that tells sums over samples from means; ``None`` where all losses are means.

    Parameters
    ----------
    model : object
        Its ``loss_reduction``, 'sum' or 'mean', settles it.
    criterion : object
        Else what its ``reduction`` says; if the criterion has none, the ``reduction`` of everything inside it: modules,
        entries of dicts and lists, keywords of ``functools.partial``.

    Examples
    --------
    >>> sum_rule(None, nn.MSELoss(reduction="sum"))
    SumRule(certain=False)
    >>> sum_rule(None, {"pixels": nn.L1Loss(reduction="sum"), "class": nn.CrossEntropyLoss()}) is None
    True
    """
    declared = getattr(model, "loss_reduction", None)
    if declared is not None:
        return SumRule(certain=True) if declared == "sum" else None
    return SumRule(certain=False) if _reductions(criterion) == {"sum"} else None


def _reductions(criterion: Any) -> set[str]:
    own = getattr(criterion, "reduction", None)
    if isinstance(own, str):
        return {own}
    parts: Any = ()
    if isinstance(criterion, nn.Module):
        parts = criterion.children()
    elif isinstance(criterion, Mapping):
        parts = criterion.values()
    elif isinstance(criterion, (list, tuple)):
        parts = criterion
    elif isinstance(criterion, functools.partial):
        given = criterion.keywords.get("reduction")
        return {given} if isinstance(given, str) else _reductions(criterion.func)
    found: set[str] = set()
    return found.union(*map(_reductions, parts))


def _is_divided(loss: Tensor) -> bool:
    """Whether a scalar was divided by a plain number on the way to this loss: ``criterion(...) / len(x)`` is a mean.

    Division by something learned (weighting by uncertainty) does not count.
    """
    nodes: list[Any] = [loss.grad_fn]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or not _is_of_scalar(node):
            continue
        seen.add(node)
        # the operands: what is divided, and by what
        if node.name().startswith("DivBackward") and node.next_functions[1][0] is None:
            return True
        nodes += [before for before, _ in node.next_functions]
    return False


def _is_of_scalar(node: Any) -> bool:
    """Whether a node of autograd's graph made one number; what lies before is the model, where divisions mean nothing.

    ``_input_metadata`` is of torch 2.1 to 2.13; in a torch without it no division is seen, and the criterion's word
    holds.
    """
    metadata: Any = getattr(node, "_input_metadata", ())
    return bool(metadata) and all(size == 1 for size in metadata[0].shape)
