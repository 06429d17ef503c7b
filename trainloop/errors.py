"""The errors that trainloop raises on purpose.

::

    TrainLoopError(Exception)
    ├── ConfigurationError(ValueError)   arguments that can't work, found before any process starts
    │   ├── DeviceError                  devices that don't exist or can't be parsed
    │   ├── ResourceError                quotas that can't be met
    │   └── UnknownArgumentError(TypeError)  a keyword that the function doesn't have
    ├── UnpicklableError(TypeError)      something that can't be sent to another process
    ├── WorkerFailedError(RuntimeError)  a rank raised, was killed, or hung
    └── CheckpointError(RuntimeError)    nothing loadable, or it belongs to another model

Every message says what was wrong, what was given, and what to do.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "DeviceError",
    "ResourceError",
    "TrainLoopError",
    "UnknownArgumentError",
    "UnpicklableError",
    "WorkerFailedError",
]


class TrainLoopError(Exception):
    """Base of every error below: ``except TrainLoopError`` catches them all."""


class ConfigurationError(TrainLoopError, ValueError):
    """Arguments that can't work; raised before any process starts."""


class DeviceError(ConfigurationError):
    """Devices that don't exist on this machine, or can't be parsed."""


class ResourceError(ConfigurationError):
    """Quotas of CPUs, GPUs or memory that can't be met."""


class UnknownArgumentError(ConfigurationError, TypeError):
    """An unknown keyword: a ``TypeError``, as for any function; the message has the nearest name."""


class UnpicklableError(TrainLoopError, TypeError):
    """Something that can't be sent to another process; the message names its attribute path and type."""


class CheckpointError(TrainLoopError, RuntimeError):
    """No loadable checkpoint, or one that belongs to another model, optimizer or dataset."""


class WorkerFailedError(TrainLoopError, RuntimeError):
    """A rank raised, exited, was killed or hung; the other ranks were ended because of it.

    Parameters
    ----------
    message : str
        What happened, in one or more lines; the traceback is added to it.
    rank : int
        Global rank of the process that failed first.
    exitcode : int or None
        Exit code of that process; negative is a signal's number; None where it hung.
    traceback : str
        The failed rank's own traceback as text, empty where the process died without one.
    recorded : str or None
        The file of a ``FailureRecorder`` that repeats the step: ``tl.replay(error.recorded)``.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        exitcode: int | None = None,
        traceback: str = "",
        recorded: str | None = None,
    ) -> None:
        super().__init__(f"{message}\n\n{traceback}" if traceback else message)
        self.message = message
        self.rank = rank
        self.exitcode = exitcode
        self.traceback = traceback
        self.recorded = recorded

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments are lost by BaseException's own reduce.
        return _rebuild_worker_failed, (self.message, self.rank, self.exitcode, self.traceback, self.recorded)


def _rebuild_worker_failed(
    message: str, rank: int, exitcode: int | None, traceback: str, recorded: str | None = None
) -> WorkerFailedError:
    return WorkerFailedError(message, rank=rank, exitcode=exitcode, traceback=traceback, recorded=recorded)
