"""Mistakes that type checkers must find: each line that ends in ``# wrong``, and no other."""

from __future__ import annotations

from torch import nn, optim
from user_script import Net

import trainloop
from trainloop import AbstractCallback, TrainLoop
from trainloop.callbacks import EarlyStoping  # wrong
from trainloop.train_loop import TrainLop  # wrong


class Prints(AbstractCallback):
    def on_epoch_end(self) -> None:
        print(self.train_loop_obj.global_stp)  # wrong
        self.train_loop_obj.log_all("a", 1)  # wrong


def main() -> None:
    net = Net()
    tl = TrainLoop(net, None, optimizer=optim.Adam(net.parameters()), criterion=nn.CrossEntropyLoss())
    TrainLoop(net, None, gpu_mode="dpp")  # wrong
    TrainLoop(net, None, accelerator="cpus")  # wrong
    TrainLoop(net, None, val_loader=None)  # wrong
    TrainLoop(nn.Linear(2, 2), None)  # wrong
    tl.fit(epochs=3)  # wrong
    tl.fit(num_epochs=3).own_methd()  # wrong
    print(tl.historie, EarlyStoping, TrainLop)  # wrong
    print(trainloop.TrainLop)  # wrong


if __name__ == "__main__":
    main()
