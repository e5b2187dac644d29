"""Mapillary Street-Level Sequences (Warburg et al. 2020), as its archives unpack.

    mapillary_sls/train_val/CITY/{query,database}/images/KEY.jpg
                                                  postprocessed.csv   key, easting, northing, ...
                                                  seq_info.csv        key, sequence_key, ...
                                                  raw.csv             key, pano, ...

Positions are UTM metres. The cities of the published test set have none, so that it can be asked
only of the authors' server; as in FedVPR (Caldarola 2024, section 6.3), San Francisco and
Copenhagen are tested on, and Amsterdam and Manila left out, for choosing settings
(`test_cities` = amsterdam, manila). The rest is trained on. Panoramas are left out where raw.csv
tells them, as the authors' loader does. Pictures become squares of `side`, their middle.
"""

import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_flat import errors
from fedjax_flat.data.sources import decode, files, listing, places
from fedjax_flat.data.sources.base import SOURCES, Dataset, Source, channel_statistics
from fedjax_flat.data.sources.places import Views
from fedjax_flat.settings import Setting

CITIES = (  # of train_val
    "amman", "amsterdam", "austin", "bangkok", "berlin", "boston", "budapest", "cph", "goa",
    "helsinki", "london", "manila", "melbourne", "moscow", "nairobi", "ottawa", "paris", "phoenix",
    "saopaulo", "sf", "tokyo", "toronto", "trondheim", "zurich",
)
_FOLDERS = ("mapillary_sls/train_val", "msls/train_val")
_ROLES = ("database", "query")


class Picture(NamedTuple):
    """A line of postprocessed.csv, with what the other tables say of it."""

    where: str
    file: pathlib.Path
    city: str
    sequence: str
    query: bool
    position: tuple[float, float]


def mapillary_sls(
    data_dir, side: int = 224, test_cities: tuple[str, ...] = ("cph", "sf"),
    left_out: tuple[str, ...] = ("amsterdam", "manila"), skip_unreadable: bool = False,
) -> Dataset:
    """Street views of cities; natural clients are sequences."""
    folder = files.need("mapillary_sls", data_dir, _FOLDERS)
    here = sorted(p.name for p in folder.iterdir() if (p / "database").is_dir())
    for city in test_cities:
        errors.lookup("test city of mapillary_sls", city, dict.fromkeys(here))
    for city in left_out:
        errors.lookup("left out city of mapillary_sls", city, dict.fromkeys((*here, *CITIES)))
    trained = [c for c in here if c not in (*test_cities, *left_out)]
    splits = []
    for what, cities in (("train", trained), ("test", test_cities)):
        found = listing.present(
            "mapillary_sls", [p for c in cities for p in _pictures(folder / c)], skip_unreadable
        )
        if not found:
            raise errors.UsageError(
                f"mapillary_sls: no {what} pictures: {folder} has {', '.join(here) or 'no city'}; "
                f"tested on are {', '.join(test_cities) or 'none'}, left out "
                f"{', '.join(left_out) or 'none'}."
            )
        images, kept = decode.pictures(
            "mapillary_sls", [p.file for p in found], decode.Form(side), root=folder.parent,
            skip_unreadable=skip_unreadable,
        )
        splits.append((images, _views([found[i] for i in kept])))
    mean, std = channel_statistics("mapillary_sls", splits[0][0])
    return places.dataset("mapillary_sls", splits[0], splits[1], max_value=255.0, mean=mean,
                          std=std)


def _views(found: Sequence[Picture]) -> Views:
    return Views(
        np.array([p.city for p in found]), np.array([p.sequence for p in found]),
        np.array([p.query for p in found]), np.array([p.position for p in found], np.float64),
    )


def _pictures(city: pathlib.Path) -> Iterator[Picture]:
    """Those of a city that are no panoramas, the database first."""
    for role in _ROLES:
        folder = city / role
        tables = {name: _table(folder / f"{name}.csv", columns) for name, columns in (
            ("postprocessed", ("key", "easting", "northing")),
            ("seq_info", ("key", "sequence_key")),
        )}
        sequences = {cells["key"]: cells["sequence_key"] for _, cells in tables["seq_info"]}
        raw = folder / "raw.csv"
        panoramas = {
            cells["key"] for _, cells in (_table(raw, ("key", "pano")) if raw.is_file() else ())
            if cells["pano"].lower() == "true"
        }
        for where, cells in tables["postprocessed"]:
            key = cells["key"]
            if key in panoramas:
                continue
            if not sequences.get(key):
                raise errors.UsageError(
                    f"{where}: picture {key} has no sequence: expected its key in "
                    f"{folder / 'seq_info.csv'}, with a sequence_key."
                )
            yield Picture(
                where, folder / "images" / f"{key}.jpg", city.name, sequences[key],
                role == "query", (_metres(where, cells, "easting"),
                                  _metres(where, cells, "northing")),
            )


def _metres(where: str, cells: dict[str, str], column: str) -> float:
    try:
        value = float(cells[column])
    except ValueError:
        value = np.nan
    if not np.isfinite(value):
        raise errors.UsageError(
            f"{where}: {column} {cells[column]!r} of picture {cells['key']} is no number: expected "
            "UTM metres, e.g. 465123.4."
        )
    return value


def _table(path: pathlib.Path, columns: tuple[str, ...]) -> list[tuple[str, dict[str, str]]]:
    if not path.is_file():
        raise errors.UsageError(
            f"mapillary_sls: no {path}: expected the tables of metadata.zip beside images/."
        )
    return listing.read_csv(path, columns)


SOURCES.add("mapillary_sls", Source(
    mapillary_sls,
    about="street views of cities with positions, for place recognition: Mapillary SLS "
          "(Warburg et al. 2020)",
    size="about 1.68 million images, 24 cities with positions, clients are sequences",
    licence="Mapillary's, for research, given with the download",
    files="mapillary_sls/train_val with CITY/{query,database}/images/KEY.jpg and beside images/ "
          "postprocessed.csv, seq_info.csv, raw.csv (images_vol_*.zip and metadata.zip, unpacked "
          "into one folder)",
    here=files.is_here(*_FOLDERS),
    settings={
        **listing.SETTINGS,
        "test_cities": Setting(("cph", "sf"), "whose database and queries are tested on"),
        "left_out": Setting(("amsterdam", "manila"), "cities that are neither trained nor tested "
                            "on"),
    },
))
