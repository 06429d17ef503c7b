"""Read masks of visible GPUs, name GPUs in the same way in all processes, choose free GPUs, and fall back to the CPU.

The index of a GPU depends on the process's mask, and NVML's order differs from CUDA's. Only UUIDs are the same in all
processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from trainloop._support.user_line import warn
from trainloop.errors import DeviceError, ResourceError
from trainloop.resources import lease

T = TypeVar("T")

# Error texts of LightGBM, XGBoost, CatBoost, torch and this package for 'no GPU build' and 'no device'. The pattern is
# compiled when it is needed, because compiling it took a tenth of the time of `import trainloop`.
_NO_GPU = r"""
      (gpu|cuda|opencl)[ ]tree[ ]learner[ ]was[ ]not[ ]enabled
    | not[ ]compiled[ ]with[ ](gpu|cuda|opencl)
    | (built|compiled)[ ]without[ ](gpu|cuda|opencl)
    | no[ ](opencl|gpu|cuda)[ ]device
    | no[ ]cuda-capable[ ]device
    | no[ ]cuda[ ]gpus[ ]are[ ]available
    | no[ ](nvidia[ ]driver|gpu[ ]is[ ]visible)
    | task[ ]type[ ]\[gpu\][ ]not[ ]found
    | cuda[ ]driver[ ]version[ ]is[ ]insufficient
    | this[ ]machine[ ]has[ ]no[ ]such[ ]device
"""


def visible_devices(environ: Mapping[str, str] | None = None) -> list[str] | None:
    """Return the entries of ``CUDA_VISIBLE_DEVICES``, as CUDA reads them.

    Parameters
    ----------
    environ : mapping, optional
        Replaces ``os.environ``.

    Returns
    -------
    list of str or None
        Indices or UUIDs in the order of the variable; an empty list if all devices are hidden; None if no device is
        hidden. As in CUDA, the list ends before a negative entry and before the first entry of a different kind. If an
        entry is repeated, the list is empty.
    """
    text = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    entries: list[str] = []
    for entry in text.split(","):
        name = _mask_entry(entry, text)
        if name is None:
            break
        if name in entries:
            return []
        entries.append(name)
    return entries


def _mask_entry(entry: str, text: str) -> str | None:
    for prefix in ("GPU-", "MIG-"):
        if text.startswith(prefix):  # The first entry determines the kind of all entries.
            return entry if entry.startswith(prefix) else None
    # The driver parses indices like C's strtoul: '1gpu2' is 1.
    number = re.match(r"[+-]?[0-9]+", entry.strip())
    if number is None or int(number[0]) < 0:
        return None
    return str(int(number[0]))


def child_mask(indices: Sequence[int], visible: Sequence[str] | None) -> str:
    """Return the value of ``CUDA_VISIBLE_DEVICES`` for a child process that gets some of this process's devices.

    Parameters
    ----------
    indices : sequence of int
        Devices of the child, counted within this process's own mask.
    visible : sequence of str or None
        This process's mask, from :func:`visible_devices`.

    Returns
    -------
    str
        Mask of the child. If the parent's mask is ``4,5,7``, its device 1 is ``5``. Empty if the child gets no device.

    Raises
    ------
    DeviceError
        If the parent can't see a device.
    ResourceError
        If the child would get two MIG instances, because a process can use only one.
    """
    if visible is None:
        return ",".join(str(index) for index in indices)
    for index in indices:
        if not 0 <= index < len(visible):
            raise DeviceError(
                f"device {index} was chosen for a child process, but CUDA_VISIBLE_DEVICES={','.join(visible)} has no "
                f"such device. Choose indices from 0 to {len(visible) - 1} in this list."
            )
    names = [visible[index] for index in indices]
    if len(names) > 1 and any(name.startswith("MIG-") for name in names):
        raise ResourceError(
            f"{len(names)} MIG instances were chosen for one process ({', '.join(names)}), which can use only one. "
            "Request one device per process, and start more processes."
        )
    return ",".join(names)


def names(count: int) -> list[str]:
    """Return the UUIDs of the visible GPUs, in CUDA's order, without creating a context.

    If torch does not know a UUID, the name is the entry of ``CUDA_VISIBLE_DEVICES``, or the index.
    """
    mask = visible_devices()
    found = []
    for index in range(count):
        entry = str(index) if mask is None or index >= len(mask) else mask[index]
        found.append(entry if entry.startswith("MIG-") else _uuid(index) or f"gpu-{entry}")
    return found


def _uuid(index: int) -> str | None:
    import torch

    try:
        uuid = torch.cuda.get_device_properties(index).uuid
    except (AssertionError, AttributeError, RuntimeError):
        return None
    return f"GPU-{uuid}"


def other_processes(names: Sequence[str]) -> dict[str, int]:
    """Return the number of other processes that use each GPU; empty if NVML can't report them.

    Needs ``nvidia-ml-py`` (``pip install 'tt-trainloop[gpu]'``). GPUs are matched by UUID.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, no driver or no permission
        return {}
    found = {}
    try:
        for name in names:
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(name)
                processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except pynvml.NVMLError:
                continue
            found[name] = len({process.pid for process in processes} - {os.getpid()})
    finally:
        pynvml.nvmlShutdown()
    return found


_own_leases: dict[str, lease.Lease] = {}  # this process's leases, by the GPU's name; they last until the process ends


