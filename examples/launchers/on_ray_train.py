"""Train under Ray Train: Ray starts the workers and their process group, and ``fit`` joins the group.

    pip install 'ray[train]'
    python examples/launchers/on_ray_train.py --workers 2
    RAY_ADDRESS=head:6379 TRAINLOOP_KEY=... python examples/launchers/on_ray_train.py --workers 16 --storage /shared

Ray places the workers, restarts them when a node is lost, and reports metrics. The training is the same as in
``gpu_mode='ddp'``. Workers on several nodes need a common key, and storage that all of them can access.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any


def train(config: dict[str, Any]) -> None:
    """Train the model; each worker runs this function."""
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
    with tempfile.TemporaryDirectory() as folder:
        if tl.is_global_zero:
            torch.save(model.state_dict(), f"{folder}/weights.pt")
        # Ray keeps the metrics that are reported with a checkpoint; it uses rank 0's.
        checkpoint = ray.train.Checkpoint.from_directory(folder) if tl.is_global_zero else None
        ray.train.report({"loss": tl.history["loss"][-1], "steps": tl.global_step}, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--storage", help="folder or URL that all nodes can access (default: ~/ray_results, one node)")
    arguments = parser.parse_args()
    import ray
    import torch
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    key = {name: os.environ[name] for name in ("TRAINLOOP_KEY",) if name in os.environ}
    ray.init(runtime_env={"env_vars": key})  # workers have their node's environment, not this one
    scaling = ScalingConfig(num_workers=arguments.workers, use_gpu=torch.cuda.is_available())
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": arguments.epochs},
        scaling_config=scaling,
        run_config=RunConfig(storage_path=arguments.storage),
    )
    result = trainer.fit()
    print("loss after the last epoch:", result.metrics["loss"], "steps:", result.metrics["steps"])


if __name__ == "__main__":
    main()
