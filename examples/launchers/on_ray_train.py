"""The loop as Ray Train's workers: Ray starts the processes and their group, ``fit`` joins it.

    pip install 'ray[train]'
    python examples/launchers/on_ray_train.py --workers 2

Ray places the workers, starts them anew when a node is lost, and reports; the training is that of ``gpu_mode='ddp'``.
"""

from __future__ import annotations

import argparse
from typing import Any


def train(config: dict[str, Any]) -> None:
    """The function that each worker runs."""
    import ray.train
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from trainloop import TrainLoop, TTBasicModel

    class Net(TTBasicModel):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers(x)
            return out

    torch.manual_seed(0)  # the same data and weights in each worker
    x = torch.randn(500, 8)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = Net()
    tl = TrainLoop(
        model,
        DataLoader(data, batch_size=16, shuffle=True),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        criterion=nn.CrossEntropyLoss(),
        gpu_mode="ddp",
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        seed=0,
        progress_bar=False,
    )
    tl.fit(num_epochs=config["epochs"])
    ray.train.report({"loss": tl.history["loss"][-1], "steps": tl.global_step})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    import torch
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    scaling = ScalingConfig(num_workers=arguments.workers, use_gpu=torch.cuda.is_available())
    result = TorchTrainer(train, train_loop_config={"epochs": arguments.epochs}, scaling_config=scaling).fit()
    print("loss after the last epoch:", result.metrics["loss"], "steps:", result.metrics["steps"])


if __name__ == "__main__":
    main()
