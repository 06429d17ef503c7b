"""Tensors of a user's model that ranks copy from the first rank: of all strides and dtypes, in few exchanges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.ranks import run_ranks
from torch import Tensor, nn

from trainloop.parallel import TTFullyShardedDataParallel


def tensors(factor: int) -> dict[str, Tensor]:
    rows = torch.arange(24.0).reshape(4, 6) * factor
    return {
        "contiguous": rows.clone(),
        "transposed": rows.clone().t(),
        "columns": rows.clone()[:, ::2],
        "channels": rows.clone().reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "scalar": torch.tensor(7 * factor),
        "flags": torch.tensor([factor == 1, True]),
        "empty": torch.empty(0, 3),
        "complex": torch.tensor([1 + 2j]) * factor,
        "large": torch.full((3000, 3000), float(factor)),
    }


def shared_buffers() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    own, first = tensors(1 + dist.get_rank()), tensors(1)
    if dist.get_rank():  # other strides than on rank 0
        own["transposed"] = own["transposed"].contiguous()
    for name, value in own.items():
        model.register_buffer(name, value)
    wrapper = TTFullyShardedDataParallel(model, init_sync=False)
    sent: list[Tensor] = []
    broadcast = dist.broadcast

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor)
        return broadcast(tensor, *args, **kwargs)

    dist.broadcast = noted
    wrapper.share_buffers()
    return {
        "wrong": [name for name, value in model.named_buffers() if not torch.equal(value, first[name])],
        "new memory": [name for name, value in model.named_buffers() if value is not own[name]],
        "exchanges": len(sent),
        "contiguous": all(tensor.is_contiguous() for tensor in sent),
    }


@pytest.mark.long
def test_buffers_of_all_strides_are_shared_in_one_exchange_per_dtype(tmp_path: Path) -> None:
    for facts in run_ranks(shared_buffers, 2, folder=tmp_path):
        assert facts == {"wrong": [], "new memory": [], "exchanges": 4, "contiguous": True}
