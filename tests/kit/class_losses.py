"""Losses of class indices, whose means are over the weights of their targets: the same numbers in every mode."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from trainloop import MultiLoss, MultiOptimizer, TrainLoop, TTBasicModel

CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 5.0, 0.7], dtype=torch.float64)
# Since torch 2.13: the last layer and the loss in one.
HAS_LINEAR = hasattr(nn, "LinearCrossEntropyLoss")
LINEAR: dict[str, dict[str, Any]] = {
    "linear module": {},
    "linear module, weights": {"weight": CLASS_WEIGHTS},
    "linear module, smoothed": {"label_smoothing": 0.1},
}
if HAS_LINEAR:
    LINEAR["linear module, in chunks"] = {
        "options": nn.LinearCrossEntropyOptions(),  # type: ignore[attr-defined]
        "weight": CLASS_WEIGHTS,
    }


class Classifier(TTBasicModel):
    """Draws no random numbers, so that it is the same in all modes."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        if kind.startswith("linear module"):
            self.head = nn.LinearCrossEntropyLoss(8, 4, **LINEAR[kind])  # type: ignore[attr-defined, assignment]
        self.kind = kind
        self.inner = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)  # a model may have a criterion of its own

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.body(x)))
        return scores

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        x, y = (part.to(device) for part in batch_data)
        if self.kind.startswith("linear module"):
            return self.head(torch.tanh(self.body(x)), y)
        scores = self(x)
        if scores.ndim == 3:  # tokens: torch wants the classes second
            scores = scores.transpose(1, 2)
        if self.kind == "functional":
            return functional.cross_entropy(scores, y, weight=CLASS_WEIGHTS, ignore_index=1)
        if self.kind == "smoothed function":
            return functional.cross_entropy(scores, y, None, None, 1, label_smoothing=0.1)
        if self.kind == "factor of a smoothed function":
            aux = functional.cross_entropy(scores, y.clamp(min=0), weight=CLASS_WEIGHTS, label_smoothing=0.2)
            return MultiLoss({"out": 0.5 * functional.cross_entropy(scores, y, label_smoothing=0.1), "aux": -aux / 3})
        if self.kind == "linear function":
            hidden = torch.tanh(self.body(x))
            return functional.linear_cross_entropy(  # type: ignore[attr-defined]
                hidden, self.head.weight, y, linear_bias=self.head.bias, weight=CLASS_WEIGHTS, ignore_index=1
            )
        if self.kind == "own criterion":
            return self.inner(scores, y)
        if self.kind == "log":
            return criterion(functional.log_softmax(scores, 1), y)
        if self.kind == "own weights":
            seen = y >= 0
            wrong = scores.softmax(1)[seen] - functional.one_hot(y[seen], 4)
            summed = (wrong**2).sum() if criterion is None else criterion(wrong, torch.zeros_like(wrong))
            mean, squares = summed / seen.sum().clamp(min=1), (scores**2).mean()
            return 2 * MultiLoss({"seen": (mean, seen.sum()), "size": squares, "rows": (squares, len(y))})
        if self.kind == "several":
            return MultiLoss({"classes": criterion(scores, y), "size": (scores**2).mean()})
        if self.kind == "factors":  # of Python and of torch
            aux = functional.cross_entropy(scores, y.clamp(min=0), weight=CLASS_WEIGHTS)
            return MultiLoss({"out": criterion(scores, y) / 2, "aux": 0.5 * aux, "other": -criterion(scores, y)})
        if self.kind == "factor":
            return criterion(scores, y) * torch.tensor(0.3)
        if self.kind == "pairs":  # computed by hand, each with what it was divided by
            seen, classes = y >= 0, y.clamp(min=0)
            picked = functional.log_softmax(scores, 1).gather(1, classes[:, None]).squeeze(1)
            weights = CLASS_WEIGHTS[classes]
            squares = (weights * scores.square().mean(1)).sum() / weights.sum()
            return MultiLoss(
                {
                    "own": (-(picked * seen).sum() / seen.sum().clamp(min=1), seen.sum()),
                    "squares": (0.1 * squares, weights.sum().item()),
                    "size": 0.1 * scores.abs().mean(),
                }
            )
        if self.kind == "several optimizers":
            parts = {"body": criterion(scores, y), "head": self.inner(scores, y.clamp(min=0))}
            return MultiLoss(parts)
        return criterion(scores, y)


