"""What long runs of FedAvg, FedSAM and FedASAM come to, and how flat: tables and figures.

Train first; every command goes on where it was stopped. Checkpoints are kept every 100 rounds, for
lambda_1 by round and for SWA, which branches off at the last one before 75 % of the rounds:

    C=configs/fedsam.py:cifar10,alpha=0.05,cohort=5,released
    L="--config.rounds=3000 --config.checkpoint.keep=1000 --data FOLDER"
    for m in fedavg fedasam fedsam; do
        fedjax-flat train --config $C,method=$m     $L --run runs/$m
        fedjax-flat train --config $C,method=$m,swa $L --run runs/${m}_swa --from runs/$m@2200
    done

Then, with some or all of them, in the order in which they shall stand:

    python benchmarks/flat_tables.py runs/fedavg runs/fedavg_swa ... --out runs/flat --data FOLDER
    python benchmarks/flat_tables.py runs/fedavg runs/fedavg_swa ... --keep docs/results

The first writes a table (table.txt, table.json) and figures into the folder --out, piece by piece;
what is there already, of the same round and examples, is not computed again, and --only PIECE makes
one piece alone. The second copies each run's config.json and metrics.jsonl to docs/results/NAME/.

    accuracy     test accuracy and loss, mean over the last rounds; the curves
    curvature    lambda_1, lambda_1 / lambda_5 and trace on the first 1,000 train images
    robustness   accuracy on CIFAR-10-C, severity 5; bars
    clients      accuracy on each client's own examples, sorted
    path         lambda_1 of the global models at every 100th round, from the kept checkpoints
    surfaces     the loss around all models, along the same random directions
    plane        the loss on the plane through the first three runs without SWA

Of a run with SWA, the model is the averaged one; of others, the global one.
"""

import argparse
import functools
import json
import math
import pathlib
import shutil
from typing import NamedTuple

import numpy as np

import fedjax_flat as ff
from fedjax_flat.experiment import usage
from fedjax_flat.landscape import Grid
from fedjax_flat.report import analysis, figures, pictures, robustness, tables
from fedjax_flat.run import evaluation, flatness, metrics
from fedjax_flat.run.run_folder import RunFolder, write_atomically


class Run(NamedTuple):
    """A run folder, and which of its models is looked at."""

    folder: RunFolder
    name: str
    model: str
    round: int
    window: int
    data: str

    @property
    def path(self) -> str:
        return str(self.folder.path)


def described(path) -> Run:
    """The run in a folder."""
    folder = RunFolder(path)
    config = folder.config()
    if not folder.saved_rounds:
        raise ff.UsageError(f"{path} has no checkpoint yet: train it first.")
    done = folder.saved_rounds[-1]
    if done < config.rounds:
        print(f"{path}: round {done} of {config.rounds}, not finished")
    model = "swa" if "swa" in usage.averages(config) else "global"
    return Run(folder, folder.path.name, model, done, config.eval.window, config.data.name)


def kept(path: pathlib.Path, of: dict, make):
    """make(), or what it returned before for the same `of`."""
    if path.exists() and (found := json.loads(path.read_text()))["of"] == of:
        return found["result"]
    result = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"of": of, "result": result}, indent=2) + "\n")
    return result


def per_run(piece: str, args, runs: list[Run], make, **of) -> dict[str, dict]:
    """{name: make(run)}, one file each."""
    return {
        run.name: kept(
            args.out / piece / f"{run.name}.json",
            {"run": run.name, "model": run.model, "round": run.round, **of},
            functools.partial(make, run),
        )
        for run in runs
    }


def accuracy(args, runs: list[Run]) -> dict[str, dict]:
    """Means over the last rounds."""
    rows, curves = {}, {}
    for run in runs:
        records = metrics.read(run.folder.metrics_file)
        mean, deviation, count = metrics.window_mean(records, run.window, model=run.model)
        loss = metrics.window_mean(records, run.window, model=run.model, name="loss")[0]
        rows[run.name] = {"rounds": run.round, "accuracy": mean, "deviation": deviation,
                          "loss": loss, "rounds averaged": count}
        curves[run.name] = [[r for r in records if r["model"] in (run.model, "local")]]
    figures.score_curves(curves, args.out / "accuracy.png")
    return rows


