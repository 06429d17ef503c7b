"""Train a small transformer to spell, on the texts that describe scikit-learn's data sets.

    python examples/text_transformer.py --epochs 10

Sequences differ in length, so the loss is a mean over characters. ``get_loss`` returns the loss and the number of
characters, which the loop uses as the weight of the loss.
"""

import torch
from sklearn import datasets
from torch import Tensor, nn, optim
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from digits import arguments
from trainloop import TrainLoop, TTModel
from trainloop.callbacks import TensorBoard

PAD = 0
LENGTH = 96


class Speller(TTModel):
    def __init__(self, symbols: int, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width, padding_idx=PAD)
        self.place = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, symbols)

    def forward(self, symbols: Tensor) -> Tensor:
        length = symbols.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=symbols.device)
        return self.head(self.body(self.embed(symbols) + self.place[:length], mask=causal, is_causal=True))

    def get_loss(self, batch_data, criterion, device):
        line = batch_data
        loss = criterion(self(line[:, :-1]).flatten(0, 1), line[:, 1:].flatten())
        return loss, (line[:, 1:] != PAD).sum()

    def get_predictions(self, batch_data, device):
        line = batch_data
        return list(self(line[:, :-1]).argmax(2).cpu()), list(line[:, 1:].cpu()), {}


def write(model: Speller, alphabet: str, begin: str, length: int) -> str:
    symbols = [alphabet.index(letter) + 1 for letter in begin]
    model.eval()
    with torch.no_grad():
        for _ in range(length):
            logits = model(torch.tensor([symbols[-LENGTH:]], device=model.device))[0, -1]
            symbols.append(int(logits[1:].argmax()) + 1)
    return "".join(alphabet[symbol - 1] for symbol in symbols)


if __name__ == "__main__":
    args = arguments(__doc__)
    torch.manual_seed(0)
    names = ["iris", "wine", "digits", "breast_cancer", "diabetes", "linnerud"]
    text = "\n".join(getattr(datasets, f"load_{name}")()["DESCR"] for name in names)
    alphabet = "".join(sorted(set(text)))
    pieces = [
        p
        for line in text.split("\n")
        for p in (line[i : i + LENGTH] for i in range(0, len(line), LENGTH))
        if len(p) > 8
    ]
    data = [torch.tensor([alphabet.index(letter) + 1 for letter in piece]) for piece in pieces]
    held_out = data[::10]
    train = [line for i, line in enumerate(data) if i % 10]

    def loader(lines: list[Tensor], shuffle: bool = False) -> DataLoader:
        return DataLoader(
            lines, batch_size=16, shuffle=shuffle, collate_fn=lambda batch: pad_sequence(batch, True, padding_value=PAD)
        )

    model = Speller(len(alphabet) + 1)
    optimizer = optim.AdamW(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    tl = TrainLoop(
        model, loader(train, shuffle=True), loader(held_out), None, optimizer, criterion, gradient_clip_norm=1.0
    )
    model = tl.fit(num_epochs=args.epochs, callbacks=[TensorBoard("runs/text")])

    y_pred, y_true, _ = tl.predict_on_validation_set()
    right = sum(((p == t) & (t != PAD)).sum().item() for p, t in zip(y_pred, y_true))
    accuracy = right / sum((t != PAD).sum().item() for t in y_true)
    print(f"accuracy of the next letter on {len(y_true)} held-out lines: {accuracy:.2%}")
    print("it writes:", repr(write(model, alphabet, "The ", 60)))
    print("TensorBoard logs: runs/text   (tensorboard --logdir runs)")
