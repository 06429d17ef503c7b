"""Event files, read as TensorBoard reads them."""

from __future__ import annotations

import os
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, ScalarEvent


def read(folder: str | os.PathLike[str]) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of each scalar, as TensorBoard shows them."""
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    events: dict[str, list[ScalarEvent]] = {tag: reader.Scalars(tag) for tag in reader.Tags()["scalars"]}
    return {tag: [(event.step, event.value) for event in of_tag] for tag, of_tag in events.items()}


def steps(events: list[tuple[int, float]]) -> list[int]:
    return [step for step, _ in events]


def event_files(folder: str | os.PathLike[str]) -> list[Path]:
    return sorted(Path(folder).glob("events.out.tfevents.*"))


def values_of(events: list[tuple[int, float]]) -> list[float]:
    return [value for _, value in events]
