"""Compute a loop's predictions, inside or outside of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainloop._launch import rank_from_launcher
from trainloop._support import rng
from trainloop.devices import has_ranks
from trainloop.errors import ConfigurationError
from trainloop.train_loop.arguments.checks import check_bool, check_loader, short
from trainloop.train_loop.progress.loop_state import LoopState
from trainloop.train_loop.run.row_files import PredictionStream, RowFiles, rows_folder
from trainloop.train_loop.run.run import Run


def predict(
    loop: LoopState,
    run_now: Callable[..., Any],
    loader: Any,
    name: str,
    dataset_info: dict[str, Any],
    execute_callbacks: bool = True,
    *,
    stream: bool = False,
    rows_to: str | None = None,
) -> Any:
    """Implement :meth:`trainloop.TrainLoop.predict_with_model`; ``run_now(work, *args)`` does the work in a run."""
    check_loader(loader, name, optional=False)
    if rows_to not in (None, "main", "all"):
        raise ConfigurationError(f"rows_to={short(rows_to)}: must be 'main' (rank 0), 'all' (all ranks) or None.")
    now = rng.peek_seed(), id(loader), loop.global_step
    loop.note(predicted_at=now, predicts_again=loop.running is not None and now == loop.predicted_at)
    work = loader, name, dataset_info, execute_callbacks
    if not check_bool(stream, "stream"):
        return run_now(Run.predict, *work, rows_to)
    nodes = max(loop.num_nodes, loop.process.num_nodes)
    if nodes > 1:
        raise ConfigurationError(
            f"stream=True on {nodes} nodes: each host writes its rows to its own files, which other hosts can't read. "
            "Predict on one node, or save the rows that you need in a callback's on_after_batch_prediction."
        )

    if loop.running is not None or (has_ranks(loop.gpu_mode) and rank_from_launcher() is not None):
        return run_now(Run.predict_stream, *work, rows_to)
    with rows_folder() as folder:
        order = run_now(Run.predict_into, folder, *work)
        return PredictionStream(RowFiles(folder), order)
