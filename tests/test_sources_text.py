"""Text by role and by user: windows, vocabularies, and what is said of files that are wrong."""

import json
import logging
import zipfile

import h5py
import numpy as np
import pytest
import real

import fedjax_flat as ff
from fedjax_flat.data import sources
from fedjax_flat.data.sources import shakespeare, text

PLAY = """\tA PLAY

\tDRAMATIS PERSONAE

HERO\ta shepherd. (HERO:)

SCENE\tArcadia.


\tA PLAY

ACT I

SCENE I\tA wood.

\t[Enter HERO, and others,
\tsinging]

HERO\tO wood! [Aside]  O   field!
\tO, more.

\t[Exit HERO

OLD
MAN\tHe went.

\tI stay.

Hero:\t[Within] Hark!

ECHO\t|
\t|  Hark, hark!
SECOND ECHO\t|

\tA PLAY

ACT II
"""


def test_speeches_of_a_play():
    assert list(shakespeare.speeches(PLAY)) == [
        ("HERO", "O wood! O field!\nO, more."),
        ("OLD MAN", "He went.\nI stay."),
        ("Hero", "Hark!"),
        ("ECHO", "Hark, hark!"),
    ]
    assert not list(shakespeare.speeches("\tSONNETS\n\nI\tFrom fairest creatures"))


def write_plays(root, plays):
    path = root / "shakespeare/shakespeare.zip"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as z:
        for name, play in plays.items():
            z.writestr(f"shakespeare/{name}.txt", play)
    return path


def decode(data, tokens):
    return "".join(data.classes[t] for t in tokens if t)


