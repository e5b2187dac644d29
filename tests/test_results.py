"""Analyses that were stopped, damaged or started twice never end in a wrong number."""

import json
import os
import warnings

import numpy as np
import pytest

import fedjax_flat as ff
from fedjax_flat.report import results
from fedjax_flat.report.journal import Journal

WHAT = {"run": "a", "top": 3, "loss": 0.25}
STEPS = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)


def journal(folder, what=WHAT):
    return Journal(folder / "x", what, 8, "float32")


@pytest.fixture
def written(tmp_path):
    """The journal of five steps."""
    made = journal(tmp_path)
    for i, vector in enumerate(STEPS):
        made.append(vector, float(i), 0.1 * i)
    return made


def test_steps_come_back_as_they_were(written, tmp_path):
    start = journal(tmp_path).start
    np.testing.assert_array_equal(start.vectors, STEPS)
    np.testing.assert_array_equal(start.second, 0.1 * np.arange(5))
    assert journal(tmp_path, WHAT | {"top": 4}).start is None, "another computation"


def change_a_number(journal):
    journal.numbers.write_text(journal.numbers.read_text().replace("[2.0,", "[220.0,"))


def change_a_vector(journal):
    with open(journal.vectors, "r+b") as file:
        file.seek(2 * journal.row_bytes + 4)
        file.write(np.float32(7).tobytes())


def swap_two_steps(journal):
    lines = journal.numbers.read_text().split("\n")
    lines[3], lines[4] = lines[4], lines[3]
    journal.numbers.write_text("\n".join(lines))
    swapped = STEPS[[0, 1, 3, 2, 4]]
    journal.vectors.write_bytes(swapped.tobytes())


def garble_a_line(journal):
    lines = journal.numbers.read_bytes().split(b"\n")
    lines[3] = b"\xff\x00["
    journal.numbers.write_bytes(b"\n".join(lines))


@pytest.mark.parametrize("damage", [change_a_number, change_a_vector, swap_two_steps,
                                    garble_a_line])
def test_a_damaged_step_is_made_again(written, tmp_path, damage):
    damage(written)
    with pytest.warns(UserWarning, match="step 3 of 5 is damaged; it and what follows are made"):
        again = journal(tmp_path)
    assert len(again.start.first) == 2
    for i in (2, 3, 4):
        again.append(STEPS[i], float(i), 0.1 * i)
    np.testing.assert_array_equal(journal(tmp_path).start.vectors, STEPS)


def test_a_damaged_first_line(written, tmp_path):
    text = written.numbers.read_text()
    written.numbers.write_text(text.replace('"top": 3', '"top": 7'))
    with pytest.warns(UserWarning, match="is damaged: its steps are made again"):
        assert journal(tmp_path).start is None
    written.numbers.write_text("")
    with pytest.warns(UserWarning, match="is damaged"):
        assert journal(tmp_path).start is None


def test_a_step_cut_short_by_a_killed_process_is_no_damage(written, tmp_path):
    os.truncate(written.numbers, written.numbers.stat().st_size - 5)
    assert len(journal(tmp_path).start.first) == 4


def test_a_planted_link_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("years of work")
    made = journal(tmp_path)
    made.vectors.symlink_to(victim)
    with pytest.raises(ff.UsageError, match="is a symbolic link, which is not followed"):
        made.append(STEPS[0], 0.0, 0.0)
    assert victim.read_text() == "years of work"


def test_no_byte_of_saved_results_can_change_unnoticed(tmp_path):
    arrays = {"x": np.arange(4.0), "loss": np.full((2, 2), np.nan)}
    results.save(tmp_path / "x", arrays, WHAT)
    path = tmp_path / "x.npz"
    content = path.read_bytes()
    same = lambda found: all(np.array_equal(found[n], a, equal_nan=True) for n, a in arrays.items())
    assert same(results.load(tmp_path / "x", WHAT))
    assert results.load(tmp_path / "x", WHAT | {"top": 4}) is None
    assert results.load(tmp_path / "y", WHAT) is None
    assert json.loads((tmp_path / "x.json").read_text()) == WHAT
    refused = 0
    for i in range(0, len(content), 3):
        path.write_bytes(content[:i] + bytes([content[i] ^ 0x10]) + content[i + 1 :])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = results.load(tmp_path / "x", WHAT)
        assert (found is None and said) or same(found)
        refused += found is None
    assert refused > 100
    for cut in (0, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.warns(UserWarning, match="is damaged or of an earlier version: computed again"):
            assert results.load(tmp_path / "x", WHAT) is None


def test_names_that_are_too_long(tmp_path):
    short, long = results.named(tmp_path, "n"), results.named(tmp_path, "n" * 300)
    assert short.name == "n"
    assert len(long.name) == results.LONGEST
    assert long != results.named(tmp_path, "n" * 301)
    assert len(os.fsencode(results.named(tmp_path, "\u00fc" * 300).name)) <= results.LONGEST


@pytest.mark.parametrize("how", ["garbled", "gone"])
def test_what_is_there_to_read_is_written_again(tmp_path, how):
    base = tmp_path / "x"
    results.save(base, {"values": STEPS}, WHAT)
    text = results.suffixed(base, ".json")
    before = text.read_text()
    text.write_text("{") if how == "garbled" else text.unlink()
    np.testing.assert_array_equal(results.load(base, WHAT)["values"], STEPS)
    assert text.read_text() == before
    assert results.load(base, WHAT | {"top": 4}) is None
