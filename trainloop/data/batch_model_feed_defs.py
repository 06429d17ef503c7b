"""A model's loss and predictions, written apart from the model: for plain ``nn.Module`` and for older code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["AbstractModelFeedDefinition"]


class AbstractModelFeedDefinition(ABC):
    """Loss and predictions for a model without such methods; see :class:`trainloop.ModelWrap`.

    Where the model is yours, a :class:`trainloop.TTModel` is shorter: it holds the same three methods.
    """

    @abstractmethod
    def get_loss(self, model: nn.Module, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        """Loss of one batch in training: a mean over its samples, or ``(loss, weight)``.

        Parameters
        ----------
        model : nn.Module
            The model to call.
        batch_data
            What the loader gave.
        criterion
            What was given to the loop as its criterion.
        device : torch.device
            Where the model is.
        """

    def get_loss_eval(self, model: nn.Module, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        """Loss of one batch in evaluation; :meth:`get_loss` unless overridden."""
        return self.get_loss(model, batch_data, criterion, device)

    @abstractmethod
    def get_predictions(self, model: nn.Module, batch_data: Any, device: torch.device) -> tuple[Any, Any, Any]:
        """Predictions, targets and metadata of one batch: ``(y_pred, y_true, metadata)``."""
