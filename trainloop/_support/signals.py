"""Handle signals as requests to stop, in the process that calls ``fit``, in ranks and in loader workers.

::

    fit                      with signals() as received: ...; received.raise_if_any()    from the first line to the last
      while ranks run            with signals(stop):                          ranks receive earlier signals, too
    a rank                   with rank_signals(stop, ...):
      a loader's worker          WorkerInit(users_function)                   outlives signals to the whole group
    evaluate_*, predict_*    with signals(at_once=True): ...                   outside of fit no state must be saved

Slurm, containers and terminals send a signal to a whole process group: to the caller, its ranks and their loader
workers at the same time. Only ranks can decide at which step all of them stop, so the caller waits for them, and
workers continue to load until then.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from weakref import WeakSet

from trainloop._support.platform import process_config, signals_blocked, unblock_signals
from trainloop._support.stopping import CHECKPOINT, HANGUP, INTERRUPT, NOTICE, TERMINATE, StopAgreement

REASON_OF_SIGNAL = {
    "SIGINT": INTERRUPT,
    "SIGTERM": TERMINATE,
    "SIGHUP": HANGUP,
    "SIGUSR1": CHECKPOINT,
    "SIGUSR2": NOTICE,
}
"""Request of each signal. SIGUSR2 is a request only in the jobs of :func:`signal_numbers`."""

# Set in jobs of submitit, LSF and Grid Engine, which send SIGUSR2 some time before they end a job. Elsewhere, programs
# use this signal for other purposes.
_ANNOUNCING = ("SUBMITIT_EXECUTOR", "LSB_JOBID", "SGE_TASK_ID")

_SAME_SIGNAL_S = 30.0  # longest time until the last process of a group handles a signal that all of them received
_CHECK_S = 0.1


def status_of(reasons: int) -> int:
    """Return the exit status of a process that a signal ends: 128 + the signal's number, as in shells."""
    if reasons & (TERMINATE | HANGUP):
        return 143
    return 138 if reasons & CHECKPOINT else 140


def signal_numbers() -> list[int]:
    """Return the numbers of the signals that are requests in this process, of those that this system has.

    SIGUSR2 is among them only if an environment variable tells that this is a job of a scheduler or launcher that sends
    it before it ends the job.
    """
    names = [name for name in REASON_OF_SIGNAL if name != "SIGUSR2" or any(map(os.environ.get, _ANNOUNCING))]
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def names_of(reasons: int) -> list[str]:
    """Return the names of the signals among ``reasons``."""
    return [name for name, reason in REASON_OF_SIGNAL.items() if reasons & reason]


