"""The next token of a text: cross-entropy per token, perplexity and accuracy.

Labels are (batch, time), logits (batch, time, tokens); labels that are `padding` count nowhere. All
sums are over tokens, so a long sentence weighs more than a short one.

    perplexity = exp(sum of losses / number of tokens)

`accuracy` is over all tokens. Where the data set names the special tokens (`data.sources.text`),
`word_accuracy` is over the labels that are none of them: what the Stack Overflow benchmark reports,
which neither an out-of-vocabulary word nor the end of a sentence can raise.
"""

import jax.numpy as jnp
import numpy as np
import optax

from fedjax_flat import errors
from fedjax_flat.data import Dataset, Preprocess, check_labels
from fedjax_flat.data.sources.text import SPECIALS
from fedjax_flat.models import Model
from fedjax_flat.tasks.base import Task, count, of_network


def language(
    model: Model, preprocess: Preprocess, dataset: Dataset, *, padding: int = 0
) -> Task:
    """Cross-entropy per token that is not padding."""
    if preprocess.mixes_labels:
        raise errors.UsageError(
            "language with mixup: tokens cannot be mixed. Leave data.mixup at 0."
        )
    check_labels(dataset, padding)
    check_tokens(dataset)
    special = [i for i, token in enumerate(dataset.classes) if token in SPECIALS]

    def real(batch):
        return (batch.labels != padding) & batch.mask[:, None]

    def losses(outputs, batch):
        if batch.labels.ndim != 2 or batch.labels.shape != outputs.logits.shape[:-1]:
            raise errors.UsageError(
                f"language of labels of shape {batch.labels.shape} by logits of shape "
                f"{outputs.logits.shape}: expected (batch, time) and (batch, time, tokens). A "
                "class per text is task.name = 'classification'."
            )
        mask = real(batch)
        labels = jnp.where(mask, batch.labels, 0).astype(jnp.int32)
        return optax.softmax_cross_entropy_with_integer_labels(outputs.logits, labels), mask

    def sums(outputs, batch):
        mask = real(batch)
        guess = jnp.argmax(outputs.logits, axis=-1).astype(batch.labels.dtype)
        correct = guess == batch.labels
        found = {"correct": count(mask & correct)}
        if special:
            word = mask & ~jnp.isin(batch.labels, jnp.asarray(special, batch.labels.dtype))
            found |= {"words": count(word), "correct_words": count(word & correct)}
        return found

    def report(sums):
        units = jnp.maximum(sums["units"], 1)
        means = {"perplexity": jnp.exp(sums["loss"] / units), "accuracy": sums["correct"] / units}
        if special:
            means["word_accuracy"] = sums["correct_words"] / jnp.maximum(sums["words"], 1)
        return means

    return of_network(
        model, preprocess, losses=losses, sums=sums, report=report, score="accuracy"
    )


def check_tokens(dataset: Dataset) -> None:
    """Refuses an input token outside 0 .. num_classes - 1, and says which and where."""
    for split in ("train", "test"):
        tokens = np.asarray(dataset.split(split).inputs)
        if tokens.dtype.kind not in "iu" or tokens.ndim != 2:
            raise errors.UsageError(
                f"{dataset.name}: inputs are {tokens.dtype} of shape {tokens.shape}: expected "
                "tokens, whole numbers of shape (examples, time)."
            )
        wrong = (tokens < 0) | (tokens >= dataset.num_classes)
        if wrong.any():
            example, place = (int(i) for i in np.argwhere(wrong)[0])
            raise errors.UsageError(
                f"{dataset.name}: token {tokens[example, place]} at place {place} of {split} "
                f"example {example} is out of the vocabulary: expected 0 to "
                f"{dataset.num_classes - 1} ({int(wrong.sum())} such tokens)."
            )
