"""Ctrl-C and SIGTERM: while training a request to finish the round, save and leave; else, an order.

This module imports nothing heavy: the command line uses it before it imports anything else.
"""

import contextlib
import os
import signal
import sys
import threading

WATCHED = (signal.SIGINT, signal.SIGTERM)
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
    """`signal` is the number of the signal that asked to stop, or None."""

    signal: int | None = None


@contextlib.contextmanager
def stop_request():
    """Catches the first signal; a second one acts as it always did."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {s: signal.getsignal(s) for s in WATCHED}

    def restore():
        for s, handler in previous.items():
            signal.signal(s, handler)

    def ask(number, frame):
        del frame
        request.signal = number
        restore()

    for s in WATCHED:
        signal.signal(s, ask)
    try:
        yield request
    finally:
        restore()
