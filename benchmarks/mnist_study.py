"""The MNIST study of document D whole: its tables, conflicts and sharpness, beside its figures.

command: python benchmarks/mnist_study.py --data FOLDER --out FOLDER
About an hour and a half on two quiet cores; runs that are there already are not made again. Writes
study.json and study.png to the folder of the runs.
"""

import argparse
import json
import pathlib

import jax
import numpy as np

import fedjax_flat as ff
from fedjax_flat import curvature
from fedjax_flat.config_files import load_config
from fedjax_flat.report import pictures, tables
from fedjax_flat.run import metrics

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "mnist.py"
# The document's accuracies (%) after rounds 1 to 3.
DOCUMENT = {
    ("fedavg", 2.0): (37.81, 56.25, 59.13), ("fedavg", 0.5): (9.56, 20.08, 60.23),
    ("fedavg", 0.1): (15.43, 29.68, 38.77), ("fedavg", 0.0): (12.97, 11.43, 11.07),
    ("scaffold", 2.0): (54.09, 77.18, 85.38), ("scaffold", 0.5): (32.48, 64.88, 81.55),
    ("scaffold", 0.1): (39.10, 62.51, 64.87), ("fedgh", 2.0): (31.61, 59.80, 69.53),
    ("fedgh", 0.5): (22.53, 44.84, 67.47), ("fedgh", 0.1): (18.34, 32.26, 43.25),
    ("fedsam", 2.0): (35.70, 56.64, 66.38), ("fedsam", 0.5): (17.22, 54.90, 65.35),
    ("fedsam", 0.1): (31.55, 52.38, 60.99),
}
CELLS = sorted(DOCUMENT, key=lambda cell: (2.0, 0.1, 0.5, 0.0).index(cell[1]))
SWEEP = (0.0025, 0.005, 0.0075)  # rho of FedSAM at alpha 0.1; 0.005 is the document's best


def trained(out, data, name: str, options: str, *overrides: str) -> list[dict]:
    """The records of a run, which is made if it is not there."""
    folder = out / name
    wanted = [f"--config.{o}" for o in ("checkpoint.keep=3", *overrides)]
    config = load_config(f"{CONFIG}:{options}", wanted, None)
    ff.train(config, folder, data_dir=data)
    return metrics.read(folder / "metrics.jsonl")


def sharpness(run: pathlib.Path, data, rho: float = 0.05, examples: int = 2000) -> list[dict]:
    """The document's three measures of the global model after each round."""
    found = []
    for round in (1, 2, 3):
        at = ff.load_run(run, data, round=round)
        params, stats = at.model()
        loss = curvature.of_examples(
            at.experiment.task, at.experiment.train_examples, stats=stats, limit=examples
        )
        operator, key = curvature.flat_hessian(loss, params), jax.random.key(0)
        found.append({
            "first_order": curvature.sharpness.first_order(loss, params, rho),
            "random_direction": curvature.sharpness.random_direction(loss, params, rho, key=key),
            "trace": curvature.trace(operator, key=key, probes=20)[0],
        })
    return found


def gradient_descent(out, data) -> dict[str, float]:
    """Task 1: how far FedSGD is from full-batch gradient descent on all data, after 20 rounds."""
    common = ("rounds=20", "eval.every=20", "eval.clients=False", "server.learning_rate=0.1")
    runs = {
        "gd": ("partition.clients=1", "cohort.size=1"),
        "fedsgd": (),
        "fedsgd_uniform": ("algorithm.weighting=uniform",),
    }
    models = {}
    for name, changes in runs.items():
        trained(out, data, name, "fedsgd,alpha=0.8", *common, *changes)
        models[name] = ff.load_run(out / name, data).model().params
    flatten = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
    start = flatten(ff.load_run(out / "gd", data).experiment.init().server.model.params)
    moved = flatten(models["gd"]) - start
    away = lambda name: float(np.linalg.norm(flatten(models[name]) - start - moved)
                              / np.linalg.norm(moved))
    return {"weighted": away("fedsgd"), "uniform": away("fedsgd_uniform")}


def accuracies(records) -> list[float]:
    """Test accuracy (%) after each round."""
    rounds, values = metrics.curve(records, split="test", model="global", name="accuracy")
    return [round(100 * float(v), 2) for v in values[rounds > 0]]


