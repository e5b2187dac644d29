"""Examples replaced by their features: what the classifier of a frozen network reads of them.

The network runs once over the train and once over the test examples, in evaluation mode. Its
features are kept in a file, memory-mapped, under the name of a SHA-256 of everything that decides
them: the extractor's weights, the inputs, and how these are prepared. So FedAvg of the head,
FedNCM, Fed3R and Fed3R-RF on one network, with any split of the data, run it once in all.

Memory-mapped inputs are known by their file's name, size and time, all others by their bytes.
"""

import dataclasses
import hashlib
import json
import logging
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import data as data_lib
from fedjax_flat import errors, parts, progress
from fedjax_flat.data import Batch, Dataset, Preprocess
from fedjax_flat.data.sources import files
from fedjax_flat.models import Model, Variables
from fedjax_flat.models.random_features import COLLECTION

logger = logging.getLogger("fedjax_flat")


class Features(NamedTuple):
    """What features are of, as digests: a run is only ever continued on the same."""

    weights: str
    train: str
    test: str
    how: str  # the network and its preprocessing


class Extract(NamedTuple):
    """`run(stored inputs)`: their features, of this width."""

    run: Callable[[Any], jax.Array]
    width: int


def replace(
    dataset: Dataset, preprocess: Preprocess, model: Model, variables: Variables, *, how: Any,
    data_dir: str | os.PathLike | None = None, batch_size: int = 500,
) -> tuple[Dataset, Features]:
    """`dataset` with features for inputs; labels, owners and all else stay.

    `how` names what else decides features: the network and the preprocessing, as values.
    """
    facts = Features(
        weights_digest(variables), inputs_digest(dataset.train.inputs),
        inputs_digest(dataset.test.inputs),
        hashlib.sha256(repr(how).encode()).hexdigest(),
    )
    beside = data_lib.data_folder(data_dir) or pathlib.Path.home() / ".cache"
    folder = files.cache_folder(beside)

    def of(split: str) -> data_lib.Examples:
        examples, inputs = dataset.split(split), getattr(facts, split)
        known = {"weights": facts.weights, "inputs": inputs, "how": facts.how}
        extract = extractor(preprocess, model, variables, examples.inputs)
        found = _cached(folder, known, examples.inputs, extract, batch_size)
        return examples._replace(inputs=found)

    replaced = dataclasses.replace(
        dataset, train=of("train"), test=of("test"), max_value=1.0, mean=(), std=()
    )
    return replaced, facts


def extractor_of(variables: Variables) -> dict[str, Any]:
    """Everything but the classifier, and the random features that it may read."""
    return parts.take(variables, lambda name: not parts.head(name) and COLLECTION not in name)


def weights_digest(variables: Variables) -> str:
    """Of the extractor."""
    digest = hashlib.sha256()
    for name, leaf in sorted(extractor_of(variables).items()):
        digest.update(f"{name} {leaf.shape} {leaf.dtype}".encode())
        digest.update(np.ascontiguousarray(leaf).data)
    return digest.hexdigest()


def inputs_digest(inputs: Any) -> str:
    """Of examples: of their bytes, or of the file that they are in."""
    digest = hashlib.sha256()
    for x in jax.tree.leaves(inputs):
        digest.update(f"{x.shape} {x.dtype}".encode())
        if isinstance(x, np.memmap) and x.filename:
            state = os.stat(x.filename)
            digest.update(repr((x.filename, x.offset, state.st_size, state.st_mtime_ns)).encode())
        else:
            digest.update(np.ascontiguousarray(x).data)
    return digest.hexdigest()


def _cached(folder, known: dict[str, str], inputs, extract: Extract, batch_size) -> np.ndarray:
    """The features in the file of these digests, which is made if it is not there."""
    key = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:24]
    path, label = folder / f"features-{key}.npy", folder / f"features-{key}.json"
    count = data_lib.count_of(data_lib.Examples(inputs, ()))
    if not (path.exists() and label.exists()):
        logger.info("features of %d examples are computed once, and kept in %s", count, path)
        with files.written_whole(path) as partial:
            found = np.lib.format.open_memmap(partial, "w+", np.float32, (count, extract.width))
            for start in progress.bar(range(0, count, batch_size), what="features",
                                      unit="batches"):
                here = np.minimum(np.arange(start, start + batch_size), count - 1)
                batch = jax.tree.map(lambda x, here=here: np.asarray(x)[here], inputs)
                end = min(start + batch_size, count)
                found[start:end] = np.asarray(extract.run(batch))[: end - start]
            found.flush()
        with files.written_whole(label) as partial:
            partial.write_text(json.dumps(known, indent=2) + "\n")
    told = json.loads(label.read_text())
    if told != known:
        other = ", ".join(name for name in known if told.get(name) != known[name])
        raise errors.UsageError(
            f"{path} holds features of other {other} than its name says: expected "
            f"{known}, found {told}. Delete it and {label.name}, and both are made again."
        )
    return files.memory_mapped(path, (count, extract.width), np.float32)


def extractor(
    preprocess: Preprocess, model: Model, variables: Variables, inputs: Any
) -> Extract:
    """What the classifier of `model` reads of stored inputs like these."""

    def extract(variables, inputs):
        mask = jnp.ones(jax.tree.leaves(inputs)[0].shape[0], bool)
        batch = preprocess.apply(Batch(inputs, (), mask), None)
        return model.apply(variables, batch.inputs).features

    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), inputs)
    shape = jax.eval_shape(extract, variables, one)
    if not hasattr(shape, "ndim") or shape.ndim != 2:
        raise errors.UsageError(
            f"data.features: the network's features are {getattr(shape, 'shape', 'unknown')}; "
            "expected a vector per example, read by a module named 'classifier'."
        )
    compiled = jax.jit(extract)
    return Extract(lambda inputs: compiled(variables, inputs), shape.shape[1])
