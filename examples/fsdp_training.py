"""Train a small vision transformer whose parameters, gradients and optimizer state are sharded over the ranks.

    python examples/fsdp_training.py --epochs 10

Only ``gpu_mode='fsdp'`` differs from training on one device. The blocks of the model are units, whose parameters are
gathered only while they run. Each rank writes its shards of a checkpoint, from which any number of ranks, or one
process, can resume.
"""

import torch
from torch import Tensor, nn, optim

from digits import arguments, loaders, report
from trainloop import TrainLoop, TTModel
from trainloop.callbacks import ModelCheckpoint
from trainloop.distributed import is_global_zero


class Transformer(TTModel):
    """Each row of a picture is a token of eight pixels."""

    def __init__(self, width: int = 48, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(torch.randn(8, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        hidden = self.embed(pictures.reshape(-1, 8, 8)) + self.place
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))

    def get_loss(self, batch_data, criterion, device):
        pictures, labels = batch_data
        return criterion(self(pictures), labels)

    def get_predictions(self, batch_data, device):
        pictures, labels = batch_data
        return self(pictures).argmax(1).cpu(), labels, {}


if __name__ == "__main__":  # a spawned loader worker imports this file, and must not train
    args = arguments(__doc__)
    torch.manual_seed(0)
    model = Transformer()
    train_loader, validation_loader, test_loader = loaders(batch_size=16)  # per rank; two ranks: 32 in each step

    tl = TrainLoop(
        model,
        train_loader,
        validation_loader,
        test_loader,
        optim.AdamW(model.parameters(), lr=3e-3),
        nn.CrossEntropyLoss(),
        gpu_mode="fsdp",
        devices=torch.cuda.device_count() or 2,
        gradient_clip_norm=1.0,
        seed=0,
    )
    checkpoint = ModelCheckpoint("checkpoints/fsdp", monitor="val_loss", keep=1)
    # The blocks of a ModuleList are units by default. Pass shard= for models with other blocks.
    model = tl.fit(
        num_epochs=args.epochs, callbacks=[checkpoint], fsdp_model_args={"shard": [nn.TransformerEncoderLayer]}
    )

    report(tl)
    if is_global_zero():
        print(f"one file of it: python -m trainloop checkpoint export {checkpoint.best_path} model.safetensors")
