"""The report: one page that shows what run folders hold, to open anywhere, offline.

Everything is in the file: plotly, the style and the numbers. Nothing is computed but means; no data
set is needed, though with its labels the page shows who owns which classes. Whatever was named by
people is escaped, in the page by jinja2 and in its numbers as JSON without '<'. Curves of more than
`curves.MOST` points are thinned.
"""

import datetime
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from fedjax_flat import disk, errors
from fedjax_flat.report import charts, client_sections, curves, groups, sections
from fedjax_flat.report.groups import Group
from fedjax_flat.report.parts import Part
from fedjax_flat.run import metrics
from fedjax_flat.version import __version__

FILES = pathlib.Path(__file__).parent / "page"
SUFFIXES = (".html", ".htm")


def report(
    runs: Sequence[str | os.PathLike], out: str | os.PathLike, *, data_dir: str | None = None
) -> pathlib.Path:
    """Writes the page of some runs; runs of other data or another task have a chapter each."""
    path = pathlib.Path(out)
    if path.suffix.lower() not in SUFFIXES:
        raise errors.UsageError(
            f"--out {path}: expected a name that ends in {' or '.join(SUFFIXES)}; the report is a "
            "page for a browser."
        )
    if path.is_dir():
        raise errors.UsageError(f"--out {path} is a folder: expected the name of a file.")
    chapters: list[dict[str, Any]] = []
    drawn: list[dict[str, Any]] = []
    for name, found in _by_task([groups.read(run) for run in runs]).items():
        parts = _parts(found, data_dir)
        chapters.append({"name": name, "groups": _legend(found), "parts": parts,
                         "id": f"c{len(chapters)}"})
        drawn += [chart.drawn for part in parts for chart in part.charts]
    text = _environment().get_template("page.html").render(
        title=_title(chapters), chapters=chapters, most=curves.MOST, version=__version__,
        made=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC", style=_file("page.css"),
        script=_file("page.js"), plotly=_plotly(), drawn=_as_json(drawn),
    )
    disk.write_atomically(path, text)
    return path


def _by_task(runs: Sequence[groups.Run]) -> dict[str, list[Group]]:
    """Groups that can be compared, by data and score."""
    found: dict[str, list[groups.Run]] = {}
    for run in runs:
        name = f"{run.settings['data.name']}, {metrics.score_name(run.records)}"
        found.setdefault(name, []).append(run)
    return {name: groups.grouped(own) for name, own in found.items()}


def _parts(found: Sequence[Group], data_dir: str | None) -> list[Part]:
    """Everything there is to see of groups that can be compared."""
    here, of_clients = sections, client_sections
    made = [
        here.results(found), here.what_was_run(found), here.scores(found), here.costs(found),
        here.training(found), of_clients.classes(found), of_clients.clients(found),
        of_clients.ownership(found, data_dir), here.flatness(found), here.landscapes(found),
        here.pictures(found), here.phases(found), here.repeating(found),
    ]
    return [part for part in made if part.tables or part.charts or part.images or part.text]


def _legend(found: Sequence[Group]) -> list[dict[str, Any]]:
    return [{"label": g.label, "color": charts.color(i), "seeds": len(g.runs)}
            for i, g in enumerate(found)]


def _title(chapters: Sequence[dict[str, Any]]) -> str:
    labels = [g["label"] for chapter in chapters for g in chapter["groups"]]
    more = f" and {len(labels) - 4} more" if len(labels) > 4 else ""
    return ", ".join(labels[:4]) + more


def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FILES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )
    made.filters["printable"] = errors.printable
    return made


def _file(name: str) -> Markup:
    """Ours, so not escaped."""
    return Markup((FILES / name).read_text())


def _plotly() -> Markup:
    import plotly.offline

    return Markup(plotly.offline.get_plotlyjs())


def _as_json(value: Any) -> Markup:
    """JSON that cannot end the script element in which it stands; names as text, not as markup."""
    text = json.dumps(_escaped(value), separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("&", "\\u0026"))


def _escaped(value: Any) -> Any:
    """plotly reads some HTML in names and titles, so that '<' has to be '&lt;' there."""
    if isinstance(value, dict):
        return {k: v if k == "hovertemplate" else _escaped(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_escaped(v) for v in value]
    if not isinstance(value, str):
        return value
    return errors.printable(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
