"""Random number generators of Python, numpy and torch: seeded together, kept, and put back."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["capture", "derive_seed", "isolated", "peek_seed", "restore", "seed_all"]


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that depends on every part, and stays the same over processes and versions.

    Examples
    --------
    >>> derive_seed(0, "rank", 1) == derive_seed(0, "rank", 1) != derive_seed(0, "rank", 2)
    True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int) -> None:
    """Seed Python, numpy and torch (all devices). CUDA is not initialised by it."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def peek_seed() -> int:
    """A seed that depends on torch's RNG state and doesn't change it: as reproducible as what the caller did before."""
    state = torch.get_rng_state()
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def capture(*, devices: bool = True) -> dict[str, Any]:
    """State of all generators as plain types and tensors, so that a checkpoint can hold it.

    CUDA generators are included where CUDA is in use already, unless ``devices=False``.
    """
    version, internal, gauss = random.getstate()
    # The legacy global generator is what np.random.rand() and most augmentation code draws from.
    numpy_state: Any = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "python": [version, torch.tensor(internal, dtype=torch.int64), gauss],
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": torch.get_rng_state(),
    }
    if devices and torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put back what :func:`capture` returned. States of GPUs that are not there are ignored."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    saved = state["numpy"]
    np.random.set_state(
        ("MT19937", saved["key"].numpy().astype(np.uint32), saved["pos"], saved["has_gauss"], saved["gauss"])
    )
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for device, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(cuda_state, device)


@contextmanager
def isolated(seed: int | None = None) -> Iterator[None]:
    """Whatever is drawn inside leaves no trace outside; with ``seed``, it is also the same each time."""
    before = capture()
    try:
        if seed is not None:
            seed_all(seed)
        yield
    finally:
        restore(before)
