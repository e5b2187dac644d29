"""CrossCity and Mapillary Vistas by their published folders: what LADD adapts a model of GTA5 to.

| data | folders | natural clients | tested on |
|---|---|---|---|
| CrossCity (Chen et al. 2017), 13 classes | CITY/Images/{Train,Test}, CITY/Labels/Test/NAME_eval.png | cities: Rio, Rome, Taipei, Tokyo | each city's Test |
| Mapillary Vistas (Neuhold et al. 2017), 19 classes | SPLIT/images, SPLIT/v1.2/labels or SPLIT/labels | one | validation |

CrossCity's train pictures have no labels: every pixel is ignored, so that only methods without
labels learn of them. Its labels are numbered as Cityscapes' are. Mapillary's 66 (version 1.2) become
19 as in LADD's program, which has poles of street lights and of the frames of signs, bike lanes as
pavement, and leaves 34 out. Its pictures differ in size; all are resized to `size`, whatever their
shape, where LADD keeps the shape.

`lists` = ladd takes the clients of LADD (Shenaj, Fani et al., WACV 2023) instead:
crosscity/ladd/{train,test}/*.json (472; the paper says 476) and mapillary/ladd/{train,test}/*.json
(357, each of one continent, which is then its domain). Copy them from data/*/splits of its program.
Without them `partition.resize_to` makes as many of the cities, of nearly one size.
"""  # noqa: E501 (a table)

import functools

from fedjax_flat.data.sources import files, street_lists, streets
from fedjax_flat.data.sources.base import SOURCES, Dataset, Source
from fedjax_flat.data.sources.driving import CLASSES_13, CLASSES_19
from fedjax_flat.data.sources.streets import IGNORED, Scene
from fedjax_flat.settings import Setting

# Vistas' number of every class, of which LADD makes one of the 19
_OF_MAPILLARY = {
    "road": (13, 14, 24, 43), "sidewalk": (2, 7, 9, 11, 15), "building": (17,), "wall": (6,),
    "fence": (3,), "pole": (44, 45, 46, 47), "light": (48,), "sign": (50,), "vegetation": (30,),
    "terrain": (26, 29), "sky": (27,), "person": (19,), "rider": (20, 21, 22), "car": (55,),
    "truck": (61,), "bus": (54,), "train": (58,), "motorcycle": (57,), "bicycle": (52,),
}
CLASSES_MAPILLARY = streets.Classes(
    CLASSES_19.names, CLASSES_19.colours,
    {**dict.fromkeys((*range(66), 255), IGNORED),
     **{n: c for c, name in enumerate(CLASSES_19.names) for n in _OF_MAPILLARY[name]}},
)


def crosscity(data_dir, lists: str = "none", size: tuple[int, ...] = (512, 1024)) -> Dataset:
    """Streets of four cities; train pictures without labels."""
    root = files.need("crosscity", data_dir, ["crosscity/Rio"]).parent
    if lists == "none":
        folders = sorted(p for p in root.iterdir() if (p / "Images").is_dir())
        pictures = lambda folder: sorted(p for e in ("jpg", "png") for p in folder.glob(f"*.{e}"))
        train = [Scene(p, None, city.name) for city in folders
                 for p in pictures(city / "Images" / "Train")]
        test = [Scene(p, city / "Labels" / "Test" / f"{p.stem}_eval.png", city.name)
                for city in folders for p in pictures(city / "Images" / "Test")]
    else:
        read = functools.partial(_lists, "crosscity", root)
        train = read("train", lambda user, x: x.split("/")[0], unlabelled=True)
        test = read("test", lambda user, x: x.split("/")[0])
    return streets.dataset("crosscity", train, test, CLASSES_13, root=root, size=size)


def mapillary(data_dir, lists: str = "none", size: tuple[int, ...] = (768, 1024)) -> Dataset:
    """Streets of six continents."""
    root = files.need("mapillary", data_dir, ["mapillary/training"]).parent

    def in_folder(split):
        labels = root / split / "v1.2" / "labels"
        labels = labels if labels.is_dir() else root / split / "labels"
        return [Scene(p, labels / f"{p.stem}.png", split)
                for p in sorted((root / split / "images").glob("*.jpg"))]

    if lists == "none":
        train, test = in_folder("training"), in_folder("validation")
    else:
        read = functools.partial(_lists, "mapillary", root)
        train = read("train", lambda user, x: user.rstrip("0123456789"))
        test = read("test", lambda user, x: "validation")
    return streets.dataset("mapillary", train, test, CLASSES_MAPILLARY, root=root, size=size)


def _lists(name, root, split, domain, **options) -> list[Scene]:
    return street_lists.listed(name, root / "ladd" / split, root, root, domain, **options)


_LISTS = Setting("none", "LADD's clients instead of natural ones", choices=("none", "ladd"))
SOURCES.add("crosscity", Source(
    crosscity,
    about="streets of four cities, labels for tests only",
    size="12,800 + 400 images of 1024x2048x3, 13 classes, 4 cities",
    licence="research only, on request (yihsinchen.github.io/segmentation_adaptation_dataset)",
    files="crosscity/Rio (and Rome, Taipei, Tokyo) with Images/{Train,Test}/*.{jpg,png} and "
          "Labels/Test/*_eval.png; LADD's crosscity/ladd/{train,test}/*.json",
    here=files.is_here("crosscity/Rio"),
    settings={"lists": _LISTS, "size": streets.size_setting(512, 1024)},
))
SOURCES.add("mapillary", Source(
    mapillary,
    about="streets of the whole world, a class for every pixel",
    size="18,000 + 2,000 images of many sizes, 19 classes",
    licence="CC BY-NC-SA 4.0 (mapillary.com/dataset/vistas)",
    files="mapillary/{training,validation} with images/*.jpg and labels/*.png or "
          "v1.2/labels/*.png; LADD's mapillary/ladd/{train,test}/*.json",
    here=files.is_here("mapillary/training"),
    settings={"lists": _LISTS, "size": streets.size_setting(768, 1024)},
))
