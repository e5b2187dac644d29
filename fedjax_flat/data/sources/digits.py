"""Handwritten digits, 8x8: inside scikit-learn, so that everybody has them."""

import numpy as np

from fedjax_flat.data.sources.base import SOURCES, Dataset, Examples, Source


def digits(data_dir=None) -> Dataset:
    """Handwritten digits, 8x8, 1,797 images (UCI, inside scikit-learn).

    Every fifth image of each class is a test image: 1,442 train and 355 test.
    """
    del data_dir
    from sklearn import datasets  # a second of import time that CIFAR users need not pay

    raw = datasets.load_digits()
    images = raw.images.astype(np.uint8)[..., None]
    labels = raw.target.astype(np.int32)
    rank = np.zeros(len(labels), int)
    for c in range(10):
        rank[labels == c] = np.arange(np.sum(labels == c))
    test = rank % 5 == 4
    train = Examples(images[~test], labels[~test])
    scaled = train.inputs / 16
    return Dataset(
        name="digits",
        train=train,
        test=Examples(images[test], labels[test]),
        num_classes=10,
        max_value=16.0,
        mean=(float(scaled.mean()),),
        std=(float(scaled.std()),),
    )


SOURCES.add("digits", Source(
    digits,
    about="handwritten digits, embedded",
    size="1,442 + 355 images of 8x8, 10 classes",
    licence="CC BY 4.0 (UCI)",
    files="nothing: inside scikit-learn",
    here=lambda folder: True,
))
