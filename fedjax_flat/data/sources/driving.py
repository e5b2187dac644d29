"""Cityscapes, IDDA and GTA5 by their published folders, and FedDrive's lists of clients.

| data | folders | natural clients | tested on |
|---|---|---|---|
| Cityscapes (Cordts et al. 2016), 19 classes | leftImg8bit/SPLIT/CITY, gtFine/SPLIT/CITY | cities | val, whose cities are unseen |
| IDDA (Alberti et al. 2020), 16 classes | IDDAsmall/DOMAIN/RGB, DOMAIN/Semantic | domains, TOWN_WEATHER_VIEW | the `setting`'s domains, and every fifth picture of each other |
| GTA5 (Richter et al. 2016), 19 classes | images, labels | one | the last twentieth |

`lists` takes the clients of FedDrive's files instead, uniform, heterogeneous or class_imbalance:
cityscapes/LISTS/train/*.json, idda/LISTS/SETTING/{train,test}/*.json, each with `user_data` {client:
{x: [pictures], y: [labels]}}; the setting, country, rainy or bus, is also which IDDA domains are
unseen. FedDrive draws the fifth of a domain that is tested on at random; its lists have it.

Cityscapes' 34 label numbers become its 19 training classes, and so do GTA5's, which has the same; or
the 13 of them that CrossCity has (`classes` of GTA5).
IDDA's 24 become the 16 of them that it has, as FedDrive maps them. Pictures are resized to `size`.
"""  # noqa: E501 (a table)

from fedjax_flat.data.sources import files, street_lists, streets
from fedjax_flat.data.sources.base import SOURCES, Dataset, Source
from fedjax_flat.data.sources.streets import IGNORED, Scene
from fedjax_flat.settings import Setting

_COLOURS = {
    "road": (128, 64, 128), "sidewalk": (244, 35, 232), "building": (70, 70, 70),
    "wall": (102, 102, 156), "fence": (190, 153, 153), "pole": (153, 153, 153),
    "light": (250, 170, 30), "sign": (220, 220, 0), "vegetation": (107, 142, 35),
    "terrain": (152, 251, 152), "sky": (70, 130, 180), "person": (220, 20, 60),
    "rider": (255, 0, 0), "car": (0, 0, 142), "truck": (0, 0, 70), "bus": (0, 60, 100),
    "train": (0, 80, 100), "motorcycle": (0, 0, 230), "bicycle": (119, 11, 32),
}
_NUMBERS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
_IDDA = {1: 2, 2: 4, 4: 11, 5: 5, 6: 0, 7: 0, 8: 1, 9: 8, 10: 13, 11: 3, 12: 7, 13: 6, 16: 15,
         17: 14, 18: 12, 19: 9, 20: 10}
_IDS = dict.fromkeys((*range(35), 255), IGNORED)
CLASSES_19 = streets.Classes(
    tuple(_COLOURS), tuple(_COLOURS.values()),
    {**_IDS, **{n: c for c, n in enumerate(_NUMBERS)}},
)
_NOT_IN_13 = ("wall", "fence", "pole", "terrain", "truck", "train")
_OF_13 = [name for name in _COLOURS if name not in _NOT_IN_13]
CLASSES_13 = streets.Classes(
    tuple(_OF_13), tuple(_COLOURS[name] for name in _OF_13),
    {**_IDS, **{_NUMBERS[list(_COLOURS).index(name)]: c for c, name in enumerate(_OF_13)}},
)
_OF_16 = [name for name in _COLOURS if name not in ("truck", "bus", "train")]
CLASSES_16 = streets.Classes(
    tuple(_OF_16), tuple(_COLOURS[name] for name in _OF_16),
    {**dict.fromkeys((*range(25), 255), IGNORED), **_IDDA},
)
LISTS = ("none", "uniform", "heterogeneous", "class_imbalance")
UNSEEN = {"country": "T07_", "rainy": "_HRN_", "bus": "_B"}


