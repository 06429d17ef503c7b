"""Check that all ranks of a training run have the same settings, before any rank waits for another.

Ranks that ``fit`` starts have the same settings. With torchrun, Slurm or several hosts, each script runs independently.
A rank with other arguments, loaders or checkpoints would wait for steps and exchanges that never happen, and then
report only another rank's closed connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from trainloop import distributed
from trainloop._launch.rank_process import started_by_launch
from trainloop._support.reduction import sum_rule
from trainloop.data.loader.loaders import NO_LOADER, Shared, check_shared
from trainloop.errors import ConfigurationError
from trainloop.train_loop.progress.running import TrainingRun

_LOADERS = ("train_loader", "validation_loader", "test_loader")


@contextmanager
def share_refusals(*, enabled: bool) -> Iterator[None]:
    """If the block raises a ``ConfigurationError``, report it to ranks that wait in :func:`check_same_on_all_ranks`.

    Ranks that ``fit`` has started need no report: the process that started them sees the error and ends the others.
    """

    try:
        yield
    except ConfigurationError:
        if enabled and not started_by_launch():
            with suppress(Exception):  # ranks that failed in another way have ended
                distributed.gather_object(None)
        raise


def requested_settings(run: TrainingRun, *, gather: bool, resume: dict[str, Any] | None) -> dict[str, Any]:
    """Return this rank's settings as plain types, for :func:`check_same_on_all_ranks`.

    Parameters
    ----------
    run : TrainingRun
        The training, after its feed was created.
    gather : bool
        Argument of ``fit``.
    resume : dict, optional
        State to resume from.
    """
    loop = run.loop
    length = f"num_epochs={loop.num_epochs}" if loop.num_epochs else f"num_iterations={loop.num_iterations}"
    sums = "means" if sum_rule(loop.model, loop.criterion) is None else "sums"
    place = {"epoch": loop.epoch, "global_step": loop.global_step} if resume is None else resume["place"]
    shared = [run.feed.shared]
    for name in _LOADERS[1:]:
        loader = getattr(loop, name) if loop.end_auto_eval else None
        shared.append(NO_LOADER if loader is None else run.shared_of(loader, name))
    return {
        "arguments": [
            f"fit({length})",
            f"fit(grad_accumulation={loop.grad_accumulation})",
            f"fit(gather={gather})",
            f"TrainLoop(end_auto_eval={loop.end_auto_eval})",
            f"TrainLoop(gradient_clip_norm={loop.gradient_clip_norm})",
            f"TrainLoop(sync_batchnorm={loop.sync_batchnorm})",
            f"a criterion of class {type(loop.criterion).__qualname__}, with {sums} of losses",
        ],
        "place": [place["epoch"], place["global_step"]],
        "turns": [len(run.hooks.in_turn(name)) for name in ("on_epoch_end", "on_train_end")],
        "loaders": [list(one) for one in shared],
    }


def check_same_on_all_ranks(mine: dict[str, Any]) -> bool:
    """Raise an error on all ranks if ranks would not do the same steps and evaluations. Collective: one exchange.

    Parameters
    ----------
    mine : dict
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
    everyone = distributed.gather_object(mine)
    refused = next((rank for rank, theirs in enumerate(everyone) if theirs is None), None)
    if refused is not None:
        raise ConfigurationError(
            f"rank {refused} rejected its arguments. See that rank's own error, and fix its cause. All ranks stop, "
            "because they take each step together."
        )
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for argument, of_first in zip(theirs["arguments"], first["arguments"], strict=True):
            if argument != of_first:
                raise ConfigurationError(
                    f"{argument} on rank {rank}, but {of_first} on rank 0. All ranks take each step together, so pass "
                    "the same value on every rank."
                )
    epoch, step = first["place"]
    for rank, theirs in enumerate(everyone):
        if theirs["place"] != first["place"]:
            other_epoch, other_step = theirs["place"]
            raise ConfigurationError(
                f"rank {rank} would resume after epoch {other_epoch} and step {other_step}, but rank 0 after epoch "
                f"{epoch} and step {step}. All ranks take each step together: on every rank, resume from the same "
                "checkpoint (for resume_from='last', in a folder that all hosts share), and make the same calls of fit."
            )
    for i, name in enumerate(_LOADERS):
        check_shared([Shared(*theirs["loaders"][i]) for theirs in everyone], name)
    return all(theirs["turns"] == mine["turns"] for theirs in everyone)
