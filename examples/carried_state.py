"""Train a recurrent model on one long text, and carry its state from chunk to chunk, on any number of ranks.

    python examples/carried_state.py --epochs 10

The text is cut into columns of equal length. Each batch is the next chunk of all columns. ``SplitBatches`` gives every
rank the same columns of each batch, so that each chunk starts with the state after the previous one (truncated
backpropagation through time). Two ranks train like one process.
"""

import torch
from sklearn import datasets
from torch import Tensor, nn, optim

from digits import arguments
from trainloop import TrainLoop, TTModel
from trainloop.data import SplitBatches

COLUMNS, TIME = 16, 32


class Speller(TTModel):
    carried_state = {"hidden": 1}  # (layer, column, feature)

    def __init__(self, symbols: int, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.rnn = nn.LSTM(width, width, num_layers=2)
        self.head = nn.Linear(width, symbols)
        self.hidden = None

    def on_epoch_begin(self) -> None:
        self.hidden = None

    def on_evaluation_begin(self, dataset_info) -> None:
        self.kept, self.hidden = self.hidden, None

    def on_evaluation_end(self, dataset_info) -> None:
        self.hidden = self.kept

    def forward(self, text: Tensor) -> Tensor:
        output, hidden = self.rnn(self.embed(text), self.hidden)
        self.hidden = tuple(state.detach() for state in hidden)
        return self.head(output)

    def get_loss(self, batch_data, criterion, device):
        text, following = batch_data
        return criterion(self(text).flatten(0, 1), following.flatten()), following.numel()

    def get_predictions(self, batch_data, device):
        text, following = batch_data
        return list(self(text).argmax(2).T), list(following.T), {}  # a row for each column


def in_columns(text: list[int], columns: int) -> SplitBatches:
    length = len(text) // columns
    table = torch.tensor(text[: length * columns]).view(columns, length).T.contiguous()  # (time, column)
    starts = range(0, length - 1, TIME)
    ends = [min(start + TIME, length - 1) for start in starts]
    return SplitBatches([(table[i:j], table[i + 1 : j + 1]) for i, j in zip(starts, ends)], dim=1)


if __name__ == "__main__":
    args = arguments(__doc__)
    torch.manual_seed(0)
    names = ["iris", "wine", "digits", "breast_cancer", "linnerud", "diabetes"]
    text = "\n".join(getattr(datasets, f"load_{name}")()["DESCR"] for name in names)
    alphabet = "".join(sorted(set(text)))
    symbols = [alphabet.index(letter) for letter in text]
    held_out = len(symbols) // 10

    model = Speller(len(alphabet))
    tl = TrainLoop(
        model,
        in_columns(symbols[:-held_out], COLUMNS),
        in_columns(symbols[-held_out:], 4),
        optimizer=optim.Adam(model.parameters(), lr=4e-3),
        criterion=nn.CrossEntropyLoss(),
        gpu_mode="ddp",
        devices=torch.cuda.device_count() or 2,
        gradient_clip_norm=1.0,
    )
    tl.fit(num_epochs=args.epochs)
    following, truth, _ = tl.predict_on_validation_set()
    right = sum(int((a == b).sum()) for a, b in zip(following, truth))
    print(f"next letter on {sum(map(len, truth)):,} held-out letters: {100 * right / sum(map(len, truth)):.1f}% right")