class ReceivedSignals:
    """The signals that arrived during a context of :func:`signals`.

    Parameters
    ----------
    at_once : bool
        True if a signal ends the work immediately.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.at_once = at_once
        self.reasons = 0
        """The values of :data:`REASON_OF_SIGNAL`, OR-ed."""

    def note(self, reasons: int) -> None:
        """Add signals that another process, such as a rank, received. Reasons that are not signals are ignored."""
        self.reasons |= reasons & (INTERRUPT | TERMINATE | HANGUP | CHECKPOINT | NOTICE)

    def raise_if_any(self) -> None:
        """If a signal has arrived, raise ``KeyboardInterrupt``, or ``SystemExit`` with status 143, 138 or 140."""
        if self.reasons & INTERRUPT:
            raise KeyboardInterrupt
        if self.reasons:
            raise SystemExit(status_of(self.reasons))


class _Handlers:
    """The handlers of one process, for the outermost context of :func:`signals` in it."""

    def __init__(self, at_once: bool) -> None:
        self.pid = os.getpid()
        self.received = ReceivedSignals(at_once)
        self.mark = _Mark()
        self.stops: tuple[StopAgreement, ...] = ()
        self.ended: Callable[[], bool] | None = None
        self.end: type[BaseException] = SystemExit
        self.held = 0
        self.postponed = False
        self._interrupts = 0
        self._users: dict[int, Any] = {}
        self._raised: list[BaseException] = []

    def install(self) -> None:
        for number in signal_numbers():
            current = signal.getsignal(number)
            # None: a handler that was not installed from Python and could not be restored.
            # SIG_IGN: the program that started this process (nohup, a shell) wants it to ignore this signal.
            if current is None or current is signal.SIG_IGN:
                continue
            self._users[number] = current
            signal.signal(number, self.on_interrupt if number == signal.SIGINT else self.on_request)

    def install_in_rank(self) -> None:
        """Handle Ctrl-C like other signals; :meth:`restore` makes signals do nothing."""
        for number in signal_numbers():
            # nohup makes the launching process ignore SIGHUP, too. That process ends its ranks by SIGTERM.
            if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGTERM:
                self._users[number] = _nothing
                signal.signal(number, self.on_request)

    def handles(self, number: int) -> bool:
        return number in self._users

    def restore(self) -> None:
        # Signals are blocked meanwhile: one that arrives now waits for the previous handler, and is not lost.
        with signals_blocked(self._users):
            for number, handler in self._users.items():
                signal.signal(number, handler)

    def raise_postponed(self) -> None:
        """Raise the first exception of users' handlers, or a postponed Ctrl-C."""
        if self._raised:
            raise self._raised[0]
        if self.postponed and not self.held:
            self.postponed = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def also(
        self, stop: StopAgreement | None, ended: Callable[[], bool] | None, end: type[BaseException]
    ) -> Iterator[None]:
        """During the context, pass signals to ``stop`` as well; signals that arrived before are passed at once."""
        if stop is None or stop in self.stops:
            yield
            return
        before = self.stops, self.ended, self.end
        self.stops = (*self.stops, stop)
        if ended is not None:
            self.ended, self.end = ended, end
        if self.received.reasons:
            stop.request(self.received.reasons)
        try:
            yield
        finally:
            self.stops, self.ended, self.end = before

    def on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.pid:
            _in_worker(number, frame)
            return
        self._interrupts += 1
        if self._users[number] is not signal.default_int_handler:
            self._call_user(number, frame)
        self._request(INTERRUPT)
        if self.received.at_once or self._interrupts > 1:
            if not self.held:
                raise self._raised[0] if self.received.at_once and self._raised else KeyboardInterrupt
            self.postponed = True
            return
        _print_line("Interrupted: training stops after this step. Press Ctrl-C again to stop at once.")

    def on_request(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.pid:
            _in_worker(number, frame)
            return
        if number == signal.SIGTERM and self.ended is not None and self.ended():
            if sys.exc_info()[0] is None:
                raise self.end
            return
        self._request(REASON_OF_SIGNAL[signal.Signals(number).name])
        self._call_user(number, frame)
        if self.received.at_once:
            self._raised.append(SystemExit(status_of(self.received.reasons)))
            if not self.held:
                raise self._raised[0]

    def _request(self, reason: int) -> None:
        self.mark.set_received()
        self.received.note(reason)
        for stop in self.stops:
            stop.request(reason)

    def _call_user(self, number: int, frame: FrameType | None) -> None:
        user = self._users[number]
        if callable(user):
            try:
                user(number, frame)
            except BaseException as error:  # usually SystemExit
                self._raised.append(error)


_outermost: _Handlers | None = None


def _handlers_here() -> _Handlers | None:
    """Return this process's handlers; None outside of the main thread, where Python allows no handlers."""
    here = _outermost is not None and _outermost.pid == os.getpid()
    return _outermost if here and threading.current_thread() is threading.main_thread() else None


@contextlib.contextmanager
def signals(
    stop: StopAgreement | None = None,
    *,
    at_once: bool = False,
    ended: Callable[[], bool] | None = None,
    end: type[BaseException] = SystemExit,
) -> Iterator[ReceivedSignals]:
    """Turn Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and, in some jobs, SIGUSR2 into requests during the context.

    The first Ctrl-C requests a stop at the next boundary and prints a line; the second raises ``KeyboardInterrupt``
    immediately. The other signals request a stop, and then the user's own handler runs; an exception that it raises
    (e.g. by ``sys.exit()``) is raised at the end of the context, so that it can't prevent the last checkpoint. Then the
    handlers are restored. In a thread other than the main one nothing is done, since Python allows no handlers there.

    A context inside another one adds its ``stop`` to the outer context, which passes it signals that arrived before.

    Parameters
    ----------
    stop : StopAgreement, optional
        The agreement that receives the requests.
    at_once : bool
        True for work without anything to save: each signal raises immediately, ``KeyboardInterrupt`` or, after the
        user's handler, ``SystemExit``. The outermost context decides.
    ended : callable, optional
        In a rank that a launcher has started: returns True once the run has failed. SIGTERM then raises ``end``, as in
        :func:`rank_signals`.
    end : type
        Type of that exception.

    Returns
    -------
    ReceivedSignals
        The signals that arrived in the outermost context. Its owner calls
        :meth:`ReceivedSignals.raise_if_any` afterwards.
    """
    global _outermost, _mark
    handlers = _handlers_here()
    if handlers is not None:
        with handlers.also(stop, ended, end):
            yield handlers.received
        return
    # A rank has had its handlers since its start.
    if threading.current_thread() is not threading.main_thread() or (stop is not None and _handled_for(stop)):
        yield ReceivedSignals(at_once)
        return
    handlers, before = _Handlers(at_once), (_outermost, _mark)
    try:
        handlers.install()
        _outermost, _mark = handlers, handlers.mark
        with handlers.also(stop, ended, end):
            yield handlers.received
    finally:
        handlers.restore()
        handlers.mark.set_over()
        _outermost, _mark = before
    handlers.raise_postponed()


def ends_by_sigterm() -> bool:
    """Return True if SIGTERM raises ``end`` of :func:`signals` in this thread once the run has failed."""
    handlers = _handlers_here()
    return handlers is not None and handlers.ended is not None and handlers.handles(signal.SIGTERM)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay a second Ctrl-C until the end of this context, for short work that must be completed."""
    handlers = _handlers_here()
    if handlers is None:
        yield
        return
    handlers.held += 1
    try:
        yield
    finally:
        handlers.held -= 1
    handlers.raise_postponed()


@contextlib.contextmanager
def rank_signals(stop: StopAgreement, *, ended: Callable[[], bool], end: type[BaseException]) -> Iterator[None]:
    """Handle the signals of a rank that another process started and watches.

    Signals become requests. Ctrl-C prints nothing, since the launching process prints a line. Once ``ended()`` returns
    True (the run has failed), SIGTERM raises ``end``, unless an exception is already propagating: its ``finally``
    blocks are not interrupted (the sender of the signal kills this process if they take too long). After the context,
    when the process only has to end, signals do nothing.
    """
    global _mark
    handlers = _Handlers(at_once=False)
    _mark = handlers.mark
    with handlers.also(stop, ended, end):
        handlers.install_in_rank()
        # Signals have been blocked since the start of this process: a Ctrl-C in an import would have caused a
        # traceback.
        unblock_signals(signal_numbers())
        try:
            yield
        finally:
            # The work is done or has failed: a signal to the group must not change its outcome or cause a traceback.
            handlers.restore()
            handlers.mark.set_over()
            _mark = None


def _nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike ``SIG_IGN``, child programs don't inherit it."""


def _handled_for(stop: StopAgreement) -> bool:
    """Return True if this process's signals are requests to ``stop`` already."""
    return stop in getattr(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), "stops", ())


