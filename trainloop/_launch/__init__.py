"""Run one function in many processes; return local rank 0's result, or raise the first failure.

:func:`launch` starts the ranks of this node; :func:`join` runs it in this process, as a rank that ``torchrun`` or Slurm
started; :func:`rank_from_launcher` decides between the two. This package does not depend on models or training. The
function receives a :class:`~trainloop._support.stopping.StopAgreement`, and runs in an initialized process group.
"""

from __future__ import annotations

from trainloop._launch.failures import RestartPolicy
from trainloop._launch.joining import join, place_here, rank_from_launcher, warn_of_processes_alone
from trainloop._launch.launching import keeping, launch
from trainloop._launch.rank_process import rescue_result

__all__ = [
    "RestartPolicy",
    "join",
    "keeping",
    "launch",
    "place_here",
    "rank_from_launcher",
    "rescue_result",
    "warn_of_processes_alone",
]
