"""The resources that a search holds, and each model's share of them."""

from __future__ import annotations

import math
import os
import sys
from contextlib import ExitStack

from trainloop._support.platform import affinity
from trainloop.errors import ResourceError
from trainloop.resources import Plan, ResourceQuota, available, enforce, gpus, lease
from trainloop.resources.gpus import child_mask, visible_devices
from trainloop.resources.quota import exact

__all__ = ["Slots", "lease_total", "machine_total"]


def machine_total(total: ResourceQuota | None) -> ResourceQuota:
    machine = available()
    if total is None:
        return ResourceQuota(machine.num_cpus, machine.num_gpus)
    cpus = machine.num_cpus if total.num_cpus == "auto" else total.num_cpus
    num_gpus = machine.num_gpus if total.num_gpus == "auto" else total.num_gpus
    # A search may hold one and a half GPUs, which its models share; check the rest as for any run.
    enforce.check_quota(ResourceQuota(cpus, math.ceil(exact(num_gpus)), total.memory), machine=machine)
    return ResourceQuota(cpus, num_gpus, total.memory)


def lease_total(total: ResourceQuota, timeout_s: float | None, undo: ExitStack) -> tuple[list[int], list[int]]:
    """Lease CPUs and GPUs for this search; return the CPUs and the indices of the GPUs."""
    cpus = affinity() or list(range(os.cpu_count() or 1))
    num_cpus, num_gpus = int(total.num_cpus), math.ceil(exact(total.num_gpus))
    names = gpus.names(available().num_gpus) if num_gpus else []
    if lease.inherited():
        return cpus[:num_cpus], list(range(num_gpus))
    # GPUs that no other process uses come first.
    others = gpus.other_processes(names)
    requests = {
        "cpu": lease.Request(num_cpus, [f"cpu-{cpu}" for cpu in cpus]),
        "gpu": lease.Request(num_gpus, sorted(names, key=lambda name: others.get(name, 0) > 0)),
    }
    try:
        held = lease.acquire(requests, timeout_s=0)
    except OSError:  # no place for locks
        return cpus[:num_cpus], list(range(num_gpus))
    except ResourceError as busy:
        if timeout_s == 0:
            raise
        print(f"tune is waiting for other runs: {busy}", file=sys.stderr)
        held = lease.acquire(requests, timeout_s=timeout_s)
    undo.enter_context(held)
    return [int(name.removeprefix("cpu-")) for name in held.names["cpu"]], sorted(
        names.index(name) for name in held.names["gpu"]
    )


class Slots:
    """CPUs and GPUs of the j-th model in the b-th bag, the same for all models that run there in turn."""

    def __init__(self, division: Plan, cpus: list[int] | None, devices: list[int] | None) -> None:
        self._plan = division
        self._cpus = cpus
        self._devices = devices
        quota = division.per_model
        self.quota = (quota.num_cpus, quota.num_gpus, quota.memory)

    def cpus(self, bag: int, model: int) -> list[int]:
        if self._cpus is None:
            return []
        each = int(self._plan.per_model.num_cpus)
        start = bag * int(self._plan.per_bag.num_cpus) + model * each
        return self._cpus[start : start + each]

    def environment(self, bag: int, model: int) -> dict[str, str]:
        variables = enforce.child_environment(self._plan.per_model)
        if self._devices is not None:
            own = self._plan.placement[bag * self._plan.folds_in_parallel + model]
            variables["CUDA_VISIBLE_DEVICES"] = child_mask([self._devices[d] for d in own], visible_devices())
        return variables
