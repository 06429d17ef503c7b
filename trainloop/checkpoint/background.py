"""Writes in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

__all__ = ["BackgroundWrite", "error_of"]


class BackgroundWrite:
    """One write in a thread of its own.

    Parameters
    ----------
    write : callable
        Returns its error, if there was one.
    step : int
        Of the state that is written.
    give_up : callable, optional
        Lets it wait no longer for other ranks.
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
        # A thread begins on GPU 0. Whatever it asks of CUDA would make a context there, in the memory of another rank.
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(
            target=self._run, name=f"checkpoint of step {step}", daemon=False, args=(write,)
        )
        self._thread.start()

    def _run(self, write: Callable[[], Exception | None]) -> None:
        # Held by the thread alone, so that what is written is let go when it is done.
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        self._error = write()

    def wait(self, seconds: float | None = None) -> Exception | None:
        """Until it is done; after so many seconds it is told to give up on other ranks."""
        if seconds is not None:
            self._thread.join(seconds)
            self.give_up()
        self._thread.join()
        return self._error


def error_of(write: Callable[[], None]) -> Exception | None:
    """What a write raised, if anything."""
    # Not OSError alone: fsspec file systems have errors of their own.
    try:
        write()
    except Exception as error:
        return error
    return None
