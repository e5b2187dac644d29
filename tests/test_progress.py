"""How far something is: a bar on a terminal, a line per minute in a log."""

import io
import sys

import pytest

from fedjax_flat import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_per_minute_in_a_log(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress.bar(what="a\x1b", total=300, initial=100, unit="rounds") as bar:
        for _ in range(130):
            clock[0] += 1.0
            bar.update()
            bar.set_postfix(loss="0.5", refresh=False)
    assert sys.stderr.getvalue() == (
        "a\\x1b: 160 of 300 rounds, loss 0.5, 1 s each, 2:20 to go\n"
        "a\\x1b: 220 of 300 rounds, loss 0.5, 1 s each, 1:20 to go\n"
        "a\\x1b: 230 of 300 rounds, loss 0.5, 1 s each, 1:10 to go\n"
    )


def test_what_is_short_says_nothing_in_a_log(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert list(progress.bar(range(5), what="rows")) == [0, 1, 2, 3, 4]
    clock[0] += 59
    assert list(progress.bar((), what="rows")) == []
    assert sys.stderr.getvalue() == ""


def test_a_bar_on_a_terminal_and_none_when_quiet(monkeypatch):
    for show in (True, False):
        monkeypatch.setattr(sys, "stderr", Terminal())
        assert list(progress.bar(range(3), what="rows", show=show)) == [0, 1, 2]
        assert ("rows: 100%" in sys.stderr.getvalue()) is show
