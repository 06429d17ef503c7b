"""One host's part in a training of several whose ranks fail.

``hosts_job.py FOLDER NODES NODE RANKS PLAN KIND MODE``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from kit.survival import train

SAME_EVERYWHERE = ("weights", "optimizer", "history", "schedule", "counters", "average", "early stopping")
"""Facts that are the same in the callers of all hosts; what a rank has seen or drawn is its own host's."""


def main() -> None:
    folder, nodes, node, ranks, plan, kind, mode = sys.argv[1:]
    tl, facts = train(
        Path(folder, f"host-{node}"),
        mode,
        int(ranks),
        kind,
        [tuple(strike) for strike in json.loads(plan)],
        seed=None if kind == "batch sampler" else 3,
        num_nodes=int(nodes),
        node_rank=int(node),
        max_restarts=-1,
        restart_every_steps=3,
    )
    torch.save([facts, [list(restart) for restart in tl.restarts]], Path(folder, f"facts-{node}.pt"))


if __name__ == "__main__":
    main()
