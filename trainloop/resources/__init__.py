"""Resources: read what a machine has, set what a run may use of it, and enforce this while it runs.

``available`` reads the machine, ``ResourceQuota`` names a share of it, ``plan`` and ``place`` divide it among trials
and folds (both pure), ``gpu_or_cpu`` trains on the CPU if a GPU build is missing. ``TrainLoop(resources=quota)``
enforces a quota.
"""

from __future__ import annotations

from trainloop.resources.fallback import gpu_or_cpu
from trainloop.resources.machine import available
from trainloop.resources.placement import place
from trainloop.resources.plan import Plan, hold, plan
from trainloop.resources.quota import ResourceQuota, Resources

__all__ = ["Plan", "ResourceQuota", "Resources", "available", "gpu_or_cpu", "hold", "place", "plan"]
