"""Count the samples of batches of any shape, and move them to devices."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils.data import Subset, default_collate, default_convert

from trainloop._support.nested import map_parts, own_attributes, parts_of
from trainloop._support.user_line import warn
from trainloop.devices import whole_number
from trainloop.errors import TrainLoopError

T = TypeVar("T")


def count_samples(batch: Any, default: int | None = None) -> int:
    """Return the number of samples in a batch of any shape.

    This is the leading dimension of the first tensor or array that has a dimension, found depth first in tuples, lists,
    mappings and attributes of objects. If there is none, it is the length of the first list of other objects (such as
    strings), or of an object that has a length; otherwise ``default``; otherwise 1.

    Examples
    --------
    >>> count_samples({"text": ["a", "b", "c"], "weight": torch.ones(3)})
    3
    >>> count_samples((torch.tensor(1.0), torch.tensor(0)))
    1
    """
    count = _leading_dimension(batch, {})
    if count is None:
        count = _number_of_samples(batch, {})
    if count is None:
        count = default
    return 1 if count is None else count


def _unseen_parts(batch: Any, seen: dict[int, Any]) -> Iterable[Any]:
    """Return the parts of a batch; a single value has no parts, nor does an object that was ``seen`` before."""
    if isinstance(batch, (str, bytes, type)) or id(batch) in seen:
        return ()
    seen[id(batch)] = batch  # objects may refer to each other
    parts = parts_of(batch)
    return own_attributes(batch).values() if parts is None else parts


def _shape(value: Any) -> tuple[Any, ...] | None:
    if getattr(value, "is_nested", False):  # the attribute is an error, or has a symbol for the ragged dimension
        return (int(value.size(0)),)
    shape = getattr(value, "shape", None)
    return shape if isinstance(shape, tuple) else None


def _num_graphs(value: Any) -> int | None:
    """Return the number of graphs in a batch of torch_geometric: tensors are over nodes, losses over graphs."""
    found = getattr(value, "num_graphs", None)
    return None if found is None else whole_number(found)


def _leading_dimension(batch: Any, seen: dict[int, Any]) -> int | None:
    shape = _shape(batch)
    if shape is not None:
        return int(shape[0]) if shape else None
    if (num_graphs := _num_graphs(batch)) is not None:
        return num_graphs
    # A generator, which reads parts only up to the first match.
    counts = (_leading_dimension(part, seen) for part in _unseen_parts(batch, seen))
    return next((count for count in counts if count is not None), None)


def _number_of_samples(batch: Any, seen: dict[int, Any]) -> int | None:
    if isinstance(batch, (str, bytes)):
        return None
    if isinstance(batch, (Mapping, tuple, list)):
        counts = (_number_of_samples(part, seen) for part in _unseen_parts(batch, seen))
        count = next((count for count in counts if count is not None), None)
        # The first column has the number of samples. Without columns, the values are the samples themselves; but 0-d
        # tensors are the columns of a single sample.
        if count is None and isinstance(batch, (tuple, list)) and all(_shape(part) is None for part in batch):
            count = len(batch) or None
        return count
    try:
        return len(batch)
    except TypeError:
        return None


def integers_of(batch: Any) -> list[Any]:
    """Return checksums of the integers and texts in a batch: labels, tokens, names, but not pixels (uint8).

    Random changes of the samples rarely affect them, so copies of a loader that yield the same samples have the same.

    Examples
    --------
    >>> integers_of({"x": torch.rand(2), "id": [7, 8], "name": "a"})
    [7, 8, 'a']
    """
    if isinstance(batch, Tensor):
        if batch.is_nested or batch.layout != torch.strided:
            return []
        batch = batch.detach().cpu().numpy() if batch.dtype in _INTEGERS else None
    if isinstance(batch, np.ndarray):
        return [zlib.crc32(np.ascontiguousarray(batch).tobytes())] if batch.dtype.kind == "i" else []
    if isinstance(batch, (int, str, np.integer)):
        return [batch if isinstance(batch, str) else int(batch)]
    return [one for part in parts_of(batch) or () for one in integers_of(part)]


_INTEGERS = (torch.int64, torch.int32, torch.int16)


# -- batches whose number of samples may differ from the number of indices ---------------------------------------------


def may_change_count(loader: Any) -> bool:
    """Return True if a loader's own code makes batches from samples, and so may leave out or multiply samples."""
    if getattr(loader, "collate_fn", default_collate) not in (default_collate, default_convert):
        return True
    dataset = getattr(loader, "dataset", None)
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