def cityscapes(
    data_dir, lists: str = "none", size: tuple[int, ...] = (512, 1024)
) -> Dataset:
    """Streets of German cities, which are the natural clients."""
    root = files.need("cityscapes", data_dir, ["cityscapes/leftImg8bit"]).parent
    images, labels = root / "leftImg8bit", root / "gtFine"

    def in_folder(split):
        return [
            Scene(path, labels / split / path.parent.name / path.name.replace(
                "_leftImg8bit", "_gtFine_labelIds"), path.parent.name)
            for path in sorted((images / split).glob("*/*_leftImg8bit.png"))
        ]

    train = in_folder("train") if lists == "none" else street_lists.listed(
        "cityscapes", root / lists / "train", images, labels, lambda _, x: x.split("/")[-2]
    )
    return streets.dataset("cityscapes", train, in_folder("val"), CLASSES_19, root=root, size=size)


def idda(
    data_dir, setting: str = "country", lists: str = "none", size: tuple[int, ...] = (512, 928)
) -> Dataset:
    """Simulated streets in 105 domains, which are the natural clients."""
    root = files.need("idda", data_dir, ["idda/IDDAsmall"]).parent
    folder, mark = root / "IDDAsmall", UNSEEN[setting]
    if lists != "none":
        town = lambda _, x: x.split("/")[0]
        train, test = (
            street_lists.listed("idda", root / lists / setting / split, folder, folder, town)
            for split in ("train", "test")
        )
        return streets.dataset("idda", train, test, CLASSES_16, root=root, size=size)
    train, test = [], []
    for domain in sorted(p for p in folder.iterdir() if (p / "RGB").is_dir()):
        pictures = sorted((domain / "RGB").glob("*.jpg"), key=lambda p: (len(p.name), p.name))
        own = [Scene(p, domain / "Semantic" / f"{p.stem}.png", domain.name) for p in pictures]
        hidden = domain.name.endswith(mark) if setting == "bus" else mark in domain.name
        test += own if hidden else own[4::5]
        train += [] if hidden else [s for i, s in enumerate(own) if i % 5 != 4]
    return streets.dataset("idda", train, test, CLASSES_16, root=root, size=size)


def gta5(data_dir, classes: int = 19, size: tuple[int, ...] = (526, 957)) -> Dataset:
    """Streets of a game; all of one client, or of the server."""
    root = files.need("gta5", data_dir, ["gta5/images"]).parent
    scenes = [Scene(path, root / "labels" / path.name, "gta5")
              for path in sorted((root / "images").glob("*.png"))]
    cut = len(scenes) - max(1, len(scenes) // 20)
    names = CLASSES_19 if classes == 19 else CLASSES_13
    return streets.dataset("gta5", scenes[:cut], scenes[cut:], names, root=root, size=size)


_LISTS = Setting("none", "FedDrive's clients instead of natural ones", choices=LISTS)
SOURCES.add("cityscapes", Source(
    cityscapes,
    about="streets of German cities, a class for every pixel",
    size="2,975 + 500 images of 1024x2048x3, 19 classes, 18 + 3 cities",
    licence="research only, no redistribution (cityscapes-dataset.com)",
    files="cityscapes/leftImg8bit with SPLIT/CITY/*.png, cityscapes/gtFine with "
          "SPLIT/CITY/*_labelIds.png; FedDrive's cityscapes/LISTS/train/*.json",
    here=files.is_here("cityscapes/leftImg8bit"),
    settings={"lists": _LISTS, "size": streets.size_setting(512, 1024)},
))
SOURCES.add("idda", Source(
    idda,
    about="simulated streets by town, weather and view, a class for every pixel",
    size="6,240 images of 1080x1920x3, 16 classes, 104 domains",
    licence="research only (idda-dataset.github.io)",
    files="idda/IDDAsmall with DOMAIN/RGB/*.jpg and DOMAIN/Semantic/*.png; FedDrive's "
          "idda/LISTS/SETTING/{train,test}/*.json",
    here=files.is_here("idda/IDDAsmall"),
    settings={
        "setting": Setting("country", "which domains are only tested on", choices=tuple(UNSEEN)),
        "lists": _LISTS, "size": streets.size_setting(512, 928),
    },
))
SOURCES.add("gta5", Source(
    gta5,
    about="streets of a game, a class for every pixel",
    size="24,966 images of 1052x1914x3, 19 or 13 classes",
    licence="research only (Richter et al. 2016)",
    files="gta5/images/*.png, gta5/labels/*.png",
    here=files.is_here("gta5/images"),
    settings={
        "classes": Setting(19, "as Cityscapes and Mapillary have, or CrossCity", choices=(19, 13)),
        "size": streets.size_setting(526, 957),
    },
))
