"""Failures of ranks: find the first failure, describe it, and suggest a remedy."""

from __future__ import annotations

import json
import linecache
import os
import re
import signal
import time
import traceback as traceback_module
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import torch

from trainloop._processes.fork_server import STATUS_LOST
from trainloop._support.platform import read_into
from trainloop._transfer.pages import write_all
from trainloop.errors import TrainLoopError, WorkerFailedError

# Errors of a rank that has lost its neighbour, from Gloo (TCP), NCCL and the process group's store.
_LOST_NEIGHBOUR = re.compile(
    r"connection (closed|reset|refused|was likely closed)|broken pipe|socket closed|failed to (recv|send)|"
    r"gloo[/\\]transport|remote process exited|nccl(remote|system|internal) ?error|ncclcomm(was)? ?aborted|"
    r"nccl communicator was aborted|process group.* (aborted|is not initialized)|store.* connection",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r"timed out|timeout|wait timeout", re.IGNORECASE)


LOST_HOST = "LostHost"
"""Failure type of ranks whose host was lost."""
RECORDED = "trainloop_recorded"
"""Name of an attribute that exceptions get: it contains the file in which a ``FailureRecorder`` recorded the step."""


def about_record(path: str) -> str:
    """Return the sentence that names the record of a failure, and the code that repeats the failed step."""
    return f'The failure was recorded. Repeat it in one process, in your own script: tl.replay("{path}")'


@dataclass(frozen=True)
class Failure:
    """A rank's failure, recorded by the rank itself or observed by the parent."""

    rank: int
    """Global rank."""
    time_ns: int
    """Time of the failure, by the monotonic clock of the rank's node."""
    type: str | None
    """Name of the exception's class; ``None`` if the process died without an exception."""
    message: str = ""
    """Text of the exception."""
    traceback: str = ""
    """Traceback as Python would print it."""
    exitcode: int | None = None
    """Exit code, or minus a signal's number; ``None`` if the process did not end by itself."""
    consequence: bool = False
    """True if the failure probably results from the loss of another rank, and so is not the run's first failure."""
    timeout: bool = False
    """True if a collective, or the wait at a step boundary, timed out: some rank hangs."""
    final: bool = False
    """True if a restart would not help: this package rejected something, or a user stopped the run."""
    recorded: str | None = None
    """File in which a ``FailureRecorder`` has recorded the step."""


def with_note(error: WorkerFailedError, note: str) -> WorkerFailedError:
    """Return the error with a sentence added to its first line."""
    first, newline, rest = error.message.partition("\n")
    message = f"{first} {note}{newline}{rest}"
    return WorkerFailedError(
        message, rank=error.rank, exitcode=error.exitcode, traceback=error.traceback, recorded=error.recorded
    )


class RestartPolicy(Protocol):
    """Decide whether failed ranks are started again."""

    def before_start(self) -> None:
        """Prepare for the next start of ranks."""

    def error_that_ends_run(self, failure: Failure, error: WorkerFailedError) -> WorkerFailedError | None:
        """Return the error that ends the run, or ``None`` to start the ranks again. All ranks have ended by then."""


def _chain(error: BaseException) -> list[BaseException]:
    """Return the error, its cause or context, and so on."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    # Contexts may form a cycle if an exception was raised again.
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return chain


_OUT_OF_SHARED_MEMORY = (
    r"unable to (mmap|open|write|allocate|resize).*(shared memory|/torch_)|bus error|No space left on device.*shm|"
    r"torch_shm_manager|creating shared memory segment"
)
"""Errors of torch, NCCL and the kernel when ``/dev/shm`` is full."""
_MORE_SHARED_MEMORY = (
    "shared memory ran out: give the container a larger /dev/shm (docker run --shm-size=8g), or use fewer "
    "DataLoader workers, or num_workers=0."
)


def explain_shared_memory(error: RuntimeError) -> None:
    """Add a remedy to the error of a loader whose workers found no space in ``/dev/shm``."""
    if any(re.search(_OUT_OF_SHARED_MEMORY, str(cause), re.IGNORECASE) for cause in _chain(error)):
        error.args = (f"{error}\nHint: {_MORE_SHARED_MEMORY}",)  # Python 3.10 has no add_note


def is_timeout(error: BaseException) -> bool:
    """Return True if a collective, or the wait at a step boundary, ran out of time."""
    return any(
        (isinstance(e, TimeoutError) and "step boundary" in str(e))
        or (_is_communication(e) and bool(_TIMEOUT.search(str(e))))
        for e in _chain(error)
    )


_COLLECTIVES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/torch/autograd/")


def _is_communication(error: BaseException) -> bool:
    if isinstance(error, torch.distributed.DistError):
        return True
    # Gloo raises plain RuntimeErrors. Most begin with a position in Gloo's source. Others, such as "Application timeout
    # caused pair closure" and a store's "Wait timeout", are recognised by the file that raised them.
    return isinstance(error, RuntimeError) and (
        bool(re.search(r"gloo[/\\]|nccl|process group|store", str(error), re.IGNORECASE))
        or any(part in _raised_in(error) for part in _COLLECTIVES)
    )


def _raised_in(error: BaseException) -> str:
    """Return the file of the innermost Python frame."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return "" if place is None else place.tb_frame.f_code.co_filename.replace(os.sep, "/")


