"""The registered data sets as a table: what each is, and whether its files are here."""

import pathlib
import shutil
import textwrap
from typing import Any

from fedjax_flat import errors
from fedjax_flat.data import DATA_VARIABLE, SOURCES

_NARROWEST = 20  # of the last column, whatever the terminal


def names() -> list[str]:
    """Of all sources, sorted."""
    return sorted(SOURCES)


def describe(name: str, folder: pathlib.Path | None) -> dict[str, Any]:
    """One source, as data."""
    source = SOURCES[name]
    return {
        "name": name,
        "argument": source.argument,
        "about": source.about,
        "size": source.size,
        "licence": source.licence,
        "files": source.files,
        "here": source.here(folder),
        "settings": {f"data.{n}": {"default": s.default, "range": s.range, "doc": s.doc}
                     for n, s in source.settings.items()},
    }


def overview(folder: pathlib.Path | None, width: int | None = None) -> str:
    """All sources, as wide as the terminal."""
    if folder is not None and not folder.is_dir():
        raise errors.UsageError(
            f"no data folder {folder}: name one that is there with --data or {DATA_VARIABLE}."
        )
    width = width or shutil.get_terminal_size().columns
    found = [describe(name, folder) for name in names()]
    titles = [d["name"] + (f":{d['argument']}" if d["argument"] else "") for d in found]
    first = max(len(t) for t in titles)
    last = max(width - first - len("  here  "), _NARROWEST)
    lines = [f"{'data.name'.ljust(first)}  here  what it is", f"{'-' * first}  ----  {'-' * last}"]
    for title, d in zip(titles, found, strict=True):
        text = textwrap.wrap(d["about"], last, break_on_hyphens=False)
        for what in ("size", "licence", "files", "settings"):
            value = ", ".join(d[what]) if what == "settings" else d[what]
            if value:
                text += textwrap.wrap(f"{what}: {value}", last, subsequent_indent="  ",
                                      break_on_hyphens=False)
        for i, line in enumerate(text):
            here = "yes" if d["here"] else "no"
            lines.append(f"{title if i == 0 else '':{first}}  {here if i == 0 else '':4}  {line}")
    where = f"here: in {folder}" if folder else f"here: no data folder (--data or {DATA_VARIABLE})"
    return "\n".join([*lines, "", where])
