"""Two hosts with two ranks each: the script that both run. ``two_hosts.sh`` runs it in two network namespaces.

    MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 python examples/two_hosts.py --node-rank 0     # on the first host
    MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 python examples/two_hosts.py --node-rank 1     # on the second

Each host starts only its own ranks. A step has four times as many samples as a loader's batch.
"""

import argparse

import torch
from torch import nn, optim

from digits import DigitsCNN, loaders, report
from trainloop import TrainLoop
from trainloop.callbacks import TensorBoard

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--node-rank", type=int, required=True)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = DigitsCNN()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    tl = TrainLoop(
        model,
        *loaders(batch_size=8),
        optimizer,
        nn.CrossEntropyLoss(),
        gpu_mode="ddp",
        devices=torch.cuda.device_count() or 2,
        seed=0,
        timeout=120,
    )
    model = tl.fit(num_epochs=args.epochs, callbacks=[TensorBoard("runs/hosts")], num_nodes=2, node_rank=args.node_rank)
    checksum = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"node {args.node_rank}: trained, checksum of the weights {checksum:.10f}")
    if args.node_rank == 0:  # evaluate on one host only
        alone = TrainLoop(model, None, None, loaders()[2], criterion=nn.CrossEntropyLoss())
        report(alone)
        print("TensorBoard logs: runs/hosts   (tensorboard --logdir runs)")