def _is_consequence(error: BaseException) -> bool:
    return any(
        isinstance(e, ConnectionAbortedError) or (_is_communication(e) and bool(_LOST_NEIGHBOUR.search(str(e))))
        for e in _chain(error)
    )


def failure_of(error: BaseException, rank: int) -> Failure:
    """Describe an exception that ends this rank. Call it before the process group is left."""
    timeout = is_timeout(error)
    exitcode = 1
    if isinstance(error, SystemExit):
        # Like the interpreter: after sys.exit('text'), the exit code is 1.
        exitcode = error.code if isinstance(error.code, int) else int(error.code is not None)
    return Failure(
        rank=rank,
        time_ns=time.monotonic_ns(),
        type=type(error).__qualname__,
        message=_shortened(_text_of(error), _MAX_MESSAGE),
        traceback=_shortened_traceback("".join(traceback_module.format_exception(error))),
        exitcode=exitcode,
        consequence=not timeout and _is_consequence(error),
        timeout=timeout,
        final=isinstance(error, (TrainLoopError, KeyboardInterrupt)),
        recorded=getattr(error, RECORDED, None),
    )


def described(error: BaseException) -> str:
    """Return an exception's type and first line, cut to fit into a sentence; it never raises."""
    return f"{type(error).__qualname__}: {_first_line(_text_of(error))}"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's __str__
        return "<its text can't be computed>"


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Return the failure that caused the others: the earliest that is not a consequence of another.

    If all failures are probably consequences, the failure of a rank that died precedes those of ranks that only lost a
    connection.
    """
    return min(failures, key=lambda f: (f.consequence, f.consequence and f.type is not None, f.time_ns))


def exit_text(exitcode: int | None) -> str:
    """Return a string such as ``exit code 3`` or ``signal SIGKILL``."""
    if exitcode is None:
        return "no exit code"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return f"signal {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"signal {-exitcode}"


# torch's allocators ("CUDA out of memory"), CUDA and NCCL ("Cuda failure 'out of memory'"), and the libraries that
# allocate without torch: cuBLAS, cuDNN 8 and 9, cuSPARSE, cuSOLVER, cuFFT, hipBLAS, MIOpen.
_GPU_MEMORY = (
    r"(?<!host )out of memory|OutOfMemoryError|STATUS_ALLOC_FAILED|DEVICE_ALLOCATION_FAILED|CUFFT_ALLOC_FAILED|"
    r"miopenStatusAllocFailed|Failed to CUDA (calloc|malloc|host alloc)"
)
# These libraries also fail in this way if their memory can't be allocated, and for other reasons.
_PERHAPS_GPU_MEMORY = (
    r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS)_STATUS_NOT_INITIALIZED|CUDNN_STATUS_INTERNAL_ERROR|"
    r"unable to find an engine to execute|ncclUnhandledCudaError|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES"
)
_HOST_MEMORY = (
    r"MemoryError|DefaultCPUAllocator: not enough memory|can('t|not) allocate memory|bad_alloc|host out of memory|"
    r"HOST_ALLOCATION_FAILED"
)

_OTHER_COLLECTIVES = (
    "ranks called different collectives, or passed different shapes. Every rank must make the same calls in the "
    "same order. For different shapes, as with an uneven last batch, use "
    "trainloop.distributed.all_gather(value, concat=True)."
)
_DETAIL = (
    "With TORCH_DISTRIBUTED_DEBUG=DETAIL, which is set, torch's own DistributedDataParallel crashes (at least torch "
    "2.13 to 2.15 with Gloo): set INFO, or leave it out."
)
# Advice by patterns in the traceback or message; the first match wins.
_HINTS = [
    (_OUT_OF_SHARED_MEMORY, _MORE_SHARED_MEMORY),
    (
        r"SemLock[\s\S]*OSError: \[Errno",
        "a semaphore, as DataLoader workers need it, could not be created: /dev/shm must be writable and have free "
        "space (docker run --shm-size=8g). Or use num_workers=0.",
    ),
    (
        r"unable to find address for: lo\b",
        "the loopback interface has no address, as in a network namespace of its own: ip link set lo up.",
    ),
    (_GPU_MEMORY, "the GPU's memory ran out: use a smaller batch_size with grad_accumulation, or use_amp."),
    (
        _HOST_MEMORY,
        "memory ran out: use a smaller batch_size, fewer DataLoader workers or fewer ranks, or raise the memory limit.",
    ),
    (
        _PERHAPS_GPU_MEMORY,
        "a library could not start work on the GPU. The usual cause is that the GPU's memory ran out: use a smaller "
        "batch_size with grad_accumulation, or use_amp.",
    ),
    (
        r"Address already in use|EADDRINUSE",
        "the port is in use: choose another one with MASTER_PORT or init_method.",
    ),
    (r"Too many open files", "file descriptors ran out: raise the limit (ulimit -n), or use fewer DataLoader workers."),
    (
        r"Expected to mark a variable ready only once",
        "pass use_reentrant=False to torch.utils.checkpoint, or ddp_model_args={'static_graph': True} if every step "
        "runs the same layers.",
    ),
    (
        r"Expected to have finished reduction|find_unused_parameters|did not receive grad",
        "some parameters do not contribute to the loss: pass ddp_model_args={'find_unused_parameters': True}, or "
        "freeze them with requires_grad_(False).",
    ),
    (
        r"Expected sparse gradient to be defined",
        "DDP needs a gradient of each sparse embedding from every rank in every step, even with "
        "find_unused_parameters. Add `table(some_rows).sum() * 0` to the loss, or use sparse=False.",
    ),
    (
        r"Expected variable to have sparse gradient",
        "DDP needs sparse gradients only for a sparse embedding. If the loss has a penalty on its weights, or a layer "
        "shares them, use sparse=False.",
    ),
    (
        r"DataLoader worker .* (exited unexpectedly|is killed)|(?s:dataloader\.py.*(ConnectionResetError|EOFError))",
        "a DataLoader worker died. The usual cause is lack of memory. With num_workers=0, the rank raises its error.",
    ),
    (
        r"op\.preamble\.length|collective mismatch|gloo::EnforceNotMet|Detected mismatch between collectives",
        _OTHER_COLLECTIVES,
    ),
    (
        r"(?s:(distributed_c10d|distributed/nn/functional).*Connection (reset|closed) by peer)",
        "another rank left in the middle of a collective. If no rank failed before, ranks passed different shapes to "
        "torch's collective, as with an uneven last batch: use trainloop.distributed.all_gather(value, concat=True).",
    ),
]


def is_about_memory(error: BaseException) -> bool | None:
    """Return True if memory ran out, on a GPU or on the host; ``None`` if this is a usual cause, but not the only one.

    Examples
    --------
    >>> is_about_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, WorkerFailedError) and error.exitcode == -9:  # the kernel kills a process when memory runs out
        return True
    text = str(error)
    if re.search(f"{_GPU_MEMORY}|{_HOST_MEMORY}", text, re.IGNORECASE):
        return True
    return None if re.search(_PERHAPS_GPU_MEMORY, text, re.IGNORECASE) else False


