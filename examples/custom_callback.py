"""Write your own callback: it times each epoch, keeps the times in checkpoints, and works with several ranks.

python examples/custom_callback.py --epochs 5
"""

import time

import torch
from torch import nn, optim

from digits import DigitsCNN, arguments, loaders, report
from trainloop import AbstractCallback, TrainLoop
from trainloop.callbacks import TensorBoard


class EpochTimes(AbstractCallback):
    """Record the seconds of each epoch in ``tl.history['seconds']`` and in ``self.seconds``."""

    def __init__(self) -> None:
        super().__init__("epoch times", execution_order=100)
        self.seconds: list[float] = []

    def on_epoch_begin(self) -> None:
        self.started = time.perf_counter()

    def on_epoch_end(self) -> None:
        self.seconds.append(time.perf_counter() - self.started)
        self.train_loop_obj.insert_metric_result_into_history("seconds", self.seconds[-1])

    def on_train_end(self) -> None:
        if self.train_loop_obj.is_main_process():  # every rank has its own copy; only one prints
            print(f"fastest epoch: {min(self.seconds):.2f} s, slowest: {max(self.seconds):.2f} s")

    def state_dict(self) -> dict:
        return {"seconds": list(self.seconds)}

    def load_state_dict(self, state: dict) -> None:
        self.seconds = list(state["seconds"])


if __name__ == "__main__":
    args = arguments(__doc__, epochs=5)
    torch.manual_seed(0)
    model = DigitsCNN()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    tl = TrainLoop(model, *loaders(batch_size=16), optimizer, nn.CrossEntropyLoss(), gpu_mode="ddp", devices=2)
    times = EpochTimes()
    model = tl.fit(num_epochs=args.epochs, callbacks=[times, TensorBoard("runs/callback")])

    print(f"{len(times.seconds)} epochs were timed; the callback came back from rank 0 with what it knew")
    report(tl)
    print("TensorBoard logs: runs/callback   (tensorboard --logdir runs)")
