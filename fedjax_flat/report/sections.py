"""The parts of the report page, each from groups of runs: tables, charts, pictures.

Runs are compared where they learn the same task on the same data; what a part has nothing to show
of, it leaves out.
"""

import shlex
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_flat import data as data_lib
from fedjax_flat import errors
from fedjax_flat.data import Partition
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.report import charts, curves, groups, measured, tables
from fedjax_flat.report.charts import Chart
from fedjax_flat.report.groups import Group
from fedjax_flat.run import environment, metrics
from fedjax_flat.run.run_folder import RunFolder

# Of the cohort's records, what has a chart of its own, or none.
_KNOWN = {"round", "split", "model", "loss", "drift", "norm", "clients", "examples",
          "examples_per_s", "bytes_down", "bytes_up", "flops", "phase", "accuracy", "seconds"}
_CLIENTS, _ROUNDS = 300, 80  # shown at most in a map


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


def parts(found: Sequence[Group], data_dir: str | None) -> Iterator[Part]:
    """Everything there is to see of groups that can be compared."""
    for make in (results, what_was_run, scores, costs, training, classes, clients):
        yield make(found)
    yield ownership(found, data_dir)
    for make in (flatness, landscapes, pictures, phases, repeating):
        yield make(found)


def results(found: Sequence[Group]) -> Part:
    """The number that is reported: the mean over the last rounds, and over seeds."""
    rows = []
    for group in found:
        records = group.runs[0].records
        last = str(max((r["round"] for r in records), default=0))
        for model, split in metrics.evaluated(records):
            try:
                mean, deviation, count = group.window_mean(split=split, model=model)
                loss = group.window_mean(split=split, model=model, name="loss")[0]
            except errors.UsageError:  # nothing but round 0, or a model that another seed lacks
                continue
            over = f"{count} seeds" if len(group.runs) > 1 else f"{count} rounds"
            rows.append([group.label, model, split, tables.percent(mean, deviation),
                         f"{loss:.4f}", over, last])
    if not rows:
        return Part("Results", text="No run here has a trained round that was evaluated yet.")
    header = ["run", "model", "split", f"{_score(found)} (%)",
              "loss", "± over", "rounds"]
    windows = sorted({run.window for group in found for run in group.runs})
    note = (f"Means over the last {' or '.join(map(str, windows))} rounds that were evaluated, "
            "never with the untrained model of round 0. Of several seeds, the mean over them.")
    return Part("Results", [Table(header, rows, (0, 1, 2), note, labels=True)])


def what_was_run(found: Sequence[Group]) -> Part:
    """Settings that differ, and those that do not."""
    different = groups.differences(found)
    rows = [[g.label, ", ".join(str(_seed(run)) for run in g.runs),
             *(_value(values[i]) for values in different.values())] for i, g in enumerate(found)]
    table = Table(["run", "seeds", *different], rows, tuple(range(len(different) + 2)),
                  "–: has no effect there." if different else "", labels=True)
    common = {n: v for n, v in found[0].runs[0].settings.items()
              if n not in different and not groups.is_seed(n)}
    same = Table(["setting", "value"], [[n, _value(v)] for n, v in common.items()], (0, 1))
    what = "all of them" if len(found) > 1 else "the run"
    return Part("What was run", [table], folded=[(f"{len(common)} settings of {what}", same)])


def scores(found: Sequence[Group]) -> Part:
    """Score and loss by round, of every split."""
    models, score = _models(found), _score(found)
    of = lambda split, name: lambda g: [
        {"split": s, "model": m, "name": name} for m, s in metrics.evaluated(g.runs[0].records)
        if s == split
    ]
    made = [
        charts.by_round(found, f"{title.capitalize()}, {split} examples", select=of(split, name),
                        scale=scale, dashes=models, y=y)
        for name, title, scale, y in ((score, score, 100, f"{score} (%)"), ("loss", "loss", 1, ""))
        for split in _splits(found)
    ]
    lines = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "dash and dot"}
    said = ", ".join(f"{lines[charts.dash_of(models, m)]}: {m}" for m in models)
    return Part("Curves", charts=_there(made), text=f"Lines are {said}." if models[1:] else "")


