"""Logs of ranks other than the first: warnings only, unless all output is asked for."""

from __future__ import annotations

import errno
import io
import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainloop._launch.output import Report, Targets, quieten_log_streams, rank_handlers, rank_streams
from trainloop.distributed import Rank


@pytest.fixture
def handlers(tmp_path: Path) -> Iterator[dict[str, logging.Handler]]:
    logger = logging.getLogger("a.library.of.this.test")
    made = {
        "debug": logging.StreamHandler(),
        "errors": logging.StreamHandler(),
        "file": logging.FileHandler(tmp_path / "log"),
    }
    made["errors"].setLevel(logging.ERROR)
    for handler in made.values():
        logger.addHandler(handler)
    yield made
    for handler in [*logger.handlers]:
        logger.removeHandler(handler)
        handler.close()


@pytest.mark.parametrize(
    ("rank", "variable", "debug"), [(0, "0", logging.NOTSET), (1, "0", logging.WARNING), (1, "1", logging.NOTSET)]
)
def test_logs_of_a_rank(
    rank: int,
    variable: str,
    debug: int,
    handlers: dict[str, logging.Handler],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TRAINLOOP_ALL_RANKS_OUTPUT", variable)
    me = Rank(rank=rank, world_size=2)
    quieten_log_streams(me, Report(str(tmp_path / "claims")))
    levels = {name: handler.level for name, handler in handlers.items()}
    assert levels == {"debug": debug, "errors": logging.ERROR, "file": logging.NOTSET}


class Keeps(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    kept = Keeps()
    logging.getLogger("trainloop").addHandler(kept)
    yield kept.texts
    logging.getLogger("trainloop").removeHandler(kept)


@pytest.mark.parametrize("variable", ["0", "1"])
def test_the_first_line_that_is_not_shown_is_reported_once(
    variable: str, said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRAINLOOP_ALL_RANKS_OUTPUT", variable)
    for rank in (0, 2, 1, 2):
        me = Rank(rank=rank, world_size=3)
        with rank_streams(me, None, Targets(), Report(str(tmp_path / "claims"))):
            print("x =", rank)
            print("again")
    if variable == "1":
        assert said == []
        return
    assert len(said) == 1
    assert said[0].startswith("This rank printed a line that is not shown ('x = 2')")
    assert "TRAINLOOP_ALL_RANKS_OUTPUT=1" in said[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_stdout_has_the_attributes_of_a_stream_on_every_rank(
    rank: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with rank_streams(Rank(rank=rank, world_size=2), None, Targets(), Report(str(tmp_path / "claims"))):
        assert sys.stdout.encoding.lower() == "utf-8"
        assert sys.stdout.errors
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        sys.stdout.buffer.write(b"bytes\n")
        subprocess.run(["echo", "a program"], stdout=sys.stdout, check=True)
        print("text")
    shown = capfd.readouterr().out
    assert ("text" in shown) == (rank == 0)
    assert "bytes" in shown
    assert "a program" in shown


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_rank_whose_stderr_is_full_continues(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stderr", Full())
    # As outside of pytest, the warning about the stream is written to this very stream.
    monkeypatch.setattr(warnings, "showwarning", lambda message, *args, **kwargs: print(message, file=sys.stderr))
    monkeypatch.setattr(warnings, "filters", [("default", None, Warning, None, 0)])

    def write() -> None:
        with rank_streams(Rank(rank=1, world_size=2), None, Targets(), Report(str(tmp_path / "claims"))):
            print("a line", file=sys.stderr)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize("where", ["stream", "caller"])
def test_records_too(where: str, said: list[str], handlers: dict[str, logging.Handler], tmp_path: Path) -> None:
    log, me = logging.getLogger("a.library.of.this.test"), Rank(rank=1, world_size=2)
    log.setLevel(logging.INFO)
    report = Report(str(tmp_path / "claims"))
    targets = Targets(loggers={log.name: logging.INFO} if where == "caller" else {})
    if where == "stream":
        quieten_log_streams(me, report)
    with rank_handlers(None, targets, me, report):
        log.warning("shown")
        log.debug("below the logger's level")
        assert said == []
        log.info("loss %d", 3)
        log.info("loss %d", 4)
    assert len(said) == 1
    assert "This rank logged a record of level INFO that is not shown ('loss 3')" in said[0]
