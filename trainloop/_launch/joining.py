"""Join a run as a rank that ``torchrun`` or Slurm started."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from trainloop._launch.rank_process import RankTerminated, started_as, started_by_launch, unblocking
from trainloop._support.forks import guard_process
from trainloop._support.platform import user_id
from trainloop._support.signals import ends_by_sigterm, signals
from trainloop._support.stopping import GroupStop, LocalStop, SharedStop, State, StopAgreement
from trainloop._support.user_line import warn
from trainloop._transfer.pages import anonymous_file, close_file
from trainloop.distributed import Rank, exchange_ints
from trainloop.distributed.peers import only_trusted_peers
from trainloop.distributed.ranks import leave_group
from trainloop.errors import ConfigurationError

T = TypeVar("T")

_INTERACTIVE_JOBS = ("bash", "sh", "zsh", "interactive")
_FIRST_PORT, _PORTS = 15000, 20000  # below the range of ports for outgoing connections


def rank_from_launcher(environ: Mapping[str, str] | None = None) -> Rank | None:
    """Return the rank that ``torchrun`` or Slurm gave this process; ``None`` if ``fit`` has to start ranks itself.

    ``torchrun`` is detected by ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``; Slurm by
    ``SLURM_PROCID`` and an ``SLURM_NTASKS`` above 1, in tasks that ``srun`` has started (not in a batch script itself)
    and outside of interactive shells. A process group that the caller has created counts, too.

    Parameters
    ----------
    environ : mapping, optional
        Replaces ``os.environ``.

    Raises
    ------
    ConfigurationError
        If the variables contradict each other.
    """
    if environ is None and started_by_launch():
        return None
    env = os.environ if environ is None else environ
    # Before Slurm's variables: if torchrun runs as a Slurm task, this process is one of several in the same task.
    if all(env.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        rank, world_size = _number_in(env, "RANK"), _number_in(env, "WORLD_SIZE")
        local_world_size = _number_in(env, "LOCAL_WORLD_SIZE", world_size)
        local_rank = _number_in(env, "LOCAL_RANK", rank % max(local_world_size, 1))
        num_nodes = max(1, -(-world_size // max(local_world_size, 1)))
        node_rank = _number_in(env, "GROUP_RANK", rank // max(local_world_size, 1))
    elif env.get("SLURM_PROCID") and _number_in(env, "SLURM_NTASKS", 1) > 1 and not _is_shell(env) and _is_task(env):
        rank, world_size = _number_in(env, "SLURM_PROCID"), _number_in(env, "SLURM_NTASKS")
        num_nodes = _number_in(env, "SLURM_NNODES", _number_in(env, "SLURM_JOB_NUM_NODES", 1))
        local_world_size = _tasks_of_node(env, world_size, num_nodes)
        local_rank = _number_in(env, "SLURM_LOCALID", rank % local_world_size)
        node_rank = _number_in(env, "SLURM_NODEID", rank // local_world_size)
    elif environ is None and dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return Rank(rank, world_size, rank, world_size, 0, 1)
    else:
        return None
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            "according to the environment (RANK and WORLD_SIZE, or SLURM_PROCID and SLURM_NTASKS), this process is "
            f"rank {rank} of {world_size}, but a rank must be from 0 to {world_size - 1}. Fix the launcher, or, "
            "to start ranks from here, unset these variables."
        )
    return Rank(rank, world_size, local_rank, local_world_size, node_rank, num_nodes)


def place_here() -> Rank:
    """Return this process's rank among all ranks and among its host's ranks, however they were started."""
    return started_as() or rank_from_launcher() or Rank()


def _number_in(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "").strip()
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdigit()):
        raise ConfigurationError(
            f"{name}={text!r} in the environment: must be a whole number. Unset it, or fix the launcher's settings."
        )
    return int(text)


def _is_shell(env: Mapping[str, str]) -> bool:
    """Return True in an interactive shell: ``srun --pty bash`` sets the variables of a task, but runs one process."""
    return env.get("SLURM_JOB_NAME") in _INTERACTIVE_JOBS


_OF_A_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")


def _is_task(env: Mapping[str, str]) -> bool:
    """Return True in a task that ``srun`` has started, of a job step.

    Slurm sets the variables of task 0 for a batch script itself, too, and so for a Python or Jupyter that the script
    starts without ``srun``: no other task exists. The name of the job is set in both.
    """
    return env.get("SLURM_PROCID") != "0" or not env.get("SLURM_JOB_NAME") or any(env.get(name) for name in _OF_A_STEP)


_MPI = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("WORLD_SIZE", "RANK"),  # without a rendezvous point
)


def warn_of_processes_alone(gpu_mode: str) -> None:
    """Warn once, on rank 0, if a launcher has started several processes and each of them trains by itself."""
    if started_by_launch():
        return
    env, launcher, advice = os.environ, "", ""
    here = None
    with contextlib.suppress(ConfigurationError):  # variables that ``single`` does not need
        here = rank_from_launcher(env)
    size, rank = (here.world_size, here.rank) if here is not None else (1, 0)
    if here is not None:
        launcher = "torchrun" if env.get("RANK") else "srun"
        advice = (
            "Pass gpu_mode='ddp' or 'fsdp' to train one model in all of them, or start the script without the launcher."
        )
    else:
        for size_name, rank_name in _MPI:
            if env.get(size_name, "").isdecimal() and env.get(rank_name, "").isdecimal():
                launcher = f"a launcher ({size_name}={env[size_name]})"
                size, rank = int(env[size_name]), int(env[rank_name])
                break
        advice = (
            "Start the script by torchrun with gpu_mode='ddp' or 'fsdp' to train one model in all of them (or set "
            "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in the environment before fit)."
        )
    has_mode_of_ranks = gpu_mode not in ("single", "dp")
    if size > 1 and rank == 0 and not (has_mode_of_ranks and here is not None):
        trains = "starts ranks of its own and trains" if has_mode_of_ranks else "trains"
        warn(
            f"{launcher} has started {size} processes, and with gpu_mode={gpu_mode!r} each of them {trains} a model of "
            f"its own on all data, with files of the same names. {advice} If each process is meant to train by itself, "
            "give it a folder of its own, and ignore this warning."
        )
    nodes = env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES") or "1"
    if has_mode_of_ranks and here is None and env.get("SLURM_PROCID") and nodes.isdecimal() and int(nodes) > 1:
        if _is_task(env) or _is_shell(env):
            return
        warn(
            f"this Slurm job has {nodes} nodes, but srun has not started this process, so it trains on this node only. "
            "Use srun python ..., which starts the processes of all nodes."
        )


def _tasks_of_node(env: Mapping[str, str], world_size: int, num_nodes: int) -> int:
    """Return the number of tasks on this node, from Slurm's short form: ``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for tasks, repeats in re.findall(
        r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", ""))
    ):
        counts += [int(tasks)] * int(repeats or 1)
    node = _number_in(env, "SLURM_NODEID", 0)
    return max(1, counts[node] if node < len(counts) else -(-world_size // num_nodes))


def first_host(nodelist: str) -> str:
    """Return the first name of Slurm's short form: ``gpu[07-09,12],login1`` is ``gpu07``."""
    head = re.match(r"([^,\[]*)(?:\[([^\]]*)\])?([^,\[]*)", nodelist.strip())
    assert head is not None  # every part may be empty
    name, ranges, tail = head.groups()
    return name + (re.split(r"[,-]", ranges)[0] if ranges else "") + tail


def rendezvous_point(environ: Mapping[str, str]) -> str:
    """Return ``tcp://host:port`` for a Slurm job, from ``MASTER_ADDR`` and ``MASTER_PORT`` or derived from the job."""
    nodes = (
        environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    )
    host = environ.get("MASTER_ADDR") or first_host(nodes) or "127.0.0.1"
    job = re.sub(r"\D", "", environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID", ""))) or "0"
    step = re.sub(r"\D", "", environ.get("SLURM_STEP_ID", "")) or "0"
    port = environ.get("MASTER_PORT") or str(_FIRST_PORT + (int(job) * 7 + int(step)) % _PORTS)
    return f"tcp://{host}:{port}"


def join(
    function: Callable[[StopAgreement], T],
    *,
    backend: str | None = None,
    init_method: str | None = None,
    timeout_s: float = 1800.0,
    devices: Sequence[torch.device] | None = None,
) -> T:
    """Run ``function`` in this process, as the rank that :func:`rank_from_launcher` returned, in a process group.

    An existing process group is used and left unchanged; one that is created here is destroyed at the end, so that a
    script may train several times. If a rank of this machine fails, the others end, too, even while they wait for it in
    a collective of NCCL, by :class:`~trainloop._launch.rank_process.RankTerminated`.

    Parameters
    ----------
    function : callable
        Takes the run's :class:`~trainloop._support.stopping.StopAgreement`.
    devices : sequence of torch.device, optional
        This node's devices by local rank; the CPU by default.
    backend, init_method, timeout_s
        As in :func:`trainloop._launch.launch`.

    Returns
    -------
    object
        The result of ``function`` in this process.
    """
    me = rank_from_launcher()
    if me is None:
        raise ConfigurationError(
            "join() was called outside of torchrun and Slurm: set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        )
    device = torch.device("cpu")
    if devices:
        if me.local_rank >= len(devices):
            raise ConfigurationError(
                f"this process has local rank {me.local_rank}, but only these devices were chosen: "
                f"{', '.join(map(str, devices))}. Start no more processes here than devices, or choose more devices."
            )
        device = devices[me.local_rank]
    backend = backend or backend_for(devices or [device])
    guard_process()
    with contextlib.ExitStack() as undo:
        if device.type == "cuda":
            # Not set_device(): resetting the previous device would create a context on a GPU of another rank.
            undo.enter_context(torch.cuda.device(device))
        if not dist.is_initialized():
            undo.enter_context(_process_group(me, backend, init_method, timeout_s))
        stop, here = undo.enter_context(_agreement(me, timeout_s))
        undo.enter_context(signals(stop, ended=None if here is None else lambda: here.failed, end=RankTerminated))
        if here is not None:
            undo.enter_context(_ending_together(here))
        return function(stop)


def backend_for(devices: Sequence[torch.device]) -> str:
    """Return Gloo, with NCCL for CUDA tensors if each rank has its own GPU: NCCL allows one rank per GPU."""
    own_gpus = all(device.type == "cuda" for device in devices) and len(set(devices)) == len(devices)
    return "cpu:gloo,cuda:nccl" if own_gpus else "gloo"


@contextlib.contextmanager
def _ending_together(here: SharedStop) -> Iterator[None]:
    """Mark this machine's ranks as failed if this rank fails, and end this rank once another one has failed."""
    # Without a handler that raises, this rank would continue with the results of aborted collectives.
    may_block = "nccl" in str(dist.get_backend_config()) and ends_by_sigterm()
    with unblocking(lambda: here.failed) if may_block else contextlib.nullcontext():
        try:
            yield
        except BaseException:
            here.abort()  # before this rank leaves the group, so that the others do not fail by that
            raise
        here.set_state(State.DONE)


@contextlib.contextmanager
def _process_group(me: Rank, backend: str, init_method: str | None, timeout_s: float) -> Iterator[None]:
    if init_method is None:
        init_method = "env://" if "RANK" in os.environ and "MASTER_ADDR" in os.environ else rendezvous_point(os.environ)
    timeout = timedelta(seconds=timeout_s)
    store = _fresh_store(init_method, me, timeout)
    with only_trusted_peers():
        dist.init_process_group(backend, store=store, rank=me.rank, world_size=me.world_size, timeout=timeout)
    try:
        yield
    except BaseException:
        leave_group(failed=True)
        raise
    leave_group()


_stores: dict[str, dist.Store] = {}
_group_number = itertools.count()


def _fresh_store(init_method: str, me: Rank, timeout: timedelta) -> dist.Store:
    """Return a store for one process group, without the addresses of earlier groups.

    torchrun's store outlives process groups: in the next group, a rank would read an address of the earlier group and
    wait there. So each group has its own prefix in the store, with the same number on all ranks. The store also
    outlives processes, if ``torchrun --max-restarts`` starts them again.
    """
    if init_method not in _stores:
        try:
            _stores[init_method] = next(dist.rendezvous(init_method, me.rank, me.world_size, timeout=timeout))[0]
        except dist.DistStoreError as error:
            raise ConfigurationError(
                f"the other processes did not connect to {init_method} within {timeout.total_seconds():g} s: according "
                f"to the environment, this process is rank {me.rank} of {me.world_size} ({error}). Start all processes "
                "by the launcher (torchrun, srun), or, to start ranks from here, unset RANK, WORLD_SIZE and "
                "SLURM_PROCID."
            ) from error
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"trainloop-{start}-{next(_group_number)}", _stores[init_method])


def _common_slots(me: Rank) -> tuple[memoryview | None, list[int]]:
    """Map the int64 slots that the ranks of a machine share, in a file of its local rank 0; return their PIDs, too.

    The slots are ``None`` if any of these ranks can't open the file.
    """
    leads = me.local_rank == 0
    fd = anonymous_file("stop") if leads else -1
    try:
        if leads:
            os.ftruncate(fd, 8 * SharedStop.num_slots(me.local_world_size))
        own = [me.node_rank, me.local_rank, os.getpid(), fd, os.fstat(fd).st_ino if leads else 0]
        here = sorted(row[1:] for row in exchange_ints(own) if row[0] == me.node_rank)
        pids = [pid for _, pid, _, _ in here]
        _, pid, number, inode = here[0]
        slots = None
        # A process in another container may have the same PID; the inode distinguishes the files.
        with contextlib.suppress(OSError), open(f"/proc/{pid}/fd/{number}", "r+b", buffering=0) as file:
            found = os.fstat(file.fileno())
            # This user must own the file, whatever path was received.
            if found.st_ino == inode and found.st_uid == user_id():
                slots = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        # Local rank 0 keeps the file open until all ranks have mapped it.
        results = exchange_ints([me.node_rank, int(slots is not None)])
        return slots if all(found for node, found in results if node == me.node_rank) else None, pids
    finally:
        if leads:
            close_file(fd)


@contextlib.contextmanager
def _agreement(me: Rank, timeout_s: float) -> Iterator[tuple[StopAgreement, SharedStop | None]]:
    """Yield the stop agreement, and the shared memory of this machine's ranks (``None`` if they have none).

    The agreement uses this memory if all ranks are on this machine, else a separate Gloo group.
    """
    if me.world_size == 1:
        yield LocalStop(), None
        return
    slots, pids = _common_slots(me)
    here = None if slots is None else SharedStop(slots, me.local_rank, me.local_world_size, timeout_s, pids)
    if here is not None and me.local_world_size == me.world_size:
        yield here, here
    else:
        with only_trusted_peers():
            # This is a separate group, because its exchanges must not mix with exchanges of the user's code in the
            # default group.
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        stop = GroupStop(group, me.world_size)
        yield stop, here
        stop.finish()
    if here is not None:
        here.release()
