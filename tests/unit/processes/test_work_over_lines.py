"""Work and its descriptors between processes: any length, any number, and an end that is noticed."""

from __future__ import annotations

import multiprocessing
import os
import resource
import threading
from typing import Any

import pytest

from trainloop._launch.work import Work, next_work


class Parent:
    """In place of the process that has started this one."""

    def __init__(self) -> None:
        self.sentinel, self._end = os.pipe()

    def close(self) -> None:
        os.close(self.sentinel)
        os.close(self._end)


def test_long_work_with_many_descriptors_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = Parent()
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    ours, theirs = multiprocessing.Pipe()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = min(600, (soft - 100) // 2)
    files = [os.memfd_create(f"file-{i}") for i in range(number)]
    task: Any = os.urandom(5 << 20)
    nothing: Any = None
    received: dict[int, int] = {}
    try:
        for descriptors in (files, []):
            sender = threading.Thread(target=Work(nothing, nothing, task, {}).send_over, args=(ours, descriptors))
            sender.start()
            given = next_work(theirs)
            sender.join()
            assert given is not None
            work, numbers = given
            assert work.task == task
            assert list(numbers) == descriptors
            received.update(numbers)
        names = [os.readlink(f"/proc/self/fd/{received[fd]}") for fd in files]
        assert names == [f"/memfd:file-{i} (deleted)" for i in range(number)]
        assert not set(received.values()) & set(files)
        assert not any(map(os.get_inheritable, received.values()))
        ours.close()
        assert next_work(theirs) is None
    finally:
        for fd in (*files, *received.values()):
            os.close(fd)
        theirs.close()
        parent.close()
