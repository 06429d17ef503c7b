"""Support streams and samplers of other libraries, and their handling of ranks, without importing these libraries."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, RandomSampler

from trainloop.data.loader.loader_copies import copy_loader


def is_split(dataset: Any) -> bool | None:
    """Return True if a stream, or a loader of one, already gives each rank a shard; None if unknown.

    This recognises the user's attribute ``is_distributed``, Hugging Face's ``split_dataset_by_node``, a litdata
    dataset created inside a rank, and webdataset pipelines with ``split_by_node`` or resampled shards.
    """
    declared = getattr(dataset, "is_distributed", None)
    if declared is not None and not callable(declared):  # every torch.Tensor has a method of this name
        return bool(declared)
    # Set by Hugging Face's split_dataset_by_node, which leaves no public attribute.
    if getattr(dataset, "_distributed", None) is not None:
        return True
    stages = pipeline_of(dataset)
    if stages:
        inner = [is_split(stage.dataset if isinstance(stage, DataLoader) else stage) for stage in stages]
        names = {getattr(stage, "__name__", type(stage).__name__) for stage in stages}
        if True in inner or names & {"split_by_node", "ResampledShards"}:
            return True
        return False if False in inner or "single_node_only" in names else None
    if _is_of(dataset, "litdata"):
        environment = getattr(dataset, "distributed_env", None)
        if environment is not None:
            return bool(environment.world_size > 1)
        parts = [is_split(part) for part in getattr(dataset, "_datasets", ())]
        return True in parts if parts else None
    return None


def counters_of(loader: Any) -> tuple[str, ...]:
    """Return the names of a loader's attributes that are iterators of its own, but yield no batches.

    A litdata ``StreamingDataLoader`` keeps iterators over the numbers of its workers.
    """
    return ("_worker_idx", "_worker_idx_iter") if _is_of(loader, "litdata") else ()


def positions_count_ranks(loader: Any) -> bool:
    """Return True if a loader's state assumes that its stream is split over the ranks, and asks for their number.

    A litdata ``StreamingDataLoader`` does so. A stream that was made in the calling process is read whole by each rank.
    """
    return _is_of(loader, "litdata")


def loads(dataset: Any) -> bool:
    """Return True if an iterable dataset is really a loader that yields batches: webdataset's ``WebLoader``."""
    return any(isinstance(stage, DataLoader) or loads(stage) for stage in pipeline_of(dataset))


def pipeline_of(dataset: Any) -> list[Any]:
    """Return the stages of a webdataset pipeline; empty for other objects."""
    stages = getattr(dataset, "pipeline", None)
    return stages if isinstance(stages, list) and _is_of(dataset, "webdataset") else []


def same_on_all_ranks(stream: Any) -> Any:
    """Make a pipeline, or a loader of one, depend only on the global random state; return other objects unchanged.

    With several ranks, webdataset refuses to read a pipeline without a ``nodesplitter``. By default, its ``shuffle``
    draws from a generator that is seeded by the clock. In the returned pipeline, every rank reads all samples, and
    ``shuffle`` draws from Python's global generator.
    """
    if isinstance(stream, DataLoader):
        dataset = same_on_all_ranks(stream.dataset)
        return stream if dataset is stream.dataset else copy_loader(stream, dataset=dataset)
    stages = pipeline_of(stream)
    if not stages:
        return stream
    shared = copy.copy(stream)
    shared.pipeline = [
        _drawing_globally(same_on_all_ranks(stage))
        for stage in stages
        if getattr(stage, "__name__", None) != "single_node_only"
    ]
    return shared


def _drawing_globally(stage: Any) -> Any:
    if getattr(getattr(stage, "f", None), "__name__", None) != "_shuffle" or not _is_of(stage, "webdataset"):
        return stage
    options = stage.kw
    if len(stage.args) > 2 or options.get("rng") is not None or options.get("seed") is not None:
        return stage  # the user controls the order
    drawing = copy.copy(stage)
    drawing.kw = {**options, "rng": _GlobalRandom()}
    return drawing


class _GlobalRandom:
    """Python's global generator as an object, which can be sent to workers."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(random, name)


def is_torchdata(loader: Any) -> bool:
    """Return True if a loader is torchdata's ``StatefulDataLoader``."""
    return _is_of(loader, "torchdata")


def resumes_exactly(dataset: Any) -> bool:
    """Return True if a dataset's state describes its position completely.

    Hugging Face's state omits the shuffle buffer, which is then refilled with other samples.
    """
    # Hugging Face's stages are nested by attributes, without a public list of them.
    left = [getattr(dataset, "_ex_iterable", None)]
    while left:
        stage = left.pop()
        if type(stage).__name__ == "BufferShuffledExamplesIterable":
            return False
        if hasattr(stage, "__dict__"):
            left += [getattr(stage, "ex_iterable", None), *getattr(stage, "ex_iterables", ())]
    return True


def set_epoch(stream: Any, epoch: int) -> None:
    """Set the pass number of streams and stages that count their passes and shuffle by that number."""
    for stage in _stages_within(stream):
        if type(getattr(stage, "epoch", None)) is int and _is_of(stage, "webdataset"):
            stage.epoch = epoch - 1  # each stage adds 1 when it starts
    dataset = getattr(stream, "dataset", stream)
    if _is_of(dataset, "streaming") and hasattr(dataset, "next_epoch"):  # Mosaic's
        dataset.next_epoch = epoch


def _stages_within(stream: Any) -> Iterator[Any]:
    for stage in pipeline_of(stream.dataset if isinstance(stream, DataLoader) else stream):
        yield stage
        yield from _stages_within(stage)


def _is_of(thing: Any, library: str) -> bool:
    return any(base.__module__.partition(".")[0] == library for base in type(thing).__mro__)


# -- samplers ----------------------------------------------------------------------------------------------------------


def plain_sampler(loader: Any, sampler: Any) -> Any:
    """Return torch's equivalent of torchdata's sampler for ``shuffle=True``; return any other sampler unchanged.

    torchdata's sampler creates a generator with a random seed. If the user gave no generator, the loop may choose the
    order, as with torch's sampler.
    """
    torchdatas = type(sampler).__name__ == "RandomSampler" and _is_of(sampler, "torchdata")
    if not torchdatas or loader.generator is not None:
        return sampler
    return RandomSampler(sampler.data_source, sampler.replacement, sampler.num_samples)


def cuts_batches(batch_sampler: Any) -> bool:
    """Return True if a batch sampler of another library only cuts a sampler's order into batches."""
    return type(batch_sampler).__name__ == "BatchSampler" and type(batch_sampler).__module__.startswith(
        "torchdata.stateful_dataloader"
    )