def curvature(args, runs: list[Run]) -> dict[str, dict]:
    """The largest eigenvalues and the trace."""

    def make(run):
        found = analysis.spectrum(
            run.path, top=5, examples=args.examples, model=run.model, trace_probes=20,
            data_dir=args.data,
        )
        names = ("lambda_1", "lambda_5", "lambda_1/lambda_5", "residual_1", "converged", "trace",
                 "trace_standard_error")
        return {name: found[name] for name in names} | {"train loss": found["loss"]}

    return per_run("curvature", args, runs, make, examples=args.examples)


def corruptions(args, runs: list[Run]) -> dict[str, dict]:
    """Accuracy under every corruption; only CIFAR has them."""
    runs = [run for run in runs if run.data in ("cifar10", "cifar100")]

    def make(run):
        found = robustness.robustness(
            [run.path], model=run.model, data_dir=args.data, cache=args.cache
        )
        return found["accuracy"][run.name]

    found = per_run("robustness", args, runs, make, severity=5)
    if found:
        robustness.draw(found, args.out / "robustness.png", severity=5)
    return {name: {"corrupted": each["mean"]} for name, each in found.items()}


def clients(args, runs: list[Run]) -> dict[str, dict]:
    """Accuracy on what each client trains on."""

    def make(run):
        trained = ff.load_run(run.path, args.data)
        built, model = trained.experiment, trained.model(run.model)
        sums = built.over_clients(functools.partial(built.evaluate_clients, model, ()), "own")
        whole, each = evaluation.summary(built.task, sums)
        return {k: v for k, v in whole.items() if "." in k} | {"scores": each["score"]}

    found = per_run("clients", args, runs, make)
    figure, (axes,) = pictures.new_figure(1, 1, (5, 3.4))
    for name, each in found.items():
        axes.plot(100 * np.sort([s for s in each["scores"] if s is not None]), label=name)
    axes.set(xlabel="clients, worst first", ylabel="accuracy on own examples (%)")
    axes.legend(frameon=False)
    pictures.save(figure, args.out / "clients.png")
    return {name: {k: v for k, v in each.items() if k != "scores"} for name, each in found.items()}


def path(args, runs: list[Run]) -> dict[str, dict]:
    """lambda_1 along training; a file is added to, round by round."""
    figure, (axes,) = pictures.new_figure(1, 1, (5, 3.4))
    for run in (r for r in runs if r.model == "global"):
        file = args.out / "path" / f"{run.name}_train{args.examples}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        there = {r["round"] for r in metrics.read(file)}
        wanted = [n for n in run.folder.saved_rounds if n % args.every == 0 and n not in there]
        trained = ff.load_run(run.path, args.data) if wanted else None
        for n in wanted:
            params, stats = trained.at(n).model()
            loss = analysis.loss_of(trained, "train", args.examples, stats=stats)
            found = flatness.of_model(loss, params) | {"loss": float(loss.value(params))}
            with open(file, "a") as lines:
                record = {"round": n, "split": "train", "model": "global"} | found
                lines.write(json.dumps(record) + "\n")
        points = sorted((r["round"], r["lambda_1"]) for r in metrics.read(file))
        axes.semilogy(*zip(*points, strict=True), label=run.name)
    axes.set(xlabel="round", ylabel=r"$\lambda_1$")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    pictures.save(figure, args.out / "path.png")
    return {}


def surfaces(args, runs: list[Run]) -> dict[str, dict]:
    """The loss around every model."""

    def make(run):
        made = analysis.surfaces(
            [run.path], points=args.points, examples=args.examples, model=run.model,
            data_dir=args.data,
        )
        with np.load(pathlib.Path(made[0]).with_suffix(".npz"), allow_pickle=False) as saved:
            return {name: saved[name].tolist() for name in Grid._fields}

    found = per_run("surfaces", args, runs, make, examples=args.examples, points=args.points)
    grids = {name: Grid(*map(np.array, each.values())) for name, each in found.items()}
    rows = 1 if len(grids) <= 4 else 2
    columns = math.ceil(len(grids) / rows)
    size = (4.2 * columns, 3.8 * rows)
    figure, axes = pictures.new_figure(rows, columns, size, projection="3d")
    for unused in axes[len(grids) :]:
        unused.set_axis_off()
    pictures.draw_surfaces(figure, axes[: len(grids)], grids)
    pictures.save(figure, args.out / "surfaces.png")
    return {}