# --------------------------------------------------------------------------------------------------------------------
# Workers of a DataLoader
# --------------------------------------------------------------------------------------------------------------------


class _Mark:
    """A byte that a process shares with its loader workers, so that workers know how to handle a signal.

    Forked workers inherit it; spawned ones receive it with their :class:`WorkerInit`.
    """

    _NOTHING, _RECEIVED, _OVER = range(3)

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._fd = -1  # anonymous memory: forked workers inherit it, spawned workers get no notice of signals
        if sys.platform == "linux" and hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):  # forbidden by a sandbox's filter
                self._fd = os.memfd_create("trainloop-signals", os.MFD_CLOEXEC)
                os.ftruncate(self._fd, 1)
        self._byte = mmap.mmap(self._fd, 1)

    def set_received(self) -> None:
        self._byte[0] = self._RECEIVED

    def set_over(self) -> None:
        """Mark that the process no longer needs workers and starts no others. It may have sent the signal itself."""
        self._byte[0] = self._OVER
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def received(self) -> bool | None:
        """True if the served process got a signal and still needs its workers; ``None`` if it got no signal."""
        return None if self._byte[0] == self._NOTHING else self._byte[0] == self._RECEIVED

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_mark, (f"/proc/{self.pid}/fd/{self._fd}",)


