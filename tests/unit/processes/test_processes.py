"""The fork server: where there can be none, what makes a process unlike the caller, where its socket is."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from multiprocessing import connection, forkserver
from typing import Any

import pytest

from trainloop._processes import fork_server as processes
from trainloop._processes.fork_server import NoServerError, begin_server
from trainloop._support import scratch


@pytest.fixture
def never_started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the server would have been started with."""
    started: list[dict[str, Any]] = []

    def start() -> None:
        address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        started.append({**os.environ, "address": address, "folder": os.path.realpath(os.path.dirname(address))})

    monkeypatch.setattr(forkserver, "ensure_running", start)
    return started


def test_a_server_that_every_user_could_reach_is_not_started(
    monkeypatch: pytest.MonkeyPatch, never_started: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(connection, "arbitrary_address", lambda family: "\0listener-1-0")
    with pytest.raises(NoServerError, match="CVE-2022-42919"):
        begin_server(["torch"])
    assert not never_started


def test_the_server_s_socket_is_in_a_private_folder_with_a_short_name(never_started: list[dict[str, Any]]) -> None:
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before, environment = dict(config), dict(os.environ)
    begin_server(["torch"])
    (started,) = never_started
    assert len(started["address"]) < 60
    assert os.path.basename(started["folder"]).startswith(scratch.PREFIX)
    assert os.stat(started["folder"]).st_mode & 0o777 == 0o700
    assert started["OMP_NUM_THREADS"] == "1"
    assert '"torch"' in started[processes.SERVER_VARIABLE]
    assert (dict(config), dict(os.environ)) == (before, environment)


def test_the_order_to_end_is_that_of_os_exit_also_if_coverage_has_replaced_it(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", lambda code: codes.append(code))  # a local function: can't be pickled
    pickle.loads(processes._END)
    assert codes == [0]


def test_variables_that_are_read_at_load_are_compared_and_others_are_not() -> None:
    now = processes.fixed_state()
    for name in ("LD_PRELOAD", "TORCH_LOGS", "PYTORCH_CUDA_ALLOC_CONF", "KMP_AFFINITY", "PYTHONHASHSEED"):
        assert processes.fixed_state({**os.environ, name: "other"}) != now, name
    others = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "WANDB_RUN_ID", "TORCH_NCCL_DEBUG")
    for name in (*others, "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"):
        assert processes.fixed_state({**os.environ, name: "other"}) == now, name


def test_a_server_that_ends_at_an_import_is_asked_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ends(*_: Any) -> None:
        asked.append(1)
        raise EOFError

    monkeypatch.setattr(processes, "_forked", ends)
    monkeypatch.setattr(processes, "_PAUSES_S", (0.0, 0.0))
    with pytest.raises(processes.NoOwnServerError, match="ended several times while it started processes"):
        processes.from_server([(print, ())], [])
    assert len(asked) == 2


def test_a_process_that_was_forked_but_cannot_be_like_the_caller_is_told_by_name() -> None:
    context = processes._ProcessContext({}, [], [], processes.fixed_state(), {}, ())
    assert context.changed(dict(os.environ)) == set()
    assert context.changed({**os.environ, "TORCH_LOGS": "+dynamo"}) == {"TORCH_LOGS"}
    assert context.changed(None) == {processes._NOT_OWN}
    context.fixed["Umask"] = "\t0777"  # taken over
    assert context.changed(dict(os.environ)) == set()


def test_a_forked_process_ends_quietly_if_its_caller_has_been_interrupted() -> None:
    class Same:
        def changed(self, started_with: Any) -> set[str]:
            return set()

        def take_over(self) -> None: ...

    report, told = multiprocessing.Pipe(duplex=False)
    report.close()
    called: list[int] = []
    processes._take_over(Same(), told, called.append, (1,))  # type: ignore[arg-type]
    assert told.closed
    assert not called
