"""Parts of the report page about runs: results, settings, curves, costs, flatness, how to repeat.

What a part has nothing to show of, it leaves out.
"""

import shlex
from collections.abc import Sequence

from fedjax_flat import errors
from fedjax_flat.report import charts, groups, measured, parts, tables
from fedjax_flat.report.groups import Group
from fedjax_flat.report.parts import Part, Table
from fedjax_flat.run import environment, metrics

# Of the cohort's records, what has a chart of its own, or none.
_KNOWN = {"round", "split", "model", "loss", "drift", "norm", "clients", "examples",
          "examples_per_s", "bytes_down", "bytes_up", "flops", "phase", "accuracy", "seconds"}


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
    header = ["run", "model", "split", f"{metrics.written(parts.score_of(found))} (%)",
              "loss", "± over", "rounds"]
    windows = sorted({run.window for group in found for run in group.runs})
    note = (f"Means over the last {' or '.join(map(str, windows))} rounds that were evaluated, "
            "never with the untrained model of round 0. Of several seeds, the mean over them.")
    return Part("Results", [Table(header, rows, (0, 1, 2), note, labels=True)])


def what_was_run(found: Sequence[Group]) -> Part:
    """Settings that differ, and those that do not."""
    different = groups.differences(found)
    rows = [
        [g.label, ", ".join(str(parts.seed_of(run)) for run in g.runs),
         *(parts.shown(values[i]) for values in different.values())]
        for i, g in enumerate(found)
    ]
    table = Table(["run", "seeds", *different], rows, tuple(range(len(different) + 2)),
                  "–: has no effect there." if different else "", labels=True)
    common = {n: v for n, v in found[0].runs[0].settings.items()
              if n not in different and not groups.is_seed(n)}
    same = Table(["setting", "value"], [[n, parts.shown(v)] for n, v in common.items()], (0, 1))
    what = "all of them" if len(found) > 1 else "the run"
    return Part("What was run", [table], folded=[(f"{len(common)} settings of {what}", same)])


def scores(found: Sequence[Group]) -> Part:
    """Score and loss by round, of every split."""
    models, score = parts.models_of(found), parts.score_of(found)
    of = lambda split, name: lambda g: [
        {"split": s, "model": m, "name": name} for m, s in metrics.evaluated(g.runs[0].records)
        if s == split
    ]
    made = [
        charts.by_round(found, f"{title}, {split} examples", select=of(split, name),
                        scale=scale, dashes=models, y=y)
        for name, title, scale, y in (
            (score, parts.titled(score), 100, f"{metrics.written(score)} (%)"),
            ("loss", "Loss", 1, "loss"),
        )
        for split in parts.splits_of(found)
    ]
    lines = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "dash and dot"}
    said = ", ".join(f"{lines[charts.dash_of(models, m)]}: {m}" for m in models)
    return Part("Curves", charts=parts.those(made), text=f"Lines are {said}." if models[1:] else "")


def costs(found: Sequence[Group]) -> Part:
    """The score against bytes, FLOPs, simulated and real seconds."""
    split = parts.split_of(found)
    score = parts.score_of(found)
    models = parts.models_of(found)
    of = lambda g: [{"split": split, "model": m} for m, s in metrics.evaluated(g.runs[0].records)
                    if s == split]
    titles = {"bytes": "by what was sent", "flops": "by arithmetic",
              "seconds": "by simulated time", "wall": "by time of training here"}
    made = [
        charts.by_round(found, f"{parts.titled(score)} {title}", select=of, axis=axis, scale=100,
                        dashes=models, y=f"{metrics.written(score)} (%)")
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
    note = ("Down and up: of a client in a round. Seconds of training have those of compilation. "
            "Of several seeds, the first's.")
    return Part("What it took", [Table(header, rows, note=note, labels=True)], parts.those(made))


def training(found: Sequence[Group]) -> Part:
    """What clients saw while training: drift, norm, loss, and what else the method measured."""
    names = dict.fromkeys(
        n for g in found for r in g.runs[0].records[-50:] if r["split"] == "cohort"
        for n, v in r.items() if n not in _KNOWN and isinstance(v, int | float)
    )
    score = parts.score_of(found)
    titles = {"drift": "Client drift ‖w_k − w‖", "norm": "Norm of the model ‖w‖",
              "loss": "Loss on clients' own data while training",
              **{n: n for n in names if n != score and not n.startswith(("iou.", "fairness."))}}
    of = lambda name: lambda g: [{"split": "cohort", "model": "local", "name": name}]
    made = [charts.by_round(found, title, select=of(name), smooth=True, y=name)
            for name, title in titles.items()]
    text = "Running means over nine rounds." if any(made) else ""
    return Part("While training", charts=parts.those(made), text=text)


def flatness(found: Sequence[Group]) -> Part:
    """Eigenvalues of the Hessian: of trained models, and along the rounds."""
    rows, made = measured.spectra(found)
    table = [Table(list(rows[0]), [list(r.values()) for r in rows], (0, 2, 4),
                   labels=True)] if rows else []
    models = parts.models_of(found)
    of = lambda g: [
        {"split": s, "model": m, "name": "lambda_1"} for m, s in dict.fromkeys(
            (r["model"], r["split"]) for r in g.runs[0].records if "lambda_1" in r)
        if not m.startswith("client ")
    ]
    by_round = charts.by_round(found, "λ₁ along the rounds", select=of, dashes=models, y="λ₁",
                               note="The largest Hessian eigenvalue on all clients' data.")
    return Part("Flatness", table, parts.those([by_round, *made]))


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
            rows.append([group.label, str(parts.seed_of(run)), run.path, shlex.join(again)])
            listed = recorded.get("commands", [])
            about = {
                **{f"{n} version": v for n, v in recorded.get("versions", {}).items()},
                **{n: recorded[n] for n in ("devices", "kernels", "xla_flags", "git", "partition")
                   if recorded.get(n)},
                **{f"command, {c.get('time', '')}": c.get("command", "") for c in listed},
            }
            environments[f"{group.label}, seed {parts.seed_of(run)}: {run.path}"] = Table(
                ["", ""], [[n, parts.shown(v)] for n, v in about.items()], (0, 1))
    table = Table(["run", "seed", "folder", "to repeat it"], rows, (0, 1, 2, 3), labels=True)
    return Part("To repeat it", [table], folded=[(n, t) for n, t in environments.items() if t.rows])