_IN_HOOKS = (
    "Calls of the model, evaluations, predictions and operations on sharded parameters in hooks must run on every "
    "rank, too, not under `if rank == 0:`."
)
# Frames of torch's exchanges for a unit of fsdp, and of other collectives.
_IN_UNIT = "_fully_shard"
_IN_COLLECTIVE = r"distributed_c10d\.py|_functional_collectives\.py|trainloop/distributed/"
_SAME_UNITS = (
    "In fsdp, get_loss must run the same blocks on every rank, the same number of times, and the loss must depend on "
    "them. For a block that a rank's batch doesn't need, add `block(x).sum() * 0` to the loss, or use gpu_mode='ddp' "
    f"with ddp_model_args={{'find_unused_parameters': True}}. {_IN_HOOKS}"
)


def hint(failure: Failure, stacks: Collection[str] = ()) -> str:
    """Return advice if the cause is known; otherwise an empty string. ``stacks``: Python stacks of the ranks."""
    in_unit = any(_IN_UNIT in stack for stack in (failure.traceback, *stacks))
    if failure.timeout:
        return (
            "at least one rank never reached a collective operation that others were waiting in (see the stacks "
            f"below). Every rank must make the same collective calls. {_IN_HOOKS} For slow ranks, raise "
            "TrainLoop(timeout=seconds)." + (f" {_SAME_UNITS}" if in_unit else "")
        )
    text = f"{failure.type}: {failure.message}\n{failure.traceback}"
    if _MORE_SHARED_MEMORY in text:
        return ""  # the rank has added the advice to its error
    for pattern, advice in _HINTS:
        if re.search(pattern, text, re.IGNORECASE):
            return _SAME_UNITS if in_unit and "collective" in advice else advice
    if failure.type is None and failure.exitcode == STATUS_LOST:
        return (
            "a possible cause is that the fork server, which starts the ranks, was killed. It is a process of this "
            "program, listed as multiprocessing.forkserver. The next call starts a new one. start_method='spawn' needs "
            "no fork server."
        )
    if failure.type is None and failure.exitcode is not None and failure.exitcode < 0:
        ended_by = exit_text(failure.exitcode).removeprefix("signal ")
        if ended_by == "SIGKILL":
            return (
                "either the kernel killed the rank because memory ran out (see dmesg, or the memory limit of the job "
                "or container), or another process sent the signal."
            )
        # A page of a mapped file could not be allocated: the memory file system is full.
        if ended_by == "SIGBUS":
            return _MORE_SHARED_MEMORY
        if ended_by in ("SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL"):
            crashed = "native code crashed. The Python stacks at that moment are below, if they could be written."
            if ended_by == "SIGSEGV" and os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
                return f"{crashed} {_DETAIL}"
            # Gloo aborts the process if another rank sends something else than this one expects.
            if ended_by == "SIGABRT" and in_unit:
                return f"{crashed} {_SAME_UNITS}"
            if ended_by == "SIGABRT" and any(re.search(_IN_COLLECTIVE, stack) for stack in stacks):
                return f"native code crashed in a collective. The usual cause is that {_OTHER_COLLECTIVES}"
            return crashed
    return ""


