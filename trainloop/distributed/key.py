"""The run's key, by which ranks verify who sent bytes: passed at a start, in rank 0's memory, or in ``TRAINLOOP_KEY``.

Ranks that :func:`trainloop._launch.launch` starts on one host receive a random key with their other arguments, through
a pipe that no other user can read. Other ranks of one host, for instance torchrun's, read it from rank 0's memory,
through a descriptor that only the same user can open. Ranks on several hosts have a key if ``TRAINLOOP_KEY`` is set:
to the key itself, or to the path of a file that all of them can read.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Mapping

from trainloop._support.platform import user_id
from trainloop.errors import ConfigurationError

KEY_VARIABLE = "TRAINLOOP_KEY"
_LEAST = 32  # characters: 128 bits if they are hexadecimal
_ADVICE = 'Create one with: python -c "import secrets; print(secrets.token_hex(32))"'

_of_this_run: bytes | None = None


def new_key() -> bytes:
    """Return a random key."""
    return secrets.token_bytes(32)


def set_run_key(key: bytes | None) -> None:
    """Set this process's key; call it once, before its process group exists."""
    global _of_this_run
    _of_this_run = key


def run_key() -> bytes | None:
    """Return this process's key: the key that was set, else the environment's key, else ``None``."""
    return _of_this_run if _of_this_run is not None else key_from_environment()


def key_from_environment(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """Return the key in ``TRAINLOOP_KEY``, or in the file that the variable names; ``None`` if the variable is not set.

    Raises
    ------
    ConfigurationError
        If the key is too short, or if its file is missing or other users can read or write it.
    """
    given = environ.get(KEY_VARIABLE, "").strip()
    if not given:
        return None
    where = f"{KEY_VARIABLE} is"
    if given.startswith(("/", "~", ".")):
        where = f"{KEY_VARIABLE}={given!r}: the file holds"
        given = _read_key_file(given)
    if len(given) < _LEAST:
        raise ConfigurationError(
            f"{where} a key of {len(given)} characters, but a key must have {_LEAST} or more, and be the same on all "
            f"hosts. {_ADVICE}."
        )
    return hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()


def _read_key_file(path: str) -> str:
    try:
        with open(os.path.expanduser(path), "rb") as file:
            found = os.fstat(file.fileno())
            data = file.read(1 << 16)
    except OSError as error:
        raise ConfigurationError(
            f"{KEY_VARIABLE}={path!r}: the file can't be read ({error.strerror}). Set it to a file that every rank "
            f"can read, or to the key itself. {_ADVICE}."
        ) from None
    own = user_id()
    if own is not None and (found.st_uid not in (own, 0) or stat.S_IMODE(found.st_mode) & 0o077):
        raise ConfigurationError(
            f"{KEY_VARIABLE}={path!r}: the file is owned by user {found.st_uid} with mode "
            f"{stat.S_IMODE(found.st_mode):o}, so others may read or change the key. Make yourself the owner, and run: "
            f"chmod 600 {path}"
        )
    return data.decode("utf-8", "surrogateescape").strip()


class SharedKey:
    """A key in an unnamed file, for the processes of one user on one host.

    The file's path is not secret: a process of another user can't open the file, and can't replace it, since owner and
    name are checked.
    """

    _FILE_NAME = "trainloop-key"

    def __init__(self) -> None:
        self.key = new_key()
        self._fd = os.memfd_create(self._FILE_NAME) if hasattr(os, "memfd_create") else -1
        if self._fd >= 0:
            os.write(self._fd, self.key)

    @property
    def place(self) -> tuple[int, int]:
        """Process ID and descriptor."""
        return os.getpid(), self._fd

    def close(self) -> None:
        """Close the file; processes that have opened it keep the key."""
        if self._fd >= 0:
            os.close(self._fd)

    @classmethod
    def key_at(cls, place: tuple[int, int]) -> bytes | None:
        """Return the key at another process's :attr:`place`; ``None`` if it can't be read, as on another host."""
        path = f"/proc/{place[0]}/fd/{place[1]}"
        try:
            if os.readlink(path) != f"/memfd:{cls._FILE_NAME} (deleted)":
                return None
            with open(path, "rb", buffering=0) as file:
                return file.read() if os.fstat(file.fileno()).st_uid == user_id() else None
        except OSError:
            return None
