"""The errors that trainloop raises on purpose.

::

    TrainLoopError(Exception)
    ├── ConfigurationError(ValueError)   invalid arguments; raised before any process starts, where possible
    │   ├── DeviceError                  devices that don't exist or can't be parsed
    │   ├── ResourceError                quotas that can't be met
    │   └── UnknownArgumentError(TypeError)  a keyword that the function doesn't have
    ├── UnpicklableError(TypeError)      an object that can't be sent to another process
    ├── WorkerFailedError(RuntimeError)  a rank raised, was killed, or hung
    └── CheckpointError(RuntimeError)    no loadable checkpoint, or one of another model

Every message says what is wrong, what was given, and what to do.
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
    """Base of all errors below: ``except TrainLoopError`` catches every one of them."""


class ConfigurationError(TrainLoopError, ValueError):
    """Invalid arguments; raised before any process starts, where possible."""


class DeviceError(ConfigurationError):
    """Devices that don't exist on this machine, or can't be parsed."""


class ResourceError(ConfigurationError):
    """Quotas of CPUs, GPUs or memory that can't be met."""


class UnknownArgumentError(ConfigurationError, TypeError):
    """An unknown keyword. It is also a ``TypeError``, as in plain Python. The message suggests the nearest name."""


class UnpicklableError(TrainLoopError, TypeError):
    """An object that can't be sent to another process. The message names the object's path and type."""


class CheckpointError(TrainLoopError, RuntimeError):
    """No checkpoint can be loaded, or the checkpoint does not fit the model, optimizer or dataset."""


class WorkerFailedError(TrainLoopError, RuntimeError):
    """A rank raised an exception, exited, was killed or hung, so the other ranks were terminated.

    Parameters
    ----------
    message : str
        Description of the failure, in one or more lines; the traceback is appended to it.
    rank : int
        Global rank of the process that failed first.
    exitcode : int or None
        Exit code of that process: the negative signal number if it was killed, None if it hung.
    traceback : str
        Text of the failed rank's traceback; empty if the process died without a traceback.
    recorded : str or None
        File that a ``FailureRecorder`` wrote; None if no file was written. ``tl.replay(error.recorded)`` repeats the
        step.
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
        # BaseException.__reduce__ would lose keyword-only arguments.
        return _rebuild_worker_failed, (self.message, self.rank, self.exitcode, self.traceback, self.recorded)


def _rebuild_worker_failed(
    message: str, rank: int, exitcode: int | None, traceback: str, recorded: str | None = None
) -> WorkerFailedError:
    return WorkerFailedError(message, rank=rank, exitcode=exitcode, traceback=traceback, recorded=recorded)
