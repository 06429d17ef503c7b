"""Define a model's loss and predictions outside of the model, for a plain ``nn.Module`` and for older code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["AbstractModelFeedDefinition"]


class AbstractModelFeedDefinition(ABC):
    """Loss and predictions for a model that does not define them itself; see :class:`trainloop.ModelWrap`.

    For your own models, :class:`trainloop.TTModel` is shorter: it has the same three methods.
    """

    @abstractmethod
    def get_loss(self, model: nn.Module, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        """Return the loss of one batch in training: a mean over its samples, or ``(loss, weight)``.

        Parameters
        ----------
        model : nn.Module
            The model to call.
        batch_data
            A batch of the loader.
        criterion
            The loop's criterion.
        device : torch.device
            The model's device.
        """

    def get_loss_eval(self, model: nn.Module, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        """Return the loss of one batch in evaluation. By default, this calls :meth:`get_loss`."""
        return self.get_loss(model, batch_data, criterion, device)

    @abstractmethod
    def get_predictions(self, model: nn.Module, batch_data: Any, device: torch.device) -> tuple[Any, Any, Any]:
        """Return predictions, targets and metadata of one batch: ``(y_pred, y_true, metadata)``."""
