"""Logs of ranks other than the first: warnings only, unless all output is asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainloop._launch.output import quieten_log_streams
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
    for handler in made.values():
        logger.removeHandler(handler)
        handler.close()


@pytest.mark.parametrize(
    ("rank", "variable", "debug"), [(0, "0", logging.NOTSET), (1, "0", logging.WARNING), (1, "1", logging.NOTSET)]
)
def test_logs_of_a_rank(
    rank: int, variable: str, debug: int, handlers: dict[str, logging.Handler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINLOOP_ALL_RANKS_OUTPUT", variable)
    quieten_log_streams(Rank(rank=rank, world_size=2))
    levels = {name: handler.level for name, handler in handlers.items()}
    assert levels == {"debug": debug, "errors": logging.ERROR, "file": logging.NOTSET}