def lease_usable(num_devices: int, count: int) -> list[int]:
    """Return the result of :func:`trainloop.devices.find_usable_cuda_devices`, which has checked the arguments."""
    uuids = names(count)
    others = other_processes(uuids)
    wanted = count if num_devices == -1 else num_devices
    usable: list[int] = []
    leases: dict[str, lease.Lease] = {}
    # Only one run chooses at a time. Otherwise, two runs that each have leased some GPUs and need more could both fail.
    with _Probe() as probe, lease.one_at_a_time("choosing-gpus"), contextlib.ExitStack() as unless_enough:
        # GPUs that other processes use are tried last. Such GPUs are unusable in exclusive mode, and slow in other
        # modes.
        for index in sorted(range(count), key=lambda index: (others.get(uuids[index], 0) > 0, index)):
            if len(usable) == wanted:
                break
            earlier = _own_leases.get(uuids[index])
            held = earlier or _leased(uuids[index])
            if held is None:
                continue
            if earlier is None:
                unless_enough.callback(held.close)
            if probe.accepts_a_tensor(index):
                usable.append(index)
                leases[uuids[index]] = held
            elif earlier is None:
                held.close()
        if not usable or (num_devices != -1 and len(usable) < wanted):
            occupied = sorted({*range(count)} - {*usable})
            raise DeviceError(
                f"num_devices={num_devices}: only {len(usable)} of {count} GPUs can be used now. Occupied, or leased "
                f"by other runs: GPUs {occupied}. Request fewer, or wait until another run ends."
            )
        unless_enough.pop_all()
        _own_leases.update(leases)
    return sorted(usable)


def _leased(name: str) -> lease.Lease | None:
    """Lease the GPU. Return None if another run has leased it, and an empty lease if there is no folder for locks."""
    if lease.inherited():  # The GPUs that this process sees are part of its parent's lease.
        return lease.Lease({}, [])
    try:
        return lease.acquire({"gpu": lease.Request(1, [name])}, timeout_s=0)
    except lease.UnsafeFolderError:
        raise
    except ResourceError:
        return None
    except OSError:
        return lease.Lease({}, [])


_CHOOSE = "Choose the GPUs yourself (devices=[0, 1]), or fix the cause."
_END_S = 10.0
_TRY_GPUS = """
import sys
sys.path[:] = sys.argv[1:]
from trainloop.resources import gpus
for line in sys.stdin:
    print(int(gpus._accepts_a_tensor(int(line))), flush=True)
"""


class _Probe:
    """Try GPUs in another process, which ends with its contexts.

    A context would stay in this process: half a GB of a GPU that a rank then uses. In exclusive mode, no rank could use
    the GPU at all.
    """

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", _TRY_GPUS, *sys.path]
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)
        except OSError as error:
            self._errors.close()
            raise DeviceError(f"no GPU can be tried, because no process for it starts: {error}. {_CHOOSE}") from error

    def __enter__(self) -> _Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def accepts_a_tensor(self, index: int) -> bool:
        """Return True if a tensor can be created on the GPU."""
        # In exclusive mode, the process can't use a GPU on which this process has a context.
        return self._ask_for(index) or _accepts_a_tensor_here(index)

    def _ask_for(self, index: int) -> bool:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        answer = ""
        with contextlib.suppress(OSError):  # the process has ended
            process.stdin.write(f"{index}\n")
            process.stdin.flush()
            # An import may print lines, too.
            answer = next((line.strip() for line in process.stdout if line.strip() in ("0", "1")), "")
        if not answer:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            self._errors.seek(0)
            text = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise DeviceError(f"GPU {index} can't be tried, because the process for it has failed: {text}. {_CHOOSE}")
        return answer == "1"


def _accepts_a_tensor_here(index: int) -> bool:
    """Return True if this process uses CUDA and can create a tensor on the GPU."""
    import torch

    return torch.cuda.is_initialized() and _accepts_a_tensor(index)


def _accepts_a_tensor(index: int) -> bool:
    import torch

    try:
        torch.tensor(0.0, device=torch.device("cuda", index))
    except RuntimeError:  # 'busy or unavailable', out of memory, and torch.AcceleratorError
        return False
    return True


def gpu_or_cpu(fit_on_gpu: Callable[[], T], fit_on_cpu: Callable[[], T]) -> T:
    """Train on the GPU. If the library was built without GPU support or finds no device, start again on the CPU.

    Parameters
    ----------
    fit_on_gpu, fit_on_cpu : callable
        Functions that train from the start and return the model.

    Returns
    -------
    object
        The result of the callable that succeeded.

    Raises
    ------
    Exception
        Any error of ``fit_on_cpu``, and any error of ``fit_on_gpu`` that is not about a missing GPU (out of memory,
        wrong arguments), unchanged.

    Warns
    -----
    UserWarning
        If the CPU is used. The warning contains the cause and the remedy.

    Examples
    --------
    >>> gpu_or_cpu(  # doctest: +SKIP
    ...     lambda: LGBMClassifier(device="gpu").fit(x, y), lambda: LGBMClassifier(device="cpu").fit(x, y)
    ... )
    """
    try:
        return fit_on_gpu()
    except Exception as error:
        text = str(error)
        if "out of memory" in text.lower() or re.search(_NO_GPU, text, re.IGNORECASE | re.VERBOSE) is None:
            raise
        cause = f"{type(error).__name__}: {' '.join(text.split())[:300]}"
    warn(
        f"Training starts again on the CPU, because no GPU can be used ({cause}). To use a GPU, install the library's "
        "GPU build and check CUDA_VISIBLE_DEVICES. To silence this warning, choose the CPU."
    )
    return fit_on_cpu()
