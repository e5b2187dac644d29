"""What is learned."""

from fedjax_flat.registry import Entry, Registry, entry
from fedjax_flat.settings import Setting
from fedjax_flat.tasks.base import Mining, Sums, Task, count, masked_sum, of_network
from fedjax_flat.tasks.classification import (
    among,
    classification,
    cross_entropy,
    restricted,
)
from fedjax_flat.tasks.language import language
from fedjax_flat.tasks.pairs import Relation
from fedjax_flat.tasks.regression import regression
from fedjax_flat.tasks.retrieval import SETTINGS as RETRIEVAL
from fedjax_flat.tasks.retrieval import relation_of, retrieval, searched
from fedjax_flat.tasks.search import nearest
from fedjax_flat.tasks.segmentation import SETTINGS as SEGMENTATION
from fedjax_flat.tasks.segmentation import segmentation

# make(model, preprocess, dataset, **settings) -> Task
TASKS: Registry[Entry] = Registry("task")
TASKS.add("classification", entry(classification, {
    "temperature": Setting(1.0, "by which logits are divided; Fed3R's classifier has 0.1", above=0),
}))
TASKS.add("language", entry(language, {
    "padding": Setting(0, "the token that counts nowhere"),
}))
TASKS.add("regression", entry(regression))
TASKS.add("retrieval", entry(retrieval, RETRIEVAL))
TASKS.add("segmentation", entry(segmentation, SEGMENTATION))

__all__ = [
    "TASKS", "Mining", "Relation", "Sums", "Task", "among", "classification", "count",
    "cross_entropy", "language", "masked_sum", "nearest", "of_network", "regression",
    "relation_of", "restricted", "retrieval", "searched", "segmentation",
]
