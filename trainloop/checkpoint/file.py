"""Checkpoints and weights as files: write, read and verify them, and list the checkpoints of a folder."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pickle import UnpicklingError
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from trainloop._support.distribution import import_extra
from trainloop._support.platform import absolute_path
from trainloop._support.user_line import warn
from trainloop.checkpoint import sharded
from trainloop.checkpoint.plain import for_file, from_file, plain
from trainloop.checkpoint.storage import Folder, folder, split_file
from trainloop.errors import CheckpointError
from trainloop.parallel.sharded.shards import bit_sums, is_sharded, with_items

_SUFFIX = ".pt"
_NAME = re.compile(r"checkpoint-epoch=\d+-step=\d+(_\d+)?(\.pt)?")  # the name of a folder has no suffix
# A file that contains the name of the newest checkpoint, to notice if that checkpoint is lost. Reading a checkpoint
# does not need this file.
_NEWEST = ".newest"
_END = struct.Struct("<QIII8s")  # length and CRC-32 of body, length of info, CRC-32 of info and these, magic
_MAGIC = b"TRLOOP\x00\x01"
_ZIP = b"PK\x03\x04"
_CHUNK = 4 << 20


@dataclass(frozen=True)
class CheckpointInfo:
    """Description of a checkpoint, which can be read without its body."""

    epoch: int = 0
    """Index of the epoch in which the checkpoint was written, counted from 0."""

    step: int = 0
    """Number of optimizer steps."""

    run: str = ""
    """Identifier of the run. It stays the same when the run is resumed, and is different for every other run."""

    stamp: int = 0
    """Nanoseconds since 1970, increased if necessary to exceed the stamps of all older checkpoints in the folder."""

    value: float | None = None
    """Value of the monitored metric; None if there is no value."""

    reason: str = ""
    """Reason: ``'epoch'``, ``'steps'``, ``'time'``, ``'improved'``, ``'end'``, ``'restart'`` or a signal's name."""

    monitor: str = ""
    """Name of the metric that ``value`` belongs to; empty if there is no value."""

    minimize: bool = True
    """True if a lower ``value`` is better."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in a folder, with its name and info. Its body has not been read."""

    path: str
    """Path or URL."""

    name: str
    """Name in the folder."""

    info: CheckpointInfo | None
    """Info of the checkpoint; None if the end mark is missing or damaged, so that the checkpoint can't be loaded."""

    problem: str = ""
    """Reason why ``info`` is None; empty otherwise."""

    def __fspath__(self) -> str:
        return self.path


def checkpoint_name(info: CheckpointInfo, version: int = 1, *, sharded: bool = False) -> str:
    """Return a name such as ``checkpoint-epoch=0003-step=00000120.pt``, in which epochs are counted from 1.

    A ``version`` above 1 is appended, to distinguish checkpoints of the same step. A sharded checkpoint is a folder,
    whose name has no suffix.
    """
    again = f"_{version}" if version > 1 else ""
    return f"checkpoint-epoch={info.epoch + 1:04d}-step={info.step:08d}{again}{'' if sharded else _SUFFIX}"


# -- writing -----------------------------------------------------------------------------------------------------------


def save(
    path: str | os.PathLike[str], state: Mapping[str, Any], info: CheckpointInfo | None = None, *, durable: bool = True
) -> None:
    """Write a checkpoint atomically: write it under a temporary name, flush it to disk, then rename it.

    Parameters
    ----------
    path : str or path
        File or fsspec URL to create or replace. Its folder is created if it is missing.
    state : mapping
        Nested containers of tensors (on any device), numbers and strings.
    info : CheckpointInfo, optional
        Description stored at the file's end.
    durable : bool
        If True, return only when the file would survive a power failure.

    Raises
    ------
    CheckpointError
        If ``state`` has an object that can't be read without running code. Nothing is written.
    OSError
        If the file can't be written, for example for lack of space. An existing file stays intact, and no partial file
        is left.

    Notes
    -----
    CPU tensors are not copied, so they must not change while the checkpoint is written.
    """
    info = info or CheckpointInfo()
    body = plain(state, tensor=lambda t: t.cpu())
    where, name = split_file(path)
    where.write(name, lambda file: _write_with_checksums(file, body, info), writer=info.run, durable=durable)


