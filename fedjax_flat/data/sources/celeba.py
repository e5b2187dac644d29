"""CelebA by celebrity, as LEAF writes it: smiling or not (Caldas et al., arXiv:1812.01097).

Files of LEAF's data/celeba: data/train/*.json and data/test/*.json, each with `users` and
`user_data` {user: {x: [file names], y: [0 or 1]}}, and the pictures data/raw/img_align_celeba/.
LEAF resizes a picture to 84x84 without cropping it; so do we.
"""

import json
import pathlib

from fedjax_flat import errors
from fedjax_flat.data.sources import decode, files, listing
from fedjax_flat.data.sources.base import SOURCES, Dataset, Source
from fedjax_flat.data.sources.listing import Row
from fedjax_flat.settings import Setting


def celeba(data_dir, side: int = 84, skip_unreadable: bool = False) -> Dataset:
    """Faces of celebrities, who are the clients."""
    data = files.need("celeba", data_dir, ["celeba/data/train"]).parent
    train, test = (_rows(data / part, data / "raw" / "img_align_celeba")
                   for part in ("train", "test"))
    return listing.dataset("celeba", train, test, decode.Form(side, stretch=True), root=data.parent,
                           skip_unreadable=skip_unreadable, num_classes=2)


def _rows(folder: pathlib.Path, pictures: pathlib.Path) -> list[Row]:
    tables = sorted(folder.glob("*.json"))
    if not tables:
        raise errors.UsageError(
            f"celeba: {folder} has no *.json: expected what LEAF's preprocess.sh writes."
        )
    rows = []
    for table in tables:
        try:
            users = json.loads(table.read_text())["user_data"]
            for user, own in users.items():
                rows += [
                    Row(f"{table}, user {user}, image {i}", pictures / x, str(y), str(user))
                    for i, (x, y) in enumerate(zip(own["x"], own["y"], strict=True))
                ]
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise errors.UsageError(
                f"{table}: not as LEAF writes it ({type(e).__name__}: {e}); expected user_data: "
                "{user: {x: [file names], y: [0 or 1]}}, as many labels as files."
            ) from e
    return rows


SOURCES.add("celeba", Source(
    celeba,
    about="faces by celebrity: smiling or not (LEAF)",
    size="200,288 images of 84x84x3, 2 classes, 9,343 clients",
    licence="research only, no redistribution (Liu et al. 2015)",
    files="celeba/data/train/*.json and test/*.json (LEAF), "
          "celeba/data/raw/img_align_celeba/NAME.jpg",
    here=files.is_here("celeba/data/train"),
    settings=listing.SETTINGS | {"side": Setting(84, "of the stored square", at_least=1)},
))
