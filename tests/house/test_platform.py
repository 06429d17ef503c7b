"""What the operating system offers: true on each system, so also on those that tests/pretended pretends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainloop._support import platform

WINDOWS = sys.platform == "win32"


def test_modules_are_there_or_none() -> None:
    modules = [platform.fcntl, platform.grp, platform.pwd, platform.resource]
    assert [module is None for module in modules] == [WINDOWS] * 4


def test_a_process_exists_until_it_is_killed() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert platform.process_exists(process.pid)
        process.kill()
        assert process.wait(10) != 0
        assert not platform.process_exists(process.pid)
    finally:
        process.kill()
        process.wait()
    assert platform.process_exists(os.getpid())
    assert platform.process_exists(psutil.Process().parents()[-1].pid)  # of another user, mostly


def test_users_have_numbers_and_names_but_on_windows() -> None:
    number = platform.user_id()
    assert (number is None) == WINDOWS
    assert platform.user_name(number or 0) == (None if WINDOWS else psutil.Process().username())
    assert platform.user_name(2**31 - 7) is None  # nobody's


def test_cpus_are_the_processes_own_or_none() -> None:
    cpus = platform.affinity()
    assert bool(cpus) == (sys.platform == "linux")
    assert cpus == sorted(set(cpus))
    try:
        platform.set_affinity(cpus[:1])
        assert platform.affinity() == cpus[:1]
    finally:
        platform.set_affinity(cpus)
    assert platform.affinity() == cpus


def test_signals_are_blocked_within_a_context_only() -> None:
    before = platform.blocked_signals()
    with platform.signals_blocked([signal.SIGTERM]):
        inside = platform.blocked_signals()
        with platform.signals_blocked([signal.SIGINT]):
            both = platform.blocked_signals()
            platform.unblock_signals([signal.SIGTERM])
            one = platform.blocked_signals()
        assert platform.blocked_signals() == inside
    assert platform.blocked_signals() == before
    if WINDOWS:
        assert [before, inside, both, one] == [[]] * 4
        return
    assert inside == sorted({*before, signal.SIGTERM})
    assert both == sorted({*before, signal.SIGTERM, signal.SIGINT})
    assert one == sorted({*before, signal.SIGINT})
    platform.set_blocked_signals([signal.SIGTERM])
    after = platform.blocked_signals()
    platform.set_blocked_signals(before)
    assert (after, platform.blocked_signals()) == ([signal.SIGTERM], before)


@given(parts=st.lists(st.tuples(st.integers(0, 40), st.binary(min_size=1, max_size=20)), max_size=8))
def test_bytes_are_written_and_read_at_their_places(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[int, bytes]]
) -> None:
    path = Path(tmp_path_factory.getbasetemp(), "places")
    expected = bytearray(60)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o600)
    try:
        os.write(descriptor, bytes(60))
        for place, data in parts:
            assert platform.write_at(descriptor, memoryview(data), place) == len(data)
            expected[place : place + len(data)] = data
        for place, data in parts:
            found = bytearray(len(data))
            assert platform.read_into(descriptor, memoryview(found), place) == len(data)
            assert found == expected[place : place + len(data)]
        assert platform.read_into(descriptor, memoryview(bytearray(9)), 55) == 5  # to the file's end
    finally:
        os.close(descriptor)
    assert path.read_bytes() == expected


def test_the_loopback_interface_is_one_of_this_host() -> None:
    name = platform.loopback_interface()
    assert (name is None) == WINDOWS
    if not WINDOWS:
        assert name in {name for _, name in socket.if_nameindex()}