def _open_mark(path: str) -> _Mark | None:
    mark = object.__new__(_Mark)
    try:
        with open(path, "r+b", buffering=0) as file:
            mark._byte, mark._fd = mmap.mmap(file.fileno(), 1), -1
    except (OSError, ValueError):  # no /proc, or the process has ended: unknown to the worker
        return None
    return mark


_mark: _Mark | None = None
"""This process's mark while it handles signals; in a worker, the mark of the process that the worker serves."""


class WorkerInit:
    """A ``worker_init_fn`` that lets a worker outlive signals to the whole group, then calls the user's function.

    The process that the worker serves continues to a step boundary, and then ends its workers. A SIGTERM that this
    process did not receive, and a second SIGTERM, are meant for the worker itself.

    The handlers can't be installed earlier: torch first installs a handler in the worker, which ends it immediately.

    Parameters
    ----------
    users : callable, optional
        The user's ``worker_init_fn``.
    temporary : str, optional
        Folder for the worker's sockets, which it can't remove if it is killed.
    """

    def __init__(self, users: Callable[[int], None] | None, temporary: str | None = None) -> None:
        self.users = users
        self._temporary = temporary
        self._mark = _mark
        self.iterators: WeakSet[Any] | None = WeakSet()
        """Iterators over the loader that have workers; ``None`` in another process than the one that iterates."""
        self.use: Any = None
        """What the caller notes about the use of the loader; ``None`` in another process."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "iterators": None, "use": None}

    def __call__(self, worker_id: int) -> None:
        global _mark
        _mark = self._mark
        if _mark is not None:
            for number in signal_numbers():
                signal.signal(number, _in_worker)
        unblock_signals(signal_numbers())  # see started()
        # The folder may have been removed: a callback may have given this function to a loader that is read later.
        if self._temporary is not None and os.path.isdir(self._temporary):
            process_config()["tempdir"] = self._temporary
        if self.users is not None:
            self.users(worker_id)


def started(loader: Any) -> Iterator[Any]:
    """Return ``iter(loader)``; its workers block signals until they can handle a signal without ending.

    Until :class:`WorkerInit` is called, possibly seconds later on a busy machine, torch's own handler would end a
    worker at a SIGTERM.
    """
    init: Any = getattr(loader, "worker_init_fn", None)
    while not isinstance(init, WorkerInit) and hasattr(init, "worker_init_fn"):
        init = init.worker_init_fn  # the loader of a stream has a function around it
    if not getattr(loader, "num_workers", 0) or not isinstance(init, WorkerInit):
        return iter(loader)
    with signals_blocked(signal_numbers()):  # workers inherit that
        iterator = iter(loader)
    if init.iterators is not None:
        with contextlib.suppress(TypeError):  # a class of the user's may have no weak references
            init.iterators.add(iterator)
    return iterator


def _in_worker(number: int, frame: FrameType | None) -> None:
    """Let this worker continue if the process that it serves received the signal, too; otherwise, end the worker.

    That process can record the signal only between two Python instructions, possibly after a long backward pass. The
    worker checks repeatedly, and continues to load meanwhile.
    """
    if number != signal.SIGTERM or sys.platform == "win32":  # the signal would have ended this process
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second SIGTERM is meant for the worker
    deadline = time.monotonic() + _SAME_SIGNAL_S

    def check(*_: object) -> None:
        received = None if _mark is None else _mark.received
        if received is None and time.monotonic() < deadline:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        if received is False:  # the served process ends a worker that it no longer needs: torch's own handler
            os._exit(0)  # exits like this, and torch reports any other status
        if received is None:
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, _CHECK_S, _CHECK_S)


def _print_line(text: str) -> None:
    # A handler may run in the middle of a write to sys.stderr, which then rejects another write ("reentrant call").
    with contextlib.suppress(RuntimeError, ValueError, OSError):
        print(f"\n{text}", file=sys.stderr, flush=True)