class SampleCounter:
    """Count the samples of a loader's batches; warn once if a batch can't be counted.

    Parameters
    ----------
    name : str
        The user's name for the loader.
    batch_size : int or None
        Result for a batch without any countable part.
    """

    def __init__(self, name: str, batch_size: int | None = None) -> None:
        self._name = name
        self._batch_size = batch_size
        self._warned = False

    def count(self, batch: Any, planned: int | None = None) -> int:
        """Return the number of samples in a batch that was made of ``planned`` samples (None: unknown)."""
        count = count_collated(batch, planned)
        if count is None:
            count = _guessed(batch, planned, self._batch_size)
            # Without a plan, the first part's length is right if another part has it (in a graph, edges differ).
            columns = [*_lengths(batch, {}, top=True)]
            doubtful = planned is not None or sum(count in column for column in columns) < 2
            if doubtful and not self._warned:
                self._warned = True
                why = "the lengths of its parts differ"
                if planned is not None:
                    why += f", which was made of {planned} samples"
                elif len(columns) == 1 and len(columns[0]) > 1:
                    why = "a list of parts of one shape may be columns, such as inputs and targets, or samples"
                elif _has_one_label(batch, columns):
                    why = "it may be one sample with a number, or several samples"
                if isinstance(batch, Iterator):
                    why = "it is an iterator, whose parts can't be read twice; let collate_fn return a tuple"
                if planned == 1:
                    why = "it was made of one sample, and its parts may be several samples or the items of this one"
                warn(
                    f"{self._name}: the number of samples in a batch can't be counted, because {why}. It is taken to "
                    f"be {count}. If this is wrong, return (loss, n) from get_loss, where n is the number of samples."
                )
        return count


def count_collated(batch: Any, planned: int | None = None) -> int | None:
    """Return the number of samples in a batch that was made of ``planned`` samples; None if it can't be counted.

    The result is ``planned`` if any part of the batch has this length. Otherwise, samples were left out or multiplied,
    and the result is the length that all parts have in common. A batch that is one sample, of one column and with a
    single number as its label, counts as one.

    Examples
    --------
    >>> time_first = torch.zeros(9, 4, 2), torch.tensor([9, 8, 8, 2])
    >>> count_collated(time_first, 4)
    4
    >>> count_collated((torch.zeros(3, 2), torch.zeros(3)), 4)
    3
    >>> bag_of_instances_and_label = torch.zeros(3, 2), torch.tensor(1)
    >>> count_collated(bag_of_instances_and_label, 1)
    1
    """
    if batch is None:
        return 0
    columns = list(_lengths(batch, {}, top=True))
    if isinstance(batch, Iterator) and planned is None:
        return None
    if not columns:
        return planned if planned is not None else count_samples(batch)
    if planned is not None and any(planned in column for column in columns):
        return planned
    common = set.intersection(*columns)
    # With equal lengths on the second axis, samples may also be on that axis.
    if len(common) != 1 or (planned and _all_have_on_second_axis(batch, planned)):
        return None
    if planned == 1 and any(map(_is_single, parts_of(batch) or ())):
        # Several columns may be windows, each with its label, or parts of one sample; a name belongs to both.
        return 1 if _has_one_label(batch, columns) else None
    return None if planned is None and _has_one_label(batch, columns) else common.pop()


