"""A fork server for ranks: a process that loads torch once and forks a rank whenever it is asked.

A spawned rank takes seconds of CPU time until its first step, nearly all for importing torch. The *server* is an
interpreter that has imported torch and does nothing else: it starts no thread, touches no GPU, and holds nothing of the
caller's but the environment. Asked for a process it forks twice, so that the new one is a child of the caller (a
subreaper for that moment): the caller waits for it and gets its exit status, and it notices the caller's end as a
spawned one does. It receives what a spawned process inherits (:mod:`trainloop.launch.forked`) and runs the very program
that ``multiprocessing`` wrote for a fresh interpreter.

Python's own ``multiprocessing.forkserver`` can't be told an environment, descriptors by their number, a folder or CPUs;
there is one for all libraries of a process, with one list of modules; and its children are not the caller's.

Some things can't be changed in a running process, such as ``LD_PRELOAD`` or ``CUDA_VISIBLE_DEVICES``: if they differ
from when the server started, another server is started. It ends with the caller, however that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import connection, context, popen_spawn_posix, reduction, resource_tracker, spawn, util
from typing import Any

from trainloop.errors import ConfigurationError
from trainloop.launch.forked import LAUNCH_VARIABLE, PLACEHOLDER
from trainloop.launch.inherited import circumstances, ignored_signals, interpreter_flags, own_cpus, own_lines, umask
from trainloop.launch.messages import connection_pair, send

__all__ = [
    "ForkServer",
    "ForkServerError",
    "ServedProcess",
    "ServerGoneError",
    "chosen_method",
    "circumstances",
    "load_first",
    "server",
]

METHOD_VARIABLE = "TRAINLOOP_START_METHOD"
"""Replaces ``start_method='auto'``, if it is set."""

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_END_S = 5.0
_LOAD_S = 600.0  # to import torch, from a slow disk that many processes read
_ANSWER_S = 60.0  # to fork


class ForkServerError(Exception):
    """No server can give a process; the text says why."""


class ServerGoneError(ForkServerError):
    """The server is gone, most likely killed: another one may serve."""


class ForkFailedError(ForkServerError):
    """The server can't fork now, for lack of processes or memory, but may later."""


def chosen_method(asked: str = "auto") -> str:
    """The way to start ranks: the argument, or the environment's if that is ``'auto'``.

    Raises
    ------
    ConfigurationError
        If the environment names an unknown one.
    """
    method = asked if asked != "auto" else os.environ.get(METHOD_VARIABLE) or "auto"
    if method not in ("auto", "forkserver", "spawn"):
        raise ConfigurationError(f"{METHOD_VARIABLE}={method!r}: must be 'auto', 'forkserver' or 'spawn'.")
    return method


def no_server(error: ForkServerError | None) -> ConfigurationError:
    """The error to raise where the user asked for a fork server and none can be."""
    return ConfigurationError(
        f"start_method='forkserver': there can be no fork server here: {error}. Use 'spawn', or 'auto', which then "
        "means it."
    )


_first: set[str] = set()


def load_first(name: str) -> None:
    """Have this process's servers load a module before they fork again, which else each rank would do for itself."""
    _first.add(name)


# --------------------------------------------------------------------------------------------------------------------
# One server
# --------------------------------------------------------------------------------------------------------------------


