"""Messages between hosts: JSON objects, one a line, and a handshake for two hosts that share a key.

With a key, the connecting host sends its name and a nonce; the listening one answers with its own nonce and a proof.
Both derive this connection's key from all of that and the shared key. A proof is an HMAC with that key. So is the end
of each later line, over its direction and number, which reveals lines that a third party makes, repeats or alters.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

__all__ = ["Line", "NoProof"]

_LOOK_S = 0.5
_LONGEST = 1 << 24
_LONGEST_OF_STRANGERS = 1 << 12
_CAME, _WAS_THERE = b"came", b"was there"


class NoProof(ConnectionError):
    """The other side did not prove that it has the key."""


class Line:
    """A connection to another host, not to be trusted until :meth:`introduce` or :meth:`challenge` has returned.

    Parameters
    ----------
    connection : socket.socket
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.settimeout(5.0)
        self._rest = b""
        self._unread: list[dict[str, Any]] = []
        # A stranger must not make this process hold more than that.
        self._longest = _LONGEST_OF_STRANGERS
        self._key: bytes | None = None
        self._ways = (b"", b"")
        self._sent = self._read = 0
        self.here: str = connection.getsockname()[0]
        """This host's address on the way to the other."""
        self.there = "an address that is unknown, since it has hung up"
        """The other's address and port."""
        with contextlib.suppress(OSError):
            self.there = "{}:{}".format(*connection.getpeername()[:2])

    def fileno(self) -> int:
        return self._socket.fileno()

    # -- who is it -------------------------------------------------------------------------------------------------

    def introduce(
        self,
        hello: dict[str, Any],
        key: bytes | None,
        timeout_s: float,
        look: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Say who this host is; returns the other's answer once it has proved itself.

        ``look`` is called now and then in the meantime, and may raise.

        Raises
        ------
        NoProof
            If it has another key, or none.
        OSError, ValueError
            If it went away, was silent for too long, or sent something else than a message.
        """
        if key is None:
            self.send(hello)
            self._longest = _LONGEST
            return self.receive(timeout_s, look)
        hello = {**hello, "nonce": secrets.token_hex(32)}
        self.send(hello)
        answer = self.receive(timeout_s)
        if "refused" in answer:
            return answer
        own = self._key_of_connection(key, hello, answer.get("nonce"))
        if not _is_proof(answer.get("proof"), own, _WAS_THERE):
            raise NoProof
        self.send({"proof": _mac(own, _CAME)})
        self._secure(own, sends=_CAME, reads=_WAS_THERE)
        return self.receive(timeout_s, look)

    def challenge(self, hello: dict[str, Any], key: bytes | None, timeout_s: float) -> None:
        """Let the host that sent ``hello`` prove that it has the key; does nothing without a key.

        Raises
        ------
        NoProof, OSError, ValueError
            If it does not.
        """
        if key is None:
            self._longest = _LONGEST
            return
        nonce = secrets.token_hex(32)
        own = self._key_of_connection(key, hello, nonce)
        self.send({"nonce": nonce, "proof": _mac(own, _WAS_THERE)})
        if not _is_proof(self.receive(timeout_s).get("proof"), own, _CAME):
            raise NoProof
        self._secure(own, sends=_WAS_THERE, reads=_CAME)

    @staticmethod
    def _key_of_connection(key: bytes, hello: dict[str, Any], nonce: Any) -> bytes:
        # All that was said so far: a third party that changes a word of it makes another key.
        said = json.dumps(["trainloop hosts 1", hello, nonce], sort_keys=True)
        return hmac.new(key, said.encode(), hashlib.sha256).digest()

    def _secure(self, key: bytes, *, sends: bytes, reads: bytes) -> None:
        self._key, self._ways, self._longest = key, (sends, reads), _LONGEST

    # -- messages --------------------------------------------------------------------------------------------------

    def send(self, message: dict[str, Any]) -> None:
        """Send a message."""
        data = json.dumps(message).encode()
        if self._key is not None:
            self._sent += 1
            data += b" " + _mac(self._key, self._ways[0], self._sent, data).encode()
        self._socket.sendall(data + b"\n")

    def read(self) -> list[dict[str, Any]]:
        """The messages that have arrived.

        Raises
        ------
        OSError
            If the connection has ended, or, with a key, a line is not the other's next one (:class:`NoProof`).
        ValueError
            If it is no message.
        """
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "closed by the other side")
        *lines, self._rest = (self._rest + data).split(b"\n")
        # Before the line ends, or it could grow for as long as somebody sends.
        if len(self._rest) > self._longest:
            raise ValueError(f"a line of more than {self._longest} bytes: this is no trainloop host")
        try:
            messages = [json.loads(self._without_mac(line)) for line in lines]
        except RecursionError:
            raise ValueError("lists in lists without an end: this is no trainloop host") from None
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("something that is no message: this is no trainloop host")
        unread, self._unread = self._unread, []
        return unread + messages

    def _without_mac(self, line: bytes) -> bytes:
        if self._key is None:
            return line
        self._read += 1
        data, _, mac = line.rpartition(b" ")
        if not hmac.compare_digest(mac, _mac(self._key, self._ways[1], self._read, data).encode()):
            raise NoProof("a line that does not bear this run's key")
        return data

    def receive(self, timeout_s: float, look: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """The next message; ``look`` is called now and then until it comes."""
        deadline = time.monotonic() + timeout_s
        try:
            while not self._unread:
                look()
                left = deadline - time.monotonic()
                self._socket.settimeout(max(min(left, _LOOK_S), 1e-3))
                try:
                    self._unread = self.read()
                except TimeoutError:
                    if left < _LOOK_S:
                        raise
        finally:
            self._socket.settimeout(5.0)
        return self._unread.pop(0)

    def is_over(self) -> bool:
        """Whether the other side has gone; of a line on which it has nothing to say."""
        try:
            return bool(wait([self._socket], 0)) and not self._socket.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def hang_up(self) -> None:
        """End the connection; a thread that reads from it hears of that at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def _mac(key: bytes, way: bytes, number: int = 0, data: bytes = b"") -> str:
    return hmac.new(key, b"%s %d %s" % (way, number, data), hashlib.sha256).hexdigest()


def _is_proof(given: Any, key: bytes, way: bytes) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(), _mac(key, way).encode())
