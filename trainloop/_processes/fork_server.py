"""Start processes on this machine, with the caller's import path and a folder for sockets: ranks, models to search.

:func:`from_server` forks them from ``multiprocessing``'s fork server, which imports torch once; :func:`spawned` starts
fresh interpreters. A forked process inherits the state of the server, so it first applies the caller's environment,
folder, CPUs, standard output and number of threads (:class:`_ProcessContext`), before any user object is
unpickled. The forked process compares state that a running process cannot change (``LD_PRELOAD``, a lowered priority).
If it differs from the caller's, the process reports this, and the caller spawns processes instead.

The whole program shares the server: :mod:`trainloop._processes.server` prepares it for all other users, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver, reduction, resource_tracker, util
from multiprocessing.process import AuthenticationString, BaseProcess  # type: ignore[attr-defined]
from typing import Any

from trainloop._support.platform import (
    affinity,
    blocked_signals,
    process_config,
    resource,
    set_affinity,
    set_blocked_signals,
    signals_blocked,
)
from trainloop._support.scratch import PREFIX, Scratch, remove, temporary_folder
from trainloop._support.signals import signal_numbers
from trainloop.errors import ConfigurationError
from trainloop.resources.enforce import THREAD_VARIABLES, set_variable, threads_in

METHOD_VARIABLE = "TRAINLOOP_START_METHOD"
"""Environment variable that replaces ``start_method='auto'``, if it is set."""

SERVER_VARIABLE = "TRAINLOOP_FORK_SERVER"
"""Environment variable with the server's settings; ``/proc`` shows it for the server and all of its forks."""

STATUS_LOST = 255
"""multiprocessing's exit code for a process whose fork server has ended."""

Call = tuple[Callable[..., None], tuple[Any, ...]]
"""A function that can be pickled by name, and its arguments."""

