"""How streams and samplers of other libraries handle ranks, each in its own way. None of them is imported here."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, RandomSampler

from trainloop.data.twins import twin


def is_split(dataset: Any) -> bool | None:
    """Return True if a stream, or a loader of one, gives each rank its own share already; None where it doesn't say.

    Recognised are the user's own attribute ``is_distributed``, Hugging Face's ``split_dataset_by_node``, a litdata
    dataset made inside a rank, and webdataset pipelines with ``split_by_node`` or resampled shards.
    """
    said = getattr(dataset, "is_distributed", None)
    if said is not None and not callable(said):  # every torch.Tensor, which may be a dataset, has a method of this name
        return bool(said)
    # Set by Hugging Face's split_dataset_by_node, which has no public trace.
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


def loads(dataset: Any) -> bool:
    """Return True if an iterable dataset really is a loader that yields batches: webdataset's ``WebLoader``."""
    return any(isinstance(stage, DataLoader) or loads(stage) for stage in pipeline_of(dataset))


def pipeline_of(dataset: Any) -> list[Any]:
    """The stages of a webdataset pipeline; none for anything else."""
    stages = getattr(dataset, "pipeline", None)
    return stages if isinstance(stages, list) and _is_of(dataset, "webdataset") else []


def same_on_all_ranks(stream: Any) -> Any:
    """Make a pipeline, or a loader of one, depend on the global random state only; others are returned as they are.

    webdataset refuses to read a pipeline without a ``nodesplitter`` where there are several ranks; here each reads it
    all. And its ``shuffle`` draws from a generator seeded by the clock, unless given one: here from Python's own.
    """
    if isinstance(stream, DataLoader):
        dataset = same_on_all_ranks(stream.dataset)
        return stream if dataset is stream.dataset else twin(stream, dataset=dataset)
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
        return stage  # the user decides where the order comes from
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


def goes_on_exactly(dataset: Any) -> bool:
    """Return True if a dataset's state describes its position completely.

    Hugging Face's state omits the shuffle buffer, which is then refilled with other samples.
    """
    if not _is_of(dataset, "datasets"):
        return True
    # Their stages are nested by attribute; there is no public list of them.
    left = [getattr(dataset, "_ex_iterable", None)]
    while left:
        stage = left.pop()
        if type(stage).__name__ == "BufferShuffledExamplesIterable":
            return False
        if hasattr(stage, "__dict__"):
            left += [getattr(stage, "ex_iterable", None), *getattr(stage, "ex_iterables", ())]
    return True


def set_epoch(stream: Any, epoch: int) -> None:
    """Set the pass number of stages that count their passes and shuffle by the count."""
    for stage in _stages_within(stream):
        if type(getattr(stage, "epoch", None)) is int and _is_of(stage, "webdataset"):
            stage.epoch = epoch - 1  # each adds one when it begins


def _stages_within(stream: Any) -> Iterator[Any]:
    for stage in pipeline_of(stream.dataset if isinstance(stream, DataLoader) else stream):
        yield stage
        yield from _stages_within(stage)


def _is_of(thing: Any, library: str) -> bool:
    return any(base.__module__.partition(".")[0] == library for base in type(thing).__mro__)


# -- samplers ----------------------------------------------------------------------------------------------------------


def plain_sampler(loader: Any, sampler: Any) -> Any:
    """torchdata's sampler of ``shuffle=True`` as torch's; any other as it is.

    torchdata's own gives itself a generator with a random seed when it is made. Where the user gave none, the order is
    the loop's to choose, as it is for torch's.
    """
    ours = type(sampler).__name__ == "RandomSampler" and _is_of(sampler, "torchdata")
    if not ours or loader.generator is not None:
        return sampler
    return RandomSampler(sampler.data_source, sampler.replacement, sampler._num_samples)


def cuts_batches(batch_sampler: Any) -> bool:
    """Return True if a batch sampler of another library cuts a sampler's order into batches and does nothing else."""
    return type(batch_sampler).__name__ == "BatchSampler" and type(batch_sampler).__module__.startswith(
        "torchdata.stateful_dataloader"
    )
