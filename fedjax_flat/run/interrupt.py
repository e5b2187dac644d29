"""Ctrl-C, SIGTERM, SIGUSR1: while training a request to finish the round, save and leave; else, an
order.

Batch systems send SIGTERM to end a job and, if asked to (SLURM's --signal), SIGUSR1 some time
before. This module imports nothing heavy: the command line uses it before it imports anything else.
"""

import contextlib
import os
import signal
import sys
import threading

WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
STOPPED = "Stopped. The same command goes on where it was."


@contextlib.contextmanager
def leaving_at_once():
    """A signal ends the program where it is: one line, exit code 128 + signal.

    An exception would not do: raised inside an import or a callback of compiled code, it is printed
    at length, swallowed, or the end of the interpreter. What is on disk stands a kill at any time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number, frame):
        del frame
        with contextlib.suppress(RuntimeError, OSError, ValueError, AttributeError):
            sys.stdout.flush()  # which may be in use, broken, closed or None
        with contextlib.suppress(OSError):
            os.write(2, f"\n{STOPPED}\n".encode())
        os._exit(128 + number)

    previous = {s: signal.signal(s, leave) for s in WATCHED}
    try:
        yield
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)


class StopRequest:
    """`signal` is the number of the first signal that asked to stop, or None."""

    signal: int | None = None


_active: StopRequest | None = None


@contextlib.contextmanager
def stop_request():
    """Catches signals; inside another request, it is that one.

    A second Ctrl-C acts as Ctrl-C always did. SIGTERM and SIGUSR1 only ask: batch systems send
    several, by several ways, and end with SIGKILL what takes too long.
    """
    global _active
    if _active or threading.current_thread() is not threading.main_thread():
        yield _active or StopRequest()
        return
    request = _active = StopRequest()
    previous = {s: signal.getsignal(s) for s in WATCHED}

    def ask(number, frame):
        del frame
        request.signal = request.signal or number
        if number == signal.SIGINT:
            signal.signal(number, previous[number])

    for s in WATCHED:
        signal.signal(s, ask)
    try:
        yield request
    finally:
        _active = None
        for s, handler in previous.items():
            signal.signal(s, handler)
