"""Resources of a machine, and quotas that limit which of them a run may use.

``available`` reads the resources of the machine. A ``ResourceQuota`` sets how much of these a run may use;
``TrainLoop(resources=quota)`` enforces it. ``plan`` and ``place`` compute how to divide resources among trials and
folds, but reserve nothing. ``gpu_or_cpu`` trains on the CPU if a library cannot use a GPU.
"""

from __future__ import annotations

from trainloop.resources.gpus import gpu_or_cpu
from trainloop.resources.machine import available
from trainloop.resources.plan import Plan, hold, place, plan
from trainloop.resources.quota import ResourceQuota, Resources

__all__ = ["Plan", "ResourceQuota", "Resources", "available", "gpu_or_cpu", "hold", "place", "plan"]
