"""Shakespeare by role, next-character prediction: the plays' text, LEAF's or TFF's files.

Characters are numbered by the 86 of TensorFlow Federated's text tutorial and four special tokens,
90 classes. What a role says in one play, all speeches joined by line breaks between begin and end,
is cut into windows of `sequence` characters; labels are one place later.

- plays: shakespeare.zip of the plays' texts, `ROLE<tab>speech`. Of each client's windows the last
  20 % are test windows (rounded down: a client of fewer than five has none). This has LEAF's idea
  of a client, (play, role), but neither its edition nor its split.
- leaf: x are 80 characters and y the next one, at every place of the text, so windows overlap: they
  are kept as they are, with x shifted by one and y as the labels. A client has as many characters
  as examples.
- tff: snippets, joined as speeches are; train and test apart.
"""

import pathlib
import re
import zipfile
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources import clients, files, leaf, text, tff
from fedjax_flat.data.sources.base import SOURCES, Dataset, Examples, Source
from fedjax_flat.settings import Setting

CHARACTERS = (  # TFF's tutorial "Federated Learning for Text Generation", in its order
    "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
)
TEST_SHARE = 5  # every fifth window, the last ones

_LAYOUTS = {
    "plays": "shakespeare/shakespeare.zip",
    "leaf": "shakespeare/data",
    "tff": "shakespeare/shakespeare_train.h5",
}


class _Said(NamedTuple):
    train: dict[str, Examples]
    test: dict[str, Examples]
    characters: dict[str, int]  # of each client, train and test


def shakespeare(
    data_dir, layout: str = "any", sequence: int = 80, min_characters: int = 0
) -> Dataset:
    """Windows of `sequence` tokens; clients of fewer than `min_characters` are left out."""
    found, place = clients.choose_layout("shakespeare", data_dir, _LAYOUTS, layout)
    vocabulary = text.Vocabulary.of(CHARACTERS)
    read = {"plays": _read_plays, "leaf": _read_leaf, "tff": _read_tff}[found]
    said = read(place, vocabulary, sequence)
    enough = {client for client, count in said.characters.items() if count >= min_characters}
    train, test = ({client: part for client, part in parts.items() if client in enough}
                   for parts in (said.train, said.test))
    data = clients.by_client("shakespeare", train, test, len(vocabulary.tokens), task="language",
                             classes=vocabulary.tokens)
    text.report_unknown("shakespeare", vocabulary, data.train, data.test)
    return data


def _windows(lines: list[str], vocabulary: text.Vocabulary, sequence: int) -> Examples:
    stream = [vocabulary.bos, *vocabulary.encode("\n".join(lines)), vocabulary.eos]
    return text.windows(np.array(stream, np.int32), sequence)


def _read_plays(place: pathlib.Path, vocabulary: text.Vocabulary, sequence: int) -> _Said:
    said = _Said({}, {}, {})
    for client, lines in roles(place).items():
        inputs, labels = _windows(lines, vocabulary, sequence)
        kept = len(labels) - len(labels) // TEST_SHARE
        said.train[client] = Examples(inputs[:kept], labels[:kept])
        said.test[client] = Examples(inputs[kept:], labels[kept:])
        said.characters[client] = sum(map(len, lines))
    return said


def _read_leaf(place: pathlib.Path, vocabulary: text.Vocabulary, sequence: int) -> _Said:
    said = _Said({}, {}, {})
    for split, parts in (("train", said.train), ("test", said.test)):
        for client, x, y in leaf.read(place / split):
            lengths = {len(line) for line in x}
            if lengths - {sequence} or {len(c) for c in y} - {1}:
                raise errors.UsageError(
                    f"{place / split}: {client} has x of {', '.join(map(str, sorted(lengths)))} "
                    f"characters: expected {sequence}, and y of one. LEAF's x have 80, which is "
                    "config.data.sequence."
                )
            both = vocabulary.encode("".join(line + c for line, c in zip(x, y, strict=True)))
            both = both.reshape(-1, sequence + 1)
            parts[client] = Examples(both[:, :-1].copy(), both[:, 1:].copy())
            said.characters[client] = said.characters.get(client, 0) + len(x)
    return said