def samples(n: int, *, ignored: int = -100, tokens: int = 0, first: int = 0) -> TensorDataset:
    """``n`` samples; from the ``first`` on every third has no label, and five in a row have none."""
    generator = torch.Generator().manual_seed(3)
    shape = (n, tokens) if tokens else (n,)
    x = torch.randn(*shape, 6, generator=generator, dtype=torch.float64)
    y = (x @ torch.randn(6, 4, generator=generator, dtype=torch.float64)).argmax(-1)
    y[first::3] = ignored
    y[first : first + 5] = ignored
    return TensorDataset(x, y)


CASES: dict[str, tuple[str, Any, TensorDataset]] = {
    "weights": ("plain", nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), samples(37, ignored=0)),
    "ignored": ("plain", nn.CrossEntropyLoss(), samples(37)),
    "ignored class": ("plain", nn.CrossEntropyLoss(ignore_index=2), samples(37, ignored=2)),
    "weights, ignored": ("plain", nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), samples(37)),
    "tokens": ("plain", nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), samples(29, tokens=5)),
    "smoothed": ("plain", nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1), samples(37)),
    "smoothed, ignored": ("plain", nn.CrossEntropyLoss(label_smoothing=0.2), samples(37)),
    "log-probabilities": ("log", nn.NLLLoss(weight=CLASS_WEIGHTS), samples(37)),
    "function": ("plain", partial(functional.cross_entropy, weight=CLASS_WEIGHTS), samples(37)),
    "function in get_loss": ("functional", None, samples(37, ignored=1)),
    "smoothed function": ("smoothed function", None, samples(37, ignored=1)),
    "smoothed function of tokens": ("smoothed function", None, samples(29, ignored=1, tokens=5)),
    "smoothed partial": ("plain", partial(functional.cross_entropy, label_smoothing=0.1), samples(37)),
    "factor of a smoothed function": ("factor of a smoothed function", None, samples(37)),
    "factor of a smoothed criterion": ("factor", nn.CrossEntropyLoss(label_smoothing=0.1), samples(37)),
    "the model's own criterion": ("own criterion", None, samples(37)),
    "MultiLoss": ("several", nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), samples(37)),
    "MultiLoss, later ignored": ("several", nn.CrossEntropyLoss(), samples(37, first=4)),
    "MultiLoss, factors": ("factors", nn.CrossEntropyLoss(), samples(37)),
    "MultiLoss, own weights": ("own weights", None, samples(37)),
    "MultiLoss, own weights, sums": ("own weights", nn.MSELoss(reduction="sum"), samples(37)),
    "factor": ("factor", nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), samples(37)),
    "MultiLoss, pairs": ("pairs", None, samples(37)),
    "MultiLoss, optimizers": ("several optimizers", nn.CrossEntropyLoss(), samples(37)),
}
if HAS_LINEAR:
    CASES |= {kind: (kind, None, samples(37)) for kind in LINEAR}
    # In chunks, a batch whose targets are all ignored has NaN gradients.
    CASES["linear module, in chunks"] = ("linear module, in chunks", None, samples(37, ignored=0))
    CASES["linear function"] = ("linear function", None, samples(37, ignored=1))


def trained(case: str, mode: str, *, batch_size: int, accumulation: int = 1, **arguments: Any) -> dict[str, Any]:
    """Weights, history and evaluation of two epochs, in float64."""
    kind, criterion, data = CASES[case]
    torch.manual_seed(0)
    model = Classifier(kind).double()
    if kind == "several optimizers":
        parts = {"body": model.body, "head": model.head}
        optimizer: Any = MultiOptimizer({name: optim.SGD(part.parameters(), lr=0.2) for name, part in parts.items()})
    else:
        optimizer = optim.SGD(model.parameters(), lr=0.2)
    loaders = [DataLoader(data, batch_size) for _ in range(2)]
    loop: TrainLoop[Any] = TrainLoop(
        model, *loaders, None, optimizer, criterion, gpu_mode=mode, accelerator="cpu", progress_bar=False, **arguments
    )
    loop.fit(num_epochs=2, grad_accumulation=accumulation)
    history = {name: values for name, values in loop.history.items() if "loss" in name}
    assert all(parameter.grad is None for parameter in model.parameters())
    return {**history, **{name: value for name, value in model.state_dict().items() if "inner" not in name}}
