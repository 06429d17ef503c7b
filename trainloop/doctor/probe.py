"""Read the values that the doctor checks. Imports run in separate processes, because they may fail, hang or crash."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainloop._support.distribution import NAME
from trainloop._support.platform import resource
from trainloop.resources.machine import available
from trainloop.resources.quota import Resources

__all__ = ["Imported", "Readings", "missing_of_extras", "other_distribution", "read"]

IMPORT_TIMEOUT_S = 120.0
OF_THE_PROJECT = ("test", "test-all", "test-ecosystem", "test-ecosystem-part", "lint", "docs", "bench")
"""Extras that are only for developing this project."""
_NAME = re.compile(r"[\s;=<>!~(\[]")

_TORCH = """
import json, warnings
caught = []
warnings.showwarning = lambda message, *rest: caught.append(str(message))
import torch
found = {"version": torch.__version__, "threads": torch.get_num_threads(), "warnings": caught}
found["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
found["gloo"] = torch.distributed.is_available() and torch.distributed.is_gloo_available()
print("\\n" + json.dumps(found))
"""


@dataclass(frozen=True)
class Imported:
    """Result of an import in a separate process."""

    found: dict[str, Any] | None
    """Output of the process, parsed as JSON; ``None`` if the process failed."""
    error: str = ""
    """Error of the process; empty if the process succeeded."""


@dataclass(frozen=True)
class Readings:
    """Values that the checks need. Tests pass values that differ from this machine's."""

    torch: Imported
    python: tuple[int, int, int] = (3, 12, 0)
    """Version of Python."""
    conflicts: tuple[str, ...] = ()
    """Lines of ``pip check``; empty if it finds no conflict."""
    other_distribution: str = ""
    """Name, version and folder of another distribution that is imported as ``trainloop``; empty if not installed."""
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Distributions that are not installed, listed by the extra of this package that needs them."""
    torch_requirements: tuple[str, ...] = ()
    """Requirements of the installed torch, from its metadata."""
    environ: Mapping[str, str] = field(default_factory=dict)
    shm: tuple[int, int] | None = None
    """Total and free bytes of ``/dev/shm``; ``None`` if it does not exist."""
    temporary: tuple[str, int] = ("/tmp", 2**40)
    """Folder for temporary files, and the free bytes on its disk; the error and 0 if no folder can be written to."""
    descriptors: tuple[int, int] | None = (1024, 1024)
    """Soft and hard limits of open files; ``None`` on Windows, which has no such limits."""
    platform: str = "linux"
    """``sys.platform``."""
    resources: Resources | None = None
    loopback_error: str = ""
    """Reason why a connection over 127.0.0.1 failed; empty if it succeeded."""
    hostname_error: str = ""
    """Reason why this host's name can't be resolved; empty if it can."""
    port_error: str = ""
    """Reason why this host can't listen on ``MASTER_PORT``; empty if it can, or if ``MASTER_ADDR`` is another host."""


def read() -> Readings:
    """Read the values of this machine."""
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    try:
        folder = tempfile.gettempdir()
        temporary = folder, shutil.disk_usage(folder).free
    except OSError as error:  # all disks are full, for example
        temporary = str(error), 0
    return Readings(
        torch=in_process(_TORCH),
        python=sys.version_info[:3],
        conflicts=_conflicts(),
        other_distribution=other_distribution(),
        extras=missing_of_extras(_requirements(NAME)),
        torch_requirements=_requirements("torch"),
        environ=dict(os.environ),
        shm=None if shm is None else (shm.total, shm.free),
        temporary=temporary,
        descriptors=_descriptors(),
        platform=sys.platform,
        resources=available(num_gpus=0),
        loopback_error=_loopback_error(),
        hostname_error=_hostname_error(),
        port_error=_port_error(os.environ),
    )


def in_process(code: str) -> Imported:
    """Run ``code`` in another Python process. Its last line of output is parsed as JSON."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Imported(None, f"did not end within {IMPORT_TIMEOUT_S:.0f} seconds")
    if done.returncode < 0:
        return Imported(None, f"killed by signal {-done.returncode}")
    try:
        return Imported(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return Imported(None, lines[-1] if lines else f"ended with status {done.returncode}")


def _conflicts() -> tuple[str, ...]:
    """Return the conflicts that ``pip check`` reports; empty without a conflict, or if pip is missing or slow."""
    command = [sys.executable, "-m", "pip", "check", "--disable-pip-version-check"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False)
        return tuple(done.stdout.splitlines()) if done.returncode else ()
    return ()


def other_distribution() -> str:
    for found in importlib.metadata.distributions(name="trainloop"):
        if "trainloop/__init__.py" in map(str, found.files or ()):
            return f"trainloop {found.version} in {found.locate_file('')}"
    return ""


def missing_of_extras(requirements: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the distributions that are not installed, for each extra that is intended for users."""
    needs: dict[str, list[str]] = {}
    for requirement in requirements:
        extra = re.search(r"""extra == ['"]([\w-]+)['"]""", requirement)
        if extra and extra[1] not in OF_THE_PROJECT:
            needs.setdefault(extra[1], []).append(requirement)

    def names_of(extra: str) -> Iterator[str]:
        for requirement in needs[extra]:
            inner = re.match(rf"{NAME}\[([\w-]+)\]", requirement)
            yield from names_of(inner[1]) if inner else [_NAME.split(requirement, maxsplit=1)[0]]

    return {extra: tuple(name for name in names_of(extra) if not _is_installed(name)) for extra in needs}


def _requirements(name: str) -> tuple[str, ...]:
    try:
        return tuple(importlib.metadata.requires(name) or ())
    except importlib.metadata.PackageNotFoundError:
        return ()


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _descriptors() -> tuple[int, int] | None:
    if resource is None:
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _loopback_error() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        return str(error)
    return ""


def _hostname_error() -> str:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError as error:
        return f"{socket.gethostname()}: {error}"
    return ""


def _port_error(environ: Mapping[str, str]) -> str:
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if address not in ("localhost", "127.0.0.1", socket.gethostname()) or not port:
        return ""
    if not port.isdecimal() or int(port) > 65535:
        return "is not a port"
    try:
        with socket.create_server((address, int(port))):
            return ""
    except OSError as error:
        return f"can't be used here ({str(error.strerror).partition(' (')[0]})"
