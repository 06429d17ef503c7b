"""What a rank believes of another's bytes: forged by a rank that plays the stranger, with and without a key."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from kit.ranks import run_ranks

from trainloop import distributed as td
from trainloop.distributed import wire
from trainloop.distributed.key import SharedKey, key_from_environment, set_run_key
from trainloop.distributed.objects import session_here
from trainloop.errors import ConfigurationError


class Own:
    """A class of the user's: no plain data."""

    def __init__(self, value: int) -> None:
        self.value = value


class Trap:
    """Its pickle writes a file where it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


class Row(NamedTuple):
    name: str
    score: float


def outcome(call: Any) -> str:
    try:
        return f"returned {call()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def send_block(block: bytes) -> None:
    """Take part in a rank's first exchange as a stranger does: with bytes of one's own."""
    rows = torch.empty(dist.get_world_size(), wire.BLOCK, dtype=torch.uint8)
    dist.all_gather(list(rows), torch.frombuffer(bytearray(block.ljust(wire.BLOCK, b"\0")), dtype=torch.uint8))


def forged(number: int, form: int, body: bytes, size: int | None = None, call: str = "gather_object") -> bytes:
    """A message as somebody makes it who knows all of the protocol but the key."""
    size = len(body) if size is None else size
    fields = wire._FIELDS.pack(wire._MAGIC, wire.CALLS.index(call), form, 1, number, size)
    return fields + os.urandom(2 * wire._TAG) + body


def strangers(trap: str, with_key: bool) -> dict[str, Any]:
    if not with_key:
        set_run_key(None)
        SharedKey.key_at = classmethod(lambda cls, place: None)  # type: ignore[method-assign]  # as on two hosts
    rank = dist.get_rank()
    poison = pickle.dumps(Trap(trap))
    session = session_here()
    sent: list[bytes] = []
    pack = session.pack
    session.pack = lambda *args: sent.append(bytes(block := pack(*args))) or block  # type: ignore[method-assign, func-returns-value]
    facts: dict[str, Any] = {"has a key": session.key is not None, "first": td.gather_object(rank)}
    form = wire.Form
    blocks = {
        "noise": lambda number: os.urandom(40),
        "zeros": lambda number: b"",
        "a pickle": lambda number: forged(number, form.PICKLE, poison),
        "a pickle as plain data": lambda number: forged(number, form.PLAIN, poison),
        "a form that is none": lambda number: forged(number, 9, poison),
        "a huge size": lambda number: forged(number, form.PLAIN, b"", 2**62),
        "a negative size": lambda number: forged(number, form.PLAIN, b"", 2**64 - 1),
        "the message before": lambda number: sent[0],
    }
    for name, block in blocks.items():
        if rank == 0:
            facts[name] = outcome(lambda: td.gather_object("mine"))
        else:
            send_block(block(session._number))
            if not with_key and name in ("a pickle", "a pickle as plain data", "a form that is none"):
                # This message was taken for one until its body was read.
                size = len(wire.encode("mine"))
                if size > wire.SHORT:  # rank 0's own needs a second exchange; with torch 2.6 it does not
                    rows = torch.empty(2, size, dtype=torch.uint8)
                    dist.all_gather(list(rows), torch.zeros(size, dtype=torch.uint8))
                session.next()
    if with_key:
        # The right number with the old tags, and a body other than the one that was announced.
        if rank == 0:
            facts["body"] = outcome(lambda: td.gather_object("x" * 5000))
        else:
            announced = bytes(pack("gather_object", wire.Form.PLAIN, b"y" * 5000))
            send_block(announced)
            rows = torch.empty(2, max(5000, len(wire.dumps("x" * 5000))), dtype=torch.uint8)
            dist.all_gather(list(rows), torch.zeros(rows.shape[1], dtype=torch.uint8))
    facts["afterwards"] = td.gather_object({"rank": rank, "row": Row("a", 0.5), "a": np.array([[1], "b"], object)})
    facts["own"] = outcome(lambda: [own.value for own in td.gather_object(Own(rank))])
    facts["own, broadcast"] = outcome(lambda: td.broadcast_object(Own(rank), src=1).value)
    facts["calls mixed up"] = outcome(lambda: td.gather_object(1) if rank else td.exchange_ints([1]))
    facts["purposes mixed up"] = outcome(
        lambda: td.exchange_ints([1], "the beginning of an evaluation" if rank else "the end of a hook")
    )
    facts["at the end"] = td.exchange_ints([rank])
    return facts


@pytest.mark.long(but=1)
@pytest.mark.parametrize("with_key", [True, False], ids=["with a key", "without"])
def test_a_stranger_in_the_place_of_a_rank_is_noticed_and_runs_nothing(with_key: bool, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    facts, other = run_ranks(strangers, 2, str(trap), with_key, folder=tmp_path)
    assert not trap.exists()
    assert facts["has a key"] == with_key
    expected = {
        "noise": "bytes that are not a message",
        "zeros": "bytes that are not a message",
        "a pickle": "was not signed with this run's key" if with_key else "an unknown format (2) in gather_object",
        "a pickle as plain data": "was not signed with this run's key" if with_key else "got",
        "a form that is none": "was not signed with this run's key" if with_key else "an unknown format (9)",
        "a huge size": "was not signed with this run's key" if with_key else "larger than this machine's memory",
        "a negative size": "was not signed with this run's key" if with_key else "larger than this machine's memory",
    }
    if with_key:
        expected["body"] = "data that was not signed with this run's key"
    for name, message in expected.items():
        assert facts[name].startswith("ConnectionError: rank 0 of 2 got "), (name, facts[name])
        assert message in facts[name], name
        assert "instead of a valid message from rank 1. Another program has connected to this run" in facts[name]
        # In fsdp on CPUs, these bytes may also be those of another rank's exchange of parameters.
        assert ("The usual causes are code under `if rank == 0:`" in facts[name]) == (name in ("noise", "zeros"))
    assert facts["the message before"].startswith("ValueError: ranks called different exchanges")
    for rank, mine in enumerate((facts, other)):
        for sender, theirs in enumerate(mine["afterwards"]):
            assert (theirs["rank"], theirs["row"], theirs["a"].tolist()) == (sender, Row("a", 0.5), [[1], "b"])
            assert type(theirs["row"]) is Row
        if with_key:
            assert (mine["own"], mine["own, broadcast"]) == ("returned [0, 1]", "returned 1")
        else:
            for call, sender in (("gather_object", 0), ("broadcast_object", 1)):
                text = mine["own" if sender == 0 else "own, broadcast"]
                assert text.startswith(
                    f"UnpicklableError: {call}: the object of rank {sender} contains an object of type "
                )
                assert "set TRAINLOOP_KEY to the same secret on every host" in text
        assert "ranks called different exchanges (rank" in mine["calls mixed up"], rank
        assert "A callback such as ModelCheckpoint must run on every rank" in mine["calls mixed up"]
        assert f"rank {rank}: exchange" in mine["purposes mixed up"]
        for purpose in ("was the beginning of an evaluation", "was the end of a hook"):
            assert purpose in mine["purposes mixed up"]
        assert mine["at the end"] == [[0], [1]]


# -- keys of several hosts, and of torchrun ----------------------------------------------------------------------------


ONE_RANK = """
import json, os, sys
from datetime import timedelta
import torch.distributed as dist
from trainloop import distributed as td
from trainloop.distributed.key import SharedKey
from trainloop.distributed.objects import session_here

