"""Writes in background threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

__all__ = ["BackgroundWrite", "error_of"]


class BackgroundWrite:
    """One write in a background thread.

    Parameters
    ----------
    write : callable
        Returns its error, or None.
    step : int
        Step of the state that is written.
    give_up : callable, optional
        Makes it stop waiting for other ranks.
    """

    def __init__(
        self,
        write: Callable[[], Exception | None],
        step: int,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.step = step
        self.give_up = give_up
        self._error: Exception | None = None
        # A thread starts on GPU 0. Any use of CUDA would create a context there, in the memory of another rank.
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(
            target=self._run, name=f"checkpoint of step {step}", daemon=False, args=(write,)
        )
        self._thread.start()

    def _run(self, write: Callable[[], Exception | None]) -> None:
        # Only the thread refers to the data, so that it is freed once it is written.
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        self._error = write()

    def wait(self, seconds: float | None = None) -> Exception | None:
        """Wait until it is done and return its error; after ``seconds`` make it stop waiting for other ranks."""
        if seconds is not None:
            self._thread.join(seconds)
            self.give_up()
        self._thread.join()
        return self._error


def error_of(write: Callable[[], None]) -> Exception | None:
    """Return the error that a write raised, if any."""
    # Not only OSError: fsspec file systems have other errors.
    try:
        write()
    except Exception as error:
        return error
    return None
