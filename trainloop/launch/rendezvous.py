"""Hosts of one run meet at an address, and tell each other when one of them fails.

The launching process of node 0 listens at the rendezvous point, on that interface only; those of the other nodes
connect to it and stay connected for as long as the run lasts. If they share a key, each proves that it has it, and
signs its messages (:mod:`trainloop.launch.lines`). Ranks don't use these connections: they get the address of a store,
on the same interface, and what they exchange goes over Gloo or NCCL.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any

from trainloop.distributed.key import KEY_VARIABLE
from trainloop.errors import ConfigurationError
from trainloop.launch.addresses import interface_of, listener_at, rendezvous_point
from trainloop.launch.failures import LOST_HOST, Failure
from trainloop.launch.lines import Line, NoProof

__all__ = ["Rendezvous", "rendezvous_point"]

RENDEZVOUS_WAIT_S = 600.0
"""The longest time that hosts wait for each other at the start; a shorter time-out of the run counts."""

_BEAT_S = 1.0
_ANSWER_S = 5.0  # for a new connection's first message
_MOST_STRANGERS = 64  # at a time
_MOST_TOLD = 20
SILENCE_S = 15.0
"""A host that is silent for so long is lost: its link was cut, or it is down."""


class Rendezvous:
    """This host's part in a run of several; a context manager.

    Parameters
    ----------
    point : (str, int)
        Where node 0 listens.
    node_rank, num_nodes, ranks_per_node : int
        This node's place; the last two must be the same everywhere.
    wait_s : float
        How long to wait for all to come.
    key : bytes, optional
        A secret that all hosts share, and prove to have. Without one, whoever claims to be a node is believed.
    look : callable, optional
        Called now and then while this host waits; may raise.

    Raises
    ------
    ConfigurationError
        If they don't all come in time, or contradict each other.
    """

    def __init__(
        self,
        point: tuple[str, int],
        *,
        node_rank: int,
        num_nodes: int,
        ranks_per_node: int,
        wait_s: float,
        key: bytes | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._key, self._look = key, look
        self._me, self._num_nodes, self._ranks_per_node = node_rank, num_nodes, ranks_per_node
        self._point, self._wait_s = f"{point[0]}:{point[1]}", wait_s
        self._peers: dict[int, Line] = {}
        self._lock = threading.Lock()
        self._failures: list[Failure] = []
        self._all_came = False
        self._strangers = 0
        self._over = threading.Event()
        self.done_since: float | None = None
        """Time of the first message that another host's ranks were done (monotonic clock)."""
        self.store_listener: socket.socket | None = None
        """Node 0 only: where the ranks' store is to listen."""
        try:
            self.store_address = self._gather(point) if node_rank == 0 else self._come(point)
        except BaseException:
            self._close()
            raise
        # Gloo takes the interface of the host's name, which often is loopback or the wrong network.
        self.interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(next(iter(self._peers.values())).here)
        """Name of the network interface to the other hosts; ``None`` if unknown."""
        self._thread = threading.Thread(target=self._listen, name="trainloop-hosts", daemon=True)
        self._thread.start()

    # -- coming together -------------------------------------------------------------------------------------------

    def _gather(self, point: tuple[str, int]) -> tuple[str, int]:
        deadline = time.monotonic() + self._wait_s
        with listener_at(*point) as listener, self._reception() as receive:
            listener.settimeout(0.1)
            while missing := sorted(set(range(1, self._num_nodes)) - set(self._peers)):
                self._look()
                if time.monotonic() > deadline:
                    came = f", came: {', '.join(map(str, sorted(self._peers)))}" if self._peers else ""
                    raise ConfigurationError(
                        f"node 0 of {self._num_nodes} waited {self._wait_s:g} s at {self._point}; missing: node_rank "
                        f"{', '.join(map(str, missing))}{came}. Start the script there with the same rendezvous point, "
                        "and see that no firewall is between."
                    )
                with contextlib.suppress(TimeoutError, ConnectionAbortedError):
                    receive(listener.accept()[0])
        # On the interface by which the others came, and there only.
        here = next(iter(self._peers.values())).here
        self.store_listener = listener_at(here, 0)
        address: tuple[str, int] = self.store_listener.getsockname()[:2]
        self._send_all({"store": address})  # one that has gone is lost, as in the run
        return address

    @contextlib.contextmanager
    def _reception(self) -> Iterator[Callable[[socket.socket], None]]:
        """Handle a new connection in a thread of its own, so that a silent one keeps nobody waiting."""
        threads: list[tuple[threading.Thread, Line]] = []

        def receive(connection: socket.socket) -> None:
            threads[:] = [(thread, line) for thread, line in threads if thread.is_alive()]
            if len(threads) >= _MOST_STRANGERS:
                connection.close()
                return
            line = Line(connection)
            thread = threading.Thread(target=self._admit, args=(line,), name="trainloop-host", daemon=True)
            threads.append((thread, line))
            thread.start()

        try:
            yield receive
        finally:
            with self._lock:
                self._all_came = True
                # Connections that have not proved themselves by now are not waited for.
                strangers = [(thread, line) for thread, line in threads if line not in self._peers.values()]
            for thread, line in strangers:
                line.hang_up()
                thread.join()

    def _admit(self, line: Line) -> None:
        """Take the line of a host of this run; close that of anybody else."""
        proved = False
        try:
            hello = line.receive(_ANSWER_S)
            if ("nonce" in hello) != (self._key is not None):
                has, has_not = (0, hello["node_rank"]) if self._key is not None else (hello["node_rank"], 0)
                text = (
                    f"node {has} has a key ({KEY_VARIABLE}), node {has_not} has none: set it to the same on all hosts."
                )
                line.send({"refused": text})
                raise NoProof("it has no key")
            line.challenge(hello, self._key, _ANSWER_S)
            proved = True
            with self._lock:
                refusal = self._refusal(hello)
                if not refusal and not self._all_came:
                    node = int(hello["node_rank"])
                    if node in self._peers:
                        self._peers[node].close()
                    self._peers[node] = line
                    return
            line.send({"refused": refusal})
        # It may be anybody, and may send anything.
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            if not proved:
                self._tell_of_stranger(line, error)
        line.close()

    def _tell_of_stranger(self, line: Line, error: Exception) -> None:
        with self._lock:
            if self._key is None or self._all_came or self._strangers > _MOST_TOLD:
                return
            self._strangers += 1
            more = " No more will be told of." if self._strangers > _MOST_TOLD else ""
        print(
            f"node 0 of {self._num_nodes}: {line.there} connected to {self._point} without proof that it has this "
            f"run's key, and was sent away ({str(error)[:200]}). Where it is a host of this run, set {KEY_VARIABLE} to "
            f"the same there. Waiting goes on.{more}",
            file=sys.stderr,
            flush=True,
        )

    def _refusal(self, hello: dict[str, Any]) -> str:
        node = int(hello["node_rank"])
        if (hello.get("num_nodes"), hello.get("ranks")) != (self._num_nodes, self._ranks_per_node):
            return (
                f"node {node} has num_nodes={hello.get('num_nodes')} and {hello.get('ranks')} ranks, node 0 has "
                f"num_nodes={self._num_nodes} and {self._ranks_per_node} ranks: they must be the same on all nodes."
            )
        # One that was ended while others had not come yet may come again.
        taken = node in self._peers and not self._peers[node].is_over()
        if taken or node not in range(1, self._num_nodes):
            return f"node_rank={node} was taken by another host: give each host its own, 0 to num_nodes - 1."
        return ""

    def _come(self, point: tuple[str, int]) -> tuple[str, int]:
        deadline = time.monotonic() + self._wait_s
        who = f"node {self._me} of {self._num_nodes}"
        reason: object = "no answer"
        while (left := deadline - time.monotonic()) > 0:
            self._look()
            try:
                line = Line(socket.create_connection(point, timeout=min(left, 5.0)))
            except OSError as error:
                reason = error
                # Node 0 may come later: it is started by hand, or by a scheduler.
                time.sleep(min(0.2, left))
                continue
            self._peers[0] = line
            answer: dict[str, Any] = {}
            hello = {"node_rank": self._me, "num_nodes": self._num_nodes, "ranks": self._ranks_per_node}
            try:
                wait_s = max(deadline - time.monotonic(), 0.1)
                answer = line.introduce(hello, self._key, wait_s, self._look)
            except NoProof:
                raise ConfigurationError(
                    f"{who}: what answers at {self._point} did not prove that it has this run's key. Set "
                    f"{KEY_VARIABLE} to the same on all hosts. Where it is, another program listens there: choose "
                    "another port."
                ) from None
            except (OSError, ValueError):
                pass
            if "refused" in answer:
                raise ConfigurationError(str(answer["refused"])[:1000])
            with contextlib.suppress(KeyError, TypeError, ValueError):
                host, port = answer["store"]
                return str(host), int(port)
            raise ConfigurationError(
                f"{who} reached node 0 at {self._point}, which then went away or waited in vain for the other nodes "
                f"({self._wait_s:g} s): see the error of node 0."
            )
        raise ConfigurationError(
            f"{who} tried for {self._wait_s:g} s to reach node 0 at {self._point}: {reason}. Start the script with "
            "node_rank=0 on the host that has this address, with the same port, and see that no firewall is between."
        )

    # -- during the run --------------------------------------------------------------------------------------------

    def failure(self) -> Failure | None:
        """The failure of another host, if there was one."""
        return self._failures[0] if self._failures else None

    def wait_for_failure(self, seconds: float) -> Failure | None:
        """The failure of another host, after waiting for it for a while."""
        deadline = time.monotonic() + seconds
        while not self._failures and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.failure()

    def tell(self, failure: Failure) -> None:
        """Tell all other hosts of this host's failure."""
        self._send_all({"failed": json.loads(failure.to_json())})

    def _send_all(self, message: dict[str, Any], but: int = -1) -> None:
        with self._lock:
            for node, peer in self._peers.items():
                if node != but:
                    with contextlib.suppress(OSError):
                        peer.send(message)

    def _listen(self) -> None:
        heard = dict.fromkeys(self._peers, time.monotonic())
        open_lines = dict(self._peers)
        beat = time.monotonic()
        while not self._over.wait(0) and open_lines:
            with contextlib.suppress(OSError, ValueError):  # ValueError: closed by close()
                # select.select would refuse descriptors above 1023.
                ready = wait([line.fileno() for line in open_lines.values()], max(0.0, beat - time.monotonic()))
                for node in [n for n, line in open_lines.items() if line.fileno() in ready]:
                    heard[node] = time.monotonic()
                    if not self._hear(node, open_lines[node]):
                        del open_lines[node]
            if time.monotonic() >= beat:  # not after each message, or two hosts would answer each other without end
                self._send_all({"alive": self._me})
                beat = time.monotonic() + _BEAT_S
            for node in [n for n in open_lines if time.monotonic() - heard[n] > SILENCE_S]:
                self._lost(node, f"nothing was heard of it for {SILENCE_S:g} s: the link was cut, or the host is down")
                del open_lines[node]

    def _hear(self, node: int, line: Line) -> bool:
        """Process the messages that came; returns whether more may come."""
        try:
            messages = line.read()
        except (OSError, ValueError) as error:
            self._lost(node, f"the connection to it broke ({error})")
            return False
        for message in messages:
            if "failed" in message:
                try:
                    self._failures.append(Failure(**message["failed"]))
                except TypeError:
                    self._lost(node, "it told of a failure in a form that is none")
                    return False
                if self._me == 0:
                    self._send_all(message, but=node)
                return False
            if "done" in message:
                self.done_since = self.done_since or time.monotonic()
                return False
        return True

    def _lost(self, node: int, why: str) -> None:
        failure = Failure(
            rank=node * self._ranks_per_node,
            time_ns=time.monotonic_ns(),
            type=LOST_HOST,
            message=f"node {node} of {self._num_nodes} was lost: {why}",
        )
        self._failures.append(failure)
        if self._me == 0:
            self._send_all({"failed": json.loads(failure.to_json())}, but=node)

    # -- the end ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._send_all({"done": self._me})
        self._over.set()
        self._thread.join()
        self._close()

    def _close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        if self.store_listener is not None:
            self.store_listener.close()
