"""What the ranks of a run that survives, and the process that starts them, tell each other by words of shared memory.

Each is written at once by one side, and stays when its writer is killed.
"""

from __future__ import annotations

from trainloop.transfer.slots import SnapshotMemory

__all__ = [
    "failed_in_a_row",
    "get_back",
    "get_status",
    "set_back",
    "set_failed_in_a_row",
    "set_status",
    "status_words",
    "step_word",
]

_BACK, _FAILING, _FIRST = 0, 1, 2  # when training went on, snapshots in a row that failed; then
_STEP, _TRAINS = 0, 1  # of each rank


def status_words(ranks: int) -> int:
    """Words by which ranks tell how far they are."""
    return _FIRST + 2 * ranks


def step_word(rank: int) -> int:
    """Where a rank's steps are told, for one that tells of each."""
    return _FIRST + 2 * rank + _STEP


def set_status(memory: SnapshotMemory, rank: int, step: int, trains: bool) -> None:
    """How far a rank is: steps done, and whether it has come as far as to train."""
    word = _FIRST + 2 * rank
    memory.status[word + _STEP] = step
    memory.status[word + _TRAINS] = trains


def get_status(memory: SnapshotMemory, rank: int) -> tuple[int, bool]:
    """What :func:`set_status` said."""
    word = _FIRST + 2 * rank
    return memory.status[word + _STEP], bool(memory.status[word + _TRAINS])


def set_back(memory: SnapshotMemory, time_ns: int) -> None:
    """When (monotonic clock) the first step after a restart was done; 0: not yet."""
    memory.status[_BACK] = time_ns


def get_back(memory: SnapshotMemory) -> int:
    """What :func:`set_back` said."""
    return memory.status[_BACK]


def failed_in_a_row(memory: SnapshotMemory) -> int:
    """How many of the last snapshots could not be made."""
    return memory.status[_FAILING]


def set_failed_in_a_row(memory: SnapshotMemory, number: int) -> None:
    """What :func:`failed_in_a_row` gives."""
    memory.status[_FAILING] = number
