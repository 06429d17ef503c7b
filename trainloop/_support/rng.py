"""Seed, capture and restore the random number generators of Python, numpy and torch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from trainloop._support.user_line import warn
from trainloop.errors import CheckpointError


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) that depends on every part, and is the same in all processes and versions.

    Examples
    --------
    >>> derive_seed(0, "rank", 1) == derive_seed(0, "rank", 1) != derive_seed(0, "rank", 2)
    True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int) -> None:
    """Seed Python, numpy and torch (all devices), without initialising CUDA."""
    random.seed(seed)
    seed_numpy(seed)
    torch.manual_seed(seed)


def seed_numpy(seed: int) -> None:
    """Seed numpy's global generator; ``np.random.seed`` can't, after ``np.random.set_bit_generator(PCG64())``."""
    from numpy.random import mtrand  # imported late: numpy loads it on first use, which takes 8 ms

    bits = mtrand.get_bit_generator()
    if isinstance(bits, np.random.MT19937):
        np.random.seed(seed % 2**32)
    else:
        np.random.set_state({**type(bits)(seed).state, "has_gauss": 0, "gauss": 0.0})


def peek_seed() -> int:
    """Return a seed that depends on torch's RNG state, without changing that state."""
    state = torch.get_rng_state()
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def advance() -> None:
    """Draw a number from each generator, as a pass over a ``DataLoader`` does from torch's, so that later draws differ.

    Generators of devices get a new seed instead, if they are in use, since a draw would need memory on each device.
    """
    random.random()
    np.random.random_sample()
    drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(drawn)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(drawn)


class States(NamedTuple):
    """The states of all generators in the generators' own formats: read and put back in a fifth of the time."""

    python: Any
    numpy: Any
    torch: torch.Tensor
    cuda: list[torch.Tensor] | None = None
    cuda_device: int = 0
    mps: torch.Tensor | None = None

    def captured(self) -> dict[str, Any]:
        """Return the states in the form of :func:`capture`."""
        state: dict[str, Any] = {"python": None, "numpy": None, "torch": self.torch}
        if self.python is not None:
            version, internal, gauss = self.python
            state["python"] = [version, torch.tensor(internal, dtype=torch.int64, device="cpu"), gauss]
            state["numpy"] = _plain_numpy(self.numpy)
        if self.cuda is not None:
            state["cuda"], state["cuda_device"] = self.cuda, self.cuda_device
        if self.mps is not None:
            state["mps"] = self.mps
        return state

    def restore(self) -> None:
        """Restore the states in the process that has read them."""
        random.setstate(self.python)
        _set_numpy(self.numpy)
        torch.set_rng_state(self.torch)
        for device, state in enumerate(self.cuda or ()):
            torch.cuda.set_rng_state(state, device)
        if self.mps is not None:
            torch.mps.set_rng_state(self.mps)


def read(*, devices: bool = True, only_torch: bool = False) -> States:
    """Return the states of all generators; with ``only_torch``, without those of Python and numpy.

    Unless ``devices=False``, this includes the generators of CUDA if CUDA is already in use, and the generator of MPS
    if the machine has MPS. No device is initialised.
    """
    # np.random.rand() and most augmentation code use the legacy global generator.
    python, of_numpy = (None, None) if only_torch else (random.getstate(), np.random.get_state(legacy=False))
    states = States(python, of_numpy, torch.get_rng_state())
    if devices and torch.cuda.is_initialized():
        states = states._replace(cuda=torch.cuda.get_rng_state_all(), cuda_device=torch.cuda.current_device())
    if devices and torch.backends.mps.is_available():
        states = states._replace(mps=torch.mps.get_rng_state())
    return states


def _set_numpy(state: Any) -> None:
    """Set the state of numpy's global generator, and its kind: the script may not have set it yet in this process."""
    from numpy.random import mtrand

    kind = state["bit_generator"]
    if type(mtrand.get_bit_generator()).__name__ != kind:
        if not hasattr(np.random, kind):
            raise CheckpointError(
                f"The random states are of numpy's global generator with the bit generator {kind}, which is not one of "
                f"numpy's own. Set it in this program first: np.random.set_bit_generator({kind}())."
            )
        mtrand.set_bit_generator(getattr(np.random, kind)())
    key = state["state"].get("key")
    if isinstance(key, np.ndarray):  # numpy reads a list in a third of the time that it takes for an array
        state = {**state, "state": {**state["state"], "key": key.tolist()}}
    np.random.set_state(state)


def without_arrays(state: Any) -> Any:
    """Return the state of a generator of numpy as plain types: dicts, lists and numbers."""
    if isinstance(state, np.ndarray):
        return state.tolist()
    return {key: without_arrays(value) for key, value in state.items()} if isinstance(state, dict) else state


