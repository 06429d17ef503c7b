"""Meetings of a run's hosts, before their ranks start."""

from __future__ import annotations

import contextlib

from trainloop.distributed.key import key_from_environment
from trainloop.launch.rendezvous import RENDEZVOUS_WAIT_S, Rendezvous, rendezvous_point
from trainloop.signals import signals

__all__ = ["Meetings"]


class Meetings:
    """This host's meetings with the others; on one node, where nobody else comes, none.

    Parameters
    ----------
    init_method : str, optional
        Rendezvous point. Ranks with a ``file://`` meet there by themselves, and their hosts don't.
    node_rank, num_nodes, ranks_per_node : int
        This host's place; the last two must be the same everywhere.
    timeout_s : float
        The run's; a meeting waits no longer.
    """

    def __init__(
        self,
        init_method: str | None,
        *,
        node_rank: int,
        num_nodes: int,
        ranks_per_node: int,
        timeout_s: float,
    ) -> None:
        self._init_method = init_method
        self._node_rank, self._num_nodes, self._ranks_per_node = node_rank, num_nodes, ranks_per_node
        self._wait_s = min(timeout_s, RENDEZVOUS_WAIT_S)
        self.are_held = num_nodes > 1 and not (init_method or "").startswith("file:")
        """Whether hosts meet at all."""

    def before_start(self, undo: contextlib.ExitStack) -> Rendezvous | None:
        """Meet. The hosts stay connected until ``undo``; ``None`` if they don't meet.

        Raises
        ------
        ConfigurationError
            If they don't all come.
        """
        if not self.are_held:
            return None
        with signals() as heard:
            return undo.enter_context(
                Rendezvous(
                    rendezvous_point(self._init_method),
                    node_rank=self._node_rank,
                    num_nodes=self._num_nodes,
                    ranks_per_node=self._ranks_per_node,
                    wait_s=self._wait_s,
                    key=key_from_environment(),
                    look=heard.end,
                )
            )