def worker_failed_error(
    failure: Failure,
    *,
    world_size: int,
    ended: Sequence[int],
    stacks: dict[int, str] | None = None,
    hanging: Sequence[int] = (),
    others_done: bool = False,
    timeout_s: float = 0.0,
) -> WorkerFailedError:
    """Return the error that ``launch`` raises.

    Parameters
    ----------
    failure : Failure
        The first failure.
    world_size : int
        Number of ranks of the run.
    ended : sequence of int
        Global ranks that were ended because of this failure.
    stacks : dict of int to str, optional
        Python stacks by rank, to add to the message (after a hang, or a crash in native code).
    hanging : sequence of int
        After a time-out: the ranks that others waited for, as far as known.
    others_done : bool
        True if the waiting ranks had finished their work; False if they waited in a collective.
    timeout_s : float
        Seconds that ranks waited.
    """
    who = f"rank {failure.rank} of {world_size}"
    if hanging:
        waiting = _names([r for r in range(world_size) if r not in hanging])
        who = f"{_names(hanging)} of {world_size}"
        done = " finished all work and" if others_done else ""
        what = f"{who} {'hangs' if len(hanging) == 1 else 'hang'}: {waiting}{done} waited {timeout_s:g} s for "
        what += "it" if len(hanging) == 1 else "them"
        if world_size == 1:
            what = f"{who} hangs: it has spent {timeout_s:g} s in one call, or waiting for a process or thread"
    elif failure.timeout:
        what = f"all ranks wait for each other: {who} has waited for {timeout_s:g} s"
    elif failure.type == LOST_HOST:
        what = failure.message
    elif failure.type == "SystemExit":
        what = f"{who} {describe_failure(failure)} (SystemExit; its traceback follows)"
    else:
        what = f"{who} {describe_failure(failure)}{'' if failure.type is None else ' (its traceback follows)'}"
    others = ""
    if ended and not failure.timeout:
        others = f"; {_names(ended)} {'was' if len(ended) == 1 else 'were'} ended because of it"
    message = f"{what}{others}."
    advice = hint(failure, (stacks or {}).values())
    if advice:
        message += f"\nHint: {advice}"
    if failure.recorded is not None:
        message += f"\n{about_record(failure.recorded)}"
    for rank, stack in sorted((stacks or {}).items()):
        message += f"\n\nPython stack of rank {rank}:\n{stack.rstrip()}"
    if failure.timeout:  # the stacks contain the traceback
        return WorkerFailedError(message, rank=hanging[0] if hanging else failure.rank)
    text = _with_lines_of_cells(failure.traceback)
    return WorkerFailedError(
        message, rank=failure.rank, exitcode=failure.exitcode, traceback=text, recorded=failure.recorded
    )