def same_state(one: Any, other: Any) -> bool:
    """Return True if two states have the same values, however nested."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same_state(one[k], other[k]) for k in one)
    if isinstance(one, tuple):
        with suppress(RuntimeError, ValueError):  # tensors or arrays of several numbers
            return one == other  # the 625 numbers of Python's generator at once
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same_state, one, other))
    return bool(one == other)


def drew(before: States, *, devices: bool = True) -> bool:
    """Return True if random numbers were drawn since ``before`` was read, from a generator whose state it has."""
    now = read(devices=devices, only_torch=before.python is None)
    one, other = ([states.python, states.numpy, states.torch, *(states.cuda or ())] for states in (before, now))
    return not same_state(one, other)


def drew_for_loaders(before: States) -> bool:
    """Return True if only torch's CPU generator has drawn since ``before``, at most as loaders' iterators do: seeds."""
    now = read(devices=False)
    if not same_state([before.python, before.numpy], [now.python, now.numpy]):
        return False
    generator = torch.Generator("cpu")
    generator.set_state(before.torch)
    for _ in range(4):  # one for each iterator, and one for its order
        torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
        if torch.equal(generator.get_state(), now.torch):
            return True
    return False


def capture(*, devices: bool = True) -> dict[str, Any]:
    """Return the state of all generators as plain types and tensors, for checkpoints; see :func:`read`."""
    return read(devices=devices).captured()


class Snapshots:
    """Random states before each forward, in the generators' own formats; the only GPU included is the current one.

    Python's and numpy's states take 30 times as long to read as torch's, and few programs use these generators while
    they train. So once these states have not changed for 100 forwards, they are read only before every 100th forward.
    """

    PERIOD = 100

    def __init__(self) -> None:
        self._slow: list[Any] = []  # Python's and numpy's states, as last read
        self._unchanged = 0  # forwards since these states were last found changed

    def take(self) -> States:
        """Return the current states. Nothing waits for a GPU: its generator has seed and offset on the host."""
        self._unchanged += 1
        if not self._forwards_unread():
            slow = _slow_states()
            if not same_state(slow, self._slow):
                self._unchanged, self._slow = 0, slow
        python, of_numpy = self._slow
        device = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else None
        return States(python, of_numpy, torch.get_rng_state(), device)

    def unread(self) -> int:
        """Return how many forwards ago Python's and numpy's states were read; 0 if the states are still the same."""
        return 0 if same_state(_slow_states(), self._slow) else self._forwards_unread()

    def _forwards_unread(self) -> int:
        return self._unchanged % self.PERIOD if self._unchanged >= self.PERIOD else 0


def _slow_states() -> list[Any]:
    return [random.getstate(), np.random.get_state(legacy=False)]


def _plain_numpy(state: Any) -> dict[str, Any]:
    if state["bit_generator"] != "MT19937":
        plain: dict[str, Any] = without_arrays(state)
        return plain
    return {
        "key": torch.from_numpy(state["state"]["key"].astype(np.int64)),
        "pos": int(state["state"]["pos"]),
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }


def restore(state: dict[str, Any]) -> None:
    """Restore the state that :func:`capture` returned.

    The current GPU gets the state of the GPU that was current during the capture, even if that was a different GPU.
    States of missing GPUs are ignored.
    """
    if not {"python", "numpy", "torch"} <= state.keys():
        warn(
            "The checkpoint has random states in the format of an earlier version of trainloop. They are not "
            "restored, so the run continues with different random numbers."
        )
        return
    if state["python"] is not None:  # otherwise only torch's generators were read
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal.tolist()), gauss))
        saved = state["numpy"]
        if "key" in saved:
            own = {"key": saved["key"].tolist(), "pos": saved["pos"]}
            saved = {"bit_generator": "MT19937", "state": own, "has_gauss": saved["has_gauss"], "gauss": saved["gauss"]}
        _set_numpy(saved)
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        # current_device() would initialise CUDA.
        here = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        there = state.get("cuda_device", here)
        states = dict(enumerate(state["cuda"][: torch.cuda.device_count()]))
        if there < len(state["cuda"]):
            states[here] = state["cuda"][there]
        for device, cuda_state in states.items():
            torch.cuda.set_rng_state(cuda_state, device)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


@contextmanager
def isolated(seed: int | None = None) -> Iterator[None]:
    """Isolate random draws in the block from the generators outside. With ``seed``, the draws are always the same."""
    before = read()
    first_seed = torch.initial_seed()
    try:
        if seed is not None:
            seed_all(seed)
        yield
    finally:
        before.restore()
        if before.cuda is None and (seed is not None or torch.cuda.is_initialized()):
            # CUDA was not in use before: without this block, it would have started with the seed of the CPU's
            # generator.
            torch.cuda.manual_seed_all(first_seed)


class Generator(Protocol):
    """A random generator, by the methods of torch's generators."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any, /) -> Any: ...


@dataclass(frozen=True)
class _OfPython:
    own: random.Random

    def get_state(self) -> Any:
        return self.own.getstate()

    def set_state(self, state: Any) -> None:
        self.own.setstate(state)


@dataclass(frozen=True)
class _OfNumpy:
    own: np.random.Generator

    def get_state(self) -> Any:
        return without_arrays(self.own.bit_generator.state)

    def set_state(self, state: Any) -> None:
        self.own.bit_generator.state = state


@dataclass(frozen=True)
class _OfOldNumpy:
    own: np.random.RandomState

    def get_state(self) -> Any:
        return without_arrays(self.own.get_state(legacy=False))

    def set_state(self, state: Any) -> None:
        self.own.set_state(state)


def as_generator(value: Any) -> Generator | None:
    """Return a random generator of Python, numpy or torch, with its state; ``None`` for any other object."""
    if isinstance(value, torch.Generator):
        return value
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return _OfPython(value)
    if isinstance(value, np.random.RandomState):
        return _OfOldNumpy(value)
    if isinstance(value, np.random.BitGenerator):
        value = np.random.Generator(value)  # with the same state
    return _OfNumpy(value) if isinstance(value, np.random.Generator) else None
