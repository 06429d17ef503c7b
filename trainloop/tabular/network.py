"""Networks over a table: how a ``TTModel`` is trained under a plan, and the one for numbers and categories."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.preprocessing import OrdinalEncoder
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, StackDataset, TensorDataset

from trainloop.callbacks import AbstractCallback, EarlyStopping, TimeLimit
from trainloop.model import TTBasicModel, TTModel
from trainloop.tabular.columns import Rows
from trainloop.tabular.models import Adapter, Given, matrix
from trainloop.train_loop import TrainLoop

__all__ = ["Network", "NeuralAdapter", "OwnNetwork"]


class BestWeights(AbstractCallback):
    """The weights of the epoch with the least validation loss, in the model at the end."""

    def __init__(self) -> None:
        super().__init__("BestWeights", execution_order=98)
        self._best = float("inf")
        self._weights: dict[str, Any] | None = None

    def on_epoch_end(self) -> None:
        losses = self.train_loop_obj.history.get("val_loss") or [float("nan")]
        if losses[-1] < self._best:
            self._best = losses[-1]
            self._weights = copy.deepcopy(self.train_loop_obj.model.state_dict())

    def on_train_end(self) -> None:
        if self._weights is not None:
            self.train_loop_obj.model.load_state_dict(self._weights)


class NeuralAdapter(Adapter):
    """A network: what is particular is :meth:`prepare`, :meth:`build` and :meth:`inputs`.

    Numbers to predict are scaled to mean 0 and variance 1 on the way.
    """

    defaults: dict[str, Any] = {}

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self.params: dict[str, Any] = {**self.defaults, **given.params}

    def prepare(self, table: pd.DataFrame) -> None:
        """Learn from the training table what :meth:`build` and :meth:`inputs` need."""
        raise NotImplementedError

    def build(self) -> TTModel:
        """The network, untrained; its batches are ``(*inputs, target)``."""
        raise NotImplementedError

    def inputs(self, table: pd.DataFrame) -> Sequence[Tensor | Dataset[Any]]:
        """Tensors, or datasets of them, with a row for each row of the table."""
        raise NotImplementedError

    def fit(self, table: pd.DataFrame, y: Rows, validation: tuple[pd.DataFrame, Rows]) -> None:
        torch.manual_seed(0)
        params = self.params
        self._mean, self._scale = (float(y.mean()), float(y.std()) or 1.0) if self.is_regression else (0.0, 1.0)
        self.prepare(table)
        self.network = self.build()
        batch = int(params.get("batch_size") or np.clip(len(table) // 16, 16, 512))
        # A batch of one row has no variance for BatchNorm.
        lonely = len(table) % batch == 1 and len(table) > batch
        train = DataLoader(self._rows(table, y), batch_size=batch, shuffle=True, drop_last=lonely)
        held_out = DataLoader(self._rows(*validation), batch_size=max(batch, 256))
        weights = [weight for weight in self.network.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=params["learning_rate"], weight_decay=params["weight_decay"])
        criterion = nn.MSELoss() if self.is_regression else nn.CrossEntropyLoss()
        loop = TrainLoop(self.network, train, held_out, None, optimizer, criterion, progress_bar=False)
        self.facts["used_gpu"] = loop.device.type == "cuda"
        callbacks: list[AbstractCallback] = [EarlyStopping("val_loss", patience=params["patience"]), BestWeights()]
        if (left := self.seconds_left()) is not None:
            callbacks.append(TimeLimit(max(left, 0.1)))
        loop.fit(num_epochs=params["num_epochs"], callbacks=callbacks)
        self.network.cpu()

    def predict(self, table: pd.DataFrame) -> Rows:
        loader = DataLoader(self._rows(table, np.zeros(len(table), dtype=np.int64)), batch_size=512)
        loop = TrainLoop(self.network, None, progress_bar=False)
        outputs = torch.as_tensor(loop.predict_with_model(loader)[0]).detach().cpu().float()
        self.network.cpu()
        if self.is_regression:
            return outputs.reshape(-1).numpy().astype(float) * self._scale + self._mean
        return outputs.softmax(dim=1).numpy().astype(float)

    def _rows(self, table: pd.DataFrame, y: Rows) -> Dataset[Any]:
        targets = torch.as_tensor(y)
        if self.is_regression:
            targets = ((targets.double() - self._mean) / self._scale).float().unsqueeze(1)
        inputs = self.inputs(table)
        whole = all(isinstance(each, Tensor) for each in inputs)
        return TensorDataset(*inputs, targets) if whole else StackDataset(*inputs, targets)  # type: ignore[arg-type]


class Layers(TTBasicModel):
    """Embeddings of the categories beside the numbers, then hidden layers."""

    def __init__(
        self, num_numbers: int, sizes: list[int], num_outputs: int, hidden: Sequence[int], dropout: float
    ) -> None:
        super().__init__()
        widths = [int(min(50, max(2, 1.6 * size**0.56))) for size in sizes]
        self.embeddings = nn.ModuleList([nn.Embedding(size, width) for size, width in zip(sizes, widths)])
        layers: list[nn.Module] = []
        width = num_numbers + sum(widths)
        for units in hidden:
            layers += [nn.Linear(width, units), nn.ReLU(), nn.Dropout(dropout)]
            width = units
        self.layers = nn.Sequential(*layers, nn.Linear(width, num_outputs))

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        parts = [embedding(codes[:, column]) for column, embedding in enumerate(self.embeddings)]
        return self.layers(torch.cat([numbers, *parts], dim=1))


_TRAINING = {"learning_rate": 1e-3, "weight_decay": 1e-4, "num_epochs": 300, "patience": 20, "batch_size": None}


class Network(NeuralAdapter):
    """The network for tables; words of texts count as numbers."""

    defaults = {"hidden": (128, 128), "dropout": 0.1, **_TRAINING}

    def prepare(self, table: pd.DataFrame) -> None:
        columns = self.given.columns
        self._categories = columns.of("category")
        self._numbers = matrix(columns.only({*columns.kinds.values()} - {"category"}), onehot=False, scale=True)
        self._numbers.fit(table)
        self._codes = OrdinalEncoder(
            handle_unknown="use_encoded_value", unknown_value=-1, max_categories=1000, encoded_missing_value=-1
        )
        codes = self._codes.fit_transform(table[self._categories]) if self._categories else np.zeros((1, 0))
        self._sizes = [int(column.max(initial=-1)) + 2 for column in codes.T]  # 0 is for what is unknown

    def build(self) -> TTModel:
        width = len(self._numbers.get_feature_names_out())
        outputs = self.given.target.num_outputs
        return Layers(width, self._sizes, outputs, tuple(self.params["hidden"]), self.params["dropout"])

    def inputs(self, table: pd.DataFrame) -> Sequence[Tensor]:
        numbers = np.asarray(self._numbers.transform(table), dtype=np.float32).reshape(len(table), -1)
        codes = self._codes.transform(table[self._categories]) + 1 if self._categories else np.zeros((len(table), 0))
        # Far off the training rows nothing was learnt.
        return torch.from_numpy(numbers.clip(-10, 10)), torch.from_numpy(codes.astype(np.int64))


class OwnNetwork(NeuralAdapter):
    """A ``TTModel`` of the user's: ``make(num_inputs, num_outputs, **params)``, on batches ``(x, y)``."""

    defaults = _TRAINING

    def __init__(self, given: Given, make: Callable[..., Any]) -> None:
        super().__init__(given)
        self._make = make

    def prepare(self, table: pd.DataFrame) -> None:
        self._matrix = matrix(self.given.columns, onehot=True, scale=True).fit(table)

    def build(self) -> TTModel:
        own = {name: value for name, value in self.given.params.items() if name not in _TRAINING}
        width = len(self._matrix.get_feature_names_out())
        model: TTModel = self._make(width, self.given.target.num_outputs, **own)
        return model

    def inputs(self, table: pd.DataFrame) -> Sequence[Tensor]:
        return (torch.tensor(np.asarray(self._matrix.transform(table)), dtype=torch.float32),)