_FRAME_WITHOUT_LINE = re.compile(r'^([ |]*)File "(.+)", line (\d+)(?:, in .*)?\n(?!\1  )', re.MULTILINE)


def _with_lines_of_cells(text: str) -> str:
    """Add the source lines of a notebook's cells to a rank's traceback: only the notebook's process has them."""

    def with_line(frame: re.Match[str]) -> str:
        indent, file, number = frame.groups()
        line = "" if os.path.exists(file) else linecache.getline(file, int(number)).strip()
        return f"{frame[0]}{indent}  {line}\n" if line else frame[0]

    return _FRAME_WITHOUT_LINE.sub(with_line, text)


def describe_failure(failure: Failure) -> str:
    """Return a one-line description of a failure, to follow ``rank N``."""
    if failure.timeout:
        alive = failure.type is None and failure.exitcode is None
        return "hangs" if alive else "was waiting for a rank that hangs"
    if failure.type == "SystemExit":
        return f"ended itself with {exit_text(failure.exitcode)}"
    if failure.type == LOST_HOST:
        return f"was lost when its host failed ({failure.message})"
    if failure.type is not None:
        return f"raised {failure.type}: {_first_line(failure.message)}"
    if failure.exitcode is not None and failure.exitcode < 0:
        return f"was killed by {exit_text(failure.exitcode)}"
    return f"ended without an error, with {exit_text(failure.exitcode)}, before its work was done"


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _first_line(text: str) -> str:
    lines = text.strip().splitlines() or [""]
    first = _shortened(lines[0], _MAX_FIRST_LINE)
    return first if len(lines) == 1 else f"{first} ..."


_MAX_FIRST_LINE = 600  # long enough for the messages of this package and of torch, which end with advice
_MAX_MESSAGE, _MAX_LINE, _MAX_TRACEBACK = 16_384, 4096, 65_536


def _shortened(text: str, most: int) -> str:
    """Cut the middle out of a long string, and put the number of omitted characters in its place."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} [... {len(text) - 2 * (most // 2):,} characters left out ...] {text[-(most // 2) :]}"


def _shortened_traceback(text: str) -> str:
    """Shorten long lines (a tensor's ``repr``, a server's HTML page), so that the rest stays visible on the screen."""
    if len(text) <= _MAX_LINE:
        return text
    lines = (_shortened(line, _MAX_LINE) for line in text.splitlines(keepends=True))
    return _shortened("".join(lines), _MAX_TRACEBACK)


def write_record(fd: int, failure: Failure) -> None:
    """Write a failure's record for the parent to read; an existing record is not overwritten."""
    # Errors while the rank unwinds are consequences of the first error.
    if os.fstat(fd).st_size == 0:
        write_all(fd, memoryview(json.dumps(asdict(failure)).encode() + b"\n"), 0)


def read_record(fd: int) -> Failure | None:
    """Return the record that :func:`write_record` wrote; ``None`` if there is no record, or only a part of it yet.

    The parent may read while the rank writes: a reader can see the first pages of a long record before the others.
    """
    data = read_text(fd)
    return Failure(**json.loads(data)) if data.endswith(b"\n") else None  # JSON has no line break


def read_text(fd: int) -> bytes:
    """Return the content of a file that a rank writes to."""
    data = bytearray(os.fstat(fd).st_size)
    return bytes(data[: read_into(fd, memoryview(data), 0)])