def test_windows_of_a_role(tmp_path, caplog):
    write_plays(tmp_path, {"aplay": PLAY.replace("more", "m\u00f6re"), "poem": "\tPOEM\n\nRoses."})
    with caplog.at_level(logging.INFO, "fedjax_flat"):
        data = sources.load("shakespeare", tmp_path, sequence=4)
    assert data.clients == ("aplay ECHO", "aplay HERO", "aplay OLD MAN")
    assert (data.task, data.num_classes, len(data.classes)) == ("language", 90, 90)
    said = "O wood! O field!\nO, m<oov><oov>re.\nHark!"  # two bytes that are not ASCII
    mine = [np.concatenate([split[owners == 1] for split, owners in (
        (getattr(data.train, of), data.owners), (getattr(data.test, of), data.test_owners))])
        for of in ("inputs", "labels")]
    inputs, labels = mine
    assert decode(data, labels.ravel()) == f"{said}<eos>"
    assert decode(data, inputs.ravel()) == f"<bos>{said}<eos>"
    # Every label is the next input, within a window and over its end.
    np.testing.assert_array_equal(inputs.ravel()[1:], labels.ravel()[:-1])
    count = -(-(len("O wood! O field!\nO, m..re.\nHark!") + 1) // 4)
    assert len(inputs) == count == 9
    assert (np.sum(data.owners == 1), np.sum(data.test_owners == 1)) == (8, 1)
    assert caplog.messages == ["shakespeare: 2 of 62 tokens are out of the vocabulary."]


def test_clients_who_say_little_are_left_out(tmp_path):
    write_plays(tmp_path, {"aplay": PLAY})
    count = lambda n: len(
        sources.load("shakespeare", tmp_path, sequence=2, min_characters=n).clients)
    assert [count(n) for n in (0, 11, 12, 16, 17, 29)] == [3, 3, 2, 2, 1, 1]
    with pytest.raises(ff.UsageError, match="no client has a train example"):
        count(100)


def test_a_stream_that_fills_its_windows():
    for length in (2, 3, 4, 5, 6, 7):
        stream = np.arange(1, 8)
        inputs, labels = text.windows(stream, length)
        assert inputs.shape == labels.shape == (-(-6 // length), length)
        np.testing.assert_array_equal(labels[labels != 0], stream[1:])
        np.testing.assert_array_equal((labels - inputs)[labels != 0], 1)


def test_the_vocabulary_of_the_tutorial():
    vocabulary = text.Vocabulary.of(shakespeare.CHARACTERS)
    assert len(set(shakespeare.CHARACTERS)) == 86
    assert (vocabulary.oov, vocabulary.bos, vocabulary.eos) == (87, 88, 89)
    assert [vocabulary.tokens[i] for i in (0, 87, 88, 89)] == list(text.SPECIALS)
    np.testing.assert_array_equal(vocabulary.encode("dh\r~"), [1, 2, 86, 87])


def write_leaf(folder, parts):
    folder.mkdir(parents=True)
    content = {"users": list(parts), "num_samples": [len(x) for x, _ in parts.values()],
               "user_data": {user: {"x": x, "y": y} for user, (x, y) in parts.items()}}
    (folder / "all_data.json").write_text(json.dumps(content))


def test_leaf_windows_are_shifted_by_one(tmp_path):
    write_leaf(tmp_path / "shakespeare/data/train",
               {"PLAY_A": (["abcd", "bcde"], ["e", "f"]), "PLAY_B": (["wxyz"], ["!"])})
    write_leaf(tmp_path / "shakespeare/data/test", {"PLAY_A": (["cdef"], ["g"])})
    data = sources.load("shakespeare", tmp_path, sequence=4)
    assert [decode(data, x) for x in data.train.inputs] == ["abcd", "bcde", "wxyz"]
    assert [decode(data, x) for x in data.train.labels] == ["bcde", "cdef", "xyz!"]
    assert decode(data, data.test.labels[0]) == "defg"
    np.testing.assert_array_equal(data.owners, [0, 0, 1])
    assert sources.load("shakespeare", tmp_path, sequence=4, min_characters=3).clients == (
        "PLAY_A",)
    with pytest.raises(ff.UsageError, match="PLAY_A has x of 4 characters: expected 80"):
        sources.load("shakespeare", tmp_path)


def write_h5(path, field, parts):
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as f:
        for user, lines in parts.items():
            f[f"examples/{user}/{field}"] = [line.encode() for line in lines]


def test_tff_snippets(tmp_path):
    write_h5(tmp_path / "shakespeare/shakespeare_train.h5", "snippets", {"A": ["Ay.", "No"]})
    write_h5(tmp_path / "shakespeare/shakespeare_test.h5", "snippets", {"A": ["Go"], "B": ["So"]})
    data = sources.load("shakespeare", tmp_path, sequence=5)
    assert [decode(data, x) for x in data.train.labels] == ["Ay.\nN", "o<eos>"]
    assert [decode(data, x) for x in data.test.labels] == ["Go<eos>", "So<eos>"]
    np.testing.assert_array_equal(data.test_owners, [0, -1])


def test_a_truncated_archive(tmp_path):
    path = write_plays(tmp_path, {"aplay": PLAY})
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    with pytest.raises(ff.UsageError, match=rf"{len(whole) - 30} bytes that are no whole zip"):
        sources.load("shakespeare", tmp_path)


def write_stackoverflow(root):
    folder = root / "stackoverflow"
    train = {"10": ["how do i sort", "a b c d e", "how"], "20": ["do it"], "30": ["sort it"]}
    write_h5(folder / "stackoverflow_train.h5", "tokens", train)
    write_h5(folder / "stackoverflow_test.h5", "tokens",
             {"20": ["how i sort it", "do"], "30": ["i"], "99": ["never read"]})
    (folder / "stackoverflow.word_count").write_text("do\t9\nhow\t8\nsort\t7\nit\t6\ni\t5\n")
    return folder


def test_stackoverflow(tmp_path, caplog):
    write_stackoverflow(tmp_path)
    with caplog.at_level(logging.INFO, "fedjax_flat"):
        data = sources.load("stackoverflow", tmp_path, words=4, sequence=4)
    # pad, do, how, sort, it, oov, bos, eos
    assert data.classes == ("<pad>", "do", "how", "sort", "it", "<oov>", "<bos>", "<eos>")
    assert data.num_classes == 8
    np.testing.assert_array_equal(data.train.inputs, [
        [6, 2, 1, 5], [6, 5, 5, 5], [6, 2, 7, 0], [6, 1, 4, 7], [6, 3, 4, 7]])
    np.testing.assert_array_equal(data.train.labels, [
        [2, 1, 5, 3], [5, 5, 5, 5], [2, 7, 0, 0], [1, 4, 7, 0], [3, 4, 7, 0]])
    np.testing.assert_array_equal(data.test.labels, [[2, 5, 3, 4], [1, 7, 0, 0], [5, 7, 0, 0]])
    assert data.clients == ("10", "20", "30")
    np.testing.assert_array_equal(data.test_owners, [1, 1, 2])
    assert caplog.messages == ["stackoverflow: 7 of 24 tokens are out of the vocabulary."]


def test_fewer_users_and_sentences(tmp_path):
    write_stackoverflow(tmp_path)
    load = lambda **settings: sources.load("stackoverflow", tmp_path, words=5, **settings)
    two = load(max_clients=2, max_sentences=2)
    assert two.clients == ("10", "20")
    np.testing.assert_array_equal(np.bincount(two.owners), [2, 1])
    everything, drawn = load(), load(test_sentences=2)
    assert len(drawn.test.labels) == 2
    rows = [row.tolist() for row in everything.test.labels]
    assert all(row.tolist() in rows for row in drawn.test.labels)
    again = load(test_sentences=2)
    np.testing.assert_array_equal(drawn.test.labels, again.test.labels)


@pytest.mark.parametrize(("words", "message"), [
    ("do\t9\nhow\t8\n", "2 different words, but config.data.words = 5"),
    ('{"do": 9, "how": 8}', r"line 1 is '\{\"do\": 9"),
    ("do\t9\ndo\t9\nhow\t8\nsort\t7\nit\t6\n", "4 different words"),
])
def test_wrong_word_counts(tmp_path, words, message):
    folder = write_stackoverflow(tmp_path)
    (folder / "stackoverflow.word_count").write_text(words)
    with pytest.raises(ff.UsageError, match=message):
        sources.load("stackoverflow", tmp_path, words=5)


def test_stackoverflow_files_that_are_missing(tmp_path):
    folder = write_stackoverflow(tmp_path)
    (folder / "stackoverflow.word_count").unlink()
    with pytest.raises(ff.UsageError, match=r"has no stackoverflow/stackoverflow.word_count"):
        sources.load("stackoverflow", tmp_path)


def test_real_shakespeare():
    data = real.load("shakespeare", layout="plays")
    assert len(data.clients) == 1348
    assert {"hamlet OPHELIA", "comedyoferrors ANTIPHOLUS OF SYRACUSE"} <= set(data.clients)
    tokens = sum(int(np.sum(part.labels != 0)) for part in (data.train, data.test))
    assert tokens == 4_310_998  # 4,279,979 characters, line breaks between speeches, ends
    assert not np.any(data.train.labels == 87)
    role = data.clients.index("hamlet HAMLET")
    first = decode(data, data.train.inputs[data.owners == role][0])
    assert first.startswith("<bos>A little more than kin, and less than kind.")
    big = real.load("shakespeare", layout="plays", min_characters=2000)
    assert len(big.clients) == 446