def plane(args, runs: list[Run]) -> dict[str, dict]:
    """The plane through three models."""
    three = [run for run in runs if run.model == "global"][:3]
    if len(three) < 3:
        print(f"plane: {len(three)} runs without SWA, expected three; left out")
        return {}
    of = {"runs": [[run.name, run.round] for run in three], "examples": args.examples,
          "points": args.points}

    def make():
        (made,) = analysis.plane(
            [run.path for run in three], points=args.points, examples=args.examples,
            data_dir=args.data,
        )
        return shutil.copy(made, args.out / "plane.png").name

    kept(args.out / "plane.json", of, make)
    return {}


PIECES = {
    "accuracy": accuracy, "curvature": curvature, "robustness": corruptions, "clients": clients,
    "path": path, "surfaces": surfaces, "plane": plane,
}
COLUMNS = {  # of the table: (name, how it is shown)
    "rounds": ("rounds", str), "accuracy": ("accuracy (%)", lambda a: f"{100 * a:.2f}"),
    "deviation": ("±", lambda a: f"{100 * a:.2f}"), "loss": ("loss", "{:.3f}".format),
    "lambda_1": ("lambda_1", "{:.4g}".format),
    "lambda_1/lambda_5": ("/ lambda_5", "{:.3f}".format), "trace": ("trace", "{:.4g}".format),
    "corrupted": ("corrupted (%)", lambda a: f"{100 * a:.2f}"),
    "fairness.p10": ("clients, p10 (%)", lambda a: f"{100 * a:.2f}"),
    "fairness.median": ("median (%)", lambda a: f"{100 * a:.2f}"),
}


def report(out: pathlib.Path, found: dict[str, dict]) -> str:
    """table.json, table.txt."""
    write_atomically(out / "table.json", json.dumps(found, indent=2) + "\n")
    columns = [c for c in COLUMNS if any(c in row for row in found.values())]
    rows = [
        [name, *(COLUMNS[c][1](row[c]) if c in row else "" for c in columns)]
        for name, row in found.items()
    ]
    text = tables.table(["run", *(COLUMNS[c][0] for c in columns)], rows)
    write_atomically(out / "table.txt", text + "\n")
    return text


def keep(runs: list[Run], results: pathlib.Path) -> None:
    """Copies what is small of each run."""
    for run in runs:
        target = results / run.name
        target.mkdir(parents=True, exist_ok=True)
        for file in (run.folder.config_file, run.folder.metrics_file):
            shutil.copy(file, target / file.name)
        print(f"kept: {target}")


def main(argv=None) -> None:
    """Makes what is missing and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the table and the figures")
    parser.add_argument("--data", help="data folder (default: $FEDJAX_FLAT_DATA)")
    parser.add_argument("--cache", help="where corrupted images are kept that are made here "
                        "(default: the data folder)")
    parser.add_argument("--keep", type=pathlib.Path, metavar="FOLDER", help="copy configs, metrics")
    parser.add_argument("--only", action="append", choices=list(PIECES), metavar="PIECE")
    parser.add_argument("--examples", type=int, default=1000, help="train images of a Hessian")
    parser.add_argument("--every", type=int, default=100, help="rounds between points of the path")
    parser.add_argument("--points", type=int, default=21, help="of a surface, per axis")
    args = parser.parse_args(argv)
    runs = [described(run) for run in args.runs]
    if len({run.name for run in runs}) < len(runs):
        raise SystemExit("two runs of one name: their results would have one file.")
    if args.keep:
        keep(runs, args.keep)
    if not args.out:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    table = args.out / "table.json"
    known = json.loads(table.read_text()) if args.only and table.exists() else {}
    found = {run.name: known.get(run.name, {}) for run in runs}
    for piece in args.only or PIECES:
        for name, row in PIECES[piece](args, runs).items():
            found[name] |= row
    print(report(args.out, found))


if __name__ == "__main__":
    main()
