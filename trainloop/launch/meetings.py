"""Meetings of a run's hosts: before ranks start, before they start again, and where one host does not go on."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

from trainloop.distributed.key import key_from_environment
from trainloop.errors import ConfigurationError, WorkerFailedError
from trainloop.launch.failures import Failure
from trainloop.launch.rendezvous import FAREWELL_S, RENDEZVOUS_WAIT_S, Rendezvous, rendezvous_point
from trainloop.signals import signals

__all__ = ["Meetings", "Survival"]


class Survival(Protocol):
    """Decides whether ranks that have failed start again, and tells them from where."""

    def failed(self, failure: Failure, error: WorkerFailedError) -> WorkerFailedError | None:
        """The ranks have ended by this failure: the error that ends the run, or ``None`` to start them again."""

    def says(self) -> dict[str, Any]:
        """What the other hosts have to know of this one, before each start; plain types."""

    def agreed(self, said: Sequence[dict[str, Any]]) -> None:
        """All hosts have said it; ranks are about to start. May raise, on all hosts alike."""

    def error_that_ends(self, why: str) -> WorkerFailedError | None:
        """The last failure's error with a word about why there is no going on; ``None`` where there was none."""


class Meetings:
    """This host's meetings with the others; on one node, where nobody else comes, none.

    Parameters
    ----------
    init_method : str, optional
        Rendezvous point. Ranks with a ``file://`` meet there by themselves, and their hosts don't.
    node_rank, num_nodes, ranks_per_node : int
        This host's place; the last two must be the same everywhere.
    timeout_s : float
        The run's; the first meeting waits no longer.
    survival : Survival, optional
        For a run that survives failures.
    """

    def __init__(
        self,
        init_method: str | None,
        *,
        node_rank: int,
        num_nodes: int,
        ranks_per_node: int,
        timeout_s: float,
        survival: Survival | None,
    ) -> None:
        self._init_method = init_method
        self._node_rank, self._num_nodes, self._ranks_per_node = node_rank, num_nodes, ranks_per_node
        self._survival = survival
        self._wait_s = min(timeout_s, RENDEZVOUS_WAIT_S)
        self.are_held = num_nodes > 1 and not (init_method or "").startswith("file:")
        """Whether hosts meet at all."""

    def before_start(self, undo: contextlib.ExitStack) -> Rendezvous | None:
        """Meet, and agree on where ranks go on. The hosts stay connected until ``undo``; ``None`` if they don't meet.

        Raises
        ------
        ConfigurationError, WorkerFailedError
            If they don't all come, or can't go on.
        """
        hosts = None
        if self.are_held:
            hosts = undo.enter_context(self._meet(None if self._survival is None else self._survival.says()))
            self._wait_s = RENDEZVOUS_WAIT_S  # hosts whose ranks fail end them first, whatever the run's time-out
        if self._survival is not None:
            self._survival.agreed([self._survival.says()] if hosts is None else hosts.said)
        return hosts

    def farewell(self, error: WorkerFailedError) -> None:
        """Tell the other hosts, which wait for this one to start again, that it does not go on."""
        if not self.are_held:
            return
        self._wait_s = FAREWELL_S
        with contextlib.suppress(ConfigurationError, WorkerFailedError):
            self._meet({"ends": str(error).splitlines()[0]}).__exit__()

    def _meet(self, says: dict[str, Any] | None) -> Rendezvous:
        try:
            with signals() as heard:
                return Rendezvous(
                    rendezvous_point(self._init_method),
                    node_rank=self._node_rank,
                    num_nodes=self._num_nodes,
                    ranks_per_node=self._ranks_per_node,
                    wait_s=self._wait_s,
                    key=key_from_environment(),
                    says=says,
                    look=heard.end,
                )
        except ConfigurationError as error:
            if self._survival is None:
                raise
            why = f"The run could not go on: {error}"
            raise self._survival.error_that_ends(why) or error from None
