"""Train a network on a table, with early stopping: numbers, categories, texts, pictures, or the user's ``TTModel``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, StackDataset, TensorDataset

from trainloop.callbacks import AbstractCallback, EarlyStopping, TimeLimit
from trainloop.model import TTBasicModel, TTModel
from trainloop.pretrained import PictureFiles, PictureModel, TextModel
from trainloop.tabular.columns import Rows
from trainloop.tabular.models import Adapter, Given, matrix
from trainloop.train_loop import TrainLoop
from trainloop.tuning import seconds_left

_MAX_CACHED_BYTES = 2**29  # maximum total size in bytes of decoded pictures that stay in memory
_TRAINING = {"learning_rate": 1e-3, "weight_decay": 1e-4, "num_epochs": 300, "patience": 20, "batch_size": None}


class _BestWeights(EarlyStopping):
    """Early stopping that restores the weights of the best epoch at the end."""

    _weights: dict[str, Tensor] | None = None

    def on_epoch_end(self) -> None:
        before = self.best
        super().on_epoch_end()
        if self.best != before:
            self._weights = copy.deepcopy(self.train_loop_obj.model.state_dict())

    def on_train_end(self) -> None:
        if self._weights is not None:
            self.train_loop_obj.model.load_state_dict(self._weights)


class NeuralAdapter(Adapter):
    """Base of adapters for networks. Subclasses implement :meth:`build` and :meth:`inputs`.

    The targets of a regression are standardised for training.
    """

    defaults: dict[str, Any] = {**_TRAINING}

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self.params: dict[str, Any] = {**self.defaults, **given.params}

    def build(self, table: pd.DataFrame) -> TTModel:
        """Return the untrained network for a training table. Its batches are ``(*inputs, target)``."""
        raise NotImplementedError

    def inputs(self, table: pd.DataFrame) -> Sequence[Tensor | Dataset[Any]]:
        """Return tensors or datasets with one item for each row of the table."""
        raise NotImplementedError

    def fit(self, table: pd.DataFrame, y: Rows, validation: tuple[pd.DataFrame, Rows]) -> None:
        torch.manual_seed(0)
        params = self.params
        self._mean, self._scale = (float(y.mean()), float(y.std()) or 1.0) if self.is_regression else (0.0, 1.0)
        self.network = self.build(table)
        batch = int(params["batch_size"] or np.clip(len(table) // 16, 16, 512))
        # A last batch of one row is dropped, because BatchNorm can't compute a variance from it.
        drop_last = len(table) % batch == 1 and len(table) > batch
        train = DataLoader(self._rows(table, y), batch_size=batch, shuffle=True, drop_last=drop_last)
        held_out = DataLoader(self._rows(*validation), batch_size=max(batch, 256))
        weights = [weight for weight in self.network.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=params["learning_rate"], weight_decay=params["weight_decay"])
        criterion = nn.MSELoss() if self.is_regression else nn.CrossEntropyLoss()
        loop = TrainLoop(self.network, train, held_out, None, optimizer, criterion, progress_bar=False)
        self.facts["used_gpu"] = loop.device.type == "cuda"
        callbacks: list[AbstractCallback] = [_BestWeights("val_loss", patience=params["patience"])]
        if (left := seconds_left()) is not None:
            callbacks.append(TimeLimit(left))
        loop.fit(num_epochs=params["num_epochs"], callbacks=callbacks)
        self.network.cpu()

    def predict(self, table: pd.DataFrame) -> Rows:
        loader = DataLoader(self._rows(table, np.zeros(len(table), dtype=np.int64)), batch_size=512)
        outputs = TrainLoop(self.network, None, progress_bar=False).predict_with_model(loader)[0]
        self.network.cpu()
        rows = torch.as_tensor(outputs).detach().cpu().double()
        predicted = rows.reshape(-1) * self._scale + self._mean if self.is_regression else rows.softmax(dim=1)
        return predicted.numpy()

    def _rows(self, table: pd.DataFrame, y: Rows) -> Dataset[Any]:
        targets = torch.as_tensor(y)
        if self.is_regression:
            targets = ((targets.double() - self._mean) / self._scale).float().unsqueeze(1)
        inputs = self.inputs(table)
        loaded = all(isinstance(each, Tensor) for each in inputs)
        return TensorDataset(*inputs, targets) if loaded else StackDataset(*inputs, targets)  # type: ignore[arg-type]


class Layers(TTBasicModel):
    """A multilayer perceptron on numbers and on embeddings of categories."""

    def __init__(self, num_numbers: int, sizes: list[int], num_outputs: int, hidden: Sequence[int], dropout: float):
        super().__init__()
        widths = [int(min(50, max(2, 1.6 * size**0.56))) for size in sizes]
        self.embeddings = nn.ModuleList([nn.Embedding(size, width) for size, width in zip(sizes, widths)])
        width, layers = num_numbers + sum(widths), nn.Sequential()
        for units in hidden:
            layers.extend([nn.Linear(width, units), nn.ReLU(), nn.Dropout(dropout)])
            width = units
        self.layers = layers.append(nn.Linear(width, num_outputs))

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        parts = [embedding(codes[:, column]) for column, embedding in enumerate(self.embeddings)]
        return self.layers(torch.cat([numbers, *parts], dim=1))


class Network(NeuralAdapter):
    """Adapter of the ``NN_TORCH`` network. Texts are converted to TF-IDF numbers."""

    defaults = {"hidden": (128, 128), "dropout": 0.1, **NeuralAdapter.defaults}

    def build(self, table: pd.DataFrame) -> TTModel:
        self._matrix = matrix(self.given.columns, onehot=False, scale=True)
        x = self._matrix.fit_transform(table)
        self._coded = self._matrix.output_indices_["categories"]
        sizes = [int(size) + 2 for size in x[:, self._coded].max(axis=0)]  # code 0 is for unknown categories
        hidden, outputs = tuple(self.params["hidden"]), self.given.target.num_outputs
        return Layers(x.shape[1] - len(sizes), sizes, outputs, hidden, self.params["dropout"])

    def inputs(self, table: pd.DataFrame) -> Sequence[Tensor]:
        x = np.asarray(self._matrix.transform(table))
        # Values far outside the training range are clipped, because the network was not trained on such values.
        numbers = np.delete(x, self._coded, axis=1).clip(-10, 10)
        return torch.tensor(numbers, dtype=torch.float32), torch.tensor(x[:, self._coded] + 1, dtype=torch.int64)


class OwnNetwork(NeuralAdapter):
    """Adapter of the user's ``TTModel``, constructed by ``make(num_inputs, num_outputs, **params)``.

    Its batches are ``(x, y)``.
    """

    def __init__(self, given: Given, make: Callable[..., Any]) -> None:
        super().__init__(given)
        self._make = make

    def build(self, table: pd.DataFrame) -> TTModel:
        self._matrix = matrix(self.given.columns, onehot=True, scale=True).fit(table)
        params = {name: value for name, value in self.given.params.items() if name not in self.defaults}
        width = len(self._matrix.get_feature_names_out())
        model: TTModel = self._make(width, self.given.target.num_outputs, **params)
        return model

    def inputs(self, table: pd.DataFrame) -> Sequence[Tensor]:
        return (torch.tensor(np.asarray(self._matrix.transform(table)), dtype=torch.float32),)


class TextNetwork(NeuralAdapter):
    """Adapter of a transformers model on all text columns, which are joined into one text."""

    network: TextModel
    defaults = {**NeuralAdapter.defaults, "learning_rate": 1e-4, "weight_decay": 1e-3, "num_epochs": 10}
    defaults |= {"patience": 3, "batch_size": 32, "max_length": 128}

    def build(self, table: pd.DataFrame) -> TTModel:
        return TextModel.load(self.params["model"], self.given.target.num_outputs)

    def inputs(self, table: pd.DataFrame) -> Sequence[Tensor]:
        columns, separator = self.given.columns.of("text"), f" {self.network.tokenizer.sep_token or ''} "
        texts = [separator.join(row) for row in table[columns].itertuples(index=False)]
        return self.network.tokens(texts, self.params["max_length"])


class PictureNetwork(NeuralAdapter):
    """Adapter of a timm or transformers model, or of a module from the user's function, on all picture columns."""

    network: PictureModel
    defaults = {**NeuralAdapter.defaults, "learning_rate": 3e-4, "num_epochs": 30, "patience": 5}

    def build(self, table: pd.DataFrame) -> TTModel:
        outputs, model = self.given.target.num_outputs, self.params["model"]
        settings = {name: self.params[name] for name in ("size", "mean", "std") if self.params.get(name)}
        if callable(model):
            return PictureModel(model(outputs), **settings)
        return PictureModel.load(model, outputs, **settings)

    def inputs(self, table: pd.DataFrame) -> Sequence[Tensor | Dataset[Any]]:
        paths = table[self.given.columns.of("picture")].to_numpy()
        files = PictureFiles(paths.tolist(), self.network.size)
        if paths.size * 3 * files.size**2 > _MAX_CACHED_BYTES:
            return (files,)
        return (torch.stack([files[row] for row in range(len(files))]),)
