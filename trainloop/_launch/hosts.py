"""The hosts of one run: they connect to a ``TCPStore``, check its entries, and report failures and progress there.

The launching process of node 0 runs the store, on the interface of the rendezvous point only. Each host writes one
entry, with its arguments, a heartbeat count, and the state of its ranks (done or failed). The other hosts read only
node 0's entry. Node 0 reads all entries, and copies into its own the information that all hosts need. With a key, each
entry is signed. The ranks use the same store, under a prefix for each start.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trainloop._launch.failures import LOST_HOST, Failure
from trainloop._support.signals import signals
from trainloop.distributed.addresses import interface_of, listener_at, local_address, rendezvous_point
from trainloop.distributed.key import KEY_VARIABLE, key_from_environment
from trainloop.errors import ConfigurationError

logger = logging.getLogger("trainloop")

RENDEZVOUS_WAIT_S = 600.0
"""Seconds that hosts wait for each other at the start, unless the run has a shorter time-out."""

SILENCE_S = 15.0
"""Seconds without a heartbeat after which a host counts as lost: its link was cut, or it is down."""

_MISSED_S = 2.5  # the same limit after a rank has lost its connection, to find the lost host soon
_POLL_S = 0.25
_LEAVE_S = 5.0  # how long node 0 keeps the store for hosts that have not left yet
_CONNECT_S = 15.0
_MEET_S = 0.1


class _NoProofError(ConnectionError):
    """An entry is not signed with this run's key."""


class _Entries:
    """Entries in a store: one per host, signed if the run has a key."""

    def __init__(self, store: dist.TCPStore, key: bytes | None) -> None:
        self._store, self._key = store, key
        self.session = ""
        """Node 0's identifier; empty until known. Other hosts sign it, too, so that entries of earlier runs are
        rejected."""

    def put(self, node: int, entry: dict[str, Any]) -> None:
        data = json.dumps(entry)
        self._store.set(f"host/{node}", f"{data} {self._signature(node, data)}")

    def get(self, node: int) -> dict[str, Any] | None:
        """Return the entry of a host; ``None`` if the host has not written an entry yet.

        Raises
        ------
        _NoProofError
            If the entry is not signed with the key of this run.
        ValueError
            If the entry is malformed.
        """
        name = f"host/{node}"
        if not self._store.check([name]):
            return None
        data, _, signature = self._store.get(name).decode(errors="replace").rpartition(" ")
        if bool(signature) != (self._key is not None):
            raise _NoProofError("has no key" if self._key is not None else "has a key")
        if not hmac.compare_digest(signature, self._signature(node, data)):
            raise _NoProofError("its entry does not carry this run's key")
        entry = json.loads(data)
        if not isinstance(entry, dict) or any(type(entry.get(name)) is not kind for name, kind in _KINDS.items()):
            raise ValueError("its entry is malformed")
        return entry

    def refuse(self, node: int, facts: dict[str, Any]) -> None:
        """Record, for node 0 to print, that this host could not join with these arguments."""
        self._store.set(f"refused/{node}", json.dumps(facts))

    def refused(self, node: int) -> dict[str, Any] | None:
        """Return the arguments of a host that could not join, from its unsigned note; ``None`` if it left no note."""
        name = f"refused/{node}"
        if not self._store.check([name]):
            return None
        with contextlib.suppress(ValueError):
            facts = json.loads(self._store.get(name))
            if isinstance(facts, dict):
                return {key: value for key, value in facts.items() if isinstance(value, int)}
        return {}

    def _signature(self, node: int, data: str) -> str:
        if self._key is None:
            return ""
        session = self.session if node else ""
        return hmac.new(self._key, f"trainloop hosts 2 {session} {node} {data}".encode(), hashlib.sha256).hexdigest()


_KINDS = {
    "id": str,
    "facts": dict,
    "address": str,
    "count": int,
    "done": int,
    "failed": list,
    "left": str,
}


