"""Addresses: the rendezvous point of a run's hosts, and the interface that a socket listens on."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from trainloop.errors import ConfigurationError


def rendezvous_point(init_method: str | None, environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return host and port from ``tcp://host:port``, or from ``MASTER_ADDR`` and ``MASTER_PORT``.

    Raises
    ------
    ConfigurationError
        If neither is given, or if it can't be parsed.
    """
    if init_method is None or init_method == "env://":
        host, port_text = environ.get("MASTER_ADDR", "").strip("[]"), environ.get("MASTER_PORT", "")
        if not host or not port_text:
            raise ConfigurationError(
                f"several nodes need a rendezvous point, but MASTER_ADDR={host!r} and MASTER_PORT={port_text!r} do not "
                "name one. Set both on every node to an address and a free port of node 0, or pass "
                "init_method='tcp://host:port'."
            )
        given = f"MASTER_ADDR={host} and MASTER_PORT={port_text}"
    else:
        given = f"init_method={init_method!r}"
        host, port_text = "", ""
        with contextlib.suppress(ValueError):  # an unpaired bracket, or a port above 65535
            parts = urlsplit(init_method)
            if parts.scheme == "tcp":
                host, port_text = parts.hostname or "", str(parts.port or "")
    if not host or not port_text.isdigit() or not 0 < int(port_text) < 65536:
        raise ConfigurationError(
            f"{given}: must name a host and a port (1 to 65535) on node 0, such as tcp://10.0.0.1:29500."
        )
    return host, int(port_text)


def listener_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens on this address only."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigurationError(
            f"node 0 can't listen at {host}:{port}: {error}. Use an address of this host."
        ) from None
    if ipaddress.ip_address(address[0]).is_loopback and host not in ("localhost", address[0]):
        # Some systems resolve their own name to a loopback address, which other hosts can't reach; then the intended
        # interface is unknown.
        address = ("::" if family == socket.AF_INET6 else "0.0.0.0", *address[1:])
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        advice = "Choose another port." if error.errno == errno.EADDRINUSE else "Use an address of this host."
        raise ConfigurationError(f"node 0 can't listen at {host}:{port}: {error.strerror}. {advice}") from None
    return listener


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has this address."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == address for a in addresses):
            return name
    return None


def local_address(host: str, port: int) -> str:
    """Return this host's address on the route to another host."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        local: str = probe.getsockname()[0]
    return local