def _read_tff(place: pathlib.Path, vocabulary: text.Vocabulary, sequence: int) -> _Said:
    said = _Said({}, {}, {})
    for split, parts in (("train", said.train), ("test", said.test)):
        path = files.need("shakespeare", place.parent, [f"shakespeare_{split}.h5"])
        for client, (snippets,) in tff.read(path, ("snippets",)):
            lines = [s.decode("utf-8", "replace") for s in snippets]
            parts[client] = _windows(lines, vocabulary, sequence)
            said.characters[client] = said.characters.get(client, 0) + sum(map(len, lines))
    return said


def roles(path: pathlib.Path) -> dict[str, list[str]]:
    """{'hamlet OPHELIA': [speech, ...]} of every play in the archive."""
    found: dict[str, list[str]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in sorted(n for n in archive.namelist() if n.endswith(".txt")):
                play = pathlib.PurePath(name).stem
                for role, speech in speeches(archive.read(name).decode("ascii", "replace")):
                    found.setdefault(f"{play} {role.upper()}", []).append(speech)
    except (zipfile.BadZipFile, zlib.error) as e:
        raise errors.UsageError(
            f"{path}: {path.stat().st_size:,} bytes that are no whole zip file ({e}). It is "
            "truncated or altered: put it there again."
        ) from e
    return found


_HEADING = re.compile(r"(ACT|SCENE|PROLOGUE|INDUCTION|EPILOGUE)\b[^a-z\t]*(\t.*)?$")
_DIRECTION = re.compile(r"\[(?:[^\]\n]|\n(?!\s*\n))*\]?")  # [Enter Ghost], within a paragraph


def speeches(play: str) -> Iterator[tuple[str, str]]:
    """(role, speech) in order, of a text whose cast list ends with a line `SCENE<tab>place`.

    A speech starts with `ROLE<tab>`; its further lines start with a tab. A long name has its first
    words on a line of their own. Stage directions stand in brackets, which may lack the last one,
    and `|` joins roles that speak at once: the first has the words. Poems have no cast list, and so
    no speech.
    """
    letters = lambda line: re.sub(r"\W", "", line)
    title, _, rest = play.lstrip().partition("\n")
    cast, scene, body = f"\n{rest}".partition("\nSCENE\t")
    del cast
    role, first_words = "", ""
    lines: list[str] = []
    for line in _DIRECTION.sub("", body).split("\n")[1:] if scene else ():
        name, tab, words = re.sub(r"[|\[\]]", "", line).partition("\t")
        name, words = re.sub(r"^\W+", "", name).strip(), " ".join(words.split())
        if not tab and name and not _HEADING.match(name):
            first_words = f"{name} "
            continue
        if _HEADING.match(f"{name}{tab}{words}".lstrip()) or letters(words) == letters(title):
            name = words = ""
        if name:
            if lines:
                yield role, "\n".join(lines)
            role, lines = f"{first_words}{name}".rstrip(":"), []
        if words and role:
            lines.append(words)
        first_words = ""
    if lines:
        yield role, "\n".join(lines)


SOURCES.add("shakespeare", Source(
    shakespeare,
    about="the next character, clients are roles of plays",
    size="1,348 roles of 37 plays, 4.28 million characters, 2 MB (plays); 1,129 roles (LEAF); 715 "
         "roles (TFF)",
    licence="public domain; the plays' texts are packed by an Apache-2.0 project, LEAF BSD "
            "2-Clause, TFF Apache-2.0",
    files="shakespeare/shakespeare.zip with PLAY.txt of `ROLE<tab>speech`; or "
          "shakespeare/data/train/*.json and shakespeare/data/test/*.json as LEAF's preprocess.sh "
          "writes them; or shakespeare/shakespeare_train.h5 and shakespeare/shakespeare_test.h5 of "
          "TFF",
    here=clients.says_here(_LAYOUTS),
    settings={
        "layout": clients.layout_setting(_LAYOUTS),
        "sequence": Setting(80, "tokens of an example", at_least=1),
        "min_characters": Setting(0, "clients who say less are left out", at_least=0),
    },
))