# Prefixes of variables that Python, the dynamic loader, torch or a numerical library reads when it is loaded.
_READ_AT_LOAD = (
    *("LD_", "GLIBC_", "MALLOC_", "PYTHON", "LANG", "LC_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "NPY_"),
    *("ATEN_", "TORCH", "PYTORCH_", "DNNL_", "ONEDNN_", "ASAN_", "TSAN_"),
)
_NOT_AT_LOAD = (
    *(*THREAD_VARIABLES, "TORCHINDUCTOR_CACHE_DIR", "TORCHELASTIC_", "TORCH_NCCL_"),
    # Set by scikit-learn and other libraries when they are imported, which may be after the server's start.
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
)
# Lines of /proc/self/status about inherited state that a running process cannot change, or that is not sent.
_UMASK = "Umask"  # a forked process applies it
_INHERITED = (_UMASK, "SigIgn", "Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp", "Mems_allowed_list")
_LINUX_ONLY = "it requires Linux"
_NOT_OWN = "the server itself"
# Delays before each request to the server: no delay for the first; the later ones give a killed server time to end.
_PAUSES_S = (0.0, 0.05, 0.5)


class NoServerError(Exception):
    """No process can be forked from the server; the error's text is the reason."""


class NoOwnServerError(NoServerError):
    """The server ended while it imported its modules, or other code of this program has started the server."""


def chosen_method(asked: str = "auto") -> str:
    """Return the start method: the argument, or the environment's value if the argument is ``'auto'``.

    Raises
    ------
    ConfigurationError
        If the environment's value is unknown.
    """
    method = asked if asked != "auto" else os.environ.get(METHOD_VARIABLE) or "auto"
    if method not in ("auto", "forkserver", "spawn"):
        raise ConfigurationError(f"{METHOD_VARIABLE}={method!r}: must be 'auto', 'forkserver' or 'spawn'.")
    return method


# --------------------------------------------------------------------------------------------------------------------
# In the caller
# --------------------------------------------------------------------------------------------------------------------

_process_lock = threading.Lock()  # several threads may start processes, for which os.environ and __main__ are changed


def begin_server(modules: Sequence[str]) -> None:
    """Start the fork server unless it is running, without waiting until it has imported ``modules``.

    A server that is already running does not import ``modules``: its forks import missing modules themselves.

    Raises
    ------
    NoServerError
        If this program cannot have a server.
    """
    if sys.platform != "linux":
        raise NoServerError(_LINUX_ONLY)
    if getattr(sys, "frozen", False):
        raise NoServerError("this program is frozen into one file")
    forkserver.set_forkserver_preload([f"{__package__}.server"])  # never __main__, which is the default
    # Only a single-threaded server can be forked safely, so its libraries must start no threads; its forks set their
    # own numbers. PYTHONPATH is set because the server's own sys.path would not contain the script's folder.
    changed = {**dict.fromkeys(THREAD_VARIABLES, "1"), "PYTHONPATH": os.pathsep.join(absolute_path())}
    order = {
        "caller": os.getpid(),
        "modules": list(modules),
        "path": absolute_path(),
        "mask": blocked_signals(),
    }
    resource_tracker.ensure_running()  # before signals are blocked: the tracker unblocks them when it starts
    try:
        with _process_lock, signals_blocked(signal_numbers()), _sockets_in_own_folder(), contextlib.ExitStack() as undo:
            for fd in open_standard_descriptors():  # otherwise the server's own descriptors could get these numbers
                undo.callback(os.close, fd)
            if connection.arbitrary_address("AF_UNIX").startswith("\0"):  # type: ignore[attr-defined]
                raise NoServerError(
                    "with this version of Python, every user of this host could connect to the server (CVE-2022-42919)"
                )
            order["environment"] = {name: os.environ.get(name) for name in changed}
            # Under ``python -m pdb``, __main__ has no __spec__, which multiprocessing reads.
            added = {**changed, **_hash_seed(), SERVER_VARIABLE: json.dumps(order)}
            with _variables_set(added), _importing_as_here():
                forkserver.ensure_running()
    except OSError as error:  # ChildProcessError: this process is a fork of the one that owns the server
        raise NoServerError(f"the server can't be started ({error})") from error


_folder: Scratch | None = None  # folder of the server's socket


@contextlib.contextmanager
def _sockets_in_own_folder() -> Iterator[None]:
    """Let ``multiprocessing`` create sockets in a folder that the next launch removes if this process is killed.

    The folder's path is short, since the path of a socket may have at most 107 characters.
    """
    global _folder
    if _folder is None:
        _folder = temporary_folder(PREFIX)
        util.Finalize(None, remove, args=(_folder,), exitpriority=0)
    config = process_config()
    before = {name: value for name, value in config.items() if name == "tempdir"}
    config["tempdir"] = f"/proc/self/fd/{_folder.lock_fd}"
    try:
        yield
    finally:
        del config["tempdir"]
        config.update(before)


def from_server(
    calls: Sequence[Call], modules: Sequence[str], environment: Mapping[str, str] | None = None
) -> list[BaseProcess]:
    """Start a process for each call, forked from the server, with ``environment`` added to the caller's.

    The new processes begin with the signals of :func:`~trainloop._support.signals.signal_numbers` blocked.

    Raises
    ------
    NoServerError
        If there can be no server, if it keeps ending, or if a process forked from it cannot have the caller's state.
    """
    problem = ""
    for pause_s in _PAUSES_S:
        time.sleep(pause_s)
        try:
            return _forked(calls, modules, environment or {})
        except (EOFError, OSError) as error:
            problem = f"the server ended several times while it started processes ({type(error).__name__}: {error})"
    raise NoOwnServerError(problem)


# The pickle of an object whose unpickling calls os._exit(0). Not made by pickle.dumps: coverage may have replaced the
# function by one of its own.
_END = b"cos\n_exit\n(I0\ntR."


def _hash_seed() -> dict[str, str]:
    """Return the variable by which all processes, also of a resumed run, iterate over sets of strings in one order.

    Otherwise ranks would give the classes in a set of names different numbers.
    """
    return {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}


def _wait_for_server() -> None:
    """Wait until the server has imported its modules and can fork: ``Process.start`` would wait with locks held."""
    answer, orders = forkserver.connect_to_new_process([])
    try:
        with contextlib.suppress(BrokenPipeError):
            os.write(orders, _END)  # first: an interrupted wait must not leave a fork without orders
        if not os.read(answer, 1):
            raise EOFError("the server ended")
    finally:
        os.close(answer)
        os.close(orders)


def _forked(calls: Sequence[Call], modules: Sequence[str], changes: Mapping[str, str]) -> list[BaseProcess]:
    begin_server(modules)
    if sys.platform == "win32":
        raise NoServerError(_LINUX_ONLY)
    with _process_lock:
        environment = {**os.environ, **_hash_seed(), **changes}
    _wait_for_server()
    context = multiprocessing.get_context("forkserver")
    held = {*blocked_signals(), *map(int, signal_numbers())}
    processes: list[BaseProcess] = []
    with contextlib.ExitStack() as undo:
        # If Python started without one of these streams, its descriptor may be a file of the user.
        started_with = ((1, sys.__stdout__), (2, sys.__stderr__))
        fds = (fd if stream is not None and _is_open(fd) else _devnull(undo) for fd, stream in started_with)
        streams = tuple(map(_SentDescriptor, fds))
        caller = _ProcessContext(environment, affinity(), sorted(held), fixed_state(environment), limits(), streams)
        reports = []
        try:
            for target, arguments in calls:
                report, sender = context.Pipe(duplex=False)
                undo.callback(report.close)
                reports.append(report)
                with sender, _process_lock, _importing_as_here(), _children_allowed():
                    process = context.Process(target=_take_over, args=(caller, sender, target, arguments))
                    process.start()
                processes.append(process)
            changed = {name for report in reports for name in report.recv()}
            if _NOT_OWN in changed:
                raise NoOwnServerError("other code started the server, or the server ended before it could fork")
            if changed:
                raise NoServerError(f"these settings changed since the server started: {', '.join(sorted(changed))}")
        except BaseException:
            _kill(processes)
            raise
    return processes


def spawned(calls: Sequence[Call], environment: Mapping[str, str] | None = None) -> list[BaseProcess]:
    """Start a fresh interpreter for each call; otherwise like :func:`from_server`."""
    context = multiprocessing.get_context("spawn")
    if sys.platform != "win32":
        resource_tracker.ensure_running()  # the tracker outlives these processes, so it must not get their environment
    processes: list[BaseProcess] = []
    blocked = signals_blocked(signal_numbers())  # a process unblocks them once it handles them
    variables = _variables_set({**_hash_seed(), **(environment or {})})
    with _process_lock, variables, blocked, _importing_as_here(), _children_allowed():
        try:
            for target, arguments in calls:
                process = context.Process(target=target, args=arguments)
                process.start()
                processes.append(process)
        except BaseException:
            _kill(processes)
            raise
    return processes


@contextlib.contextmanager
def _children_allowed() -> Iterator[None]:
    """Let a daemon, such as a worker of a pool, start processes that are no daemons.

    ``multiprocessing`` forbids it, since a daemon that is ended would leave them; these here end with their parent.
    In a worker of Celery, the key for connections is an object of its library, which can't be sent.
    """
    config = process_config()
    daemon, key = config.get("daemon", False), config["authkey"]
    config.update(daemon=False, authkey=AuthenticationString(key))
    try:
        yield
    finally:
        config.update(daemon=daemon, authkey=key)


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()
        process.close()


def absolute_path() -> list[str]:
    """Return ``sys.path`` with absolute folders, so that it does not depend on the current folder."""
    folder = "/"
    with contextlib.suppress(OSError):  # the folder was removed: nothing can be found relative to it
        folder = os.getcwd()
    return [os.path.join(folder, path) for path in sys.path]


def open_standard_descriptors() -> list[int]:
    """Open ``os.devnull`` at each of the descriptors 0 to 2 that is closed; return these descriptors."""
    opened = []
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        opened.append(fd)
    os.close(fd)
    return opened


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _devnull(undo: contextlib.ExitStack) -> int:
    fd = os.open(os.devnull, os.O_RDWR)
    undo.callback(os.close, fd)
    return fd


@contextlib.contextmanager
def _variables_set(environment: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that are started in the context."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            set_variable(name, value)


@contextlib.contextmanager
def _importing_as_here() -> Iterator[None]:
    """Let processes started in this context import from the current folder, and not run the main module again.

    ``multiprocessing`` sends them the module's name or path, for pickles that refer to its classes by name. This
    package sends classes by value, which works even without a path, as in notebooks and on standard input. For ``''``
    in ``sys.path``, it sends the folder in which the program has started, such as before a notebook's %cd. And it sends
    the default start method: one that a library has registered (loky, in workers of joblib) is unknown there.
    """
    method = multiprocessing.get_start_method(allow_none=True)
    if is_registered := method not in (None, *multiprocessing.get_all_start_methods()):
        multiprocessing.set_start_method("spawn", force=True)
    main = sys.modules["__main__"]
    missing = object()
    before = {name: main.__dict__.get(name, missing) for name in ("__file__", "__spec__")}
    main.__dict__["__spec__"] = None
    main.__dict__.pop("__file__", None)
    at = sys.path.index("") if "" in sys.path else None
    if at is not None:
        sys.path.insert(at, absolute_path()[at])
    try:
        yield
    finally:
        if at is not None:
            del sys.path[at]
        for name, value in before.items():
            if value is missing:
                main.__dict__.pop(name, None)
            else:
                main.__dict__[name] = value
        if is_registered:
            multiprocessing.set_start_method(method, force=True)


# --------------------------------------------------------------------------------------------------------------------
# State that a process inherits
# --------------------------------------------------------------------------------------------------------------------


def fixed_state(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return all inherited state that a running process does not change, to compare it between processes.

    Parameters
    ----------
    environment : mapping, optional
        The variables that the process was started with; by default, the variables of this process.
    """
    variables = {
        name: value
        for name, value in (os.environ if environment is None else environment).items()
        if name.startswith(_READ_AT_LOAD) and not name.startswith(_NOT_AT_LOAD)
    }
    if sys.platform != "linux":
        return variables
    lines = _text_or_nothing("/proc/self/status").splitlines()
    status = dict(line.split(":", 1) for line in lines if line.startswith(_INHERITED))
    return {
        **variables,
        **status,
        "session": (os.getsid(0), os.getpgrp()),
        "priority": (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)),
        **{name: _text_or_nothing(f"/proc/self/{name}") for name in ("cgroup", "oom_score_adj")},
        **{name: _link(f"/proc/self/{name}") for name in ("root", "ns/net", "ns/mnt", "ns/user")},
    }


def limits() -> dict[int, tuple[int, int]]:
    """Return this process's resource limits, soft and hard."""
    if resource is None:
        return {}
    numbers = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    return {number: resource.getrlimit(number) for number in numbers}


def _text_or_nothing(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:  # not on this kernel
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


# --------------------------------------------------------------------------------------------------------------------
# In a process forked from the server
# --------------------------------------------------------------------------------------------------------------------


class _SentDescriptor(int):
    """A descriptor that the receiving process gets as one of its own."""

    def __reduce__(self) -> tuple[Any, ...]:
        if sys.platform == "win32":
            raise NoServerError(_LINUX_ONLY)
        return _detached, (reduction.DupFd(self),)


def _detached(descriptor: Any) -> Any:
    return descriptor.detach()


@dataclass(frozen=True)
class _ProcessContext:
    """The caller's state that a forked process applies; ``multiprocessing`` itself sends folder and ``sys.path``."""

    environment: dict[str, str]
    cpus: list[int]
    signal_mask: list[int]
    fixed: dict[str, Any]
    """The caller's :func:`fixed_state`."""
    limits: dict[int, tuple[int, int]]
    streams: tuple[int, ...]
    """Descriptors of standard output and standard error."""

    def changed(self, started_with: Mapping[str, str] | None) -> set[str]:
        """Return the names of the caller's settings that this process cannot have."""
        if started_with is None:
            return {_NOT_OWN}
        here = fixed_state(started_with)
        return {name for name in {*here, *self.fixed} - {_UMASK} if here.get(name) != self.fixed.get(name)}

    def take_over(self) -> None:
        threads_differ = any(os.environ.get(name) != self.environment.get(name) for name in THREAD_VARIABLES)
        os.environ.clear()
        os.environ.update(self.environment)
        for number, fd in enumerate(self.streams, start=1):
            os.dup2(fd, number)
            os.close(fd)
        if sys.stdout is None:
            sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
        else:
            sys.stdout.reconfigure(line_buffering=os.isatty(1) and not sys.stdout.write_through)  # type: ignore[union-attr]
        cpus_differ = self.cpus != affinity()
        if cpus_differ:
            set_affinity(self.cpus)
        if threads_differ or cpus_differ:
            set_threads()
        if _UMASK in self.fixed:
            os.umask(int(self.fixed[_UMASK], 8))
        for limit, values in self.limits.items():
            if limits()[limit] != values:
                assert resource is not None
                resource.setrlimit(limit, values)
        set_blocked_signals(self.signal_mask)
        importlib.invalidate_caches()


def _take_over(
    caller: _ProcessContext, report: connection.Connection, target: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    server = sys.modules.get(f"{__package__}.server")
    changed = caller.changed(getattr(server, "started_with", None))
    if not changed:
        caller.take_over()
    with report:
        try:
            report.send(changed)
        except BrokenPipeError:  # the caller was interrupted, and is about to kill this process
            return
    if not changed:
        target(*arguments)


def set_threads() -> None:
    """Set the thread counts of loaded libraries to the values that the environment variables request now."""

    def number(*names: str) -> int:
        for name in names:
            if (threads := threads_in(os.environ.get(name, ""))) is not None:
                return threads
        return len(affinity())

    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(number("OMP_NUM_THREADS"))
    # numpy's OpenBLAS.
    wanted = number("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
    for path in set(re.findall(r"(/\S*openblas\S*)$", _text_or_nothing("/proc/self/maps"), re.MULTILINE)):
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads"):
            if hasattr(library, name):
                getattr(library, name)(ctypes.c_int(wanted))
                break