def conflicts(records) -> dict[str, list[int]]:
    """Over all layers, by round: before and after harmonisation."""
    rows = [r for r in records if r["split"] == "cohort"]
    total = lambda r, when: int(sum(v for k, v in r.items() if k.startswith(f"conflicts_{when}")))
    return {when: [total(r, when) for r in rows] for when in ("before", "after")}


def draw(study: dict, path: pathlib.Path) -> None:
    """Accuracy by round, conflicts by alpha, sharpness by round."""
    figure, axes = pictures.new_figure(1, 3, (13, 3.6))
    for i, method in enumerate(("fedavg", "scaffold", "fedgh", "fedsam")):
        for style, alpha in zip(("-", "--", ":"), (2.0, 0.5, 0.1), strict=True):
            values = study["accuracy"].get(f"{method} alpha {alpha:g}")
            if values:
                axes[0].plot((1, 2, 3), values, style, color=f"C{i}", marker="o", markersize=3,
                             label=f"{method} {alpha:g}")
    axes[0].set(xlabel="round", ylabel="test accuracy (%)", xticks=(1, 2, 3))
    axes[0].legend(frameon=False, fontsize=6, ncols=2)
    for i, (name, found) in enumerate(study["conflicts"].items()):
        axes[1].plot((1, 2, 3), found["before"], "-o", color=f"C{i}", markersize=3, label=name)
        axes[1].plot((1, 2, 3), found["after"], ":o", color=f"C{i}", markersize=3)
    axes[1].set(xlabel="round", ylabel="conflicts (dotted: after)", xticks=(1, 2, 3))
    axes[1].legend(frameon=False, fontsize=7)
    for i, (name, found) in enumerate(study["sharpness"].items()):
        axes[2].semilogy((1, 2, 3), [f["trace"] for f in found], "-o", color=f"C{i}", markersize=3,
                         label=name)
    axes[2].set(xlabel="round", ylabel="trace of the Hessian", xticks=(1, 2, 3))
    axes[2].legend(frameon=False, fontsize=6)
    pictures.save(figure, path)


def main():
    """Runs what is missing, prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--sweep", action="store_true", help="FedSAM's rho at alpha 0.1 as well")
    parser.add_argument("--alpha", type=float, nargs="*", help="only these; 0 is one class each")
    args = parser.parse_args()
    out, data = args.out, args.data
    out.mkdir(parents=True, exist_ok=True)
    study: dict = {"accuracy": {}, "conflicts": {}, "sharpness": {}, "fairness": {}}
    study["fedsgd"] = gradient_descent(out, data)
    print(f"FedSGD from gradient descent, of its way: {study['fedsgd']}")
    rows = []
    for method, alpha in [c for c in CELLS if args.alpha is None or c[1] in args.alpha]:
        name = f"{method} alpha {alpha:g}"
        folder = name.replace(" ", "_")
        records = trained(out, data, folder, f"{method},alpha={alpha:g}")
        study["accuracy"][name] = accuracies(records)
        last = [r for r in records if r["split"] == "own"][-1]
        study["fairness"][name] = {k: v for k, v in last.items() if k.startswith("fairness.")}
        if method == "fedgh":
            study["conflicts"][name] = conflicts(records)
        if method in ("fedavg", "fedsam") and alpha:
            study["sharpness"][name] = sharpness(out / folder, data)
        shown = lambda values: "  ".join(f"{v:5.2f}" for v in values)
        rows.append([name, shown(study["accuracy"][name]), shown(DOCUMENT[method, alpha])])
        print(tables.table(["rounds 1, 2, 3", "ours (%)", "document (%)"], rows))
        (out / "study.json").write_text(json.dumps(study, indent=1) + "\n")
    for rho in SWEEP if args.sweep else ():
        records = trained(out, data, f"fedsam_rho_{rho}", f"fedsam,alpha=0.1,rho={rho}")
        study["accuracy"][f"fedsam alpha 0.1 rho {rho}"] = accuracies(records)
        (out / "study.json").write_text(json.dumps(study, indent=1) + "\n")
    draw(study, out / "study.png")
    print(json.dumps(study, indent=1))


if __name__ == "__main__":
    main()
