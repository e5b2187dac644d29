"""Photographs by their photographers or places: the splits of Hsu, Qi and Brown (2020).

"Federated Visual Classification with Real-World Data Distribution", ECCV 2020, arXiv:2003.08082.
Published are CSV files, as google-research/federated_vision_datasets describes them: the columns
`user_id` (train only), `image_id` and `class`. The pictures come from Google Landmarks v2, whose
file of image `abcdef...` is train/a/b/c/abcdef....jpg, and from iNaturalist 2017, whose files are
train_val_images/KIND/SPECIES/ID.jpg. TensorFlow Federated publishes iNaturalist's splits as one
file with a column for each (iNaturalist_train.csv, `NA` where an image is in none); both are read.

The test set belongs to nobody. Bytes are normalised by a mean and a deviation of 0.5, as in the
released code of Fed3R (Fani et al., 2024).
"""

import os
import pathlib
import re
from collections.abc import Callable

from fedjax_flat import errors
from fedjax_flat.data.sources import decode, files, listing
from fedjax_flat.data.sources.base import SOURCES, Dataset, Source
from fedjax_flat.data.sources.listing import Row
from fedjax_flat.settings import Setting

_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_SPLITS = ("users_120k", "geo_100", "geo_300", "geo_1k", "geo_3k")


def landmarks(data_dir, side: int = 224, skip_unreadable: bool = False) -> Dataset:
    """Landmarks-User-160k: photographs of 2,028 landmarks by 1,262 photographers."""
    root = files.need("landmarks", data_dir, ["landmarks/"])
    table = _table("landmarks", root, r"federated_train\.csv", "landmarks-user-160k.zip")

    def image(name: str) -> pathlib.Path:
        flat = root / "images" / f"{name}.jpg"
        return flat if flat.is_file() else root.joinpath("train", *name[:3], f"{name}.jpg")

    train = _rows(table, "user_id", image)
    test = _rows(table.with_name("test.csv"), "", image)
    return listing.dataset("landmarks", train, test, decode.Form(side), root=root,
                           skip_unreadable=skip_unreadable, num_classes=2028, normal=_HALF)


def inaturalist(
    data_dir, split: str = "users_120k", side: int = 224, skip_unreadable: bool = False
) -> Dataset:
    """iNaturalist-User-120k, or -Geo: 1,203 species, by photographer or by place."""
    root = files.need("inaturalist", data_dir, ["inaturalist/"])
    kind, size = split.split("_")
    size = {"1k": "(1k|1000)", "3k": "(3k|3000)"}.get(size, size)
    one = rf"federated_train_?{kind.removesuffix('s')}s?[_-]?{size}\.csv"
    archive = "inaturalist-user-120k.zip" if kind == "users" else "inaturalist-geo.zip"
    table = _table("inaturalist", root, rf"{one}|inaturalist_train\.csv", archive)
    whole = table.name.lower() == "inaturalist_train.csv"
    column = split.replace("users", "user") if whole else "user_id"
    beside = table.with_name("iNaturalist_test.csv" if whole else "test.csv")
    pictures = files.need("inaturalist", root, ["train_val_images", "images"])
    found = {
        os.path.splitext(name)[0]: pathlib.Path(folder, name)
        for folder, _, names in os.walk(pictures) for name in names
    }
    image = lambda name: found.get(name, pictures / f"{name}.jpg")
    train, test = _rows(table, column, image), _rows(beside, "", image)
    return listing.dataset("inaturalist", train, test, decode.Form(side), root=root,
                           skip_unreadable=skip_unreadable, num_classes=1203, normal=_HALF)


def _table(name: str, root: pathlib.Path, pattern: str, archive: str) -> pathlib.Path:
    """The list of train images, in `root` or one folder below, with the test list beside it."""
    tables = [*sorted(root.glob("*.csv")), *sorted(root.glob("*/*.csv"))]
    fits = [t for t in tables if re.fullmatch(pattern, t.name, re.IGNORECASE)]
    if not fits:
        there = ", ".join(str(t.relative_to(root)) for t in tables) or "no CSV files"
        raise errors.UsageError(
            f"{name}: {root} has {there}: expected the train list of this split. Unpack {archive} "
            "there (google-research/federated_vision_datasets)."
        )
    return fits[0]


def _rows(path: pathlib.Path, client: str, image: Callable[[str], pathlib.Path]) -> list[Row]:
    """Of a published list; with no `client` column, nobody's."""
    if not path.is_file():
        raise errors.UsageError(f"no {path}: expected the test list beside the train list.")
    columns = ("image_id", "class") + ((client,) if client else ())
    rows = [
        Row(where, image(cells["image_id"]), cells["class"], cells[client] if client else "")
        for where, cells in listing.read_csv(path, columns)
        if not client or cells[client] != "NA"
    ]
    if client:
        listing.refuse(rows, lambda r: not r.client, lambda r: f"no {client} for {r.file.name}")
    return rows


SOURCES.add("landmarks", Source(
    landmarks,
    about="photographs of landmarks by photographer: Landmarks-User-160k (Hsu et al. 2020)",
    size="164,172 train images, 2,028 classes, 1,262 clients",
    licence="per image (Creative Commons); lists of Google Landmarks v2 CC BY 4.0",
    files="landmarks/ with federated_train.csv and test.csv (landmarks-user-160k.zip), "
          "train/a/b/c/ID.jpg or images/ID.jpg",
    here=files.is_here("landmarks"),
    settings=listing.SETTINGS,
))
SOURCES.add("inaturalist", Source(
    inaturalist,
    about="animals and plants by photographer or place: iNaturalist-User-120k, -Geo "
          "(Hsu et al. 2020)",
    size="120,300 + 35,641 images, 1,203 classes, 135 to 9,275 clients",
    licence="iNaturalist 2017: per image, research only",
    files="inaturalist/ with federated_train_*.csv and test.csv (inaturalist-user-120k.zip, "
          "inaturalist-geo.zip), train_val_images/",
    here=files.is_here("inaturalist"),
    settings={"split": Setting("users_120k", "by photographer, or by place of about N images",
                               choices=_SPLITS), **listing.SETTINGS},
))
