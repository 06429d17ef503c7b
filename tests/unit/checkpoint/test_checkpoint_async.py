"""ModelCheckpoint with async_save: the state of its step, written while steps go on."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from kit.checkpoints import StandIn, steps

from trainloop import checkpoint
from trainloop.callbacks.checkpoints import checkpoint as under_test
from trainloop.callbacks.checkpoints.checkpoint import ModelCheckpoint


def test_async_writes_the_state_of_its_step_while_steps_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, writers = threading.Event(), []
    really_save = checkpoint.save

    def slow_save(*arguments: Any) -> None:
        writers.append(threading.current_thread())
        assert may_write.wait(20)
        really_save(*arguments)

    monkeypatch.setattr(under_test.checkpoint, "save", slow_save)
    keeper = ModelCheckpoint(tmp_path, every_n_epochs=None, every_n_steps=2, async_save=True)
    loop = StandIn(keeper)
    keeper.on_train_begin()
    for _ in range(3):  # the third step is done while step 2 is being written
        loop.step()
    assert steps(tmp_path) == []
    may_write.set()
    loop.step()
    keeper.on_train_end()
    assert steps(tmp_path) == [2, 4]
    for found in checkpoint.checkpoints(tmp_path):
        assert found.info is not None
        assert checkpoint.load(found.path)["model"]["weight"].eq(found.info.step).all()
    assert threading.main_thread() not in writers
    assert not any(thread.is_alive() for thread in writers)
    assert not keeper._host_copy._buffers, "the memory is given back"


def test_a_thread_that_trains_on_after_the_main_thread_writes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)  # then, pools take no more work
    keeper = ModelCheckpoint(tmp_path, every_n_steps=1, async_save=True)
    loop = StandIn(keeper)
    keeper.on_train_begin()
    loop.step()
    keeper.on_train_end()
    assert steps(tmp_path) == [1]


def test_an_exception_waits_for_the_thread(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, every_n_steps=1, async_save=True)
    loop = StandIn(keeper)
    keeper.on_train_begin()
    loop.step()
    keeper.on_exception(ValueError())
    assert steps(tmp_path) == [1]


def test_it_pickles_while_it_writes(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, every_n_steps=1, async_save=True)
    loop = StandIn(keeper)
    keeper.on_train_begin()
    loop.step()
    keeper.train_loop_obj = None
    copied = pickle.loads(pickle.dumps(keeper))
    assert copied.dirpath == keeper.dirpath
    keeper.train_loop_obj = loop
    keeper.on_train_end()
    assert steps(tmp_path) == [1]