class Own:
    pass

sys.modules["__main__"].Own = Own
folder, rank, cases = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
shared_key_at = SharedKey.key_at
for number, (key, other_host) in enumerate(cases):
    os.environ.pop("TRAINLOOP_KEY", None)
    if key:
        os.environ["TRAINLOOP_KEY"] = key
    SharedKey.key_at = (lambda place: None) if other_host else shared_key_at
    store = dist.FileStore(f"{folder}/{number}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        said = f"{td.broadcast_object(1)} {len(td.gather_object(Own()))} {session_here().key is not None}"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps(said), flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""

KEYS = {
    # each rank's key, whether the ranks are on two hosts, what rank 0 says
    "one host": ((None, None), False, "1 2 True"),  # the key comes through rank 0's memory
    "no key": (
        (None, None),
        True,
        "UnpicklableError: gather_object: the object of rank 0 contains an object of type __main__",
    ),
    "one key": (("k" * 32, "k" * 32), True, "1 2 True"),
    "one without": (
        ("k" * 32, None),
        True,
        "ConfigurationError: only some of the 2 ranks have a key. Ranks without one: 1. Set TRAINLOOP",
    ),
    "two keys": (
        ("k" * 32, "l" * 32),
        True,
        "ConnectionError: rank 0 of 2 got a response that was not signed with this run's",
    ),
}


@pytest.mark.long
def test_ranks_that_others_started(tmp_path: Path) -> None:
    """One start of two processes, which form a group for each case."""
    processes = []
    for rank in range(2):
        environ = {k: v for k, v in os.environ.items() if k != "TRAINLOOP_KEY"}
        environ |= {"PYTHONPATH": str(Path(td.__file__).parents[2]), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        cases = json.dumps([(keys[rank], other_host) for keys, other_host, _ in KEYS.values()])
        command = [sys.executable, "-c", textwrap.dedent(ONE_RANK), str(tmp_path), str(rank), cases]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ))
    try:
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    answers = [json.loads(line) for line in outputs[0].splitlines()]
    for (name, (_, _, said)), answer in zip(KEYS.items(), answers, strict=True):
        assert answer.startswith(said), name


