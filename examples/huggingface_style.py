"""Train a module in the style of Hugging Face unchanged: it takes keywords and returns an object with a loss.

    python examples/huggingface_style.py --epochs 8

``ModelWrap`` combines the module with a feed definition, which computes the loss and the predictions of a batch. You
can wrap a model of ``transformers`` in the same way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset

from digits import arguments, datasets, report
from trainloop import ModelWrap, TrainLoop
from trainloop.callbacks import TensorBoard
from trainloop.data.batch_model_feed_defs import AbstractModelFeedDefinition


@dataclass
class ClassifierOutput:
    logits: Tensor
    loss: Tensor | None = None


class ForImageClassification(nn.Module):
    """A module that does not use this library."""

    def __init__(self, labels: int = 10) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))
        self.classifier = nn.Linear(64, labels)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ClassifierOutput:
        logits = self.classifier(self.encoder(pixel_values.flatten(1)))
        return ClassifierOutput(logits, None if labels is None else nn.functional.cross_entropy(logits, labels))


class Rows(Dataset):
    """A dataset of dicts, the form in which tokenizers and image processors return samples."""

    def __init__(self, tensors: Dataset) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image, label = self.tensors[index]
        return {"pixel_values": image, "labels": label}


class Feed(AbstractModelFeedDefinition):
    def get_loss(self, model, batch_data, criterion, device):
        return model(**batch_data).loss

    def get_predictions(self, model, batch_data, device):
        logits = model(batch_data["pixel_values"]).logits
        return logits.argmax(1), batch_data["labels"], {}


if __name__ == "__main__":
    args = arguments(__doc__, epochs=8)
    torch.manual_seed(0)
    module = ForImageClassification()
    train_loader, validation_loader, test_loader = (
        DataLoader(Rows(part), batch_size=16, shuffle=i == 0) for i, part in enumerate(datasets())
    )
    tl = TrainLoop(
        ModelWrap(module, Feed()),
        train_loader,
        validation_loader,
        test_loader,
        optim.AdamW(module.parameters(), lr=3e-3),
        gpu_mode="ddp",
        devices=torch.cuda.device_count() or 2,
    )
    tl.fit(num_epochs=args.epochs, callbacks=[TensorBoard("runs/huggingface")])

    report(tl)  # `module` is trained: save it with its own save_pretrained
    print("TensorBoard logs: runs/huggingface   (tensorboard --logdir runs)")
