"""Exceptions whose text is megabytes, or can't be made at all: what is told stays readable and names the cause."""

from __future__ import annotations

from typing import Any

import pytest
from kit.small_loop import Net, make_loop

from trainloop import AbstractCallback
from trainloop.errors import WorkerFailedError

MEGABYTES = "x" * 3_000_000 + "\n" + "a line\n" * 400_000


class Mute(Exception):
    """Its text can't be made."""

    def __str__(self) -> str:
        raise KeyError("no text")

    __repr__ = __str__


class Raises(Net):
    """In its first step."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def get_loss(self, batch_data: Any, criterion: Any, device: Any) -> Any:
        raise self.error


class FailsToo(AbstractCallback):
    """A hook that fails while it is told of the failure."""

    def __init__(self, error: Exception) -> None:
        super().__init__("fails too")
        self.error = error

    def on_exception(self, exception: BaseException) -> None:
        raise self.error

    def __repr__(self) -> str:
        return MEGABYTES


@pytest.mark.parametrize("error", [ValueError(MEGABYTES), Mute()], ids=["megabytes", "mute"])
def test_a_hook_that_fails_over_a_failure_is_told_in_a_line(error: Exception) -> None:
    loop = make_loop(Raises(error))
    with pytest.raises(type(error)) as caught, pytest.warns(UserWarning, match=r"on_exception failed \(") as told:
        loop.fit(1, callbacks=[FailsToo(Mute()), FailsToo(KeyError(MEGABYTES))])
    assert caught.value is error
    assert len(told) == 2
    assert all(len(str(warning.message)) < 2000 for warning in told)
    assert f") while handling {type(error).__name__}: " in str(told[0].message)
    assert str(told[0].message).startswith("FailsToo.on_exception failed (Mute: <its text can't be computed>)")


@pytest.mark.long
def test_a_message_of_megabytes_is_told_once_and_shortened(capfd: pytest.CaptureFixture[str]) -> None:
    loop = make_loop(Raises(ValueError(MEGABYTES)), gpu_mode="ddp", devices=2)
    with pytest.raises(
        WorkerFailedError, match=r"raised ValueError: x+ \[... .* characters left out ...\] x+ ..."
    ) as told:
        loop.fit(1, callbacks=[FailsToo(KeyError(MEGABYTES))])
    text = str(told.value)
    assert len(text) < 100_000
    assert text.count("ValueError: xxx") == 2  # in the sentence, and at the traceback's end
    assert "in get_loss\n    raise self.error" in text
    out, err = capfd.readouterr()
    assert ") while handling ValueError: xxx" in err  # pytest makes warnings errors
    assert len(out) + len(err) < 10_000
