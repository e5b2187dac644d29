"""How well what a server learns of clients tells their classes apart: figures 5.8 to 5.10.

    python benchmarks/estimators.py --data FOLDER --out FOLDER

CIFAR-100, alpha = 0: 500 clients of one class each, of which those of three superclasses (aquatic
mammals, fish, flowers; 75 clients, 15 classes) are estimated, as in figure 5.10. Prints the
silhouette by class and by superclass of every estimator after --epochs, in its own metric, and
how many components PCA keeps at 90 % of the variance; draws distance maps, embeddings, and the
cosine similarity of classifiers after several numbers of epochs with its norm. Task2Vec's probe is
the model as the config starts it, which nobody has trained, unless --config.groups.probe and
--config.groups.weights name another; --config.NAME=VALUE changes any setting.
"""

import argparse
import pathlib

import jax.numpy as jnp
import numpy as np

import fedjax_flat as ff
from fedjax_flat import groups
from fedjax_flat.config_files import load_config
from fedjax_flat.experiment import grouping
from fedjax_flat.groups.estimators import public_set
from fedjax_flat.report import client_groups, tables

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
ESTIMATORS = {  # label: (estimator, reading, metric)
    "clf": ("clf", "softmax", "cosine"),
    "conf": ("conf", "softmax", "kl"),
    "conf, released": ("conf", "normalised", "kl"),
    "task2vec": ("task2vec", "softmax", "norm_cosine"),
}


def main():
    """Estimates, the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--data")
    parser.add_argument("--out", default="runs/estimators")
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 5, 10, 20])
    parser.add_argument("--superclasses", type=int, default=3, help="20: all 500 clients")
    parser.add_argument("--estimators", nargs="+", default=[*ESTIMATORS], choices=[*ESTIMATORS])
    args, args.overrides = parser.parse_known_args()
    out = pathlib.Path(args.out)
    dataset = ff.data.load("cifar100", args.data)
    built = ff.experiment.build(config_of(args, "clf", "softmax", 1, groups=False), args.data)
    counts = ff.data.class_counts(built.partition, dataset.train.labels, 100)
    classes, coarse = counts.argmax(axis=1), np.array(dataset.coarse)
    chosen = np.flatnonzero(coarse[classes] < args.superclasses)
    chosen = chosen[np.argsort(classes[chosen], kind="stable")]
    classes = classes[chosen]
    rows = []
    found, kept, matrices = {}, {}, {}
    for label in args.estimators:
        estimator, reading, metric = ESTIMATORS[label]
        for epochs in args.epochs if label == "clf" else args.epochs[-1:]:
            print(f"{label}, {epochs} epochs", flush=True)
            config = config_of(args, estimator, reading, epochs)
            public = None
            if estimator == "conf":
                public, _ = public_set(dataset, 10, built.partition.indices, 0)
            estimate = grouping.estimator(config, dataset, built.task, public)
            estimates = np.asarray(estimate(built.data, jnp.asarray(chosen, jnp.int32)))
            if label == "clf":
                matrices[epochs] = client_groups.similarities(estimates)
                estimates = groups.reduced(estimates, 0.9)
            scores = [groups.silhouette(groups.distances(m, estimates), of)
                      for m in (metric, "euclidean") for of in (classes, coarse[classes])]
            rows.append([label, str(epochs), str(estimates.shape[1]), metric,
                         *(f"{s:.3f}" for s in scores)])
        found[label], kept[label] = estimates, metric
    header = ["estimator", "epochs", "numbers", "metric", "by class", "by superclass",
              "Euclidean, by class", "by superclass"]
    print(tables.table(header, rows, left=(0, 3)))
    for label, estimates in found.items():
        name = label.replace(", ", "_")
        path = client_groups.distances(estimates, classes, kept[label], out / f"{name}.png")
        print(tables.named("figure", path))
    path = out / "embeddings.png"
    print(tables.named("figure", client_groups.embeddings(found, coarse[classes], path)))
    if matrices:
        path = client_groups.similarity(matrices, out / "similarity.png")
        print(tables.named("figure", path))


def config_of(args, estimator: str, reading: str, epochs: int, *, groups: bool = True):
    """The settings of one estimator; without groups, those of the clients alone."""
    method = "fedseq" if groups else "fedavg"
    text = f"cifar100,alpha=0,method={method},estimator={estimator}"
    path = f"{CONFIGS / 'fedseq.py'}:{text},epochs={epochs}"
    own = [a for a in args.overrides if groups or not a.startswith("--config.groups.")]
    config = load_config(path, own, None)
    config.groups.reading = reading if estimator == "conf" else config.groups.reading
    return config


if __name__ == "__main__":
    main()
