"""The papers' methods on CIFAR-10 with the same cohorts, for as many rounds as there is time.

    python benchmarks/cifar10.py flat    --data FOLDER --out FOLDER [--rounds 160] [--alpha 0.05]
    python benchmarks/cifar10.py methods --data FOLDER --out FOLDER [--rounds 160] [--alpha 0.05]

flat: FedAvg, FedSAM and FedASAM, each with and without SWA, as configs/fedsam.py has them. methods:
FedAvg, FedAvgM, SCAFFOLD, FedDyn, FedDyn with SAM, FedSMOO and FedGloSS with SAM, as
configs/fedgloss.py has them. Both: the released split of alpha = 0.05 (or 0, or 100), 10 of 100
clients per round. SWA changes nothing before it starts at 75 % of the rounds, so the runs with it
branch off the ones without it (`start_from`). Stop and repeat the command as you like: it goes on,
also with more rounds (not for SWA). Prints the table of the last rounds and draws the curves; a run
that diverges is reported with its round.
"""

import argparse
import json
import pathlib
import runpy

import fedjax_flat as ff
from fedjax_flat.experiment import usage
from fedjax_flat.report import figures, tables
from fedjax_flat.run import metrics
from fedjax_flat.run.run_folder import RunFolder

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
# name of the run folder: (label, config file and its options)
FLAT = {
    "fedavg": ("FedAvg", "fedsam.py:method=fedavg"),
    "fedsam": ("FedSAM", "fedsam.py:method=fedsam"),
    "fedasam": ("FedASAM", "fedsam.py:method=fedasam"),
}
METHODS = {
    "fedavg": ("FedAvg", "fedsam.py:method=fedavg"),
    "fedavgm": ("FedAvgM", "fedsam.py:algorithm=fedavgm"),
    "scaffold": ("SCAFFOLD", "fedgloss.py:method=scaffold"),
    "feddyn": ("FedDyn", "fedgloss.py:method=feddyn"),
    "feddyn_sam": ("FedDyn with SAM", "fedgloss.py:method=feddyn_sam"),
    "fedsmoo": ("FedSMOO", "fedgloss.py:method=fedsmoo"),
    "fedgloss_sam": ("FedGloSS with SAM", "fedgloss.py:method=fedgloss_sam"),
}


def main():
    """Trains what is missing and reports."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("which", choices=["flat", "methods"])
    parser.add_argument("--data", required=True, help="folder of CIFAR-10 and fedsam-splits.npz")
    parser.add_argument("--out", required=True, help="folder for the runs")
    parser.add_argument("--rounds", type=int, default=160)
    parser.add_argument("--alpha", type=float, default=0.05, choices=[0.0, 0.05, 100.0])
    parser.add_argument("--window", type=int, default=20)
    args = parser.parse_args()
    args.out = pathlib.Path(args.out)
    runs = {}
    for folder, (label, source) in (FLAT if args.which == "flat" else METHODS).items():
        if args.which == "flat":
            runs[f"{label} + SWA"] = train_swa(args, folder, source)
        runs[label] = train(args, config(args, source), folder)
    report(args, dict(sorted(runs.items(), key=lambda run: "SWA" in run[0])))


def config(args, source, more=""):
    """A file of configs/ with its options, shorter."""
    file, options = source.split(":")
    get_config = runpy.run_path(str(CONFIGS / file))["get_config"]
    c = get_config(f"cifar10,alpha={args.alpha:g},cohort=10,released,{options}{more}")
    c.data.mean = c.data.std = ()  # of the source, for all alike
    c.rounds, c.eval.window, c.eval.every, c.checkpoint.every = args.rounds, args.window, 10, 10
    return c


def train(args, c, name, start_from=None):
    """Trains, or goes on: (records, why it ended early)."""
    try:
        result = ff.train(c, args.out / name, data_dir=args.data, start_from=start_from)
    except ff.DivergedError as error:
        print(f"{name}: {error}")
        return metrics.read(RunFolder(args.out / name).metrics_file), str(error).split(".")[0]
    if result.stopped_by:
        raise SystemExit(f"Stopped; the same command goes on. Runs: {args.out}")
    return result.records, None


def train_swa(args, name, source):
    """The run with SWA, which branches off the one without at the last checkpoint before SWA."""
    c, target = config(args, source, ",swa"), f"{name}_swa"
    if RunFolder(args.out / target).config_file.exists():
        return train(args, c, target)
    base = config(args, source)
    base.rounds, base.eval.window = (usage.swa_start(c) - 1) // 10 * 10, 1
    train(args, base, name)
    return train(args, c, target, start_from=f"{args.out / name}@{base.rounds}")


def report(args, runs):
    """Table and figure."""
    rows, curves, found = [], {}, {}
    for label, (records, why) in runs.items():
        model = "swa" if "SWA" in label else "global"
        curves[label] = [[r for r in records if r["model"] in (model, "local")]]
        if why:
            rows.append([label, why, ""])
            found[label] = {"ended": why}
            continue
        mean, deviation, _ = metrics.window_mean(records, args.window, model=model)
        loss = metrics.window_mean(records, args.window, model=model, name="loss")[0]
        rows.append([label, tables.percent(mean, deviation), f"{loss:.3f}"])
        found[label] = {"mean": mean, "deviation": deviation, "loss": loss}
    print(f"\nCIFAR-10, alpha = {args.alpha:g}, 10 of 100 clients per round; mean ± deviation over "
          f"the last {args.window} of {args.rounds} rounds\n")
    print(tables.table(["method", "test accuracy (%)", "test loss"], rows))
    (args.out / f"{args.which}.json").write_text(json.dumps(found, indent=2) + "\n")
    print(f"figure: {figures.score_curves(curves, args.out / f'{args.which}.png')}")


if __name__ == "__main__":
    main()