def _write_with_checksums(file: BinaryIO, body: Any, info: CheckpointInfo) -> None:
    out = _Checksummed(file)
    torch.save(for_file(body), cast(BinaryIO, out))  # torch.save uses only write() and flush()
    if out.error is not None:
        raise out.error
    described = json.dumps(asdict(info)).encode("utf-8")
    head = struct.pack("<QII", out.length, out.crc, len(described))
    file.write(described)
    file.write(_END.pack(out.length, out.crc, len(described), zlib.crc32(described + head), _MAGIC))


class _Checksummed:
    """A file for ``torch.save``, which counts bytes, computes the checksum, and stores an error in ``error``.

    After an exception in ``write``, torch's zip writer raises its own exception ("unexpected pos"), and also tries to
    write the end of the zip. So errors are stored, and raised by the caller afterwards.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.length = 0
        self.crc = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.error is None:
            try:
                # Written in chunks, so that the data is still in the CPU's cache after the checksum is computed. Both
                # operations release the GIL, so a training loop in another thread continues.
                for start in range(0, len(view), _CHUNK):
                    chunk = view[start : start + _CHUNK]
                    self.crc = zlib.crc32(chunk, self.crc)
                    self._file.write(chunk)
            except OSError as error:
                self.error = error
        self.length += len(view)
        return len(view)

    def flush(self) -> None:
        pass


def mark_newest(where: Folder, name: str, *, run: str = "") -> None:
    """Record that ``name`` is the folder's newest checkpoint, so that :func:`load_newest` notices if it is lost.

    ``run`` identifies the run that wrote the checkpoint. That run may remove unfinished files with its identifier.
    """
    try:
        # Not durable, because only a warning depends on it.
        where.write_text(_NEWEST, name + "\n", writer=run, durable=False)
        if "://" not in where.location:
            # Set its time before the checkpoint's time, so that the latest file of the folder (`ls -t`) is a
            # checkpoint.
            when = os.stat(where.path(name)).st_mtime_ns - 1
            os.utime(where.path(_NEWEST), ns=(when, when))
    except OSError:
        where.remove(_NEWEST)  # an old file would name another checkpoint


def save_weights(path: str | os.PathLike[str], weights: Mapping[str, Tensor], *, run: str = "") -> None:
    """Write a model's ``state_dict()`` atomically in the safetensors format (extra ``safetensors``).

    Parameters
    ----------
    path : str or path
        File or fsspec URL, usually ``*.safetensors``.
    weights : mapping from str to Tensor
        Weights on any device. Tied weights are written under each of their names, so that a strict load finds every
        name.
    run : str
        Identifier of the run. A run may remove half-written files that have its identifier.
    """
    data = import_extra("safetensors.torch", f"writing {os.fspath(path)!r}", "safetensors").save(
        {name: t.detach().cpu().clone().contiguous() for name, t in weights.items()}
    )
    where, name = split_file(path)
    where.write(name, lambda file: file.write(data), writer=run)


def load_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the weights in a safetensors file, on the CPU, for ``model.load_state_dict`` (extra ``safetensors``).

    Raises
    ------
    CheckpointError
        If there is no such file, or if it is no safetensors file.
    """
    safetensors = import_extra("safetensors.torch", f"reading {os.fspath(path)!r}", "safetensors")
    where, name = split_file(path)
    try:
        with where.open(name) as file:
            weights: dict[str, Tensor] = safetensors.load(file.read())
    except FileNotFoundError as error:
        raise CheckpointError(f"{where.path(name)}: no such file. Pass the path of a safetensors file.") from error
    except (OSError, import_extra("safetensors", "reading weights", "safetensors").SafetensorError) as error:
        raise CheckpointError(
            f"{where.path(name)} can't be read ({type(error).__name__}: {error}). Pass the path of a safetensors file. "
            "(The weights in a checkpoint are load(path)['model'].)"
        ) from error
    return weights


# -- reading -----------------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str], *, whole: bool = True) -> dict[str, Any]:
    """Return the state in a checkpoint, on the CPU, after verifying its checksum.

    Parameters
    ----------
    path : str or path
        File or fsspec URL, or the folder of a sharded checkpoint or the ``state.pt`` in it. If it is any other folder,
        the newest complete checkpoint in it is read.
    whole : bool
        If True, read the tensors of a sharded checkpoint. If False, each tensor is a
        :class:`~trainloop.checkpoint.sharded.StoredTensor`, which can be read later, entirely or in part.

    Raises
    ------
    CheckpointError
        If it is no path, if there is no such file or folder, or if the file is truncated or damaged, or contains code.
        (The code is not run.)
    """
    return load_with_path(path, whole=whole)[1]