def _has_one_label(batch: Any, columns: list[set[int]]) -> bool:
    """Return True for a batch of one column and a single number, such as a bag of instances with its label."""
    numbers = [part for part in parts_of(batch) or () if _is_single(part) and not isinstance(part, str)]
    return len(columns) == 1 and bool(numbers)


def _guessed(batch: Any, planned: int | None, batch_size: int | None = None) -> int:
    """Return the most likely number of samples in a batch that can't be counted."""
    if planned is None and not isinstance(batch, Mapping) and _has_one_label(batch, [*_lengths(batch, {}, top=True)]):
        return 1  # in a dict, a number mostly belongs to all samples
    return count_samples(batch, batch_size) if planned is None else planned


def _is_single(part: Any) -> bool:
    return isinstance(part, (str, int, float, np.number)) or _shape(part) == ()


def samples_of_batch(batch: Any, planned: int | None = None) -> int:
    """Return the number of samples in a batch, as :class:`SampleCounter` counts it, without a warning."""
    count = count_collated(batch, planned)
    return _guessed(batch, planned) if count is None else count


def _lengths(value: Any, seen: dict[int, Any], *, top: bool = False) -> Iterator[set[int]]:
    """Yield, for each column of a batch, the numbers of samples that it may have."""
    if getattr(value, "is_nested", False):
        yield {int(value.size(0))}
        return
    shape = _shape(value)
    if shape is not None:
        if shape:
            yield {int(shape[0])}
        return
    if isinstance(value, PackedSequence):
        yield {int(value.batch_sizes[0])}
        return
    if (num_graphs := _num_graphs(value)) is not None:
        yield {num_graphs}
        return
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields"):
        for part in _unseen_parts(value, seen):
            yield from _lengths(part, seen)
        return
    kinds = [_kind(part) for part in value]
    sequences = [part for part in value if isinstance(part, (list, tuple))]
    if not any(_shape(part) for part in value) and not sequences:
        # Samples, such as strings or dicts; but entries of a tuple at the top may be columns, such as dicts of tensors.
        columns = [column for part in value for column in _lengths(part, seen)] if top else []
        if columns and (isinstance(value, tuple) or len(set(kinds)) > 1):
            yield from columns
        else:
            yield {len(value)}
        return
    are_rows = False
    if len(sequences) == len(value):  # samples of the form (x, y), or columns (all x, all y)
        inner_kinds = [[_kind(item) for item in part] for part in sequences]
        are_rows = all(kinds_of == inner_kinds[0] for kinds_of in inner_kinds)
        if are_rows and len(set(inner_kinds[0])) > 1:
            # zip(loader, other) makes a tuple of the batches [x, y] of two loaders.
            batches = [_rows_of_columns(part) for part in sequences] if top and type(value) is tuple else [None]
            yield from (
                [{len(value)}] if None in batches else [column for columns in batches for column in columns or ()]
            )
            return
    same = len({_shape(part) for part in value}) == 1 and (are_rows or not sequences)
    # Samples are of one kind, but not columns such as inputs and labels, which a dict of several loaders has in lists.
    if (top and not (isinstance(value, list) and same)) or len(set(kinds)) > 1:
        for part in value:
            yield from _lengths(part, seen)
        return
    columns = [column for part in value for column in _lengths(part, seen)]
    yield {len(value)} | (set.intersection(*columns) if columns else set())


def _rows_of_columns(batch: Any) -> list[set[int]] | None:
    """Return the number of rows of each column of a batch as a ``DataLoader`` makes it; ``None`` if it is no such."""
    columns = [shape[:1] for part in batch if (shape := _shape(part))]
    is_batch = type(batch) is list and len(columns) == len(batch) and len(set(columns)) == 1
    return [{int(rows)} for (rows,) in columns] if is_batch else None


def _kind(value: Any) -> Any:
    shape = _shape(value)
    return type(value) if shape is None else (type(value), len(shape))


