"""What the report page is made of: parts with tables, charts and pictures."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from fedjax_flat.report import groups
from fedjax_flat.report.charts import Chart
from fedjax_flat.report.groups import Group
from fedjax_flat.run import metrics


class Table(NamedTuple):
    """Rows of cells; the columns in `left` are text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[int] = (0,)
    note: str = ""
    labels: bool = False  # whether the first column has groups' labels


class Part(NamedTuple):
    """A heading, and what is below it."""

    title: str
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    images: Sequence[tuple[str, str]] = ()
    text: str = ""
    folded: Sequence[tuple[str, Table]] = ()


def score_of(found: Sequence[Group]) -> str:
    """What the task calls its score."""
    return metrics.score_name(found[0].runs[0].records)


def titled(score: str) -> str:
    """The score's name where a title begins with it."""
    written = metrics.written(score)
    return written.capitalize() if written.islower() else written


def models_of(found: Sequence[Group]) -> list[str]:
    """Names of the models that were evaluated."""
    models = dict.fromkeys(m for g in found for m, _ in metrics.evaluated(g.runs[0].records))
    return list(models) or ["global"]


def splits_of(found: Sequence[Group]) -> list[str]:
    """What they were evaluated on."""
    return list(dict.fromkeys(s for g in found for _, s in metrics.evaluated(g.runs[0].records)))


def split_of(found: Sequence[Group]) -> str:
    """The one that counts most: test, or the first."""
    there = splits_of(found)
    return "test" if "test" in there or not there else there[0]


def those(made: Sequence[Chart | None]) -> list[Chart]:
    """The charts that there are."""
    return [chart for chart in made if chart]


def seed_of(run: groups.Run) -> Any:
    """The seed of training."""
    return run.settings.get("seed", 0)


def shown(value: Any) -> str:
    """A setting as the page shows it."""
    if value is None:
        return "–"
    if isinstance(value, list | tuple):
        if value and all(isinstance(v, dict) and "name" in v for v in value):  # phases
            return " → ".join(v["name"] for v in value)
        return ", ".join(map(shown, value)) if value else "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