def load_with_path(path: str | os.PathLike[str], *, whole: bool) -> tuple[str, dict[str, Any]]:
    """Return the path of the checkpoint that :func:`load` reads, and its state."""
    if not isinstance(path, (str, os.PathLike)) or path == "":
        raise CheckpointError(f"{path!r} is not a checkpoint's path. (Attributes such as last_path are None at first.)")
    file = absolute_path(path)
    if is_folder := os.path.isdir(file):
        if not os.path.exists(os.path.join(file, sharded.STATE)):
            newest = load_newest(file, whole=whole)
            if newest is None:
                raise CheckpointError(f"{file} is a folder without a checkpoint. Pass a checkpoint's path.")
            return newest
        file = os.path.join(file, sharded.STATE)
    state = _read_verified(file)
    if os.path.basename(file) == sharded.STATE and isinstance(state.get("shards"), dict):
        folder = os.path.dirname(file)
        sharded.verify_files(folder, state)
        state = sharded.stored_tensors(state, folder)
        state = sharded.whole_of(state) if whole else state
    elif is_folder:
        raise CheckpointError(f"{file} is not the state of a sharded checkpoint. Pass its path.")
    return os.fspath(path), state


def _read_verified(path: str) -> dict[str, Any]:
    """Return the content of a checkpoint's file, after verifying its checksum."""
    where, name = split_file(path)
    shown = where.path(name)
    try:
        with where.open(name) as file:
            # A remote file is downloaded once, because each seek by torch.load would be a request.
            local = io.BytesIO(file.read()) if "://" in shown else file
            _verify(local, shown)
            local.seek(0)
            # torch.load would read the older format without a zip, too, which trainloop has never written.
            if local.read(len(_ZIP)) != _ZIP:
                raise CheckpointError(
                    f"{shown} is a pickle in an old format, which trainloop never writes. It was rejected, and no code "
                    "was run. Use a checkpoint that trainloop wrote."
                )
            local.seek(0)
            state = from_file(torch.load(local, map_location="cpu", weights_only=True, mmap=False))
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{shown}: no such file or folder. Pass a checkpoint's path.") from error
    except UnpicklingError as error:
        reason = str(error).strip().splitlines()
        named = next((f"{line.strip()} " for line in reason if "GLOBAL" in line or "Unsupported" in line), "")
        raise CheckpointError(
            f"{shown} names code (classes or functions), which trainloop's checkpoints never do. It was rejected, and "
            f"no code in it was run. {named}If you trust its author, read it with torch.load(path, "
            "weights_only=False) and load the weights yourself."
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise CheckpointError(
            f"{shown} can't be read ({type(error).__name__}: {error}). Use another checkpoint."
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{shown} contains a {type(state).__name__}, not a dict. Use a checkpoint that trainloop wrote."
        )
    return state


def read_info(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Return the info at the end of a checkpoint. The body's length is checked, but its content is not read.

    Raises
    ------
    CheckpointError
        If the file is truncated, has a damaged end, or is not a checkpoint.
    FileNotFoundError
        If there is no such file.
    """
    where, name = split_file(path)
    with where.open(name) as file:
        return _read_end(file, where.path(name))[0]


def _read_end(file: BinaryIO, shown: str) -> tuple[CheckpointInfo, int, int]:
    """Return the info, and the length and the checksum of the body."""
    problem = f"{shown} is not a complete checkpoint: %s. Use another checkpoint."
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END.size))
    mark = file.read(_END.size)
    if len(mark) < _END.size or mark[-len(_MAGIC) :] != _MAGIC:
        what = f"it has no end mark after {size} bytes, so it is truncated, or was not written by trainloop"
        raise CheckpointError(problem % what)
    length, body_crc, info_length, end_crc, _ = _END.unpack(mark)
    file.seek(min(length, size))
    described = file.read(info_length)
    complete = length + info_length + _END.size == size
    if not complete or zlib.crc32(described + mark[: struct.calcsize("<QII")]) != end_crc:
        raise CheckpointError(problem % "its end is damaged (wrong length or checksum)")
    known = CheckpointInfo.__dataclass_fields__
    # A later version may have more fields.
    fields = {key: value for key, value in json.loads(described).items() if key in known}
    return CheckpointInfo(**fields), length, body_crc


def _verify(file: BinaryIO, shown: str) -> None:
    _, length, expected = _read_end(file, shown)
    file.seek(0)
    crc, left = 0, length
    while left and (chunk := file.read(min(_CHUNK, left))):
        crc, left = zlib.crc32(chunk, crc), left - len(chunk)
    if crc != expected:
        raise CheckpointError(
            f"{shown} is damaged: its checksum is {crc:08x}, but should be {expected:08x}. Use another checkpoint."
        )


def checkpoints(location: str | os.PathLike[str] | Folder) -> list[Checkpoint]:
    """Return a folder's checkpoints: first the ones with a damaged end, sorted by name, then the others, oldest first.

    The list is empty if the folder does not exist, as before the first checkpoint of a training.
    Only the last bytes of each file are read. Unfinished files have other names and are not listed.
    """
    where = folder(location)
    found = []
    listed = [(name, where, name) for name in where.names() if name.endswith(_SUFFIX)]
    # The state.pt of a sharded checkpoint has the same end as a single-file checkpoint.
    listed += [(name, where / name, sharded.STATE) for name in where.folders() if not name.endswith(_SUFFIX)]
    for name, inside, file_name in listed:
        if not _NAME.fullmatch(name):
            continue
        path = where.path(name)
        try:
            with inside.open(file_name) as file:
                found.append(Checkpoint(path, name, _read_end(file, path)[0]))
        except FileNotFoundError:  # deleted since the folder was listed
            continue
        except (CheckpointError, OSError) as error:
            found.append(Checkpoint(path, name, None, str(error)))
    return sorted(found, key=lambda c: (c.info.stamp if c.info else -1, c.name))


def best(location: str | os.PathLike[str] | Folder, monitor: str | None = None) -> Checkpoint:
    """Return the best checkpoint in a folder, by the metric that ``ModelCheckpoint(monitor=...)`` ranked it by.

    The metric and its direction are stored in the checkpoints, so any process can call this function. If several runs
    wrote into the folder, only the newest of those that have the metric counts, and a warning names the best checkpoint
    of each run.

    Parameters
    ----------
    location : str or path
        Folder or fsspec URL.
    monitor : str, optional
        Name of the metric. Needed only if the folder has checkpoints that were ranked by different metrics.

    Returns
    -------
    Checkpoint
        Pass it to :func:`load`. Its ``path`` and ``info.value`` are the path and the metric's value.

    Raises
    ------
    CheckpointError
        If the folder does not exist, if no checkpoint in it was ranked by this metric, or if the metric is ambiguous.

    Examples
    --------
    >>> model.load_state_dict(load(best("checkpoints"))["model"])                             # doctest: +SKIP
    """
    where = folder(location)
    check_exists(where)
    ranked = [(c.info, c) for c in checkpoints(where) if c.info is not None and c.info.monitor]
    names = sorted({info.monitor for info, _ in ranked})
    found = [
        (info, info.value, c)
        for info, c in ranked
        if monitor in (None, info.monitor) and info.value is not None and info.value == info.value
    ]
    if not found or (monitor is None and len(names) > 1):
        known = "None was ranked"
        way = "Train with ModelCheckpoint(folder, monitor=...)."
        if names:
            known = f"There are checkpoints ranked by {', '.join(map(repr, names))}"
            way = f"Pass one of these names as monitor, or t{way[1:]}"
        chosen = "" if monitor is None else f" by monitor={monitor!r}"
        raise CheckpointError(
            f"{where.location} has no single best checkpoint{chosen}. {known} (NaN does not count). {way}"
        )
    sign = 1.0 if found[-1][0].minimize else -1.0
    runs: dict[str, tuple[float, Checkpoint]] = {}  # best value and checkpoint of each run
    for info, value, one in found:
        before = runs.pop(info.run, None)  # removed first, so that the newest run is the last item
        runs[info.run] = before if before is not None and sign * before[0] <= sign * value else (value, one)
    *others, (best_value, winner) = runs.values()
    if others:
        listed = "\n".join(f"  {other.path} ({value:.6g})" for value, other in others)
        warn(
            f"{where.location} has checkpoints of {len(runs)} runs. The best one of the newest run is used: "
            f"{winner.path} ({found[-1][0].monitor} = {best_value:.6g}). The best ones of the other runs, oldest run "
            f"first:\n{listed}\nTo use one of these, pass its path to trainloop.checkpoint.load. Give each run its own "
            "folder."
        )
    return winner


def check_exists(where: Folder) -> None:
    """Raise CheckpointError if a folder of checkpoints does not exist."""
    if not where.exists():
        raise CheckpointError(
            f"{where.location}: no such folder. Pass the folder in which training writes checkpoints."
        )


def load_newest(location: str | os.PathLike[str] | Folder, *, whole: bool = True) -> tuple[str, dict[str, Any]] | None:
    """Return the path and the state of the newest complete checkpoint in a folder; None if there is no checkpoint yet.

    It is also None if the folder does not exist, as before the first checkpoint of a training.
    Newer checkpoints that are damaged or missing are skipped, with a single warning. ``whole`` is as in :func:`load`.

    Raises
    ------
    CheckpointError
        If there are checkpoints, but none can be loaded. (If training started from scratch, these checkpoints would be
        lost.)
    """
    where = folder(location)
    listed, newest = checkpoints(where), _newest_name(where)
    missing = []
    if newest not in ["", *(c.name for c in listed)]:
        missing = [f"{where.path(newest)}, the newest checkpoint written, is missing."]
    problems = []
    for candidate in reversed(listed):
        if candidate.info is None:
            continue
        try:
            state = load(candidate.path, whole=whole)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        # Compared by name, because the stamp of a damaged checkpoint is unknown. Names of another run may be higher.
        newer = [c.problem for c in listed if c.info is None and (c.name > candidate.name or c.name == newest)]
        _warn_of(newer + problems + missing, f"Used instead: {candidate.path}")
        return candidate.path, state
    problems += [c.problem for c in listed if c.info is None]
    if problems:
        raise CheckpointError(
            f"no checkpoint in {where.location} can be loaded. To start from scratch, move these files "
            f"away:\n" + "\n".join(problems)
        )
    _warn_of(missing, "There is no other checkpoint, so training starts from scratch.")
    return None


def _newest_name(where: Folder) -> str:
    """Return the name that :func:`mark_newest` has recorded; empty if there is none."""
    try:
        name = where.read_text(_NEWEST).strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return name if _NAME.fullmatch(name) else ""


def _warn_of(problems: list[str], instead: str) -> None:
    if problems:
        warn("\n".join([*problems, instead]), RuntimeWarning)


# -- parts that checkpoints leave out ----------------------------------------------------------------------------------

# The excluded parts of a model are frozen. The script creates them again with the same values.
Bits = dict[str, Any]
"""Shape and bit sum of each tensor that is left out. The bit sum of a sharded tensor is None."""


def names_under(names: Iterable[str], parts: Sequence[str]) -> list[str]:
    """Return the names that are equal to a part or inside one: the part ``teacher`` includes ``teacher.fc.weight``."""
    return [name for name in names if any(name == part or name.startswith(f"{part}.") for part in parts)]


def bits_of(model: Mapping[str, Any], names: Sequence[str]) -> Bits:
    """Return the shape and bit sum of tensors in a model's ``state_dict()``, for a later comparison."""
    plain = [name for name in names if isinstance(model[name], Tensor) and not is_sharded(model[name])]
    sums = dict(zip(plain, bit_sums([model[name] for name in plain]) if plain else []))
    return {name: [list(getattr(model[name], "shape", ())), sums.get(name)] for name in names}


def changed(before: Bits, now: Bits) -> list[str]:
    """Return the names of tensors whose bit sums are both known and differ."""
    return [n for n, (_, bits) in before.items() if n in now and None not in (bits, now[n][1]) and bits != now[n][1]]


def without(state: dict[str, Any], left_out: Bits) -> dict[str, Any]:
    """Return a checkpoint's state without some of the model's tensors. The state's ``left_out`` describes them."""
    model = {name: value for name, value in state["model"].items() if name not in left_out}
    return {**state, "model": with_items(state["model"], model), "left_out": left_out}
