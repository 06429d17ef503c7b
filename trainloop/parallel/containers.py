"""Pass batches and outputs through torch's wrappers in containers that torch can see into; restore their classes."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from trainloop._support.reduction import in_place_of
from trainloop.optim import MultiLoss


def with_plain_dicts(output: Any) -> Any:
    """Return ``output`` with each MultiLoss as a dict, because torch's wrappers find tensors in dicts only."""
    if isinstance(output, MultiLoss):
        return dict(output)
    if type(output) is tuple:
        return tuple(with_plain_dicts(item) for item in output)
    return output


def with_multi_losses(opened: Any, output: Any) -> Any:
    """Invert :func:`with_plain_dicts`: return ``opened`` with a MultiLoss wherever ``output`` has one."""
    if isinstance(output, MultiLoss):
        tensors = iter(opened.values())
        return output.map(lambda loss: with_multi_losses(next(tensors), loss))
    if type(output) is tuple:
        return tuple(with_multi_losses(item, like) for item, like in zip(opened, output, strict=True))
    # torch's wrappers may return another tensor: a copy that has their backward hook.
    return in_place_of(opened, output) if isinstance(output, Tensor) and opened is not output else opened


def without_dict_classes(batch: Any) -> Any:
    """Return a batch with a plain dict in place of each dict of another class, in tuples, lists and dicts."""
    if isinstance(batch, dict):
        return {key: without_dict_classes(value) for key, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(map(without_dict_classes, batch))
    return batch


def with_dicts_of(opened: Any, batch: Any) -> Any:
    """Invert :func:`without_dict_classes`: return ``opened`` with the classes of the dicts in ``batch``."""
    if isinstance(batch, dict):
        parts = {key: with_dicts_of(opened[key], value) for key, value in batch.items()}
        if type(batch) is dict:
            return parts
        whole = copy.copy(batch)  # with its attributes, such as a factory of default values
        whole.update(parts)
        return whole
    if type(batch) in (tuple, list):
        return type(batch)(map(with_dicts_of, opened, batch))
    return opened
