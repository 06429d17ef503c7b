"""Run folds as tasks of a Ray cluster.

Ray schedules tasks by CPUs and GPUs, but enforces neither. So a task only starts and supervises a child process, which
trains the fold as on one machine: on CPUs leased on its node, and under the same quota. If a node is lost, its tasks
run again on other nodes.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from trainloop._support.platform import affinity
from trainloop.errors import ResourceError
from trainloop.extending import import_extra
from trainloop.resources import Plan, ResourceQuota, available
from trainloop.resources.enforce import free_cpus
from trainloop.resources.quota import as_number, exact
from trainloop.tuning.running.local import Child, note_end
from trainloop.tuning.running.worker import Job
from trainloop.tuning.storage import write_bytes

_RESULTS = ("result.pkl", "predictions.pkl", "model.pkl", "error.txt", "log.txt")
_RETRIES = 3  # maximum number of restarts of a task whose node or worker is lost


class RayBackend:
    """Start folds as Ray tasks, and return the folds that have ended."""

    def __init__(self, ray: Any, total: ResourceQuota) -> None:
        self._ray = ray
        self.total = total
        """Resources of the cluster that the search may use."""
        self._plan: Plan | None = None
        self._running: dict[Any, Job] = {}
        self._work: tuple[bytes, Any] = b"", None  # the file that all folds share, and the file's object reference
        self._groups: dict[int, Any] = {}  # placement groups, by bag

    @classmethod
    @contextmanager
    def connected(cls, total: ResourceQuota | None) -> Iterator[RayBackend]:
        """Return a context with a backend for the connected cluster, for ``RAY_ADDRESS``, or for a new local cluster.

        Raises
        ------
        ConfigurationError
            If Ray is not installed.
        ResourceError
            If the cluster has less than ``total``.
        """
        ray = import_extra("ray", "backend='ray'", "ray")
        must_connect = not ray.is_initialized()
        if must_connect:
            _connect(ray, total)
        try:
            backend = cls(ray, _cluster_total(ray, total))
            try:
                yield backend
            finally:
                backend.close()
        finally:
            if must_connect:
                ray.shutdown()

    def begin(self, division: Plan) -> None:
        """Check that at least one node of the cluster is large enough for a model.

        Raises
        ------
        ResourceError
            If no node is large enough, because the task would then wait forever.
        """
        self._plan = division
        model = division.per_model
        for node in self._ray.nodes():
            have = node["Resources"]
            if node["Alive"] and have.get("CPU", 0) >= model.num_cpus and have.get("GPU", 0) >= model.num_gpus:
                return
        raise ResourceError(
            f"One model needs num_cpus={model.num_cpus} and num_gpus={model.num_gpus}, but no node of the Ray cluster "
            "has this many. Lower per_model, or add a larger node."
        )

    def start(self, job: Job, bag: int) -> None:
        assert self._plan is not None
        model = self._plan.per_model
        options: dict[str, Any] = {
            "num_cpus": model.num_cpus,
            "num_gpus": float(model.num_gpus),
            "max_retries": _RETRIES,
        }
        if model.memory != "auto":
            options["memory"] = model.memory
        if float(model.num_gpus) > 1:
            options["scheduling_strategy"] = self._group_of(bag)
        task = self._ray.remote(**options)(_supervise)
        reference = task.remote(job, self._shared(job.work), Path(job.params).read_bytes())
        self._running[reference] = job

    def wait(self, timeout_s: float) -> list[Job]:
        """Return the folds that have ended. If no fold has ended, wait up to ``timeout_s`` seconds for one."""
        if not self._running:
            return []
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
        jobs = []
        for reference in ready:
            job = self._running.pop(reference)
            try:
                exitcode, files = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                exitcode, files = 1, {"error.txt": f"Ray lost the fold: {error}".encode()}
            for name, data in files.items():
                write_bytes(Path(job.folder) / name, data)
            note_end(job, exitcode)
            jobs.append(job)
        return jobs

    def close(self) -> list[Job]:
        """Cancel all tasks, and return the jobs that were running."""
        jobs = list(self._running.values())
        for reference in self._running:
            self._ray.cancel(reference, force=True)  # the fold's process ends with the task
        self._running.clear()
        for group in self._groups.values():
            self._ray.util.remove_placement_group(group)
        self._groups.clear()
        return jobs

    def _shared(self, path: str) -> Any:
        """Return an object reference to the file's content, which Ray sends to each node once."""
        data = Path(path).read_bytes()
        if self._work[0] != data:
            self._work = data, self._ray.put(data)
        return self._work[1]

    def _group_of(self, bag: int) -> Any:
        """Return a scheduling strategy with a placement group: one bundle for each fold of the bag that runs at once.

        Ray reserves all bundles or none. Trials use the group one after the other. The folds of the next trial may
        begin before the previous trial has ended.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        assert self._plan is not None
        if bag not in self._groups:
            model = self._plan.per_model
            bundle = {"CPU": model.num_cpus, "GPU": float(model.num_gpus)}
            bundles = [bundle] * self._plan.folds_in_parallel
            self._groups[bag] = self._ray.util.placement_group(bundles, strategy="PACK")
        return PlacementGroupSchedulingStrategy(placement_group=self._groups[bag])


def _connect(ray: Any, total: ResourceQuota | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False)
        return
    machine = available()
    request = (total or ResourceQuota()).filled(ResourceQuota(machine.num_cpus, machine.num_gpus))
    from ray._private import ray_constants

    # If this is True (the default except on macOS), Ray replaces 127.0.0.1 with an address that other hosts can reach.
    before = getattr(ray_constants, "ENABLE_RAY_CLUSTER", None)
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=request.num_cpus,
            num_gpus=math.ceil(exact(request.num_gpus)),
            log_to_driver=False,
        )
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _cluster_total(ray: Any, total: ResourceQuota | None) -> ResourceQuota:
    have = ray.cluster_resources()
    cluster = ResourceQuota(max(1, int(have.get("CPU", 0))), as_number(exact(have.get("GPU", 0))))
    if total is None:
        return cluster
    total = total.filled(cluster)
    if int(total.num_cpus) > int(cluster.num_cpus) or exact(total.num_gpus) > exact(cluster.num_gpus):
        raise ResourceError(
            f"total={total!r} exceeds the Ray cluster, which has num_cpus={cluster.num_cpus} and "
            f"num_gpus={cluster.num_gpus}. Request less."
        )
    return total


def _supervise(job: Job, work: bytes, params: bytes) -> tuple[int | None, dict[str, bytes]]:
    """Train the fold in a child process, and return its exit code and files. Runs in a Ray task."""
    folder = Path(tempfile.mkdtemp(prefix="trainloop-fold-"))
    try:
        (folder / "work.pkl").write_bytes(work)
        (folder / "params.pkl").write_bytes(params)
        job = dataclasses.replace(
            job, folder=str(folder), work=str(folder / "work.pkl"), params=str(folder / "params.pkl")
        )
        with ExitStack() as undo:
            if cpus := affinity():
                job.cpus = free_cpus(int(job.quota.num_cpus), cpus, undo)
            # The fold trains in a child process, because Ray's worker has already imported modules, and must survive a
            # crash.
            child = Child(job)
            undo.callback(child.end)
            child.wait()
            exitcode = child.end()
        found = ((name, folder / name) for name in _RESULTS)
        return exitcode, {name: path.read_bytes() for name, path in found if path.exists()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
