"""Resources of a machine, and quotas: the part that a run may use, enforced while it runs.

``available`` reads the machine, ``ResourceQuota`` is a share of it, ``plan`` and ``place`` divide it over trials and
folds (both pure), ``gpu_or_cpu`` trains on the CPU if a GPU build is missing. ``TrainLoop(resources=quota)`` enforces a
quota.
"""

from __future__ import annotations

from trainloop.resources.gpus import gpu_or_cpu
from trainloop.resources.machine import available
from trainloop.resources.plan import Plan, hold, place, plan
from trainloop.resources.quota import ResourceQuota, Resources

__all__ = ["Plan", "ResourceQuota", "Resources", "available", "gpu_or_cpu", "hold", "place", "plan"]
