"""Ctrl-C and SIGTERM while the program starts, or where an exception would be swallowed."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from fedjax_flat import cli
from fedjax_flat.run import interrupt

ROOT = pathlib.Path(__file__).parents[1]
IMPORTING = """
import os, signal, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Watch())
sys.argv = ["fedjax-flat", *{arguments!r}]
from fedjax_flat.cli import main
sys.exit(main())
"""
IN_A_DESTRUCTOR = """
import os, signal
from fedjax_flat.run import interrupt
class Swallows:
    def __del__(self):
        os.kill(os.getpid(), {number})
        list(range(1000))
with interrupt.leaving_at_once():
    print("printed before", flush=False)
    Swallows()
    print("went on")
"""


def child(program):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment,
        timeout=120,
    )


@pytest.mark.parametrize(("module", "number"), [
    ("jax", signal.SIGINT), ("ml_collections", signal.SIGTERM), ("tensorstore", signal.SIGINT),
])
def test_a_signal_while_starting(tmp_path, module, number):
    arguments = ["train", "--run", str(tmp_path / "run"), "--config",
                 str(ROOT / "configs" / "digits_fedavg.py")]
    done = child(IMPORTING.format(module=module, number=int(number), arguments=arguments))
    assert done.returncode == 128 + number
    assert done.stderr == f"\n{interrupt.STOPPED}\n"
    assert done.stdout == ""
    assert not (tmp_path / "run").exists()


def test_a_signal_where_an_exception_would_be_swallowed():
    done = child(IN_A_DESTRUCTOR.format(number=int(signal.SIGINT)))
    assert done.returncode == 130
    assert done.stderr == f"\n{interrupt.STOPPED}\n"
    assert done.stdout == "printed before\n"


def test_the_handlers_of_before_are_put_back():
    before = [signal.getsignal(s) for s in interrupt.WATCHED]
    with interrupt.leaving_at_once():
        assert all(signal.getsignal(s) != b for s, b in zip(interrupt.WATCHED, before, strict=True))
        with interrupt.stop_request() as request:  # while training
            os.kill(os.getpid(), signal.SIGINT)
            assert request.signal == signal.SIGINT
    assert [signal.getsignal(s) for s in interrupt.WATCHED] == before
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert [signal.getsignal(s) for s in interrupt.WATCHED] == before


def test_a_request_inside_another_is_that_one_and_sigterm_may_come_twice():
    interrupts = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        with interrupt.stop_request() as outer:
            with interrupt.stop_request() as inner:
                assert inner is outer
                for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
                    os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGINT)
            assert (outer.signal, interrupts) == (signal.SIGUSR1, [])
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupts == [signal.SIGINT], "the second acts as it always did"
        with interrupt.stop_request() as later:
            assert later.signal is None
    finally:
        signal.signal(signal.SIGINT, before)
