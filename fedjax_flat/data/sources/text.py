"""Text as numbers: a vocabulary with four special tokens, and windows for next-token prediction.

Tokens are numbered as in TensorFlow Federated's text benchmarks: 0 is padding, then the words of
the vocabulary, then out-of-vocabulary, begin and end.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_flat.data.sources.base import Examples

logger = logging.getLogger("fedjax_flat")

PAD, OOV, BOS, EOS = SPECIALS = ("<pad>", "<oov>", "<bos>", "<eos>")


class Vocabulary(NamedTuple):
    """All tokens by number, and the numbers of words (or characters)."""

    tokens: tuple[str, ...]
    number: dict[str, int]

    @classmethod
    def of(cls, words: Sequence[str]) -> "Vocabulary":
        """The vocabulary of these words and the special tokens."""
        return cls((PAD, *words, OOV, BOS, EOS), {w: i for i, w in enumerate(words, 1)})

    @property
    def oov(self) -> int:
        """The number of what the vocabulary lacks; begin and end are the next two."""
        return len(self.number) + 1

    @property
    def bos(self) -> int:
        """The number of the token before the first."""
        return self.oov + 1

    @property
    def eos(self) -> int:
        """The number of the token after the last."""
        return self.oov + 2

    def encode(self, words: Sequence[str]) -> np.ndarray:
        """The number of each word; a string is its characters."""
        oov = self.oov
        return np.array([self.number.get(w, oov) for w in words], np.int32)


def windows(tokens: np.ndarray, length: int) -> Examples:
    """A stream cut into inputs of `length` tokens, labels being the tokens one place later.

    Every token but the first is a label once. The last window is filled with padding.
    """
    count = max(1, -(-(len(tokens) - 1) // length))
    stream = np.zeros(count * length + 1, np.int32)
    stream[: len(tokens)] = tokens
    return Examples(stream[:-1].reshape(count, length), stream[1:].reshape(count, length))


def report_unknown(dataset: str, vocabulary: Vocabulary, *parts: Examples) -> None:
    """One sentence on how much of the labels is out of the vocabulary, if any is."""
    unknown = sum(int(np.sum(p.labels == vocabulary.oov)) for p in parts)
    if unknown:
        real = sum(int(np.sum(p.labels != 0)) for p in parts)
        logger.info("%s: %s of %s tokens are out of the vocabulary.", dataset, f"{unknown:,}",
                    f"{real:,}")
