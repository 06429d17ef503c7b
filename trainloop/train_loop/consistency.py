"""Check that all ranks of a training have the same settings, before any rank waits for another.

Ranks that a ``fit`` starts have its settings. With torchrun, Slurm or several hosts, each script runs independently.
A rank with other arguments, loaders or checkpoints would wait for steps and exchanges that never happen, and then
report only another rank's closed connection.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from trainloop import distributed
from trainloop._launch.rank_process import started_by_launch
from trainloop.data.loaders import NO_LOADER, Shared, check_shared
from trainloop.errors import ConfigurationError

if TYPE_CHECKING:
    from trainloop.train_loop.training import Training

__all__ = ["requested_settings", "check_same_on_all_ranks", "share_refusals"]

# Ranks compare a list of integers: the arguments, as given by the user; the position to resume from; how many
# callbacks may log at the end of an epoch; and the loaders.
_ARGUMENTS = (
    "fit(num_epochs={})",
    "fit(num_iterations={})",
    "fit(grad_accumulation={})",
    "fit(gather={})",
    "TrainLoop(end_auto_eval={})",
    "TrainLoop(gradient_clip_norm={})",
    "TrainLoop(sync_batchnorm={})",
)
_LOADERS = ("train_loader", "validation_loader", "test_loader")
_PLACE = len(_ARGUMENTS)
_TURNS = _PLACE + 2
_SHARED = _TURNS + 2


@contextmanager
def share_refusals(*, enabled: bool) -> Iterator[None]:
    """Report a ``ConfigurationError`` in the block to the ranks that already wait in :func:`check_same_on_all_ranks`.

    Ranks that ``fit`` has started need no report: the process that started them sees the error and ends the others.
    """

    try:
        yield
    except ConfigurationError:
        if enabled and not started_by_launch():
            with suppress(Exception):  # ranks that failed in another way have ended
                distributed.exchange_ints([])
        raise


def requested_settings(run: Training, *, gather: bool, resume: dict[str, Any] | None) -> list[int]:
    """Return the settings of this rank, for :func:`check_same_on_all_ranks`.

    Parameters
    ----------
    run : Training
        The training, after its feed was made.
    gather : bool
        Argument of ``fit``.
    resume : dict, optional
        State to resume from.
    """
    loop = run.loop
    arguments = (
        loop.num_epochs,
        loop.num_iterations,
        loop.grad_accumulation,
        gather,
        loop.end_auto_eval,
        loop.gradient_clip_norm,
        loop.sync_batchnorm,
    )
    place = {"epoch": loop.epoch, "global_step": loop.global_step} if resume is None else resume["place"]
    turns = [len(run.hooks.in_turn(name)) for name in ("on_epoch_end", "on_train_end")]
    shared = [run.feed.shared]
    for name in _LOADERS[1:]:
        loader = getattr(loop, name) if loop.end_auto_eval else None
        shared.append(NO_LOADER if loader is None else run.shared_of(loader, name))
    return [*map(_int64, arguments), place["epoch"], place["global_step"], *turns, *(n for one in shared for n in one)]


def check_same_on_all_ranks(mine: list[int]) -> bool:
    """Raise on all ranks if they would not do the same steps and evaluations. Collective: one exchange.

    Parameters
    ----------
    mine : list of int
        Result of :func:`requested_settings`.

    Returns
    -------
    bool
        True if all ranks have the same number of callbacks that may log at an epoch's end.

    Raises
    ------
    ConfigurationError
        If settings differ; the message names the first difference, and the first rank that has it.
    """
    everyone = distributed.exchange_ints(mine)
    refused = next((rank for rank, theirs in enumerate(everyone) if not theirs), None)
    if refused is not None:
        raise ConfigurationError(
            f"rank {refused} refused its arguments; see that rank's own error, and fix its cause. All ranks stop, "
            f"because they take each step together."
        )
    _check_arguments([theirs[:_PLACE] for theirs in everyone])
    _check_places([theirs[_PLACE:_TURNS] for theirs in everyone])
    width = len(Shared._fields)
    for begin, name in zip(range(_SHARED, len(mine), width), _LOADERS, strict=True):
        check_shared([Shared(*theirs[begin : begin + width]) for theirs in everyone], name)
    return all(theirs[_TURNS:_SHARED] == mine[_TURNS:_SHARED] for theirs in everyone)


def _int64(value: float | None) -> int:
    """Return the 64 bits of a number as an int64."""
    number: int = struct.unpack("q", struct.pack("d", float("nan") if value is None else value))[0]
    return number


def _as_number(number: int) -> float | None:
    """Return the number in the form in which a user writes it."""
    value: float = struct.unpack("d", struct.pack("q", number))[0]
    return None if value != value else int(value) if value.is_integer() else value


def _call(values: list[int], i: int) -> str:
    if i < 2:
        i = 0 if values[0] else 1  # of the two lengths, the one that was given
    return _ARGUMENTS[i].format(_as_number(values[i]))


def _check_arguments(everyone: list[list[int]]) -> None:
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for i in range(len(first)):
            if theirs[i] != first[i]:
                raise ConfigurationError(
                    f"{_call(theirs, i)} on rank {rank}, {_call(first, i)} on rank 0. All ranks take each step "
                    "together: pass the same value on every rank."
                )


def _check_places(everyone: list[list[int]]) -> None:
    epoch, step = everyone[0]
    for rank, (other_epoch, other_step) in enumerate(everyone):
        if (other_epoch, other_step) != (epoch, step):
            raise ConfigurationError(
                f"rank {rank} would resume after epoch {other_epoch} and step {other_step}, rank 0 after epoch {epoch} "
                f"and step {step}. All ranks take each step together: resume from the same checkpoint on every rank "
                "(with resume_from='last', in a folder that all hosts share), and call fit the same number of times "
                "on each."
            )
