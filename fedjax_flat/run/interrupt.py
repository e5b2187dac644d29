"""Ctrl-C and SIGTERM as a request: finish the round in flight, save, and leave."""

import contextlib
import signal
import threading


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
    watched = (signal.SIGINT, signal.SIGTERM)
    previous = {s: signal.getsignal(s) for s in watched}

    def restore():
        for s, handler in previous.items():
            signal.signal(s, handler)

    def ask(number, frame):
        del frame
        request.signal = number
        restore()

    for s in watched:
        signal.signal(s, ask)
    try:
        yield request
    finally:
        restore()
