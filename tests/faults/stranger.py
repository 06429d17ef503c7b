"""A process of another user on the same host, against PyTorch's Gloo. Standard library only; see test_stranger.py.

It watches the kernel's table of sockets for listeners that were not there before, connects to them before the ranks do
(8 bytes: the number of the pair), and answers what it is asked in Gloo's plain protocol: with a pickle that writes a
file, in whatever form the length that is asked for allows.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # socket asks for it by name
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import time
from pathlib import Path

PREAMBLE = struct.Struct("<QI4xQQQQ")  # bytes in all, operation, slot, offset, length, offset over there
SEND, SEND_READY, RECV_READY = 1, 2, 3


class Trap:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (Path(self.path),)


def listeners() -> set[int]:
    found = set()
    with open("/proc/net/tcp") as table:
        next(table)
        for line in table:
            fields = line.split()
            if fields[3] == "0A":
                found.add(int(fields[1].split(":")[1], 16))
    return found


def answers(poison: bytes, prefix: bytes, length: int) -> bytes:
    """So many bytes that look like what a rank would send."""
    body = prefix + poison
    if length == 8:  # a size
        return struct.pack("<q", len(body))
    if length == 32:  # a nonce, and whether there is a key
        return os.urandom(31) + b"\0"
    if length == 1032:  # an object's size, and its beginning
        return (struct.pack("<q", len(body)) + body).ljust(length, b"\0")
    if length > 90 + len(poison):  # a message's head, and its body
        head = struct.pack("<4sBBIQQ", b"tlx1", 2, 2, 0, 0, len(poison)) + bytes(64)
        return (head + poison).ljust(length, b"\0")
    return body[:length].ljust(length, b"\0")


def main() -> None:
    trap, seconds, uid = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    prefix = bytes.fromhex(sys.argv[4])
    most = int(sys.argv[5])  # listeners to connect to
    # Here, with all imported: another user may not be able to read this interpreter's files.
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    poison = pickle.dumps(Trap(trap))
    before, connected, asked = listeners(), 0, 0
    selector = selectors.DefaultSelector()
    print("watches", flush=True)
    over: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: over.append(1))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not over:
        for port in listeners() - before:
            before.add(port)
            most -= 1
            if most < 0:
                continue
            for pair in range(3):
                with contextlib.suppress(OSError):
                    line = socket.create_connection(("127.0.0.1", port), timeout=1)
                    line.sendall(struct.pack("<q", pair))
                    selector.register(line, selectors.EVENT_READ, bytearray())
                    connected += 1
        for key, _ in selector.select(0.01):
            line, data = key.fileobj, key.data
            try:
                came = line.recv(1 << 20)  # type: ignore[union-attr]
            except OSError:
                came = b""
            if not came:
                selector.unregister(line)
                line.close()  # type: ignore[union-attr]
                continue
            data += came
            while len(data) >= PREAMBLE.size:
                size, operation, slot, _, length, _ = PREAMBLE.unpack_from(data)
                if len(data) < size or size < PREAMBLE.size:
                    break
                del data[:size]
                asked += 1
                if operation == RECV_READY and length < 1 << 24:
                    answer = answers(poison, prefix, length)
                    reply = PREAMBLE.pack(PREAMBLE.size + length, SEND, slot, 0, length, 0) + answer
                elif operation == SEND_READY:
                    reply = PREAMBLE.pack(PREAMBLE.size, RECV_READY, slot, 0, length, 0)
                else:
                    continue
                with contextlib.suppress(OSError):
                    line.sendall(reply)  # type: ignore[union-attr]
    print(connected, asked, flush=True)


assert encodings.idna

if __name__ == "__main__":
    main()
