"""The training that the soak disturbs, in a process of its own; see ``soak.py``."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from kit.loops import cpu_loop

PLACES = ("getitem", "get_loss", "on_multiprocess_start", "on_train_begin", "on_epoch_begin", "on_batch_begin",
          "on_after_gradient_update", "on_after_optimizer_step", "on_batch_end", "on_evaluation_begin",
          "on_after_batch_prediction", "on_evaluation_end", "on_log", "on_epoch_end", "on_train_end", "on_exception",
          "state_dict", "load_state_dict")  # fmt: skip
ACTS = ("raises", "hangs", "hangs in native code", "SIGKILL", "SIGABRT", "SIGSEGV", "exits")


def act(what: str) -> None:
    if what == "raises":
        raise LookupError("the soak's own")
    if what == "hangs":
        time.sleep(1000)
    elif what == "hangs in native code":
        while True:  # a signal ends the call
            ctypes.PyDLL(None).sleep(1000)  # with Python's lock held
    elif what == "exits":
        os._exit(3)
    else:
        os.kill(os.getpid(), getattr(signal, what))
        time.sleep(1000)


def job(
    where: str, ranks: int, workers: int, place: str = "", on_rank: int = 0, what: str = "", at: int = 0,
    timeout: float = 60.0,
) -> None:  # fmt: skip
    """Train, from the newest checkpoint on; write what came out to ``where/end.pt``."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    from trainloop import AbstractCallback, TTBasicModel
    from trainloop.callbacks import ModelCheckpoint
    from trainloop.distributed import get_rank

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 57  # the last batch of an epoch is short, and not the same on all ranks

        def __getitem__(self, index: int) -> Any:
            if place == "getitem" and get_rank() == on_rank and index % 7 == at:
                act(what)
            generator = torch.Generator().manual_seed(index)
            time.sleep(0.002)
            return torch.randn(6, generator=generator) + 0.1 * torch.randn(6), index % 3

    class Net(TTBasicModel):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
            )

        def forward(self, x: Any) -> Any:
            return self.layers(x)

        def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
            if place == "get_loss" and get_rank() == on_rank and self.training:
                act(what)
            if place == "on_exception" and get_rank() == on_rank:
                raise LookupError("the soak's own")
            return super().get_loss(batch_data, criterion, device)

    def hook(name: str) -> Any:
        def run(self: Any, *args: Any) -> Any:
            if place == name and get_rank() == on_rank and self.train_loop_obj.global_step >= first:
                act(what)
            return {"is": 1} if name == "state_dict" else None

        return run

    before_the_first_step = ("on_multiprocess_start", "on_train_begin", "load_state_dict", "on_exception")
    first = 0 if place in before_the_first_step else at % 3  # step
    names = [name for name in PLACES if name.startswith("on_") or name.endswith("state_dict")]
    Strikes = type("Strikes", (AbstractCallback,), {name: hook(name) for name in names})

    class Tells(AbstractCallback):
        def __setstate__(self, state: dict[str, Any]) -> None:
            self.__dict__.update(state)
            if place == "coming back" and "RANK" not in os.environ:
                os.kill(os.getpid(), getattr(signal, what or "SIGTERM"))

        def on_batch_end(self) -> None:
            self.train_loop_obj.log("one", 1.0)

        def on_epoch_end(self) -> None:
            self.train_loop_obj.predict_on_validation_set()

        def on_train_begin(self) -> None:
            Path(where, f"rank-{get_rank()}").write_text(str(os.getpid()))

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch = 12 // ranks
    tl = cpu_loop(
        model,
        DataLoader(Rows(), batch, shuffle=True, num_workers=workers),
        optimizer,
        validation_loader=DataLoader(Rows(), batch),
        gpu_mode="ddp" if ranks > 1 else "single",
        devices=ranks,
        seed=3,
        timeout=timeout,
    )
    keeper = ModelCheckpoint(f"{where}/checkpoints", every_n_epochs=None, every_n_steps=1, keep=2)
    tl.fit(num_epochs=2, callbacks=[Tells("tells"), Strikes("strikes"), keeper], resume_from="last")
    Path(where, "returned").touch()
    torch.save([model.state_dict(), optimizer.state_dict(), tl.history.to_dict()], f"{where}/end.tmp")
    os.replace(f"{where}/end.tmp", f"{where}/end.pt")


if __name__ == "__main__":
    job(**json.loads(sys.argv[1]))
