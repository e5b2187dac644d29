"""Parts of the report page about clients: their scores and their data; and about classes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_flat import data as data_lib
from fedjax_flat import errors
from fedjax_flat.data import Partition
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.report import by_style, charts, curves, masks, parts, pixels
from fedjax_flat.report.charts import Chart
from fedjax_flat.report.groups import Group
from fedjax_flat.report.ownership import class_counts
from fedjax_flat.report.parts import Part, Table
from fedjax_flat.run import metrics
from fedjax_flat.run.run_folder import RunFolder

_CLIENTS, _ROUNDS = 300, 80  # shown at most in a map


def classes(found: Sequence[Group]) -> Part:
    """Of segmentation: the score of each class."""
    split = parts.split_of(found)
    values: list[dict[str, float] | None] = []
    for group in found:
        evaluated = [r for r in group.runs[0].records if (r["split"], r["model"]) ==
                     (split, "global") and r["round"]]
        names = [n for n in (evaluated[-1] if evaluated else {}) if n.startswith("iou.")]
        values.append({
            n.removeprefix("iou."): 100 * group.window_mean(split=split, name=n)[0] for n in names
        } or None)
    made = charts.bars(found, f"{split} IoU by class", values, "IoU (%)")
    return Part("Classes", charts=parts.those([made]))


def clients(found: Sequence[Group]) -> Part:
    """Scores of clients: their spread by round, the last of each, and all by round."""
    made: list[Chart | None] = []
    rows, maps = [], []
    measured_on = [(m, s) for m, s in metrics.evaluated(found[0].runs[0].records)
                   if s in ("own", "local_test")]
    for quantile, title in (("worst", "The worst client's score"),
                            ("deviation", "Deviation of scores over clients")):
        for split in dict.fromkeys(s for _, s in measured_on):
            of = lambda g, split=split, quantile=quantile: [
                {"split": split, "model": m, "name": f"fairness.{quantile}"}
                for m, s in metrics.evaluated(g.runs[0].records) if s == split
            ]
            made.append(charts.by_round(found, f"{title}, {split} examples", select=of, scale=100,
                                        dashes=parts.models_of(found), y="score (%)"))
    ranked: list[dict[str, Any]] = []
    for i, group in enumerate(found):
        for (split, model), records in _by_client(group.runs[0].folder).items():
            values = np.array([r["score"] for r in records], float)
            if np.isnan(values[-1]).all():
                continue
            last = 100 * np.sort(values[-1][~np.isnan(values[-1])])
            quantiles = np.quantile(last, [0, 0.1, 0.5, 0.9])
            rows.append([group.label, model, split, *(f"{q:.2f}" for q in quantiles),
                         f"{last.std():.2f}"])
            if (model, split) == next(iter(_by_client(group.runs[0].folder)))[::-1]:
                chosen = charts.numbers(last[np.unique(np.linspace(0, len(last) - 1, 400).astype(
                    int))])
                ranked.append({
                    "type": "scatter", "mode": "lines", "name": group.label, "meta": i,
                    "x": charts.numbers(np.linspace(0, 100, len(chosen))), "y": chosen,
                    "line": {"color": charts.color(i), "width": 2},
                })
                maps.append(_client_map(group, records, values, model, split))
    if ranked:
        made.append(Chart("Clients from the worst to the best", ranked, {
            "xaxis": {"title": {"text": "share of clients (%)"}},
            "yaxis": {"title": {"text": "score (%)"}}}, "At the last evaluation."))
    header = ["run", "model", "examples", "worst", "10 %", "median", "90 %", "deviation"]
    note = ("Of the last evaluation, of the first seed: own are the examples that a client trains "
            "on, local_test those of its own that it does not.")
    table = [Table(header, rows, (0, 1, 2), note, labels=True)] if rows else []
    return Part("Clients", table, parts.those([*made, *maps]))


def _client_map(group: Group, records, values: np.ndarray, model: str, split: str) -> Chart:
    kept = np.flatnonzero(curves.even(np.array([r["round"] for r in records])))
    rounds = kept[np.unique(np.linspace(0, len(kept) - 1, _ROUNDS).astype(int))]
    there = np.unique(np.linspace(0, values.shape[1] - 1, _CLIENTS).astype(int))
    left = [f"{len(there)} of {values.shape[1]} clients."] * (len(there) < values.shape[1])
    return charts.heat(
        f"{group.label}: score of every client", 100 * values[np.ix_(rounds, there)].T,
        x=[records[i]["round"] for i in rounds], y=there.tolist(), x_title="round",
        y_title="client", bar="%", limits=(0, 100),
        note=" ".join([f"Of the {model} model on {split} examples.", *left]),
    )


def _by_client(folder: RunFolder) -> dict[tuple[str, str], list[dict[str, Any]]]:
    last = (folder.phases or [folder])[-1]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in metrics.read(last.clients_file):
        if "score" in record:
            found.setdefault((record["split"], record["model"]), []).append(record)
    return found


def ownership(found: Sequence[Group], data_dir: str | None) -> Part:
    """Who owns how many examples of which class; once for all that have the same clients."""
    made: list[Chart] = []
    seen: dict[str, str] = {}
    text = ""
    for group in found:
        run = group.runs[0]
        folder = (run.folder.phases or [run.folder])[0]
        try:
            partition = Partition.load(folder.partition_file)
        except errors.UsageError:
            continue
        if partition.content_hash in seen:
            continue
        seen[partition.content_hash] = group.label
        title = "Who owns what" if len(seen) == 1 else f"Who owns what: {group.label}"
        shown = np.unique(np.linspace(0, partition.num_clients - 1, _CLIENTS).astype(int))
        counts = None
        try:
            dataset = _dataset(folder, partition, data_dir)
            counts = class_counts(dataset, partition)
            if (of_pixels := pixels.pixel_counts(dataset, partition)) is not None:
                made.append(_pixel_boxes(of_pixels, masks.names_of(dataset)))
            made += _style_maps(run.folder, data_dir)
        except errors.UsageError as e:
            text = f"Classes are not shown: {str(e).splitlines()[0]}"
        if counts is not None and counts.shape[1] <= 1000:
            names = [str(c) for c in range(counts.shape[1])]
            made.append(charts.heat(
                title, counts[shown].T, x=shown.tolist(), y=names, x_title="client",
                y_title="class", bar="examples", note="Train examples of each class, by client.",
            ))
        sizes = np.sort(partition.sizes)[::-1]
        chosen = np.unique(np.linspace(0, len(sizes) - 1, 400).astype(int))
        made.append(Chart("Examples per client", [{
            "type": "bar", "x": (chosen + 1).tolist(), "y": sizes[chosen].tolist(),
            "marker": {"color": "#8d939e"}}], {
            "xaxis": {"title": {"text": "clients, the largest first"}},
            "yaxis": {"title": {"text": "examples"}}, "bargap": 0.05},
            f"{partition.num_clients} clients, {sizes.min()} to {sizes.max()} examples, "
            f"{sizes.mean():.4g} on average."))
    return Part("Data", charts=made, text=text)


def _dataset(
    folder: RunFolder, partition: Partition, data_dir: str | None
) -> data_lib.Dataset:
    config = folder.config()
    source = data_lib.SOURCES.find(config.data.name)
    options = config_lib.options_of(config, "data", source)
    dataset = data_lib.load(config.data.name, data_dir, **options)
    partition.check(data_lib.count_of(dataset.train))
    return dataset


def _style_maps(folder: RunFolder, data_dir: str | None) -> list[Chart]:
    """Of the last phase, in which clients train: the server's, before it, has none of theirs."""
    last = (folder.phases or [folder])[-1]
    partition = Partition.load(last.partition_file)
    found = by_style.map_of(last.config(), _dataset(last, partition, data_dir), partition)
    return [_style_map(found)] if found else []


def _style_map(found: by_style.StyleMap) -> Chart:
    each = [{"type": "scatter", "mode": "markers", "marker": {"size": 5},
             "name": found.names[owner], "x": charts.numbers(own[:, 0]),
             "y": charts.numbers(own[:, 1])}
            for owner in np.unique(found.owners) for own in [found.points[found.owners == owner]]]
    bare = {"showticklabels": False, "zeroline": False}
    return Chart("Styles of images, by t-SNE", each,
                 {"xaxis": bare, "yaxis": bare, "showlegend": True},
                 "Train images; those that are near each other are alike in style.")


def _pixel_boxes(counts: np.ndarray, names: Sequence[str]) -> Chart:
    shares = 100 * pixels.shares(counts)
    boxes = [{"type": "box", "name": f"{name} ({(own > 0).sum()})", "y": charts.numbers(share),
              "showlegend": False}
             for name, own, share in zip(names, counts.T, shares.T, strict=True)]
    return Chart("Pixels of each class, by client", boxes,
                 {"yaxis": {"title": {"text": "pixels of a client (%)"}}},
                 f"{len(shares)} clients; in brackets: how many have the class.")
