"""Norms of many tensors at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def norms_of(tensors: Sequence[Tensor], order: float = 2) -> Sequence[Tensor]:
    """The norm of each tensor: on a GPU a few kernels for them all, instead of one for each.

    torch keeps the function private, as ``torch.nn.utils.get_total_norm`` and its optimizers use it (read in 2.6 to
    2.13). Where it goes away, each tensor has a kernel of its own.
    """
    if hasattr(torch, "_foreach_norm"):
        return torch._foreach_norm(list(tensors), order)
    return [torch.linalg.vector_norm(tensor, order) for tensor in tensors]
