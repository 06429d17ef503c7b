"""Send epoch values to a tracker, each once, with the step at which its epoch ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["EpochValues"]


class EpochValues:
    """Values of the history that have not been sent yet."""

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}  # how many values of each metric have been sent
        self._steps: dict[int, int] = {}  # the step at which each epoch ended

    def clear(self) -> None:
        """Reset for another training."""
        self._lengths, self._steps = {}, {}

    def take(self, loop: Any) -> Iterator[tuple[int, int, dict[str, float]]]:
        """Return new values as (epoch, step, values), by epoch; for ``on_epoch_end`` and ``on_train_end``.

        Callbacks that run after the tracker may have logged values for an epoch that has already ended.
        """
        self._steps[loop.epoch] = loop.global_step
        found: dict[int, dict[str, float]] = {}
        for name in loop.history:
            values, epochs, sent = loop.history[name], loop.history.epochs(name), self._lengths.get(name, 0)
            for value, epoch in zip(values[sent:], epochs[sent:], strict=True):
                found.setdefault(epoch, {})[name] = value
            self._lengths[name] = len(values)
        for epoch in sorted(found):
            yield epoch, self._steps.get(epoch, loop.global_step), found[epoch]

    def state_dict(self) -> dict[str, int]:
        return dict(self._lengths)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._lengths, self._steps = dict(state), {}