def costs(found: Sequence[Group]) -> Part:
    """The score against bytes, FLOPs, simulated and real seconds."""
    split = "test" if "test" in _splits(found) else next(iter(_splits(found)), "test")
    score = _score(found)
    models = _models(found)
    of = lambda g: [{"split": split, "model": m} for m, s in metrics.evaluated(g.runs[0].records)
                    if s == split]
    titles = {"bytes": "by what was sent", "flops": "by arithmetic",
              "seconds": "by simulated time", "wall": "by time of training here"}
    made = [
        charts.by_round(found, f"{score.capitalize()} {title}", select=of, axis=axis, scale=100,
                        dashes=models, y=f"{score} (%)")
        for axis, title in titles.items()
    ]
    rows = []
    for group in found:
        records = group.runs[0].records
        down, up = metrics.bytes_per_client(records)
        total = lambda name, records=records: list(metrics.running(records, name).values() or [0])
        sums = {name: total(name)[-1] for name in titles}
        rows.append([
            group.label, tables.bytes_of(down), tables.bytes_of(up),
            tables.bytes_of(sums["bytes"]), f"{sums['flops']:.3g}" if sums["flops"] else "–",
            f"{sums['seconds']:.4g}" if sums["seconds"] else "–", f"{sums['wall']:.4g}",
        ])
    header = ["run", "down", "up", "in all", "FLOPs", "simulated s", "s of training"]
    note = ("Down and up: of a client in a round. Seconds of training have those of compilation. Of "
            "several seeds, the first's.")
    return Part("What it took", [Table(header, rows, note=note, labels=True)], _there(made))


def training(found: Sequence[Group]) -> Part:
    """What clients saw while training: drift, norm, loss, and what else the method measured."""
    names = dict.fromkeys(
        n for g in found for r in g.runs[0].records[-50:] if r["split"] == "cohort"
        for n, v in r.items() if n not in _KNOWN and isinstance(v, int | float)
    )
    score = _score(found)
    titles = {"drift": "Client drift ‖w_k − w‖", "norm": "Norm of the model ‖w‖",
              "loss": "Loss on clients' own data while training",
              **{n: n for n in names if n != score and not n.startswith(("iou.", "fairness."))}}
    of = lambda name: lambda g: [{"split": "cohort", "model": "local", "name": name}]
    made = [charts.by_round(found, title, select=of(name), smooth=True, y=name)
            for name, title in titles.items()]
    text = "Running means over nine rounds." if any(made) else ""
    return Part("While training", charts=_there(made), text=text)


def classes(found: Sequence[Group]) -> Part:
    """Of segmentation: the score of each class."""
    split = "test" if "test" in _splits(found) else next(iter(_splits(found)), "test")
    values: list[dict[str, float] | None] = []
    for group in found:
        evaluated = [r for r in group.runs[0].records if (r["split"], r["model"]) ==
                     (split, "global") and r["round"]]
        names = [n for n in (evaluated[-1] if evaluated else {}) if n.startswith("iou.")]
        values.append({
            n.removeprefix("iou."): 100 * group.window_mean(split=split, name=n)[0] for n in names
        } or None)
    made = charts.bars(found, f"{split} IoU by class", values, "IoU (%)")
    return Part("Classes", charts=_there([made]))


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
                                        dashes=_models(found), y="score (%)"))
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
    return Part("Clients", table, _there([*made, *maps]))


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
        try:
            counts = _class_counts(folder, partition, data_dir)
        except errors.UsageError as e:
            counts, text = None, f"Classes are not shown: {str(e).splitlines()[0]}"
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


def _class_counts(
    folder: RunFolder, partition: Partition, data_dir: str | None
) -> np.ndarray | None:
    config = folder.config()
    source = data_lib.SOURCES.find(config.data.name)
    options = config_lib.options_of(config, "data", source)
    dataset = data_lib.load(config.data.name, data_dir, **options)
    labels = dataset.train.labels
    if dataset.task != "classification" or np.ndim(labels) != 1:
        return None
    partition.check(len(labels))
    return data_lib.class_counts(partition, labels, dataset.num_classes)


