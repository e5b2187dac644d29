"""Stack Overflow by user, next-word prediction: TensorFlow Federated's files.

examples/USER/tokens are sentences, lower case, words between spaces; stackoverflow.word_count has a
word and its count on every line, the most frequent first. As in Reddi et al., "Adaptive federated
optimization" (2021): 10,000 words and four special tokens; a sentence is begin, its first 20 words
and, if it has fewer, end; inputs are the first 20 tokens of that, labels the 20 after the first. A
user has at most 1,000 sentences, the first ones.

All 342,477 users do not fit into memory: the first `max_clients` in the order of their names are
read. Test sentences are those of the same users, of which `test_sentences` are drawn by a fixed
seed. The held-out file is not used.
"""

import pathlib
from collections.abc import Sequence

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources import clients, files, text, tff
from fedjax_flat.data.sources.base import SOURCES, Dataset, Examples, Source
from fedjax_flat.settings import Setting

_TRAIN, _TEST, _WORDS = (
    f"stackoverflow/stackoverflow{end}" for end in ("_train.h5", "_test.h5", ".word_count")
)


def stackoverflow(
    data_dir,
    words: int = 10_000,
    sequence: int = 20,
    max_clients: int = 40_000,
    max_sentences: int = 1_000,
    test_sentences: int = 10_000,
) -> Dataset:
    """Sentences of `sequence` tokens; 0 clients, sentences or test sentences are all."""
    train_path, test_path, word_path = (
        files.need("stackoverflow", data_dir, [name])
        for name in (_TRAIN, _TEST, _WORDS)
    )
    vocabulary = text.Vocabulary.of(read_words(word_path, words))

    def encoded(tokens):
        kept = tokens[: max_sentences or None]
        return sentences([s.decode("utf-8", "replace") for s in kept], vocabulary, sequence)

    train = {user: encoded(tokens)
             for user, (tokens,) in tff.read(train_path, ("tokens",), most=max_clients)}
    test = {user: encoded(tokens)
            for user, (tokens,) in tff.read(test_path, ("tokens",), only=sorted(train))}
    data = clients.by_client(
        "stackoverflow", train, _drawn(test, test_sentences), len(vocabulary.tokens),
        task="language", classes=vocabulary.tokens,
    )
    text.report_unknown("stackoverflow", vocabulary, data.train, data.test)
    return data


def sentences(lines: Sequence[str], vocabulary: text.Vocabulary, length: int) -> Examples:
    """One example of each line: begin and words, and one place later words and end."""
    tokens = np.zeros((len(lines), length + 1), np.int32)
    for row, line in zip(tokens, lines, strict=True):
        ids = vocabulary.encode(line.split()[:length])
        row[0] = vocabulary.bos
        row[1 : 1 + len(ids)] = ids
        if len(ids) < length:
            row[1 + len(ids)] = vocabulary.eos
    return Examples(tokens[:, :-1].copy(), tokens[:, 1:].copy())


def read_words(path: pathlib.Path, count: int) -> list[str]:
    """The first `count` words of a file of `word count` lines."""
    found: list[str] = []
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            parts = line.split()
            if len(parts) != 2 or not parts[1].isdigit():
                raise errors.UsageError(
                    f"{path}: line {number} is {line.strip()[:60]!r}: expected a word and its "
                    "count, as in TFF's stackoverflow.word_count."
                )
            found.append(parts[0])
            if len(found) == count:
                break
    if len(found) < count or len(set(found)) < count:
        raise errors.UsageError(
            f"{path}: {len(set(found)):,} different words, but config.data.words = {count:,}. The "
            "file is truncated, or the setting too large."
        )
    return found


def _drawn(test: clients.ByClient, count: int) -> clients.ByClient:
    """So many sentences of all, in their order."""
    users = sorted(test)
    sizes = [len(test[user].labels) for user in users]
    if not count or sum(sizes) <= count:
        return test
    chosen = np.zeros(sum(sizes), bool)
    chosen[np.random.default_rng(0).choice(len(chosen), count, replace=False)] = True
    parts = np.split(chosen, np.cumsum(sizes)[:-1])
    return {user: Examples(*(x[kept] for x in test[user]))
            for user, kept in zip(users, parts, strict=True)}


SOURCES.add("stackoverflow", Source(
    stackoverflow,
    about="the next word of questions and answers, clients are users",
    size="135,818,730 + 16,586,035 sentences of 342,477 users, 10,000 words",
    licence="CC BY-SA 3.0 (Stack Exchange data dump, packed by TFF)",
    files=f"{_TRAIN}, {_TEST} and {_WORDS} of TFF",
    here=files.is_here(_TRAIN),
    settings={
        "words": Setting(10_000, "of the vocabulary, the most frequent", at_least=1),
        "sequence": Setting(20, "tokens of an example", at_least=1),
        "max_clients": Setting(40_000, "users, the first by name; 0 is all", at_least=0),
        "max_sentences": Setting(1_000, "of each user, the first; 0 is all", at_least=0),
        "test_sentences": Setting(10_000, "drawn of the users' test sentences; 0 is all",
                                  at_least=0),
    },
))