class ForkServer:
    """This process's side of a server. The server loads its modules in the background; :meth:`wait` for it."""

    def __init__(self, now: list[Any] | None = None) -> None:
        self.circumstances = circumstances() if now is None else now
        self._ready = False
        self._reading = threading.Lock()  # several threads' fits wait for its one message
        folder = "/"
        ours, theirs = connection_pair()
        with contextlib.suppress(OSError):  # the folder was removed: nothing can be found relative to it
            folder = os.getcwd()
        program = (
            "import json, os, sys; told, fd, caller = json.loads(sys.argv[1]); sys.path[:] = told; "
            "from trainloop.launch.forked import serve; serve(fd, caller)"
        )
        told = json.dumps([[os.path.join(folder, path) for path in sys.path], theirs.fileno(), os.getpid()])
        environment = {**os.environ, LAUNCH_VARIABLE: PLACEHOLDER, "OPENBLAS_NUM_THREADS": "1"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        # The last argument only describes the process to people who list processes.
        command = [spawn.get_executable(), *interpreter_flags(), "-c", program, told, "--multiprocessing-fork"]
        self._connection = ours
        # Signals to the whole group, such as Ctrl-C, must not end it, even while its interpreter starts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, cwd="/"
                )
        except BaseException:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid: int = self._process.pid

    def fileno(self) -> int:
        """Descriptor of the connection to the server."""
        return self._connection.fileno()

    def ended(self) -> bool:
        """Whether the server has ended, as one that is killed."""
        return self._process.poll() is not None

    def wait(self) -> None:
        """Return once the server can serve.

        Raises
        ------
        ForkServerError
            If it has ended, or must not be forked, as an import in it started a thread or took a GPU.
        """
        if self._ready:
            return
        with self._reading:
            if not self._ready:  # nor has another thread read it by now
                objection = self._answer(_LOAD_S)
                if objection:
                    raise ForkServerError(objection)
                self._ready = True

    def start(self, arguments: Sequence[Any], fds: Sequence[int]) -> int:
        """Start a child of this process that runs like a fresh interpreter; returns its process number.

        Parameters
        ----------
        arguments : sequence of str
            From the interpreter's ``-c`` on.
        fds : sequence of int
            Descriptors that it inherits, beside the standard ones.
        """
        self.wait()
        fds = sorted({*(fd for fd in range(3) if _is_open(fd)), *fds})
        status = own_lines("status")
        asked = {
            "arguments": list(arguments),
            "fds": fds,
            "environment": dict(os.environ),
            "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "ignored": ignored_signals(status),
            "umask": umask(status),
            "cpus": own_cpus(),
            # torch's optimizers import the compiler; each rank would load it for itself.
            "modules": sorted(_first | ({"torch._dynamo"} & sys.modules.keys())),
        }
        try:
            # By descriptor: a folder that was removed is still the current one.
            folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ForkServerError(f"the current folder can't be opened: {error}") from error
        with _closing([folder]), self._reading, _subreaper():
            try:
                send(self._connection, json.dumps(asked).encode(), [folder, *fds])
            except OSError as error:
                raise ServerGoneError(f"it is gone: {error}") from error
            answer = self._answer(_ANSWER_S)
        numbers = answer.split()
        if len(numbers) != 2 or not answer.replace(" ", "").isdigit():
            raise ForkFailedError(f"it can't fork: {answer}")
        if numbers[1] != str(os.getpid()):
            raise ForkServerError("this system can't make a forked process the child of another one")
        return int(numbers[0])

    def _answer(self, timeout_s: float) -> str:
        try:
            if not connection.wait([self._connection], timeout_s):
                raise ServerGoneError(f"it has not answered for {timeout_s:g} s")
            answer = self._connection.recv(1 << 16)
        except (OSError, ValueError) as error:  # ValueError: another thread has closed it
            raise ServerGoneError(f"it is gone: {error}") from error
        if not answer:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            code = self._process.returncode
            if self._ready or code is None or code <= 0:
                raise ServerGoneError(f"it ended, with exit code {code}")
            raise ForkServerError(f"it ended while it loaded torch, with exit code {code}; its error stands above")
        return answer.decode().strip()

    def forget(self) -> None:
        """Let go of the server, in a fork of the process that owns it."""
        self._connection.close()
        self._process.returncode = 0  # not this process's to wait for

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for the server
        self._connection.close()
        if not self._ready:  # else it would first load all of torch
            self._process.kill()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_current: ForkServer | None = None
_cannot: tuple[str, list[Any]] | None = None
"""The reason why there can be no server, and the circumstances of that."""
_lock = threading.RLock()


def server(now: list[Any] | None = None) -> ForkServer:
    """This process's server; a new one if there is none or it no longer fits. Does not wait for it.

    Parameters
    ----------
    now : list, optional
        The present :func:`~trainloop.launch.inherited.circumstances`, which take a millisecond to read.

    Raises
    ------
    ForkServerError
        If there can't be one, so that ranks must be spawned.
    """
    global _current, _cannot
    with _lock:
        objection = _objection()
        now = circumstances() if now is None else now
        if objection is None and _cannot is not None and _cannot[1] == now:
            objection = _cannot[0]
        if objection is not None:
            raise ForkServerError(objection)
        if _current is not None and (_current.ended() or _current.circumstances != now):
            end_server()
        if _current is None:
            try:
                _current = ForkServer(now)
            except OSError as error:
                raise ForkServerError(f"it can't be started: {error}") from error
            atexit.register(end_server)
        return _current