def flatness(found: Sequence[Group]) -> Part:
    """Eigenvalues of the Hessian: of trained models, and along the rounds."""
    rows, made = measured.spectra(found)
    table = [Table(list(rows[0]), [list(r.values()) for r in rows], (0, 1, 3))] if rows else []
    models = _models(found)
    of = lambda g: [
        {"split": s, "model": m, "name": "lambda_1"} for m, s in dict.fromkeys(
            (r["model"], r["split"]) for r in g.runs[0].records if "lambda_1" in r)
        if not m.startswith("client ")
    ]
    by_round = charts.by_round(found, "λ₁ along the rounds", select=of, dashes=models, y="λ₁",
                               note="The largest Hessian eigenvalue on all clients' data.")
    return Part("Flatness", table, _there([by_round, *made]))


def landscapes(found: Sequence[Group]) -> Part:
    """The loss around and between models."""
    turned = measured.surfaces(found)
    text = "Surfaces turn with the mouse or a finger; one scale for all of them." if turned else ""
    return Part("Loss landscapes", charts=[*turned, *measured.planes(found)], text=text)


def pictures(found: Sequence[Group]) -> Part:
    """Masks, recovered images, whatever a command drew."""
    return Part("Pictures", images=list(measured.images(found)))


def phases(found: Sequence[Group]) -> Part:
    """What each phase reached."""
    rows = []
    for group in found:
        for folder in group.runs[0].folder.phases:
            own = metrics.read(folder.metrics_file)
            values = metrics.curve(own)[1]
            rows.append([
                group.label, folder.path.name, str(max((r["round"] for r in own), default=0)),
                f"{100 * values[-1]:.2f}" if len(values) else "–",
                tables.bytes_of(metrics.bytes_until(own)),
            ])
    header = ["run", "phase", "rounds", "test score at its end (%)", "sent"]
    return Part("Phases", [Table(header, rows, (0, 1), labels=True)] if rows else [])


def repeating(found: Sequence[Group]) -> Part:
    """The command that repeats each run, and with what it was trained."""
    rows, environments = [], {}
    for group in found:
        for run in group.runs:
            recorded = environment.read(run.folder.environment_file)
            init = (run.folder.phases or [run.folder])[0].init()
            again = ["fedjax-flat", "train", "--config", run.path, "--run", f"{run.path}_again"]
            again += ["--init", str(init)] if init else []
            again += ["--data", "DATA"] if run.settings["data.name"] != "digits" else []
            rows.append([group.label, str(_seed(run)), run.path, shlex.join(again)])
            listed = recorded.get("commands", [])
            about = {
                **{f"{n} version": v for n, v in recorded.get("versions", {}).items()},
                **{n: recorded[n] for n in ("devices", "kernels", "xla_flags", "git", "partition")
                   if recorded.get(n)},
                **{f"command, {c.get('time', '')}": c.get("command", "") for c in listed},
            }
            environments[f"{group.label}, seed {_seed(run)}: {run.path}"] = Table(
                ["", ""], [[n, _value(v)] for n, v in about.items()], (0, 1))
    table = Table(["run", "seed", "folder", "to repeat it"], rows, (0, 1, 2, 3), labels=True)
    return Part("To repeat it", [table], folded=[(n, t) for n, t in environments.items() if t.rows])


def _score(found: Sequence[Group]) -> str:
    return metrics.score_name(found[0].runs[0].records)


def _models(found: Sequence[Group]) -> list[str]:
    models = dict.fromkeys(m for g in found for m, _ in metrics.evaluated(g.runs[0].records))
    return list(models) or ["global"]


def _splits(found: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(s for g in found for _, s in metrics.evaluated(g.runs[0].records)))


def _there(made: Sequence[Chart | None]) -> list[Chart]:
    return [chart for chart in made if chart]


def _seed(run: groups.Run) -> Any:
    return run.settings.get("seed", 0)


def _value(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value)) if value else "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


