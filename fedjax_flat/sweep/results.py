"""The table of a sweep: for each row the settings that did best on validation, their score on test.

A group is all seeds of one choice of tuned settings. Of every row the group with the best mean on
the split `choose_by` is taken, over the last rounds of its finished cells (`eval.window`), and its
test score is reported, mean and deviation over seeds (divided by their number, as everywhere).
Groups with a cell that was stopped are out.
Without anything tuned there is nothing to choose, and validation is not needed.
"""

import csv
import io
import math
import statistics
from typing import Any

from fedjax_flat import errors
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.report import tables
from fedjax_flat.run import metrics
from fedjax_flat.run.run_folder import RunFolder
from fedjax_flat.sweep.book import Book

FORMS = ("text", "markdown", "latex", "csv")


def results(book: Book, split: str = "test") -> list[dict[str, Any]]:
    """A record per row and model: its settings, how many seeds, mean and deviation on `split`."""
    planned = book.plan()
    groups: dict[str, dict[str, list[str]]] = {}
    for name, cell in planned["cells"].items():
        groups.setdefault(cell["row"], {}).setdefault(name.rpartition("/")[0], []).append(name)
    found = []
    for row, choices in groups.items():
        ended = {
            group: names for group, names in choices.items()
            if all(book.entry(name).get("state") == "finished" for name in names)
        }
        record: dict[str, Any] = {"row": row, "model": "", "chosen": "", "seeds": 0,
                                  "mean": None, "deviation": None}
        if not ended:
            found.append(record | {"chosen": f"none of {len(choices)} has finished"})
            continue
        best = next(iter(ended))
        if len(choices) > 1:
            best = max(ended, key=lambda g: _mean(book, ended[g], planned["choose_by"]))
        first = planned["cells"][ended[best][0]]
        record["chosen"] = ", ".join(f"{k} = {v}" for k, v in first["tuned"].items())
        records = metrics.read(RunFolder(book.run_folder(ended[best][0])).metrics_file)
        models = dict.fromkeys(
            r["model"] for r in records if r["split"] == split and r["round"] > 0
        )
        if not models:
            raise errors.UsageError(f"the cells of {row!r} were not evaluated on {split}.")
        for model in models:
            scores = [_score(book, name, split, model) for name in ended[best]]
            found.append(record | {
                "model": model, "seeds": len(scores), "mean": statistics.fmean(scores),
                "deviation": statistics.pstdev(scores) if len(scores) > 1 else math.nan,
            })
    return found


def _score(book: Book, name: str, split: str, model: str = "global") -> float:
    folder = RunFolder(book.run_folder(name))
    window = folder.config().eval.window
    records = metrics.read(folder.metrics_file)
    evaluated = {r["split"] for r in records}
    if split not in evaluated:
        raise errors.UsageError(
            f"cell {name} was not evaluated on {split}, by which settings are chosen: set "
            "data.validation and eval.splits=('validation', 'test') in the sweep's config, or "
            "choose_by."
        )
    return metrics.window_mean(records, window, split=split, model=model)[0]


def _mean(book: Book, names: list[str], split: str) -> float:
    return statistics.fmean(_score(book, name, split) for name in names)


def check_choice(cells: list[Any], choose_by: str, tuned: bool) -> None:
    """Refuses, before any cell starts, a sweep whose settings could not be chosen."""
    for cell in cells:
        splits = config_lib.flatten(cell.config)["eval.splits"]
        if tuned and choose_by not in splits:
            raise errors.UsageError(
                f"settings of row {cell.row!r} are chosen on {choose_by}, and eval.splits = "
                f"{splits}: set data.validation (e.g. 0.1) and eval.splits=('validation', 'test') "
                "in the sweep's config."
            )


def table(records: list[dict[str, Any]], form: str = "text") -> str:
    """Rows of scores in percent, as the papers print them."""
    errors.lookup("form of table", form, dict.fromkeys(FORMS))
    header = ["row", "model", "chosen", "seeds", "score (%)"]
    if form == "csv":
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*header[:4], "mean", "deviation"])
        writer.writerows([r[n] for n in ("row", "model", "chosen", "seeds", "mean", "deviation")]
                         for r in records)
        return out.getvalue().rstrip("\n")
    rows = [[errors.printable(r["row"]), r["model"], r["chosen"], str(r["seeds"]), _shown(r, form)]
            for r in records]
    if form == "text":
        return tables.table(header, rows, left=(0, 1, 2))
    if form == "markdown":
        line = lambda cells: "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"
        return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])
    lines = [" & ".join(map(_latex, [*row[:-1]])) + f" & {row[-1]} \\\\" for row in rows]
    head = " & ".join(map(_latex, header)) + " \\\\"
    return "\n".join([
        r"\begin{tabular}{lllrr}", r"\toprule", head, r"\midrule", *lines, r"\bottomrule",
        r"\end{tabular}",
    ])


def _shown(record: dict[str, Any], form: str) -> str:
    if record["mean"] is None:
        return "-"
    mean, deviation = 100 * record["mean"], 100 * record["deviation"]
    if math.isnan(deviation):
        return f"{mean:.2f}"
    latex = f"${mean:.2f} \\pm {deviation:.2f}$"
    return latex if form == "latex" else f"{mean:.2f} ± {deviation:.2f}"


def _latex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", **{c: f"\\{c}" for c in "&%$#_{}"},
               "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(c, c) for c in text)
