"""UCI heart disease (Detrano et al. 1989): 13 measurements of patients of four hospitals.

Files are UCI's processed.HOSPITAL.data, with or without a line of names: 13 features and a target
from 0, healthy, to 4. A value is missing where it is empty or `?`, and where blood pressure or
cholesterol is 0 (all of Switzerland's cholesterol). What is missing becomes the median of the train
rows of all hospitals that have it; then features are standardised by the mean and deviation of all
train rows. Both are pooled over hospitals, as if they had shared them beforehand.

A fifth of each hospital's rows of each target, rounded, is tested on, by a fixed seed. The
Hungarian file has targets 0 and 1 alone, so severity means something else there.
"""

import csv
import pathlib

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources import clients, files
from fedjax_flat.data.sources.base import SOURCES, Dataset, Examples, Source
from fedjax_flat.settings import Setting

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
FEATURES = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak",
            "slope", "ca", "thal")
_NEVER_ZERO = [FEATURES.index(name) for name in ("trestbps", "chol")]
_CLASSES = {"binary": ("healthy", "ill"), "severity": ("0", "1", "2", "3", "4")}


def heart(data_dir, target: str = "binary") -> Dataset:
    """Whether a patient is ill (target > 0), or how severely."""
    random = np.random.default_rng(0)
    train, test = {}, {}
    for hospital in HOSPITALS:
        path = files.need("heart", data_dir, [f"heart/processed.{hospital}.data"])
        rows, severity = read(path)
        labels = (severity > 0).astype(np.int32) if target == "binary" else severity
        tested = _fifth(severity, random)
        train[hospital] = Examples(rows[~tested], labels[~tested])
        test[hospital] = Examples(rows[tested], labels[tested])
    pooled = np.concatenate([part.inputs for part in train.values()])
    nowhere = [name for name, gone in zip(FEATURES, np.isnan(pooled).all(axis=0), strict=True)
               if gone]
    if nowhere:
        raise errors.UsageError(f"heart: no train row of any hospital has {', '.join(nowhere)}.")
    median = np.nanmedian(pooled, axis=0)
    filled = np.where(np.isnan(pooled), median, pooled)
    mean, std = filled.mean(axis=0), filled.std(axis=0)
    std = np.where(std > 0, std, 1)

    def standardised(part):
        inputs = (np.where(np.isnan(part.inputs), median, part.inputs) - mean) / std
        return Examples(inputs.astype(np.float32), part.labels)

    return clients.by_client(
        "heart", {k: standardised(part) for k, part in train.items()},
        {k: standardised(part) for k, part in test.items()}, len(_CLASSES[target]),
        classes=_CLASSES[target],
    )


def _fifth(severity: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Which rows are tested on."""
    tested = np.zeros(len(severity), bool)
    for value in np.unique(severity):
        rows = random.permutation(np.flatnonzero(severity == value))
        tested[rows[: round(len(rows) / 5)]] = True
    return tested


def read(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """(features with NaN where one is missing, target) of every patient."""
    rows, targets = [], []
    for number, line in enumerate(csv.reader(path.read_text().splitlines()), 1):
        cells = [cell.strip() for cell in line]
        if not any(cells) or cells[0] == FEATURES[0]:
            continue
        try:
            values = [float("nan") if cell in ("", "?") else float(cell) for cell in cells]
        except ValueError:
            values = []
        if len(values) != len(FEATURES) + 1 or values[-1] not in range(5):
            raise errors.UsageError(
                f"{path}: line {number} is {','.join(cells)[:80]!r}: expected {len(FEATURES)} "
                "numbers, empty or ? where one is missing, and a target from 0 to 4."
            )
        rows.append(values[:-1])
        targets.append(int(values[-1]))
    if not rows:
        raise errors.UsageError(f"{path} has no patient.")
    features = np.array(rows)
    zero = features[:, _NEVER_ZERO] == 0
    features[:, _NEVER_ZERO] = np.where(zero, np.nan, features[:, _NEVER_ZERO])
    return features, np.array(targets, np.int32)


SOURCES.add("heart", Source(
    heart,
    about="heart disease of patients, clients are four hospitals",
    size="736 + 184 rows of 13 features, 2 classes (or 5), 0.04 MB",
    licence="CC BY 4.0 (UCI)",
    files=", ".join(f"heart/processed.{hospital}.data" for hospital in HOSPITALS),
    here=files.is_here(f"heart/processed.{HOSPITALS[0]}.data"),
    settings={"target": Setting("binary", "target > 0, or 0 to 4", choices=tuple(_CLASSES))},
))