def _all_have_on_second_axis(batch: Any, size: int) -> bool:
    shapes = list(_shapes(batch))
    return bool(shapes) and all(len(shape) > 1 and shape[1] == size for shape in shapes)


def _shapes(batch: Any) -> Iterator[tuple[Any, ...]]:
    if shape := _shape(batch):
        yield shape
        return
    for part in parts_of(batch) or ():
        yield from _shapes(part)


def move_to(batch: T, device: torch.device, *, non_blocking: bool = False) -> T:
    """Return a batch of any shape with its tensors on ``device``.

    Tuples, named tuples, lists, mappings and dataclasses keep their type; other objects are moved by their own
    ``to(device)`` if they have one, and stay unchanged otherwise.

    Parameters
    ----------
    batch
        A batch of a loader.
    device : torch.device
        Target device.
    non_blocking : bool
        True to return before copies from pinned memory are complete; later work on the current stream waits for them.
    """

    def move(part: Any) -> Any:
        try:
            return part.to(device, non_blocking=non_blocking)
        except TypeError:  # this method takes only a device
            with _CopiesWithoutWait() if non_blocking else contextlib.nullcontext():
                return part.to(device)

    return _map_parts_with(move, "to", batch)


class _CopiesWithoutWait(TorchFunctionMode):
    """Copy tensors to a GPU from pinned memory, without a wait, where an object's own ``to(device)`` moves them.

    Such a copy would wait for all work that the GPU has, since it is ordered behind this work.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.to, Tensor.cuda) and "non_blocking" not in kwargs and len(args) < 3:
            source = args[0]
            moves = func is Tensor.cuda or any(_is_gpu(one) for one in (*args[1:2], kwargs.get("device")))
            # Memory that is pinned already may be the object's own, which it may change after the copy.
            if moves and source.is_cpu and _is_dense(source) and not source.is_pinned():
                return func(source.pin_memory(), *args[1:], **kwargs, non_blocking=True)
        return func(*args, **kwargs)


def _is_gpu(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


def pin(batch: T) -> T:
    """Return a batch of any shape with its CPU tensors in pinned memory, from which a GPU can copy asynchronously.

    Other tensors than plain dense ones are unchanged: torch can't pin most of them, but copies them.
    """

    def pinned(part: Any) -> Any:
        return part if getattr(part, "is_cuda", False) or not _is_dense(part) else part.pin_memory()

    return _map_parts_with(pinned, "pin_memory", batch)


def record_use(batch: Any, stream: torch.cuda.Stream) -> None:
    """Keep the allocator from reusing the memory of a batch's tensors before ``stream`` has read them.

    torch can record plain dense tensors only. The memory of others is safe, too: :func:`on_device` lets each copy wait
    for the work that ``stream`` has at that time.
    """

    def record(part: Any) -> Any:
        if getattr(part, "is_cuda", True) and _is_dense(part):
            part.record_stream(stream)
        return part

    _map_parts_with(record, "record_stream", batch)


def _is_dense(part: Any) -> bool:
    """Return False for tensors that are sparse, nested or quantized, or whose elements share memory (``expand``)."""
    if not isinstance(part, Tensor):
        return True
    if part.layout is not torch.strided or part.is_nested or part.is_quantized:
        return False
    if part.is_contiguous():
        return True
    end = 1  # of the memory that the dimensions with smaller strides use
    for stride, size in sorted(zip(part.stride(), part.shape, strict=True)):
        if size > 1:
            if stride < end:
                return False
            end += stride * (size - 1)
    return True


def _map_parts_with(function: Callable[[Any], Any], method: str, batch: Any) -> Any:
    """Return a batch with ``function`` applied to every part that has ``method`` (tensors and users' objects)."""
    if callable(getattr(batch, method, None)):  # before containers: BatchEncoding and TensorDict have the method
        return function(batch)
    return map_parts(lambda part: _map_parts_with(function, method, part), batch)


@functools.cache
def _copy_stream(index: int) -> torch.cuda.Stream:
    """Return this process's stream for copies to a device, the same for all epochs, evaluations and loops.

    The allocator keeps freed memory for the stream that it was allocated on: with a stream for each epoch, the batches
    of earlier epochs would stay reserved, and nothing could use their memory.
    """
    return torch.cuda.Stream(index)


def described(batch: Any) -> str:
    """Return the shapes and dtypes of a nested batch, for error messages."""
    found = list(forms_of(batch))
    return ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")


def forms_of(batch: Any, *, of_sample: bool = False) -> Iterator[str]:
    """Yield the shape and dtype of each part of a nested batch; with ``of_sample``, without numbers of samples."""
    if isinstance(batch, Tensor):
        yield f"{list(batch.shape[int(of_sample) :])} {str(batch.dtype).removeprefix('torch.')}"
    elif isinstance(batch, Mapping):
        for key, part in batch.items():
            yield from (f"{key}: {form}" for form in forms_of(part, of_sample=of_sample))
    else:
        parts = parts_of(batch) or ()
        if all(isinstance(part, (str, int, float)) for part in parts):
            yield type(batch).__name__ + (f" of {len(parts)}" if parts and not of_sample else "")
        else:
            for part in parts:
                yield from forms_of(part, of_sample=of_sample)


def note_batch(error: BaseException, where: str, batches: Sequence[Any]) -> None:
    """Add the shapes of the batches to an error that may be about shapes (with Python 3.11 or newer)."""
    about_values = isinstance(error, (RuntimeError, ValueError, IndexError, TypeError))
    if not about_values or isinstance(error, TrainLoopError) or not batches or not hasattr(error, "add_note"):
        return
    note = f"{where}: the batch is {described(batches[0])}."
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def on_device(items: Iterator[tuple[Any, Any]], device: torch.device) -> Iterator[tuple[Any, Any]]:
    """Yield ``(size, batch)`` items with the batch on a device other than the CPU.

    For CUDA, each batch is pinned and copied on this process's stream for copies, while the previous one is in use, so
    that the host does not wait.

    Parameters
    ----------
    items : iterator of (size, batch)
        Batches of any shape, on the CPU, or partly or wholly on the GPU.
    device : torch.device
    """
    if device.type != "cuda":  # a device without streams, such as Apple's GPU
        for size, batch in items:
            yield size, move_to(batch, device)
        return
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    copies = _copy_stream(device.index)

    def start(item: tuple[Any, Any]) -> tuple[Any, Any, torch.cuda.Event | None]:
        size, batch = item
        where = _places(batch)
        if where <= {device}:  # the loader's own code has put it there: in order with the steps
            return size, batch, None
        if where != _ON_HOST:
            # The loader's own code may have put a part on the GPU, by work on the current stream.
            copies.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(copies):
            moved = move_to(pin(batch), device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(copies)
        return size, moved, copied

    def finish(started: tuple[Any, Any, torch.cuda.Event | None]) -> tuple[Any, Any]:
        size, batch, copied = started
        if copied is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(copied)
            # Otherwise the allocator reuses the memory when Python frees it, although this stream still reads it.
            record_use(batch, stream)
        return size, batch

    ahead = None
    for item in items:
        # Start this copy before yielding the previous batch, so that it runs during that batch's step.
        following = start(item)
        if ahead is not None:
            yield finish(ahead)
        ahead = following
    if ahead is not None:
        yield finish(ahead)


_ON_HOST = {torch.device("cpu")}


def _places(batch: Any) -> set[torch.device | None]:
    """Return the devices of a batch's plain tensors, and None for all that is moved in another way."""
    found: set[torch.device | None] = set()

    def look(part: Any) -> Any:
        found.add(part.device if isinstance(part, Tensor) and _is_dense(part) else None)
        return part

    _map_parts_with(look, "to", batch)
    return found
