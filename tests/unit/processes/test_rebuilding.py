"""An object that can be pickled but not rebuilt: the error says when it occurred."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest

from trainloop._transfer import pack, pack_state, unpack_state


class AnswersAll:
    """Has an answer for any attribute, also for those that pickle asks for before the object has any."""

    def __init__(self) -> None:
        self.values = {"scale": 2.0}

    def __getattr__(self, name: str) -> Any:
        return self.values[name]


class TwoArguments(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Refuses:
    def __init__(self) -> None:
        self.version = 1

    def __setstate__(this, state: Any) -> None:
        raise ValueError(f"an old version: {state}")


REBUILT = r" \(while an object from another process was rebuilt from its pickle: pickle\.loads"
CASES: list[tuple[Any, type[Exception], str]] = [
    (TwoArguments(1, 2), TypeError, rf"'second'{REBUILT}"),
    (Refuses(), ValueError, rf"an old version: \{{'version': 1\}}{REBUILT}"),
]


if sys.version_info >= (3, 11):  # before, pickle asks it for __getstate__, too, and can't pickle it
    CASES.append((AnswersAll(), RecursionError, REBUILT))


@pytest.mark.parametrize("obj, error, message", CASES, ids=lambda case: type(case).__name__)
def test_the_error_says_that_an_object_was_rebuilt(obj: Any, error: type[Exception], message: str) -> None:
    with pack({"model": [obj]}) as payload, pytest.raises(error, match=message):
        payload.handle.open()
    with pytest.raises(error, match=message):  # on the way back
        unpack_state(pack_state({"model": [obj]}))


def test_an_import_that_fails_is_left_alone() -> None:
    stream = pickle.dumps(test_an_import_that_fails_is_left_alone).replace(b"test_rebuilding", b"test_rebuilt_it")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named '[\w.]*test_rebuilt_it'$"):
        unpack_state(pack_state(None)._replace(stream=stream))