class Hosts:
    """This host's connection to the other hosts of a run; a context manager.

    Parameters
    ----------
    point : (str, int)
        Host and port of node 0.
    node_rank, num_nodes, ranks_per_node : int
        Index of this host, number of hosts, and ranks on each; the last two must be the same on all hosts.
    wait_s : float
        Seconds to wait for all hosts.
    key : bytes, optional
        Secret that all hosts share. Without a key, every entry is accepted.

    Raises
    ------
    ConfigurationError
        If not all hosts connect in time, or if they contradict each other.
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
    ) -> None:
        self._me, self._num_nodes = node_rank, num_nodes
        self._ranks_per_node = ranks_per_node
        self.store_address = point
        """Host and port of the store, which the ranks use, too."""
        self._name, self._wait_s = f"{point[0]}:{point[1]}", wait_s
        self._key = key
        self._entry: dict[str, Any] = {
            "id": secrets.token_hex(16),
            "facts": {"num_nodes": num_nodes, "ranks": ranks_per_node},
            "address": "",
            "count": 0,  # increases while the host is alive
            "done": 0,  # 1 once its ranks are done
            "failed": [],  # node, failure
            "left": "",  # reason
        }
        self._others: dict[int, dict[str, Any]] = {}
        self._seen_at: dict[int, float] = {}
        self._losses: dict[int, str] = {}
        self._refused: dict[int, str] = {}
        self.done_since: float | None = None
        """Time (monotonic clock) at which another host's ranks were first seen to be done; None before that."""
        self._wake, self._leaving = threading.Event(), threading.Event()
        with signals() as received:
            self._check_signals: Callable[[], None] = received.raise_if_any
            self._entries = self._join() if node_rank else self._gather()
        other = self._others[1]["address"] if node_rank == 0 else point[0]
        # By default, Gloo uses the interface to which the host's name resolves: often loopback or the wrong network.
        self.interface: str | None = os.environ.get("GLOO_SOCKET_IFNAME")
        """Name of the network interface to the other hosts; ``None`` if unknown."""
        if not self.interface:
            with contextlib.suppress(OSError):  # this host may not know the address, for example behind NAT
                self.interface = interface_of(local_address(other, point[1]))
        self._seen_at = dict.fromkeys(self._others, time.monotonic())
        self._thread = threading.Thread(target=self._watch, name="trainloop-hosts", daemon=True)
        self._thread.start()

    # -- rendezvous ------------------------------------------------------------------------------------------------

    def _gather(self) -> _Entries:
        """On node 0, open the store and wait until each host has an entry."""
        host, port = self.store_address
        listener = listener_at(host, port)
        store = _store_of(host, port, listener.detach())
        entries = _Entries(store, self._key)
        entries.session = self._entry["id"]
        deadline = time.monotonic() + self._wait_s
        try:
            entries.put(0, self._entry)
            while len(self._others) < self._num_nodes - 1:
                self._check_signals()
                if time.monotonic() > deadline:
                    raise ConfigurationError(self._missing())
                time.sleep(_MEET_S)
                for node in range(1, self._num_nodes):
                    self._look_for(node, entries)
        except BaseException as error:
            with contextlib.suppress(RuntimeError):
                entries.put(0, {**self._entry, "left": str(error) or type(error).__name__})
                time.sleep(4 * _MEET_S)  # for the other hosts to read
            raise
        self._entry["hosts"] = {str(node): entry["id"] for node, entry in self._others.items()}
        entries.put(0, self._entry)
        return entries

    def _look_for(self, node: int, entries: _Entries) -> None:
        """On node 0, accept the entry of another host, or print once why that host could not join."""
        # Any process can write to the store; a host's valid entry replaces a rejected one.
        with contextlib.suppress(_NoProofError, ValueError):
            entry = entries.get(node)
            if entry is not None and entry["facts"] == self._entry["facts"]:
                self._others[node] = entry
        theirs = entries.refused(node)
        if theirs is not None and node not in self._refused:
            if theirs == self._entry["facts"]:
                why = f"node {node} has a different key, or none. Set {KEY_VARIABLE} to the same secret on all hosts"
            else:
                why = self._contradiction(0, node, theirs)
            self._refused[node] = why
            logger.warning(f"node 0 of {self._num_nodes}: {why}. Still waiting.")

    def _missing(self) -> str:
        missing = sorted(set(range(1, self._num_nodes)) - set(self._others))
        connected = f". Connected: {', '.join(map(str, sorted(self._others)))}" if self._others else ""
        return (
            f"node 0 of {self._num_nodes} waited {self._wait_s:g} s at {self._name} for the other nodes. Missing: "
            f"node_rank {', '.join(map(str, missing))}{connected}. Start the script on the missing nodes with the same "
            "rendezvous point, and check that no firewall blocks the connection."
            + "".join(f" Note: {self._refused[node]}." for node in missing if node in self._refused)
        )

    def _join(self) -> _Entries:
        """On nodes other than node 0, connect to node 0's store, and wait until all hosts have an entry in it."""
        deadline = time.monotonic() + self._wait_s
        who, reason = f"node {self._me} of {self._num_nodes}", "no answer"
        while (left := deadline - time.monotonic()) > 0:
            self._check_signals()
            try:
                # Try a plain socket first: torch's store would print each failed attempt, with a stack.
                with socket.create_connection(self.store_address, timeout=min(left, 5.0)) as connection:
                    self._entry["address"] = connection.getsockname()[0]
                store = self._connected()
                if store is None:  # an earlier run may just have ended
                    socket.create_connection(self.store_address, timeout=min(left, 5.0)).close()
            except OSError as error:
                reason = str(error)
                time.sleep(min(0.2, left))  # node 0 may start later
                continue
            if store is None:
                raise ConfigurationError(
                    f"{who}: the program that listens at {self._name} is not node 0 of this run. Choose another port."
                )
            entries = _Entries(store, self._key)
            try:
                if self._is_chosen(entries, who, deadline):
                    return entries
            except RuntimeError as error:  # raised by torch's store
                if entries.session:  # otherwise this may be the store of an earlier run, which was just ending
                    raise ConfigurationError(
                        f"{who} connected to node 0 at {self._name}, which then closed the connection. See the error "
                        "on node 0."
                    ) from error
            reason = "it is busy with another run, or still ending an earlier one"
            time.sleep(0.2)
        raise ConfigurationError(
            f"{who} could not connect to node 0 at {self._name} within {self._wait_s:g} s ({reason}). Start the script "
            "with node_rank=0 on the host with this address, with the same port, and check that no firewall blocks the "
            "connection."
        )

    def _connected(self) -> dist.TCPStore | None:
        """Connect to the store in a thread, since torch waits forever for a program that listens but never answers.

        Returns
        -------
        TCPStore or None
            None if no store answers within 15 seconds.
        """
        host, port = self.store_address
        stores: list[dist.TCPStore] = []
        deadline = time.monotonic() + _CONNECT_S

        def connect() -> None:
            timeout = timedelta(seconds=_CONNECT_S)
            for _ in range(2):  # the first attempt may reach a store that is just closing; torch prints each failure
                with contextlib.suppress(RuntimeError):
                    stores.append(dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout))
                if stores or time.monotonic() > deadline:
                    return
                time.sleep(_MEET_S)

        thread = threading.Thread(target=connect, name="trainloop-connect", daemon=True)
        thread.start()
        while thread.is_alive() and time.monotonic() < deadline:
            self._check_signals()
            thread.join(0.1)
        return stores[0] if stores else None

    def _is_chosen(self, entries: _Entries, who: str, deadline: float) -> bool:
        """Write this host's entry, and wait until node 0 has accepted an entry of each host.

        Returns
        -------
        bool
            False if the store belongs to a run that has ended, or to another one: node 0 has taken no part in this one.
        """
        written = False
        while time.monotonic() < deadline:
            self._check_signals()
            try:
                first = entries.get(0)
            except _NoProofError as error:
                entries.refuse(self._me, self._entry["facts"])
                raise ConfigurationError(self._key_error(who, str(error))) from None
            except ValueError:
                first = None
            if first is not None and not written:
                if first["left"] or "hosts" in first:
                    return False
                try:
                    self._check_facts(first["facts"])
                except ConfigurationError:
                    entries.refuse(self._me, self._entry["facts"])
                    raise
                entries.session = first["id"]
                entries.put(self._me, self._entry)
                written = True
            elif first is not None and "hosts" in first:
                if first["hosts"].get(str(self._me)) != self._entry["id"]:
                    raise ConfigurationError(self._index_in_use())
                self._others[0] = first
                return True
            elif first is not None and first["left"]:
                raise ConfigurationError(f"node 0 of {self._num_nodes} has ended its run: {first['left']}")
            time.sleep(_MEET_S)
        if not written:
            return False
        raise ConfigurationError(
            f"{who} is connected to node 0 at {self._name}, but other nodes did not connect within {self._wait_s:g} s. "
            "See node 0's error."
        )

    def _key_error(self, who: str, why: str) -> str:
        if why.startswith("has"):
            keyed, keyless = (0, self._me) if why == "has a key" else (self._me, 0)
            return (
                f"node {keyed} has a key ({KEY_VARIABLE}), but node {keyless} has none: set it to the same secret on "
                "all hosts."
            )
        return (
            f"{who}: node 0 at {self._name} did not prove that it has this run's key. Set {KEY_VARIABLE} to the same "
            "secret on all hosts. If it is the same, another program listens there: choose another port."
        )

    def _check_facts(self, first: dict[str, Any]) -> None:
        if first != self._entry["facts"]:
            raise ConfigurationError(f"{self._contradiction(self._me, 0, first)}.")
        if self._me not in range(1, self._num_nodes):
            raise ConfigurationError(self._index_in_use())

    def _contradiction(self, here: int, there: int, theirs: dict[str, Any]) -> str:
        own = self._entry["facts"]
        return (
            f"node {here} has num_nodes={own['num_nodes']} (ranks per node: {own['ranks']}), but node {there} has "
            f"num_nodes={theirs.get('num_nodes')} (ranks per node: {theirs.get('ranks')}): both numbers must be the "
            "same on all nodes"
        )

    def _index_in_use(self) -> str:
        return f"node_rank={self._me} is used by another host. Give each host its own, from 0 to num_nodes - 1."

    # -- during the run --------------------------------------------------------------------------------------------

    def failure(self, silence_s: float | None = None) -> Failure | None:
        """Return the failure of another host, if there is one.

        Parameters
        ----------
        silence_s : float, optional
            Seconds after which a silent host is lost; :data:`SILENCE_S` by default.
        """
        reported = self._reported()
        if reported:
            with contextlib.suppress(TypeError):
                return replace(Failure(**reported[1]), time_ns=time.monotonic_ns())  # other hosts' clocks differ
        lost = self._lost(SILENCE_S if silence_s is None else silence_s)
        if lost is None:
            return None
        return Failure(
            rank=lost[0] * self._ranks_per_node,
            time_ns=time.monotonic_ns(),
            type=LOST_HOST,
            message=f"node {lost[0]} of {self._num_nodes} {lost[1]}",
        )

    def _reported(self) -> list[Any]:
        """Return the node and fields of another host's failure; an empty list if no host has reported one."""
        reports = (entry["failed"] for entry in self._others.values())
        return next((report for report in reports if report and report[0] != self._me), [])

    def _lost(self, silence_s: float) -> tuple[int, str] | None:
        """Return a lost host, and how it was lost; ``None`` if all are alive."""
        now = time.monotonic()
        for node, entry in self._others.items():
            silent_s = now - self._seen_at[node]
            if entry["left"]:
                if not entry["done"]:
                    return node, f"has ended its run: {entry['left']}"
                continue
            if node in self._losses:
                return node, f"was lost: {self._losses[node]}"
            if silent_s > silence_s:
                why = "the link was cut, or the host is down"
                return node, f"was lost: it sent nothing for {silent_s:.0f} s ({why})"
        node, why = self._others.get(0, {}).get("lost") or (self._me, "")
        return None if node == self._me else (int(node), str(why))

    def wait_for_failure(self, seconds: float) -> Failure | None:
        """Wait for the failure of another host, after a rank of this host has lost its connection."""
        deadline = time.monotonic() + max(seconds, _MISSED_S + _POLL_S)
        while (failure := self.failure(_MISSED_S)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return failure

    def report(self, failure: Failure) -> None:
        """Report this host's failure to all other hosts."""
        self._entry["failed"] = [self._me, asdict(failure)]
        self._wake.set()

    def leave(self, seconds: float) -> bool:
        """Report that this host's ranks are done; return True if the ranks of all hosts are done within ``seconds``."""
        self._entry["done"] = 1
        self._wake.set()
        deadline = time.monotonic() + seconds
        while not (over := self._all_done()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return over

    def _all_done(self) -> bool:
        """Return True if the ranks of all hosts are done; other hosts read this from node 0's entry."""
        if self._me:
            return bool(self._others[0].get("all done"))
        return all(entry["done"] for entry in (self._entry, *self._others.values()))

    # -- the thread that exchanges entries; during the run, only this thread uses the store -------------------------

    def _watch(self) -> None:
        leave_at = float("inf")
        while True:
            leaving = self._leaving.is_set()
            if leaving:
                leave_at = min(leave_at, time.monotonic() + _LEAVE_S)
            self._wake.clear()
            try:
                self._exchange()
            except RuntimeError as error:
                self._losses[0] = f"the connection to it failed ({str(error).splitlines()[0]})"
                return
            # Node 0 keeps the store for hosts that have not left yet.
            stays = self._me == 0 and not all(e["left"] or n in self._losses for n, e in self._others.items())
            if leaving and (not stays or time.monotonic() > leave_at):
                return
            self._wake.wait(_POLL_S)

    def _exchange(self) -> None:
        """Write this host's entry, and read the entries of other hosts."""
        self._entry["count"] += 1
        if self._me == 0 and not self._entry["failed"]:
            self._entry["failed"] = self._reported()
        own = dict(self._entry)
        if self._me == 0:
            own["lost"] = self._lost(SILENCE_S)
            own["all done"] = min(e["done"] for e in (own, *self._others.values()))
            own["some done"] = max(e["done"] for e in (own, *self._others.values()))
        self._entries.put(self._me, own)
        for node, before in self._others.items():
            if node in self._losses:
                continue
            try:
                entry = self._entries.get(node)
            except (_NoProofError, ValueError) as error:
                self._losses[node] = str(error)
                continue
            if entry is not None and entry["count"] > before["count"] and entry["id"] == before["id"]:
                self._others[node], self._seen_at[node] = entry, time.monotonic()
                if entry.get("some done", entry["done"]) and self.done_since is None:
                    self.done_since = time.monotonic()

    # -- the end ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self._entry["left"] = (
            "its work is done" if error is None else (str(error) or type(error).__name__).splitlines()[0]
        )
        self._leaving.set()
        self._wake.set()
        self._thread.join(_LEAVE_S + 1.0)  # the thread may wait for a host that is down
        del self._entries


def _store_of(host: str, port: int, listener: int) -> dist.TCPStore:
    """Return the store that listens on the socket of this file descriptor, which it then owns."""
    options: dict[str, Any] = {"timeout": timedelta(seconds=SILENCE_S), "master_listen_fd": listener}
    try:
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, **options)
    except NotImplementedError:  # in older versions of torch, only the legacy store takes a socket
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, use_libuv=False, **options)


def meet_hosts(
    init_method: str | None,
    *,
    node_rank: int,
    num_nodes: int,
    ranks_per_node: int,
    timeout_s: float,
) -> contextlib.AbstractContextManager[Hosts | None]:
    """Return a context in which this host is connected to the other hosts of a run.

    The context's value is ``None`` on a single node, and if the user passed a ``file://`` URL, through which ranks
    connect.
    """
    if num_nodes == 1 or (init_method or "").startswith("file:"):
        return contextlib.nullcontext()
    return Hosts(
        rendezvous_point(init_method),
        node_rank=node_rank,
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        wait_s=min(timeout_s, RENDEZVOUS_WAIT_S),
        key=key_from_environment(),
    )
