"""AIToolbox's models, their wrappers and datasets, and lists of batches as loaders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, StackDataset

from trainloop import model as core
from trainloop import parallel
from trainloop.data.batch_model_feed_defs import AbstractModelFeedDefinition
from trainloop.model import TTBasicModel, TTModel
from trainloop.parallel.transparent import Transparent


class TTBasicMultiGPUModel(TTBasicModel):
    """A basic model whose ``forward(*inputs, targets=None, criterion=None)`` computes the loss if both are passed."""

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        """Return the loss, computed inside ``forward``."""
        *inputs, targets = [data.to(device) for data in batch_data]
        return self(*inputs, targets=targets, criterion=criterion)


class MultiGPUModelWrap(TTBasicMultiGPUModel):
    """A wrapper that turns a plain module into a :class:`TTBasicMultiGPUModel`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model={model!r}: must be an nn.Module.")
        self.model = model

    def forward(self, *input_data: Any, targets: Any = None, criterion: Any = None) -> Any:
        """Return the predictions, or the loss if ``criterion`` is passed."""
        predictions = self.model(*input_data)
        return predictions if criterion is None else criterion(predictions, targets)


class ModelWrap(core.ModelWrap):
    """A wrapper of a plain module, with a definition of its loss and predictions. ``fit`` returns the module itself."""

    def __init__(self, model: nn.Module, batch_model_feed_def: AbstractModelFeedDefinition) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model={model!r}: must be an nn.Module.")
        if not isinstance(batch_model_feed_def, AbstractModelFeedDefinition):
            raise TypeError(f"batch_model_feed_def={batch_model_feed_def!r}: must be an AbstractModelFeedDefinition.")
        super().__init__(model, batch_model_feed_def)


class _IsTransparent(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Transparent)


class TTParallelBase(Transparent, metaclass=_IsTransparent):
    """Base class of both wrappers. It calls the model's methods directly."""

    def __init__(self, module: TTModel, default_model_methods: Sequence[str] = ()) -> None:
        super().__init__()
        self.module = module
        self._become_transparent()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model's ``forward``."""
        return self.module(*inputs, **kwargs)

    def _run(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, method)(*args, **kwargs)


class TTDataParallel(parallel.TTDataParallel):
    """``nn.DataParallel`` for a TTModel. ``default_model_methods`` is ignored, because all methods are wrapped."""

    def __init__(self, module: TTModel, default_model_methods: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(module, **kwargs)


class TTDistributedDataParallel(parallel.TTDistributedDataParallel):
    """``DistributedDataParallel`` for a TTModel. ``default_model_methods`` is ignored: all methods are wrapped."""

    def __init__(self, module: TTModel, default_model_methods: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(module, **kwargs)


class BasicDataset(Dataset[Any]):
    """A dataset of the items of a list or tensor."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, idx: Any) -> Any:
        return self.data[idx]


class ListDataset(StackDataset):
    """A dataset like ``TensorDataset``, of lists of equal length."""

    def __init__(self, *data_lists: Sequence[Any]) -> None:
        super().__init__(*data_lists)  # type: ignore[arg-type]  # lists serve as datasets
        self.data_lists = data_lists


class Batches(Sequence[Any]):
    """A list of batches as a loader. Items may have any type, because only ``get_loss`` uses them.

    Parameters
    ----------
    items : sequence
    """

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]


def as_loader(loader: Any) -> Any:
    """Wrap a list or tuple of batches as a loader. Return any other object unchanged."""
    return Batches(loader) if isinstance(loader, (list, tuple)) else loader