def end_server(objection: str | None = None, *, of: ForkServer | None = None) -> None:
    """End this process's server, or ``of`` if that is it.

    ``objection``: why none shall follow, unless circumstances change.
    """
    global _current, _cannot
    with _lock:
        if of is not None and of is not _current:  # another thread has ended it
            return
        atexit.unregister(end_server)
        _cannot = None if objection is None else (objection, circumstances())
        ended, _current = _current, None
        if ended is not None:
            ended.close()


def _forget_server() -> None:
    global _current, _lock
    _lock = threading.RLock()
    ended, _current = _current, None
    if ended is not None:
        ended.forget()


os.register_at_fork(after_in_child=_forget_server)


def _objection() -> str | None:
    """The reason why this process can have no server; else empty."""
    if sys.platform != "linux" or not os.path.exists("/proc/self/status"):
        return "it takes Linux with /proc"
    if getattr(sys, "frozen", False):
        return "this program is frozen into one file"
    if not spawn.get_executable():
        return "Python does not know its own executable (sys.executable)"
    if any(os.environ.get(name) for name in ("ASAN_OPTIONS", "TSAN_OPTIONS")):
        return "this program runs under a sanitizer"
    return None


# --------------------------------------------------------------------------------------------------------------------
# As multiprocessing starts it
# --------------------------------------------------------------------------------------------------------------------


class _Popen(popen_spawn_posix.Popen):
    """Gives a process from the server what a spawned one gets, through the same two pipes."""

    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        tracker_fd = resource_tracker.getfd()
        assert tracker_fd is not None
        told = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj._name), told)
            reduction.dump(process_obj, told)
        finally:
            context.set_spawning_popen(None)
        objection: ForkServerError | None = None
        for start in (_served, _served, _spawned):  # a server that somebody has killed is replaced once
            if start is _spawned and not process_obj.may_spawn:
                raise no_server(objection)
            with contextlib.ExitStack() as failed:
                # New pipes each time, so that a process forked by the killed server reads nothing.
                sentinel, child_w = _pipe(failed)
                child_r, parent_w = _pipe(failed)
                command = spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=child_r)
                fds = [*self._fds, tracker_fd, child_r, child_w]
                try:
                    self.pid = start(command, fds)
                except ForkServerError as error:
                    objection = error
                    continue
                failed.pop_all()
                break
        self.sentinel = sentinel
        self.finalizer = util.Finalize(self, _close, (sentinel, parent_w))
        os.close(child_r)
        os.close(child_w)
        # A process killed meanwhile still has its exit status.
        with contextlib.suppress(BrokenPipeError), open(parent_w, "wb", closefd=False) as file:
            file.write(told.getbuffer())


class ServedProcess(context.SpawnProcess):
    """A ``multiprocessing`` process from this process's server."""

    may_spawn = True
    """Whether to start a fresh interpreter if the server fails at the last moment, rather than raise."""

    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:
        return _Popen(process_obj)


def _served(command: list[Any], fds: list[int]) -> int:
    with _lock:
        # For each rank: the launch has compared circumstances.
        forks = server() if _current is None or _current.ended() else _current
        try:
            return forks.start(command[command.index("-c") :], fds)
        except ForkFailedError:
            raise
        except ServerGoneError:
            end_server()
            raise
        except ForkServerError as error:
            end_server(str(error))
            raise


def _spawned(command: list[Any], fds: list[int]) -> int:
    return util.spawnv_passfds(os.fsencode(spawn.get_executable()), command, fds)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _pipe(undo: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for fd in ends:
        undo.callback(os.close, fd)
    return ends


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _closing(fds: Sequence[int]) -> Iterator[None]:
    try:
        yield
    finally:
        _close(*fds)


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Let this process adopt orphaned descendants: the fork whose parent has just ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    already = ctypes.c_int(0)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(already), 0, 0, 0)
    if already.value:
        yield
        return
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
