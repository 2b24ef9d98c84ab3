"""Signals that ask this process to stop, and how an effect of one differs from what users' code raises by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

TERMINATION = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask for an end and come from no keyboard: of `kill` and of clusters, of a terminal that was closed or a
connection that was lost, and of Slurm's `--signal=USR1@SECONDS`."""
STOP = (signal.SIGINT, *TERMINATION)
"""Signals that ask for an end: those, and Ctrl-C."""

_received = 0
"""Number of signals that handlers of this module have received in this process."""


class ExitError(RuntimeError):
    """Users' code raised something that is no Exception, such as SystemExit. It is the cause of this error."""


def described(error: BaseException) -> str:
    """`ValueError: its message`; of an ExitError, the same of its cause."""
    error = (error.__cause__ or error) if isinstance(error, ExitError) else error
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def handle(signums: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> dict[int, object]:
    """Call `handler` for these signals from now on; returns the handlers until now. Only for the main thread.

    A signal that is ignored stays ignored: `nohup` and shells mean that. When the terminal is gone, output that would
    go there is discarded from then on, so that no write to it fails.
    """

    def receive(signum: int, frame: FrameType | None) -> None:
        global _received  # noqa: PLW0603 - signals belong to the process
        _received += 1
        # Before the handler: what it prints must not fail on a terminal that is gone.
        if signum == signal.SIGHUP:
            _leave_terminal()
        handler(signum, frame)

    handled = [signum for signum in signums if signal.getsignal(signum) is not signal.SIG_IGN]
    return {signum: signal.signal(signum, receive) for signum in handled}


@contextlib.contextmanager
def handling(signums: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """`handle` signals while the block runs. Has no effect outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = handle(signums, handler)
    try:
        yield
    finally:
        for signum, previous in before.items():
            # None: the handler was not set by Python, which can then not set it again.
            signal.signal(signum, signal.SIG_DFL if previous is None else previous)  # type: ignore[arg-type]


@contextlib.contextmanager
def stopping_on_signals(stop: threading.Event) -> Iterator[None]:
    """Make signals that ask for an end set `stop`, so that runs in training write checkpoints.

    A second Ctrl-C raises KeyboardInterrupt; the other signals may come several times. If SIGHUP or SIGUSR1 came, this
    process ignores it from then on. Has no effect outside of the main thread.
    """
    received = set[int]()

    def request_stop(signum: int, frame: object) -> None:
        if stop.is_set() and signum == signal.SIGINT:
            raise KeyboardInterrupt
        received.add(signum)
        stop.set()

    try:
        with handling(STOP, request_stop):
            yield
    finally:
        # A shell and its terminal both send SIGHUP, and Slurm sends its signal to each process of a step. The second
        # one may come when all is saved, and must not take the exit code of a process that only has to end.
        for signum in received & {signal.SIGHUP, signal.SIGUSR1}:
            signal.signal(signum, signal.SIG_IGN)


@contextlib.contextmanager
def kept_from_children() -> Iterator[None]:
    """Keep SIGHUP and SIGUSR1 from processes that the block starts, and from this thread until its end.

    A terminal that closes sends SIGHUP to all its processes, also to those that a process needs in order to stop.
    """
    # A mask, not SIG_IGN: a signal that comes during the block reaches its handler afterwards.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR1})  # children inherit the mask
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def user_code() -> Iterator[None]:
    """Raise an ExitError instead of what users' code raises in the block that is no Exception.

    SystemExit would end this process, or the thread, without a word. KeyboardInterrupt passes if a signal was received.
    """
    before, count = signal.getsignal(signal.SIGINT), _received
    # The same handler again, but counted: a KeyboardInterrupt without a signal was raised by the code itself.
    with handling([signal.SIGINT], before) if callable(before) else contextlib.nullcontext():
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            # Handlers run in the main thread only.
            is_signalled = _received > count and threading.current_thread() is threading.main_thread()
            if is_signalled and isinstance(error, KeyboardInterrupt):
                raise
            raise ExitError(described(error)) from error


def _leave_terminal() -> None:
    """Send standard output and error to /dev/null where they go to a terminal that is gone."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            # A terminal that hung up is still a character device, but none that isatty knows. The same holds for
            # /dev/null, to which nothing changes.
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                os.dup2(null, descriptor)
    os.close(null)