def test_the_key_of_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    assert key_from_environment({}) is None
    assert key_from_environment({"TRAINLOOP_KEY": " "}) is None
    direct = key_from_environment({"TRAINLOOP_KEY": "a" * 40})
    file.write_text("a" * 40 + "\n")
    file.chmod(0o600)
    assert direct == key_from_environment({"TRAINLOOP_KEY": str(file)})
    assert direct != key_from_environment({"TRAINLOOP_KEY": "b" * 40})
    for mode in (0o640, 0o604, 0o620, 0o644):
        file.chmod(mode)
        with pytest.raises(
            ConfigurationError, match=rf"mode {mode:o}, so others may read or change the key.*chmod 600"
        ):
            key_from_environment({"TRAINLOOP_KEY": str(file)})
    with pytest.raises(ConfigurationError, match="No such file"):
        key_from_environment({"TRAINLOOP_KEY": str(tmp_path / "none")})
    with pytest.raises(ConfigurationError, match="a key of 5 characters, but a key must have 32 or more"):
        key_from_environment({"TRAINLOOP_KEY": "short"})


def test_a_shared_key_is_taken_from_a_nameless_file_of_one_s_own_only(tmp_path: Path) -> None:
    shared = SharedKey()
    try:
        assert SharedKey.key_at(shared.place) == shared.key
        (tmp_path / "trainloop-key").write_bytes(b"known to others" * 4)
        with open(tmp_path / "trainloop-key") as file:
            assert SharedKey.key_at((os.getpid(), file.fileno())) is None
        other = os.memfd_create("another")
        assert SharedKey.key_at((os.getpid(), other)) is None
        os.close(other)
        if os.geteuid() == 0:
            mine = os.memfd_create("trainloop-key")
            os.fchown(mine, 65534, 65534)  # as a file that another user's process made
            assert SharedKey.key_at((os.getpid(), mine)) is None
            os.close(mine)
        assert SharedKey.key_at((2**22, 3)) is None
    finally:
        shared.close()
    assert SharedKey.key_at(shared.place) is None


def test_no_object_collective_of_torch_is_called() -> None:
    """They unpickle what a socket said."""
    package = Path(td.__file__).parents[1]
    names = [name for name in dir(dist) if "object" in name and callable(getattr(dist, name))]
    assert {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"} <= set(names)
    for path in package.rglob("*.py"):
        text = path.read_text()
        assert "_object_to_tensor" not in text
        assert "_tensor_to_object" not in text
        for name in names:
            for where in (f"dist.{name}(", f"torch.distributed.{name}(", f"c10d.{name}("):
                assert where not in text, f"{path.name} calls {where}...)"
        assert "from torch.distributed import" not in text or not any(
            name in line for line in text.splitlines() if "from torch.distributed import" in line for name in names
        )
