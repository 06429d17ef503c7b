"""Read the checkpoint that a fit resumes from, also for all ranks of a launcher."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

import torch

from trainloop import checkpoint, distributed
from trainloop._launch import join, rank_from_launcher
from trainloop.callbacks.base import overrides_of_user
from trainloop.checkpoint.plain import for_file, from_file
from trainloop.devices import has_ranks
from trainloop.errors import CheckpointError, ConfigurationError
from trainloop.train_loop.arguments.checks import short
from trainloop.train_loop.progress.ending import nothing_left
from trainloop.train_loop.progress.loop_state import LoopState
from trainloop.train_loop.saving.compatibility import check_checkpoint
from trainloop.train_loop.saving.cut_epochs import continues_in


def resume_point(loop: LoopState, resume_from: Any) -> tuple[dict[str, Any] | None, str]:
    """Return the state that ``fit(resume_from=...)`` names, and the reason if nothing is left to do after it.

    The state is ``None`` for a fresh start. Under a launcher, rank 0 reads and decides, and sends both results to the
    other ranks. If each rank read the checkpoint itself, a rank might do so before rank 0 has written the checkpoint,
    or in a folder that only rank 0's host has.
    """
    if resume_from is None:
        return None, ""

    here = rank_from_launcher() if has_ranks(loop.gpu_mode) else None
    if here is None or here.world_size == 1:
        return _read_point(loop, resume_from)
    return among_ranks(loop, lambda stop: _state_of_rank_zero(loop, resume_from))


def among_ranks(loop: LoopState, function: Callable[[Any], Any]) -> Any:
    """Call a function in the process group of a launcher's ranks."""

    return join(function, init_method=loop.run_config.init_method, timeout_s=loop.timeout)


def _read_point(loop: LoopState, resume_from: Any) -> tuple[dict[str, Any] | None, str]:
    state = checkpoint_to_resume(loop, resume_from)
    return state, "" if state is None or continues_in(loop, state) else nothing_left(loop, state)


def _state_of_rank_zero(loop: LoopState, resume_from: Any) -> tuple[dict[str, Any] | None, str]:
    """Return, on all ranks, the state that rank 0 reads, and the reason if nothing is left to do. Collective."""
    state: dict[str, Any] | None = None
    # In fsdp, the state refers to files, and each rank reads its part of the files.
    in_files = loop.gpu_mode == "fsdp"
    keepers: list[Any] = [callback for callback in loop.callbacks if hasattr(callback, "last_state")]
    answer: dict[str, Any] = {}
    if distributed.is_global_zero():
        try:
            state, why = _read_point(loop, resume_from)
        except Exception as error:
            distributed.broadcast_object({"error": f"{type(error).__name__}: {error}"})
            raise
        data = io.BytesIO()
        if state is not None and not in_files:
            torch.save(for_file(state), data)
        answer = {"why": why, "state": data.getvalue(), "places": [getattr(one, "place", "") for one in keepers]}
    answer = distributed.broadcast_object(answer)
    if distributed.is_global_zero():
        return state, answer["why"]
    if "error" in answer:
        raise CheckpointError(f"rank 0 could not resume with resume_from={resume_from!r}: {answer['error']}")
    for keeper, place in zip(keepers, answer["places"], strict=True):
        if place:
            keeper.place = place
    if in_files:
        return checkpoint_to_resume(loop, resume_from), answer["why"]
    if answer["state"]:
        state = from_file(torch.load(io.BytesIO(answer["state"]), map_location="cpu", weights_only=True, mmap=False))
    return state, answer["why"]


def checkpoint_to_resume(loop: LoopState, resume_from: Any) -> dict[str, Any] | None:
    """Return the state that ``fit(resume_from=...)`` names, checked against the model; ``None`` for a fresh start."""
    if (
        not isinstance(resume_from, (str, os.PathLike))
        or not isinstance(os.fspath(resume_from), str)
        or not resume_from
    ):
        raise ConfigurationError(
            f"resume_from={short(resume_from)}: must be 'last' (the newest checkpoint of the ModelCheckpoint in "
            "callbacks), the path or URL of a checkpoint as str or Path, or None for a fresh start."
        )
    whole = loop.gpu_mode != "fsdp"  # in fsdp, each rank reads its part
    if resume_from == "last":
        keepers: list[Any] = [callback for callback in loop.callbacks if hasattr(callback, "last_state")]
        if not keepers:
            raise ConfigurationError(
                "resume_from='last' needs a ModelCheckpoint in callbacks, to know which folder to search. "
                "Add the ModelCheckpoint of the first run, or pass a checkpoint's path."
            )
        if len(keepers) > 1:
            keepers.sort(key=lambda keeper: keeper.last_stamp(), reverse=True)
        states = (keeper.last_state(whole=whole) for keeper in keepers)
        state = next((state for state in states if state is not None), None)
        if state is None:
            folders = ", ".join(dict.fromkeys(keeper.dirpath for keeper in keepers))
            loop.report(f"resume_from='last': no checkpoint in {folders} yet. Training starts from scratch.")
    else:
        state = checkpoint.load(resume_from, whole=whole)
    if state is not None and not _callbacks_may_fit_model(loop):
        check_checkpoint(loop, state)
    return state


def _callbacks_may_fit_model(loop: LoopState) -> bool:
    """Return True if the user's callbacks may change the model before the checkpoint is loaded.

    Then the checkpoint is compared with the model after these hooks, and not before.
    """
    return any(
        overrides_of_user(callback, name)
        for callback in loop.callbacks
        for name in ("on_multiprocess_start", "on_train_begin")
    )
